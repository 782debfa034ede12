"""Where inputs lie, as sums of small groups of rows: a summand from which inducing points are drawn.

A site halves its rows along the direction in which they spread most, and the halves again, down to cells of at least
five. It adds each cell's count, Σx and Σx² to the slot of the nearest anchor, where cells of several sites are one.
"""

from __future__ import annotations

import math

import numpy as np

from fedgp_flower.typing import Array, Indices

LEAST_ROWS = 5
"""Fewest rows of a cell."""
LEAST_IN_CELL = 3
"""Fewest rows nearest to an anchor, at a site and in all."""
MOST_CELLS = 512
"""Of a site."""
DRAWS = 4000
"""Points drawn from the cells, of which the inducing points are the centres."""
LLOYD_STEPS = 8
CHUNK = 4096
"""Rows handled at once."""
COPIES, SURELY = 2.0, 1.2
"""Rows count less where there are so many of each, and by such a factor less than estimated."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LEFT = 1e-4
"""Share of its prior variance that must be left of a candidate to be taken before others."""


def nearest(points: Array, centres: Array) -> Indices:
    """Index of the nearest centre of every point, [N]."""
    squares = np.square(centres).sum(1)
    chunks = np.split(points, range(CHUNK, len(points), CHUNK))
    return np.concatenate([(squares - 2 * chunk @ centres.T).argmin(1) for chunk in chunks])


def summed(labels: Indices, values: Array, count: int) -> Array:
    """Σ of the values with each label, [C, ...]."""
    total = np.zeros((count, *values.shape[1:]))
    np.add.at(total, labels, values)
    return total


def centres_of(points: Array, count: int, rng: np.random.Generator) -> Array:
    """K-means: ``count`` centres [C, D] of points [N, D], by Lloyd's steps from distinct points; fewer if those are."""
    distinct = np.unique(points, axis=0)
    centres = distinct[rng.permutation(len(distinct))[:count]]
    for _ in range(LLOYD_STEPS):
        labels = nearest(points, centres)
        sizes = np.bincount(labels, minlength=len(centres))[:, None]
        centres = np.where(sizes > 0, summed(labels, points, len(centres)) / np.maximum(sizes, 1), centres)
    return centres


def grouped(inputs: Array, least: int = LEAST_ROWS) -> Indices:
    """The cell of every row, [N]: halves of halves at the median of the widest principal axis, of ``least`` rows."""
    least = max(least, math.ceil(len(inputs) / MOST_CELLS))
    waiting, labels, count = [np.arange(len(inputs))], np.zeros(len(inputs), dtype=np.int64), 0
    while waiting:
        rows = waiting.pop()
        if len(rows) < 2 * least:
            labels[rows], count = count, count + 1
            continue
        away = inputs[rows] - inputs[rows].mean(0)
        axis = np.linalg.eigh(away.T @ away)[1][:, -1]
        order = np.argsort(away @ axis, kind="stable")
        waiting += np.array_split(rows[order], 2)
    return labels


def cells(inputs: Array, anchors: Array, least: int = LEAST_ROWS) -> tuple[Array, Array, Array]:
    """Rows [C], Σx [C, D] and Σx² [C, D] of the cells of rows [N, D], in the slots of their nearest anchors [C, D]."""
    labels = grouped(inputs, least)
    count, parts = int(labels.max()) + 1, (np.ones(len(inputs)), inputs, np.square(inputs))
    rows, first, second = (summed(labels, values, count) for values in parts)
    slots, slot_count = nearest(first / rows[:, None], anchors), len(anchors)
    return summed(slots, rows, slot_count), summed(slots, first, slot_count), summed(slots, second, slot_count)


def repeats(inputs: Array, targets: Array) -> Array:
    """Σ of signs ±1 over rows [2, 256], equal where targets and where whole rows are equal, else by chance (a hash)."""
    mixed = np.tile(np.arange(1, 5, dtype=np.uint64)[:, None] * GOLDEN, len(targets))  # [4, N]
    sums = []
    for column in (targets, *inputs.T):  # SplitMix64 (Steele et al. 2014) of what was before and this number
        mixed = mixed ^ (column + 0.0).view(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        sums.append(mixed)
    ones = [[(of >> np.uint64(bit) & np.uint64(1)).sum(1) for bit in range(64)] for of in (sums[0], sums[-1])]
    return len(targets) - 2.0 * np.asarray(ones, dtype=np.float64).reshape(2, 256)


def weight_of(totals: Array, rows: float) -> float:
    """N/Σ c², Kish's effective share of N rows where each has c copies; 1 where few rows are copies.

    The mean square of the sums of :func:`repeats` is Σ c² on average, within 9 % (Alon, Matias and Szegedy 1996); the
    share is rather too low, since with one too high the noise still vanishes. Rows that share a target and not their
    inputs are no copies.
    """
    by_target, by_row = np.square(totals).mean(1)
    copied = by_row >= COPIES * rows and by_target <= COPIES * by_row
    return float(rows / by_row / SURELY) if copied else 1.0


def neighbours(inputs: Array, anchors: Array, least: int) -> tuple[Array, Array]:
    """Rows [C] and Σx [C, D] of the rows nearest to each anchor [C, D]: what Lloyd's algorithm needs of them.

    Rows of an anchor with fewer than ``least`` go to the nearest of the others, so that no cell holds one or two rows.
    """
    labels = nearest(inputs, anchors)
    kept = np.flatnonzero(np.bincount(labels, minlength=len(anchors)) >= least)
    if not len(kept):  # too few rows for that
        kept = nearest(inputs.mean(0, keepdims=True), anchors)
    left = ~np.isin(labels, kept)
    if left.any():
        labels[left] = kept[nearest(inputs[left], anchors[kept])]
    return np.bincount(labels, minlength=len(anchors)).astype(float), summed(labels, inputs, len(anchors))


def relocated(rows: Array, first: Array, anchors: Array, count: int, rng: np.random.Generator) -> Array:
    """A Lloyd step: the means of the heaviest cells, and new points around heavy ones until there are ``count`` [C, D].

    Cells of fewer than :data:`LEAST_IN_CELL` rows are dropped. A new point is as far from the mean of its cell as the
    cell's anchor was.
    """
    kept = np.flatnonzero(rows >= LEAST_IN_CELL)
    kept = kept[np.argsort(-rows[kept], kind="stable")][:count]
    if not len(kept):
        return anchors[:count]
    means = first[kept] / rows[kept, None]
    chosen = rng.choice(len(kept), count - len(kept), p=rows[kept] / rows[kept].sum())
    away = np.sqrt(np.square(means - anchors[kept]).mean(1, keepdims=True))[chosen]
    return np.concatenate([means, means[chosen] + away * rng.standard_normal((len(chosen), means.shape[1]))])


def drawn(rows: Array, first: Array, second: Array, rng: np.random.Generator) -> Array:
    """Points [S, D] from the mixture of cells, each a Gaussian with the cell's mean and variances."""
    kept = rows > 0
    mean = first[kept] / rows[kept, None]
    spread = np.sqrt(np.maximum(second[kept] / rows[kept, None] - mean**2, 0))  # below 0 by rounding alone
    chosen = rng.choice(len(mean), DRAWS, p=rows[kept] / rows[kept].sum())
    return mean[chosen] + spread[chosen] * rng.standard_normal((DRAWS, mean.shape[1]))


def explaining(covariance: Array, products: Array, count: int) -> Indices:
    """The ``count`` candidates for inducing points that explain most of the rows' variance, in their order [P].

    With K = k(Z, Z) and G = Σ k(Z, x) k(x, Z), a candidate j explains G̃_jj/K̃_jj beyond those taken before,
    where K̃ and G̃ are what those left of K and G. Taking j leaves, with u = K̃_:j/K̃_jj,

        K̃ ← K̃ − K̃_jj u uᵀ,   G̃ ← G̃ − u G̃_j: − G̃_:j uᵀ + G̃_jj u uᵀ.

    See Farahat et al., Greedy column subset selection for large-scale data sets (2015).
    """
    left, explained, least = covariance.copy(), products.copy(), LEFT * covariance.diagonal()
    taken: list[int] = []
    for _ in range(count):
        variances = left.diagonal()
        gains = np.where(variances > least, explained.diagonal() / np.maximum(variances, least), -1.0)
        gains[taken] = -2.0
        best = int(gains.argmax())
        taken.append(best)
        column, moved = left[:, best].copy(), explained[:, best].copy()
        share = column / max(column[best], least[best])
        explained -= np.outer(share, moved) + np.outer(moved, share) - moved[best] * np.outer(share, share)
        left -= np.outer(column, share)
    return np.sort(taken)
