"""Prediction for a unit that joins with few rows: an integral over its parameters φ_m = (R, s, σ).

Given q(u) = N(m, V) and φ_m, its targets are N(s A m, s² B + σ² I), with features A of smoothing R and
B = A V Aᵀ + diag(a² − ‖A_n‖²). Predictions are mixtures over a grid of ρ = log(1 + 2R/S), log σ and s, which is
refined twice around the posterior. Priors are p(ρ) ∝ exp(−2ρ), s ~ N(0, 10 ȳ²/a²) and log σ ~ N(½ log .09 ȳ², 1.5²)
with ȳ² the mean square of the targets, shrunk towards 1. For one latent function of one input.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp

from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior
from fedgp_flower.methods.fedmgp.trust import START_NOISE
from fedgp_flower.methods.fedmgp.unit import feature, mean_square, squared_gaps
from fedgp_flower.typing import Array

MOST_ROWS = 200
"""With more rows φ_m is a point estimate."""
WIDEST = 5.0
"""Largest ρ; R is then 74 S."""
DECAY = 2.0
"""Rate of p(ρ)."""
NODES = 25
"""Grid points of each of ρ, log σ and s."""
SPREAD, AMPLITUDES = 1.5, 10.0
"""Prior sd of log σ; prior variance of s over ȳ²/a²."""


def predict_joining(
    rows: tuple[Array, Array], x: Array, latents: LatentFunctions, q: LatentPosterior
) -> tuple[Array, Array, float]:
    """Mean and variance of f at ``x`` [N', 1] given q(u) and the unit's ``rows``, and the mean of σ²."""
    (x_train, y), scale, height, [factor] = rows, latents.scales[0], float(latents.amplitudes[0]), latents.whitening()
    gaps, N, power = squared_gaps(np.concatenate([x_train, x]), latents.inducing), len(y), mean_square(y)
    variance, centre = AMPLITUDES * power / height**2, 0.5 * math.log(START_NOISE * power)
    rho, log_sd = midpoints(0.0, WIDEST), midpoints(centre - 3 * SPREAD, centre + 3 * SPREAD)
    for _ in range(3):
        K = np.stack([feature(gaps, scale, height, factor, scale * math.expm1(width) / 2) for width in rho])
        KV, left = K @ q.covariance, np.maximum(height**2 - np.square(K).sum(2), 0)  # [R, N + N', J], [R, N + N']
        B = KV[:, :N] @ K[:, :N].transpose(0, 2, 1) + left[:, :N, None] * np.eye(N)
        values, vectors = np.linalg.eigh(B)
        values, f = np.maximum(values, 0), K @ q.mean  # f for s = 1
        rotated_f, rotated_y = (f[:, None, :N] @ vectors)[:, 0], y @ vectors  # [R, N]
        noise = np.exp(2 * log_sd)[:, None]
        s, weights = amplitudes(rotated_f[:, None], rotated_y[:, None], values[:, None], noise, variance)
        weights = weights - 0.5 * np.square((log_sd - centre) / SPREAD)[:, None] - DECAY * rho[:, None, None]
        weights = np.exp(weights - logsumexp(weights))
        rho = refined(rho, weights.sum((1, 2)), 0.0, WIDEST)
        log_sd = refined(log_sd, weights.sum((0, 2)))
    mean, square = np.zeros(len(x)), np.zeros(len(x))
    pruned = np.where(weights > 1e-6 * weights.max(), weights, 0)
    pruned /= pruned.sum()
    spread = (KV * K).sum(2) + left  # the diagonal of B
    for r, weight in enumerate(pruned):
        used = weight > 0
        a, sigma2 = s[r][used][:, None], np.broadcast_to(noise, weight.shape)[used][:, None]  # [H, 1]
        across, total = KV[r, N:] @ K[r, :N].T @ vectors[r], a**2 * values[r] + sigma2
        means = a * f[r, N:] + a**2 * ((rotated_y[r] - a * rotated_f[r]) / total) @ across.T  # given s, σ² and the rows
        variances = a**2 * spread[r, N:] - a**4 * (1 / total) @ np.square(across).T
        mean, square = mean + weight[used] @ means, square + weight[used] @ (variances + means**2)
    return mean, square - mean**2, float(pruned.sum((0, 2)) @ noise[:, 0])


def amplitudes(f: Array, y: Array, values: Array, noise: Array, variance: float) -> tuple[Array, Array]:
    """Grid of s [R, S, T] around the mode at each R and σ² [S, 1], and log p(y, s | R, σ) + log spacing.

    ``f``, for s = 1, and ``y`` are in the eigenvectors of B, ``values`` its eigenvalues, all [R, 1, N].
    """
    level = np.asarray(variance / AMPLITUDES)  # s²
    for _ in range(3):
        weights = 1 / (level * values + noise)
        precision = (weights * f**2).sum(2, keepdims=True) + 1 / variance
        best = (weights * f * y).sum(2, keepdims=True) / precision
        level = best**2 + 1 / precision
    sd = 1 / np.sqrt(precision)
    s = best + sd * np.linspace(-6, 6, NODES)
    total = s[..., None] ** 2 * values[:, :, None] + noise[..., None]  # [R, S, T, N]
    fit = -0.5 * (np.log(total) + np.square(y[:, :, None] - s[..., None] * f[:, :, None]) / total).sum(3)
    return s, fit - 0.5 * s**2 / variance + np.log(sd)


def refined(nodes: Array, weights: Array, low: float = -math.inf, high: float = math.inf) -> Array:
    """New nodes over mean ± 5 sd of the weighted ``nodes``; the sd is at least half a node distance."""
    mean = float(weights @ nodes)
    sd = max(math.sqrt(float(weights @ np.square(nodes - mean))), 0.5 * float(nodes[1] - nodes[0]))
    return midpoints(max(mean - 5 * sd, low), min(mean + 5 * sd, high))


def midpoints(low: float, high: float) -> Array:
    """Midpoints of equal parts of an interval."""
    return low + (high - low) * (np.arange(NODES) + 0.5) / NODES
