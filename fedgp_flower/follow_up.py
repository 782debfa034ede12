"""Survival and censoring curves from counts of follow-up times in bins.

Let n rows be at risk at the start of a bin with d events and c censored rows. Rounded times have bins of one time each.
There events precede censoring, as in the estimate of Kaplan and Meier (1958): P(T > t) falls by the factor 1 − d/n and
P(C > t) by 1 − c/(n − d). In bins of continuous times both take turns: with r = 1 − (d + c)/n the factors are
r^(d/(d + c)) and r^(c/(d + c)). Their product is the share of rows that remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.errors import DataError
from fedgp_flower.typing import Array, NamedArrays

STEPS, BELOW, ABOVE = 8, 8, 4
"""Bins per doubling of time, and doublings below and above the mean."""
UNITS = (7.0, 1.0, 1 / 2, 1 / 4, 1 / 10, 1 / 12)
"""Units of rounded times: a week of days, a whole, a half, a quarter, a tenth or a month of a year."""
WHOLE, SINGLE = 32, 96
"""Largest mean of rounded times in units, and number of bins with one multiple of the unit each."""
BINS = 40
"""Largest number of bins of a smooth curve; the hazard of a bin with few events is uncertain."""
TOLERANCE = 1e-6
"""Error of a time that is a multiple of a unit, in units."""
GRID, FOLLOWED_SHARE = 20, 0.1
"""Times of the integrated Brier score, up to the last time to which this share of rows was followed."""
QUARTILES = (0.25, 0.5, 0.75)
"""Quantiles of event times at which predicted and observed survival are compared."""
CURVES = ("target.times", "target.survival", "target.censoring")
"""Names of the curves of a preparation."""
UNIT = "target.unit"
"""Name of the unit of rounded times."""


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
    unit: float = 0.0
    """Unit of rounded times, at whose multiples the curves have steps; 0 for curves without steps."""

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> FollowUp | None:
        """Read :data:`CURVES`; None if they are missing."""
        if not {*CURVES} <= arrays.keys():
            return None
        times, survival, censoring = (np.asarray(arrays[name], float) for name in CURVES)
        return FollowUp(times, survival, censoring, float(arrays.get(UNIT, np.zeros(()))))

    def to_arrays(self) -> NamedArrays:
        """Return the arrays for :meth:`from_arrays`."""
        curves = zip(CURVES, (self.times, self.survival, self.censoring), strict=True)
        return {**dict(curves), UNIT: np.array(self.unit)}

    def survived(self, times: Array) -> Array:
        """Return P(T > t)."""
        return _interpolate(self.times, self.survival, self._step(times))

    def followed(self, times: Array) -> Array:
        """Return P(C > t)."""
        return _interpolate(self.times, self.censoring, self._step(times))

    def still_followed(self, times: Array) -> Array:
        """Return P(C ≥ t): events precede censoring at the same time."""
        return self.followed(times - self.unit / 2)

    def _step(self, times: Array) -> Array:
        """Return the last multiple of the unit until each time."""
        return np.floor(times / self.unit + TOLERANCE) * self.unit if self.unit else times

    def smooth(self) -> FollowUp:
        """Return curves without steps, at times with equal shares of the events."""
        passed = np.floor(self._seen * BINS + TOLERANCE)
        kept = np.flatnonzero(np.diff(passed, prepend=0.0) > 0)
        return FollowUp(self.times[kept], self.survival[kept], self.censoring[kept])

    def hazard(self, times: Array) -> Array:
        """Return events per unit of time and row at risk, of curves without steps."""
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
        found = np.interp(QUARTILES, np.append(0.0, self._seen), np.append(0.0, self.times))
        return np.ceil(found / self.unit - TOLERANCE) * self.unit if self.unit else found

    @property
    def _seen(self) -> Array:
        """Share of the observed events until each of the times [B]."""
        lost = -np.diff(np.append(1.0, self.survival))
        seen = np.cumsum(lost * np.sqrt(self.censoring * np.append(1.0, self.censoring[:-1])))
        return np.asarray(seen / seen[-1])


def _interpolate(ends: Array, shares: Array, times: Array) -> Array:
    """Interpolate and extrapolate a curve with a piecewise linear logarithm."""
    x, y = np.append(0.0, ends), np.log(np.append(1.0, shares))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.exp(np.interp(times, x, y) + slope * np.maximum(times - x[-1], 0.0))


def multiples(time: Array) -> Array:
    """Return the number of rows for each of :data:`UNITS` of which all times are multiples, else 0, [U]."""
    units = time[:, None] / np.array(UNITS)
    return len(time) * (np.abs(units - units.round()) < TOLERANCE).all(axis=0).astype(float)


def unit_of(rounded: Array, rows: float, mean: float) -> float:
    """Return the largest unit of which all times are multiples and their mean at most 32; 0 if there is none."""
    shared = (
        unit for unit, found in zip(UNITS, rounded, strict=True) if abs(found - rows) < 0.5 and mean <= WHOLE * unit
    )
    return next(shared, 0.0)


def edges_around(mean: float, unit: float = 0.0) -> Array:
    """Return the ends of all bins except the last, whose end is infinite; those of rounded times lie between them."""
    ends = mean * 2.0 ** (np.arange(-BELOW * STEPS, ABOVE * STEPS + 1) / STEPS)
    if not unit:
        return ends
    return (np.append(np.arange(SINGLE), np.unique(np.floor(ends[ends > SINGLE * unit] / unit))) + 0.5) * unit


def counted(time: Array, seen: Array, edges: Array) -> Array:
    """Count rows and events by bin of time, [B, 2]; a time at an edge is in the lower bin."""
    place = np.searchsorted(edges, time)
    return np.stack([np.bincount(place, weight, len(edges) + 1) for weight in (np.ones_like(seen), seen)], axis=1)


def life_table(counts: Array, edges: Array, unit: float = 0.0) -> FollowUp:
    """Return the follow-up of counted rows at ends of bins, of rounded times at multiples of their unit."""
    rows, events = counts.T
    if not events.sum() > 0:
        raise DataError("no event was observed at any site, so times to an event cannot be modelled")
    ends, censored = np.append(edges, edges[-1] * 2 ** (1 / STEPS)), rows - events
    risk = rows[::-1].cumsum()[::-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        left = 1 - rows / risk
        stay = np.where(events > 0, 1 - events / risk if unit else left ** (events / rows), 1.0)
        follow = np.where(censored > 0, 1 - censored / (risk - events) if unit else left ** (censored / rows), 1.0)
    count = int(np.argmin(np.append(stay > 0, False)))  # before the first bin with survival 0
    survival, censoring = stay[:count].cumprod(), np.where(follow > 0, follow, 1.0)[:count].cumprod()
    kept = np.flatnonzero(rows[:count])
    if not events[:count].sum() > 0:
        raise DataError("too few events were observed for a survival curve")
    found = FollowUp(ends[kept], survival[kept], censoring[kept], unit)
    return replace(found, times=found._step(found.times))
