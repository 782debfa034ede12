"""The GPs of every site: sparse ones with any likelihood and q(v) of v = L⁻¹u, L Lᵀ = K_zz + jitter, and exact ones."""

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
from fedgp_flower.gp.kernels import OfEach, build_kernel, is_amplitude, prior_variance, wire_name
from fedgp_flower.gp.likelihoods import build_point_likelihood, gaussian_likelihood
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets

G = TypeVar("G", bound="WhitenedGP")
S = TypeVar("S", bound="SparseGP")
CHUNK, ENTRIES = 4096, 2**22
"""Rows handled at once: no array grows with N beyond M × CHUNK. A prediction takes rows until K_zx has that many
entries, which is 32 MiB: the allocator returns blocks of that size to the system, so memory stays that of a block."""
PANEL = 512
"""Columns of a triangular matrix that are multiplied at once."""
FLOAT32_JITTER = 1e-6
"""Least relative jitter of a kernel matrix in float32, where 1e-8 is below rounding."""
LOCATIONS, CONSTANT, HYPER = "inducing.locations", "mean.constant", "likelihood.log_parameters"
AMPLITUDE, REACH = 2.0, 1.35
"""Where ``model.outputscale`` and ``model.lengthscale`` keep their default: k(x, x), and ℓ in units of √D."""


@dataclass(frozen=True)
class WhitenedPosterior:
    """q(v) = N(mean, covariance) of whitened inducing values v = L⁻¹u."""

    mean: Float[Tensor, "*C M"]
    covariance: Float[Tensor, "*C M M"]
    """Of each of C functions, where there are several."""

    @cached_property
    def root(self) -> Float[Tensor, "*C M M"]:
        """R, lower triangular, R Rᵀ = S."""
        return kernel_cholesky(self.covariance, variance=torch.ones(()), jitter=0.0, of="S")

    def means(self, cross: Float[Tensor, "*K M N"]) -> Float[Tensor, "*C N"]:
        """aᵀm for every column a."""
        return (self.mean.to(cross)[..., None, :] @ cross)[..., 0, :]

    def variances(self, cross: Float[Tensor, "*K M N"]) -> Float[Tensor, "*C N"]:
        """aᵀSa = |Rᵀa|² for every column a; of R only the blocks from the diagonal down are multiplied."""
        root, total = self.root.to(cross), cross.new_zeros(cross.shape[-1])
        for start in range(0, cross.shape[-2], PANEL):
            total = total + (root[..., start:, start : start + PANEL].mT @ cross[..., start:, :]).square().sum(-2)
        return total


def shared_divergence(q: WhitenedPosterior, precisions: Float[Tensor, "C M M"]) -> Tensor:
    """By how much KL(q ‖ prior) of C functions exceeds that of their differences, in nats.

    It is ½ [tr Σ S_c / C + log|Σ S_c⁻¹ / C| + C |μ̄|² − M], since |Aᵀ S A| = |S| |Σ S_c⁻¹ / C|, A an orthonormal basis
    of differences and S = diag(S_1, …, S_C).
    """
    count, size = q.mean.shape
    log_determinant = 2 * cholesky(precisions.mean(0), of="the mean of Λ").diagonal().log().sum()
    trace = q.covariance.diagonal(dim1=-2, dim2=-1).sum() / count
    return 0.5 * (trace + log_determinant + count * q.mean.mean(0).square().sum() - size)


def whitened(
    kzz: Float[Tensor, "*S M M"], kzx: Float[Tensor, "*S M N"], *, variance: Tensor, jitter: float, of: str = "K_zz"
) -> Float[Tensor, "*S M N"]:
    """W = L⁻¹ K_zx, L Lᵀ = K_zz + jitter · variance · I: the weights f(x) has on v ~ N(0, I)."""
    factor = kernel_cholesky(kzz, variance=variance, jitter=jitter, of=of)
    return torch.linalg.solve_triangular(factor, kzx, upper=False)


class WhitenedGP(ApproximateGP):
    """A zero-mean GP with inducing points; ``model(x)`` is f under the q(v) it holds, at first N(0, I)."""

    def __init__(self, kernel: Kernel, inducing_points: Rows, jitter: float) -> None:
        super(ApproximateGP, self).__init__()  # without a variational strategy
        self.covar_module = kernel
        self.inducing_points = Parameter(inducing_points.double().clone())
        self.requested_jitter = jitter
        self.posterior: WhitenedPosterior | None = None

    @property
    def jitter(self) -> float:
        """Relative jitter of K_zz; float32 needs more than float64."""
        single = self.inducing_points.dtype == torch.float32
        return max(self.requested_jitter, FLOAT32_JITTER) if single else self.requested_jitter

    def hold(self: G, posterior: WhitenedPosterior) -> G:
        """Predict by this q(v)."""
        self.posterior = posterior
        return self.eval()

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: object) -> MultivariateNormal:
        """The function f with moments Wᵀm and K_xx + Wᵀ(S − I)W, or its prior."""
        inputs = inputs if inputs.ndim > 1 else inputs[:, None]
        known: MultivariateNormal = self.forward(inputs, **kwargs)
        if prior or self.posterior is None:
            return known
        cross = self.project(inputs)
        excess = MatmulLinearOperator(cross.mT, self.posterior.covariance.to(cross) @ cross - cross)
        return MultivariateNormal(known.mean + self.posterior.means(cross), known.lazy_covariance_matrix + excess)

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(inputs.new_zeros(inputs.shape[:-1]), self.covar_module(inputs))

    def project(self, inputs: Tensor) -> Tensor:
        """The weights W = L⁻¹ K_zx [*B, M, N] of f(x) on v."""
        points, kernel = self.inducing_points.expand(*inputs.shape[:-2], -1, -1), self.covar_module
        kzz, kzx = kernel(points).to_dense(), kernel(points, inputs).to_dense()
        return whitened(kzz, kzx, variance=prior_variance(kernel, points), jitter=self.jitter)


class WiredModel(gpytorch.Module):
    """A kernel and a Gaussian likelihood whose parameters, in log coordinates, travel under their wire names."""

    covar_module: Kernel
    likelihood: GaussianLikelihood

    @property
    def kernel(self) -> Kernel:
        """The kernel, which GPyTorch calls ``covar_module``."""
        return self.covar_module

    @property
    def noise(self) -> Tensor:
        """Noise variance σ² of the standardised target, shape []."""
        noise: Tensor = self.likelihood.noise.squeeze(-1)
        return noise

    @property
    def log_noise(self) -> float:
        """Log σ²."""
        return float(self.likelihood.noise_covar.raw_noise.detach())

    def wire_parameters(self) -> dict[str, Parameter]:
        """Every parameter by its wire name, in a fixed order."""
        return {**self.wired_kernel(), "likelihood.log_noise": self.likelihood.noise_covar.raw_noise}

    def wired_kernel(self) -> dict[str, Parameter]:
        """Those of the kernel."""
        return {f"kernel.{wire_name(name)}": value for name, value in self.kernel.named_parameters()}

    def to_arrays(self) -> NamedArrays:
        """Current parameters under their wire names, as float64 arrays."""
        return {n: p.detach().cpu().double().numpy().copy() for n, p in self.wire_parameters().items()}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Set all parameters; one without axes may also come as an array of one number."""
        for name, parameter in self.wire_parameters().items():
            shape = tuple(parameter.shape)
            if name not in arrays or arrays[name].shape not in (shape, shape or (1,)):
                found = arrays[name].shape if name in arrays else "nothing"
                raise ProtocolError(f"array `{name}`: expected shape {shape}, found {found}")
            parameter.data.copy_(torch.as_tensor(arrays[name]).view(shape))


class SparseGP(WiredModel, WhitenedGP):
    """Kernel, Gaussian noise and inducing points; parameters in log coordinates, data standardised."""

    def __init__(self, model: ModelSection, inducing_points: Tensor) -> None:
        WhitenedGP.__init__(self, build_kernel(model, inducing_points.shape[-1]), inducing_points, model.jitter)
        self.likelihood = gaussian_likelihood(model.noise)

    @classmethod
    def from_arrays(cls: type[S], model: ModelSection, arrays: Mapping[str, Array]) -> S:
        """The model that ``arrays`` describe; the inverse of :meth:`to_arrays`."""
        sparse = cls(model, torch.as_tensor(arrays[LOCATIONS]))
        sparse.load(arrays)
        return sparse

    def wire_parameters(self) -> dict[str, Parameter]:
        """The inducing points before kernel and noise."""
        return {LOCATIONS: self.inducing_points, **super().wire_parameters()}

    def factor(self) -> Tensor:
        """L with L Lᵀ = K_zz + jitter, shape [M, M]."""
        kzz, variance = self.inducing_covariance()
        return kernel_cholesky(kzz, variance=variance, jitter=self.jitter)

    def inducing_covariance(self) -> tuple[Tensor, Tensor]:
        """K_zz [M, M], and the variance that jitter is relative to."""
        return self.kernel(self.inducing_points).to_dense(), prior_variance(self.kernel, self.inducing_points)

    def covariances(self, inputs: Rows) -> tuple[Tensor, Tensor]:
        """K_zx [M, N] and k(x, x) [N]."""
        return self.kernel(self.inducing_points, inputs).to_dense(), self.kernel(inputs, diag=True)

    def predict(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean aᵀm and variance k_xx - aᵀa + aᵀSa + σ² of a noisy observation, both [N], a = L⁻¹k_zx."""
        mean, variance = self.marginals(inputs, posterior)
        variance = variance + self.noise
        if count := int((variance <= 0).sum()):
            raise NumericsError(f"{count} of {len(variance)} predictive variances are not positive.")
        return mean, variance

    def marginals(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean aᵀm and variance k_xx − aᵀa + aᵀSa, both [*C, N], a = L⁻¹k_zx, some rows at a time with one factor L."""
        factor, size = self.factor(), (*posterior.mean.shape[:-1], len(inputs))
        mean, variance = factor.new_empty(size), factor.new_empty(size)
        for rows in torch.arange(len(inputs)).split(math.ceil(ENTRIES / factor[..., 0].numel())):
            cross, prior = self.covariances(inputs[rows])
            cross = torch.linalg.solve_triangular(factor, cross, upper=False)
            mean[..., rows] = posterior.means(cross)
            variance[..., rows] = prior - cross.square().sum(-2) + posterior.variances(cross)
        return mean, variance

    @torch.no_grad()
    def means(self, inputs: Rows, posterior: WhitenedPosterior) -> Tensor:
        """The mean k_xz L⁻ᵀm alone [N]: N M operations after one solve."""
        weights = torch.linalg.solve_triangular(
            self.factor().mT, posterior.mean.to(self.inducing_points)[:, None], upper=True
        )
        chunks = inputs.split(math.ceil(ENTRIES / len(weights)))
        return torch.cat([self.kernel(chunk, self.inducing_points) @ weights for chunk in chunks])[:, 0]


class LatentGP(SparseGP):
    """f = c + g observed through p(y | f): kernel, inducing points, constant c [1], logarithms of parameters [R].

    Where p(y | f) is of C functions, these share inducing points and, unless it names them, the kernel: c is [C, 1],
    q(v) = ∏ N(μ_c, S_c), and moments are [C, N].
    """

    def __init__(self, model: ModelSection, inducing_points: Tensor) -> None:
        observed, num_inputs = build_point_likelihood(model.likelihood, noise=model.noise), inducing_points.shape[-1]
        kernels = {name: build_kernel(model, num_inputs) for name in observed.functions}
        kernel = OfEach(kernels) if kernels else build_kernel(model, num_inputs)
        WhitenedGP.__init__(self, kernel, inducing_points, model.jitter)
        self.observed = observed
        self.constant = Parameter(torch.zeros(1, dtype=torch.float64))
        self.hyper = Parameter(self.observed.initial.clone())
        usual, reach = ModelSection(), REACH * math.sqrt(num_inputs)
        for name, parameter in self.kernel.named_parameters():
            if "lengthscale" in name and model.lengthscale == usual.lengthscale:
                parameter.data.fill_(math.log(reach))
            elif is_amplitude(name) and model.outputscale == usual.outputscale:
                parameter.data.fill_(math.log(AMPLITUDE))

    @classmethod
    def from_arrays(cls, model: ModelSection, arrays: Mapping[str, Array]) -> LatentGP:
        """As usual, with as many functions and parameters of the likelihood as there are."""
        latent = cls(model, torch.as_tensor(arrays[LOCATIONS]))
        latent.hyper = Parameter(torch.zeros(arrays[HYPER].shape if HYPER in arrays else 0, dtype=torch.float64))
        latent.constant = Parameter(torch.zeros(arrays[CONSTANT].shape, dtype=torch.float64))
        latent.load(arrays)
        return latent

    def begin(self, target: Mapping[str, float], beside: float) -> LatentGP:
        """With a constant and parameters of the likelihood that suit what is known of all targets."""
        start = torch.as_tensor(self.observed.start(target, beside), dtype=torch.float64)
        self.constant = Parameter(torch.atleast_1d(start))
        self.hyper = Parameter(self.observed.start_parameters(target).clone())
        return self

    def wire_parameters(self) -> dict[str, Parameter]:
        """Inducing points, kernel, constant, and what the likelihood has."""
        hyper = {HYPER: self.hyper} if self.hyper.numel() else {}
        return {LOCATIONS: self.inducing_points, **self.wired_kernel(), CONSTANT: self.constant, **hyper}

    def log_prior(self) -> Tensor:
        """Log ℓ ~ N(½ log D + ½, 1), log a ~ N(log 4, τ²): classes may drive the amplitude a to infinity without.

        Of ``linear`` a is the variance of a weight, and k(x, x) = a |x|². τ is that of the likelihood, mostly 1.
        """
        total, reach = torch.zeros((), dtype=torch.float64), 0.5 * math.log(self.inducing_points.shape[-1]) + 0.5
        amplitude = math.log(4.0), self.observed.amplitude_spread
        for name, parameter in self.kernel.named_parameters():
            if "lengthscale" in name or is_amplitude(name):
                centre, spread = (reach, 1.0) if "lengthscale" in name else amplitude
                total = total - 0.5 * ((parameter - centre) / spread).square().sum()
        return total

    def nugget(self) -> Float[Tensor, "*C 1"]:
        """The variance that jitter adds to f: at Z in L Lᵀ, and so at every input."""
        return self.jitter * prior_variance(self.kernel, self.inducing_points)[..., None]

    def moments(
        self, cross: Float[Tensor, "*K M N"], prior: Float[Tensor, "*K N"], posterior: WhitenedPosterior
    ) -> tuple[Float[Tensor, "*C N"], Float[Tensor, "*C N"], Float[Tensor, "*C M N"]]:
        """Mean c + Wᵀμ and variance k(x, x) − |w|² + wᵀSw of f with its nugget, and SW, for W = L⁻¹ k(Z, x)."""
        spread, mean = posterior.covariance.to(cross) @ cross, self.constant + posterior.means(cross)
        return mean, prior + self.nugget() + ((spread - cross) * cross).sum(-2), spread

    @torch.no_grad()
    def latent(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, both [N], or [C, N] of each."""
        mean, variance = self.marginals(inputs, posterior)
        return (self.constant + mean).double(), (variance + self.nugget()).double()

    def predict(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, both [N]: of a label its probability p and p (1 − p)."""
        return self.observed.moments(*self.latent(inputs, posterior), self.hyper.detach())

    def forward(self, inputs: Rows) -> MultivariateNormal:
        """The prior, with the nugget."""
        prior = super().forward(inputs)
        nugget = self.nugget().expand(*self.nugget().shape[:-1], *inputs.shape[:-1])
        return MultivariateNormal(prior.mean + self.constant, prior.lazy_covariance_matrix.add_diagonal(nugget))

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood at the parameters, as one of GPyTorch in evaluation mode."""
        return self.observed.to_gpytorch(self.hyper.detach()).requires_grad_(False).eval()


def sparse_gp(model: ModelSection, arrays: Mapping[str, Array]) -> SparseGP:
    """The model that ``arrays`` describe, of the configured likelihood."""
    return (SparseGP if model.likelihood == "gaussian" else LatentGP).from_arrays(model, arrays)


class ExactGP(WiredModel):
    """Zero mean, kernel and Gaussian noise, conditioned on a site's rows."""

    inputs: Tensor
    targets: Tensor

    def __init__(self, model: ModelSection, inputs: Rows, targets: Targets) -> None:
        super().__init__()
        self.covar_module, self.likelihood = build_kernel(model, inputs.shape[-1]), gaussian_likelihood(model.noise)
        self.register_buffer("inputs", inputs)
        self.register_buffer("targets", targets)

    def covariance(self) -> Tensor:
        """K_xx + σ²I."""
        prior = self.kernel(self.inputs).to_dense()
        return prior + self.noise * torch.eye(len(prior)).to(prior)

    def factor(self, covariance: Tensor | None = None) -> Tensor:
        """L with L Lᵀ = K_xx + σ²I, without jitter; O(N³)."""
        whole = self.covariance() if covariance is None else covariance
        return cholesky(whole, of="K_xx + σ²I", hint="Raise `model.noise`.")

    def log_evidence(self) -> Tensor:
        """Log N(y | 0, C) per row, C = K_xx + σ²I, in nats (Guo et al. Eq. 3).

        Its gradient is by formula, ∂/∂C = ½ (ααᵀ − C⁻¹) with α = C⁻¹y, in less than half of autograd's time.
        """
        covariance, count = self.covariance(), len(self.targets)
        with torch.no_grad():
            factor = self.factor(covariance)
            weights = torch.cholesky_solve(self.targets[:, None], factor)
            fit = self.targets @ weights[:, 0] + 2 * factor.diagonal().log().sum() + count * math.log(2 * math.pi)
            slope = (weights @ weights.mT - torch.cholesky_inverse(factor)) / 2
        return (-fit / 2 + (slope * (covariance - covariance.detach())).sum()) / count

    @torch.no_grad()
    def predict(self, new: Float[Tensor, "K D"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of noisy observations at new inputs, both [K] (Guo et al. Eq. 5)."""
        factor, cross = self.factor(), self.kernel(self.inputs, new).to_dense()
        whitened_targets = torch.linalg.solve_triangular(factor, self.targets[:, None], upper=False)[:, 0]
        cross = torch.linalg.solve_triangular(factor, cross, upper=False)
        variance = self.kernel(new, diag=True) - cross.square().sum(0) + self.noise
        return cross.mT @ whitened_targets, variance
