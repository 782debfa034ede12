"""Experiments whose table has a column for each number of sites: command line, ledger, accuracy and NLL."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ledger import done, versions
from sfvi_runs import RESULTS, RUNS, write_table

Rows = list[dict[str, Any]]
Tasks = Callable[[Path, int, int], Iterable[tuple[str, Callable[[], Rows]]]]
"""Of the data's folder, a number of sites and a seed: what is to be done, by name."""
Cells = Callable[[tuple[str, ...], int, pd.DataFrame], Mapping[str, str]]
"""Of a row's keys, a number of sites and the runs: further cells."""


def run(
    words: str | None, name: str, sites: Sequence[int], tasks: Tasks, page: Callable[[Rows, list[str]], None]
) -> None:
    """Do what is asked for and not in the ledger; the page has all that is there so far."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--sites", nargs="+", type=int, default=list(sites))
    asked, ledger = parser.parse_args(), RUNS / name / "ledger.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    for seed in asked.seeds:
        for count in asked.sites:
            for what, work in tasks(asked.data_dir, count, seed):
                key = f"{what}, {count} sites, seed {seed}"
                found = done([(key, partial(_kept, work))], ledger, np.inf)
                print(key, f"{found[key]['seconds']:.0f} s", flush=True)
                rows = [{**row, "order": place} for place, own in enumerate(found.values()) for row in own["rows"]]
                pairs = sorted({(row["sites"], row["seed"]) for row in rows})
                parts = "; ".join(
                    f"--sites {s} --seeds {' '.join(str(b) for a, b in pairs if a == s)}" for s in _unique(pairs)
                )
                made = [f"Made by `python simulations/{name}.py` with {parts}. {versions(found.values())}"]
                page(rows, made)


def _kept(work: Callable[[], Rows]) -> dict[str, Any]:
    return {"rows": work()}


def _unique(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return list(dict.fromkeys(count for count, _ in pairs))


def write(
    name: str, title: str, lines: Sequence[str], rows: Rows, by: Sequence[str], *, more: Cells, last: Cells
) -> None:
    """Means over runs, a row for each value of ``by``; ``last`` is of all runs of a row."""
    frame, table = pd.DataFrame(rows), []
    for keys, both in frame.groupby(list(by), sort=False):
        cells: dict[str, Any] = dict(zip(by, keys, strict=True))
        counts = sorted(frame["sites"].unique())
        for sites in counts:
            own = both[both["sites"] == sites]
            spread = "" if own["spread"].isna().any() else f" ({own['spread'].mean():.2f})"
            over = "" if len(own) < 2 else f" ± {own['accuracy'].std(ddof=1):.1f}"
            mean, nll = own["accuracy"].mean(), own["nll"].mean()
            cells[f"{sites} sites, %"] = "" if own.empty else f"{mean:.1f}{over}{spread}"
            cells[f"NLL, {sites}"] = "" if own.empty else f"{nll:.3f}"
            cells |= more(keys, sites, own)
        runs = ", ".join(str(both[both["sites"] == sites]["seed"].nunique()) for sites in counts)
        table.append({**cells, **last(keys, 0, both), "runs": runs})
    write_table(RESULTS / f"{name}.md", title, lines, pd.DataFrame(table))
