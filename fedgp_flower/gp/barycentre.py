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

NEAR = 0.7
"""Whitened gap below which Newton steps are tried."""
MOST_INNER = 100
"""Conjugate gradients in a step."""


@dataclass(frozen=True, slots=True)
class Barycentre:
    """A Gaussian and how it was found."""

    mean: Array  # [M]
    factor: Array  # [M, M] lower triangular with a positive diagonal, or [M] scales
    iterations: int
    residual: float
    """Whitened gap ‖F⁻¹(F' − F)‖ to the fixed point; 0 for the closed form."""


def barycentre(
    means: Array, factors: Array, weights: Array, *, tolerance: float = 1e-10, max_iterations: int = 100
) -> Barycentre:
    """The Gaussian that minimises Σₖ wₖ W₂²(·, N(mₖ, Sₖ)), weights [K] divided by their sum.

    Its mean is Σ wₖ mₖ and its covariance S = F Fᵀ solves S = Σ wₖ (S^½ Sₖ S^½)^½. Scales [K, M] have the closed form
    σ = Σ wₖ σₖ. For factors [K, M, M] the fixed point of Álvarez-Esteban et al. (2016),

        F' = Σ wₖ Lₖ polar(LₖᵀF) = F,   polar(U p Vᵀ) = U Vᵀ,

    is sought from F = chol(Σ wₖ Sₖ) by the steps of :func:`_newton`, and by F ← F' where such a step leads farther
    away. The iteration ends at ‖F⁻¹(F' − F)‖ ≤ ``tolerance``, which sees every direction alike.
    """
    weights = _normalised(means, factors, weights)
    mean = weights @ means
    if factors.ndim == 2:
        return Barycentre(mean, weights @ factors, 1, 0.0)
    stacked = (np.sqrt(weights)[:, None, None] * factors.mT).reshape(-1, means.shape[1])
    now = _at(_lower(stacked.T), factors, weights)  # a factor of Σ wₖ Sₖ
    for iteration in range(1, max_iterations + 1):
        if now.residual <= tolerance:
            return Barycentre(mean, _lower(now.factor), iteration, now.residual)
        tried = _at(now.factor + _newton(now, weights), factors, weights) if now.residual < NEAR else None
        if tried is None or not tried.residual < now.residual:
            tried = _at(now.mapped, factors, weights)
        now = tried
    gap = f"whitened gap {now.residual:.1e} after {max_iterations} steps, wanted {tolerance:.1e}"
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


def _normalised(means: Array, factors: Array, weights: Array) -> Array:
    expected = (means.shape, (*means.shape, means.shape[-1]))
    if means.ndim != 2 or factors.shape not in expected or weights.shape != means.shape[:1]:
        shapes = f"found {means.shape}, {factors.shape} and {weights.shape}."
        raise NumericsError(f"barycentre wants means [K, M], factors [K, M] or [K, M, M] and weights [K]; {shapes}")
    if not all(np.isfinite(values).all() for values in (means, factors, weights)):
        raise NumericsError(f"barycentre of {len(means)} Gaussians: a value is not finite. Leave out that site.")
    if (weights < 0).any() or weights.sum() <= 0:
        raise NumericsError(f"barycentre wants nonnegative weights with a positive sum, shape {weights.shape}.")
    scales = factors if factors.ndim == 2 else np.linalg.svd(factors, compute_uv=False)
    if (scales.min(-1) <= 0).any():
        raise NumericsError(f"barycentre of {len(means)} Gaussians: a covariance factor is singular.")
    return np.asarray(weights / weights.sum(), dtype=np.float64)
