"""Amplitude and noise at their best for given sums: two hyperparameters that cost no exchange.

With sums of a kernel of unit amplitude, A = UΛUᵀ and β = (Uᵀb)², the bound of the kernel a·k with noise σ² is, at
r = a/σ² (see :func:`fedgp_flower.gp.sums.collapsed_bound`),

    F = −½ [N log 2πσ² + Σ log(1 + rλ) + (s − Σ rβ/(1 + rλ))/σ² + r (c − Σ λ)],

so that σ²(r) = (s − Σ rβ/(1 + rλ))/N, and one number is left to search. By the envelope theorem the gradient of the
maximum in everything else is the gradient of F at this a and σ² held fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedgp_flower.gp.linalg import symmetric
from fedgp_flower.gp.sums import SparseSums

LOG_RATIO = (-8.0, 18.0)
"""Where log a/σ² is searched."""
PENALTY = 0.05
"""J = F − .05 Σ (log ℓ − 1)²: a lengthscale that the data leave open does not run away."""
LEAST_NOISE = 1e-6
"""Of the standardised target."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The maximum of the bound over amplitude and noise."""

    value: float  # F, nats
    amplitude: float  # a, factor of the kernel
    noise: float  # σ²


def profiled(sums: SparseSums) -> Profile:
    """Where the collapsed bound is highest over the kernel's amplitude and the noise variance.

    Args:
        sums: Of a kernel of unit amplitude. The amplitude found multiplies that kernel.
    """
    spectrum, vectors = torch.linalg.eigh(symmetric(sums.gram))
    spectrum = spectrum.clamp(min=0)  # a Gram matrix: what is below 0 is rounding
    weights = (vectors.mT @ sums.projection).square()
    unexplained = float(sums.prior_variance - sums.gram.diagonal().sum())
    count, squares = float(sums.count), float(sums.target_squares)

    def noise_at(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ratio = log_ratio.exp()[:, None]
        grown = 1 + ratio * spectrum  # [G, M]
        residual = squares - (ratio * weights / grown).sum(1)
        return (residual / count).clamp(min=LEAST_NOISE), residual, grown

    def bound(log_ratio: torch.Tensor) -> torch.Tensor:
        noise, residual, grown = noise_at(log_ratio)
        fit = count * (2 * math.pi * noise).log() + residual / noise
        return -0.5 * (fit + grown.log().sum(1) + log_ratio.exp() * unexplained)

    def slope(log_ratio: torch.Tensor) -> torch.Tensor:
        noise, _, grown = noise_at(log_ratio)
        ratio = log_ratio.exp()
        trace = (spectrum / grown).sum(1) - (weights / grown.square()).sum(1) / noise + unexplained
        return -0.5 * ratio * trace

    grid = torch.linspace(*LOG_RATIO, 261, dtype=torch.float64)
    best = int(bound(grid).argmax())
    low, high = grid[max(best - 1, 0)][None], grid[min(best + 1, len(grid) - 1)][None]
    if bool(slope(low) > 0) and bool(slope(high) < 0):
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if bool(slope(middle) > 0) else (low, middle)
        top = (low + high) / 2
    else:
        top = grid[best][None]  # at an end of the search, or where the noise reaches its floor
    noise = noise_at(top)[0]
    return Profile(float(bound(top)), float(noise * top.exp()), float(noise))


def scaled(sums: SparseSums, amplitude: float) -> SparseSums:
    """The sums of the kernel a·k from those of k: A and c by a, b by √a."""
    return SparseSums(
        sums.gram * amplitude,
        sums.projection * math.sqrt(amplitude),
        sums.target_squares,
        sums.prior_variance * amplitude,
        sums.count,
    )


def prior(name: str, num_inputs: int) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of a hyperparameter, by its wire name.

    log ℓ ~ N(½ log D + .3, 1), log a ~ N(1, 1.5²), log σ² ~ N(−4, 2²), of a standardised target; others N(0, 1).
    """
    if "lengthscale" in name:
        return 0.5 * math.log(num_inputs) + 0.3, 1.0
    if "noise" in name:
        return -4.0, 2.0
    return (1.0, 1.5) if "outputscale" in name or "variance" in name else (0.0, 1.0)
