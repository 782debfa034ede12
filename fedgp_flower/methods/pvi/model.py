"""The hierarchical variational model of a federated sparse GP: q(f, Z, β) = q(Z) q(β) p(f | u) q(u | Z, β).

q(Z) and q(β) are diagonal Gaussians (β in log coordinates) or points; q(u | Z, β) is the prior times the factors
t_k(u | Z, β) of the sites. With L Lᵀ = K_ZZ + jitter and v = L⁻¹u ~ N(0, I), factor k contributes columns C_k and
values r_k to

    B = I + Σ_k C_k C_kᵀ,   h = Σ_k C_k r_k,   q(v | Z, β) = N(B⁻¹h, B⁻¹),

so B ⪰ I always, and a cavity is the same sum without k: no inverse of K_ZZ, no difference of precisions. Everything
here is a pure function, batched over S samples of (Z, β).

References:
    Titsias (2009); Federated learning of sparse Gaussian processes, Eqs. 7, 9-12 (DPO, Eq. 12, and CPO), Section 6.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.kernels import BatchedKernel, build_kernel
from fedgp_flower.gp.likelihoods import GaussianNoise, PointLikelihood, build_point_likelihood
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.options import ModelSection

ALPHA = 0.01
"""Weight of KL(q(Z) ‖ cavity): small, because Z is a tool of the approximation and no parameter of the model."""
ROWS_AT_ONCE = 2048
SAMPLES_AT_ONCE = 10
ROUNDING = 1e-9
"""A variance that is zero may come out below it by so much, relative to the prior variance k(x, x)."""


# ---- Factors of u, and their product --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Geometry:
    """Inducing inputs Z and hyperparameters β of S samples, with L = chol(K_ZZ + jitter·variance)."""

    kernel: BatchedKernel
    inducing: Float[Tensor, "S M D"]
    hyper: Float[Tensor, "S P"]
    """Hyperparameters of the kernel only."""
    noise: Float[Tensor, " S"]
    """σ², the noise variance that tied pseudo-noise scales with."""
    chol: Float[Tensor, "S M M"]

    @classmethod
    def at(cls, kernel: BatchedKernel, inducing: Tensor, hyper: Tensor, noise: Tensor, *, jitter: float) -> Geometry:
        """Factorise K_ZZ; ``jitter`` is relative to the mean prior variance at Z."""
        variance = kernel.diagonal(hyper, inducing).mean(-1)
        chol = kernel_cholesky(kernel.matrix(hyper, inducing, inducing), variance=variance, jitter=jitter)
        return cls(kernel, inducing, hyper, noise, chol)

    def project(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "S M N"]:
        """A = L⁻¹ K_ZX."""
        cross = self.kernel.matrix(self.hyper, self.inducing, inputs)
        projection: Tensor = torch.linalg.solve_triangular(self.chol, cross, upper=False)
        return projection

    def prior_variance(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "S N"]:
        """k(x, x)."""
        return self.kernel.diagonal(self.hyper, inputs)


@dataclass(frozen=True, slots=True, eq=False)
class PseudoObservations:
    """A DPO factor: t(u | Z, β) ∝ N(K_VZ K_ZZ⁻¹ u; m, W⁻¹), or N(…; m, σ²W⁻¹) when tied, W = diag(w)."""

    inputs: Float[Tensor, "J D"]
    targets: Float[Tensor, " J"]
    root: Float[Tensor, " J"]
    """√w."""
    tied: bool = True

    def columns(self, projection: Float[Tensor, "S M J"], noise: Float[Tensor, " S"]) -> tuple[Tensor, Tensor]:
        """C = A W^½ [S, M, J] and r = W^½ m [S or 1, J], each over σ when tied."""
        columns, values = projection * self.root, (self.root * self.targets)[None]
        if not self.tied:
            return columns, values
        scale = noise.rsqrt()[:, None]
        return columns * scale[..., None], values * scale


@dataclass(frozen=True, slots=True, eq=False)
class InducingFactor:
    """A CPO factor: t(u) ∝ exp(ηᵀu − ½uᵀΛu) with the same Λ [M, M] and η [M] whatever Z and β."""

    natural: NaturalGaussian


@dataclass(frozen=True, slots=True, eq=False)
class WhitenedFactor:
    """A factor of v = L⁻¹u itself, t(v) ∝ exp(ηᵀv − ½vᵀΛv): what sites share while Z and β stay fixed."""

    natural: NaturalGaussian


Factor = PseudoObservations | InducingFactor | WhitenedFactor


@dataclass(frozen=True, slots=True)
class Natural:
    """B = I + Σ C Cᵀ [S, M, M] and h = Σ C r [S, M]: the natural parameters of q(v | Z, β)."""

    precision: Float[Tensor, "S M M"]
    shift: Float[Tensor, "S M"]

    @classmethod
    def prior(cls, geometry: Geometry) -> Natural:
        """N(0, I)."""
        samples, size = geometry.inducing.shape[:2]
        eye = torch.eye(size, dtype=geometry.chol.dtype, device=geometry.chol.device)
        return cls(eye.expand(samples, size, size), geometry.chol.new_zeros(samples, size))

    def times(self, factor: Factor, geometry: Geometry, projection: Tensor | None = None) -> Natural:
        """Multiply by a factor: of u by LᵀΛL and Lᵀη, of v as it is, pseudo-observations by their ``projection`` A."""
        if isinstance(factor, InducingFactor):
            L, precision, eta1 = geometry.chol, factor.natural.precision, factor.natural.eta1
            return Natural(self.precision + L.mT @ precision @ L, self.shift + (L.mT @ eta1))
        if isinstance(factor, WhitenedFactor):
            return Natural(self.precision + factor.natural.precision, self.shift + factor.natural.eta1)
        A = geometry.project(factor.inputs) if projection is None else projection
        columns, values = factor.columns(A, geometry.noise)
        return Natural(self.precision + columns @ columns.mT, self.shift + (columns @ values.unsqueeze(-1)).squeeze(-1))

    def density(self) -> WhitenedGaussian:
        """The normalised q(v | Z, β)."""
        chol = cholesky(self.precision, of="precision of q(v)", hint="A site's factor has negative precision.")
        mean = torch.cholesky_solve(self.shift[..., None], chol)[..., 0]
        return WhitenedGaussian(mean, chol)


@dataclass(frozen=True, slots=True)
class WhitenedGaussian:
    """q(v | Z, β) = N(μ, B⁻¹) with B = L_B L_Bᵀ, for S samples."""

    mean: Float[Tensor, "S M"]
    chol: Float[Tensor, "S M M"]

    def half_log_determinant(self) -> Float[Tensor, " S"]:
        """½ log|B|."""
        return self.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def predict(
        self, projection: Float[Tensor, "S M N"], prior_variance: Float[Tensor, "S N"]
    ) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S N"]]:
        """Mean aᵀμ and variance k(x, x) − aᵀa + aᵀB⁻¹a of f(x)."""
        mean = (projection * self.mean[..., None]).sum(-2)
        kept = torch.linalg.solve_triangular(self.chol, projection, upper=False)
        return mean, prior_variance - projection.square().sum(-2) + kept.square().sum(-2)

    def kl(self, other: WhitenedGaussian) -> Float[Tensor, " S"]:
        """KL(self ‖ other) = ½ [tr(B'B⁻¹) − M + |L_B'ᵀ(μ − μ')|²] + ½ log|B| − ½ log|B'|."""
        ratio = torch.linalg.solve_triangular(self.chol, other.chol, upper=False)
        shift = (other.chol.mT @ (self.mean - other.mean)[..., None])[..., 0]
        quadratic = ratio.square().sum((-2, -1)) - self.mean.shape[-1] + shift.square().sum(-1)
        kl: Tensor = 0.5 * quadratic + self.half_log_determinant() - other.half_log_determinant()
        return kl


def product(
    geometry: Geometry, factors: Sequence[Factor], rows: Float[Tensor, "N D"] | None = None
) -> tuple[Natural, Float[Tensor, "S M N"]]:
    """Prior times factors, and A of the rows: one triangular solve projects all pseudo-inputs and rows."""
    given = geometry.inducing.new_empty(0, geometry.inducing.shape[-1]) if rows is None else rows
    inputs = [factor.inputs for factor in factors if isinstance(factor, PseudoObservations)] + [given]
    *projections, last = geometry.project(torch.cat(inputs)).split([len(x) for x in inputs], dim=-1)
    natural, remaining = Natural.prior(geometry), iter(projections)
    for factor in factors:
        natural = natural.times(factor, geometry, next(remaining) if isinstance(factor, PseudoObservations) else None)
    return natural, last


# ---- The model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Data:
    """Standardised rows of one site."""

    inputs: Float[Tensor, "N D"]
    targets: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, rows: Tensor) -> Data:
        """The rows at these positions."""
        return Data(self.inputs[rows], self.targets[rows])


@dataclass(frozen=True, slots=True)
class Point:
    """A latent that is known, or learned as a point: no distribution, no KL."""

    value: Float[Tensor, " L"]


Latent = DiagonalGaussian | Point


@dataclass(frozen=True, slots=True)
class Latents:
    """q(Z), flattened row by row [M·D], and q(β) [P]."""

    inducing: Latent
    hyper: Latent


@dataclass(frozen=True, slots=True)
class Draws:
    """S samples of (Z, β)."""

    inducing: Float[Tensor, "S M D"]
    hyper: Float[Tensor, "S P"]


@dataclass(frozen=True, slots=True)
class SparseModel:
    """Kernel and likelihood; β holds the kernel's hyperparameters, then the likelihood's."""

    kernel: BatchedKernel
    likelihood: PointLikelihood
    num_inputs: int
    jitter: float = 1e-8

    @property
    def num_hyper(self) -> int:
        """P."""
        return self.kernel.num_hyper + self.likelihood.initial.numel()

    def initial_hyper(self) -> Float[Tensor, " P"]:
        """β at the initial values of kernel and likelihood."""
        return torch.cat([self.kernel.initial(), self.likelihood.initial])

    def noise_hyper(self, draws: Draws) -> Float[Tensor, "S R"]:
        """The likelihood's part of β."""
        return draws.hyper[:, self.kernel.num_hyper :]

    def geometry(self, draws: Draws) -> Geometry:
        """Whitened coordinates at every sample. Tied pseudo-noise has unit σ² without a Gaussian likelihood."""
        gaussian = isinstance(self.likelihood, GaussianNoise)
        noise = (2.0 * draws.hyper[:, -1]).exp() if gaussian else draws.hyper.new_ones(len(draws.hyper))
        hyper = draws.hyper[:, : self.kernel.num_hyper]
        return Geometry.at(self.kernel, draws.inducing, hyper, noise, jitter=self.jitter)


def sparse_model(section: ModelSection, num_inputs: int) -> SparseModel:
    """Kernel and likelihood of the configuration, for ``num_inputs`` encoded inputs."""
    likelihood = build_point_likelihood(section.likelihood, noise=section.noise)
    return SparseModel(BatchedKernel(build_kernel(section, num_inputs)), likelihood, num_inputs, section.jitter)


def location_scale(latent: Latent) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation; a point has none."""
    if isinstance(latent, Point):
        return latent.value, torch.zeros_like(latent.value)
    mean, variance = latent.moments()
    return mean, variance.sqrt()


def standard_normal(num_samples: int, size: int, generator: Generator) -> Tensor:
    """ε [S, size] ~ N(0, I); of an even number the second half mirrors the first, so odd moments vanish exactly."""
    if num_samples % 2:
        return torch.randn(num_samples, size, generator=generator, dtype=torch.float64)
    half = torch.randn(num_samples // 2, size, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def random_source(*words: object) -> Generator:
    """A generator derived from words such as (seed, purpose, site, round)."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def prediction_draws(latents: Latents, model: SparseModel, number: int, seed: int) -> Draws:
    """Draws of (Z, β) ~ q that depend on the seed alone; a single one where both are points."""
    if isinstance(latents.inducing, Point) and isinstance(latents.hyper, Point):
        number = 1
    parts, generator = [], random_source(seed, "prediction")
    for latent in (latents.inducing, latents.hyper):
        mean, scale = location_scale(latent)
        parts.append(mean + scale * standard_normal(number, len(mean), generator))
    return Draws(parts[0].reshape(number, -1, model.num_inputs), parts[1])


def local_free_energy(
    model: SparseModel, draws: Draws, others: Sequence[Factor], factor: Factor, data: Data, *, weight: float = 1.0
) -> Float[Tensor, " S"]:
    r"""Local fit E_q log p(y_k | f) − KL(q(u | Z, β) ‖ q_\k(u | Z, β)) per sample, in nats.

    Federated learning of sparse Gaussian processes, Eq. 7 less its last KL. ``data`` may be a mini-batch, ``weight`` is
    N_k over its rows; the product of ``others`` with the prior is the cavity.
    """
    geometry = model.geometry(draws)
    cavity, rows = product(geometry, others, data.inputs)
    posterior = cavity.times(factor, geometry).density()
    moments = posterior.predict(rows, geometry.prior_variance(data.inputs))
    fit = model.likelihood.expected(data.targets, *moments, model.noise_hyper(draws)).sum(-1)
    return weight * fit - posterior.kl(cavity.density())


@torch.no_grad()
def expected_fit(model: SparseModel, draws: Draws, factors: Sequence[Factor], data: Data) -> float:
    """E_q log p(y_k | f) at the product of all sites' ``factors``, in nats."""
    geometry = model.geometry(draws)
    natural, rows = product(geometry, factors, data.inputs)
    moments = natural.density().predict(rows, geometry.prior_variance(data.inputs))
    return float(model.likelihood.expected(data.targets, *moments, model.noise_hyper(draws)).sum(-1).mean())


@torch.no_grad()
def divergence(model: SparseModel, draws: Draws, factors: Sequence[Factor]) -> float:
    """E KL(q(u) ‖ p(u)) at the product of all sites' ``factors``, in nats."""
    geometry = model.geometry(draws)
    return float(product(geometry, factors)[0].density().kl(Natural.prior(geometry).density()).mean())


@dataclass(frozen=True, slots=True)
class Mixture:
    """Predictive mixture over samples of (Z, β), in standardised units of y."""

    means: Float[Tensor, "S N"]
    """Mean of a noisy observation, per sample."""
    variances: Float[Tensor, "S N"]
    log_densities: Float[Tensor, "S N"] | None
    """log p(y | sample) of given targets."""

    def mean(self) -> Float[Tensor, " N"]:
        """Mixture mean."""
        return self.means.mean(0)

    def variance(self) -> Float[Tensor, " N"]:
        """Mixture variance: mean of variances plus variance of means."""
        return self.variances.mean(0) + self.means.var(0, correction=0)

    def log_density(self) -> Float[Tensor, " N"]:
        """Log of the mixture density, log (1/S) Σ_s p(y | sample s)."""
        assert self.log_densities is not None
        return torch.logsumexp(self.log_densities, 0) - math.log(len(self.means))


def predict(
    model: SparseModel, draws: Draws, factors: Sequence[Factor], inputs: Tensor, targets: Tensor | None = None
) -> Mixture:
    """The predictive mixture at ``inputs`` [N, D], a few samples and rows at a time, without a graph.

    Raises:
        NumericsError: a variance of f is negative beyond rounding, which means that a factor is broken.
    """
    with torch.no_grad():
        pieces = [
            _predict_some(model, Draws(z, b), factors, inputs, targets)
            for z, b in zip(draws.inducing.split(SAMPLES_AT_ONCE), draws.hyper.split(SAMPLES_AT_ONCE), strict=True)
        ]
    means, variances, densities = zip(*pieces, strict=True)
    return Mixture(torch.cat(means), torch.cat(variances), None if targets is None else torch.cat(densities))


def _predict_some(
    model: SparseModel, draws: Draws, factors: Sequence[Factor], inputs: Tensor, targets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    geometry, hyper = model.geometry(draws), model.noise_hyper(draws)
    posterior = product(geometry, factors)[0].density()
    out: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(inputs), 1), ROWS_AT_ONCE):  # no rows give empty predictions
        rows = slice(start, start + ROWS_AT_ONCE)
        x = inputs[rows]
        prior = geometry.prior_variance(x)
        mean, variance = posterior.predict(geometry.project(x), prior)
        broken = ~(variance >= -ROUNDING * prior)  # so that NaN is broken, too
        if bool(broken.any()):
            raise NumericsError(f"{int(broken.sum())} of {variance.numel()} variances of f are negative")
        variance = variance.clamp_min(0.0)
        moments = model.likelihood.moments(mean, variance, hyper)
        y = mean[:1, :0] if targets is None else model.likelihood.log_predictive(targets[rows], mean, variance, hyper)
        out.append((*moments, y))
    means, variances, densities = (torch.cat(part, -1) for part in zip(*out, strict=True))
    return means, variances, densities
