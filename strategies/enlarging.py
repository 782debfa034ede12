"""More inducing points after training: their order, how many suffice, and the gain of another doubling.

Few inducing points suffice for the hyperparameters, predictions need many. A pivoted Cholesky factorisation orders the
points. The sums at all M points then contain those at the first m for every m, so that one exchange gives the log
evidence as a function of m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.gp.models import LOCATIONS, sparse_gp
from fedgp_flower.gp.sparse import Whitener
from fedgp_flower.lazy import lapack
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, NamedArrays

MINIMUM_VARIANCE = 1e-7
"""A point is left out if the points before it leave a smaller share of its prior variance."""
MINIMUM_GAIN, TOLERATED_LOSS = 0.01, 0.002
"""Smallest gain of a doubling that pays, and largest loss by fewer points, in nats per row."""
ENTRIES_PER_MEGABYTE = 2**20 / 4
"""M² of a message of one megabyte, a triangle of M²/2 numbers of 8 bytes."""


def points_per_message(megabytes: float) -> int:
    """Return the number of inducing points M whose sums fill a message."""
    return math.isqrt(int(megabytes * ENTRIES_PER_MEGABYTE))


@torch.no_grad()
def ordered(values: Mapping[str, ndarray], section: ModelSection) -> NamedArrays:
    """Return the parameters with the inducing points in the pivot order of the Cholesky factor of K_zz.

    Each point has the largest conditional variance given those before it. Points with nearly none are left out.
    """
    covariance, variance = sparse_gp(section, values).inducing_covariance()
    _, pivots, rank, _ = lapack.dpstrf((covariance / variance).numpy(), lower=1, tol=MINIMUM_VARIANCE)
    return {**values, LOCATIONS: values[LOCATIONS][pivots[:rank].astype(np.int64) - 1]}


def sufficient_points(curve: Array, loss: Array) -> int:
    """Return the fewest points whose evidence less predictive loss is within :data:`TOLERATED_LOSS` of the best.

    Both are in nats per row, for the first m points and every m [M].
    """
    score = curve - loss
    return int(np.argmax(score >= score.max() - TOLERATED_LOSS)) + 1


@torch.no_grad()
def predictive_loss(values: Mapping[str, ndarray], section: ModelSection, noise: float) -> Array:
    """Return the loss of predictive log density with the first m points, in nats per row, for every m [M].

    The loss is ½ E log(1 + r/λ) over the inducing points, which are distributed like the rows: r is the variance of a
    point given the first m, λ = ``noise`` the noise of an observation given all M. The FITC evidence does not contain
    this loss, because the noise of the rows stays λ.
    """
    squares = Whitener(sparse_gp(section, values)).factor.square()
    left = squares.flip(1).cumsum(1).flip(1)[:, 1:]
    return np.append((left / noise).log1p_().mean(0).numpy() / 2, 0.0)


def doubling_gain(curve: Array) -> float:
    """Return the forecast gain of twice as many points, in nats per row, from the evidence at the first m points [M].

    The gains of the latest two doublings are continued as a geometric series.
    """
    size = len(curve)
    if size < 4:
        return 0.0
    earlier, latest = curve[size // 2 - 1] - curve[size // 4 - 1], curve[-1] - curve[size // 2 - 1]
    return float(latest * min(1.0, latest / earlier)) if earlier > 0 else float(latest)
