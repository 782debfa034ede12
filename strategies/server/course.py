"""Where a stochastic method is heading, and how surely: its bound and its parameters along the rounds.

Iterates of a stochastic method at a constant rate end up scattered around a limit μ. Their means b_1 … b_n over equal
batches of rounds, of the latest half of all rounds, are taken for

    b_{i+1} = μ + φ (b_i − μ) + e_i,

coordinate by coordinate. Least squares give φ, raised by its known bias (1 + 3φ)/(n − 1) (Kendall 1954), and with it μ
and its standard error sd(e) / ((1 − φ) √(n − 1)): both are large where a trend goes on. The mean of the batches is the
answer (Polyak and Juditsky 1992). It may be |mean − μ| + 2.5 standard errors away from μ.
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

LEAST, MOST = 20, 40
"""Batches before anything is said, and batches that are joined by twos."""
STEADY = 0.99
"""Largest φ: a trend that goes on is then carried on for a hundred batches."""
ERRORS = 2.5
NEAR = 0.3
"""Units, such as posterior standard deviations, within which an answer counts as the limit."""
LITTLE = 0.01
"""Nats a row within which a bound does."""

TENTH = 0.1
"""Change of a logarithm that counts as much as a posterior standard deviation."""


def tenths(logarithms: Mapping[str, ndarray]) -> NamedArrays:
    """Units of hyperparameters in logarithms."""
    return {name: np.full_like(array, TENTH) for name, array in logarithms.items()}


def limits(batches: Float[ndarray, "n P"]) -> tuple[Array, Array]:
    """μ [P] and its standard error [P]."""
    before, after = batches[:-1], batches[1:]
    count, start, end = len(before), before.mean(0), after.mean(0)
    spread = np.square(before - start).sum(0)
    along = ((before - start) * (after - end)).sum(0)
    phi = np.divide(along, spread, out=np.zeros_like(along), where=spread > 0)
    noise = np.sqrt(np.square(after - end - phi * (before - start)).sum(0) / (count - 2))
    phi = np.clip(phi + (1 + 3 * phi) / count, 0.0, STEADY)
    return end + phi / (1 - phi) * (end - start), noise / ((1 - phi) * math.sqrt(count))


@message()
class Course:
    """What has been seen so far; the first coordinate is the bound, in nats a row."""

    batches: Float[ndarray, "B C"]
    open: Float[ndarray, " C"]
    """Sum over the rounds of the batch that is not full."""
    size: int = 1
    """Rounds in a batch."""
    waiting: int = 0
    """Rounds in the batch that is not full."""
    arrived: int = 0
    """The round after which the answer was near its limit for the first time; 0: not yet."""

    @staticmethod
    def begin(coordinates: int) -> Course:
        """Nothing yet, of a bound and so many parameters."""
        return Course(np.zeros((0, 1 + coordinates)), np.zeros(1 + coordinates))

    def after(self, bound: float, parameters: Array) -> Course:
        """With one more round."""
        total, waiting = self.open + np.r_[bound, parameters], self.waiting + 1
        if waiting < self.size:
            return replace(self, open=total, waiting=waiting)
        batches = np.vstack([self.batches, total / self.size])
        joined = len(batches) == MOST
        if joined:
            batches = (batches[::2] + batches[1::2]) / 2
        return replace(self, batches=batches, open=0 * total, waiting=0, size=self.size * (1 + joined))

    @property
    def window(self) -> Float[ndarray, "n C"]:
        """The latest half of the batches."""
        return self.batches[-max(LEAST // 2, len(self.batches) // 2) :]

    @property
    def answer(self) -> Array:
        """The mean of each parameter over the window."""
        return np.asarray(self.window[:, 1:].mean(0))

    def distances(self, units: Array) -> Array | None:
        """How far from its limit each parameter may be, in its unit, and before them the bound; None too early.

        A bound that moves by less than :data:`LITTLE` is as near as a parameter that moves by :data:`NEAR` units.
        """
        if len(self.batches) < LEAST:
            return None
        window = self.window / np.r_[LITTLE / NEAR, units]
        limit, error = limits(window)
        return np.asarray(np.abs(limit - window.mean(0)) + ERRORS * error)

    @property
    def forecast(self) -> float | None:
        """What the bound, in nats a row, is going to gain; None too early."""
        if len(self.batches) < LEAST:
            return None
        limit, _ = limits(self.window[:, :1])
        return float(limit[0] - self.window[-1, 0])
