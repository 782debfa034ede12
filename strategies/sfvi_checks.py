"""Why a site's share of a round of SFVI or SFVI-Avg cannot be used: conditions every honest share meets."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedgp_flower.shapes import NamedArrays
from strategies.sfvi_state import DECAYS
from strategies.wire import Answer

OUTLIER = 1e4
"""A gradient so many times larger per row than the median site's is not taken for one."""


def rows_refusal(own: Answer, rows: int) -> str | None:
    """A site weighs as many rows as it said it had."""
    if own.num_examples != rows:
        return f"claims {own.num_examples} rows, introduced itself with {rows}"
    return None


def move_limit(rate: float, steps: int) -> float:
    """The farthest that ``steps`` steps of Adam can carry any parameter.

    By Cauchy-Schwarz |m| ≤ (1 − β₁) / √((1 − β₂) (1 − β₁²/β₂)) √v, whatever the gradients; the corrections for the
    start of the moments only make a step smaller.
    """
    one, two = DECAYS
    return rate * steps * (1 - one) / math.sqrt((1 - two) * (1 - one**2 / two))


def move_refusal(own: Answer, sent: NamedArrays, limit: float) -> str | None:
    """Parameters farther from those sent than the local steps can have gone."""
    for name, array in own.arrays.items():
        farthest = float(np.abs(array - sent[name]).max(initial=0.0))
        if farthest > limit * (1 + 1e-9):
            return f"`{name}` moved by {farthest:.3g}; its steps reach no farther than {limit:.3g}"
    return None


def gradient_refusals(answers: Mapping[str, Answer], rows: Mapping[str, int]) -> dict[str, str]:
    """Gradients that dwarf those of the other sites; with fewer than three sites nobody can tell which is wrong."""
    if len(answers) < 3:
        return {}
    sizes = {site: _size(own.arrays) / rows[site] for site, own in answers.items()}
    usual = float(np.median(list(sizes.values())))
    return {
        site: f"its gradient is {size / usual:.1e} times the usual one per row"
        for site, size in sizes.items()
        if size > OUTLIER * usual > 0
    }


def _size(arrays: NamedArrays) -> float:
    """The largest entry: a norm would overflow where a liar's numbers are huge."""
    return max(float(np.abs(array).max(initial=0.0)) for array in arrays.values())
