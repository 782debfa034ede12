"""Predictions of y = g⁻¹(t) where t is Gaussian, or an even mixture of Gaussians; see :mod:`fedgp_flower.transforms`.

Where t ends at a floor c, as that of a square root at 0, its distribution is the Gaussian given t > c. Means and CRPS
are integrals over t by the rule of Gauss and Legendre, with dy = dt / g'(y):

    E y = ∫ y(t) p(t) dt,    CRPS = ∫_{t < t₀} F(t)² dy + ∫_{t > t₀} (1 − F(t))² dy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedgp_flower.lazy import special
from fedgp_flower.run.metrics import Scores, regression_scores
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array

NODES, WEIGHTS = np.polynomial.legendre.leggauss(160)
REACH = 9.0
"""How far integrals go, in standard deviations."""


def transformed_scores(means: Array, sds: Array, target: Array, transform: Transform) -> Scores:
    """Scores in units of y of the mixture (1/S) Σ_s N(means_s, sds_s²) of t, [S, n], at t = ``target`` [n]."""
    own = _Mixture(means, sds, transform)
    y = transform.inverse(target)
    nll = -own.log_density(target) - transform.log_slope(y)
    return regression_scores(own.moments()[0] - y, nll, own.crps(target), own.distribution(target))


def transformed_moments(mean: Array, sd: Array, transform: Transform) -> tuple[Array, Array]:
    """Mean and standard deviation of y [n] for t ~ N(mean, sd²)."""
    return _Mixture(mean[None], sd[None], transform).moments()


def transformed_quantiles(mean: Array, sd: Array, levels: Sequence[float], transform: Transform) -> Array:
    """Quantiles of y [levels, n] for t ~ N(mean, sd²)."""
    below = special.ndtr((transform.floor - mean) / sd)
    share = np.array(levels)[:, None]
    return transform.inverse(mean + sd * special.ndtri(below + share * (1 - below)))


class _Mixture:
    """An even mixture of Gaussians of t, cut off at the floor of a transformation."""

    def __init__(self, means: Array, sds: Array, transform: Transform) -> None:
        self.means, self.sds, self.transform = means, sds, transform
        self.low = np.maximum((means - REACH * sds).min(axis=0), transform.floor)
        self.high = (means + REACH * sds).max(axis=0)
        self.below = self._cumulative(np.full(means.shape[1], transform.floor))

    def _cumulative(self, t: Array) -> Array:
        total = np.zeros_like(t)
        for mean, sd in zip(self.means, self.sds, strict=True):
            total += special.ndtr((t - mean) / sd)
        return total / len(self.means)

    def distribution(self, t: Array) -> Array:
        """F(t), for t that broadcasts with [n]."""
        return (self._cumulative(t) - self.below) / (1 - self.below)

    def log_density(self, t: Array) -> Array:
        """Log p(t) [n]."""
        z = (t - self.means) / self.sds
        parts = -0.5 * z**2 - np.log(self.sds) - 0.5 * math.log(2 * math.pi)
        return np.asarray(special.logsumexp(parts, axis=0)) - math.log(len(parts)) - np.log1p(-self.below)

    def moments(self) -> tuple[Array, Array]:
        """Mean and standard deviation of y [n]: each component's integral goes over its own reach."""
        first, second = np.zeros(self.means.shape[1]), np.zeros(self.means.shape[1])
        for mean, sd in zip(self.means, self.sds, strict=True):
            t, weights = _rule(np.maximum(mean - REACH * sd, self.transform.floor), mean + REACH * sd)
            weights = weights * np.exp(-0.5 * ((t - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
            y = self.transform.inverse(t)
            first, second = first + (weights * y).sum(axis=0), second + (weights * y**2).sum(axis=0)
        share = len(self.means) * (1 - self.below)
        centre = first / share
        return centre, np.sqrt(np.maximum(second / share - centre**2, 0.0))

    def crps(self, target: Array) -> Array:
        """In units of y [n]."""
        middle = np.clip(target, self.low, self.high)
        total = np.abs(self.transform.inverse(target) - self.transform.inverse(middle))
        for (start, end), above in (((self.low, middle), 0.0), ((middle, self.high), 1.0)):
            t, weights = _rule(start, end)
            lengths = weights * np.exp(-self.transform.log_slope(self.transform.inverse(t)))
            total = total + (lengths * (self.distribution(t) - above) ** 2).sum(axis=0)
        return total


def _rule(low: Array, high: Array) -> tuple[Array, Array]:
    """Nodes and weights [Q, n] of integrals from ``low`` to ``high`` [n]."""
    half = (high - low) / 2
    return low + half * (NODES[:, None] + 1), half * WEIGHTS[:, None]
