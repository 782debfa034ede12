"""What Gaussian noise is worth: μ of a release, (ε, δ) of μ, and what several releases add up to.

A release whose values move by at most Δ between neighbours, with normal noise of standard deviation ν, is as hard to
tell apart as N(0, 1) and N(μ, 1) with μ = Δ/ν. Releases that build on one another compose to √Σ μ², and μ means (ε, δ)
exactly where

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)

(Balle and Wang, *Improving the Gaussian mechanism*, ICML 2018; Dong, Roth and Su, *Gaussian differential privacy*,
2022). Nothing here is sampled, so that this is no bound: Rényi accountants, Flower's among them, say more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

SMALLEST, LARGEST = 1e-6, 1e3


def delta_of(epsilon: float, mu: float) -> float:
    """δ(ε) of a Gaussian release.

    >>> round(delta_of(1.0, 1.0), 6)
    0.126937
    """
    return float(ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2))))


def mu_of(epsilon: float, delta: float) -> float:
    """The largest μ that is (ε, δ)."""
    return float(brentq(lambda mu: delta_of(epsilon, mu) - delta, SMALLEST, LARGEST, xtol=1e-14))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε at which μ is (ε, δ)."""
    if delta_of(0.0, mu) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, mu * mu / 2 + 40 * mu, xtol=1e-12))


def composed(mus: Iterable[float]) -> float:
    """μ of several releases, each of which may have looked at those before."""
    return math.hypot(*mus)
