"""Scores of counts: y | f ~ Poisson(e^f), f ~ N(m, v), a mixture of Poisson distributions over f.

The mixture is taken at equal steps of f, where the trapezoidal rule converges faster than any power. Intervals and PIT
are those of a distribution on the integers: y lies in the central interval where F(y) and 1 − F(y − 1) both exceed its
tails, and the PIT of a row is spread evenly over [F(y − 1), F(y)] (Czado, Gneiting & Held 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.lazy import special
from fedgp_flower.run.metrics import LEVELS, PIT_BINS, Scores
from fedgp_flower.typing import Array

NODES, FEWER = 241, 49
"""Steps of f for a density and, for the many values of F in a CRPS, fewer."""
REACH = 6.5
"""How far they go, in standard deviations."""
STEPS = 400
"""Integers at which the CRPS looks at F, at equal ratios; every integer where these are denser."""


def count_scores(mean: Array, variance: Array, target: Array) -> Scores:
    """Sums of scores under the names of a regression; the point prediction is E y = exp(m + ½ v), each [n].

    Raises:
        NumericsError: for moments that are not finite, variances below zero, or targets that are no counts.
    """
    if not (np.isfinite(mean).all() and np.isfinite(variance).all() and (variance >= 0).all()):
        raise NumericsError("moments of a predicted log rate are not finite, or a variance is negative")
    if not ((target >= 0) & (target == np.rint(target))).all():
        raise NumericsError("a target is not a count: `model.likelihood` = 'poisson' needs whole numbers from 0 on")
    log_rates, share = _mixture(mean, variance, NODES)
    log_parts = target * log_rates - np.exp(log_rates) - special.gammaln(target + 1)
    error = np.exp(mean + variance / 2) - target
    upper = _distribution(target, log_rates, share)
    lower = np.where(target > 0, _distribution(np.maximum(target - 1, 0), log_rates, share), 0.0)
    sums = {
        "count": float(len(target)),
        "squared-error": float(np.sum(error**2)),
        "absolute-error": float(np.sum(np.abs(error))),
        "nll": float(-np.sum(special.logsumexp(log_parts, axis=0, b=share[:, None]))),
        "crps": float(np.sum(_crps(target, *_mixture(mean, variance, FEWER)))),
    }
    for level in LEVELS:
        tail = 0.5 - level / 200
        sums[f"inside-{level}"] = float(np.sum((upper >= tail) & (lower <= 1 - tail)))
    return Scores(sums, {"evaluation.pit": _spread(lower, upper)})


def count_quantiles(mean: Array, sd: Array, levels: Sequence[float]) -> Array:
    """The least counts k with F(k) ≥ level, [levels, n], of the mixture whose counts have these moments [n].

    A log-normal rate e^f has E y = r = exp(m + ½ v) and var y = r + r² (e^v − 1), so that m and v can be read off.
    """
    spread = np.maximum(sd**2 - mean, 0.0) / mean**2  # e^v − 1 is below zero by rounding alone
    variance = np.log1p(spread)
    log_rates, share = _mixture(np.log(mean) - variance / 2, variance, NODES)
    found = np.empty((len(levels), len(mean)))
    for row, level in zip(found, levels, strict=True):
        low, high = np.full(len(mean), -1.0), np.maximum(np.ceil(mean), 1.0)
        while (short := _distribution(high, log_rates, share) < level).any():
            low[short], high[short] = high[short], 2 * high[short]
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            enough = _distribution(np.maximum(middle, 0.0), log_rates, share) >= level
            settled = high - low <= 1
            high = np.where(enough & ~settled, middle, high)
            low = np.where(enough | settled, low, middle)
        row[:] = high
    return found


def central(mean: Array, sd: Array, counts: bool) -> tuple[Array, Array]:
    """Ends of the 95 % interval of an observation with these moments: of a Gaussian, or of a count."""
    if counts:
        low, high = count_quantiles(mean, sd, (0.025, 0.975))
        return low, high
    half = float(special.ndtri(0.975)) * sd
    return mean - half, mean + half


def _mixture(mean: Array, variance: Array, count: int) -> tuple[Array, Array]:
    """Log rates [Q, n] and their shares [Q]."""
    nodes = np.linspace(-REACH, REACH, count)
    weights = np.exp(-0.5 * nodes**2)
    return mean + np.sqrt(variance) * nodes[:, None], weights / weights.sum()


def _distribution(count: Array, log_rates: Array, share: Array) -> Array:
    """F(count) of the mixture, for counts that broadcast with [n]."""
    total = np.zeros(np.broadcast_shapes(np.shape(count), log_rates.shape[1:]))
    for log_rate, weight in zip(log_rates, share, strict=True):
        total += weight * special.pdtr(count, np.exp(log_rate))
    return total


def _crps(target: Array, log_rates: Array, share: Array) -> Array:
    """Σ_k (F(k) − 1[k ≥ y])², with F constant between the integers that are looked at."""
    rate = float(np.exp(log_rates.max(initial=0.0)))
    end = max(rate + REACH * np.sqrt(rate) + 10, float(target.max(initial=0.0)) + 1)
    steps = np.rint(np.expm1(np.linspace(0, np.log1p(end), STEPS)))
    edges = np.unique(np.concatenate([steps, target]))
    middle, length = np.floor((edges[:-1] + edges[1:] - 1) / 2), np.diff(edges)
    gap = _distribution(middle[:, None], log_rates, share) - (edges[:-1, None] >= target)
    return np.asarray(length @ gap**2)


def _spread(lower: Array, upper: Array) -> Array:
    """Rows by bin of the PIT, each spread over [lower, upper] [n]."""
    edges = np.linspace(0, 1, PIT_BINS + 1)[:, None]
    width = np.maximum(upper - lower, np.finfo(float).tiny)
    below = np.clip((edges - lower) / width, 0.0, 1.0)  # share of each row's mass to the left of an edge
    below[-1] = 1.0
    return np.asarray(np.diff(below, axis=0).sum(axis=1))
