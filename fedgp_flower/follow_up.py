"""How long rows were followed, from counts of times in bins: shares without an event, and not yet censored.

With n rows at risk at the start of a bin, d events and c censored in it, the life table (Kaplan and Meier 1958 where
bins are fine) has S(end) = S(start) (1 − d / (n − c/2)). Within a bin, and beyond the last one, the hazard is constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import DataError
from fedgp_flower.typing import Array, NamedArrays

STEPS, BELOW, ABOVE = 8, 8, 4
"""Bins in each doubling of time, and how many doublings below and above the mean they reach."""
BINS = 40
"""Of a curve at most, since a bin with few events has an uncertain hazard."""
GRID, STILL = 20, 0.1
"""Times of the integrated Brier score, up to the last one that this share of rows was followed to."""
QUARTILES = (0.25, 0.5, 0.75)
"""Of seen events: where predicted survival is compared with the observed."""
CURVES = ("target.times", "target.survival", "target.censoring")
"""Arrays of a preparation."""


@dataclass(frozen=True)
class FollowUp:
    """Of all training rows: P(T > t) and P(C > t), T the time of the event and C that of the censoring, at bins' ends.

    >>> follow_up = FollowUp(np.array([1.0, 2.0]), np.array([0.8, 0.4]), np.array([1.0, 1.0]))
    >>> follow_up.survived(np.array([1.0])).tolist()
    [0.8]
    """

    times: Array  # [B], rising
    survival: Array  # [B]
    censoring: Array  # [B]

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> FollowUp | None:
        """From :data:`CURVES`; None where they are not there."""
        return FollowUp(*(np.asarray(arrays[name], float) for name in CURVES)) if {*CURVES} <= arrays.keys() else None

    def to_arrays(self) -> NamedArrays:
        """The inverse of :meth:`from_arrays`."""
        return dict(zip(CURVES, (self.times, self.survival, self.censoring), strict=True))

    def survived(self, times: Array) -> Array:
        """P(T > t)."""
        return _along(self.times, self.survival, times)

    def followed(self, times: Array) -> Array:
        """P(C > t)."""
        return _along(self.times, self.censoring, times)

    def hazard(self, times: Array) -> Array:
        """Events by unit of time and row at risk."""
        starts, ends = np.append(0.0, self.times[:-1]), self.times
        rates = -np.diff(np.log(np.append(1.0, self.survival))) / (ends - starts)
        return np.asarray(rates[np.searchsorted(ends, times).clip(max=len(ends) - 1)])

    @property
    def grid(self) -> Array:
        """Times of the integrated Brier score [J], evenly spaced."""
        enough = self.times[self.survival * self.censoring >= STILL]
        return np.arange(1, GRID + 1) / GRID * enough.max(initial=self.times[0])

    @property
    def quartiles(self) -> Array:
        """Times by which a quarter, half and three quarters of the seen events had happened."""
        lost = -np.diff(np.append(1.0, self.survival))
        seen = np.cumsum(lost * np.sqrt(self.censoring * np.append(1.0, self.censoring[:-1])))
        return np.interp(QUARTILES, np.append(0.0, seen / seen[-1]), np.append(0.0, self.times))


def _along(ends: Array, shares: Array, times: Array) -> Array:
    """A share at other times, of which the logarithm is linear in between and beyond."""
    x, y = np.append(0.0, ends), np.log(np.append(1.0, shares))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.exp(np.interp(times, x, y) + slope * np.maximum(times - x[-1], 0.0))


def edges_around(mean: float) -> Array:
    """Ends of all bins but the last, whose end is infinite."""
    return mean * 2.0 ** (np.arange(-BELOW * STEPS, ABOVE * STEPS + 1) / STEPS)


def counted(time: Array, seen: Array, edges: Array) -> Array:
    """Rows by the bin of their time, and those whose event was seen, [B, 2]; a time at an edge is in the bin below."""
    place = np.searchsorted(edges, time)
    return np.stack([np.bincount(place, weight, len(edges) + 1) for weight in (np.ones_like(seen), seen)], axis=1)


def life_table(counts: Array, edges: Array) -> FollowUp:
    """The follow-up of rows so counted, kept where each further share of the events has been seen."""
    rows, events = counts.T
    if not events.sum() > 0:
        raise DataError("no event was seen at any site: there is nothing to learn of times to it")
    ends, censored = np.append(edges, edges[-1] * 2 ** (1 / STEPS)), rows - events
    risk = rows[::-1].cumsum()[::-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        stay = np.where(events > 0, 1 - events / (risk - censored / 2), 1.0)
        follow = np.where(censored > 0, 1 - censored / (risk - events), 1.0)
    count = int(np.argmin(np.append(stay > 0, False)))  # up to the bin that nobody leaves without an event
    survival, censoring = stay[:count].cumprod(), np.where(follow > 0, follow, 1.0)[:count].cumprod()
    passed = np.floor(events[:count].cumsum() * BINS / events.sum())
    kept = np.flatnonzero(np.diff(passed, prepend=0.0) > 0)
    if not kept.size:
        raise DataError("too few events were seen to follow rows by them")
    return FollowUp(ends[kept], survival[kept], censoring[kept])
