"""The default budgets and α of replay against their neighbours, one changed at a time, on the same splits.

    python simulations/pvi_defaults.py --data-dir DIR [--sets energy boston] [--splits 3] [--variants default …]

Differences from the default are taken split by split. Runs that are complete are not repeated, unless their settings
have changed since, and one that was cut off goes on. The page goes to ``simulations/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pvi_uci
from pvi_runs import complete, ensure
from sfvi_runs import QUIET, RESULTS, RUNS, write_table

NAME = "pvi_defaults"
INDUCING = 30
SITES = ROUNDS = 5
CHANGES: dict[str, dict[str, Any]] = {
    "default": {},
    "evaluations 100": {"pvi.evaluations": 100},
    "refit-steps 0": {"pvi.refit-steps": 0},
    "refit-steps 40": {"pvi.refit-steps": 40},
    "refit-evaluations 100": {"pvi.refit-evaluations": 100},
    "alpha 0.1": {"pvi.alpha": 0.1},
    "alpha 1": {"pvi.alpha": 1.0},
}
FLOORS = {"1 row per point": 1, "5 rows per point": 5}
TITLE = "Defaults of replay"
LINES = (
    "Made by `python simulations/pvi_defaults.py --data-dir DIR`: standard splits of UCI sets,",
    f"{SITES} sites visited once each, M = {INDUCING}, NLL of held-out rows in units of the target.",
    "One key of `pvi` is changed at a time; its default is",
)
NOTES = (
    "Difference: NLL less that of the default on the same split, in nats per row (positive: the default is better),",
    "mean over splits ± its standard error. s per visit: by the clock on one thread of a shared machine, mean.",
)


def keys_of(data: str, split: int, floor: str, change: str, data_dir: Path) -> dict[str, Any]:
    """Keys of one run."""
    chosen = argparse.Namespace(data_dir=data_dir, partition="iid", rounds=ROUNDS)
    own = pvi_uci.configuration("replay", data, split, chosen)
    own |= {"num-server-rounds": ROUNDS, "evaluate-every": 0, "model.num-inducing": INDUCING}
    own |= {"pvi.min-rows-per-pseudo-point": FLOORS[floor], **CHANGES[change]}
    return QUIET | {key: value for key, value in own.items() if key not in {"name", "output-dir"}}


def name_of(data: str, split: int, floor: str, change: str) -> str:
    """Folder of a run."""
    return f"{data}-{split}-{FLOORS[floor]}-{change.replace(' ', '-')}"


def wanted(chosen: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    """Every run, split by split."""
    for split in range(chosen.splits):
        for data in chosen.sets:
            for floor in FLOORS:
                for change in chosen.variants:
                    yield data, split, floor, change


def collect(chosen: argparse.Namespace) -> pd.DataFrame:
    """A row per complete run."""
    rows = []
    for data, split, floor, change in wanted(chosen):
        folder = RUNS / NAME / name_of(data, split, floor, change)
        if complete(folder, keys_of(data, split, floor, change, chosen.data_dir)):
            metrics = json.loads((folder / "metrics.json").read_text())
            cost = metrics["seconds"]["training"] / ROUNDS
            what = {"data": data, "floor": floor, "changed": change, "split": split}
            rows.append(what | {"nll": metrics["test"]["nll"], "seconds": cost})
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over splits, and paired differences from the default."""
    usual = frame[frame["changed"] == "default"].set_index(["data", "floor", "split"])["nll"].rename("usual")
    paired = frame.join(usual, on=["data", "floor", "split"])
    paired["difference"] = paired["nll"] - paired["usual"]
    rows = []
    for (data, floor, change), own in paired.groupby(["data", "floor", "changed"], sort=False):
        found = own["difference"].dropna()
        error = f" ± {found.sem():.3f}" if len(found) > 1 else ""
        row = {"data": data, "floor": floor, "changed": change, "splits": str(len(own)), "NLL": own["nll"].mean()}
        row["difference"] = "" if change == "default" or found.empty else f"{found.mean():+.3f}{error}"
        rows.append(row | {"s per visit": f"{own['seconds'].mean():.2f}"})
    return pd.DataFrame(rows)


def defaults() -> str:
    """The values that are not changed, as the configuration has them."""
    from fedgp_flower.run.registry import parse_config

    usual = parse_config({"method": "pvi"}).flat()
    changed = dict.fromkeys(key for change in CHANGES.values() for key in change)
    return ", ".join(f"`{key.removeprefix('pvi.')}` {usual[key]:g}" for key in changed) + "."


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sets", nargs="*", choices=pvi_uci.SETS, default=["energy", "boston"])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--variants", nargs="*", choices=list(CHANGES), default=list(CHANGES))
    chosen = parser.parse_args()
    for case in wanted(chosen):
        ensure(NAME, name_of(*case), SITES, keys_of(*case, chosen.data_dir))
    lines = [*LINES, defaults(), *NOTES]
    write_table(RESULTS / f"{NAME}.md", TITLE, lines, table(collect(chosen)))


if __name__ == "__main__":
    main()
