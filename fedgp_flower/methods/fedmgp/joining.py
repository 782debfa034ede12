"""A unit that joins with few rows: its parameters φ_m = (R, s, σ) are integrated over, not taken as a point.

Given q(u) = N(m, V), which has not seen the unit's rows, and φ_m, its targets are N(s A m, s² B + σ² I), with A the
features of a smoothing R and B = A V Aᵀ + diag(a² − ‖A_n‖²). In the eigenvectors of B each s and σ takes N products.
φ_m lies on a grid of ρ = log(1 + 2R/S), which sees R/S = 0 as well as ten, log σ, and s around its best at each; the
grid is drawn together around the posterior it finds, twice. Predictions are mixtures over the grid.

A priori p(ρ) ∝ exp(−2ρ), so that R is S/5 in the median and has a heavy tail, s ~ N(0, 10 ȳ²/a²) and log σ ~ N(½ log
.09 ȳ², 1.5²), ȳ² the mean square of the targets: around what every unit starts from. For one latent function of one
input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior
from fedgp_flower.methods.fedmgp.trust import START_NOISE
from fedgp_flower.methods.fedmgp.unit import feature, squared_gaps
from fedgp_flower.typing import Array

MOST_ROWS = 200
"""Beyond, φ_m is as good as known."""
WIDEST = 5.0
"""Largest ρ: smoothing 74 times as wide as the latent function."""
DECAY = 2.0
"""Rate of p(ρ)."""
NODES = 25
"""Of ρ, of log σ and of s."""
SPREAD, AMPLITUDES = 1.5, 10.0
"""Prior sd of log σ; prior variance of s over ȳ²/a²."""
REACH = 5.0
"""Posterior standard deviations on each side that a finer grid covers."""
PASSES = 3
LEAST = 1e-6
"""Nodes of less weight, relative to the heaviest, are left out."""


@dataclass(frozen=True, slots=True)
class Smoothed:
    """What a smoothing R makes of q(u) at some rows x, and at others where f is wanted."""

    mean: Array  # [N]  A m, in the eigenvectors of B
    y: Array  # [N]  likewise
    values: Array  # [N]  eigenvalues of B
    ahead: Array  # [N']  A m
    spread: Array  # [N']  diagonal of B
    across: Array  # [N', N]  A' V Aᵀ in the eigenvectors of B

    def grid(self, deviations: Array, variance: float) -> tuple[Array, Array]:
        """Amplitudes s [S, T] around the best at each σ [S], and log p(y, s | R, σ) + log of their distance."""
        noise = np.square(deviations)[:, None]
        level = np.full((len(deviations), 1), variance / AMPLITUDES)  # s²
        for _ in range(3):
            weights = 1 / (level * self.values + noise)
            precision = (weights * self.mean**2).sum(1, keepdims=True) + 1 / variance
            best = (weights * self.mean * self.y).sum(1, keepdims=True) / precision
            level = best**2 + 1 / precision
        sd = 1 / np.sqrt(precision)
        s = best + sd * np.linspace(-6, 6, NODES)
        total = s[..., None] ** 2 * self.values + noise[..., None]  # [S, T, N]
        fit = -0.5 * (np.log(total) + np.square(self.y - s[..., None] * self.mean) / total).sum(-1)
        return s, fit - 0.5 * s**2 / variance + np.log(sd)

    def predicted(self, s: Array, noise: Array) -> tuple[Array, Array]:
        """Mean and variance of f [H, N'] given s, σ² [H] and the rows."""
        s, noise = s[:, None], noise[:, None]
        total = s**2 * self.values + noise
        mean = s * self.ahead + s**2 * ((self.y - s * self.mean) / total) @ self.across.T
        return mean, s**2 * self.spread - s**4 * (1 / total) @ np.square(self.across).T


def smoothed(
    rows: tuple[Array, Array], x: Array, latents: LatentFunctions, q: LatentPosterior, rho: Array
) -> list[Smoothed]:
    """For each ρ; ``rows`` are x [N, 1] and y [N]."""
    (seen, y), scale, height, [factor] = rows, latents.scales[0], float(latents.amplitudes[0]), latents.whitening()
    gaps, found = squared_gaps(np.concatenate([seen, x]), latents.inducing), []
    for width in rho:
        both = feature(gaps, scale, height, factor, scale * math.expm1(width) / 2)
        left, (A, ahead) = np.maximum(height**2 - np.square(both).sum(1), 0), np.split(both, [len(y)])
        values, vectors = np.linalg.eigh(A @ q.covariance @ A.T + np.diag(left[: len(y)]))
        across = ahead @ q.covariance
        spread, turned = (across * ahead).sum(1) + left[len(y) :], across @ A.T @ vectors
        parts = vectors.T @ (A @ q.mean), vectors.T @ y, np.maximum(values, 0), ahead @ q.mean, spread, turned
        found.append(Smoothed(*parts))
    return found


def predict_joining(
    rows: tuple[Array, Array], x: Array, latents: LatentFunctions, posterior: LatentPosterior
) -> tuple[Array, Array, float]:
    """Mean and variance of f at ``x`` [N', 1] given q(u) and the unit's ``rows``, and the mean of σ²."""
    power = float(np.mean(rows[1] ** 2))
    variance, centre = AMPLITUDES * power / float(latents.amplitudes[0]) ** 2, 0.5 * math.log(START_NOISE * power)
    rho, log_sd = middles(0.0, WIDEST), middles(centre - 3 * SPREAD, centre + 3 * SPREAD)
    for _ in range(PASSES):
        parts = smoothed(rows, x, latents, posterior, rho)
        found = [part.grid(np.exp(log_sd), variance) for part in parts]
        s, weights = (np.stack(part) for part in zip(*found, strict=True))  # [R, S, T]
        weights = weights - 0.5 * np.square((log_sd - centre) / SPREAD)[:, None] - DECAY * rho[:, None, None]
        weights = np.exp(weights - logsumexp(weights))
        noise = np.exp(2 * np.broadcast_to(log_sd[:, None], s.shape[1:]))
        rho = drawn_together(rho, weights.sum((1, 2)), 0.0, WIDEST)
        log_sd = drawn_together(log_sd, weights.sum((0, 2)))
    mean, square, level = np.zeros(len(x)), np.zeros(len(x)), 0.0
    kept = np.where(weights > LEAST * weights.max(), weights, 0)
    kept /= kept.sum()
    for part, amplitudes, share in zip(parts, s, kept, strict=True):
        heavy = share > 0
        means, around = part.predicted(amplitudes[heavy], noise[heavy])
        mean, square = mean + share[heavy] @ means, square + share[heavy] @ (around + means**2)
        level += float(share[heavy] @ noise[heavy])
    return mean, square - mean**2, level


def drawn_together(nodes: Array, weights: Array, low: float = -math.inf, high: float = math.inf) -> Array:
    """Nodes over the mean ± 5 sd of the weights; half a distance between nodes is the least sd."""
    mean = float(weights @ nodes)
    sd = max(math.sqrt(float(weights @ np.square(nodes - mean))), 0.5 * float(nodes[1] - nodes[0]))
    return middles(max(mean - REACH * sd, low), min(mean + REACH * sd, high))


def middles(low: float, high: float) -> Array:
    """The middles of equal parts of an interval: nodes of equal weight."""
    return low + (high - low) * (np.arange(NODES) + 0.5) / NODES
