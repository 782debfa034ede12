"""Survival and censoring curves from counts of follow-up times in bins.

With n rows at risk at the start of a bin, d events and c censored rows in it, the life table (for fine bins the
estimate of Kaplan and Meier 1958) has S(end) = S(start) (1 − d / (n − c/2)). The hazard is constant within a bin and
beyond the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import DataError
from fedgp_flower.typing import Array, NamedArrays

STEPS, BELOW, ABOVE = 8, 8, 4
"""Bins per doubling of time, and doublings below and above the mean."""
BINS = 40
"""Largest number of bins of a curve; the hazard of a bin with few events is uncertain."""
GRID, FOLLOWED_SHARE = 20, 0.1
"""Times of the integrated Brier score, up to the last time to which this share of rows was followed."""
QUARTILES = (0.25, 0.5, 0.75)
"""Quantiles of event times at which predicted and observed survival are compared."""
CURVES = ("target.times", "target.survival", "target.censoring")
"""Names of the arrays of a preparation."""


@dataclass(frozen=True)
class FollowUp:
    """P(T > t) and P(C > t) of all training rows at the ends of bins, with event time T and censoring time C.

    >>> follow_up = FollowUp(np.array([1.0, 2.0]), np.array([0.8, 0.4]), np.array([1.0, 1.0]))
    >>> follow_up.survived(np.array([1.0])).tolist()
    [0.8]
    """

    times: Array  # [B], rising
    survival: Array  # [B]
    censoring: Array  # [B]

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> FollowUp | None:
        """Read :data:`CURVES`; None if they are missing."""
        return FollowUp(*(np.asarray(arrays[name], float) for name in CURVES)) if {*CURVES} <= arrays.keys() else None

    def to_arrays(self) -> NamedArrays:
        """Return the arrays for :meth:`from_arrays`."""
        return dict(zip(CURVES, (self.times, self.survival, self.censoring), strict=True))

    def survived(self, times: Array) -> Array:
        """Return P(T > t)."""
        return _interpolate(self.times, self.survival, times)

    def followed(self, times: Array) -> Array:
        """Return P(C > t)."""
        return _interpolate(self.times, self.censoring, times)

    def hazard(self, times: Array) -> Array:
        """Return events per unit of time and row at risk."""
        starts, ends = np.append(0.0, self.times[:-1]), self.times
        rates = -np.diff(np.log(np.append(1.0, self.survival))) / (ends - starts)
        return np.asarray(rates[np.searchsorted(ends, times).clip(max=len(ends) - 1)])

    @property
    def grid(self) -> Array:
        """Times of the integrated Brier score [J], evenly spaced."""
        followed = self.times[self.survival * self.censoring >= FOLLOWED_SHARE]
        return np.arange(1, GRID + 1) / GRID * followed.max(initial=self.times[0])

    @property
    def quartiles(self) -> Array:
        """Quartiles of the observed event times."""
        lost = -np.diff(np.append(1.0, self.survival))
        seen = np.cumsum(lost * np.sqrt(self.censoring * np.append(1.0, self.censoring[:-1])))
        return np.interp(QUARTILES, np.append(0.0, seen / seen[-1]), np.append(0.0, self.times))


def _interpolate(ends: Array, shares: Array, times: Array) -> Array:
    """Interpolate and extrapolate a curve with a piecewise linear logarithm."""
    x, y = np.append(0.0, ends), np.log(np.append(1.0, shares))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.exp(np.interp(times, x, y) + slope * np.maximum(times - x[-1], 0.0))


def edges_around(mean: float) -> Array:
    """Return the ends of all bins except the last, whose end is infinite."""
    return mean * 2.0 ** (np.arange(-BELOW * STEPS, ABOVE * STEPS + 1) / STEPS)


def counted(time: Array, seen: Array, edges: Array) -> Array:
    """Count rows and events by bin of time, [B, 2]; a time at an edge is in the lower bin."""
    place = np.searchsorted(edges, time)
    return np.stack([np.bincount(place, weight, len(edges) + 1) for weight in (np.ones_like(seen), seen)], axis=1)


def life_table(counts: Array, edges: Array) -> FollowUp:
    """Return the follow-up of counted rows, at ends of bins with equal shares of the events."""
    rows, events = counts.T
    if not events.sum() > 0:
        raise DataError("no event was observed at any site, so times to an event cannot be modelled")
    ends, censored = np.append(edges, edges[-1] * 2 ** (1 / STEPS)), rows - events
    risk = rows[::-1].cumsum()[::-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        stay = np.where(events > 0, 1 - events / (risk - censored / 2), 1.0)
        follow = np.where(censored > 0, 1 - censored / (risk - events), 1.0)
    count = int(np.argmin(np.append(stay > 0, False)))  # before the first bin with survival 0
    survival, censoring = stay[:count].cumprod(), np.where(follow > 0, follow, 1.0)[:count].cumprod()
    passed = np.floor(events[:count].cumsum() * BINS / events.sum())
    kept = np.flatnonzero(np.diff(passed, prepend=0.0) > 0)
    if not kept.size:
        raise DataError("too few events were observed for a survival curve")
    return FollowUp(ends[kept], survival[kept], censoring[kept])
