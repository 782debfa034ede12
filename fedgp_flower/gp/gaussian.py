"""Gaussians in natural parameters: a product of densities is a sum, a cavity a difference, damping a multiple.

A factor t(x) = exp(η₁ᵀx + xᵀη₂x) need not be a density: it may be flat (η = 0) or have negative precision. Only
moments and KL require a density, η₂ ≺ 0, and raise NumericsError for an improper factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.linalg import cholesky

G = TypeVar("G", bound="Gaussian")
_HINT = "Lower the damping factor, or give the site a proper cavity"


@dataclass(frozen=True, slots=True, eq=False)
class Gaussian(ABC):
    """A Gaussian factor t(x) = exp(η₁ᵀx + xᵀη₂x), up to its normaliser.

    ``*`` multiplies densities, ``/`` removes one (a cavity), ``**`` damps or tempers one.
    """

    eta1: Float[Tensor, " M"]
    """η₁ = S⁻¹m."""
    eta2: Tensor
    """η₂ = −½S⁻¹: [M, M], or its diagonal [M]."""

    def __mul__(self: G, other: G) -> G:
        """Product of densities: natural parameters add."""
        return type(self)(self.eta1 + other.eta1, self.eta2 + other.eta2)

    def __truediv__(self: G, other: G) -> G:
        """Quotient of densities: natural parameters subtract, which gives the cavity without ``other``."""
        return type(self)(self.eta1 - other.eta1, self.eta2 - other.eta2)

    def __pow__(self: G, exponent: float) -> G:
        """Power of a density: natural parameters scale."""
        return type(self)(exponent * self.eta1, exponent * self.eta2)

    @property
    def precision(self) -> Tensor:
        """Λ = −2η₂ = S⁻¹."""
        return -2.0 * self.eta2

    @property
    def size(self) -> int:
        """Dimension of x."""
        return self.eta1.shape[-1]

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

    def mean(self) -> Float[Tensor, " M"]:
        """Mean m = Sη₁."""
        return self.described()[0]

    @abstractmethod
    def described(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, covariance and log|Λ|, by one factorisation; raises as :meth:`moments`."""

    def kl(self: G, other: G) -> Tensor:
        """KL(self ‖ other) = ½ [tr(Λ'S) − M + (m−m')ᵀΛ'(m−m') + log|Λ| − log|Λ'|] in nats, primes marking ``other``."""
        (mean, covariance, log_det), (other_mean, _, other_log_det) = self.described(), other.described()
        difference, precision = mean - other_mean, other.precision
        weighted = precision @ difference if precision.ndim > 1 else precision * difference
        return 0.5 * ((precision * covariance).sum() - self.size + difference @ weighted + log_det - other_log_det)


class NaturalGaussian(Gaussian):
    """A Gaussian factor with full precision: ``eta2`` is [M, M] and symmetric."""

    __slots__ = ()

    @classmethod
    def from_moments(cls: type[G], mean: Float[Tensor, " M"], covariance: Float[Tensor, "M M"]) -> G:
        """The density N(mean, covariance)."""
        L = cholesky(covariance, of="covariance of a Gaussian", hint="A covariance must be symmetric positive definite")
        return cls(torch.cholesky_solve(mean[:, None], L)[:, 0], -0.5 * torch.cholesky_inverse(L))

    def described(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [M], covariance [M, M] and log|Λ|."""
        L = cholesky(self.precision, of="precision of a Gaussian", hint=_HINT)
        mean = torch.cholesky_solve(self.eta1[:, None], L)[:, 0]
        return mean, torch.cholesky_inverse(L), 2.0 * L.diagonal().log().sum()


class DiagonalGaussian(Gaussian):
    """A fully factorised Gaussian factor: ``eta2`` [M] is the diagonal."""

    __slots__ = ()

    @classmethod
    def from_moments(cls: type[G], mean: Float[Tensor, " M"], variance: Float[Tensor, " M"]) -> G:
        """The density ∏ N(mean_i, variance_i)."""
        if not (variance > 0).all():
            raise NumericsError(f"variances of a diagonal Gaussian must be positive; smallest: {variance.min():.2e}")
        return cls(mean / variance, -0.5 / variance)

    @classmethod
    def standard(cls: type[G], size: int) -> G:
        """The density N(0, I)."""
        return cls(torch.zeros(size, dtype=torch.float64), torch.full((size,), -0.5, dtype=torch.float64))

    def described(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [M], variances [M] and log|Λ|."""
        precision = self.precision
        if not (precision > 0).all():
            raise NumericsError(
                f"precision of a diagonal Gaussian must be positive in all {self.size} entries; "
                f"{int((~(precision > 0)).sum())} are not, the smallest is {precision.min():.2e}. {_HINT}."
            )
        return self.eta1 / precision, 1.0 / precision, precision.log().sum()
