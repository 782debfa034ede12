"""The Wasserstein barycentre of Gaussians, from factors without covariances or inverses.

A Gaussian is a mean m [M] and a factor of its covariance: either L [M, M] with S = L Lᵀ, or scales σ [M] with
S = diag(σ²).
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from fedgp_flower.errors import NumericsError
from fedgp_flower.typing import Array

TOLERANCE = 1e-10
"""Tolerance of the whitened gap."""


def barycentre(means: Array, factors: Array, weights: Array, *, max_iterations: int = 1000) -> tuple[Array, Array]:
    """Mean and factor of the Gaussian that minimises Σₖ wₖ W₂²(·, N(mₖ, Sₖ)), weights [K] divided by their sum.

    Its mean is Σ wₖ mₖ and its covariance S = F Fᵀ solves S = Σ wₖ (S^½ Sₖ S^½)^½. Scales [K, M] have the closed form
    σ = Σ wₖ σₖ. For factors [K, M, M] the fixed point of Álvarez-Esteban et al. (2016),

        F' = Σ wₖ Lₖ polar(LₖᵀF) = F,   polar(U p Vᵀ) = U Vᵀ,

    is iterated from F = chol(Σ wₖ Sₖ) until ‖F⁻¹(F' − F)‖ ≤ :data:`TOLERANCE`, which weighs all directions equally.
    F is lower triangular with a positive diagonal.
    """
    weights = weights / weights.sum()
    mean = weights @ means
    if factors.ndim == 2:
        return mean, weights @ factors
    stacked = (np.sqrt(weights)[:, None, None] * factors.mT).reshape(-1, means.shape[1])
    factor, gap = _lower(stacked.T), np.inf
    for _ in range(max_iterations):
        left, _, right = np.linalg.svd(factors.mT @ factor)
        mapped = np.einsum("k,kij->ij", weights, factors @ (left @ right))
        gap = float(np.linalg.norm(scipy.linalg.solve_triangular(factor, mapped - factor, lower=True)))
        if gap <= TOLERANCE:
            return mean, factor
        factor = _lower(mapped)
    reason = f"whitened gap {gap:.1e} after {max_iterations} steps, above {TOLERANCE:.1e}"
    raise NumericsError(f"barycentre of {len(means)} Gaussians did not converge: {reason}. Use diagonal factors.")


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
