"""A Gaussian around the best hyperparameters, draws from it, and which of them the evidence bears out.

With J(θ) = log p(y, θ) up to a constant, its mode θ̂ and H = −∂²J/∂θ², Laplace's approximation is p(θ | y) ≈ N(θ̂, H⁻¹).
Where sums are known, amplitude and noise need no such exchange: given all else, theirs is a Gaussian in two dimensions,
from these sums alone.

References:
    MacKay, Information Theory, Inference, and Learning Algorithms (2003), Chapter 27.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedgp_flower.gp.profiled import profiled
from fedgp_flower.gp.sums import SparseSums, collapsed_bound
from fedgp_flower.typing import Array

LEAST_CURVATURE = 0.25
"""Of J along any direction, that of the widest prior: where the rows leave a logarithm open, its sd is 2."""
IMPLAUSIBLE = 10.0
"""Nats by which J at a draw may be below what the Gaussian says of it; beyond them the draw is left out."""


def bounded(precision: Array) -> Array:
    """With eigenvalues of :data:`LEAST_CURVATURE` at least: a point that is no maximum has a Gaussian, too."""
    values, vectors = np.linalg.eigh(precision)
    return np.asarray((vectors * np.maximum(values, LEAST_CURVATURE)) @ vectors.T)


def drawn(mode: Array, precision: Array, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draws of N(mode, precision⁻¹) [S, H], and the height of its log density there below that at the mode [S]."""
    values, vectors = np.linalg.eigh(precision)
    normal = rng.standard_normal((count, len(mode)))
    return mode + (normal / np.sqrt(values)) @ vectors.T, -0.5 * np.square(normal).sum(1)


def plausible(heights: Array, expected: Array) -> NDArray[np.bool_]:
    """Which draws to keep [S]: J − J(θ̂) is not far below what the Gaussian says.

    >>> plausible(np.array([-1.0, -30.0, 2.0]), np.array([-2.0, -2.0, -2.0]))
    array([ True, False,  True])
    """
    return np.asarray(heights - expected > -IMPLAUSIBLE)


def amplitude_and_noise(sums: SparseSums) -> tuple[Array, Array]:
    """Mode [2] and precision [2, 2] of the logarithms of amplitude and σ², given sums of a kernel of unit amplitude."""
    best = profiled(sums)
    mode = torch.tensor([best.amplitude, best.noise], dtype=torch.float64).log()
    precision = -torch.autograd.functional.hessian(lambda logs: _bound(sums, logs), mode)
    return mode.numpy(), bounded(precision.numpy())


def _bound(sums: SparseSums, logs: torch.Tensor) -> torch.Tensor:
    amplitude, noise = logs.exp()
    louder = SparseSums(
        sums.gram * amplitude,
        sums.projection * amplitude.sqrt(),
        sums.target_squares,
        sums.prior_variance * amplitude,
        sums.count,
    )
    return collapsed_bound(louder, noise)
