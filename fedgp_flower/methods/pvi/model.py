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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.batched_kernel import BatchedKernel
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import GaussianNoise, PointLikelihood, build_point_likelihood
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.options import ModelSection

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

    def with_columns(self, columns: Tensor, values: Tensor) -> Natural:
        """Multiply by a factor given as columns C [S, M, J] and values r [S or 1, J]."""
        return Natural(self.precision + columns @ columns.mT, self.shift + (columns @ values.unsqueeze(-1)).squeeze(-1))

    def times(self, factor: Factor, geometry: Geometry, projection: Tensor | None = None) -> Natural:
        """Multiply by a factor: of u by LᵀΛL and Lᵀη, of v as it is, pseudo-observations by their ``projection`` A."""
        if isinstance(factor, PseudoObservations):
            A = geometry.project(factor.inputs) if projection is None else projection
            return self.with_columns(*factor.columns(A, geometry.noise))
        precision, eta1 = factor.natural.precision, factor.natural.eta1
        if isinstance(factor, WhitenedFactor):
            return Natural(self.precision + precision, self.shift + eta1)
        L = geometry.chol
        return Natural(self.precision + L.mT @ precision @ L, self.shift + (L.mT @ eta1))

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


@dataclass(frozen=True, slots=True)
class Views:
    """Projections of everything one evaluation needs, from one triangular solve."""

    geometry: Geometry
    factors: tuple[Tensor, ...]  # A of the factors' pseudo-observations
    rows: Tensor | None  # A of the site's data


def view(geometry: Geometry, factors: Sequence[Factor], rows: Float[Tensor, "N D"] | None = None) -> Views:
    """Project the pseudo-inputs of all factors and the rows at once."""
    inputs = [f.inputs for f in factors if isinstance(f, PseudoObservations)] + ([] if rows is None else [rows])
    if not inputs:
        return Views(geometry, (), None)
    parts = list(geometry.project(torch.cat(inputs)).split([len(x) for x in inputs], dim=-1))
    last = None if rows is None else parts.pop()
    return Views(geometry, tuple(parts), last)


def product(views: Views, factors: Sequence[Factor]) -> Natural:
    """Prior times factors: the cavity of a site that is not among theirs."""
    natural, projections = Natural.prior(views.geometry), iter(views.factors)
    for factor in factors:
        projection = next(projections) if isinstance(factor, PseudoObservations) else None
        natural = natural.times(factor, views.geometry, projection)
    return natural


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

    def own_hyper(self, draws: Draws) -> Float[Tensor, "S R"]:
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


def standard_normal(num_samples: int, size: int, generator: Generator, *, antithetic: bool = True) -> Tensor:
    """ε [S, size] ~ N(0, I); antithetic: the second half mirrors the first, so odd moments vanish exactly."""
    if not antithetic or num_samples % 2:
        return torch.randn(num_samples, size, generator=generator, dtype=torch.float64)
    half = torch.randn(num_samples // 2, size, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def draw(
    latents: Latents, num_samples: int, num_inputs: int, generator: Generator, *, antithetic: bool = True
) -> Draws:
    """Samples of (Z, β) ~ q(Z) q(β)."""
    parts = []
    for latent in (latents.inducing, latents.hyper):
        mean, scale = location_scale(latent)
        parts.append(mean + scale * standard_normal(num_samples, len(mean), generator, antithetic=antithetic))
    return Draws(parts[0].reshape(num_samples, -1, num_inputs), parts[1])


@dataclass(frozen=True, slots=True)
class Cavity:
    r"""q_\k(v | Z, β) for S samples of (Z, β), and the site's rows as seen from Z."""

    geometry: Geometry
    natural: Natural
    density: WhitenedGaussian
    rows: Float[Tensor, "S M N"]
    """A = L⁻¹ K_ZX."""
    prior_variance: Float[Tensor, "S N"]

    @classmethod
    def at(cls, model: SparseModel, draws: Draws, others: Sequence[Factor], data: Data) -> Cavity:
        """Prior times ``others``, by one triangular solve for all pseudo-inputs and rows."""
        views = view(model.geometry(draws), others, data.inputs)
        assert views.rows is not None
        natural = product(views, others)
        variance = views.geometry.prior_variance(data.inputs)
        return cls(views.geometry, natural, natural.density(), views.rows, variance)

    def times(self, own: Factor) -> WhitenedGaussian:
        """q(v | Z, β) with the site's own factor."""
        return self.natural.times(own, self.geometry).density()

    def free_energy(
        self, model: SparseModel, draws: Draws, own: Factor, data: Data, *, weight: float = 1.0
    ) -> Float[Tensor, " S"]:
        """See :func:`local_free_energy`; ``draws`` and ``data`` are those of :meth:`at`."""
        posterior = self.times(own)
        moments = posterior.predict(self.rows, self.prior_variance)
        fit = model.likelihood.expected(data.targets, *moments, model.own_hyper(draws)).sum(-1)
        return weight * fit - posterior.kl(self.density)


def local_free_energy(
    model: SparseModel, draws: Draws, others: Sequence[Factor], own: Factor, data: Data, *, weight: float = 1.0
) -> Float[Tensor, " S"]:
    r"""Local fit E_q log p(y_k | f) − KL(q(u | Z, β) ‖ q_\k(u | Z, β)) per sample, in nats.

    Federated learning of sparse Gaussian processes, Eq. 7 less its last KL. ``data`` may be a mini-batch, ``weight`` is
    N_k over its rows; the product of ``others`` with the prior is the cavity.
    """
    return Cavity.at(model, draws, others, data).free_energy(model, draws, own, data, weight=weight)


def free_energy_parts(model: SparseModel, draws: Draws, factors: Sequence[Factor], data: Data) -> tuple[float, float]:
    """What this site knows of F = Σ_k E_q log p(y_k | f) − E KL(q(u) ‖ p(u)) − KL(q(Z) ‖ p) − KL(q(β) ‖ p), in nats.

    The first term, which adds over sites, and the second, which is the same wherever the draws are. F equals Σ_k F_k +
    log Z_q at any q = p ∏ t_k (Ashman et al. 2022, Property 2.2a). ``factors`` are those of all sites.
    """
    with torch.no_grad():
        views = view(model.geometry(draws), factors, data.inputs)
        posterior = product(views, factors).density()
        assert views.rows is not None
        moments = posterior.predict(views.rows, views.geometry.prior_variance(data.inputs))
        fit: Float[Tensor, " S"] = model.likelihood.expected(data.targets, *moments, model.own_hyper(draws)).sum(-1)
        divergence = posterior.kl(Natural.prior(views.geometry).density())
    return float(fit.mean()), float(divergence.mean())


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
        return torch.logsumexp(_some(self.log_densities), 0) - math.log(len(self.means))


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
    views = view(model.geometry(draws), factors)
    posterior = product(views, factors).density()
    own = model.own_hyper(draws)
    out: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(inputs), 1), ROWS_AT_ONCE):  # no rows give empty predictions
        rows = slice(start, start + ROWS_AT_ONCE)
        x = inputs[rows]
        prior = views.geometry.prior_variance(x)
        mean, variance = posterior.predict(views.geometry.project(x), prior)
        broken = ~(variance >= -ROUNDING * prior)  # so that NaN is broken, too
        if bool(broken.any()):
            raise NumericsError(f"{int(broken.sum())} of {variance.numel()} variances of f are negative")
        variance = variance.clamp_min(0.0)
        moments = model.likelihood.moments(mean, variance, own)
        y = mean[:1, :0] if targets is None else model.likelihood.log_predictive(targets[rows], mean, variance, own)
        out.append((*moments, y))
    means, variances, densities = (torch.cat(part, -1) for part in zip(*out, strict=True))
    return means, variances, densities


def _some(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("needed rows or targets were not given")
    return values
