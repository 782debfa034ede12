"""Scores and quantiles of counts: the distribution of a count given f, mixed over a normal f."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class PoissonLaw:
    """Poisson counts with rate eᶠ."""

    def log_mass(self, count: Array, f: Array) -> Array:
        """Return log p(k | f) = k f − eᶠ − log k!."""
        return count * f - np.exp(f) - special.gammaln(count + 1)

    def cumulative(self, count: Array, f: Array) -> Array:
        """Return P(y ≤ k | f) by the incomplete gamma function."""
        return np.asarray(special.pdtr(count, np.exp(f)))

    def mean(self, mean: Array, variance: Array) -> Array:
        """Return E y = E eᶠ = exp(m + ½ v) for f ~ N(m, v)."""
        return np.exp(mean + variance / 2)

    def end(self, f: float) -> float:
        """Return a count with a negligible probability of a larger one: the mean plus several standard deviations."""
        rate = float(np.exp(f))
        return rate + RATE_REACH * rate**0.5 + 10


@dataclass(frozen=True, slots=True)
class NegativeBinomialLaw(PoissonLaw):
    """Counts with mean μ = eᶠ and variance μ + α μ², α the dispersion."""

    dispersion: float

    def log_mass(self, count: Array, f: Array) -> Array:
        """Return log [Γ(k + r) / (Γ(r) k!) · (μ / (r + μ))ᵏ (r / (r + μ))ʳ] with r = 1/α."""
        r = 1 / self.dispersion
        ways = special.gammaln(count + r) - special.gammaln(r) - special.gammaln(count + 1)
        return ways + count * (f - np.log(r)) - (count + r) * np.logaddexp(0, f - np.log(r))

    def cumulative(self, count: Array, f: Array) -> Array:
        """Return P(y ≤ k | f) by the incomplete beta function."""
        r = 1 / self.dispersion
        return np.asarray(special.betainc(r, count + 1, special.expit(np.log(r) - f)))

    def end(self, f: float) -> float:
        """Return the end of the tail, which falls by a factor e every 1 + αμ counts."""
        spread = 1 + self.dispersion * float(np.exp(f))
        return PoissonLaw().end(f) * spread**0.5 + 40 * spread


@dataclass(frozen=True, slots=True)
class BinomialLaw:
    """Successes among n trials [n rows], each with probability σ(f)."""

    trials: Array

    def log_mass(self, count: Array, f: Array) -> Array:
        """Return log (n choose k) + k f − n log(1 + eᶠ)."""
        rest = self.trials - count
        ways = special.gammaln(self.trials + 1) - special.gammaln(count + 1) - special.gammaln(rest + 1)
        return ways + count * f - self.trials * np.logaddexp(0, f)

    def cumulative(self, count: Array, f: Array) -> Array:
        """Return P(y ≤ k | f) by the incomplete beta function."""
        rest = np.maximum(self.trials - count, 1)
        return np.where(count >= self.trials, 1.0, special.betainc(rest, count + 1, special.expit(-f)))

    def mean(self, mean: Array, variance: Array) -> Array:
        """Return n E σ(f)."""
        f, share = _rates(mean, variance, RATE_NODES)
        return self.trials * (share @ special.expit(f))

    def end(self, f: float) -> float:
        """Return the largest number of trials plus one."""
        return float(self.trials.max(initial=0.0)) + 1


Law: TypeAlias = PoissonLaw | BinomialLaw
"""The distribution of a count k given f; arrays broadcast."""


def count_scores(mean: Array, variance: Array, target: Array, law: Law | None = None) -> Scores:
    """Score a count y given f ~ N(m, v), [n], by the trapezoidal rule in f; the default law is Poisson."""
    law = law or PoissonLaw()
    if not (np.isfinite(mean).all() and np.isfinite(variance).all() and (variance >= 0).all()):
        raise NumericsError("moments of a predicted log rate are not finite, or a variance is negative")
    if not ((target >= 0) & (target == np.rint(target))).all():
        raise NumericsError("a target is not a count: expected whole numbers from 0 on")
    log_rates, share = _rates(mean, variance, RATE_NODES)
    upper = _count_distribution(law, target, log_rates, share)
    lower = np.where(target > 0, _count_distribution(law, np.maximum(target - 1, 0), log_rates, share), 0.0)
    nll = -np.asarray(special.logsumexp(law.log_mass(target, log_rates), axis=0, b=share[:, None]))
    crps = _count_crps(law, target, *_rates(mean, variance, FEWER_RATE_NODES))
    return regression_scores(law.mean(mean, variance) - target, nll, crps, lower, upper)


def log_rate_of(mean: Array, sd: Array) -> tuple[Array, Array]:
    """Return mean m and variance v of a log rate, for counts with r = E y = exp(m + ½ v), var y = r + r² (e^v − 1)."""
    variance = np.log1p(np.maximum(sd**2 - mean, 0.0) / mean**2)  # rounding can make e^v − 1 negative
    return np.log(mean) - variance / 2, variance


def count_quantiles(mean: Array, variance: Array, levels: Sequence[float], law: Law | None = None) -> Array:
    """Return the least k with F(k) ≥ level, [levels, n], of a count given f ~ N(m, v); the default law is Poisson."""
    law = law or PoissonLaw()
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


def _count_distribution(law: Law, count: Array, log_rates: Array, share: Array) -> Array:
    """Return F(count) of the mixture, for counts that broadcast with [n]."""
    total = np.zeros(np.broadcast_shapes(np.shape(count), log_rates.shape[1:]))
    for log_rate, weight in zip(log_rates, share, strict=True):
        total += weight * law.cumulative(count, log_rate)
    return total


def _count_crps(law: Law, target: Array, log_rates: Array, share: Array) -> Array:
    """Return Σ_k (F(k) − 1[k ≥ y])², with F constant between the integers of a grid."""
    end = max(law.end(float(log_rates.max(initial=0.0))), float(target.max(initial=0.0)) + 1)
    steps = np.rint(np.expm1(np.linspace(0, np.log1p(end), COUNT_STEPS)))
    edges = np.unique(np.concatenate([steps, target]))
    middle, length = np.floor((edges[:-1] + edges[1:] - 1) / 2), np.diff(edges)
    gap = _count_distribution(law, middle[:, None], log_rates, share) - (edges[:-1, None] >= target)
    return np.asarray(length @ gap**2)
