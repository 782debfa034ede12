"""Deal the rows of a table to simulated sites: Flower Datasets' partitioners and three others.

Every row goes to exactly one site; only ``natural`` leaves out rows, those of groups that are too small. The same seed
deals the same rows.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import kind_of, number_labels
from fedgp_flower.data.synthetic import derived_seed, generator
from fedgp_flower.errors import DataError
from fedgp_flower.lazy import pd
from fedgp_flower.typing import Array, Indices

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

BINS, CLASSES_PER_SITE = 10, 2
"""Quantile bins that a numeric column is cut into to be dealt by; classes of a site, as in the paper."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Rows of each site, ascending, and the site's human name."""

    rows: tuple[Indices, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    """What a partitioner sees: the inputs, the partition column, how many sites, and the configuration."""

    inputs: pd.DataFrame
    column: pd.Series
    sites: int
    config: CoreConfig

    @property
    def seed(self) -> int:
        return derived_seed(self.config.seed, "partition", self.config.partitioner)

    @property
    def key(self) -> str:
        return f"`partitioner` = '{self.config.partitioner}' with {self.sites} sites"


def deal(inputs: pd.DataFrame, column: pd.Series, num_sites: int, config: CoreConfig) -> Deal:
    """Deal training rows, of typed inputs and a partition column, as ``config.partitioner`` says."""
    task = _Task(inputs, column, num_sites, config)
    if not 1 <= num_sites <= len(inputs):
        raise DataError(
            f"{task.key}: there are {len(inputs)} training rows to deal; take between 1 and that many sites"
        )
    if config.partitioner == "natural":
        return _natural(task)
    rows = tuple(np.sort(part) for part in PARTITIONERS[config.partitioner](task))
    smallest = min(part.size for part in rows)
    if smallest == 0 or sum(part.size for part in rows) != len(inputs):
        raise DataError(f"{task.key} leaves a site without rows; take fewer sites")
    return Deal(rows, tuple(str(site) for site in range(num_sites)))


def row_labels(column: pd.Series) -> pd.Series:
    """The value of the natural column as text, row by row."""
    return number_labels(column) if kind_of(column) == "numeric" else column


def _flower(
    task: _Task, partitioner: Partitioner, values: Mapping[str, Indices], rows: Indices, advice: str
) -> list[Indices]:
    """Run a Flower Datasets partitioner over row numbers and the one column it needs."""
    from datasets import Dataset  # noqa: PLC0415 - a second to import, and real sites never partition

    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # one of them draws a progress bar
            warnings.simplefilter("ignore")
            partitioner.dataset = Dataset.from_dict({"row": rows, **values})
            parts = map(partitioner.load_partition, range(partitioner.num_partitions))
            return [np.asarray(part.with_format("numpy")["row"][:], dtype=np.int64) for part in parts]
    except ValueError:
        raise DataError(f"{task.key} is not possible with {len(rows)} rows; {advice}") from None


def _shuffled(task: _Task) -> Indices:
    return generator(task.seed, "order").permutation(len(task.inputs))


def _by_count(task: _Task) -> list[Indices]:
    """Sites of equal size, or of size ∝ k, k², eᵏ, with rows in random order."""
    from flwr_datasets import partitioner as flower  # noqa: PLC0415 - slow to import

    kinds = {
        "iid": flower.IidPartitioner,
        "linear": flower.LinearPartitioner,
        "square": flower.SquarePartitioner,
        "exponential": flower.ExponentialPartitioner,
    }
    chosen = kinds[task.config.partitioner](num_partitions=task.sites)
    return _flower(task, chosen, {}, _shuffled(task), "take fewer sites")


def _classes(task: _Task) -> Indices:
    """Class of every row: the level, the value where there are few, else the quantile bin of the partition column."""
    numeric = kind_of(task.column) == "numeric"
    values = task.column.to_numpy() if numeric else task.column.to_numpy(dtype=object).astype(str)
    distinct, codes = np.unique(values, return_inverse=True)
    if numeric and distinct.size > BINS:
        edges = np.unique(np.quantile(values, np.arange(1, BINS) / BINS))
        codes = np.unique(np.searchsorted(edges, values, side="right"), return_inverse=True)[1]
    return codes.astype(np.int64)


def _dirichlet(task: _Task) -> list[Indices]:
    from flwr_datasets.partitioner import DirichletPartitioner  # noqa: PLC0415 - slow to import

    options = task.config.partition
    chosen = DirichletPartitioner(
        task.sites, "class", alpha=options.alpha, min_partition_size=options.min_rows, shuffle=False, seed=task.seed
    )
    rows = _shuffled(task)
    advice = f"raise `partition.alpha`, lower `partition.min-rows` (now {options.min_rows}) or take fewer sites"
    return _flower(task, chosen, {"class": _classes(task)[rows]}, rows, advice)


def _pathological(task: _Task) -> list[Indices]:
    """Every site sees two classes, assigned as in the paper where that reaches all."""
    from flwr_datasets.partitioner import PathologicalPartitioner  # noqa: PLC0415 - slow to import

    classes, per_site = _classes(task), CLASSES_PER_SITE
    count = int(classes.max()) + 1
    advice = f"the partition column has {count} classes"
    if not per_site <= count < task.sites + per_site:
        raise DataError(f"{task.key}, {per_site} classes per site, cannot deal every class to a site; {advice}")
    mode = "first-deterministic" if task.sites >= count else "deterministic"
    chosen = PathologicalPartitioner(task.sites, "class", per_site, mode, shuffle=False, seed=task.seed)
    rows, advice = _shuffled(task), f"{advice}; take fewer sites or fewer classes per site"
    return _flower(task, chosen, {"class": classes[rows]}, rows, advice)


def _natural(task: _Task) -> Deal:
    options, column = task.config.partition, task.column
    values = column.to_numpy(dtype=object) if kind_of(column) == "categorical" else column.to_numpy()
    _, first, codes, sizes = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
    large = np.flatnonzero(sizes >= options.min_rows)
    if large.size != task.sites:
        raise DataError(
            f"{task.key}: column `{options.column}` has {large.size} groups with at least {options.min_rows} rows"
            f" (`partition.min-rows`); run with {large.size} sites"
        )
    labels = row_labels(column).iloc[first[large]]
    return Deal(tuple(np.flatnonzero(codes == group) for group in large), tuple(map(str, labels)))


def _sizes(task: _Task) -> list[Indices]:
    """Sizes rising linearly so that the largest site has ``partition.ratio`` times the rows of the smallest."""
    weights = np.linspace(1.0, task.config.partition.ratio, task.sites)
    ends = np.round(np.cumsum(weights) / weights.sum() * len(task.inputs)).astype(np.int64)
    return np.split(_shuffled(task), ends[:-1])


def standard_columns(inputs: pd.DataFrame) -> Array:
    """Pooled rows with every column, and an indicator of every level, at mean 0 and spread 1; constant ones at 0."""
    wide: Array = pd.get_dummies(inputs, dtype=float).to_numpy(dtype=np.float64)
    varies = wide.max(axis=0) > wide.min(axis=0)
    scale: Array = np.where(varies, wide.std(axis=0), 1.0)
    return np.where(varies, wide - wide.mean(axis=0), 0.0) / scale


def _kmeans(task: _Task) -> list[Indices]:
    """One cluster of the standardised inputs per site."""
    from sklearn.cluster import KMeans  # noqa: PLC0415 - slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer distinct rows than sites: an empty site, refused by the caller
        found = KMeans(task.sites, n_init=10, random_state=task.seed).fit_predict(standard_columns(task.inputs))
    return [np.flatnonzero(found == site) for site in range(task.sites)]


def _blocks(task: _Task) -> list[Indices]:
    """Equal contiguous blocks along the first principal component of the standardised inputs."""
    inputs = standard_columns(task.inputs)
    direction = np.linalg.svd(inputs.T @ inputs, hermitian=True)[0][:, 0]
    direction *= np.sign(direction[np.argmax(abs(direction))])
    return np.array_split(np.argsort(inputs @ direction, kind="stable"), task.sites)


PARTITIONERS: Mapping[str, Callable[[_Task], list[Indices]]] = {
    **dict.fromkeys(("iid", "linear", "square", "exponential"), _by_count),
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "sizes": _sizes,
    "kmeans": _kmeans,
    "blocks": _blocks,
}
