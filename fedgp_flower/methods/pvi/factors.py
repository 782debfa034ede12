"""Factors t_k(u | Z, β) of a sparse GP posterior, and their product in whitened coordinates.

With L Lᵀ = K_ZZ + jitter and v = L⁻¹u ~ N(0, I), factor k contributes columns C_k and values r_k to

    B = I + Σ_k C_k C_kᵀ,   h = Σ_k C_k r_k,   q(v | Z, β) = N(B⁻¹h, B⁻¹),

so B ⪰ I always, and a cavity is the same sum without k: no inverse of K_ZZ, no difference of precisions. All of it is
batched over S samples of (Z, β).

References:
    Titsias (2009); Federated learning of sparse Gaussian processes, Section 5.1 (DPO, Eq. 12, and CPO).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.batched_kernel import BatchedKernel
from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky


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
    """A DPO factor: t(u | Z, β) ∝ N(K_VZ K_ZZ⁻¹ u; m, S) with S⁻¹ = R Rᵀ, or S⁻¹ = R Rᵀ / σ² when tied.

    As a likelihood of the function and the noise (replay), log t(f, β) = −n/2 log 2πσ² − (|Rᵀ(m − f(V))|² + c) / 2σ².
    """

    inputs: Float[Tensor, "J D"]
    targets: Float[Tensor, " J"]
    root: Tensor
    """R: [J] for diagonal noise (√w), [J, J] for full noise."""
    tied: bool = True
    count: float = 0.0
    """n, the number of rows the factor stands for."""
    residual: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """c ≥ 0, the squared error of those rows that the pseudo-observations do not carry."""

    def columns(self, projection: Float[Tensor, "S M J"], noise: Float[Tensor, " S"]) -> tuple[Tensor, Tensor]:
        """C = A R [S, M, J] and r = Rᵀm [S or 1, J], each over σ when tied."""
        diagonal = self.root.ndim == 1
        columns = projection * self.root if diagonal else projection @ self.root
        values = (self.root * self.targets if diagonal else self.root.mT @ self.targets)[None]
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


def log_noise_evidence(factor: PseudoObservations, noise: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """−n/2 log 2πσ² − (|Rᵀm|² + c)/2σ²: what a tied factor says about the noise beyond its columns."""
    values = factor.root * factor.targets if factor.root.ndim == 1 else factor.root.mT @ factor.targets
    squares = values.square().sum() + factor.residual
    return -0.5 * (factor.count * torch.log(2 * math.pi * noise) + squares / noise)
