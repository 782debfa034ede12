"""Differential privacy: the guarantee of Gaussian noise, and draws from the discrete normal distribution.

A release with sensitivity Δ and normal noise of standard deviation ν tells N(0, 1) from N(μ, 1), μ = Δ/ν. Adaptive
releases compose to √Σ μ², and μ implies (ε, δ) exactly if

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)

(Balle and Wang, ICML 2018; Dong, Roth and Su, *Gaussian differential privacy*, 2022). The noise is discrete, because
the last bits of floating-point noise leak information: P(k) ∝ exp(−k² / 2σ²) (Canonne, Kamath and Steinke, NeurIPS
2020). Probabilities of a sum over K sites are within a factor exp(10 K exp(−π² σ²)) of those of one draw with variance
K σ² (Kairouz, Liu and Steinke, ICML 2021).
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
    """Return δ(ε) of a Gaussian release.

    >>> round(delta_of(1.0, 1.0), 6)
    0.126937
    """
    return float(ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2))))


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest μ that implies (ε, δ)."""
    return float(brentq(lambda mu: delta_of(epsilon, mu) - delta, SMALLEST, LARGEST, xtol=1e-14))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest ε for which μ implies (ε, δ)."""
    if delta_of(0.0, mu) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, mu * mu / 2 + 40 * mu, xtol=1e-12))


def composed(mus: Iterable[float]) -> float:
    """Return μ of several releases, each of which may depend on the previous ones."""
    return math.hypot(*mus)


def discrete_normal(deviation: float, count: int, rng: np.random.Generator) -> Int64[ndarray, " count"]:
    """Draw independently from P(k) ∝ exp(−k² / 2σ²), by rejection of discrete Laplace draws (Canonne et al., Alg. 3).

    Noise for privacy needs an unpredictable ``rng``. Acceptance probabilities are floats.

    >>> discrete_normal(2.0, 5, np.random.default_rng(0)).dtype
    dtype('int64')
    """
    width = math.floor(deviation) + 1
    accepted: list[Array] = []
    missing = count
    while missing > 0:
        first, second = rng.geometric(-math.expm1(-1 / width), (2, 2 * missing))
        proposed = first - second
        acceptance = np.exp(-((np.abs(proposed) - deviation**2 / width) ** 2) / (2 * deviation**2))
        accepted.append(proposed[rng.random(len(proposed)) < acceptance])
        missing -= len(accepted[-1])
    return np.concatenate(accepted)[:count]
