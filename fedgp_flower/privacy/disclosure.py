"""Fewer than k rows are not told apart: rare levels become ``other``, small cells of a histogram join a neighbour."""

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
    """Levels of ``least`` rows or more, less the smallest where the rare ones together would still be a small count."""
    ordered = counts.sort_index().sort_values(kind="stable")
    rows = ordered.to_numpy()
    pooled = (rows < least) | (ordered.index == OTHER)
    while 0 < rows[pooled].sum() < least and not pooled.all():
        pooled[np.argmin(pooled)] = True
    return frozenset(ordered.index[~pooled])


def names_rows(counts: pd.Series, least: int) -> bool:
    """Whether most levels have fewer than ``least`` rows: they are identifiers, some of which repeat."""
    return len(counts) >= FEW_LEVELS and 2 * int((counts < least).sum()) > len(counts)


def merged_cells(table: NDArray[np.generic], least: int) -> NDArray[np.generic]:
    """Rows of bins, [B] or the first column of [B, C]: bins join from the left until each cell has ``least`` rows."""
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


def merged_tables(tables: NDArray[np.generic], least: int) -> NDArray[np.generic]:
    """The same of several tables [T, B, C]."""
    return np.stack([merged_cells(table, least) for table in tables])


def merged_classes(table: NDArray[np.generic], least: int) -> NDArray[np.generic]:
    """The same where the numbers of a bin are the rows of each class, [B, C]."""
    return merged_cells(np.column_stack([table.sum(axis=1), table]), least)[:, 1:]
