"""Decide what kind a column is, and refuse cells a model cannot use, by file, column and row.

A column is numeric when at least half of its filled cells are numbers; its other cells are then errors. Any other
column is categorical and its cells are levels. A decimal comma is read as a point. Rows are counted from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.agreement import Kind
from fedgp_flower.data.dates import dates_in
from fedgp_flower.data.tables import MISSING
from fedgp_flower.errors import DataError
from fedgp_flower.lazy import pd
from fedgp_flower.options import BESIDE, CLASSES, MOST_CLASSES
from fedgp_flower.transforms import TRANSFORMS, Transform

COMMA = r"[+-]?(?:\d+|\d{1,3}(?:\.\d{3})+),\d+"
THOUSANDS = r"[+-]?[1-9]\d{0,2}(?:,\d{3})"
"""A number with a decimal comma, and one whose comma may as well stand for thousands."""
AMOUNT = r"\W?\s*[+-]?\d[\d.,]*\s*\D{0,10}"
"""A number with a sign or a unit, such as ``€ 3.50`` or ``7 mg``."""
LARGEST = 1e100
"""Its square is still a number, as a sum of squares needs."""
OTHERS = 5
"""Fewer other numbers than this do not tell that one is far from them."""
Mask: TypeAlias = NDArray[np.bool_]

COUNTS = ("poisson", "negative-binomial", "binomial")
"""Likelihoods of targets 0, 1, 2, …"""
WHOLE, MOST_GRADES = r"-?\d+", 30
"""How a grade that is a number is written, and how many grades are told apart."""
UNIQUE = 0.9
"""Share of rows with a number that no other row has, from which on whole rows do not repeat by chance."""
LEAST_SKEWED = 30
"""Rows below which a skewness says little."""
EMPTY = "empty or NaN cell"
LEFT_OUT = "leave it out (`features` = '-{}')"
"""How to train without a column."""
ROWS_PER_LEVEL = 3
"""Fewer rows than this for a level on average: the levels name rows, as identifiers do."""


def kind_of(column: pd.Series) -> Kind:
    """The kind of a column that :func:`typed` returned."""
    return "numeric" if column.dtype == np.float64 else "categorical"


def typed(
    frame: pd.DataFrame,
    names: Sequence[str],
    file: str,
    kinds: Mapping[str, Kind] | None = None,
    missing: str = "error",
) -> pd.DataFrame:
    """The named columns as float64 (numeric) or text (categorical), every cell usable or missing."""
    found, problems = cells_of(frame, names, kinds or {}, missing)
    if problems:
        raise DataError(f"{file}: {problems}")
    return found


def cells_of(
    frame: pd.DataFrame, names: Sequence[str], kinds: Mapping[str, Kind], missing: str
) -> tuple[pd.DataFrame, str]:
    """What :func:`typed` returns, and in words what is wrong with it."""
    columns: dict[str, pd.Series] = {}
    problems: list[str] = []
    for name in names:
        columns[name], found = _typed_column(frame[name], kinds.get(name))
        problems += [f"column `{name}`: {words}" for words in found if missing == "error" or EMPTY not in words]
    empty = any(EMPTY in problem for problem in problems)
    remedy = ". Fill the cells, or set `missing` to 'drop', 'impute' or 'indicator'" if empty else ""
    words = f"{'; '.join(problems[:10])}{_more(len(problems) - 10, 'problem')}{remedy}"
    return pd.DataFrame(columns, index=frame.index), words


def _more(count: int, what: str) -> str:
    return f" and {count} more {what}{'s' if count > 1 else ''}" if count > 0 else ""


def _at(mask: Mask) -> str:
    """``in row 3 and 2 more rows`` for the rows a mask marks."""
    return f"in row {int(np.argmax(mask)) + 1}{_more(int(mask.sum()) - 1, 'row')}"


def _typed_column(column: pd.Series, kind: Kind | None) -> tuple[pd.Series, list[str]]:
    """A column as numbers or as text, and what is wrong with its cells."""
    is_bool = pd.api.types.is_bool_dtype(column.dtype)
    if pd.api.types.is_complex_dtype(column.dtype):
        return column, ["complex numbers; expected real numbers or text"]
    if pd.api.types.is_datetime64_any_dtype(column.dtype) or pd.api.types.is_timedelta64_dtype(column.dtype):
        return column, ["dates or durations; expected numbers or text, for example days since a fixed day"]
    if pd.api.types.is_numeric_dtype(column.dtype) and not is_bool:
        numbers = pd.Series(column.to_numpy(dtype=np.float64, na_value=np.nan), index=column.index)
        found = number_labels(numbers) if kind == "categorical" else numbers
        return found, _wrong(found)
    text = column.astype("str").str.strip()
    text = text.where(~text.isin(MISSING))
    commas = text.str.fullmatch(COMMA, na=False)
    plain = text.where(~commas, text.str.replace(".", "", regex=False).str.replace(",", ".", regex=False))
    numbers = pd.to_numeric(plain, errors="coerce").astype(np.float64)
    words = numbers.isna() & text.notna()
    if kind != "numeric" and (kind or is_bool or words.sum() * 2 > text.notna().sum()):
        return text, _wrong(text)
    problems = [f"text in a numeric cell {_at(words.to_numpy())}"] if words.any() else []
    problems += _wrong(numbers.where(~words, 0.0))
    if commas.any() and text[commas].str.fullmatch(THOUSANDS).all():
        rows = _at(commas.to_numpy(dtype=bool))
        problems.append(f"comma that may stand for thousands {rows}; write numbers with a point")
    return numbers, problems


def _wrong(column: pd.Series) -> list[str]:
    """What is wrong with cells of numbers or text."""
    masks = {EMPTY: column.isna().to_numpy()}
    if column.dtype == np.float64:
        sizes = column.abs().to_numpy()
        masks |= {
            "infinite number": np.isinf(sizes),
            f"number beyond {LARGEST:g}": np.isfinite(sizes) & (sizes > LARGEST),
        }
    return [f"{what} {_at(mask)}" for what, mask in masks.items() if mask.any()]


def number_labels(numbers: pd.Series) -> pd.Series:
    """Numbers as the text of a level: 1.0 becomes ``1``; NaN stays missing."""
    whole = numbers == numbers.round()
    small = whole & (numbers.abs() < 2**53)
    labels = numbers.astype("str")
    return labels.where(~small, numbers.where(small, 0.0).astype(np.int64).astype("str")).where(numbers.notna())


def codes_in(frame: pd.DataFrame) -> dict[str, Mask]:
    """Cells that may be a code for a missing one, such as −999: they repeat, and lie far outside of all others."""
    found = {str(name): _codes(column.to_numpy()) for name, column in frame.items() if column.dtype == np.float64}
    return {name: mask for name, mask in found.items() if mask.any()}


def _codes(values: NDArray[np.float64]) -> Mask:
    levels, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    repeated = (counts > 1) & (levels != 0)
    for low, high in ((1, 1), (1, 0), (0, 1)):
        others = levels[low : len(levels) - high]
        ends = np.r_[levels[:low], levels[len(levels) - high :]]
        if len(others) < OTHERS or not (repeated[:low].all() and repeated[len(levels) - high :].all()):
            continue
        gaps = np.maximum(others[0] - ends, ends - others[-1])
        if (gaps > np.ptp(others)).all():
            return np.isin(values, ends)
    return np.zeros(values.shape, dtype=bool)


def suspicions(frame: pd.DataFrame, target: str, codes: Mapping[str, Mask], gaussian: bool) -> str:
    """What a person should look at in typed rows, a line each; no line says what is in a cell."""
    said = []
    if codes:
        found = ", ".join(f"`{name}` ({mask.sum()} cells)" for name, mask in list(codes.items())[:5])
        said += [
            f"{found}{', …' * (len(codes) > 5)}: a number repeats far from all others and is taken as it is; if it is"
            " a code for a missing cell (−999, 9999), empty those cells and set `missing`"
        ]
    if twice := repeated(frame):
        rows = "1 row repeats" if twice == 1 else f"{twice:,} rows repeat"
        said += [f"{rows} another row in every column; if it is the same observation, leave it out"]
    if gaussian and is_skewed(frame[target]):
        said += [
            f"target `{target}` is above zero and skewed: with `transform.target` = 'log' no prediction is below zero,"
            " and intervals fit better"
        ]
    if gaussian and is_graded(frame[target]):
        said += [
            f"target `{target}` holds few whole numbers, taken as numbers with noise: if they name classes, set"
            " `model.likelihood` to 'categorical' ('bernoulli' for two); if they are grades, to 'ordinal'; if they are"
            " counts, to 'poisson'"
        ]
    return "\n".join(said)


def repeated(frame: pd.DataFrame) -> int:
    """Rows that repeat an earlier one, where a column of numbers hardly repeats otherwise."""
    once = frame.drop_duplicates()
    numbers = once.select_dtypes("number")
    some = len(once) < len(frame) < 4 * len(once)  # where nearly all do, there are few rows that can be
    telling = some and any(numbers[name].nunique() >= UNIQUE * len(once) for name in numbers)
    return len(frame) - len(once) if telling else 0


def is_skewed(target: pd.Series) -> bool:
    """Whether numbers above zero are skewed, and their logarithms far less."""
    if kind_of(target) != "numeric" or len(target) < LEAST_SKEWED or not (target > 0).all():
        return False
    plain, logged = (float(values.skew()) for values in (target, np.log(target)))  # type: ignore[arg-type]
    return plain > 1 and abs(logged) < plain / 2


def is_graded(target: pd.Series) -> bool:
    """Whether a target of numbers holds few whole ones, as classes, grades and counts do."""
    if kind_of(target) != "numeric" or (target % 1 != 0).any():
        return False
    return 2 <= target.nunique() <= min(MOST_CLASSES, len(target) / ROWS_PER_LEVEL)


def check_target(target: pd.Series, likelihood: str, transform: str, file: str, order: Sequence[str] = ()) -> None:
    """Refuse a typed target that the likelihood or the transform cannot take, or that is not among ordered grades."""
    name, levels = f"{file}: target `{target.name}`", target.nunique()
    many = levels * ROWS_PER_LEVEL > len(target)
    fitting = "bernoulli" if levels == 2 else "categorical" if 2 < levels <= MOST_CLASSES and not many else ""
    advice = f"set `model.likelihood` to {fitting!r}, or name another `target`" if fitting else "name another `target`"
    most = {"bernoulli": 2, "categorical": MOST_CLASSES}.get(likelihood, levels)
    if levels > most:
        like = ", as an identifier has" if many else ""
        raise DataError(
            f"{name} has {levels} levels in {len(target)} rows{like}; `model.likelihood` = {likelihood!r} takes at most"
            f" {most} classes: {advice}"
        )
    if likelihood == "ordinal":
        check_grades(target, order, name)
    if likelihood in CLASSES:
        return
    if kind_of(target) == "categorical":
        raise DataError(
            f"{name} holds text, {levels} levels; `model.likelihood` = '{likelihood}' needs numbers: {advice}"
        )
    values = target.to_numpy(dtype=np.float64)
    wrong = (values < 0) | (values != np.round(values))
    if likelihood in COUNTS and wrong.any():
        raise DataError(f"{name}: expected counts 0, 1, 2, …; another number {_at(wrong)}")
    if BESIDE.get(likelihood) == "event" and (values <= 0).any():
        raise DataError(f"{name}: expected times above zero; another number {_at(values <= 0)}")
    if transform in TRANSFORMS and Transform(transform).positive and (values <= 0).any():
        raise DataError(
            f"{name}: `transform.target` = '{transform}' needs numbers above zero; another {_at(values <= 0)}."
            " Set it to 'yeo-johnson', which takes any"
        )


def check_grades(target: pd.Series, order: Sequence[str], name: str) -> None:
    """Refuse grades that are not in the given order or, without one, are no whole numbers, or too many."""
    if order and not (known := target.isin(order)).all():
        raise DataError(f"{name}: expected {' < '.join(order)}; another grade {_at(~known.to_numpy())}")
    whole = target.str.fullmatch(WHOLE).to_numpy(dtype=bool)
    if not order and not whole.all():
        raise DataError(
            f"{name}: `model.likelihood` = 'ordinal' needs whole numbers; another {_at(~whole)}. Name grades in their"
            f" order: `target` = '{target.name},low<middle<high'"
        )
    if (levels := target.nunique()) > MOST_GRADES:
        raise DataError(
            f"{name} has {levels} grades; at most {MOST_GRADES} are told apart. Join some, or set"
            " `model.likelihood` to 'gaussian'"
        )


def check_beside(target: pd.Series, beside: pd.Series, likelihood: str, file: str) -> None:
    """Refuse cells of the column beside the target that the likelihood cannot take."""
    y, other = (column.to_numpy(dtype=np.float64) for column in (target, beside))
    expected, wrong = {
        "exposure": ("numbers above zero, the exposure of each count", other <= 0),
        "trials": ("whole numbers, at least as large as the target", (other < np.maximum(y, 1)) | (other % 1 != 0)),
        "event": ("1 where the event was seen and 0 where the time is censored", ~np.isin(other, (0, 1))),
    }[BESIDE[likelihood]]
    if wrong.any():
        raise DataError(f"{file}: column `{beside.name}`: expected {expected}; another {_at(wrong)}")


def date_problems(frame: pd.DataFrame, features: Sequence[str], target: str) -> dict[str, str]:
    """The columns of dates of a table as it was read, each with the first row that holds one and what to do."""
    problems = {}
    for name in (*features, target):
        dates = dates_in(frame[name])
        if dates is None:
            continue
        remedy = (
            f"set `dates` to 'days', 'season' or 'days-and-season' to make numbers of it, or {LEFT_OUT.format(name)}"
        )
        if name == target:
            remedy = "turn it into a number such as days since a fixed day, or name another `target`"
        problems[name] = f"`{name}` holds dates (for example row {int(np.argmax(dates)) + 1}); {remedy}"
    return problems


def identifier_problems(frame: pd.DataFrame, names: Sequence[str], most: int) -> list[str]:
    """A sentence for each text column whose levels are nearly unique, or more than ``most``: levels leave the site."""
    problems = []
    for name in (name for name in names if kind_of(frame[name]) == "categorical"):
        levels = int(frame[name].nunique())
        counted = f"`{name}` has {levels} levels in {len(frame)} rows"
        if levels > 2 and levels * ROWS_PER_LEVEL > len(frame):
            amounts = frame[name].str.fullmatch(AMOUNT, na=True).all()
            units = "; if they are numbers with a unit, write the numbers alone" if amounts else ""
            problems.append(f"{counted}, as an identifier has; {LEFT_OUT.format(name)}{units}")
        elif levels > most:
            problems.append(f"{counted}; at most {most} are allowed: {LEFT_OUT.format(name)}")
    return problems
