"""What is known of the training rows before training, from the sums that sites describe them by, in words and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = ("column", "kind", "inputs", "missing", "levels, or mean ± sd", "differs at")


def described(data: Mapping[str, Any]) -> list[str]:
    """A line on the whole, and one for every column with missing cells or sites that differ."""
    columns: Sequence[Mapping[str, Any]] = data["columns"]
    left_out = f", {data['dropped']:,} rows left out for a missing cell" if data["dropped"] else ""
    counts = f"{data['rows']:,} training rows at {data['sites']} sites{left_out}"
    inputs, of = data["inputs"], len(columns)
    lines = [f"{counts}; {inputs} input{'s' * (inputs != 1)} of {of} column{'s' * (of != 1)}"]
    for column in columns:
        missing = [f"{column['missing']:,} missing cells"] if column["missing"] else []
        far = f"mean far from that of the other sites at {', '.join(column.get('differs', ())[:5])}"
        lines += [f"`{column['name']}`: {'; '.join([*missing, *([far] if column.get('differs') else [])])}"]
    return [line for line in lines if not line.endswith(": ")]


def rows(data: Mapping[str, Any]) -> list[list[str]]:
    """A row of text for every feature column, as ``TITLES`` says."""
    return [
        [
            str(column["name"]),
            str(column["kind"]),
            str(column["inputs"]),
            f"{column['missing']:,}",
            f"{column['levels']} levels" if "levels" in column else f"{column['mean']:.4g} ± {column['sd']:.3g}",
            ", ".join(column.get("differs", ())),
        ]
        for column in data.get("columns", ())
    ]
