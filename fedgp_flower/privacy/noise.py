"""Noise of differential privacy: what Gaussian noise guarantees, and integers of the discrete normal distribution.

A release that moves by at most Δ, with normal noise of standard deviation ν, is N(0, 1) against N(μ, 1), μ = Δ/ν.
Releases that build on one another compose to √Σ μ², and μ means (ε, δ) exactly where

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)

(Balle and Wang, ICML 2018; Dong, Roth and Su, *Gaussian differential privacy*, 2022). Noise is discrete, so that its
last bits tell nothing: P(k) ∝ exp(−k² / 2σ²) (Canonne, Kamath and Steinke, NeurIPS 2020). Probabilities of a sum over K
sites are within a factor exp(10 K exp(−π² σ²)) of those of one draw with K σ² (Kairouz, Liu and Steinke, ICML 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64
from numpy import ndarray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from fedgp_flower.typing import Array

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


def discrete_normal(deviation: float, count: int, rng: np.random.Generator) -> Int64[ndarray, " count"]:
    """Independent draws with P(k) ∝ exp(−k² / 2σ²), by algorithm 3 of Canonne et al.: kept discrete Laplace proposals.

    Probabilities are floats, draws are integers. Noise that protects needs an ``rng`` that nobody can foresee.

    >>> discrete_normal(2.0, 5, np.random.default_rng(0)).dtype
    dtype('int64')
    """
    width = math.floor(deviation) + 1
    kept: list[Array] = []
    missing = count
    while missing > 0:
        one, other = rng.geometric(-math.expm1(-1 / width), (2, 2 * missing))
        proposed = one - other
        share = np.exp(-((np.abs(proposed) - deviation**2 / width) ** 2) / (2 * deviation**2))
        kept.append(proposed[rng.random(len(proposed)) < share])
        missing -= len(kept[-1])
    return np.concatenate(kept)[:count]
