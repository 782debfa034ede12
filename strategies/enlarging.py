"""More inducing points after training: where they lie, in which order, and how many of them pay.

Hyperparameters need few points, predictions need many. Points are drawn where inputs lie and moved by two steps of
Lloyd's algorithm, whose sums are over cells of at least three rows. Pivots of a Cholesky factor order them, so that the
sums of all of them hold those of the first m for every m (:func:`fedgp_flower.gp.sums.nested`): one exchange gives the
bound as a function of m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray
from scipy.linalg.lapack import dpstrf
from scipy.optimize import minimize_scalar

from fedgp_flower.gp.cells import relocated
from fedgp_flower.gp.models import LOCATIONS, sparse_gp
from fedgp_flower.gp.sums import LOG_RATIO, Profile, SparseSums, nested
from fedgp_flower.methods.sgpr.messages import Anchors, Neighbours
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Shape
from fedgp_flower.typing import Array, Indices, NamedArrays
from strategies.server.questions import Asking, Summed, Total
from strategies.server.shapes import points_like_inputs

ANCHORS, STEPS = 1.6, 2
"""Anchors for each point, and steps of Lloyd's algorithm."""
LEAST_LEFT = 1e-7
"""Share of its prior variance that the points before must leave of a point."""
PAYS, NEGLIGIBLE = 0.01, 0.002
"""Nats a row that a doubling must promise, and that fewer points may cost."""
FEWER = (0.0, 1.2, 2.5)
"""Below log a/σ² at all inducing points, where about a half and a quarter of them have theirs."""
BYTES = 2**20 / 4
"""A triangle of M² / 2 numbers of 8 bytes is M² / ``BYTES`` megabytes."""


def most_points(megabytes: float, sums: int = 1) -> int:
    """M at which so many sums, each a triangle of M numbers a side, fill a message."""
    return math.isqrt(int(megabytes * BYTES / sums))


def placed(shape: Shape, lengths: Array, count: int, sites: tuple[str, ...], seed: int) -> Asking[Array]:
    """Points [count, D] among the rows of all sites, in :data:`STEPS` exchanges; ``lengths`` are units of distance."""
    rng = np.random.default_rng([seed, *b"placed", count])
    points = points_like_inputs(shape, math.ceil(ANCHORS * count), rng)
    for step in range(1, STEPS + 1):
        found: Summed[Neighbours] = yield Total(Neighbours, Anchors(points, lengths), sites, sizes={"C": len(points)})
        wanted = count if step == STEPS else len(points)
        if found.total is None:
            return points[:count]
        cells = found.total.rows, found.total.first / lengths, points / lengths
        points = relocated(*cells, wanted, rng) * lengths
    return points


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


def profiled_near(sums: SparseSums, log_ratio: float) -> Profile:
    """As :func:`profiled`, by a search of log a/σ² around a value: a Cholesky factor each, instead of a spectrum."""

    def within(place: float) -> float:
        return min(max(float(place), LOG_RATIO[0]), LOG_RATIO[1])

    search = {"bracket": (log_ratio, log_ratio + 0.5), "options": {"xtol": 1e-3, "maxiter": 30}}
    best = within(minimize_scalar(lambda place: -nested(sums, within(place))[1][-1], **search).x)
    noise, height = (float(found[-1]) for found in nested(sums, best))
    return Profile(height, math.exp(best) * noise, noise)


def by_size(sums: SparseSums, log_ratio: float) -> tuple[Array, float]:
    """About the best bound a row at the first m points for every m [M], never above it, and log a/σ² at all of them."""
    best = profiled_near(sums, log_ratio).log_ratio
    return np.max([nested(sums, best - by)[1] for by in FEWER], axis=0) / float(sums.count), best


def fewest(curve: Array) -> int:
    """The fewest points whose bound is within :data:`NEGLIGIBLE` of the best of a curve [M], in nats a row."""
    return int(np.argmax(curve >= curve.max() - NEGLIGIBLE)) + 1


def promised(curve: Array) -> float:
    """Nats a row that twice as many points would bring: as a geometric series of the latest two doublings."""
    size = len(curve)
    if size < 4:
        return 0.0
    earlier, latest = curve[size // 2 - 1] - curve[size // 4 - 1], curve[-1] - curve[size // 2 - 1]
    return float(latest * min(1.0, latest / earlier)) if earlier > 0 else float(latest)
