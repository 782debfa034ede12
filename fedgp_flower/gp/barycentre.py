"""The Wasserstein barycentre of Gaussians, in factors, by Newton's method: no covariance and no inverse is formed.

A Gaussian is a mean m [M] and a factor of its covariance: either L [M, M] with S = L Lᵀ, or scales σ [M] with
S = diag(σ²).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from fedgp_flower.errors import NumericsError
from fedgp_flower.typing import Array

TOLERANCE = 1e-10
"""Of the whitened gap."""
NEAR = 0.7
"""Whitened gap below which Newton steps are tried."""
MOST_INNER = 100
"""Conjugate gradients in a step."""


def barycentre(means: Array, factors: Array, weights: Array, *, max_iterations: int = 100) -> tuple[Array, Array]:
    """Mean and factor of the Gaussian that minimises Σₖ wₖ W₂²(·, N(mₖ, Sₖ)), weights [K] divided by their sum.

    Its mean is Σ wₖ mₖ and its covariance S = F Fᵀ solves S = Σ wₖ (S^½ Sₖ S^½)^½. Scales [K, M] have the closed form
    σ = Σ wₖ σₖ. For factors [K, M, M] the fixed point of Álvarez-Esteban et al. (2016),

        F' = Σ wₖ Lₖ polar(LₖᵀF) = F,   polar(U p Vᵀ) = U Vᵀ,

    is sought from F = chol(Σ wₖ Sₖ) by the steps of :func:`_newton`, and by F ← F' where such a step leads farther
    away. The iteration ends at ‖F⁻¹(F' − F)‖ ≤ :data:`TOLERANCE`, which sees every direction alike. F is lower
    triangular with a positive diagonal then.
    """
    weights = weights / weights.sum()
    mean = weights @ means
    if factors.ndim == 2:
        return mean, weights @ factors
    stacked = (np.sqrt(weights)[:, None, None] * factors.mT).reshape(-1, means.shape[1])
    now = _at(_lower(stacked.T), factors, weights)  # a factor of Σ wₖ Sₖ
    for _ in range(max_iterations):
        if now.residual <= TOLERANCE:
            return mean, _lower(now.factor)
        tried = _at(now.factor + _newton(now, weights), factors, weights) if now.residual < NEAR else None
        if tried is None or not tried.residual < now.residual:
            tried = _at(now.mapped, factors, weights)
        now = tried
    gap = f"whitened gap {now.residual:.1e} after {max_iterations} steps, wanted {TOLERANCE:.1e}"
    raise NumericsError(f"barycentre of {len(means)} Gaussians did not converge: {gap}. Use diagonal factors.")


@dataclass(frozen=True, slots=True)
class _Point:
    """A factor F = U diag(f), its image F' under the mean of the optimal maps, and (FᵀSₖF)^½ = V diag(p) Vᵀ."""

    factor: Array  # [M, M]
    scale: Array  # f [M]
    mapped: Array  # [M, M]
    roots: Array  # p [K, M]
    vectors: Array  # Vᵀ [K, M, M]
    residual: float


def _at(factor: Array, factors: Array, weights: Array) -> _Point:
    """Of any factor of the same covariance, that with orthogonal columns."""
    left, scale, _ = np.linalg.svd(factor)
    factor = left * scale
    turned, roots, vectors = np.linalg.svd(factors.mT @ factor)
    mapped = np.einsum("k,kij->ij", weights, factors @ (turned @ vectors))
    gap = float(np.linalg.norm((left.T @ (mapped - factor)) / scale[:, None]))
    return _Point(factor, scale, mapped, roots, vectors, gap)


def _newton(now: _Point, weights: Array) -> Array:
    """The change of F by a Newton step on Σ wₖ Tₖ = I, where Tₖ is the optimal map to site k.

    With δS = F Δ Fᵀ, Tₖ changes by −F⁻ᵀ Dₖ F⁻¹, where Dₖ Pₖ + Pₖ Dₖ = Pₖ Δ Pₖ and Pₖ = (FᵀSₖF)^½. So Δ solves
    Σ wₖ Dₖ(Δ) = Fᵀ(F' − F), by conjugate gradients that are preconditioned by the answer for Pₖ = FᵀF, the step to F'.
    """
    share = weights[:, None, None] / (1 / now.roots[:, :, None] + 1 / now.roots[:, None, :])

    def moved(change: Array) -> Array:
        turned = now.vectors @ change @ now.vectors.mT
        return np.asarray((now.vectors.mT @ (share * turned) @ now.vectors).sum(0))

    usual = 1 / now.scale[:, None] ** 2 + 1 / now.scale**2
    left = now.factor.T @ (now.mapped - now.factor)
    left = (left + left.T) / 2
    change, ahead = np.zeros_like(left), usual * left
    direction, size = ahead, float((left * ahead).sum())
    enough = size * min(0.1, now.residual) ** 2
    for _ in range(MOST_INNER):
        image = moved(direction)
        step = size / float((direction * image).sum())
        change, left = change + step * direction, left - step * image
        ahead = usual * left
        size, before = float((left * ahead).sum()), size
        if size <= enough:
            break
        direction = ahead + size / before * direction
    return (now.factor / now.scale**2) @ (change / usual)


def wasserstein_distance(mean: Array, factor: Array, other_mean: Array, other_factor: Array) -> float:
    """W₂ between two Gaussians given by factors of the same kind: W₂² = ‖m − m'‖² + ‖F − L' polar(L'ᵀF)‖²."""
    nearest = other_factor
    if factor.ndim == 2:
        left, _, right = np.linalg.svd(other_factor.T @ factor)
        nearest = other_factor @ left @ right
    return float(np.hypot(np.linalg.norm(mean - other_mean), np.linalg.norm(factor - nearest)))


def _lower(factor: Array) -> Array:
    """The lower triangular L with positive diagonal and L Lᵀ = F Fᵀ, for F [M, ≥ M]."""
    (upper,) = scipy.linalg.qr(factor.T, mode="r")
    lower = upper[: len(factor)].T
    signs = np.sign(np.diagonal(lower))
    return np.asarray(lower * signs, dtype=np.float64)
