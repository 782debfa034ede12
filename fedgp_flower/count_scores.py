"""Scores and quantiles of counts: the distribution of a count given f, mixed over a normal f."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.lazy import special
from fedgp_flower.scores import Scores, regression_scores
from fedgp_flower.typing import Array

RATE_NODES, FEWER_RATE_NODES, RATE_REACH = 241, 49, 6.5
"""Quadrature nodes of a log rate for a density, and for F in a CRPS; their range in sd."""
COUNT_STEPS = 400
"""Largest number of integers, at equal ratios, at which the CRPS of a count evaluates F."""
NEGLIGIBLE = 1e-12
"""Probability of a count beyond them."""


Cumulative: TypeAlias = Callable[[Array, Array], Array]
"""P(y ≤ k | f) of a count k; arrays broadcast."""


def poisson(count: Array, f: Array) -> Array:
    """Return P(y ≤ k | f) for the rate eᶠ by the incomplete gamma function."""
    return np.asarray(special.pdtr(count, np.exp(f)))


def count_scores(mean: Array, variance: Array, target: Array, expected: Array, nll: Array, law: Cumulative) -> Scores:
    """Score a count y given f ~ N(m, v), its mean E y and −log p(y), [n], by the trapezoidal rule in f."""
    if not (np.isfinite(mean).all() and np.isfinite(variance).all() and (variance >= 0).all()):
        raise NumericsError("moments of a predicted log rate are not finite, or a variance is negative")
    if not ((target >= 0) & (target == np.rint(target))).all():
        raise NumericsError("a target is not a count: expected whole numbers from 0 on")
    log_rates, share = _rates(mean, variance, RATE_NODES)
    upper = _count_distribution(law, target, log_rates, share)
    lower = np.where(target > 0, _count_distribution(law, np.maximum(target - 1, 0), log_rates, share), 0.0)
    crps = _count_crps(law, target, *_rates(mean, variance, FEWER_RATE_NODES))
    return regression_scores(expected - target, nll, crps, lower, upper)


def log_rate_of(mean: Array, sd: Array) -> tuple[Array, Array]:
    """Return mean m and variance v of a log rate, for counts with r = E y = exp(m + ½ v), var y = r + r² (e^v − 1)."""
    variance = np.log1p(np.maximum(sd**2 - mean, 0.0) / mean**2)  # rounding can make e^v − 1 negative
    return np.log(mean) - variance / 2, variance


def count_quantiles(mean: Array, variance: Array, levels: Sequence[float], law: Cumulative = poisson) -> Array:
    """Return the least k with F(k) ≥ level, [levels, n], of a count given f ~ N(m, v); the default law is Poisson."""
    log_rates, share = _rates(mean, variance, RATE_NODES)
    found = []
    for level in levels:
        low, high = np.full(len(mean), -1.0), np.maximum(np.ceil(np.exp(mean)), 1.0)
        while (short := _count_distribution(law, high, log_rates, share) < level).any():
            low[short], high[short] = high[short], 2 * high[short]
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            enough = (middle >= 0) & (_count_distribution(law, np.maximum(middle, 0.0), log_rates, share) >= level)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        found.append(high)
    return np.stack(found)


def _rates(mean: Array, variance: Array, count: int) -> tuple[Array, Array]:
    """Return quadrature nodes of the log rate [Q, n] and their weights [Q]."""
    nodes = np.linspace(-RATE_REACH, RATE_REACH, count)
    weights = np.exp(-0.5 * nodes**2)
    return mean + np.sqrt(variance) * nodes[:, None], weights / weights.sum()


def _count_distribution(law: Cumulative, count: Array, log_rates: Array, share: Array) -> Array:
    """Return F(count) of the mixture, for counts that broadcast with [n]."""
    total = np.zeros(np.broadcast_shapes(np.shape(count), log_rates.shape[1:]))
    for log_rate, weight in zip(log_rates, share, strict=True):
        total += weight * law(count, log_rate)
    return total


def _count_crps(law: Cumulative, target: Array, log_rates: Array, share: Array) -> Array:
    """Return Σ_k (F(k) − 1[k ≥ y])², with F constant between the integers of a grid."""
    end = float(target.max(initial=0.0)) + 1
    while (law(np.asarray(end), log_rates[-1]) < 1 - NEGLIGIBLE).any():
        end *= 1.5
    steps = np.rint(np.expm1(np.linspace(0, np.log1p(end), COUNT_STEPS)))
    edges = np.unique(np.concatenate([steps, target]))
    middle, length = np.floor((edges[:-1] + edges[1:] - 1) / 2), np.diff(edges)
    gap = _count_distribution(law, middle[:, None], log_rates, share) - (edges[:-1, None] >= target)
    return np.asarray(length @ gap**2)
