"""Runs from Python: a table in, a finished run out; and finished runs read back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.run.artefacts import RunData, RunMetrics, read_run
from fedgp_flower.run.files import write_bytes
from fedgp_flower.run.in_process import run_in_process, silent
from fedgp_flower.run.predict import Predictor, why_no_posterior
from fedgp_flower.run.user_config import complete_config
from fedgp_flower.server_app import Progress, figures_of

Data: TypeAlias = pd.DataFrame | Mapping[str, pd.DataFrame] | str | Path
"""One table, a table per site, or the path or name of a data set."""


@dataclass(frozen=True)
class Run:
    """A finished run and what it left behind."""

    files: RunData

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.files.path

    @property
    def metrics(self) -> RunMetrics:
        """Figures over held-out rows, costs and failures: ``metrics.json``."""
        return self.files.metrics

    @property
    def config(self) -> FlatConfig:
        """Every key with its value."""
        return self.files.config

    @property
    def history(self) -> pd.DataFrame:
        """A row per round."""
        return self.files.history

    @property
    def report_path(self) -> Path:
        """The page for people."""
        return self.files.path / "report.html"

    @property
    def why_no_posterior(self) -> str:
        """Why :attr:`posterior` is None; empty where it is not."""
        return why_no_posterior(self.files)

    @cached_property
    def posterior(self) -> Predictor | None:
        """What predicts new rows without any site; None for methods that save nothing that does."""
        return None if self.why_no_posterior else Predictor.of(self.files)


def load_run(path: str | Path) -> Run:
    """Read a finished run from its folder.

    Raises:
        RunError: naming the folder or file that is missing or unreadable.
    """
    return Run(read_run(Path(path)))


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
        RunError: when the run cannot be completed.
    """
    given: dict[str, Any] = {"method": method, "num-server-rounds": num_rounds, "target": target or None}
    flat = dict(options or {}) | {key: value for key, value in given.items() if value is not None}
    if isinstance(data, Mapping):
        data, site = _joined(data, site or "site"), site or "site"
    if site:
        flat |= {"partitioner": "natural", "partition.column": site}
    flat["dataset"] = str(_kept(data, flat)) if isinstance(data, pd.DataFrame) else str(data)
    return load_run(run_in_process(complete_config(flat, Path.cwd()), 0 if site else sites, progress=on_round))


def print_round(row: Mapping[str, float], total: int) -> None:
    """An observer for ``on_round``: one line that is written over, in a terminal and in a notebook."""
    print(f"\rround {row['round']:.0f} of at most {total}  {figures_of(row)}", end="", flush=True)


def _joined(tables: Mapping[str, pd.DataFrame], column: str) -> pd.DataFrame:
    """The tables of all sites as one, with the column that names the site of a row."""
    if taken := [name for name, table in tables.items() if column in table]:
        raise ConfigError(f"the tables of {', '.join(taken)} have a column {column!r}: name another with `site`")
    return pd.concat([table.assign(**{column: str(name)}) for name, table in tables.items()], ignore_index=True)


def _kept(table: pd.DataFrame, flat: Mapping[str, Value]) -> Path:
    """A file of the table, named after its content: a resumed run and a prediction at a site read it again."""
    folder = Path(str(flat.get("output-dir", "results"))) / "data"
    folder.mkdir(parents=True, exist_ok=True)
    content = table.to_parquet(index=False)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:12]}.parquet"
    if not path.exists():
        write_bytes(path, content)
    return path
