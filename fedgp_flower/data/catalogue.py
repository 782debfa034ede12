"""Named data sets: built-ins, and tables in the data folder."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fedgp_flower.data.synthetic import Made, convolved_signals, five_blocks, plane_wave, sine
from fedgp_flower.data.tables import SUFFIXES, header_of, table_stem
from fedgp_flower.lazy import datasets, pd


@dataclass(frozen=True, slots=True)
class Entry:
    """A named data set, a line of ``fedgp datasets``; a built-in needs neither files nor the network."""

    name: str
    summary: str
    rows: int
    inputs: int
    """Number of columns besides the target and the natural column."""
    splits: int = 0
    """Number of standard splits."""
    natural: str = ""
    """Column with the site of each row; an input only if ``features`` names it."""
    target: str = ""
    make: Callable[[int], Made] | None = None
    """For a built-in: function from the seed of the run to the table and its splits."""
    source: str = "built-in"
    """``built-in`` or the file."""


def _diabetes(_seed: int) -> Made:
    return datasets.load_diabetes(as_frame=True, scaled=False).frame, ()


def _breast_cancer(_seed: int) -> Made:
    bunch = datasets.load_breast_cancer(as_frame=True)
    diagnosis = [str(name) for name in bunch.target_names[bunch.target]]
    return bunch.frame.drop(columns="target").assign(diagnosis=diagnosis), ()


def _fuel_economy(_seed: int) -> Made:
    described = json.loads((files(__package__) / "fuel_economy.json").read_text(encoding="utf-8"))
    return pd.DataFrame(described["columns"]), ()


_BENIGN = "Benign or malignant, from cell images; needs model.likelihood = 'bernoulli'"
_CARS = "Miles per gallon of 458 cars by 14 makers, model year 2021 (U.S. EPA, public domain)"
_BUILTINS = (
    Entry("diabetes", "Disease progression of 442 patients after a year", 442, 10, target="target", make=_diabetes),
    Entry("breast-cancer", _BENIGN, 569, 30, target="diagnosis", make=_breast_cancer),
    Entry("fuel-economy", _CARS, 458, 8, 0, "maker", "mpg", _fuel_economy),
    Entry("sine", "3 sin(2πx/20) + noise, x on a line", 800, 1, 1, "", "y", sine),
    Entry("plane-wave", "2.5 sin(2π(x1 + x2)/90) + noise, x on a square", 5800, 2, 1, "", "y", plane_wave),
    Entry("five-blocks", "One GP draw seen by five sites on blocks of x", 300, 1, 1, "site", "y", five_blocks),
    Entry("convolved-signals", "Five units see a curve through windows", 1000, 1, 1, "unit", "y", convolved_signals),
)
BUILTINS = {entry.name: entry for entry in _BUILTINS}


def data_folder(data_dir: str) -> Path | None:
    """Return the folder of data sets: ``data-dir``, else the environment variable ``FEDGP_DATA``, else None."""
    chosen = data_dir or os.environ.get("FEDGP_DATA", "")
    return Path(chosen).expanduser().resolve() if chosen else None


def names_in(folder: Path | None) -> dict[str, Path]:
    """Return the tables in a folder and its subfolders, by their name for ``dataset``."""
    if folder is None or not folder.is_dir():
        return {}
    files = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    tables = [path for path in files if path.is_file() and path.name.endswith(SUFFIXES)]
    return {(path.parent / table_stem(path)).relative_to(folder).as_posix(): path for path in tables}


def splits_file(table: Path) -> Path:
    """Return the file with the standard splits of a table."""
    return table.with_name(f"{table_stem(table)}.splits.json.gz")


def catalogue(data_dir: str = "") -> list[Entry]:
    """Return all named data sets: built-ins, then the tables of the data folder."""
    return [*_BUILTINS, *(_file_entry(name, path) for name, path in names_in(data_folder(data_dir)).items())]


def _file_entry(name: str, path: Path) -> Entry:
    """Return the entry of a file, or one without figures if it is damaged."""
    try:
        rows, columns = _size(path)
        splits, listing = 0, splits_file(path)
        if listing.is_file():
            with gzip.open(listing, "rt", encoding="utf-8") as text:
                splits = len(json.load(text)["test"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        return Entry(name, f"{path.name} cannot be read ({type(error).__name__})", 0, 0)
    return Entry(name, "", rows, columns - 1, splits=splits, source=path.name)


def _size(path: Path) -> tuple[int, int]:
    """Return numbers of rows and columns; rows of a CSV are counted as lines, which is fast."""
    if path.name.endswith(".parquet"):
        import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415  only for such files

        facts = pq.ParquetFile(path).metadata
        return facts.num_rows, facts.num_columns
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as lines:
        return sum(1 for line in lines if line.strip()) - 1, len(header_of(path)[1])
