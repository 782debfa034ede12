"""Messages of the hierarchical GP.

Sites integrate their deviations out; their sums and derivatives give a Newton step on the bound of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.privacy.disclosure import merged_cells
from fedgp_flower.shared_messages import Described, indefinite, oversized
from fedgp_flower.typing import AnyShape


@message("train.expansion", summand=True, counts="G T W")
class ExpansionShare:
    """A site's sums for Z_G with its deviation integrated out, and their total derivatives by θ."""

    precision: Float[ndarray, "G G"] = leaves("P = Φ R⁻¹ Φᵀ", symmetric=True)
    shift: Float[ndarray, " G"] = leaves("p = Φ R⁻¹ y")
    constant: Float[ndarray, ""] = leaves("c = log N(y | 0, R) − r/2s² − ½|z|², r the variance given inducing values")
    slopes: Float[ndarray, "T Q"] = leaves("derivatives by θ of lower entries of P, of p, of c")
    curvature: Float[ndarray, "T T"] = leaves("second derivatives of c − ½ tr[(S + mmᵀ)P] + mᵀp", symmetric=True)
    count: Float[ndarray, ""] = leaves("number of rows")
    squares: Float[ndarray, " W"] = leaves("z² of each entry of the site's shape, at its mode")
    known: Float[ndarray, " W"] = leaves("1 − variance of each entry")

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, described: Described) -> str | None:
        """Return why the described rows cannot produce these sums, or None."""
        if reason := described.rows_mismatch("count", self.count):
            return reason
        if (self.squares < 0).any() or (self.known > described.rows).any():  # of a total, too: no site is without rows
            return "`squares` or `known` are out of range"
        return indefinite("precision", self.precision)

    @staticmethod
    def outliers(answers: Mapping[str, ExpansionShare], rows: Mapping[str, int]) -> dict[str, str]:
        """Return sites whose precision dwarfs those of the others."""
        return oversized(answers, rows, "precision", lambda share: float(np.trace(share.precision)))


@message()
class CalibrationRequest:
    """Request to predict a unit from its first rows and the other units."""

    values: Mapping[str, AnyShape] = leaves("θ and q(u)")
    precision: Float[ndarray, "G G"] = leaves("the total P", symmetric=True)
    shift: Float[ndarray, " G"] = leaves("the total p")


@message("query.calibration", summand=True, counts="K")
class Calibration:
    """Histograms of standardised prediction errors of a unit beyond K cuts."""

    shares: Float[ndarray, "K B"] = leaves("share of the hidden rows by |y − mean| / sd, at each cut")
    rows: Float[ndarray, " K"] = leaves("hidden rows, at each cut")

    def coarse(self, least: int) -> Calibration:
        """Merge cells with fewer than ``least`` rows."""
        counts = np.rint(self.shares * self.rows[:, None]).astype(np.int64)
        merged = np.stack([merged_cells(row, least) for row in counts]).astype(np.float64)
        return replace(self, shares=merged / np.maximum(self.rows, 1)[:, None])

    def refusal(self, described: Described) -> str | None:
        """Return why the described rows cannot produce this, or None."""
        rows = described.rows
        units, known = self.shares.sum(axis=1), (self.rows >= 0) & (self.rows <= rows)
        whole = np.abs(units - np.rint(units)).max() <= 1e-6 * max(float(units.max()), 1.0)
        if not (known.all() and whole) or (self.shares < 0).any() or (np.rint(units) > self.rows).any():
            return f"`shares` are not distributions of up to {rows} hidden rows"  # of a unit, or of several in a total
        return None

    @staticmethod
    def outliers(answers: Mapping[str, Calibration], _: Mapping[str, int]) -> dict[str, str]:
        """Return units whose weight is above 1."""
        sums = {site: float(share.shares.sum(axis=1).max()) for site, share in answers.items()}
        return {site: f"`shares` add up to {total:g} instead of 1" for site, total in sums.items() if total > 1 + 1e-6}
