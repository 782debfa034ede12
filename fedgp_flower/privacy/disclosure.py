"""Fewer than k rows are not told apart: rare levels become ``other``, small cells of a histogram join a neighbour.

The anchors are those of statistical disclosure control: DataSHIELD shows no cell below 3 and fits no model with more
than 0.33 parameters a row, PCORnet hides cells below 11, vantage6 takes no part with fewer than 10 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.data.tables import OTHER

if TYPE_CHECKING:
    import pandas as pd

FEW_LEVELS = 10
"""Fewer levels than these are no identifier."""


def kept_levels(counts: pd.Series, least: int) -> frozenset[str]:
    """The levels that may leave, by rows of each: those of ``least`` rows or more.

    Where the others have fewer than ``least`` rows together, the smallest of the rest goes with them: what remains is
    a total, and a total less the levels that left would be the small count.
    """
    ordered = counts.sort_index().sort_values(kind="stable")
    rows = ordered.to_numpy()
    pooled = (rows < least) | (ordered.index == OTHER)
    while 0 < rows[pooled].sum() < least and not pooled.all():
        pooled[np.argmin(pooled)] = True
    return frozenset(ordered.index[~pooled])


def merged_levels(column: pd.Series, kept: frozenset[str]) -> pd.Series:
    """Levels that are not kept, as ``other``."""
    return column.where(column.isin(kept), OTHER)


def names_rows(counts: pd.Series, least: int) -> bool:
    """Whether most levels have fewer than ``least`` rows: they are identifiers, some of which repeat."""
    return len(counts) >= FEW_LEVELS and 2 * int((counts < least).sum()) > len(counts)


def merged_cells(table: NDArray[np.generic], least: int) -> NDArray[np.generic]:
    """A histogram in which no cell has fewer than ``least`` rows, as far as there are so many; the total stays.

    Bins are joined from the left until they have so many; the largest of them gets the sum.

    Args:
        table: Rows of each bin [B], or these in the first column and other sums of the bin's rows behind, [B, C].
        least: k.
    """
    counts, groups = table if table.ndim == 1 else table[:, 0], list[list[int]]()
    for place in np.flatnonzero(counts).tolist():
        if not groups or counts[groups[-1]].sum() >= least:
            groups.append([])
        groups[-1].append(place)
    if len(groups) > 1 and counts[groups[-1]].sum() < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    merged = np.zeros_like(table)
    for group in groups:
        merged[group[int(np.argmax(counts[group]))]] = table[group].sum(axis=0)
    return merged


def merged_classes(table: NDArray[np.generic], least: int) -> NDArray[np.generic]:
    """The same where the numbers of a bin are the rows of each class, [B, C]."""
    return merged_cells(np.column_stack([table.sum(axis=1), table]), least)[:, 1:]
