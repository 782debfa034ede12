"""Read the table of the key ``dataset``: typed rows, feature columns, target, standard splits."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fedgp_flower.agreement import Kind
from fedgp_flower.config import CoreConfig
from fedgp_flower.data import cells
from fedgp_flower.data.catalogue import BUILTINS, data_folder, names_in, splits_file
from fedgp_flower.data.dates import expand_dates, with_numbers
from fedgp_flower.data.holdout import keys_of
from fedgp_flower.data.tables import find_file, listed, read_table, require_columns, unknown
from fedgp_flower.errors import DataError
from fedgp_flower.lazy import datasets, pd
from fedgp_flower.options import CLASSIFICATION
from fedgp_flower.typing import Indices

OPENML = "openml/"
PARTS = ("train", "validation", "val", "test")
"""Values of a column ``split`` that assigns rows to training, validation and test."""


def choose_columns(
    config: CoreConfig, names: Sequence[str], file: str, default_target: str = "", excluded: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Return feature columns and target; ``excluded`` columns are neither unless the configuration names them."""
    if config.design is not None:
        require_columns(pd.DataFrame(columns=list(names)), [*config.design.inputs, *config.group_columns], file)
        return list(config.design.inputs), config.design.target
    usable = [name for name in names if name not in {*excluded, *config.default_exclusions}]
    target = config.outcome or default_target or ("y" if "y" in names else usable[-1] if usable else "")
    given = [name.strip() for name in config.features.split(",") if name.strip()]
    removed = [name.removeprefix("-") for name in given if name.startswith("-") and name not in names]
    chosen = [name for name in dict.fromkeys(given) if name in names or not name.startswith("-")]
    if wrong := [name for name in removed if name not in names]:
        raise DataError(f"{file}: `features` leaves out {unknown(wrong, names)}; it has {listed(names)}")
    features = chosen or [name for name in usable if name not in (target, *removed)]
    if named := [name for name in (target, config.second_target) if name in features]:
        raise DataError(f"`features` names the target `{named[0]}`; leave it out, or name another `target`")
    if not features:
        raise DataError(f"{file}: no feature column besides the target; name one in `features`; it has {listed(names)}")
    nameless = [name for number, name in enumerate(names, 1) if name == f"column {number}" and name in features]
    if nameless and not chosen:
        raise DataError(
            f"{file}: {', '.join(nameless)} has no name and may be a saved row index; name the columns in `features`"
        )
    return features, target


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A data set with checked cells; compared by identity, because caches use it as a key."""

    file: str
    """Name in messages."""
    frame: pd.DataFrame
    """Features and target: float64 for numbers, text for levels; labels count the rows of the file from 0."""
    features: tuple[str, ...]
    target: str
    column: pd.Series
    """Values of the partition column; of the target if the configuration names none."""
    splits: tuple[Indices, ...]
    """Test rows of each standard split; all others are training rows."""
    keys: pd.Series | None
    """Values of the column in `holdout`; None if rows are held out at random."""
    dropped: int
    """Number of rows dropped for a missing cell."""
    codes: Mapping[str, cells.Mask]
    """Cells that may be codes for missing values."""

    def rows(self, split: int) -> tuple[Indices, Indices]:
        """Return training and test rows of a standard split; for −1 all rows and no rows."""
        rows = np.arange(len(self.frame))
        return (rows, rows[:0]) if split < 0 else parts_of(len(rows), self.splits, split, self.file)


Splits: TypeAlias = tuple[Indices, ...]
_READ: dict[object, Table] = {}
"""Cache of the latest tables."""


def load_table(config: CoreConfig) -> Table:
    """Return the table of the key ``dataset``. It is cached until its files change."""
    path = None if config.dataset in BUILTINS else _locate(config.dataset, data_folder(config.data_dir))
    files = [] if path is None else [p for p in (path, splits_file(path)) if p.is_file()]
    key = (
        *(config.dataset, path, config.seed if path is None else 0),
        *(config.target, config.features, config.formula, config.partition.column, config.partitioner == "natural"),
        config.holdout,
        *(config.model.likelihood, config.missing, config.dates, config.transform.target),
        *((p.stat().st_mtime_ns, p.stat().st_size) for p in files),
    )
    if key not in _READ:
        for old in list(_READ)[:-1]:
            del _READ[old]
        _READ[key] = _load(config, path)
    return _READ[key]


def checked(
    raw: pd.DataFrame,
    features: Sequence[str],
    target: str,
    config: CoreConfig,
    file: str,
    kinds: Mapping[str, Kind] | None = None,
) -> pd.DataFrame:
    """Return typed features and target without rows that ``missing`` drops; ``kinds`` fixes kinds of features."""
    second = [config.second_target] if config.second_target else []
    require_columns(raw, [*features, target, *second], file)
    names = list(kinds) if kinds else expand_dates(raw, features, config.dates)
    numbered = with_numbers(raw, names, file).reset_index(drop=True)
    dated = cells.date_problems(raw, [name for name in names if name in raw], target) if kinds is None else {}
    read = [name for name in names if name not in dated]
    named_levels = [] if config.design is None else config.design.categories
    classes: dict[str, Kind] = dict.fromkeys(named_levels, "categorical")
    classes |= {target: "categorical"} if config.model.likelihood in CLASSIFICATION else {}
    classes |= dict.fromkeys(second, "numeric")
    found = [*read, *second] if target in dated else [*read, *second, target]
    frame, wrong = cells.cells_of(numbered, found, {**(kinds or {}), **classes}, config.missing)
    if dated or wrong:
        ids = cells.identifier_problems(frame, read) if kinds is None else []
        likelihood = config.model.likelihood
        about = [cells.second_target_problem(numbered, name, likelihood, config.missing) for name in second]
        raise DataError(f"{file}: {'. '.join(filter(None, [*dated.values(), wrong, *about, *ids]))}")
    frame = frame.dropna(subset=None if config.missing == "drop" else [target, *second])
    if frame.empty:
        remedy = "fill them, set `missing` to 'impute', or name other `features`"
        raise DataError(f"{file}: every row has a missing `{target}` or another missing cell; {remedy}")
    empty = [f"`{name}`" for name in names if frame[name].isna().all()]
    if empty:
        raise DataError(f"{file}: no cell of {', '.join(empty)} is filled; leave it out of `features`")
    cells.check_target(frame[target], config.model.likelihood, config.transform.target, file, config.order)
    if second:
        cells.check_second_target(frame[target], frame[config.second_target], config.model.likelihood, file)
    if config.design is not None:
        cells.check_formula(frame[names], config.design, file)
    if kinds is None and (problems := cells.identifier_problems(frame, names)):
        raise DataError(f"{file}: {'. '.join(problems)}")
    labels: dict[str, Kind] = dict.fromkeys(config.group_columns, "categorical")
    groups = cells.typed(raw.reset_index(drop=True).loc[frame.index], list(labels), file, labels)
    return frame.assign(**{str(name): groups[name] for name in groups})


def _load(config: CoreConfig, path: Path | None) -> Table:
    file, default_target, excluded = config.dataset if path is None else path.name, "", tuple[str, ...]()
    splits: Splits = ()
    builtin = BUILTINS.get(config.dataset)
    if builtin is not None and builtin.make is not None:
        raw, splits = builtin.make(config.seed)
        default_target, excluded = builtin.target, (builtin.natural,)
    elif path is None:
        raw, default_target = _from_openml(config.dataset)
    else:
        raw, splits, excluded = _from_file(path)
    features, target = choose_columns(config, [str(name) for name in raw.columns], file, default_target, excluded)
    by = config.partition.column or target
    require_columns(raw, [*features, target, by], file)
    frame = checked(raw, features, target, config, file)
    features = [str(name) for name in frame if name not in {target, config.second_target, *config.group_columns}]
    kept = frame.index.to_numpy()
    column = frame[by] if by in frame else cells.typed(raw.iloc[kept], [by], file)[by]
    splits = tuple(np.flatnonzero(np.isin(kept, test)) for test in splits)
    column = column.reset_index(drop=True)
    dropped, keys = len(raw) - len(frame), keys_of(raw.iloc[kept], config, file)
    return Table(file, frame, tuple(features), target, column, splits, keys, dropped, cells.codes_in(frame))


def _locate(name: str, folder: Path | None) -> Path | None:
    """Return the file of a data set; None for OpenML."""
    if name.startswith(OPENML):
        return None
    found = (find_file(folder / name) if folder is not None else None) or find_file(Path(name).expanduser().resolve())
    if found is None and Path(name).expanduser().is_dir():
        raise DataError(f"{name} is a folder, not a table; name the tables in it, such as {name}/*.csv")
    if found is None:
        tables = ", ".join(names_in(folder)) or "none"
        where = f"in {folder}" if folder is not None else "(set `data-dir` or the environment variable FEDGP_DATA)"
        raise DataError(
            f"`dataset` = '{name}' is not known. Built-ins: {', '.join(BUILTINS)}. Files {where}: {tables}."
            f" It may also be a path to a table or {OPENML}<name>"
        )
    return found


def _from_file(path: Path) -> tuple[pd.DataFrame, Splits, tuple[str, ...]]:
    """Return the table of a file, its standard splits, and columns that are neither input nor target."""
    frame = read_table(path)
    listing = splits_file(path)
    if listing.is_file():
        return frame, _read_splits(listing, len(frame)), ()
    excluded = split_columns(frame)
    test = np.flatnonzero(frame["split"].to_numpy() == "test") if excluded else np.arange(0)
    return frame, (test,) if 0 < len(test) < len(frame) else (), excluded


def parts_of(rows: int, splits: Splits, split: int, file: str) -> tuple[Indices, Indices]:
    """Return training and test rows of a standard split; raise DataError if there is none of this number."""
    if split >= len(splits):
        have = f"splits 0 to {len(splits) - 1}" if splits else "no standard splits"
        raise DataError(f"`split` = {split}: {file} has {have}; with -1 every site holds out some of its rows")
    return np.setdiff1d(np.arange(rows), splits[split]), splits[split]


def split_columns(frame: pd.DataFrame) -> tuple[str, ...]:
    """Return the column ``split`` if it assigns rows to training and test; it is neither input nor target."""
    return ("split",) if "split" in frame and frame["split"].isin(PARTS).all() else ()


def _read_splits(path: Path, rows: int) -> Splits:
    """Read the test rows of ``{"n": rows, "test": [[row, …], …]}``, counted from 0."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as text:
            content = json.load(text)
        splits = tuple(np.sort(np.array(test, dtype=np.int64)) for test in content["test"])
        stated = int(content["n"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        raise DataError(
            f'{path.name}: not a list of splits; expected gzipped JSON {{"n": …, "test": [[…], …]}}'
        ) from None
    if stated != rows:
        raise DataError(f"{path.name}: splits of {stated} rows, but the table has {rows}")
    for number, test in enumerate(splits):
        if test.size == 0 or test[0] < 0 or test[-1] >= rows or (np.diff(test) == 0).any():
            raise DataError(f"{path.name}: split {number} is empty, repeats a row or names a row beyond the table")
    return splits


def _from_openml(name: str) -> tuple[pd.DataFrame, str]:
    """Return the table of an OpenML data set and its target."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn warns that it takes the oldest active version
            bunch = datasets.fetch_openml(name=name.removeprefix(OPENML), as_frame=True, parser="auto")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"`dataset` = '{name}' could not be fetched from OpenML ({type(error).__name__}); check the network"
            " and the name"
        ) from None
    return bunch.frame.reset_index(drop=True), str((bunch.target_names or [""])[0])
