"""The hierarchical variational model of a federated sparse GP: q(f, Z, β) = q(Z) q(β) p(f | u) q(u | Z, β).

q(Z) and q(β) are diagonal Gaussians (β in log coordinates) or points; q(u | Z, β) is the prior times the factors
t_k(u | Z, β) of the sites. With L Lᵀ = K_ZZ + jitter and v = L⁻¹u ~ N(0, I), factor k contributes columns C_k and
values r_k to

    B = I + Σ_k C_k C_kᵀ,   h = Σ_k C_k r_k,   q(v | Z, β) = N(B⁻¹h, B⁻¹),

so B ⪰ I. A cavity is the same sum without k: it needs no inverse of K_ZZ and no difference of precisions. All functions
are pure and batched over S samples of (Z, β).

Titsias (2009); *Federated learning of sparse Gaussian processes*, Eqs. 7, 9-12 (DPO, Eq. 12, and CPO), Section 6.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.kernels import BatchedKernel, build_kernel
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.linalg import kernel_cholesky
from fedgp_flower.methods.pvi.messages import Factors, Marginals, NaturalParameters, PseudoPoints
from fedgp_flower.options import ModelSection

ALPHA = 0.01
"""Weight of KL(q(Z) ‖ cavity): small, because Z belongs to the approximation and not to the model."""
PREDICTION_DRAWS = 100
"""Draws of (Z, β) in a prediction; the Monte Carlo error is a tenth of the standard deviation between draws."""
ROWS_AT_ONCE = 2048
SAMPLES_AT_ONCE = 10
ROUNDING = 1e-9
"""Allowed rounding error of a variance below zero, relative to the prior variance k(x, x)."""
LIKELIHOOD_NAMES = {"gaussian": ("noise sd",), "student-t": ("freedom", "scale")}
"""Names of the likelihood's entries of β, which are logarithms."""


class SparseModel:
    """Kernel and likelihood for D inputs; β holds the kernel's hyperparameters, then the likelihood's."""

    def __init__(self, section: ModelSection, num_inputs: int) -> None:
        self.kernel = BatchedKernel(build_kernel(section, num_inputs))
        self.likelihood = build_point_likelihood(section.likelihood, noise=section.noise)
        self.gaussian = section.likelihood == "gaussian"
        self.names = [*self.kernel.names, *LIKELIHOOD_NAMES.get(section.likelihood, ())]
        """Names of the entries of β, which are logarithms."""
        self.num_inputs, self.jitter = num_inputs, section.jitter

    def initial_hyper(self) -> Float[Tensor, " P"]:
        """β at the initial values of kernel and likelihood."""
        return torch.cat([self.kernel.initial(), self.likelihood.initial])

    def at_means(self, q: Marginals) -> Draws:
        """The model at the means of Z and β, as one sample."""
        return Draws(self, q.inducing.moments()[0].reshape(1, -1, self.num_inputs), q.hyper.moments()[0][None])


@dataclass(frozen=True, eq=False)
class Draws:
    """The model at S samples of (Z, β), in coordinates v = L⁻¹u with L Lᵀ = K_ZZ + jitter."""

    model: SparseModel
    inducing: Float[Tensor, "S M D"]
    hyper: Float[Tensor, "S P"]

    @property
    def kernel_hyper(self) -> Float[Tensor, "S _"]:
        """The kernel's part of β."""
        return self.hyper[:, : self.model.kernel.num_hyper]

    @property
    def likelihood_hyper(self) -> Float[Tensor, "S R"]:
        """The likelihood's part of β."""
        return self.hyper[:, self.model.kernel.num_hyper :]

    @property
    def noise(self) -> Float[Tensor, " S"]:
        """σ², the scale of tied pseudo-noise; 1 without Gaussian noise."""
        return (2.0 * self.hyper[:, -1]).exp() if self.model.gaussian else self.hyper.new_ones(len(self.hyper))

    @cached_property
    def chol(self) -> Float[Tensor, "S M M"]:
        """L, its jitter relative to the mean prior variance at Z."""
        kernel, hyper = self.model.kernel, self.kernel_hyper
        variance = kernel(hyper, self.inducing, self.inducing, diag=True).mean(-1)
        covariance = kernel(hyper, self.inducing, self.inducing)
        return kernel_cholesky(covariance, variance=variance, jitter=self.model.jitter)

    def project(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "S M N"]:
        """A = L⁻¹ K_ZX."""
        cross = self.model.kernel(self.kernel_hyper, self.inducing, inputs)
        return torch.linalg.solve_triangular(self.chol, cross, upper=False)

    def prior_variance(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "S N"]:
        """k(x, x)."""
        return self.model.kernel(self.kernel_hyper, inputs, inputs, diag=True)

    def product(self, factors: Sequence[Factor]) -> Gaussian:
        """The prior N(0, I) of v times the factors."""
        samples, size = self.inducing.shape[:2]
        eye = torch.eye(size, dtype=self.chol.dtype)
        prior = Gaussian(self.chol.new_zeros(samples, size), -0.5 * eye.expand(samples, size, size))
        return math.prod((factor.whitened(self) for factor in factors), start=prior)


def moments_at(
    q: Gaussian, projection: Float[Tensor, "S M N"], prior_variance: Float[Tensor, "S N"]
) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S N"]]:
    """Mean aᵀμ and variance k(x, x) − aᵀa + aᵀB⁻¹a of f(x), for q(v | Z, β) at S samples."""
    factor = q.factor()
    mean = torch.cholesky_solve(q.eta1[..., None], factor)
    solved = torch.linalg.solve_triangular(factor, projection, upper=False)
    return (projection * mean).sum(-2), prior_variance - projection.square().sum(-2) + solved.square().sum(-2)


# ---- Factors of u ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PseudoObservations:
    """A DPO factor: t(u | Z, β) ∝ N(K_VZ K_ZZ⁻¹ u; m, W⁻¹), or N(…; m, σ²W⁻¹) when tied, W = diag(w)."""

    inputs: Float[Tensor, "J D"]
    targets: Float[Tensor, " J"]
    root: Float[Tensor, " J"]
    """√w."""
    tied: bool = True

    def columns(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """C = A W^½ [S, M, J] and r = W^½ m [S or 1, J], each over σ when tied."""
        columns, values = draws.project(self.inputs) * self.root, (self.root * self.targets)[None]
        if not self.tied:
            return columns, values
        scale = draws.noise.rsqrt()[:, None]
        return columns * scale[..., None], values * scale

    def whitened(self, draws: Draws) -> Gaussian:
        """C Cᵀ and C r."""
        columns, values = self.columns(draws)
        return Gaussian((columns @ values.unsqueeze(-1)).squeeze(-1), -0.5 * columns @ columns.mT)

    def unwhitened(self, draws: Draws) -> GaussianFactor:
        """The same factor of u at one sample: Λ = L⁻ᵀ C Cᵀ L⁻¹ and η = L⁻ᵀ C r."""
        columns, values = self.columns(draws)
        columns = torch.linalg.solve_triangular(draws.chol[0].mT, columns[0], upper=True)
        return GaussianFactor(Gaussian(columns @ values[0], -0.5 * columns @ columns.mT))

    def free(self) -> list[Tensor]:
        """V, m and log √w."""
        return [self.inputs, self.targets, self.root.log()]

    def at(self, free: Sequence[Tensor]) -> PseudoObservations:
        """The factor at other V, m and log √w."""
        return replace(self, inputs=free[0], targets=free[1], root=free[2].exp())

    def message(self) -> Factors:
        """The factor as a message."""
        parts = (self.inputs, self.targets, self.root)
        return Factors(PseudoPoints(*(part.detach().numpy().copy() for part in parts)))


@dataclass(frozen=True, eq=False)
class GaussianFactor:
    """A CPO factor: t(u) ∝ exp(ηᵀu − ½uᵀΛu) with Λ [M, M] and η [M] independent of Z and β."""

    natural: Gaussian

    def whitened(self, draws: Draws) -> Gaussian:
        """LᵀΛL and Lᵀη."""
        precision, shift = self.natural.precision, self.natural.eta1
        return Gaussian((draws.chol.mT @ shift[:, None])[..., 0], -0.5 * draws.chol.mT @ precision @ draws.chol)

    def free(self) -> list[Tensor]:
        """R and r with R Rᵀ = Λ and R r = η; R is square, so that the rank of Λ can grow."""
        values, vectors = torch.linalg.eigh(self.natural.precision)
        root = vectors * values.clamp_min(1e-6 * values[-1].clamp_min(1.0)).sqrt()
        return [root, torch.linalg.lstsq(root, self.natural.eta1[:, None]).solution[:, 0]]

    def at(self, free: Sequence[Tensor]) -> GaussianFactor:
        """The factor at other R and r."""
        root, values = free
        return replace(self, natural=Gaussian(root @ values, -0.5 * root @ root.mT))

    def message(self) -> Factors:
        """The factor as a message."""
        return Factors(values=NaturalParameters.of(self.natural))


Factor: TypeAlias = PseudoObservations | GaussianFactor
"""A factor t(u | Z, β) that converts to v, to unconstrained parameters, and to a message."""


def factors_of(message: Factors, *, tied: bool) -> list[Factor]:
    """Convert a message to tensors; with ``tied`` the noise of pseudo-observations scales with σ²."""
    found: list[Factor] = []
    if message.points is not None:
        inputs, targets, root = map(torch.tensor, vars(message.points).values())
        found.append(PseudoObservations(inputs, targets, root, tied))
    if message.values is not None:
        found.append(GaussianFactor(message.values.gaussian))
    return found


# ---- Bounds and predictions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Data:
    """Standardised rows of one site."""

    inputs: Float[Tensor, "N D"]
    targets: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.targets)


def standard_normal(num_samples: int, size: int, generator: Generator) -> Tensor:
    """ε [S, size] ~ N(0, I); if S is even, the draws are antithetic and odd moments vanish."""
    if num_samples % 2:
        return torch.randn(num_samples, size, generator=generator, dtype=torch.float64)
    half = torch.randn(num_samples // 2, size, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def random_source(*words: object) -> Generator:
    """Generator seeded by words such as (seed, purpose, site, round)."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def prediction_draws(q: Marginals, model: SparseModel, seed: int, number: int = PREDICTION_DRAWS) -> Draws:
    """Draws of (Z, β) ~ q, a function of the seed; a single one if both are points."""
    if q.inducing.value is not None and q.hyper.value is not None:
        return model.at_means(q)
    generator, parts = random_source(seed, "prediction"), []
    for mean, variance in (q.inducing.moments(), q.hyper.moments()):
        parts.append(mean + variance.sqrt() * standard_normal(number, len(mean), generator))
    return Draws(model, parts[0].reshape(number, -1, model.num_inputs), parts[1])


def expected_fit(draws: Draws, q: Gaussian, data: Data) -> Float[Tensor, " S"]:
    """E_q log p(y | f) at every sample, in nats."""
    moments = moments_at(q, draws.project(data.inputs), draws.prior_variance(data.inputs))
    return draws.model.likelihood.expected(data.targets, *moments, draws.likelihood_hyper).sum(-1)


def local_free_energy(
    draws: Draws, others: Sequence[Factor], factor: Factor, data: Data, *, weight: float = 1.0
) -> Float[Tensor, " S"]:
    r"""Eq. 7 less its last KL: E_q log p(y_k | f) − KL(q(u | Z, β) ‖ q_\k(u | Z, β)); ``weight`` is N_k / N_batch."""
    cavity = draws.product(others)
    posterior = cavity * factor.whitened(draws)
    return weight * expected_fit(draws, posterior, data) - posterior.kl(cavity)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Predictive mixture over samples of (Z, β), in standardised units of y."""

    means: Float[Tensor, "S N"]
    """Mean of a noisy observation, per sample."""
    variances: Float[Tensor, "S N"]
    log_densities: Float[Tensor, "S _"]
    """log p(y | sample) of given targets; empty without them."""

    def mean(self) -> Float[Tensor, " N"]:
        """Mixture mean."""
        return self.means.mean(0)

    def variance(self) -> Float[Tensor, " N"]:
        """Mixture variance: mean of variances plus variance of means."""
        return self.variances.mean(0) + self.means.var(0, correction=0)

    def log_density(self) -> Float[Tensor, " N"]:
        """Log of the mixture density, log (1/S) Σ_s p(y | sample s)."""
        return torch.logsumexp(self.log_densities, 0) - math.log(len(self.means))


@torch.no_grad()
def predict(draws: Draws, factors: Sequence[Factor], inputs: Tensor, targets: Tensor | None = None) -> Mixture:
    """The predictive mixture at ``inputs`` [N, D], computed in batches of samples and rows."""
    parts = zip(draws.inducing.split(SAMPLES_AT_ONCE), draws.hyper.split(SAMPLES_AT_ONCE), strict=True)
    pieces = [_predict_some(Draws(draws.model, *part), factors, inputs, targets) for part in parts]
    return Mixture(*(torch.cat(part) for part in zip(*pieces, strict=True)))


def _predict_some(
    draws: Draws, factors: Sequence[Factor], inputs: Tensor, targets: Tensor | None
) -> tuple[Tensor, ...]:
    posterior, likelihood, hyper = draws.product(factors), draws.model.likelihood, draws.likelihood_hyper
    out: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(inputs), 1), ROWS_AT_ONCE):  # no rows give empty predictions
        rows = slice(start, start + ROWS_AT_ONCE)
        prior = draws.prior_variance(inputs[rows])
        mean, variance = moments_at(posterior, draws.project(inputs[rows]), prior)
        invalid = ~(variance >= -ROUNDING * prior)  # also NaN
        if bool(invalid.any()):
            raise NumericsError(f"{int(invalid.sum())} of {variance.numel()} variances of f are negative")
        f, densities = (mean, variance.clamp_min(0.0)), mean[:, :0]
        if targets is not None:
            densities = likelihood.log_predictive(targets[rows], *f, hyper)
        out.append((*likelihood.moments(*f, hyper), densities))
    return tuple(torch.cat(part, -1) for part in zip(*out, strict=True))
