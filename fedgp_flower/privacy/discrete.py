"""Integers of the discrete normal distribution, for noise whose last bits tell nothing.

Canonne, Kamath and Steinke, *The discrete Gaussian for differential privacy*, NeurIPS 2020: P(k) ∝ exp(−k² / 2σ²).
Sums of them over sites are as good as one draw: with σ² each, probabilities of a sum of K are within a factor
exp(10 K exp(−π² σ²)) of those of one with K σ² (Kairouz, Liu and Steinke, *The distributed discrete Gaussian
mechanism*, ICML 2021, theorem 1). Where σ is large, (ε, δ) are those of the normal distribution: for 2¹⁴ to 1e-8 of δ.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from fedgp_flower.typing import Array


def discrete_normal(deviation: float, count: int, rng: np.random.Generator) -> Int64[ndarray, " count"]:
    """So many independent draws (algorithm 3): discrete Laplace proposals, each kept with its share of the normal.

    Probabilities are floats, what is drawn is not.

    Args:
        deviation: σ, positive.
        count: Of draws.
        rng: For noise that protects, one that nobody can foresee.

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
