"""What the SFVI experiments share: runs that are done once and go on where they were cut off, and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RUNS = HERE.parent / "results"

QUIET: dict[str, Any] = {
    "keep-predictions": False,
    "baselines.linear": False,
    "baselines.local-only": False,
    "baselines.pooled": False,
    "evaluate-every": 0,
}


def ensure(experiment: str, name: str, sites: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run, which is made if it is not there and resumed if it was cut off."""
    from fedgp_flower.run.in_process import run_in_process

    folder = RUNS / experiment / name
    if not (folder / "metrics.json").exists():
        flat = {**QUIET, **keys, "output-dir": str(RUNS / experiment), "name": name}
        run_in_process({**flat, "resume": (folder / "config.toml").exists()}, sites)
    return {"folder": folder, **json.loads((folder / "metrics.json").read_text())}


def write_table(path: Path, title: str, lines: Sequence[str], frame: pd.DataFrame, digits: int = 3) -> None:
    """A Markdown page with one table; what is missing stays empty."""
    head = [str(column) for column in frame.columns]
    rows = [
        ["" if pd.isna(v) else f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in row]
        for row in frame.itertuples(index=False)
    ]
    table = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([f"# {title}", "", *lines, "", *table, ""]))
