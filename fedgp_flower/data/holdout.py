"""Choose a site's held-out rows: at random, whole groups or the latest; reproducible on every machine."""

from __future__ import annotations

import numpy as np

from fedgp_flower.agreement import Kind
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import typed
from fedgp_flower.data.dates import dates_in, with_numbers
from fedgp_flower.data.synthetic import derived_seed, generator
from fedgp_flower.data.tables import require_columns
from fedgp_flower.lazy import pd
from fedgp_flower.typing import Indices


def keys_of(raw: pd.DataFrame, config: CoreConfig, file: str) -> pd.Series | None:
    """Return the group or numeric time of every row for ``holdout``; None without a column."""
    way, _, name = config.holdout.partition(":")
    if not name:
        return None
    require_columns(raw, [name], file)
    kind: Kind = "categorical" if way == "group" else "numeric"
    read = f"days({name})" if kind == "numeric" and dates_in(raw[name]) is not None else name
    return typed(with_numbers(raw, [read], file), [read], file, {read: kind})[read]


def held_out_groups(column: pd.Series, config: CoreConfig) -> Indices:
    """Return the rows of the natural groups that ``holdout`` = site holds out, chosen by a hash; two or more remain."""
    labels = sorted(column.unique(), key=lambda label: (derived_seed(config.seed, "held-out", label), label))
    count = min(max(1, round(config.test_fraction * len(labels))), len(labels) - 2)
    return np.flatnonzero(column.isin(labels[: max(count, 0)]))


def split_rows(rows: int, keys: pd.Series | None, config: CoreConfig, site: str) -> tuple[Indices, Indices]:
    """Return positions of a site's training rows and of its held-out rows.

    Groups are ordered by a hash of seed and group, so a group is held out at all its sites or at none. With times, the
    held-out rows are later than every training row.
    """
    share, out = config.test_fraction, np.zeros(rows, dtype=bool)
    count = min(round(share * rows), rows - 1)
    if config.holdout == "random" or keys is None or count <= 0:
        out[generator(config.seed, "held-out", site).permutation(rows)[: round(share * rows)]] = True
    elif config.holdout.startswith("time:"):
        times = keys.to_numpy()
        out = times > np.sort(times)[rows - count - 1]
    else:
        groups = sorted(keys.unique(), key=lambda group: (derived_seed(config.seed, "held-out", group), group))
        out = keys.isin(groups[: min(max(1, round(share * len(groups))), len(groups) - 1)]).to_numpy()
    return np.flatnonzero(~out), np.flatnonzero(out)
