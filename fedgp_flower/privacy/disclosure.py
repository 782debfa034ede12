"""Hide counts below k rows: rare levels become ``other``, and small cells of histograms are merged with neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.data.tables import OTHER
from fedgp_flower.lazy import pd

FEW_LEVELS = 10
"""A column with fewer levels is no identifier."""


def kept_levels(counts: pd.Series, least: int) -> frozenset[str]:
    """Return the levels with ``least`` rows or more; the smallest join ``other`` until it has ``least`` rows too."""
    ordered = counts.sort_index().sort_values(kind="stable")
    rows = ordered.to_numpy()
    pooled = (rows < least) | (ordered.index == OTHER)
    while 0 < rows[pooled].sum() < least and not pooled.all():
        pooled[np.argmin(pooled)] = True
    return frozenset(ordered.index[~pooled])


def is_identifier(counts: pd.Series, least: int) -> bool:
    """Return whether most levels have fewer than ``least`` rows, like identifiers of which some repeat."""
    return len(counts) >= FEW_LEVELS and 2 * int((counts < least).sum()) > len(counts)


def merged_cells(table: NDArray[np.generic], least: int) -> NDArray[np.generic]:
    """Merge bins from the left until each has ``least`` rows.

    The rows are the table [B], its first column [B, C], or those of several tables [T, B, C].
    """
    if table.ndim == 3:
        return np.stack([merged_cells(each, least) for each in table])
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
    """Merge the cells of a table [B, C] of rows by bin and class."""
    return merged_cells(np.column_stack([table.sum(axis=1), table]), least)[:, 1:]
