"""Read a CSV or Parquet file. Errors quote no cell, because a site's errors are sent to the server."""

from __future__ import annotations

import csv
import gzip
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from fedgp_flower.errors import DataError, first_of, similar
from fedgp_flower.lazy import pd
from fedgp_flower.options import FIRST, SECOND_COLUMN

SUFFIXES = (".csv", ".csv.gz", ".parquet")
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "<NA>")
"""Spellings of a missing cell. A question mark is an ordinary level of a text column."""
OTHER = "other"
"""Level that replaces levels of text with too few rows."""
PADDED = r"\s*0\d+\s*"
"""A cell with a leading zero, such as the id ``01``: its column is text."""
HELD_OUT = ".test"
"""End of the stem of a file with the held-out rows of another file."""
MOST_LISTED = 20
SEPARATORS = (",", ";", "\t", "|")
"""Possible separators of cells."""


def table_stem(path: Path) -> str:
    """Return the file's name without ``.csv``, ``.csv.gz`` or ``.parquet``."""
    suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix) and path.name != suffix), path.suffix)
    return path.name.removesuffix(suffix)


def tables_in(dataset: str) -> list[Path]:
    """Return the tables in ``dataset``, a site each; none if it is a single data set."""
    names = [name.strip() for name in dataset.split(",") if name.strip()]
    if len(names) < 2 or Path(dataset).expanduser().is_file():
        return []
    paths = [Path(name).expanduser() for name in names]
    if twice := [stem for stem, count in Counter(map(table_stem, paths)).items() if count > 1]:
        raise DataError(f"every table is a site with the name of its file: more than one is named `{twice[0]}`")
    return paths


def find_file(stem: Path) -> Path | None:
    """Return the table at a path, as it is or with one of the known endings, or None."""
    candidates = (stem.with_name(f"{stem.name}{suffix}") for suffix in ("", *SUFFIXES))
    return next((path for path in candidates if path.name.endswith(SUFFIXES) and path.is_file()), None)


def held_out_file(path: Path) -> Path | None:
    """Return the file with a site's held-out rows: ``NAME.test.csv`` beside ``NAME.csv``, in any format, or None."""
    return find_file(path.with_name(f"{table_stem(path)}{HELD_OUT}"))


def sites_of(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the tables that are a site each, and messages on files ``NAME.test.csv`` with held-out rows."""
    stems = {(path.parent, table_stem(path)): path.name for path in paths}
    tests = [path for path in paths if table_stem(path).endswith(HELD_OUT)]
    owners = {path: stems.get((path.parent, table_stem(path).removesuffix(HELD_OUT))) for path in tests}
    held_out = {path: name for path, name in owners.items() if name}
    messages = [f"{path.name}: the held-out rows of {name}, not a site" for path, name in held_out.items()]
    return [path for path in paths if path not in held_out], messages


def read_table(path: Path, *, as_written: bool = False) -> pd.DataFrame:
    """Read a table; missing cells are NaN. ``as_written`` keeps all cells of a CSV as text."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a table; name the tables in it, such as {path}/*.csv")
    if not path.is_file():
        raise DataError(f"{path}: no such file; check `data-path`, `test-path` or `dataset`")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path.name}: unknown file type; expected one of {', '.join(SUFFIXES)}")
    try:
        if path.name.endswith(".parquet"):
            frame = pd.read_parquet(path).reset_index(drop=True)
            frame.columns = pd.Index(_checked_header([str(name) for name in frame.columns], path.name))
        else:
            frame = _read_csv(path, as_written)
    except UnicodeDecodeError:
        raise DataError(f"{path.name}: not UTF-8 text; save the file as CSV in UTF-8") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path.name}: cannot be read ({type(error).__name__}); is the file complete?") from None
    if frame.empty:
        raise DataError(f"{path.name}: no data rows below the header")
    return frame


def _read_csv(path: Path, as_written: bool) -> pd.DataFrame:
    def read(kind: type[str] | None = None, columns: list[str] | None = None) -> pd.DataFrame:
        return pd.read_csv(
            path,
            sep=separator,
            header=0,
            names=names,
            index_col=False,
            usecols=columns,
            keep_default_na=False,
            na_values=[] if as_written else list(MISSING),
            dtype=kind,
            low_memory=False,
            encoding="utf-8-sig",
        )

    try:
        separator, header = header_of(path)
        names = _checked_header(header, path.name)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            if as_written:
                return read(str)
            frame = read()
            whole = [str(name) for name in frame.select_dtypes("number") if not (frame[name] % 1).any()]
            text = read(str, whole)
            padded = [name for name in whole if text[name].str.fullmatch(PADDED, na=False).any()]
            return frame.assign(**text[padded])
    except pd.errors.EmptyDataError:
        raise DataError(f"{path.name}: the file is empty; expected a header line and data rows") from None
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path.name}: rows have more cells than the header; is a column name missing, or a line above the header?"
        ) from None
    except pd.errors.ParserError as error:
        if "EOF inside string" in str(error):
            raise DataError(f"{path.name}: a quotation mark is not closed") from None
        line = re.search(r"line (\d+)", str(error))
        row = f"data row {int(line.group(1)) - 1}" if line else "a row"
        raise DataError(f"{path.name}: {row} has more cells than the header; is a comma unquoted?") from None


def header_of(path: Path) -> tuple[str, list[str]]:
    """Return the separator of a CSV that finds the most names in its header, the first on a tie, and these names."""
    headers = {mark: _header(path, mark) for mark in SEPARATORS}
    return max(headers.items(), key=lambda found: len(found[1]))


def _header(path: Path, separator: str) -> list[str]:
    """Return the cells of the first non-blank line."""
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(cast(Iterable[str], file), delimiter=separator)
        try:
            return next(cells for cells in lines if len(cells) > 1 or "".join(cells).strip())
        except StopIteration:
            raise pd.errors.EmptyDataError from None
        except csv.Error as error:
            raise ValueError(str(error)) from None


def _checked_header(names: Sequence[str], file: str) -> list[str]:
    """Return stripped names; an unnamed column is called ``column 3``. Raise DataError if the header is invalid."""
    stripped = [name.strip() or f"column {position}" for position, name in enumerate(names, start=1)]
    if all(_is_number(name) for name in stripped):
        raise DataError(f"{file}: all names of columns are numbers; is the header line missing?")
    twice = sorted({name for name in stripped if stripped.count(name) > 1})
    if twice:
        raise DataError(f"{file}: column names must differ; named more than once: {listed(twice)}")
    return stripped


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def listed(names: Sequence[str]) -> str:
    """Return column names for a message; if one is a number, none is shown, because the line may be data."""
    if any(_is_number(name) for name in names):
        return f"{len(names)} names, not shown because some are numbers; is the first line a header?"
    return first_of([f"`{name}`" for name in names], MOST_LISTED)


def unknown(names: Sequence[str], known: Sequence[str]) -> str:
    """Return unknown columns with similar known ones; without these if the name of a column is a number."""
    shown = () if any(_is_number(name) for name in known) else known
    return ", ".join(f"`{name}` ({question})" if (question := similar(name, shown)) else f"`{name}`" for name in names)


def require_columns(frame: pd.DataFrame, names: Sequence[str], file: str) -> None:
    """Raise DataError with the missing and the present columns if a column is missing."""
    present = [str(name) for name in frame.columns]
    if twice := [name for name in dict.fromkeys(names) if present.count(name) > 1]:
        raise DataError(f"{file}: column names must differ; named more than once: {listed(twice)}")
    missing = [name for name in dict.fromkeys(names) if name not in present]
    if missing:
        alone = len(present) == 1 and ".csv" in file
        hint = f"; cells are separated by one of {' '.join(map(repr, SEPARATORS))}" if alone else ""
        if any("," in name and {part.strip() for part in name.split(",")} <= {*present} for name in missing):
            taking = {
                second: [repr(name) for name in SECOND_COLUMN if SECOND_COLUMN[name] == second] for second in FIRST
            }
            kinds = [f"{' or '.join(names)} ({FIRST[second]}, {second})" for second, names in taking.items()]
            hint = f"; a run has one `target`, or two columns if `model.likelihood` is {', '.join(kinds)}"
        raise DataError(f"{file}: missing column {unknown(missing, present)}; it has {listed(present)}{hint}")
