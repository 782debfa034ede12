"""The calibration of bands beyond a unit's last row: each unit is predicted from its first rows and the other units.

At each cut c a unit takes what it added out of the totals, hides its rows beyond c, and predicts these; the histogram
of z = |y − mean| / sd, in which a unit weighs 1, is a summand. Bands beyond c are then max(t, q̂) sd wide, t the .975
point of Student's t with as many degrees of freedom as units took part, q̂ the .95 point of the summed histogram.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.stats import t as student
from torch import Tensor

from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.messages import Calibration
from fedgp_flower.methods.hierarchical_gp.newton import Sums, posterior
from fedgp_flower.methods.hierarchical_gp.rough import RoughDeviation
from fedgp_flower.typing import Array

CUTS = np.linspace(0.1, 0.9, 9)
"""Shares of the inputs' range."""
EDGES = np.geomspace(0.25, 40.0, 204)
"""Of the histogram of z; its first and last bin are open."""
LEVEL = 0.95
NORMAL = 1.959963984540054
LEAST_SEEN = 3
"""Rows from which a unit can be predicted."""


def calibration(unit: RoughDeviation, q: GlobalPosterior, total: Sums) -> Calibration:
    """The histograms of one unit, with q(u) from all the others."""
    share = unit.weighing().sums(q)
    others = Sums(total.precision - share.precision, total.shift - share.shift, share.constant)
    rows = np.zeros((len(CUTS), len(EDGES) + 1))
    for c, cut in enumerate(CUTS):
        seen = unit.x <= float(cut)
        if LEAST_SEEN <= int(seen.sum()) < len(seen):
            rows[c] = _histogram(unit, seen, others)
    hidden = rows.sum(axis=1)
    return Calibration(rows / np.maximum(hidden, 1)[:, None], hidden)


def _histogram(unit: RoughDeviation, seen: Tensor, others: Sums) -> Array:
    part = replace(unit, x=unit.x[seen], y=unit.y[seen])
    first = part.weighing().sums(posterior(others.precision, others.shift)[0])
    q = posterior(others.precision + first.precision, others.shift + first.shift)[0]
    mean, variance = part.predict(unit.x[~seen], q)
    z = ((unit.y[~seen] - mean).abs() / variance.sqrt()).numpy()
    return np.bincount(np.searchsorted(EDGES, z), minlength=len(EDGES) + 1).astype(np.float64)


def factors(total: Calibration) -> Array:
    """By cut, the width of the band over that of a normal one; 1 where no unit could be asked."""
    found = np.ones(len(CUTS))
    for c, shares in enumerate(total.shares):
        units = float(shares.sum())
        if units > 0.5:
            reached = int(np.searchsorted(np.cumsum(shares), LEVEL * units - 1e-9))
            found[c] = max(student.ppf(0.975, units), EDGES[min(reached, len(EDGES) - 1)]) / NORMAL
    return found


def widened(variance: Array, x: Array, last: float, by: Array) -> Array:
    """Variances beyond the last row, at inputs in [0, 1], times the square of the factor of the nearest cut."""
    factor = float(by[int(np.abs(CUTS - last).argmin())])
    wide: Array = np.where(x > last, factor**2, 1.0) * variance
    return wide
