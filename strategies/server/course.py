"""When a noisy bound has stopped rising: the one rule by which stochastic methods end.

Over the latest half of the rounds, ten at least, a straight line is fitted to the values. The bound counts as flat once
its rise along that window, and three standard errors more, is below two standard deviations of a single value around
the line, or below :data:`NOTHING`. Of series that rise by two deviations in ten rounds one in fifty is taken for flat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LEAST = 10
"""Rounds of a window."""
ERRORS, DEVIATIONS = 3.0, 2.0
NOTHING = 5e-3
"""Nats a row along a window that are no rise."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A straight line through the latest values."""

    slope: float
    """By round."""
    error: float
    """Its standard error."""
    noise: float
    """Standard deviation of a value around the line."""
    rounds: int

    @property
    def flat(self) -> bool:
        """Whether the rise along the window is below the noise."""
        return (self.slope + ERRORS * self.error) * self.rounds < max(DEVIATIONS * self.noise, NOTHING)


def rise(values: Sequence[float]) -> Rise | None:
    """The line through the latest half of ``values``; None before there are enough.

    >>> rise([0.1 * k for k in range(30)]).flat, rise([1.0] * 30).flat
    (False, True)
    """
    rounds = max(LEAST, len(values) // 2)
    if len(values) < rounds:
        return None
    latest = np.array(values[-rounds:])
    along = np.arange(rounds) - (rounds - 1) / 2
    spread = float(along @ along)
    slope = float(along @ latest) / spread
    residual = latest - latest.mean() - slope * along
    noise = math.sqrt(float(residual @ residual) / (rounds - 2))
    return Rise(slope, noise / math.sqrt(spread), noise, rounds)


@dataclass
class Course:
    """The values of a run so far, and the round after which they were flat for the first time."""

    values: list[float] = field(default_factory=list)
    flat_from: int | None = None

    @property
    def flat(self) -> bool:
        """Whether the latest values are."""
        line = rise(self.values)
        return line is not None and line.flat

    def add(self, value: float, after: int) -> None:
        """The value after a round."""
        self.values.append(value)
        if self.flat_from is None and self.flat:
            self.flat_from = after
