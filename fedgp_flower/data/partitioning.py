"""Partition the rows of a table over simulated sites; only ``natural`` omits rows, those of small groups."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import kind_of, number_labels
from fedgp_flower.data.synthetic import derived_seed, generator
from fedgp_flower.errors import DataError
from fedgp_flower.lazy import cluster, pd
from fedgp_flower.typing import Array, Indices

BINS, CLASSES_PER_SITE, LEAST_ROWS = 10, 2, 10
"""Quantile bins of a numeric partition column; classes per site of ``pathological``; rows per site of ``dirichlet``."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Rows of each site, ascending, and the label of each site."""

    rows: tuple[Indices, ...]
    labels: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Natural groups with too few rows."""


def partition_rows(inputs: pd.DataFrame, column: pd.Series, num_sites: int, config: CoreConfig) -> Partition:
    """Partition training rows, of typed inputs and a partition column, by ``config.partitioner``."""
    called = f"`partitioner` = '{config.partitioner}' with {num_sites} sites"
    if not 1 <= num_sites <= len(inputs):
        raise DataError(f"{called}: there are {len(inputs)} training rows; take between 1 and {len(inputs)} sites")
    seed = derived_seed(config.seed, "partition", config.partitioner)
    order = generator(seed, "order").permutation(len(inputs))
    match config.partitioner:
        case "natural":
            return _natural(column, num_sites, config, called)
        case "sizes":  # sizes grow linearly; the largest is ``partition.ratio`` times the smallest
            weights = np.linspace(1.0, config.partition.ratio, num_sites)
            ends = np.round(np.cumsum(weights) / weights.sum() * len(inputs)).astype(np.int64)
            parts = np.split(order, ends[:-1])
        case "kmeans":
            parts = _kmeans(standard_columns(inputs), num_sites, seed)
        case "blocks":
            parts = _blocks(standard_columns(inputs), num_sites)
        case _:
            parts = _flower(column, order, num_sites, config, called)
    if min(part.size for part in parts) == 0 or sum(part.size for part in parts) != len(inputs):
        raise DataError(f"{called} leaves a site without rows; take fewer sites")
    return Partition(tuple(np.sort(part) for part in parts), tuple(str(site) for site in range(num_sites)))


def partition_groups(frame: pd.DataFrame, factors: Sequence[list[str]], sites: int, config: CoreConfig) -> Partition:
    """Assign whole groups to sites at random: rows with the same level of a factor go to the same site."""
    codes = np.stack([frame.groupby(columns).ngroup().to_numpy() for columns in factors])
    starts = np.cumsum([0, *(codes.max(axis=1) + 1)])
    nodes = codes + starts[:-1, None]
    ones = np.ones((len(nodes) - 1) * nodes.shape[1])
    edges = coo_array((ones, (nodes[:-1].ravel(), nodes[1:].ravel())), shape=(starts[-1], starts[-1]))
    count, parts = connected_components(edges, directed=False)
    if count < sites:
        named = ", ".join(f"`{':'.join(columns)}`" for columns in factors)
        raise DataError(f"the groups of {named} cannot be split over {sites} sites; at most {count}")
    order = generator(derived_seed(config.seed, "partition", config.partitioner), "order").permutation(count)
    site = np.empty(count, dtype=np.int64)
    for number, share in enumerate(np.array_split(order, sites)):
        site[share] = number
    here = site[parts[nodes[0]]]
    return Partition(tuple(np.flatnonzero(here == s) for s in range(sites)), tuple(map(str, range(sites))))


def row_labels(column: pd.Series) -> pd.Series:
    """Return the values of the partition column as text."""
    return number_labels(column) if kind_of(column) == "numeric" else column


def _flower(column: pd.Series, order: Indices, sites: int, config: CoreConfig, called: str) -> list[Indices]:
    """Partition row numbers in random order by a partitioner of Flower Datasets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings on missing notebook widgets
        from datasets import Dataset  # noqa: PLC0415 - a second to import, and real sites never partition
        from flwr_datasets import partitioner as flower  # noqa: PLC0415 - slow to import

    options, seed = config.partition, derived_seed(config.seed, "partition", config.partitioner)
    values, advice = {"row": order}, "take fewer sites"
    if config.partitioner in ("dirichlet", "pathological"):
        values["class"] = _classes(column)[order]
        count = int(values["class"].max()) + 1
    match config.partitioner:
        case "dirichlet":
            least = options.min_rows or LEAST_ROWS
            advice = f"raise `partition.alpha`, lower `partition.min-rows` (now {least}) or take fewer sites"
            limits = {"alpha": options.alpha, "min_partition_size": least}
            chosen = flower.DirichletPartitioner(sites, "class", **limits, shuffle=False, seed=seed)
        case "pathological":
            each = CLASSES_PER_SITE
            advice = f"the partition column has {count} classes"
            if not each <= count < sites + each:
                remedy = f"take {count - each + 1} sites or more" if count > each else "name another `partition.column`"
                what = f"{called}, {each} classes per site, cannot assign every class to a site"
                raise DataError(f"{what}; {advice}: {remedy}")
            advice += "; take fewer sites or fewer classes per site"
            mode = "first-deterministic" if sites >= count else "deterministic"  # the paper's mode, if it fits
            chosen = flower.PathologicalPartitioner(sites, "class", each, mode, shuffle=False, seed=seed)
        case name:  # iid, linear, square or exponential
            chosen = getattr(flower, f"{name.title()}Partitioner")(sites)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar
            warnings.simplefilter("ignore")
            chosen.dataset = Dataset.from_dict(values)
            parts = map(chosen.load_partition, range(sites))
            return [np.asarray(part.with_format("numpy")["row"][:], dtype=np.int64) for part in parts]
    except ValueError:
        raise DataError(f"{called} is not possible with {len(order)} rows; {advice}") from None


def _classes(column: pd.Series) -> Indices:
    """Return the class of every row: its level, or the quantile bin of a column with many numbers."""
    numeric = kind_of(column) == "numeric"
    values = column.to_numpy() if numeric else column.to_numpy(dtype=object).astype(str)
    distinct, codes = np.unique(values, return_inverse=True)
    if numeric and distinct.size > BINS:
        edges = np.unique(np.quantile(values, np.arange(1, BINS) / BINS))
        codes = np.unique(np.searchsorted(edges, values, side="right"), return_inverse=True)[1]
    return codes.astype(np.int64)


def _natural(column: pd.Series, sites: int, config: CoreConfig, called: str) -> Partition:
    least = max(config.partition.min_rows, 1)
    values = column.to_numpy(dtype=object) if kind_of(column) == "categorical" else column.to_numpy()
    _, first, codes, sizes = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
    large = np.flatnonzero(sizes >= least)
    if large.size != sites:
        raise DataError(
            f"{called}: column `{config.partition.column}` has {large.size} groups with at least {least} rows"
            f" (`partition.min-rows`); run with {large.size} sites"
        )
    labels, small = row_labels(column), np.flatnonzero(sizes < least)
    kept, left_out = (tuple(map(str, labels.iloc[first[groups]])) for groups in (large, small))
    return Partition(tuple(np.flatnonzero(codes == group) for group in large), kept, left_out)


def standard_columns(inputs: pd.DataFrame) -> Array:
    """Return pooled columns and level indicators, standardised; constant ones are 0."""
    wide: Array = pd.get_dummies(inputs, dtype=float).to_numpy(dtype=np.float64)
    varies = wide.max(axis=0) > wide.min(axis=0)
    scale: Array = np.where(varies, wide.std(axis=0), 1.0)
    return np.where(varies, wide - wide.mean(axis=0), 0.0) / scale


def _kmeans(inputs: Array, sites: int, seed: int) -> list[Indices]:
    """One cluster of the standardised inputs per site."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with too few distinct rows a site is empty, which the caller rejects
        found = cluster.KMeans(sites, n_init=10, random_state=seed).fit_predict(inputs)
    return [np.flatnonzero(found == site) for site in range(sites)]


def _blocks(inputs: Array, sites: int) -> list[Indices]:
    """Equal contiguous blocks along the first principal component of the standardised inputs."""
    direction = np.linalg.svd(inputs.T @ inputs, hermitian=True)[0][:, 0]
    direction *= np.sign(direction[np.argmax(abs(direction))])
    return np.array_split(np.argsort(inputs @ direction, kind="stable"), sites)
