"""Determine the kind of each column, and reject unusable cells by file, column and row.

A column is numeric if at least half of its filled cells are numbers and none has a leading zero, as ids have; its other
cells are then errors. Any other column is categorical, and its cells are levels. A decimal comma is read as a point.
Rows are counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.agreement import Kind
from fedgp_flower.data.dates import dates_in, source
from fedgp_flower.data.tables import MISSING, PADDED
from fedgp_flower.errors import DataError, first_of, many
from fedgp_flower.formula import Formula, columns_of
from fedgp_flower.lazy import Lazy, pd
from fedgp_flower.options import CLASSIFICATION, MAX_LEVELS, MOST_CLASSES, SECOND_COLUMN
from fedgp_flower.transforms import TRANSFORMS, Transform

formulaic = Lazy("formulaic")
NUMPY = {"sqrt": np.sqrt, "log1p": np.log1p}
"""Functions of a formula that formulaic does not have."""
COMMA = r"[+-]?(?:\d+|\d{1,3}(?:\.\d{3})+),\d+"
THOUSANDS = r"[+-]?[1-9]\d{0,2}(?:,\d{3})"
"""A number with a decimal comma, and one whose comma may also separate thousands."""
AMOUNT = r"\W?\s*[+-]?\d[\d.,]*\s*\D{0,10}"
"""A number with a sign or a unit, such as ``€ 3.50`` or ``7 mg``."""
DATED = r"(?:19|20)\d\d\W.*|.*\W(?:19|20)\d\d(?:\W.*)?"
"""Text that begins with a year, or has one later, such as ``2024-05`` or ``31.12.2024 24:00``."""
LARGEST = 1e100
"""Largest number allowed: its square does not overflow."""
OTHERS = 5
"""Fewest other values for the detection of a code for missing cells."""
FAR = 1000
"""Smallest ratio of a suspicious number's distance from the median to that of the next; heavy tails do not reach it."""
Mask: TypeAlias = NDArray[np.bool_]

COUNTS = ("poisson", "negative-binomial", "binomial")
"""Likelihoods of targets 0, 1, 2, …"""
WHOLE, MOST_GRADES = r"-?\d+", 30
"""Pattern of a numeric grade, and the largest number of grades."""
UNIQUE = 0.9
"""If a column of numbers has a larger share of distinct values, repeated rows are no coincidence."""
LEAST_SKEWED = 30
"""Smallest number of rows for a skewness, and to recognise row numbers."""
EMPTY = "empty or NaN cell"
REMEDIES = {
    "error": ". Fill the cells, or train with `missing` = 'drop', 'impute' or 'indicator'",
    "": ". Fill the cells, or remove the rows",
}
"""Advice on empty cells of columns that are inputs, and of those that name sites or groups."""
ALIKE = ", the same text everywhere; if it says that a number is missing, leave these cells empty"
"""Advice on text such as ``?`` in a column of numbers."""
LEFT_OUT = "leave it out (`features` = '-{}')"
"""Advice to train without a column."""
ROWS_PER_LEVEL = 3
"""A column with fewer rows per level on average is an identifier."""


def kind_of(column: pd.Series) -> Kind:
    """Return the kind of a column that :func:`typed` returned."""
    return "numeric" if column.dtype == np.float64 else "categorical"


def typed(
    frame: pd.DataFrame,
    names: Sequence[str],
    file: str,
    kinds: Mapping[str, Kind] | None = None,
    missing: str = "",
) -> pd.DataFrame:
    """Return the named columns as float64 (numeric) or text (categorical). Raise DataError for unusable cells.

    Without ``missing``, the key of that name, no cell may be empty.
    """
    found, problems = cells_of(frame, names, kinds or {}, missing)
    if problems:
        raise DataError(f"{file}: {problems}")
    return found


def cells_of(
    frame: pd.DataFrame, names: Sequence[str], kinds: Mapping[str, Kind], missing: str
) -> tuple[pd.DataFrame, str]:
    """Return the columns of :func:`typed` and a description of unusable cells."""
    columns: dict[str, pd.Series] = {}
    problems: list[str] = []
    for name in names:
        columns[name], found = _typed_column(frame[name], kinds.get(name))
        shown = dated if (dated := source(name, ())) in frame else name  # numbers of a date lack the same cells
        problems += [f"column `{shown}`: {words}" for words in found if missing in REMEDIES or EMPTY not in words]
    problems = list(dict.fromkeys(problems))
    remedy = REMEDIES[missing] if any(EMPTY in problem for problem in problems) else ""
    words = f"{'; '.join(problems[:10])}{_more(len(problems) - 10, 'problem')}{remedy}"
    return pd.DataFrame(columns, index=frame.index), words


def _more(count: int, what: str) -> str:
    return f" and {many(count, f'more {what}')}" if count > 0 else ""


def _at(mask: Mask) -> str:
    """Return ``in row 3 and 2 more rows`` for the rows in a mask."""
    return f"in row {int(np.argmax(mask)) + 1}{_more(int(mask.sum()) - 1, 'row')}"


def _typed_column(column: pd.Series, kind: Kind | None) -> tuple[pd.Series, list[str]]:
    """Return a column as numbers or as text, and descriptions of its unusable cells."""
    if column.dtype == "category":  # of pandas, whatever its categories are
        column, kind = pd.Series(np.asarray(column), column.index), kind or "categorical"
    is_bool = pd.api.types.is_bool_dtype(column.dtype)
    if pd.api.types.is_complex_dtype(column.dtype):
        return column, ["complex numbers; expected real numbers or text"]
    if pd.api.types.is_datetime64_any_dtype(column.dtype) or pd.api.types.is_timedelta64_dtype(column.dtype):
        return column, ["dates or durations; expected numbers or text, for example days since a fixed day, or hours"]
    if pd.api.types.is_numeric_dtype(column.dtype) and (kind == "numeric" or not is_bool):
        numbers = pd.Series(column.to_numpy(dtype=np.float64, na_value=np.nan), index=column.index)
        found = number_labels(numbers) if kind == "categorical" else numbers
        return found, _problems(found)
    text = column.astype("str").str.strip()
    text = text.where(~text.isin(MISSING))
    commas = text.str.fullmatch(COMMA, na=False)
    plain = text.where(~commas, text.str.replace(".", "", regex=False).str.replace(",", ".", regex=False))
    numbers = pd.to_numeric(plain, errors="coerce").astype(np.float64)
    words = numbers.isna() & text.notna()
    padded = text.str.fullmatch(PADDED, na=False).any()
    if kind != "numeric" and (kind or is_bool or padded or words.sum() * 2 > text.notna().sum()):
        return text, _problems(text)
    same = ALIKE if words.sum() > 1 and text[words].nunique() == 1 else ""
    problems = [f"text in a numeric cell {_at(words.to_numpy())}{same}"] if words.any() else []
    problems += _problems(numbers.where(~words, 0.0))
    if commas.any() and text[commas].str.fullmatch(THOUSANDS).all():
        rows = _at(commas.to_numpy(dtype=bool))
        problems.append(f"comma that may separate thousands {rows}; write numbers with a point")
    return numbers, problems


def _problems(column: pd.Series) -> list[str]:
    """Describe empty, infinite and too large cells."""
    masks = {EMPTY: column.isna().to_numpy()}
    if column.dtype == np.float64:
        sizes = column.abs().to_numpy()
        masks |= {
            "infinite number": np.isinf(sizes),
            f"number beyond {LARGEST:g}": np.isfinite(sizes) & (sizes > LARGEST),
        }
    return [f"{what} {_at(mask)}" for what, mask in masks.items() if mask.any()]


def number_labels(numbers: pd.Series) -> pd.Series:
    """Convert numbers to the text of levels: 1.0 becomes ``1``; NaN stays missing."""
    whole = numbers == numbers.round()
    small = whole & (numbers.abs() < 2**53)
    labels = numbers.astype("str")
    return labels.where(~small, numbers.where(small, 0.0).astype(np.int64).astype("str")).where(numbers.notna())


def codes_in(frame: pd.DataFrame) -> dict[str, Mask]:
    """Return masks of cells that may be codes for missing values, such as −999: repeated and far from all others."""
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


def far_in(frame: pd.DataFrame) -> dict[str, list[int]]:
    """Return labels of rows, 1 % of a column at most, whose numbers are far further from the median than all others."""
    found = {}
    for name in frame.select_dtypes("number"):
        numbers = _present(frame[name])
        distances = np.abs(numbers - np.median(numbers)) if len(numbers) else numbers
        order = np.argsort(distances, kind="stable")
        values, start = distances[order], len(order) - max(1, len(order) // 100)
        if len(np.unique(values[:start])) < OTHERS:
            continue
        far = values[start:] > FAR * values[start - 1 : -1]
        if far.any():
            found[str(name)] = sorted(frame[name].dropna().index[order[start + int(np.argmax(far)) :]])
    return found


def is_compact_date(column: pd.Series) -> bool:
    """Return whether all numbers of a column are days from 1900 to 2100 such as 20240131."""
    if kind_of(column) != "numeric" or not len(numbers := _present(column)):
        return False
    if numbers.min() < 19000101 or numbers.max() > 21001231 or (numbers % 1 != 0).any():
        return False
    return bool(pd.to_datetime(numbers.astype(np.int64).astype("str"), format="%Y%m%d", errors="coerce").notna().all())


def _present(column: pd.Series) -> NDArray[np.float64]:
    """Return the numbers of a column without missing cells."""
    numbers = column.to_numpy(np.float64)
    return numbers[~np.isnan(numbers)]


def suspicions(frame: pd.DataFrame, target: str, codes: Mapping[str, Mask], gaussian: bool) -> str:
    """Return warnings on typed rows, a line each, that reveal no cell."""
    warnings, inputs = [], frame.drop(columns=target)
    if codes:
        found = first_of([f"`{name}` ({mask.sum()} cells)" for name, mask in codes.items()])
        warnings += [
            f"{found}: a number repeats far from all others and is used as a number; if it is"
            " a code for a missing cell (−999, 9999), empty those cells and set `missing`"
        ]
    warnings += [
        f"`{name}`: the number in row {rows[0] + 1}{_more(len(rows) - 1, 'row')} is over {FAR:,} times as far from the"
        " median as all others; if it is a mistake, correct it or empty the cell"
        for name, rows in far_in(frame.drop(columns=list(codes))).items()
    ][:5]
    warnings += [
        f"`{name}` holds days written like 20240131, which are taken as plain numbers; write them as 2024-01-31 and set"
        " `dates`"
        for name, column in inputs.items()
        if is_compact_date(column)
    ]
    if duplicates := repeated(frame):
        rows = "1 row repeats" if duplicates == 1 else f"{duplicates:,} rows repeat"
        warnings += [f"{rows} another row in every column; if it is the same observation, leave it out"]
    warnings += [
        f"`{name}` numbers the rows; unless it is a time, {LEFT_OUT.format(name)}"
        for name, column in inputs.items()
        if source(str(name), ()) == name and numbers_rows(column)  # days made of dates are a time
    ]
    if gaussian and is_skewed(frame[target]):
        events = [str(name) for name, column in inputs.items() if {*column.dropna().unique()} == {0, 1}]
        warnings += [
            f"target `{target}` is above zero and skewed: with `transform.target` = 'log' (with a `formula`: a column"
            " of its logarithms) no prediction is below zero, and intervals fit better"
            + (
                f"; if it is the time to an event that {' or '.join(f'`{name}`' for name in events)} records, set"
                f" `target` to '{target},{events[0] if len(events) == 1 else 'COLUMN'}' and `model.likelihood` to"
                " 'time-to-event'"
            )
            * bool(events)
        ]
    if frame[target].nunique() == 1:
        warnings += [f"target `{target}` is the same in every row; if that is a mistake, correct it"]
    if gaussian and is_graded(frame[target]):
        advice = (
            "two whole numbers, taken as numbers with noise: for two classes set `model.likelihood` to 'bernoulli'"
            if frame[target].nunique() == 2
            else "few whole numbers, taken as numbers with noise: if they name classes, set `model.likelihood` to"
            " 'categorical'; if they are grades, to 'ordinal'; if they are counts, to 'poisson' or 'negative-binomial'"
        )
        warnings += [f"target `{target}` holds {advice}"]
    return "\n".join(warnings)


def repeated(frame: pd.DataFrame) -> int:
    """Return the number of duplicate rows, or 0 if duplicates may be a coincidence."""
    once = frame.drop_duplicates()
    numbers = once.select_dtypes("number")
    some = len(once) < len(frame) < 4 * len(once)  # more duplicates mean that few distinct rows are possible
    unlikely = some and any(numbers[name].nunique() >= UNIQUE * len(once) for name in numbers)
    return len(frame) - len(once) if unlikely else 0


def numbers_rows(column: pd.Series) -> bool:
    """Return whether a column holds row numbers: whole, each once, with few gaps, or 16 digits long."""
    if kind_of(column) != "numeric" or len(column) < LEAST_SKEWED:
        return False
    numbers = column.to_numpy(np.float64)
    counted = np.ptp(numbers) < 1.5 * len(numbers) and column.is_unique and not (numbers % 1 != 0).any()
    return bool(counted or np.abs(numbers).min() >= 2**53)  # beyond it whole numbers have gaps


def is_skewed(target: pd.Series) -> bool:
    """Return whether the target is positive and skewed, and its logarithm far less skewed."""
    if kind_of(target) != "numeric" or len(target) < LEAST_SKEWED or not (target > 0).all():
        return False
    plain, logged = (float(values.skew()) for values in (target, np.log(target)))  # type: ignore[arg-type]
    return plain > 1 and abs(logged) < plain / 2


def is_graded(target: pd.Series) -> bool:
    """Return whether a numeric target has few distinct whole numbers, like classes, grades and counts."""
    if kind_of(target) != "numeric" or (target % 1 != 0).any():
        return False
    return 2 <= target.nunique() <= min(MOST_CLASSES, len(target) / ROWS_PER_LEVEL)


def check_target(target: pd.Series, likelihood: str, transform: str, file: str, order: Sequence[str] = ()) -> None:
    """Raise DataError if a typed target does not fit the likelihood, the transformation or the ordered grades."""
    name, levels = f"{file}: target `{target.name}`", target.nunique()
    many = levels * ROWS_PER_LEVEL > len(target)
    fitting = "bernoulli" if levels == 2 else "categorical" if 2 < levels <= MOST_CLASSES and not many else ""
    grades = f", for grades to 'ordinal' with `target` = '{target.name},low<middle<high'" * (fitting == "categorical")
    other = "name another `target`"
    advice = f"set `model.likelihood` to {fitting!r}{grades}, or {other}" if fitting else other
    most = {"bernoulli": 2, "categorical": MOST_CLASSES}.get(likelihood, levels)
    if levels > most:
        like = ", like an identifier" if many else ""
        raise DataError(
            f"{name} has {levels} levels in {len(target)} rows{like}; `model.likelihood` = {likelihood!r} takes at most"
            f" {most} classes: correct one that is misspelt, {advice}"
        )
    if likelihood == "ordinal":
        check_grades(target, order, name)
    if likelihood in CLASSIFICATION:
        return
    if kind_of(target) == "categorical":
        held = "truth values" if {*target.unique()} <= {"True", "False"} else f"text, {levels} levels"
        held += ", because a cell has a leading zero" * bool(target.str.fullmatch(PADDED, na=False).any())
        raise DataError(f"{name} holds {held}; `model.likelihood` = '{likelihood}' needs numbers: {advice}")
    values = target.to_numpy(dtype=np.float64)
    wrong = (values < 0) | (values != np.round(values))
    if likelihood in COUNTS and wrong.any():
        raise DataError(f"{name}: expected counts 0, 1, 2, …; another number {_at(wrong)}")
    if SECOND_COLUMN.get(likelihood) == "event" and (values <= 0).any():
        rounded = ". Where 0 is a rounded time, write half of its unit" if values.min() == 0 else ""
        raise DataError(f"{name}: expected times above zero; another number {_at(values <= 0)}{rounded}")
    if transform in TRANSFORMS and Transform(transform).positive and (values <= 0).any():
        raise DataError(
            f"{name}: `transform.target` = '{transform}' needs numbers above zero; another {_at(values <= 0)}."
            " Set it to 'yeo-johnson', which allows any number"
        )


def check_formula(frame: pd.DataFrame, formula: Formula, file: str) -> None:
    """Raise DataError if a function in a formula is not finite in a row; labels of the rows count them from 0."""
    parts = (formula.fixed, *(term.effects for term in formula.random))
    called = {factor: factor for part in parts for factor in factors(part) if factor not in frame}
    called |= {f"offset{formula.offset}": f"I({formula.offset})"} if formula.offset else {}
    for name, factor in called.items():
        names = columns_of(factor)
        if not all(name in frame and kind_of(frame[name]) == "numeric" for name in names):
            continue
        inputs = frame[names]
        finite = np.isfinite(design_matrix(f"0 + {factor}", inputs).to_numpy(dtype=np.float64)).all(axis=1)
        wrong = frame.index[~finite & inputs.notna().all(axis=1).to_numpy()]
        if len(wrong):
            rows = _at(np.isin(np.arange(wrong[-1] + 1), wrong))
            raise DataError(
                f"{file}: `formula`: {name} is not finite {rows}; correct the cells, leave out the rows, or change the"
                " term"
            )


def design_matrix(part: str, table: pd.DataFrame) -> pd.DataFrame:
    """The design matrix of a part of a formula. Raise DataError if the part cannot be read."""
    with _reading(part), np.errstate(all="ignore"):
        matrix: pd.DataFrame = formulaic.model_matrix(part, table, na_action="ignore", context=NUMPY)
    return matrix


def factors(part: str) -> Iterator[str]:
    """Yield the factors of the terms in a part of a formula, such as ``log(age)``."""
    with _reading(part):
        terms = list(formulaic.Formula(part))
    yield from (factor.expr for term in terms for factor in term.factors)


@contextmanager
def _reading(part: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        words = str(error).partition("\n")[0]
        raise DataError(f"`formula`: {part!r} cannot be read ({type(error).__name__}: {words})") from None


def check_grades(target: pd.Series, order: Sequence[str], name: str) -> None:
    """Raise DataError for grades that are not in ``order`` or, without one, no whole numbers; or for too many."""
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
            f"{name} has {levels} grades; at most {MOST_GRADES} are allowed. Merge some, or set"
            " `model.likelihood` to 'gaussian'"
        )


SECOND_TARGETS = {
    "exposure": "numbers above zero, the exposure of each count",
    "trials": "whole numbers, at least as large as the target",
    "event": "1 where the event was seen and 0 where the time is censored",
}
"""What the second column of a target holds, by its kind."""


def second_target_problem(frame: pd.DataFrame, name: str, likelihood: str, missing: str) -> str:
    """Say what a second target column holds if it has unusable cells; empty if it has none."""
    wrong = cells_of(frame, [name], {name: "numeric"}, missing)[1]
    return f"`{name}` holds {SECOND_TARGETS[SECOND_COLUMN[likelihood]]}" if wrong else ""


def check_second_target(target: pd.Series, second: pd.Series, likelihood: str, file: str) -> None:
    """Raise DataError if the second target column has values that the likelihood does not allow."""
    y, other = (column.to_numpy(dtype=np.float64) for column in (target, second))
    wrong = {
        "exposure": other <= 0,
        "trials": (other < np.maximum(y, 1)) | (other % 1 != 0),
        "event": ~np.isin(other, (0, 1)),
    }[SECOND_COLUMN[likelihood]]
    if wrong.any():
        expected = SECOND_TARGETS[SECOND_COLUMN[likelihood]]
        raise DataError(f"{file}: column `{second.name}`: expected {expected}; another {_at(wrong)}")


def date_problems(frame: pd.DataFrame, features: Sequence[str], target: str) -> dict[str, str]:
    """Return a message for each column of dates in a table, with its first such row and a remedy."""
    problems = {}
    for name in (*features, target):
        dates = dates_in(frame[name])
        if dates is None:
            continue
        remedy = f"set `dates` to 'days', 'season' or 'days-and-season' to convert it, or {LEFT_OUT.format(name)}"
        if name == target:
            remedy = "convert it to a number such as days since a fixed day, or name another `target`"
        problems[name] = f"`{name}` holds dates (for example row {int(np.argmax(dates)) + 1}); {remedy}"
    return problems


def identifier_problems(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return a message for each text column with nearly unique or too many levels, which leave the site."""
    problems = []
    for name in (name for name in names if pd.api.types.is_string_dtype(frame[name])):
        levels = int(frame[name].nunique())
        counted = f"`{name}` has {levels} levels in {len(frame)} rows"
        if levels > 2 and levels * ROWS_PER_LEVEL > len(frame):
            amounts = frame[name].str.fullmatch(AMOUNT, na=True).all()
            more = "; if they are numbers with a unit, write only the numbers" if amounts else ""
            if frame[name].str.fullmatch(DATED, na=True).all():
                more = "; if they are dates, write them as 2024-12-31, with a time as 2024-12-31 18:00+01:00"
            problems.append(f"{counted}, like an identifier; {LEFT_OUT.format(name)}{more}")
        elif levels > MAX_LEVELS:
            problems.append(f"{counted}; at most {MAX_LEVELS} are allowed: {LEFT_OUT.format(name)}")
    return problems
