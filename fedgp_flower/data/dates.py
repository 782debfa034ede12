"""Recognise columns of dates: as levels of text, every day would be an input of its own and tell a model nothing."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedgp_flower.data.tables import MISSING

FORMATS = {
    r"\d{4}-\d{1,2}-\d{1,2}": ("%Y-%m-%d",),
    r"\d{4}/\d{1,2}/\d{1,2}": ("%Y/%m/%d",),
    r"\d{1,2}\.\d{1,2}\.\d{4}": ("%d.%m.%Y",),
    r"\d{1,2}/\d{1,2}/\d{4}": ("%m/%d/%Y", "%d/%m/%Y"),
    r"\d{1,2}-\d{1,2}-\d{4}": ("%d-%m-%Y", "%m-%d-%Y"),
    r"\d{1,2} [A-Za-z]{3,9} \d{4}": ("%d %b %Y", "%d %B %Y"),
    r"[A-Za-z]{3,9} \d{1,2}, \d{4}": ("%b %d, %Y", "%B %d, %Y"),
}
"""What a date looks like → how it may be read. All have separators and a year of four digits: no plain number fits."""
TIME = r"(?:[T ]\s*\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?\s*(?:[AaPp][Mm])?\s*(?:Z|UTC|[+-]\d{2}:?\d{2})?)?"
SHARE = 0.9
"""Least share of the filled cells that one format must read."""


def dates_in(column: pd.Series) -> NDArray[np.bool_] | None:
    """The cells of a column that are dates, or None where it is not a column of dates."""
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        return column.notna().to_numpy(dtype=bool)
    if pd.api.types.is_numeric_dtype(column.dtype):
        return None
    text = column.astype("str").str.strip()
    cells, levels = pd.factorize(text.where(~text.isin(MISSING)))  # -1 is a missing cell
    filled = cells >= 0
    for pattern, formats in FORMATS.items():
        days = pd.Series(levels, dtype="str").str.extract(f"^({pattern}){TIME}$", expand=False)
        for form in formats if days.notna().any() else ():
            read = pd.to_datetime(days, format=form, errors="coerce").notna().to_numpy(dtype=bool)
            dates = filled & read[cells]
            if dates.sum() >= SHARE * filled.sum():
                return dates
    return None
