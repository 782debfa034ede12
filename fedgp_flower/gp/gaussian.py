"""Gaussians in natural parameters: a product of densities is a sum, a cavity a difference, damping a multiple.

A factor t(x) = exp(η₁ᵀx + xᵀη₂x) need not be a density: it may be flat (η = 0) or have negative precision. Only
moments and KL require a density, η₂ ≺ 0, and raise NumericsError for an improper factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.linalg import cholesky

_HINT = "Lower the learning rate or the damping factor"


@dataclass(frozen=True, slots=True, eq=False)
class Gaussian:
    """A Gaussian factor t(x) = exp(η₁ᵀx + xᵀη₂x), up to its normaliser, with a full or a diagonal η₂.

    ``*`` multiplies densities, ``/`` removes one (a cavity), ``**`` damps or tempers one.
    """

    eta1: Float[Tensor, "*S M"]
    """η₁ = S⁻¹m, also of S factors at once if η₂ are matrices."""
    eta2: Tensor
    """η₂ = −½S⁻¹: symmetric [*S, M, M], or its diagonal [M]."""

    @staticmethod
    def from_moments(mean: Float[Tensor, " M"], covariance: Tensor) -> Gaussian:
        """The density N(mean, covariance), with ``covariance`` [M, M], or its diagonal [M]."""
        if covariance.ndim == 2:
            hint = "A covariance must be symmetric positive definite"
            L = cholesky(covariance, of="covariance of a Gaussian", hint=hint)
            return Gaussian(torch.cholesky_solve(mean[:, None], L)[:, 0], -0.5 * torch.cholesky_inverse(L))
        if not (covariance > 0).all():
            raise NumericsError(f"variances of a diagonal Gaussian must be positive; smallest: {covariance.min():.2e}")
        return Gaussian(mean / covariance, -0.5 / covariance)

    @staticmethod
    def around(mean: Float[Tensor, " M"], precision: Tensor) -> Gaussian:
        """The factor with this mean and precision, η₁ = Λm."""
        return Gaussian(precision @ mean if precision.ndim == 2 else precision * mean, -0.5 * precision)

    @staticmethod
    def standard(size: int, *, full: bool = False) -> Gaussian:
        """The density N(0, I)."""
        ones = torch.ones(size, dtype=torch.float64)
        return Gaussian(0 * ones, -0.5 * (ones.diag() if full else ones))

    def __mul__(self, other: Gaussian) -> Gaussian:
        """Product of densities: natural parameters add."""
        return Gaussian(self.eta1 + other.eta1, self.eta2 + other.eta2)

    def __truediv__(self, other: Gaussian) -> Gaussian:
        """Quotient of densities: natural parameters subtract, which gives the cavity without ``other``."""
        return Gaussian(self.eta1 - other.eta1, self.eta2 - other.eta2)

    def __pow__(self, exponent: float) -> Gaussian:
        """Power of a density: natural parameters scale."""
        return Gaussian(exponent * self.eta1, exponent * self.eta2)

    @property
    def precision(self) -> Tensor:
        """Λ = −2η₂ = S⁻¹."""
        return -2.0 * self.eta2

    @property
    def full(self) -> bool:
        """Whether η₂ is a matrix."""
        return self.eta2.ndim > self.eta1.ndim

    def times(self, vector: Float[Tensor, "*S M"]) -> Float[Tensor, "*S M"]:
        """Λ times a vector."""
        return (self.precision @ vector[..., None])[..., 0] if self.full else self.precision * vector

    def factor(self) -> Tensor:
        """L with L Lᵀ = Λ, for matrices; raise NumericsError if improper."""
        return cholesky(self.precision, of="precision of a Gaussian", hint=_HINT)

    def is_proper(self) -> bool:
        """Whether the precision is finite and positive definite."""
        try:
            self.described()
        except NumericsError:
            return False
        return bool(torch.isfinite(self.eta1).all() and torch.isfinite(self.eta2).all())

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean m = Sη₁ and covariance S = Λ⁻¹, or its diagonal; raise NumericsError if improper."""
        return self.described()[:2]

    def mean(self) -> Float[Tensor, "*S M"]:
        """Mean m = Sη₁."""
        return self.described()[0]

    def described(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, covariance and log|Λ|, by one factorisation; raises as :meth:`moments`."""
        precision = self.precision
        if self.full:
            L = self.factor()
            mean = torch.cholesky_solve(self.eta1[..., None], L)[..., 0]
            return mean, torch.cholesky_inverse(L), 2.0 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        if not (precision > 0).all():
            raise NumericsError(
                f"precision of a diagonal Gaussian must be positive in all {len(precision)} entries; "
                f"{int((~(precision > 0)).sum())} are not, the smallest is {precision.min():.2e}. {_HINT}."
            )
        return self.eta1 / precision, 1.0 / precision, precision.log().sum()

    def kl(self, other: Gaussian) -> Tensor:
        """KL(self ‖ other) = ½ [tr(Λ'S) − M + (m−m')ᵀΛ'(m−m') + log|Λ| − log|Λ'|] in nats, primes marking ``other``."""
        (mean, covariance, log_det), (other_mean, _, other_log_det) = self.described(), other.described()
        difference = mean - other_mean
        trace = (other.precision * covariance).sum((-2, -1) if self.full else -1)
        quadratic = trace - mean.shape[-1] + (difference * other.times(difference)).sum(-1)
        return 0.5 * (quadratic + log_det - other_log_det)
