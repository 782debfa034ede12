"""What server and units say to each other where units deviate from one shared curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.privacy.disclosure import merged_cells
from fedgp_flower.typing import AnyShape


@message()
class TrendView:
    """The shared curve and what is known of deviations: with a unit's rows, all that predicts."""

    values: Mapping[str, AnyShape] = leaves("θ and q(u)")
    factors: Float[ndarray, " K"] = leaves("by cut, how much wider bands beyond the last row are")


@message()
class CalibrationRequest:
    """Predict yourself from your first rows and the others."""

    values: Mapping[str, AnyShape] = leaves("θ and q(u)")
    precision: Float[ndarray, "G G"] = leaves("the total P", symmetric=True)
    shift: Float[ndarray, " G"] = leaves("the total p")


@message("query.calibration", summand=True)
class Calibration:
    """How far the rows that a unit hid beyond K cuts were from what it predicted of them; only sums count."""

    shares: Float[ndarray, "K B"] = leaves("share of the hidden rows by |y − mean| / sd, at each cut")
    rows: Float[ndarray, " K"] = leaves("hidden rows, at each cut")

    def num_parameters(self) -> int:
        """A distribution at each cut."""
        return len(self.rows)

    def coarse(self, least: int) -> Calibration:
        """The same without cells of fewer rows."""
        counts = np.rint(self.shares * self.rows[:, None]).astype(np.int64)
        merged = np.stack([merged_cells(own, least) for own in counts]).astype(np.float64)
        return replace(self, shares=merged / np.maximum(self.rows, 1)[:, None])

    def refusal(self, rows: int) -> str | None:
        """Why this cannot come from so many rows, or None."""
        units, known = self.shares.sum(axis=1), (self.rows >= 0) & (self.rows <= rows)
        whole = np.abs(units - np.rint(units)).max() <= 1e-6 * max(float(units.max()), 1.0)
        if not (known.all() and whole) or (self.shares < 0).any() or (np.rint(units) > self.rows).any():
            return f"`shares` are no distributions of up to {rows} hidden rows"  # of a unit, or of several in a total
        return None

    @staticmethod
    def outliers(answers: Mapping[str, Calibration], rows: Mapping[str, int]) -> dict[str, str]:
        """Units that count as several."""
        del rows
        sums = {site: float(own.shares.sum(axis=1).max()) for site, own in answers.items()}
        return {site: f"`shares` add up to {total:g} instead of 1" for site, total in sums.items() if total > 1 + 1e-6}


@message()
class TrendCurveRequest:
    """Predict along the one input."""

    view: TrendView
    grid: Float[ndarray, "G 1"] = leaves("standardised inputs")
