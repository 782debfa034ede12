"""A site's rows: part of a data set in a simulation, otherwise the site's table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.agreement import SiteDescription
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import Mask, codes_in, kind_of, suspicions
from fedgp_flower.data.datasets import Table, checked, choose_columns, load_table, parts_of, split_columns
from fedgp_flower.data.holdout import held_out_groups, keys_of, split_rows
from fedgp_flower.data.standardisation import Preparation, describe, encode_inputs, encode_targets
from fedgp_flower.data.synthetic import generator
from fedgp_flower.data.tables import held_out_file, read_table, table_stem, tables_in
from fedgp_flower.errors import DataError, first_of
from fedgp_flower.files import make_folder, write_bytes
from fedgp_flower.formula import SITE
from fedgp_flower.lazy import Lazy, pd
from fedgp_flower.options import Value
from fedgp_flower.typing import Array, Indices

if TYPE_CHECKING:
    from fedgp_flower.data import partitioning
else:
    partitioning = Lazy("fedgp_flower.data.partitioning")

DEFAULT_SITES = 5
"""Simulated sites where neither the data nor the user says how many."""
LOADED = "load_data"
"""Name, in errors, of rows that the user's function returned."""

Data: TypeAlias = (
    "tuple[NDArray[Any], NDArray[Any]]"
    " | tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]"
    " | tuple[pd.DataFrame, str]"
)

LINE = 180
"""Most letters of the names of excluded groups; a server keeps 300 of a note."""
_LOCK = Lock()
"""Held while a site loads and partitions: silencing a library's output is not thread-safe."""


class SiteData(NamedTuple):
    """A site's encoded rows; targets [N, 2] include the second target column."""

    x: Array  # [N, D]
    y: Array  # [N] or [N, 2]
    x_test: Array  # [N*, D]
    y_test: Array  # [N*] or [N*, 2]


@dataclass(frozen=True, slots=True)
class RawSite:
    """A site's checked rows in original units, with columns of features and target."""

    site: str
    """Id of the site for seeds, results and the order of updates."""
    label: str
    partitions: int
    """Number of simulated sites; 0 for a real one."""
    train: pd.DataFrame
    test: pd.DataFrame
    features: tuple[str, ...]
    target: str
    dropped: int = 0
    """Number of rows dropped for a missing cell. For a shared table, only the first site counts them."""
    left_out: str = ""
    """Groups that a simulation excludes or deals to several sites, a line each. Only the first site lists them."""
    suspected: Callable[[], str] = str
    """Search the rows for what to warn of, a line each; codes for missing cells in all of a shared table."""
    shared_table: bool = False
    """Whether the rows are part of a table that all sites share."""
    second_target: str = ""
    """Second target column, such as an exposure; empty without one."""
    _encoded: dict[bytes, SiteData] = field(default_factory=dict, repr=False, compare=False)
    """Cache of the latest encoding."""

    @property
    def simulated(self) -> bool:
        """Whether the site is simulated."""
        return self.partitions > 0

    @property
    def num_examples(self) -> int:
        """Number of training rows."""
        return len(self.train)

    def describe(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> SiteDescription:
        """Return sums and level counts of the training rows; with public ranges, the sums that these imply."""
        return describe(self.train, self.features, self.target, ranges)

    def encode(self, preparation: Preparation) -> SiteData:
        """Return the rows encoded and standardised by the agreed preparation."""
        key = preparation.fingerprint()
        if key not in self._encoded:
            both = (self.train, self.test)
            x, x_test = (encode_inputs(part, preparation) for part in both)
            if self.target != (agreed := preparation.target.name):
                raise DataError(f"the target is `{self.target}` here and `{agreed}` at the other sites")
            y, y_test = (encode_targets(part[self.target], preparation) for part in both)
            if self.second_target:
                pairs = zip((y, y_test), both, strict=True)
                y, y_test = (np.column_stack([values, part[self.second_target]]) for values, part in pairs)
            self._encoded.clear()
            self._encoded[key] = SiteData(x, y, x_test, y_test)
        return self._encoded[key]


def site_id(node_config: Mapping[str, Value]) -> str:
    """Return the id of this node: `site`, else the name of its data file, else its partition, else an empty string."""
    if node_config.get("site"):
        return str(node_config["site"])
    if "data-path" in node_config:
        return table_stem(Path(str(node_config["data-path"])))
    return str(node_config.get("partition-id", ""))


def load_site(config: CoreConfig, node_config: Mapping[str, Value], run: str = "") -> RawSite:
    """Load the rows of this node. Simulated sites check once per run whether the file has changed."""
    if "data-path" in node_config:
        node = {key: str(value) for key, value in node_config.items()}
        tables = _tables(Path(node["data-path"]), node.get("test-path", ""))
        return real_site(config, (site_id(node), node.get("label", ""), 0), tables)
    if "partition-id" in node_config and "num-partitions" in node_config:
        share = int(node_config["partition-id"]), int(node_config["num-partitions"])
        return _site_of_run(run, config, *share) if run else _simulated_site(config, *share)
    raise DataError(
        "the node configuration names no data: it needs `data-path` (a real site),"
        " or `partition-id` and `num-partitions` (a simulated one)"
    )


def load_all_sites(config: CoreConfig, num_partitions: int) -> list[RawSite]:
    """Load every simulated site, in order of the partition ids."""
    return [_simulated_site(config, site, num_partitions) for site in range(num_partitions)]


def count_sites(config: CoreConfig, requested: int = 0) -> int:
    """Return the number of simulated sites: tables in ``dataset``, else ``requested``, else natural groups, else 5."""
    if found := len(tables_in(config.dataset)) or requested:
        return found
    if config.partitioner != "natural":
        return DEFAULT_SITES
    table = load_table(config)
    train, _ = _rows(table, config)
    sizes = partitioning.row_labels(table.column).iloc[train].value_counts()
    return int((sizes >= max(config.partition.min_rows, 1)).sum())


def simulated_nodes(count: int) -> list[dict[str, Value]]:
    """Return the node configurations of ``count`` nodes in Flower's simulation."""
    return [{"partition-id": index, "num-partitions": count} for index in range(count)]


def write_partition(config: CoreConfig, num_sites: int, folder: Path) -> list[Path]:
    """Write every simulated site's training rows to ``site-00.csv`` and held-out rows to ``site-00.test.csv``."""
    width = max(2, len(str(num_sites - 1)))
    sites = load_all_sites(config, num_sites)
    paths = [folder / f"site-{number:0{width}d}.csv" for number in range(num_sites)]
    for path in paths:
        if path.exists() or path.with_suffix(".test.csv").exists():
            raise DataError(f"{folder}: {path.name} exists already; choose an empty folder")
    make_folder(folder)
    for site, path in zip(sites, paths, strict=True):
        write_bytes(path, site.train.to_csv(index=False).encode())
        if len(site.test):
            write_bytes(path.with_suffix(".test.csv"), site.test.to_csv(index=False).encode())
    return paths


def _tables(path: Path, test: str = "") -> list[tuple[str, pd.DataFrame]]:
    """Read a site's table and its held-out rows, if any, each with its name for errors."""
    held_out = Path(test) if test else held_out_file(path.expanduser())
    paths = [part.expanduser() for part in (path, held_out) if part]
    return [(part.name, read_table(part)) for part in paths]


def _simulated_site(config: CoreConfig, site: int, partitions: int) -> RawSite:
    if not 0 <= site < partitions:
        raise DataError(f"`partition-id` = {site} is not one of the {partitions} simulated sites")
    if paths := tables_in(config.dataset):
        if partitions != len(paths):
            wanted = f"run with {len(paths)} sites, `num-supernodes` of Flower's `--federation-config`"
            raise DataError(f"`dataset` names {len(paths)} tables, a site each; {wanted}")
        return real_site(config, (str(site), table_stem(paths[site]), partitions), _tables(paths[site]))
    with _LOCK:
        table = load_table(config)
        partition = _partition(table, config, partitions)
    train, test = _rows(table, config)
    rows = train[partition.rows[site]]
    if config.split >= 0 or config.holdout == "site":
        held_out = _test_rows_of(config, table, test, partition, site)
    else:
        keys = None if table.keys is None else table.keys.iloc[rows]
        rows, held_out = (rows[part] for part in split_rows(rows.size, keys, config, str(site)))
    if not rows.size:
        raise DataError(f"site {partition.labels[site]} of {table.file}: 0 training rows; at least 1 is needed")
    site_rows = np.concatenate([rows, held_out])
    codes = {name: mask for name, mask in table.codes.items() if mask[site_rows].any()}
    about_groups = [] if site else _left_out(table, config, partition) + _split_up(table, config, partition)
    return RawSite(
        *(str(site), partition.labels[site], partitions),
        *(table.frame.iloc[rows].reset_index(drop=True), table.frame.iloc[held_out].reset_index(drop=True)),
        features=table.features,
        target=table.target,
        dropped=table.dropped if site == 0 else 0,
        left_out="\n".join(about_groups),
        suspected=lambda: _suspected(table.frame.iloc[site_rows], len(held_out), table.target, codes, config),
        shared_table=True,
        second_target=config.second_target,
    )


def _suspected(rows: pd.DataFrame, held_out: int, target: str, codes: Mapping[str, Mask], config: CoreConfig) -> str:
    """Return warnings on a site's rows, a line each."""
    gaussian = config.model.likelihood == "gaussian" and config.transform.target == "none"
    column = config.holdout.partition(":")[2]
    tied = f"`holdout` = '{config.holdout}' holds out no row: too many have the same `{column}`"
    nothing = column and not held_out and round(config.test_fraction * len(rows)) > 0
    return "\n".join(filter(None, [tied if nothing else "", suspicions(rows, target, codes, gaussian)]))


def _rows(table: Table, config: CoreConfig) -> tuple[Indices, Indices]:
    """Return training rows and common test rows, of a standard split or of held-out sites."""
    if config.holdout != "site":
        return table.rows(config.split)
    test = held_out_groups(partitioning.row_labels(table.column), config)
    return np.setdiff1d(np.arange(len(table.frame)), test), test


def _test_rows_of(
    config: CoreConfig, table: Table, test: Indices, partition: partitioning.Partition, site: int
) -> Indices:
    """Return a site's part of the common test rows: the rows of its natural group, else an equal share."""
    if config.partitioner == "natural" and config.holdout != "site":
        return test[(partitioning.row_labels(table.column).iloc[test] == partition.labels[site]).to_numpy()]
    order = generator(config.seed, "test-rows").permutation(test.size)
    return np.sort(test[np.array_split(order, len(partition.rows))[site]])


def _left_out(table: Table, config: CoreConfig, partition: partitioning.Partition) -> list[str]:
    """Return lines about the natural groups that are excluded from training and scores."""
    if config.partitioner != "natural":
        return []
    groups = partitioning.row_labels(table.column).iloc[_rows(table, config)[1]]
    if config.holdout == "site":
        return [f"sites whose rows are all held out: {_shortened(sorted(set(map(str, groups))))}"]
    unseen = sorted(set(map(str, groups)) - {*partition.labels, *partition.left_out})
    excluded = {"fewer training rows than `partition.min-rows`": partition.left_out, "no training rows": unseen}
    return [
        f"groups that are left out and not scored, {len(names)} with {why}: {_shortened(names)}"
        for why, names in excluded.items()
        if names
    ]


def _shortened(names: Sequence[str]) -> str:
    """Return the first names of a list, as many as a line holds, and the number of others."""
    ends = itertools.accumulate(len(name) + 2 for name in names)
    return first_of(names, max(1, sum(end <= LINE for end in ends)))


def _split_up(table: Table, config: CoreConfig, partition: partitioning.Partition) -> list[str]:
    """Return lines about groups of random terms with rows at several simulated sites."""
    train, _ = _rows(table, config)
    frame, lines = table.frame.iloc[train], list[str]()
    site = np.repeat(np.arange(len(partition.rows)), [len(rows) for rows in partition.rows])
    for term in () if config.design is None else config.design.random:
        if {*term.group} & {*config.sites_named}:
            continue
        group = frame.groupby(list(term.group), sort=False, observed=True).ngroup().to_numpy()
        pairs = np.unique(np.column_stack([group[np.concatenate(partition.rows)], site]), axis=0)
        pairs = pairs[pairs[:, 0] >= 0]  # without rows of no group
        if several := int((np.unique(pairs[:, 0], return_counts=True)[1] > 1).sum()):
            lines.append(
                f"groups of `{term.called}` with rows at several sites count as other groups there: {several:,}"
            )
    return list(dict.fromkeys(lines))


@lru_cache(maxsize=1024)
def _site_of_run(_run: str, config: CoreConfig, site: int, partitions: int) -> RawSite:
    return _simulated_site(config, site, partitions)


def check_partition(config: CoreConfig, partitions: int) -> None:
    """Raise DataError if the data set cannot be partitioned, before any site loads it."""
    with _LOCK:
        _partition(load_table(config), config, partitions)


@lru_cache(maxsize=2)
def _partition(table: Table, config: CoreConfig, partitions: int) -> partitioning.Partition:
    """Partition the table; cached, because a process of a simulation serves many sites."""
    train, _ = _rows(table, config)
    terms = () if config.design is None else config.design.random
    factors = [[name for name in term.group if name not in config.sites_named] for term in terms]
    if any(factors) and config.partitioner == "iid":
        return partitioning.partition_groups(table.frame.iloc[train], list(filter(None, factors)), partitions, config)
    inputs = table.frame[list(table.features)].iloc[train].reset_index(drop=True)
    inputs = inputs.fillna(inputs.mean(numeric_only=True))  # for partitioners that use distances
    try:
        return partitioning.partition_rows(inputs, table.column.iloc[train].reset_index(drop=True), partitions, config)
    except DataError as error:
        raise DataError(f"{table.file}: {error}") from None


def site_of(config: CoreConfig, node_config: Mapping[str, Value], data: Data) -> RawSite:
    """Return a real site with the rows :data:`Data` of the user's loader. Raise DataError if they are malformed."""
    site = site_id(node_config)
    node = site, str(node_config.get("label", "")), 0
    if not site:
        raise DataError("the node configuration names no site: it needs `site` (or `partition-id`, in simulation)")
    several = isinstance(data, tuple | list)
    if not several or len(data) not in (2, 4):
        what = f"{len(data)} values" if several else type(data).__name__.removesuffix("Type")  # NoneType
        raise DataError(f"{LOADED} returned {what}; expected (X, y), (X, y, X_test, y_test) or (frame, target)")
    if len(data) == 2 and isinstance(data[0], pd.DataFrame):
        return real_site(config, node, [(LOADED, data[0])], str(data[1]))
    tables = []
    for x, y in zip(map(np.asarray, data[::2]), map(np.asarray, data[1::2]), strict=True):
        if x.ndim != 2 or y.shape != x.shape[:1]:
            raise DataError(f"{LOADED} returned arrays of shapes {x.shape}, {y.shape}; expected [N, D] and [N]")
        tables.append((LOADED, pd.DataFrame(x, columns=[f"x{column}" for column in range(x.shape[1])]).assign(y=y)))
    return real_site(config, node, tables, "y")


def real_site(
    config: CoreConfig, node: tuple[str, str, int], tables: Sequence[tuple[str, pd.DataFrame]], default_target: str = ""
) -> RawSite:
    """Return a site from tables with names for errors: the training rows, and held-out rows if there are two tables.

    ``node`` is its id, its label and the number of simulated sites.
    """
    site, label, partitions = node
    if config.holdout == "site":
        raise DataError("`holdout` = 'site' needs a single table; with one per site, leave out the held-out sites")
    if config.design is not None and SITE in config.design.inputs:  # the site as a fixed effect
        tables = [(name, table if SITE in table else table.assign(**{SITE: label or site})) for name, table in tables]
    file, raw = tables[0]
    columns = choose_columns(config, [str(name) for name in raw.columns], file, default_target, split_columns(raw))
    kept, target = checked(raw, *columns, config, file), columns[1]
    frame = kept.reset_index(drop=True)
    inputs = [str(name) for name in frame if name not in {target, config.second_target, *config.group_columns}]
    kinds = {name: kind_of(frame[name]) for name in inputs}
    tested = [checked(other, *columns, config, name, kinds) for name, other in tables[1:]]
    dropped = sum(len(table) for _, table in tables) - sum(map(len, [frame, *tested]))
    both = [frame, *(part.reset_index(drop=True) for part in tested)]
    if not tested:
        used, name = raw.iloc[kept.index], label if partitions else site
        if config.split < 0:
            parts = split_rows(len(frame), keys_of(used, config, file), config, name)
        else:
            splits = tuple(np.flatnonzero(used[column] == "test") for column in split_columns(raw))
            parts = parts_of(len(frame), splits, config.split, file)
        both = [frame.iloc[part].reset_index(drop=True) for part in parts]
    if not len(both[0]):
        raise DataError(f"{file}: 0 training rows; at least 1 is needed")

    def suspected() -> str:
        rows = pd.concat([kept, *tested])
        return _suspected(rows, len(both[1]), target, codes_in(rows), config)

    node, features = (site, label or site, partitions), tuple(inputs)
    second = config.second_target
    return RawSite(*node, both[0], both[1], features, target, dropped, suspected=suspected, second_target=second)
