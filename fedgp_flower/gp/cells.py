"""Sums over small groups of rows, which describe the inputs and from which inducing points are drawn.

A site halves its rows along their first principal axis, and again, down to cells of at least five. It adds each cell's
count, Σx and Σx² to the slot of the nearest anchor, so that cells of several sites merge.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree

from fedgp_flower.typing import Array, Indices

LEAST_ROWS = 5
"""Fewest rows of a cell."""
LEAST_ALIKE, VALUES = 3, 128
"""Fewest rows of a cell of values of one input, and number of slots for such cells."""
MOST_CELLS = 512
"""Most cells of a site."""
COMMON, COUNTS = 32, 2**15
"""Most common values of an input, and about the most counts of rows with each pair of such values."""
EXACTLY = 1e-6
"""A value this close to a common value, in standardised units, counts as that value: masks round totals."""
COVERED = 0.9
"""Points follow pair counts if these cover at least this share of the rows with a common value of the parent."""
CHUNK = 4096
"""Rows in a block."""
MIN_COPIES, MARGIN = 2.0, 1.2
"""Fewest copies of each row for which rows get less weight, and safety factor of that weight."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def nearest(points: Array, centres: Array) -> Indices:
    """Index of the nearest centre of every point, [N]."""
    squares = np.square(centres).sum(1)
    chunks = np.split(points, range(CHUNK, len(points), CHUNK))
    return np.concatenate([(squares - 2 * chunk @ centres.T).argmin(1) for chunk in chunks])


def summed(labels: Indices, values: Array, count: int) -> Array:
    """Sum of the values by label, [C, ...]."""
    total = np.zeros((count, *values.shape[1:]))
    np.add.at(total, labels, values)
    return total


def grouped(inputs: Array, least: int = LEAST_ROWS) -> Indices:
    """The cell of every row [N], by repeated halving along the first principal axis, of at least ``least`` rows."""
    least = max(least, math.ceil(len(inputs) / MOST_CELLS))
    waiting, labels, count = [np.arange(len(inputs))], np.zeros(len(inputs), dtype=np.int64), 0
    while waiting:
        rows = waiting.pop()
        if len(rows) < 2 * least:
            labels[rows], count = count, count + 1
            continue
        centred = inputs[rows] - inputs[rows].mean(0)
        axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
        order = np.argsort(centred @ axis, kind="stable")
        waiting += np.array_split(rows[order], 2)
    return labels


def cells(inputs: Array, anchors: Array, least: int = LEAST_ROWS) -> tuple[Array, Array, Array]:
    """Rows [C], Σx [C, D] and Σx² [C, D] of cells of rows [N, D], in slots of the nearest anchors [C, D]."""
    labels = grouped(inputs, least)
    count, parts = int(labels.max()) + 1, (np.ones(len(inputs)), inputs, np.square(inputs))
    rows, first, second = (summed(labels, values, count) for values in parts)
    slots, slot_count = nearest(first / rows[:, None], anchors), len(anchors)
    return summed(slots, rows, slot_count), summed(slots, first, slot_count), summed(slots, second, slot_count)


def repeats(inputs: Array, targets: Array) -> Array:
    """Sums of hashed signs ±1 over rows [2, 256]; equal targets, or equal whole rows, have equal signs."""
    mixed = np.tile(np.arange(1, 5, dtype=np.uint64)[:, None] * GOLDEN, len(targets))  # [4, N]
    sums = []
    for column in (targets, *inputs.T):  # SplitMix64 (Steele et al. 2014) of the earlier columns and this one
        mixed = mixed ^ (column + 0.0).view(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        sums.append(mixed)
    ones = [[(of >> np.uint64(bit) & np.uint64(1)).sum(1) for bit in range(64)] for of in (sums[0], sums[-1])]
    return len(targets) - 2.0 * np.asarray(ones, dtype=np.float64).reshape(2, 256)


def weight_of(totals: Array, rows: float) -> float:
    """N/Σ c², Kish's effective fraction of N rows with c copies each; 1 if few rows are copies.

    The mean square of the sums of :func:`repeats` estimates Σ c² within 9 % (Alon, Matias and Szegedy 1996). The
    margin lowers the weight, since with too high a weight the fitted noise vanishes. Rows that share only their targets
    are not copies.
    """
    by_target, by_row = np.square(totals).mean(1)
    copied = by_row >= MIN_COPIES * rows and by_target <= MIN_COPIES * by_row
    return float(rows / by_row / MARGIN) if copied else 1.0


def values_of(inputs: Array, anchors: Array, least: int = LEAST_ALIKE) -> tuple[Array, Array]:
    """Rows [D, B] and sums of values [D, B] in cells of each input's values, with at least ``least`` rows.

    A value with ``least`` rows is a cell. The values between two such values form cells of ``least`` neighbours; fewer
    are left out. A cell adds to the slot of the nearest of B quantiles of the anchors' values.
    """
    quantiles = np.quantile(anchors, (np.arange(VALUES) + 0.5) / VALUES, axis=0)  # [B, D]
    pairs = zip(inputs.T, quantiles.T, strict=True)
    parts = zip(*(_cells_of_values(column, slots, least) for column, slots in pairs), strict=True)
    rows, sums = map(np.stack, parts)
    return rows, sums


def _cells_of_values(column: Array, slots: Array, least: int) -> tuple[Array, Array]:
    values, counts = np.unique(column, return_counts=True)
    heavy = counts >= least
    between = np.repeat(np.cumsum(heavy)[~heavy], counts[~heavy])  # the gap of each other row between heavy values
    first, last = np.searchsorted(between, between), np.searchsorted(between, between, side="right")
    size, place = last - first, np.arange(len(between)) - first
    whole = size >= least
    group = first + np.minimum(place // least, size // least - 1) * least  # first row of its cell
    label, member = np.unique(group[whole], return_inverse=True)
    rows: Array = np.concatenate([np.bincount(member, minlength=len(label)), counts[heavy]]).astype(np.float64)
    sums = np.bincount(member, np.repeat(values[~heavy], counts[~heavy])[whole], len(label))
    sums = np.concatenate([sums, values[heavy] * counts[heavy]])
    slot = nearest(sums[:, None] / rows[:, None], slots[:, None]) if len(rows) else np.empty(0, dtype=np.int64)
    return summed(slot, rows, len(slots)), summed(slot, np.asarray(sums), len(slots))


def with_values(points: Array, rows: Array, sums: Array) -> Array:
    """Points [S, D] with the marginal distributions of :func:`values_of` and the ranks of ``points``.

    They keep the dependence of the inputs, and match values with many rows exactly.
    """
    moved = points.copy()
    for column, (count, total) in enumerate(zip(rows, sums, strict=True)):
        filled = count > 0
        if filled.any():
            moved[:, column] = _by_rank(points[:, column], total[filled] / count[filled], count[filled])
    return moved


def _by_rank(column: Array, values: Array, counts: Array) -> Array:
    """Return the values in the order of ``column``, each as often as its share of the counts."""
    order, size = np.argsort(values), len(column)
    up_to = np.cumsum(counts[order]) / counts.sum()
    place = np.argsort(np.argsort(column, kind="stable"), kind="stable")
    return np.asarray(values[order][np.minimum(np.searchsorted(up_to, (place + 0.5) / size), len(values) - 1)])


def common_values(rows: Array, sums: Array) -> Array:
    """Return the mean values [D, V] of the slots of :func:`values_of` with most rows; the first replaces empty ones."""
    num_pairs = math.comb(len(rows), 2)
    most = max(1, min(COMMON, rows.shape[1], math.isqrt(COUNTS // max(num_pairs, 1))))
    slots = np.argsort(-rows, axis=1, kind="stable")[:, :most]
    count, total = (np.take_along_axis(part, slots, axis=1) for part in (rows, sums))
    values = total / np.maximum(count, 1)
    return np.where(count > 0, values, values[:, :1])


def pair_counts(inputs: Array, values: Array, least: int = LEAST_ALIKE) -> Array:
    """Return the number of rows with each pair of common values [D, V], as [P, V, V]; 0 for fewer than ``least``.

    The P = D (D − 1)/2 pairs of inputs are in the order of ``np.triu_indices``.
    """
    total = np.zeros((values.size, values.size))
    for block in np.split(inputs, range(CHUNK, len(inputs), CHUNK)):
        has = np.zeros((len(block), *values.shape))
        for column, (given, known) in enumerate(zip(block.T, values, strict=True)):
            slot = nearest(given[:, None], known[:, None])
            has[np.arange(len(given)), column, slot] = np.abs(given - known[slot]) < EXACTLY
        flat = has.reshape(len(block), -1)
        total += flat.T @ flat
    counts = total.reshape(*values.shape, *values.shape).transpose(0, 2, 1, 3)[np.triu_indices(len(values), 1)]
    return np.where(counts < least, 0.0, counts)


def dependence_tree(pairs: Array, rows: float) -> list[tuple[int, int]]:
    """Return (parent, child) of the tree of inputs that keeps most information (Chow and Liu 1968), parents first.

    ``pairs`` [D, D, V, V] are counts. An edge has the mutual information Σ p log p/(q r) of the counted rows.
    """
    shares = pairs / rows
    whole, independent = shares.sum((2, 3), keepdims=True), shares.sum(3, keepdims=True) * shares.sum(2, keepdims=True)
    ratio = np.divide(shares * whole, independent, out=np.ones_like(shares), where=shares > 0)
    tree = minimum_spanning_tree(np.triu(-(shares * np.log(ratio)).sum((2, 3)), 1))
    edges = []
    for root in np.unique(connected_components(tree, directed=False)[1], return_index=True)[1]:
        order, parents = breadth_first_order(tree, root, directed=False)
        edges += [(int(parents[child]), int(child)) for child in order[1:]]
    return edges


def with_pairs(points: Array, moved: Array, values: Array, counts: Array, rows: float) -> Array:
    """Return the points with the pairs of common values [D, V] that rows have, input by input along a tree.

    Among the points with a common value of the parent, the child's values have the shares of the pair counts and the
    ranks of ``points``, if these counts cover nearly all rows with that value. The draws ``points`` [S, D] are
    ``moved`` by :func:`with_values`; ``counts`` are the total of :func:`pair_counts` over all ``rows``.
    """
    (num_inputs, most), moved = values.shape, moved.copy()
    pairs, (above, below) = np.zeros((num_inputs, num_inputs, most, most)), np.triu_indices(num_inputs, 1)
    pairs[above, below], pairs[below, above] = counts, counts.transpose(0, 2, 1)
    for parent, child in dependence_tree(pairs, rows):
        for value, counted in zip(values[parent], pairs[parent, child], strict=True):
            chosen = np.flatnonzero(np.abs(moved[:, parent] - value) < EXACTLY)
            if len(chosen) and counted.sum() >= COVERED * rows * len(chosen) / len(points):
                moved[chosen, child] = _by_rank(points[chosen, child], values[child], counted)
    return moved


def drawn(rows: Array, first: Array, second: Array, count: int, rng: np.random.Generator) -> Array:
    """Points [S, D] from the mixture of cells, each a Gaussian with the cell's mean and variances."""
    filled = rows > 0
    mean = first[filled] / rows[filled, None]
    spread = np.sqrt(np.maximum(second[filled] / rows[filled, None] - mean**2, 0))  # negative only by rounding
    chosen = rng.choice(len(mean), count, p=rows[filled] / rows[filled].sum())
    return mean[chosen] + spread[chosen] * rng.standard_normal((count, mean.shape[1]))
