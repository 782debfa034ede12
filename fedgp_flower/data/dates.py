"""Detect columns of dates and convert them to numbers named ``days(c)``, ``sine(c)`` and ``cosine(c)``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.data.tables import MISSING
from fedgp_flower.errors import DataError
from fedgp_flower.lazy import pd

FORMATS = {
    r"\d{4}-\d{1,2}-\d{1,2}": ("%Y-%m-%d",),
    r"\d{4}/\d{1,2}/\d{1,2}": ("%Y/%m/%d",),
    r"\d{1,2}\.\d{1,2}\.\d{4}": ("%d.%m.%Y",),
    r"\d{1,2}/\d{1,2}/\d{4}": ("%m/%d/%Y", "%d/%m/%Y"),
    r"\d{1,2}-\d{1,2}-\d{4}": ("%d-%m-%Y", "%m-%d-%Y"),
    r"\d{1,2} [A-Za-z]{3,9} \d{4}": ("%d %b %Y", "%d %B %Y"),
    r"[A-Za-z]{3,9} \d{1,2}, \d{4}": ("%b %d, %Y", "%B %d, %Y"),
}
"""Pattern of a date → its possible formats. Separators and a four-digit year exclude plain numbers."""
TIME = (
    r"(?:[T ]\s*(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:[.,]\d+)?))?"
    r"\s*(?:(?P<half>[AaPp])[Mm])?\s*(?:Z|UTC|(?P<zone>[+-]\d{2}:?\d{2}))?)?"
)
SHARE = 0.9
"""A format is possible if it reads at least this share of the cells that the best format of their pattern reads."""


def parse_dates(column: pd.Series, *, agreed: bool = False) -> list[pd.Series]:
    """Return the times of a column, in UTC, in each format: two if day and month can be swapped in every cell.

    There are none in a column whose filled cells are not mostly dates, unless it is ``agreed`` that they are dates.
    """
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        return [pd.to_datetime(column, utc=True).dt.tz_localize(None)]
    if pd.api.types.is_numeric_dtype(column.dtype):
        return []
    text = column.astype("str").str.strip()
    cells, levels = pd.factorize(text.where(~text.isin(MISSING)))  # -1 is a missing cell
    rows = np.bincount(cells[cells >= 0], minlength=len(levels))
    found = [pd.Series(pd.NaT, range(len(levels)), dtype="datetime64[us]")]
    words = pd.Series(levels, dtype="str")
    for pattern, formats in FORMATS.items() if words.str.contains(r"\d{4}").any() else ():  # all have a year
        parts = words.str.extract(f"^(?P<day>{pattern}){TIME}$")
        if parts["day"].isna().all():
            continue
        times = _since_midnight(parts)
        ways = [pd.to_datetime(parts["day"], format=form, errors="coerce") + times for form in formats]
        counts = [rows[way.notna()].sum() for way in ways]
        ways = [way for way, count in zip(ways, counts, strict=True) if count >= SHARE * max(counts)]
        found = [known.fillna(way) for known in found for way in ways]
    found = [known for known in found if agreed or rows[known.notna()].sum() > rows.sum() / 2]
    return [pd.Series(known.reindex(cells).to_numpy(), index=column.index) for known in found]


def _since_midnight(parts: pd.DataFrame) -> pd.Series:
    """Return times of day less their offset from UTC: 0 without a time, NaT for one such as 25:61."""
    text = parts[["hour", "minute", "second", "zone"]].fillna("0")
    numbers = (text[name].str.replace(",", ".").str.replace(":", "") for name in text)
    hour, minute, second, zone = map(pd.to_numeric, numbers)
    hour = hour.where(parts["half"].isna(), hour % 12 + 12 * parts["half"].isin(["P", "p"]))
    offset = np.sign(zone) * (zone.abs() // 100 * 60 + zone.abs() % 100)
    seconds = 60 * (60 * hour + minute - offset) + second
    return pd.to_timedelta(seconds.where((hour < 24) & (minute < 60) & (second < 60)), unit="s").dt.as_unit("us")


def dates_in(column: pd.Series) -> NDArray[np.bool_] | None:
    """Return a mask of the cells that are dates, or None if the column is not one of dates."""
    found = parse_dates(column)
    return found[0].notna().to_numpy(dtype=bool) if found else None


PARTS = {"days": ("days",), "season": ("sine", "cosine"), "days-and-season": ("days", "sine", "cosine")}
"""``dates`` → the numbers that replace a column of dates."""
ORIGIN = np.datetime64("2000-01-01")
YEAR = 365.2425


def expand_dates(frame: pd.DataFrame, features: Sequence[str], dates: str) -> list[str]:
    """Return the features with columns of dates replaced by their numbers: ``days(admitted)`` for ``admitted``."""
    names: list[str] = []
    for feature in features:
        dated = dates in PARTS and feature in frame and parse_dates(frame[feature])
        names += [f"{part}({feature})" for part in PARTS[dates]] if dated else [feature]
    return names


def source(name: str, present: Iterable[str]) -> str:
    """Return the column of an input: itself, or the column of dates in its name if it is not ``present``."""
    match = re.fullmatch(r"(?:days|sine|cosine)\((.+)\)", name)
    return match.group(1) if match and name not in set(present) else name


def with_numbers(frame: pd.DataFrame, names: Sequence[str], file: str) -> pd.DataFrame:
    """Add the named numbers to a table: days since 2000, sine and cosine of 2π (day of the year − 1) / 365.2425."""
    present = [str(name) for name in frame.columns]
    made: dict[str, pd.Series] = {}
    for name in names:
        column = source(name, present)
        if column == name or column not in present:
            continue
        found = parse_dates(frame[column], agreed=True) or [pd.Series(pd.NaT, frame.index)]
        empty = frame[column].isna() | frame[column].astype("str").str.strip().isin(MISSING)
        if len(wrong := np.flatnonzero(found[0].isna() & ~empty)):
            more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
            raise DataError(f"{file}: `{column}` holds no date in row {wrong[0] + 1}{more}; write dates as 2024-12-31")
        if any(not found[0].equals(other) for other in found[1:]):
            raise DataError(
                f"{file}: in `{column}` day and month could be swapped in every cell; write dates as 2024-12-31"
            )
        angle = 2 * np.pi * (found[0].dt.day_of_year - 1) / YEAR
        part = name.partition("(")[0]
        if part == "days":
            number = (found[0] - ORIGIN) / np.timedelta64(1, "D")
        else:
            number = np.sin(angle) if part == "sine" else np.cos(angle)
        made[name] = number.astype(np.float64)
    return frame.assign(**made)
