"""Convergence of a stochastic method: the limit of its bound and parameters, from their values in each round.

At a constant learning rate the iterates of a stochastic method scatter around a limit μ. The means b_1 … b_n over equal
batches of the latest half of all rounds are modelled, coordinate by coordinate, by

    b_{i+1} = μ + φ (b_i − μ) + e_i.

Least squares gives φ, corrected for its bias (1 + 3φ)/(n − 1) (Kendall 1954), then μ and its standard error
sd(e) / ((1 − φ) √(n − 1)); both are large while a trend continues. The estimate is the mean of the batches (Polyak and
Juditsky 1992). Its distance from μ is at most |mean − μ| + 2.5 standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import message
from fedgp_flower.typing import Array, NamedArrays

MIN_BATCHES, MAX_BATCHES = 20, 40
"""Batches before the first estimate; at the maximum, neighbouring batches are merged in pairs."""
MAX_PHI = 0.99
"""Largest φ; it extrapolates a continuing trend by a hundred batches."""
STANDARD_ERRORS = 2.5
NEAR = 0.3
"""Distance, in units such as posterior standard deviations, at which a parameter counts as converged."""
BOUND_TOLERANCE = 0.01
"""Distance, in nats per row, at which a bound counts as converged."""

LOG_UNIT = 0.1
"""Unit of a logarithm, in place of a posterior standard deviation."""


def log_units(logarithms: Mapping[str, ndarray]) -> NamedArrays:
    """Return the units of log hyperparameters."""
    return {name: np.full_like(array, LOG_UNIT) for name, array in logarithms.items()}


def limits(batches: Float[ndarray, "n P"]) -> tuple[Array, Array, Array]:
    """Return μ [P], its standard error [P] and φ [P]."""
    before, after = batches[:-1], batches[1:]
    count, start, end = len(before), before.mean(0), after.mean(0)
    spread = np.square(before - start).sum(0)
    along = ((before - start) * (after - end)).sum(0)
    phi = np.divide(along, spread, out=np.zeros_like(along), where=spread > 0)
    noise = np.sqrt(np.square(after - end - phi * (before - start)).sum(0) / (count - 2))
    phi = np.clip(phi + (1 + 3 * phi) / count, 0.0, MAX_PHI)
    return end + phi / (1 - phi) * (end - start), noise / ((1 - phi) * math.sqrt(count)), phi


@message()
class Course:
    """Batch means of the rounds so far; the first coordinate is the bound, in nats a row."""

    batches: Float[ndarray, "B C"]
    open: Float[ndarray, " C"]
    """Sum over the rounds of the incomplete batch."""
    size: int = 1
    """Rounds in a batch."""
    waiting: int = 0
    """Rounds in the incomplete batch."""
    arrived: int = 0
    """The first round after which the estimate was near its limit; 0: not yet."""

    @staticmethod
    def begin(coordinates: int) -> Course:
        """Return an empty course of a bound and this number of parameters."""
        return Course(np.zeros((0, 1 + coordinates)), np.zeros(1 + coordinates))

    def after(self, bound: float, parameters: Array) -> Course:
        """Return the course with one more round."""
        total, waiting = self.open + np.r_[bound, parameters], self.waiting + 1
        if waiting < self.size:
            return replace(self, open=total, waiting=waiting)
        batches = np.vstack([self.batches, total / self.size])
        joined = len(batches) == MAX_BATCHES
        if joined:
            batches = (batches[::2] + batches[1::2]) / 2
        return replace(self, batches=batches, open=0 * total, waiting=0, size=self.size * (1 + joined))

    @property
    def window(self) -> Float[ndarray, "n C"]:
        """The latest half of the batches."""
        return self.batches[-max(MIN_BATCHES // 2, len(self.batches) // 2) :]

    @property
    def answer(self) -> Array:
        """The mean of each parameter over :attr:`window`."""
        return np.asarray(self.window[:, 1:].mean(0))

    def distances(self, units: Array) -> Array | None:
        """Return the largest plausible distance of the bound and of each parameter, in its unit, from its limit.

        For the bound, :data:`BOUND_TOLERANCE` counts as :data:`NEAR` units. None before :data:`MIN_BATCHES` batches.
        """
        if len(self.batches) < MIN_BATCHES:
            return None
        window = self.window / np.r_[BOUND_TOLERANCE / NEAR, units]
        limit, error, _ = limits(window)
        return np.asarray(np.abs(limit - window.mean(0)) + STANDARD_ERRORS * error)

    @property
    def forecast(self) -> float | None:
        """The expected further gain of the bound, in nats a row; None before :data:`MIN_BATCHES` batches.

        None also where a trend continues, because its limit at :data:`MAX_PHI` is only that of a hundred more batches.
        """
        if len(self.batches) < MIN_BATCHES:
            return None
        [limit], _, [phi] = limits(self.window[:, :1])
        gain = float(limit - self.window[-1, 0])
        return None if phi == MAX_PHI and gain > BOUND_TOLERANCE else gain
