"""Runs from Python: a table in, a finished run out; and finished runs read back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from fedgp_flower.data.datasets import load_table
from fedgp_flower.data.sites import real_site
from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.files import write_bytes
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.outcome import Progress, figures_of, silent
from fedgp_flower.run.artefacts import Run, read_run
from fedgp_flower.run.check import agreed
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.user_config import complete_config

Data: TypeAlias = pd.DataFrame | Mapping[str, pd.DataFrame] | str | Path
"""One table, a table per site, or the path or name of a data set."""


def load_run(path: str | Path) -> Run:
    """Read a finished run from its folder."""
    return read_run(Path(path))


def run(
    data: Data,
    *,
    method: str | None = None,
    target: str = "",
    site: str = "",
    sites: int = 5,
    num_rounds: int | None = None,
    options: Mapping[str, Value] | None = None,
    on_round: Progress = silent,
) -> Run:
    """Run a method over simulated sites in this process.

    Args:
        data: A table, a table per site, or what ``dataset`` takes; tables are kept below ``output-dir``.
        method: One of ``fedgp methods``.
        target: Column to predict; default as for ``target`` of the configuration.
        site: Column that names the site of a row; without it rows are dealt to ``sites`` at random.
        sites: Number of sites, where neither ``site`` nor a table per site says.
        num_rounds: Most rounds.
        options: Further keys of the run configuration, such as ``{"model.num-inducing": 100, "name": "first"}``.
        on_round: Called after every round with its row of the history and the number of rounds; :func:`print_round`
            prints one.

    Raises:
        ConfigError: naming every wrong key, before anything is trained.
        DataError: naming what cannot be used, where tables are a site each by its site.
        RunError: when the run cannot be completed.
    """
    given = {"method": method, "num-server-rounds": num_rounds, "target": target or None}
    flat = dict(options or {}) | {key: value for key, value in given.items() if value is not None}
    if isinstance(data, Mapping):
        flat |= together(data, flat, site or "site")
        return load_run(run_in_process(complete_config(flat, Path.cwd()), progress=on_round))
    if site:
        flat |= {"partitioner": "natural", "partition.column": site}
    flat["dataset"] = str(_kept(data, flat)) if isinstance(data, pd.DataFrame) else str(data)
    return load_run(run_in_process(complete_config(flat, Path.cwd()), 0 if site else sites, progress=on_round))


def together(tables: Mapping[str, pd.DataFrame], flat: FlatConfig, site: str = "site") -> dict[str, Value]:
    """The keys that make one data set of tables, each of them a site; ``site`` is the column that says which."""
    if taken := [name for name, table in tables.items() if site in table]:
        raise ConfigError(f"the tables of {', '.join(taken)} have a column {site!r}: name another with `site`")
    joined = pd.concat([table.assign(**{site: str(name)}) for name, table in tables.items()], ignore_index=True)
    # Numbers at one site and text at another, as decimal commas are, can be no column of a file.
    joined = joined.astype({name: "str" for name in joined if joined[name].dtype == object})
    name = "-".join(map(str, tables)) if len(tables) < 5 else f"{len(tables)}-sites"
    path = _kept(joined, flat, re.sub(r"[^\w-]", "", name)[:60] or "sites").resolve()
    keys: dict[str, Value] = {"dataset": str(path), "partitioner": "natural", "partition.column": site}
    config = parse_config({**flat, **keys})
    try:
        load_table(config)
    except DataError:
        sites = {name: partial(real_site, config, name, name, [(name, table)]) for name, table in tables.items()}
        if problems := agreed(sites, config).problems:
            raise DataError("\n".join(problems)) from None
        raise
    return keys


def print_round(row: Mapping[str, float], total: int) -> None:
    """An observer for ``on_round``: one line that is written over, in a terminal and in a notebook."""
    print(f"\rround {row['round']:.0f} of at most {total}  {figures_of(row)}", end="", flush=True)


def _kept(table: pd.DataFrame, flat: Mapping[str, Value], name: str = "table") -> Path:
    """A file of the table, in a folder named after its content: resuming and predicting at a site read it again."""
    content = table.to_parquet(index=False)
    folder = Path(str(flat.get("output-dir", "results"))) / "data" / hashlib.sha256(content).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    if not path.exists():
        write_bytes(path, content)
    return path
