"""The Wasserstein barycentre of Gaussians, in factors: no inverse and no matrix square root is formed.

A Gaussian is a mean m [M] and a factor of its covariance: either L [M, M] with S = L Lᵀ, or scales σ [M] with
S = diag(σ²).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from fedgp_flower.errors import NumericsError
from fedgp_flower.typing import Array


@dataclass(frozen=True, slots=True)
class Barycentre:
    """A Gaussian and how it was found."""

    mean: Array  # [M]
    factor: Array  # [M, M] lower triangular with a positive diagonal, or [M] scales
    iterations: int
    residual: float
    """Relative change ‖F' − F‖ / ‖F'‖ of the last step; 0 for the closed form."""


def barycentre(
    means: Array, factors: Array, weights: Array, *, tolerance: float = 1e-12, max_iterations: int = 2000
) -> Barycentre:
    """The Gaussian that minimises Σₖ wₖ W₂²(·, N(mₖ, Sₖ)).

    Its mean is Σ wₖ mₖ and its covariance solves S = Σ wₖ (S^½ Sₖ S^½)^½. Diagonal factors have the closed form
    σ = Σ wₖ σₖ. Otherwise the fixed point of Álvarez-Esteban et al. (2016) is iterated on a factor F of S, where the
    optimal map from N(0, F Fᵀ) to N(0, Sₖ) takes F to Lₖ polar(Lₖᵀ F):

        F ← Σ wₖ Lₖ polar(LₖᵀF),   F₀ = chol(Σ wₖ Sₖ),   polar(U s Vᵀ) = U Vᵀ.

    Means are [K, M], factors [K, M, M] or scales [K, M], weights [K] nonnegative and divided by their sum; the
    iteration stops at a relative change of F by ``tolerance``.

    Raises:
        NumericsError: if shapes disagree, a value is not finite, a weight is negative, a factor is singular, or the
            iteration does not converge.
    """
    weights = _normalised(means, factors, weights)
    mean = weights @ means
    if factors.ndim == 2:
        return Barycentre(mean, weights @ factors, 1, 0.0)
    factor = _start(factors, weights)
    for iteration in range(1, max_iterations + 1):
        update = np.einsum("k,kij->ij", weights, factors @ _polar(factors.mT @ factor))
        residual = float(np.linalg.norm(update - factor) / np.linalg.norm(update))
        factor = update
        if residual <= tolerance:
            return Barycentre(mean, _lower(factor), iteration, residual)
    raise NumericsError(
        f"barycentre of {len(means)} Gaussians did not converge: relative change {residual:.1e} after {max_iterations} "
        f"steps, wanted {tolerance:.1e}. Raise the tolerance, or use diagonal factors."
    )


def wasserstein_distance(mean: Array, factor: Array, other_mean: Array, other_factor: Array) -> float:
    """W₂ between two Gaussians given by factors of the same kind.

    W₂² = ‖m − m'‖² + ‖F − L' polar(L'ᵀF)‖²: the second term is the least Frobenius distance between factors of the
    two covariances, a sum of squares and so free of the cancellation in tr S + tr S' − 2 tr (S^½ S' S^½)^½.
    """
    nearest = other_factor if factor.ndim == 1 else other_factor @ _polar(other_factor.T @ factor)
    return float(np.hypot(np.linalg.norm(mean - other_mean), np.linalg.norm(factor - nearest)))


def _polar(matrices: Array) -> Array:
    """The orthogonal polar factor U Vᵀ of square matrices [..., M, M]: the orthogonal Q that maximises tr(QᵀA)."""
    left, _, right = np.linalg.svd(matrices)
    return np.asarray(left @ right, dtype=np.float64)


def _start(factors: Array, weights: Array) -> Array:
    """A factor of Σ wₖ Sₖ by QR of the stacked √wₖ Lₖᵀ, which never forms the covariances."""
    size = factors.shape[-1]
    stacked = (np.sqrt(weights)[:, None, None] * factors.mT).reshape(-1, size)
    return _lower(stacked.T)


def _lower(factor: Array) -> Array:
    """The lower triangular L with positive diagonal and L Lᵀ = F Fᵀ, for F [M, ≥ M]."""
    (upper,) = scipy.linalg.qr(factor.T, mode="r")
    lower = upper[: len(factor)].T
    signs = np.sign(np.diagonal(lower))
    return np.asarray(lower * signs, dtype=np.float64)


def _normalised(means: Array, factors: Array, weights: Array) -> Array:
    expected = (means.shape, (*means.shape, means.shape[-1]))
    if means.ndim != 2 or factors.shape not in expected or weights.shape != means.shape[:1]:
        raise NumericsError(
            f"barycentre wants means [K, M], factors [K, M] or [K, M, M] and weights [K]; found {means.shape}, "
            f"{factors.shape} and {weights.shape}."
        )
    if not all(np.isfinite(values).all() for values in (means, factors, weights)):
        raise NumericsError(f"barycentre of {len(means)} Gaussians: a value is not finite. Leave out that site.")
    if (weights < 0).any() or weights.sum() <= 0:
        raise NumericsError(f"barycentre wants nonnegative weights with a positive sum, shape {weights.shape}.")
    scales = factors if factors.ndim == 2 else np.linalg.svd(factors, compute_uv=False)
    if (scales.min(-1) <= 0).any():
        raise NumericsError(f"barycentre of {len(means)} Gaussians: a covariance factor is singular.")
    return np.asarray(weights / weights.sum(), dtype=np.float64)
