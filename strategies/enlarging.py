"""More inducing points after training: in which order, how many are needed, and what twice as many would bring.

Hyperparameters need few points, predictions need many. Pivots of a Cholesky factor order them, so that the sums of all
of them hold those of the first m for every m: one exchange gives the evidence as a function of m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray
from scipy.linalg.lapack import dpstrf

from fedgp_flower.gp.models import LOCATIONS, sparse_gp
from fedgp_flower.gp.sparse import Whitener
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, Indices, NamedArrays

LEAST_LEFT = 1e-7
"""Share of its prior variance that the points before must leave of a point."""
PAYS, NEGLIGIBLE = 0.01, 0.002
"""Nats a row that a doubling must promise, and that fewer points may cost."""
BYTES = 2**20 / 4
"""A triangle of M² / 2 numbers of 8 bytes is M² / ``BYTES`` megabytes."""


def most_points(megabytes: float) -> int:
    """M at which sums, a triangle of M numbers a side, fill a message."""
    return math.isqrt(int(megabytes * BYTES))


def spread_out(covariance: Array, least: float) -> Indices:
    """Points in the order of what each adds to those before it: pivots of the Cholesky factor of K(Z, Z).

    A point is left out where those before it leave less than ``least`` of its variance.
    """
    lower, pivots, rank, _ = dpstrf(covariance, lower=1, tol=least)
    del lower
    return pivots[:rank].astype(np.int64) - 1


@torch.no_grad()
def ordered(values: Mapping[str, ndarray], section: ModelSection) -> NamedArrays:
    """Parameters with their inducing points in the order of what each adds; those that add nothing are left out."""
    covariance, variance = sparse_gp(section, values).inducing_covariance()
    kept = spread_out((covariance / variance).numpy(), LEAST_LEFT)
    return {**values, LOCATIONS: values[LOCATIONS][kept]}


def fewest(curve: Array, widening: Array) -> int:
    """The fewest points within :data:`NEGLIGIBLE` of the best, in nats a row, of a curve less its widening [M]."""
    worth = curve - widening
    return int(np.argmax(worth >= worth.max() - NEGLIGIBLE)) + 1


@torch.no_grad()
def widening(values: Mapping[str, ndarray], section: ModelSection, spread: float) -> Array:
    """What predictions lose where they rest on the first m points, for every m [M], in nats a row.

    ½ E log(1 + r/λ) over the points, which lie where rows do: r is the variance that the first m leave of a point, λ
    the ``spread`` of an observation at all of them. The evidence does not show it, since its rows keep their λ.
    """
    squares = Whitener(sparse_gp(section, values)).factor.square()
    left = squares.flip(1).cumsum(1).flip(1)[:, 1:]
    return np.append((left / spread).log1p_().mean(0).numpy() / 2, 0.0)


def promised(curve: Array) -> float:
    """Nats a row that twice as many points would bring: as a geometric series of the latest two doublings."""
    size = len(curve)
    if size < 4:
        return 0.0
    earlier, latest = curve[size // 2 - 1] - curve[size // 4 - 1], curve[-1] - curve[size // 2 - 1]
    return float(latest * min(1.0, latest / earlier)) if earlier > 0 else float(latest)
