"""A Gaussian process on learned features, with a head for all sites and a personal one at each; all exact.

    f_c(x) at site k = φ(x)ᵀ (w_c + v_kc),   w_c ~ N(0, (1 − ρ) I),   v_kc ~ N(0, ρ I),   φ(x) [F] from a network

so that cov(f_c(x), f_c(x')) = φ(x)ᵀφ(x') within a site and (1 − ρ) times that between sites. Outputs c are
observed with Gaussian noise of known variances. Of each, a site has

    G = Φᵀ D⁻¹ Φ,   g = Φᵀ D⁻¹ t,   and without its v_k, which it integrates out,
    B = (I + ρ G)⁻¹ G,   b = (I + ρ G)⁻¹ g,   log p(t | w) = e + bᵀw − ½ wᵀB w,

and ΣB, Σb, Σe over sites give q(w) and the evidence of all rows. With ρ = 0 both are those of the pooled Gaussian
process, whatever the partition; the evidence of one site's rows does not depend on ρ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.typing import Scalar

SHARES = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Shares ρ of the prior variance that personal heads may have: the evidence of all rows chooses."""
Means = Float[Tensor, "C F"]
Covariances = Float[Tensor, "C F F"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rows say of w: log p(t | w) = constant + Σ_c (bᵀw − ½ wᵀB w)."""

    precision: Covariances
    """B."""
    shift: Means
    """b."""
    constant: Scalar
    """e."""

    def posterior(self, share: float) -> tuple[Means, Covariances]:
        """Mean and covariance of w_c, N(0, (1 − ρ) I) a priori."""
        factor = self._factor(1 - share)
        covariance = (1 - share) * torch.cholesky_inverse(factor)
        return (covariance @ self.shift[..., None])[..., 0], covariance

    def log_evidence(self, share: float) -> Scalar:
        """The log density of the rows, w integrated out too."""
        factor = self._factor(1 - share)
        white = torch.linalg.solve_triangular(factor, self.shift[..., None], upper=False)
        return self.constant + 0.5 * (1 - share) * white.square().sum() - _half_log_determinant(factor)

    def _factor(self, scale: float) -> Covariances:
        return cholesky(_eye(self.shift) + scale * self.precision, of="precision of the heads")


@dataclass(frozen=True, slots=True)
class SiteSums:
    """G and g of a site's rows, and the rest of their log density."""

    precision: Covariances
    """G."""
    shift: Means
    """g."""
    constant: Scalar
    """log N(t; 0, D)."""

    @staticmethod
    def of(features: Float[Tensor, "N F"], values: Float[Tensor, "C N"], variances: Float[Tensor, "C N"]) -> SiteSums:
        """From rows: φ, t and the diagonal of D."""
        weighted = features / variances[..., None]  # [C, N, F]
        constant = -0.5 * (values.square() / variances + variances.log() + math.log(2 * math.pi)).sum()
        return SiteSums(weighted.mT @ features, (weighted.mT @ values[..., None])[..., 0], constant)

    def without_personal(self, share: float) -> Evidence:
        """What the rows say of w, v_k integrated out."""
        factor = self._factor(share)
        precision = torch.cholesky_solve(self.precision, factor)
        shift = torch.cholesky_solve(self.shift[..., None], factor)[..., 0]
        return Evidence((precision + precision.mT) / 2, shift, self._log_density(factor, share))

    def log_evidence(self) -> Scalar:
        """The log density of these rows alone."""
        return self._log_density(self._factor(1.0), 1.0)

    def _log_density(self, factor: Covariances, share: float) -> Scalar:
        white = torch.linalg.solve_triangular(factor, self.shift[..., None], upper=False)
        return self.constant + 0.5 * share * white.square().sum() - _half_log_determinant(factor)

    def personal(self, mean: Means, covariance: Covariances, share: float) -> tuple[Means, Covariances]:
        """Mean and covariance of w_c + v_kc, from those of w_c given all rows, these among them."""
        factor = self._factor(share)
        moved = torch.cholesky_solve((mean + share * self.shift)[..., None], factor)[..., 0]
        both = torch.cholesky_solve(torch.cholesky_solve(covariance, factor).mT, factor)
        return moved, share * torch.cholesky_inverse(factor) + both

    def _factor(self, share: float) -> Covariances:
        return cholesky(_eye(self.shift) + share * self.precision, of="precision of a personal head")


def latent(
    features: Float[Tensor, "N F"], mean: Means, covariance: Covariances
) -> tuple[Float[Tensor, "C N"], Float[Tensor, "C N"]]:
    """Mean and variance of φᵀu, u_c ~ N(mean, covariance)."""
    return mean @ features.mT, ((features @ covariance) * features).sum(-1)


def _eye(shift: Tensor) -> Tensor:
    return torch.eye(shift.shape[-1], dtype=shift.dtype)


def _half_log_determinant(factor: Tensor) -> Scalar:
    return factor.diagonal(dim1=-2, dim2=-1).log().sum()
