"""Exact GPs with Gaussian noise, and sparse GPs with any likelihood.

A sparse GP has the posterior q(v) of the whitened inducing values v = L⁻¹u, where L Lᵀ = K_zz + jitter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from jaxtyping import Float
from linear_operator.operators import MatmulLinearOperator
from torch import Tensor
from torch.nn import Parameter

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.gp.error_law import SCALE, SCALE_POINTS
from fedgp_flower.gp.kernels import WARP, OfEach, build_kernel, is_amplitude, prior_variance, wire_name
from fedgp_flower.gp.likelihoods import build_point_likelihood, gaussian_likelihood
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky, repaired_cholesky
from fedgp_flower.gp.steps import WithSteps, are_steps
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets

G = TypeVar("G", bound="WhitenedGP")
S = TypeVar("S", bound="SparseGP")
CHUNK, ENTRIES = 4096, 2**21
"""Rows in a block of training; entries of K_zx in a block of a prediction, 16 MiB, which the allocator reuses."""
PANEL = 512
"""Columns of a triangular matrix in a block of a product."""
MANY = 4
"""Rows per inducing point from which a prediction makes a factorisation that halves the work of each row."""
DIFFERENCE = 1e-3
"""Step of θ in a central difference."""
REDUCTION_JITTER = 1e-12
"""Added to the eigenvalues of I − S, which are zero in directions without data."""
FLOAT32_JITTER = 1e-6
"""Smallest relative jitter of a kernel matrix in float32, where 1e-8 is below rounding."""
LOCATIONS, CONSTANT = "inducing.locations", "mean.constant"
LOG_NOISE, HYPER = "likelihood.log_noise", "likelihood.log_parameters"
LENGTHSCALE = 1.35
"""Initial ℓ in units of √D, unless ``model.lengthscale`` is set."""


@dataclass(frozen=True)
class WhitenedPosterior:
    """q(v) = N(mean, covariance) of the whitened inducing values v = L⁻¹u, for each of C functions if several."""

    mean: Float[Tensor, "*C M"]
    covariance: Float[Tensor, "*C M M"]

    @cached_property
    def root(self) -> Float[Tensor, "*C M M"]:
        """The lower triangular R with R Rᵀ = S."""
        return kernel_cholesky(self.covariance, variance=torch.ones(()), jitter=0.0, of="S")

    def weights(self, factor: Float[Tensor, "*K M M"]) -> Float[Tensor, "*C M"]:
        """Return L⁻ᵀm, the weights of k(Z, x) in the mean."""
        mean = self.mean.to(factor)[..., None]
        return torch.linalg.solve_triangular(factor.mT, mean, upper=True)[..., 0]

    def means(self, cross: Float[Tensor, "*K M N"]) -> Float[Tensor, "*C N"]:
        """Return aᵀm for every column a of ``cross``."""
        return (self.mean.to(cross)[..., None, :] @ cross)[..., 0, :]

    def reduction(self, factor: Float[Tensor, "*K M M"]) -> Float[Tensor, "*C M M"] | None:
        """Return the lower triangular G with aᵀ(I − S)a = |Gᵀk|² for every a = L⁻¹k; None if S exceeds the prior.

        G Gᵀ = L⁻ᵀ (I − S) L⁻¹, from I − S = C Cᵀ and the triangular factor of Cᵀ L⁻¹.
        """
        left = self.covariance.to(factor).neg()
        left.diagonal(dim1=-2, dim2=-1).add_(1 + REDUCTION_JITTER)
        left, info = torch.linalg.cholesky_ex(left)
        if bool(info.any()):
            return None
        left = torch.linalg.solve_triangular(factor.mT, left, upper=True)
        return torch.linalg.qr(left.mT, mode="r").R.mT


def squared_norms(root: Float[Tensor, "*C M M"], columns: Float[Tensor, "*K M N"]) -> Float[Tensor, "*C N"]:
    """Return |Rᵀa|² of every column a, from the lower blocks of R."""
    total = columns.new_zeros(columns.shape[-1])
    for start in range(0, columns.shape[-2], PANEL):
        total = total + (root[..., start:, start : start + PANEL].mT @ columns[..., start:, :]).square().sum(-2)
    return total


def shared_divergence(q: WhitenedPosterior, precisions: Float[Tensor, "C M M"]) -> Tensor:
    """Return KL(q ‖ prior) of C functions minus that of their differences, in nats.

    It is ½ [tr Σ S_c / C + log|Σ S_c⁻¹ / C| + C |μ̄|² − M] with ``precisions`` S_c⁻¹, since |Aᵀ S A| = |S| |Σ S_c⁻¹ / C|
    for an orthonormal basis A of the differences and S = diag(S_1, …, S_C).
    """
    count, size = q.mean.shape
    log_determinant = 2 * cholesky(precisions.mean(0), of="the mean of Λ").diagonal().log().sum()
    trace = q.covariance.diagonal(dim1=-2, dim2=-1).sum() / count
    return 0.5 * (trace + log_determinant + count * q.mean.mean(0).square().sum() - size)


def whitened(
    kzz: Float[Tensor, "*S M M"], kzx: Float[Tensor, "*S M N"], *, variance: Tensor, jitter: float, of: str = "K_zz"
) -> Float[Tensor, "*S M N"]:
    """Return W = L⁻¹ K_zx with L Lᵀ = K_zz + jitter · variance · I, the weights of f(x) on v ~ N(0, I)."""
    factor = kernel_cholesky(kzz, variance=variance, jitter=jitter, of=of)
    return torch.linalg.solve_triangular(factor, kzx, upper=False)


class WhitenedGP(ApproximateGP):
    """A zero-mean GP with inducing points; ``model(x)`` is f under its q(v), initially N(0, I)."""

    def __init__(self, kernel: Kernel, inducing_points: Rows, jitter: float) -> None:
        super(ApproximateGP, self).__init__()  # without a variational strategy
        self.covar_module = kernel
        self.inducing_points = Parameter(inducing_points.double().clone())
        self.requested_jitter = jitter
        self.posterior: WhitenedPosterior | None = None

    @property
    def ones(self) -> Tensor:
        """Return f(Z) [M] for f = 1, with 0 for each step."""
        return (~are_steps(self.inducing_points)).to(self.inducing_points)

    @property
    def jitter(self) -> float:
        """Relative jitter of K_zz; float32 needs more than float64."""
        single = self.inducing_points.dtype == torch.float32
        return max(self.requested_jitter, FLOAT32_JITTER) if single else self.requested_jitter

    def hold(self: G, posterior: WhitenedPosterior) -> G:
        """Set q(v) and switch to evaluation mode; return the model."""
        self.posterior = posterior
        return self.eval()

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: object) -> MultivariateNormal:
        """Return f(x) under q(v), with moments Wᵀm and K_xx + Wᵀ(S − I)W; its prior without q(v) or if asked for."""
        inputs = inputs if inputs.ndim > 1 else inputs[:, None]
        unconditional: MultivariateNormal = self.forward(inputs, **kwargs)
        if prior or self.posterior is None:
            return unconditional
        cross = self.project(inputs)
        excess = MatmulLinearOperator(cross.mT, self.posterior.covariance.to(cross) @ cross - cross)
        covariance = unconditional.lazy_covariance_matrix + excess
        return MultivariateNormal(unconditional.mean + self.posterior.means(cross), covariance)

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """Return the prior of f."""
        return MultivariateNormal(inputs.new_zeros(inputs.shape[:-1]), self.covar_module(inputs))

    def project(self, inputs: Tensor) -> Tensor:
        """Return the weights W = L⁻¹ K_zx [*B, M, N] of f(x) on v."""
        points, kernel = self.inducing_points.expand(*inputs.shape[:-2], -1, -1), self.covar_module
        kzz, kzx = kernel(points).to_dense(), kernel(points, inputs).to_dense()
        return whitened(kzz, kzx, variance=prior_variance(kernel, points), jitter=self.jitter)


def set_parameters(parameters: Mapping[str, Tensor], arrays: Mapping[str, Array | Tensor]) -> None:
    """Set parameters by name; a scalar may be an array of one number. Raise ProtocolError for other names or shapes."""
    if unknown := sorted(arrays.keys() - parameters.keys()):
        raise ProtocolError(f"the model has no array `{unknown[0]}`; it has {', '.join(parameters)}")
    for name, parameter in parameters.items():
        shape, found = tuple(parameter.shape), tuple(arrays[name].shape) if name in arrays else "nothing"
        if found not in (shape, shape or (1,)):
            raise ProtocolError(f"array `{name}`: expected shape {shape}, found {found}")
        parameter.data.copy_(torch.as_tensor(arrays[name]).view(shape))


class WiredModel(gpytorch.Module):
    """A kernel and a Gaussian likelihood whose log parameters have wire names, those of the messages."""

    covar_module: Kernel
    likelihood: GaussianLikelihood

    @property
    def kernel(self) -> Kernel:
        """The kernel, which GPyTorch calls ``covar_module``."""
        return self.covar_module

    @property
    def noise(self) -> Tensor:
        """The noise variance σ² of the standardised target []."""
        noise: Tensor = self.likelihood.noise.squeeze(-1)
        return noise

    @property
    def log_noise(self) -> float:
        """The log noise variance."""
        return float(self.likelihood.noise_covar.raw_noise.detach())

    def wire_parameters(self) -> dict[str, Parameter]:
        """Return the parameters by wire name, in a fixed order."""
        return {**self.wired_kernel(), LOG_NOISE: self.likelihood.noise_covar.raw_noise}

    def wired_kernel(self) -> dict[str, Parameter]:
        """Return the kernel parameters by wire name."""
        return {f"kernel.{wire_name(name)}": value for name, value in self.kernel.named_parameters()}

    def to_arrays(self) -> NamedArrays:
        """Return the current parameters by wire name, as float64 arrays."""
        return {n: p.detach().cpu().double().numpy().copy() for n, p in self.wire_parameters().items()}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Set all parameters by :func:`set_parameters`; arrays of other models are left out."""
        known = self.wire_parameters()
        set_parameters(known, {name: array for name, array in arrays.items() if name in known})


class SparseGP(WiredModel, WhitenedGP):
    """A sparse GP with Gaussian noise: kernel, noise and inducing points, on standardised data."""

    scale: Tensor | None = None
    """Coefficients b [P] of the log scale of errors; see :mod:`fedgp_flower.gp.error_law`."""

    def __init__(self, model: ModelSection, inducing_points: Tensor) -> None:
        WhitenedGP.__init__(self, build_kernel(model, inducing_points.shape[-1]), inducing_points, model.jitter)
        self.likelihood = gaussian_likelihood(model.noise)

    @classmethod
    def from_arrays(cls: type[S], model: ModelSection, arrays: Mapping[str, Array]) -> S:
        """Return the model with the parameters ``arrays``; the inverse of :meth:`to_arrays`."""
        sparse = cls(model, torch.as_tensor(arrays[LOCATIONS]))
        sparse.load(arrays)
        return sparse

    def wire_parameters(self) -> dict[str, Parameter]:
        """Return inducing points, kernel parameters and log noise by wire name."""
        return {LOCATIONS: self.inducing_points, **super().wire_parameters()}

    def factor(self) -> Tensor:
        """Return L with L Lᵀ = K_zz + jitter [M, M]; raise NumericsError if there is none."""
        kzz, variance = self.inducing_covariance()
        return kernel_cholesky(kzz, variance=variance, jitter=self.jitter)

    def inducing_covariance(self) -> tuple[Tensor, Tensor]:
        """Return K_zz [M, M], and the mean prior variance, the unit of the jitter."""
        return self.kernel(self.inducing_points).to_dense(), prior_variance(self.kernel, self.inducing_points)

    def covariances(self, inputs: Rows) -> tuple[Tensor, Tensor]:
        """Return K_zx [M, N] and k(x, x) [N]."""
        return self.kernel(self.inducing_points, inputs).to_dense(), self.kernel(inputs, diag=True)

    def predict(
        self, inputs: Rows, posterior: WhitenedPosterior, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return mean aᵀm and variance e^η (k_xx − aᵀa + aᵀSa + σ²) of a noisy observation, both [N], a = L⁻¹k_zx.

        ``factor`` is L, if known. Raise NumericsError if a variance is not positive.
        """
        mean, variance = self.marginals(inputs, posterior, factor)
        variance = variance + self.noise
        if self.scale is not None:
            variance = variance * self.log_scale(inputs, mean, self.scale).exp()
        if count := int((variance <= 0).sum()):
            raise NumericsError(f"{count} of {len(variance)} predictive variances are not positive.")
        return mean, variance

    def marginals(
        self, inputs: Rows, posterior: WhitenedPosterior, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return mean aᵀm and variance k_xx − aᵀa + aᵀSa of f, both [*C, N], a = L⁻¹k_zx, in blocks of rows."""
        factor, size = self.factor() if factor is None else factor, (*posterior.mean.shape[:-1], len(inputs))
        mean, variance = factor.new_empty(size), factor.new_empty(size)
        reduction = posterior.reduction(factor) if len(inputs) >= MANY * factor.shape[-1] else None
        weights = posterior.weights(factor) if reduction is not None else posterior.mean.to(factor)
        for rows in torch.arange(len(inputs)).split(math.ceil(ENTRIES / factor[..., 0].numel())):
            cross, prior = self.covariances(inputs[rows])
            if reduction is None:
                cross = torch.linalg.solve_triangular(factor, cross, upper=False)
                explained = cross.square().sum(-2) - squared_norms(posterior.root.to(cross), cross)  # aᵀSa = |Rᵀa|²
            else:
                explained = squared_norms(reduction, cross)
            mean[..., rows] = (weights[..., None, :] @ cross)[..., 0, :]
            variance[..., rows] = prior - explained
        return mean, variance

    def log_scale(self, inputs: Rows, mean: Targets, coefficients: Tensor) -> Tensor:
        """Return η = φᵀb [N] at predictive means μ [N], in blocks of rows."""
        blocks = zip(inputs.split(CHUNK), mean.split(CHUNK), strict=True)
        return torch.cat([self.scale_features(*block) @ coefficients.to(mean) for block in blocks])

    def scale_features(self, inputs: Rows, mean: Targets) -> Float[Tensor, "N P"]:
        """Return the features 1, μ, μ² − 1 and R⁻¹ρ(Z, x) of the log scale of errors, at predictive means μ [N].

        ρ is the prior correlation with doubled lengthscales at the first inducing points, R Rᵀ = ρ(Z, Z).
        """
        points, rows = self.inducing_points[:SCALE_POINTS] / 2, inputs / 2  # doubles the lengthscales
        tiny = torch.finfo(mean.dtype).tiny  # a linear kernel is zero at the origin
        own, new = (self.kernel(part, diag=True).clamp(min=tiny).sqrt() for part in (points, rows))
        among = self.kernel(points).to_dense() / torch.outer(own, own)
        factor = kernel_cholesky(among, variance=torch.ones(()).to(own), jitter=self.jitter, of="ρ(Z, Z)")
        cross = self.kernel(points, rows).to_dense() / torch.outer(own, new)
        whitened = torch.linalg.solve_triangular(factor, cross, upper=False)
        return torch.cat([torch.stack([torch.ones_like(mean), mean, mean.square() - 1]), whitened]).mT

    @torch.no_grad()
    def means(self, inputs: Rows, posterior: WhitenedPosterior) -> Tensor:
        """Return the means k_xz L⁻ᵀm [N], in N M operations after one solve."""
        weights = posterior.weights(self.factor())
        chunks = inputs.split(math.ceil(ENTRIES / len(weights)))
        return torch.cat([self.kernel(chunk, self.inducing_points) @ weights for chunk in chunks])


class LatentGP(SparseGP):
    """A sparse GP f = c + g with any likelihood p(y | f): a constant c [1] and R log parameters of the likelihood.

    If p(y | f) has C functions, they share inducing points and, unless the likelihood names the functions, the kernel.
    Then c is [C, 1], q(v) = ∏ N(μ_c, S_c), and moments are [C, N]. Some inducing points may stand for steps
    (:mod:`fedgp_flower.gp.steps`).
    """

    def __init__(self, model: ModelSection, inducing_points: Tensor) -> None:
        observed, num_inputs = build_point_likelihood(model.likelihood, noise=model.noise), inducing_points.shape[-1]
        stepped = bool(are_steps(inducing_points).any())

        def build() -> Kernel:
            kernel = build_kernel(model, num_inputs)
            return WithSteps(kernel, inducing_points) if stepped else kernel

        kernels = {name: build() for name in observed.functions}
        kernel = OfEach(kernels) if kernels else build()
        WhitenedGP.__init__(self, kernel, inducing_points, model.jitter)
        self.observed = observed
        self.constant = Parameter(torch.zeros(1, dtype=torch.float64))
        self.hyper = Parameter(self.observed.initial.clone())
        default, lengthscale = ModelSection(), LENGTHSCALE * math.sqrt(num_inputs)
        for name, parameter in self.kernel.named_parameters():
            if "lengthscale" in name and model.lengthscale == default.lengthscale:
                parameter.data.fill_(math.log(lengthscale))
            elif is_amplitude(name) and model.outputscale == default.outputscale:
                linear = name.endswith("variance")
                parameter.data.fill_(math.log(observed.weight_variance if linear else observed.outputscale))

    @classmethod
    def from_arrays(cls, model: ModelSection, arrays: Mapping[str, Array]) -> LatentGP:
        """Return the model with the functions and likelihood parameters of ``arrays``."""
        latent = cls(model, torch.as_tensor(arrays[LOCATIONS]))
        latent.hyper = Parameter(torch.zeros(arrays[HYPER].shape if HYPER in arrays else 0, dtype=torch.float64))
        latent.constant = Parameter(torch.zeros(arrays[CONSTANT].shape, dtype=torch.float64))
        latent.load(arrays)
        return latent

    def begin(self, target: Mapping[str, float], second_mean: float) -> LatentGP:
        """Set constant and likelihood parameters from statistics of the target and the mean of its second column."""
        start = torch.as_tensor(self.observed.start(target, second_mean), dtype=torch.float64)
        self.constant = Parameter(torch.atleast_1d(start))
        self.hyper = Parameter(self.observed.start_parameters(target).clone())
        return self

    def wire_parameters(self) -> dict[str, Parameter]:
        """Return inducing points, kernel parameters, constant and any likelihood parameters by wire name."""
        hyper = {HYPER: self.hyper} if self.hyper.numel() else {}
        return {LOCATIONS: self.inducing_points, **self.wired_kernel(), CONSTANT: self.constant, **hyper}

    def log_prior(self) -> Tensor:
        """Return the log prior: log ℓ ~ N(½ log D + ½, 1), log a ~ N(log 4, τ²), and ω ~ N(0, ½²) of a warp.

        That of steps is added. The prior keeps amplitudes a of separable classes finite; the likelihood sets τ, usually
        1. For ``linear`` a is the variance of a weight, so that k(x, x) = a |x|².
        """
        length = 0.5 * math.log(self.inducing_points.shape[-1]) + 0.5
        priors = {"lengthscale": (length, 1.0), "warp": WARP}
        total, amplitude = torch.zeros((), dtype=torch.float64), (math.log(4.0), self.observed.amplitude_spread)
        for name, parameter in self.kernel.named_parameters():
            prior = amplitude if is_amplitude(name) else priors.get(name.rpartition("raw_")[2])
            if prior is not None:
                total = total - 0.5 * ((parameter - prior[0]) / prior[1]).square().sum()
        return total + sum(part.log_prior() for part in self.kernel.modules() if isinstance(part, WithSteps))

    def nugget(self) -> Float[Tensor, "*C 1"]:
        """Return the variance that the jitter adds to f at every input, as at Z in L Lᵀ."""
        return self.jitter * prior_variance(self.kernel, self.inducing_points)[..., None]

    def moments(
        self, cross: Float[Tensor, "*K M N"], prior: Float[Tensor, "*K N"], posterior: WhitenedPosterior
    ) -> tuple[Float[Tensor, "*C N"], Float[Tensor, "*C N"], Float[Tensor, "*C M N"]]:
        """Return mean c + Wᵀμ and variance k(x, x) − |w|² + wᵀSw + nugget of f, and SW, for W = L⁻¹ k(Z, x)."""
        spread, mean = posterior.covariance.to(cross) @ cross, self.constant + posterior.means(cross)
        return mean, prior + self.nugget() + ((spread - cross) * cross).sum(-2), spread

    @torch.no_grad()
    def latent(self, inputs: Rows, posterior: WhitenedPosterior, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f, [N], or [C, N] for C functions; ``factor`` is L, if known."""
        mean, variance = self.marginals(inputs, posterior, factor)
        return (self.constant + mean).double(), (variance + self.nugget()).double()

    @torch.no_grad()
    def left_out(self, inputs: Rows, targets: Targets, posterior: WhitenedPosterior) -> Float[Tensor, "2 *C N"]:
        """Return mean and variance of f at each row given all other rows, at the same parameters.

        A row's factor in q(v) has the slope α and the curvature −β at m = E f. Without it wᵀv has the variance
        a₋ = a/(1 − βa), a = wᵀSw, and the mean changes by −α a₋ (the cavity of Opper and Winther 2000). Both are NaN
        if βa ≥ 1, as before q(v) has settled: then no Gaussian is left without the row.
        """
        found = []
        for x, y in zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True):
            cross = self.project(x)
            mean, variance, spread = self.moments(cross, self.kernel(x, diag=True), posterior)
            _, alpha, beta, _ = self.observed.slopes(y, mean, variance, self.hyper)
            known = (spread * cross).sum(-2)
            left = (known / (1 - beta * known)).where(beta * known < 1, torch.nan)
            found.append(torch.stack([mean - alpha * left, variance - known + left]))
        return torch.cat(found, -1)

    def predict(
        self, inputs: Rows, posterior: WhitenedPosterior, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return mean and variance of an observation, both [N]; for a label p and p (1 − p)."""
        return self.observed.moments(*self.latent(inputs, posterior, factor), self.hyper.detach())

    def forward(self, inputs: Rows) -> MultivariateNormal:
        """Return the prior of f with the nugget."""
        prior = super().forward(inputs)
        nugget = self.nugget().expand(*self.nugget().shape[:-1], *inputs.shape[:-1])
        return MultivariateNormal(prior.mean + self.constant, prior.lazy_covariance_matrix.add_diagonal(nugget))

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood in GPyTorch, in evaluation mode."""
        return self.observed.to_gpytorch(self.hyper.detach()).requires_grad_(False).eval()


def sparse_gp(model: ModelSection, arrays: Mapping[str, Array]) -> SparseGP:
    """Return the sparse GP of the configured likelihood with the parameters ``arrays``."""
    found = (SparseGP if model.likelihood == "gaussian" else LatentGP).from_arrays(model, arrays)
    found.scale = torch.as_tensor(arrays[SCALE]) if SCALE in arrays else None
    return found


class ExactGP(WiredModel):
    """A zero-mean GP with Gaussian noise, conditioned on a site's rows."""

    inputs: Tensor
    targets: Tensor

    def __init__(self, model: ModelSection, inputs: Rows, targets: Targets) -> None:
        super().__init__()
        self.covar_module, self.likelihood = build_kernel(model, inputs.shape[-1]), gaussian_likelihood(model.noise)
        self.register_buffer("inputs", inputs)
        self.register_buffer("targets", targets)

    def covariance(self) -> Tensor:
        """Return K_xx + σ²I [N, N]."""
        prior = self.kernel(self.inputs).to_dense()
        return prior + self.noise * torch.eye(len(prior)).to(prior)

    def factor(self, covariance: Tensor) -> Tensor:
        """Return L with L Lᵀ = K_xx + σ²I in O(N³), with jitter only if rounding makes it indefinite as σ² → 0."""
        return repaired_cholesky(covariance, of="K_xx + σ²I")

    def log_evidence(self) -> Tensor:
        """Return log N(y | 0, C) per row, C = K_xx + σ²I, in nats (Guo et al. 2022, Eq. 3).

        Its gradient is ∂/∂C = ½ (ααᵀ − C⁻¹) with α = C⁻¹y, in less than half the time of autograd.
        """
        covariance, count = self.covariance(), len(self.targets)
        with torch.no_grad():
            factor = self.factor(covariance)
            weights = torch.cholesky_solve(self.targets[:, None], factor)
            fit = self.targets @ weights[:, 0] + 2 * factor.diagonal().log().sum() + count * math.log(2 * math.pi)
            slope = (weights @ weights.mT - torch.cholesky_inverse(factor)) / 2
        return (-fit / 2 + (slope * (covariance - covariance.detach())).sum()) / count

    @torch.no_grad()
    def information(self) -> Float[Tensor, "H H"]:
        """Return the Fisher information F_ij = ½ tr(C⁻¹ ∂C/∂θ_i C⁻¹ ∂C/∂θ_j) of the log hyperparameters θ.

        It is the expected curvature of −log N(y | 0, C) (Mardia and Marshall 1984), and does not depend on targets. θ
        is in the order of the sorted wire names; ∂C/∂θ is a central difference.
        """
        factor, slopes = self.factor(self.covariance()), []
        for _, parameter in sorted(self.wire_parameters().items()):
            flat, here = parameter.data.view(-1), parameter.data.flatten().clone()
            for index in range(len(here)):
                ends = []
                for step in (DIFFERENCE, -DIFFERENCE):
                    flat[index] = here[index] + step
                    ends.append(self.covariance())
                flat[index] = here[index]
                half = torch.linalg.solve_triangular(factor, (ends[0] - ends[1]) / (2 * DIFFERENCE), upper=False)
                slopes.append(torch.linalg.solve_triangular(factor, half.mT, upper=False).flatten())
        stacked = torch.stack(slopes)
        return stacked @ stacked.mT / 2

    @torch.no_grad()
    def left_out(self) -> Tensor:
        """Return z, the error of each row predicted from all others in standard deviations, and its mean μ [2, N].

        With C = K_xx + σ²I they are z = [C⁻¹y]_n / √[C⁻¹]_nn and μ = y_n − [C⁻¹y]_n / [C⁻¹]_nn.
        """
        precision = torch.cholesky_inverse(self.factor(self.covariance()))
        weighted, own = precision @ self.targets, precision.diagonal()
        return torch.stack([weighted / own.sqrt(), self.targets - weighted / own])

    @torch.no_grad()
    def predict(self, new: Float[Tensor, "K D"]) -> tuple[Tensor, Tensor]:
        """Return mean and variance of noisy observations at new inputs, both [K] (Guo et al. 2022, Eq. 5)."""
        factor, cross = self.factor(self.covariance()), self.kernel(self.inputs, new).to_dense()
        whitened_targets = torch.linalg.solve_triangular(factor, self.targets[:, None], upper=False)[:, 0]
        cross = torch.linalg.solve_triangular(factor, cross, upper=False)
        variance = self.kernel(new, diag=True) - cross.square().sum(0) + self.noise
        return cross.mT @ whitened_targets, variance
