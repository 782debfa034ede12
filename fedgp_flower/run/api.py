"""Run a method from Python, and read finished runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from fedgp_flower.config import whole_number
from fedgp_flower.data.cells import cells_of
from fedgp_flower.errors import ConfigError, DataError, FedGPError
from fedgp_flower.files import make_folder, write_bytes
from fedgp_flower.options import Value
from fedgp_flower.outcome import Progress, round_of
from fedgp_flower.run import notebook
from fedgp_flower.run.artefacts import Run, read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import complete_config

Data: TypeAlias = pd.DataFrame | Mapping[str, pd.DataFrame] | str | Path
"""A table, a table per site, or the path or name of a data set."""


def load_run(path: str | Path) -> Run:
    """Read a finished run from its folder."""
    return read_run(Path(path))


def run(
    data: Data,
    *,
    method: str | None = None,
    target: str = "",
    site: str = "",
    sites: int = 0,
    num_rounds: int | None = None,
    options: Mapping[str, Value] | None = None,
    on_round: Progress | None = None,
) -> Run:
    """Run a method over simulated sites in this process.

    Args:
        data: A table, a table per site, or a value of ``dataset``; tables are saved below ``output-dir``.
        method: One of ``fedgp methods``.
        target: Column to predict; default as for ``target`` of the configuration.
        site: Column that names the site of a row; without it rows are assigned to ``sites`` at random.
        sites: Number of sites, unless ``site`` or a table per site determines it; 0: every natural group, otherwise 5.
        num_rounds: Largest number of rounds.
        options: Further keys of the run configuration, such as ``{"model.num-inducing": 100, "name": "first"}``.
        on_round: Called after every round with its row of the history and the largest number of rounds; without it a
            notebook shows a bar.

    Returns:
        The run: ``metrics``, ``history``, ``posterior``, ``report_path``.

    Raises:
        ConfigError: If keys are wrong, before training.
        DataError: If a table cannot be used.
        RunError: If the run cannot be completed.

    Example::

        run = fg.run(table, target="days", site="hospital")
        run.posterior.predict(new_patients)
    """
    given = {"method": method, "num-server-rounds": num_rounds, "target": target or None}
    flat = dict(options or {}) | {key: value for key, value in given.items() if value is not None}
    sites, paths = whole_number("sites", sites, 0), list[Path]()
    if isinstance(data, Mapping):
        if site:
            raise ConfigError("tables of sites are a site each: leave `site` out, or give one table with that column")
        if not data:
            raise DataError("`data` holds no table; expected one for each site")
        paths = [_save_table(table, flat, re.sub(r"[/\\,]", "-", str(name))) for name, table in data.items()]
        flat["dataset"], sites = ",".join(str(path.resolve()) for path in paths), len(paths)
    elif isinstance(data, str | Path):
        flat["dataset"] = str(data)
    else:
        paths = [_save_table(data, flat)]
        flat["dataset"] = str(paths[0])
    if site:
        flat |= {"partitioner": "natural", "partition.column": site}
    try:
        with notebook.progress_bar() if on_round is None else nullcontext(on_round) as progress:
            return load_run(run_in_process(complete_config(flat), 0 if site else sites, progress=progress))
    except FedGPError as error:
        error.args = (_of_tables(str(error), paths),)
        raise


def print_round(row: Mapping[str, float], total: int) -> None:
    """Print a round on a line that the next round overwrites; for ``on_round``."""
    print(f"\r{round_of(row, total):<120}", end="", flush=True)


def _of_tables(message: str, files: Sequence[Path]) -> str:
    """Return a message that names tables in place of the files in which they were saved."""
    for file in files:
        name = "the table" if len(files) == 1 else file.stem
        message = message.replace(str(file.resolve()), name).replace(str(file), name).replace(file.name, name)
    return message


def _save_table(table: pd.DataFrame, flat: Mapping[str, Value], name: str = "table") -> Path:
    """Save the table in a folder named after its hash, for resuming and for predictions at a site."""
    if not isinstance(table, pd.DataFrame):
        found = type(table).__name__
        raise DataError(f"{name}: expected a DataFrame, one for each site, or a value of `dataset`; got {found}")
    table = table.rename(columns=str)
    if not table.columns.is_unique:
        twice = ", ".join(f"`{column}`" for column in table.columns[table.columns.duplicated()].unique())
        raise DataError(f"{name}: column names must differ; named more than once: {twice}")
    try:
        # A column of a file cannot mix numbers and text.
        text = {column: "str" for column in table if getattr(table[column].dtype, "kind", "O") == "O"}
        frame, named = table.astype(text), [*table.select_dtypes("category")]
        frame[named] = cells_of(table, named, {}, "")[0].astype("category")  # numbers as names stay categories
        content = frame.to_parquet(index=False)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise DataError(f"{name}: expected columns of numbers, text or dates; {error}") from None
    folder = Path(str(flat.get("output-dir", "results"))) / "data" / hashlib.sha256(content).hexdigest()[:12]
    make_folder(folder)
    path = folder / f"{name}.parquet"
    if not path.exists():
        write_bytes(path, content)
    return path
