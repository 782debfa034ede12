"""Sums of arrays as if in twice the precision: the last digit does not depend on the order of the summands.

A sum is an array [2, …]: the rounded sum s and the sum of the rounding errors e, by Knuth's exact s + x = s′ + e′::

    s′ = fl(s + x),  t = fl(s′ − s),  e′ = (s − (s′ − t)) + (x − t),      result fl(s + e)

The result is the number nearest to the exact sum, unless that sum lies within a share of about n² 2^-106 of the middle
of two neighbours (Ogita, Rump & Oishi, *Accurate sum and dot product*, 2005, Sum2).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers: TypeAlias = NDArray[Any]
"""Floats or integers."""

BLOCK = 2**16
"""Entries that are added at once, for the cache of the processor."""


def start(value: ArrayLike) -> Numbers:
    """Return the sum of one array.

    >>> rounded(plus(plus(start(1e16), 1.0), -1e16))
    array(1.)
    """
    first = np.asarray(value)
    return np.stack([first, np.zeros_like(first)])


def plus(sums: Numbers, value: ArrayLike) -> Numbers:
    """Add an array to a sum in place and return the sum."""
    (high, low), terms = sums.reshape(2, -1), np.ravel(value)
    for begin in range(0, len(terms), BLOCK):
        part = slice(begin, begin + BLOCK)
        before, term = high[part].copy(), terms[part]
        high[part] += term
        shift = high[part] - before
        low[part] += before - (high[part] - shift) + (term - shift)
    return sums


def rounded(sums: Numbers) -> Numbers:
    """Return the array nearest to a sum."""
    return np.asarray(sums[0] + sums[1])
