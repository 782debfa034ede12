"""Where a site's pseudo-observations start, and how close to its rows they end.

A pseudo-observation initialised at a row stays near it. Averages over several rows (microaggregation) start away from
every single row; the distance report says, before anything leaves the site, how far that carried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial import cKDTree
from scipy.stats import rankdata

from fedgp_flower.methods.pvi.factors import PseudoObservations
from fedgp_flower.methods.pvi.hierarchical import Data
from fedgp_flower.typing import Array

MERGED_ROWS = 5000
"""Rows up to which the closest are merged one by one: 100 MB of distances."""


def microaggregate(data: Data, num_points: int, min_rows: int) -> PseudoObservations:
    """Tied pseudo-observations at averages of disjoint groups of rows, each group of at least ``min_rows``.

    The mean of n rows has noise σ²/n, so w = n; then Σ_j w_j = N_k and c is the scatter of y within the groups.

    Args:
        data: The site's rows.
        num_points: Wanted number M_k; fewer where the floor does not allow so many, one where a site has fewer rows.
        min_rows: Smallest group. 1 merges nearest rows until M_k points are left; above :data:`MERGED_ROWS` rows they
            are cut into parts as with other floors, because merging keeps all N_k²/2 distances.
    """
    inputs = data.inputs.detach().numpy()
    wanted = max(1, min(num_points, len(data) // min_rows))
    labels = _groups(inputs, wanted, merge=min_rows == 1 and len(data) <= MERGED_ROWS)
    groups = torch.as_tensor(labels)
    sizes = torch.bincount(groups).double()
    centres = torch.zeros(len(sizes), inputs.shape[1], dtype=torch.float64).index_add_(0, groups, data.inputs)
    means = torch.zeros_like(sizes).index_add_(0, groups, data.targets) / sizes
    scatter = (data.targets - means[groups]).square().sum()
    return PseudoObservations(centres / sizes[:, None], means, sizes.sqrt(), True, float(len(data)), scatter)


def _groups(inputs: Array, num_groups: int, *, merge: bool) -> NDArray[np.int64]:
    if num_groups == len(inputs):
        return np.arange(len(inputs))
    return _nearest_merges(inputs, num_groups) if merge else _splits(inputs, num_groups)


def _nearest_merges(inputs: Array, num_groups: int) -> NDArray[np.int64]:
    """Ward's agglomeration: the closest rows are merged first."""
    tree = linkage(inputs, "ward")
    labels = fcluster(tree, num_groups, criterion="maxclust")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _splits(inputs: Array, num_groups: int) -> NDArray[np.int64]:
    """Cut along the widest direction, rows in proportion to groups, until every part is one group."""
    labels = np.empty(len(inputs), dtype=np.int64)
    queue = [(np.arange(len(inputs)), num_groups)]
    label = 0
    while queue:
        rows, groups = queue.pop()
        if groups == 1:
            labels[rows] = label
            label += 1
            continue
        centred = inputs[rows] - inputs[rows].mean(0)
        direction = np.linalg.svd(centred, full_matrices=False)[2][0]
        order = rows[np.argsort(centred @ direction, kind="stable")]
        cut = len(rows) * (groups // 2) // groups  # rows per group never fall below the floor on either side
        queue += [(order[:cut], groups // 2), (order[cut:], groups - groups // 2)]
    return labels


@dataclass(frozen=True, slots=True)
class DistanceReport:
    """Distances from pseudo-observations to the nearest row, (x, y) jointly, in units of the typical row spacing."""

    quantiles: tuple[float, float, float]
    """5 %, 50 % and 95 % of distance / spacing."""
    share_near: float
    """Share of pseudo-observations within 0.05 (standardised units) of a row."""
    spacing: float
    """Median distance from a row to its nearest other row."""


def distance_report(factor: PseudoObservations, data: Data, *, near: float = 0.05) -> DistanceReport:
    """How close the pseudo-observations are to the private rows; computed at the site before anything is sent."""
    rows = np.column_stack([data.inputs.detach().numpy(), data.targets.detach().numpy()])
    points = np.column_stack([factor.inputs.detach().numpy(), factor.targets.detach().numpy()])
    unique = np.unique(rows, axis=0)
    tree = cKDTree(unique)
    spacing = float(np.median(np.atleast_2d(tree.query(unique, k=2)[0])[:, 1])) if len(unique) > 1 else float("inf")
    distance = np.atleast_1d(tree.query(points)[0])
    low, middle, high = (float(q) for q in np.quantile(distance / spacing, [0.05, 0.5, 0.95]))
    return DistanceReport((low, middle, high), float(np.mean(distance < near)), spacing)


def membership_auc(factor: PseudoObservations, members: Data, strangers: Data) -> float:
    """How well distance to the nearest pseudo-observation tells the site's rows from held-out ones.

    The probability that a random row of the site is nearer than a random held-out row (ties count half): ½ is chance, 1
    gives the rows away. Needs rows that the site did not use, so it is measured in simulation.
    """
    tree = cKDTree(np.column_stack([factor.inputs.detach().numpy(), factor.targets.detach().numpy()]))
    near, far = (
        tree.query(np.column_stack([data.inputs.detach().numpy(), data.targets.detach().numpy()]))[0]
        for data in (members, strangers)
    )
    ranks = rankdata(np.concatenate([-near, -far]))
    wins = ranks[: len(near)].sum() - len(near) * (len(near) + 1) / 2
    return float(wins / (len(near) * len(far)))
