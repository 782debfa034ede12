"""Every method on every set with no key but `method`, `dataset` and how the rows lie: which method to take.

    python simulations/defaults.py --data-dir DIR [--sets diabetes energy …] [--methods fsgp pvi …]

Test NLL in nats per held-out row, beside the mean of the target, linear (for classes: logistic) regression, each site
alone, and one analyst with all rows. One split; sets whose sites are natural groups take these, others ten sites dealt
at random. Runs that are there already are not made again: remove ``results/defaults`` first. The page is
``simulations/results/defaults.md``; its rows that a call does not ask for stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
from sfvi_runs import RESULTS, RUNS, write_table
from sfvi_weather import table_of

from fedgp_flower.errors import FedGPError
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.run.api import load_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.summary import verdict

FOLDER = RUNS / "defaults"
BY_COUNTRY = {"features": "lon,lat,elev", "target": "tmin", "partitioner": "natural", "partition.column": "country"}
SETS: dict[str, dict[str, Any]] = {
    "diabetes": {"dataset": "diabetes"},
    "energy": {"dataset": "uci/energy", "split": 5},
    "concrete": {"dataset": "uci/concrete", "split": 5},
    "concrete, by blocks": {"dataset": "uci/concrete", "split": 5, "partitioner": "blocks"},
    "weather, by country": {"split": 0, **BY_COUNTRY},
    "breast-cancer": {"dataset": "breast-cancer", "model.likelihood": "bernoulli"},
}
METHODS = ("fsgp", "pvi", "sfvi", "sfvi-avg", "fedmgp", "fgpr")
YARDSTICKS = {"mean": "mean", "linear": "linear", "local_only": "alone", "pooled": "pooled"}


def finished(method: str, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run at defaults, or why there are none."""
    folder = FOLDER / f"{method}-{name.replace(',', '').replace(' ', '-')}"
    if not (folder / "metrics.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        flat = {"method": method, **keys, "output-dir": str(FOLDER), "name": folder.name}
        started = time.process_time()
        try:
            run_in_process(flat, 0 if keys.get("partitioner") == "natural" else 10)
        except FedGPError as error:
            return {"refused": str(error)}
        (folder / "processor.txt").write_text(str(time.process_time() - started))
    return json.loads((folder / "metrics.json").read_text()) | {
        "processor": float((folder / "processor.txt").read_text()),
        "begins": verdict(load_run(folder).metrics).partition(":")[0],
    }


def line(method: str, name: str, run: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    if "refused" in run:
        return {"set": name, "method": method, "verdict": "refused: " + run["refused"].partition("\n")[0][:90]}
    nll = run["test"]["nll"]
    others = {words: (run[key] or {}).get("nll") for key, words in YARDSTICKS.items()}
    worse = [words for words in ("mean", "linear", "alone") if others[words] is not None and nll > others[words]]
    return {
        "set": name,
        "method": method,
        "NLL": nll,
        **others,
        "coverage": run["test"].get("coverage_95"),
        "exchanges": str(run["exchanges"]),
        "MB up a site": run["bytes"]["up"] / run["sites"] / 1e6,
        "processor s": f"{run['processor']:.0f}",
        "converged": {True: "yes", False: "no", None: "?"}[run["converged"]],
        "verdict": "above " + ", ".join(worse) if worse else "",
        "the run begins": run.get("begins", ""),
    }


def merged(found: pd.DataFrame, page: Path) -> pd.DataFrame:
    """The rows found and those that the page has of other sets and methods, in the order of sets and methods."""
    lines = [row for row in page.read_text().splitlines() if row.startswith("| ")] if page.exists() else []
    head, *rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in lines] or [["set", "method"]]
    earlier = pd.DataFrame([row for row in rows if row[0] != "---"], columns=head)
    again = set(zip(found["set"], found["method"], strict=True))
    stays = [key not in again for key in zip(earlier["set"], earlier["method"], strict=True)]
    both = pd.concat([found, earlier[stays]], ignore_index=True)
    place = [list(SETS).index(row["set"]) * len(METHODS) + METHODS.index(row["method"]) for _, row in both.iterrows()]
    return both.iloc[pd.Series(place).argsort()]


def main() -> None:
    """Run what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    chosen = parser.parse_args()
    limit_threads(1)
    lines = []
    for name in chosen.sets:
        for method in chosen.methods:
            keys = {"data-dir": str(chosen.data_dir)} | SETS[name]
            if name.startswith("weather"):
                keys["dataset"] = str(table_of(chosen.data_dir)[0])
            lines.append(line(method, name, finished(method, name, keys)))
            print(lines[-1], flush=True)
    words = [
        "Made by `python simulations/defaults.py --data-dir DIR`, some sets and methods at a time, not all with one",
        "version: no key but `method`, `dataset`, `split`, the likelihood of classes, and the partition. NLL in nats",
        "per held-out row in units of the target; mean, linear, alone and pooled are the baselines that the same run",
        "reports; “above” names those that the method does not reach, and the last column is how the run's own report",
        "begins, where it was made anew: worse or better where the 95 % interval over sites says so. One split each:",
        "differences of a few hundredths are chance.",
    ]
    page = RESULTS / "defaults.md"
    rows = merged(pd.DataFrame(lines), page).fillna("")
    above = rows[rows["verdict"].str.contains("alone")]
    said = above["the run begins"].str.partition("; better")[0].str.contains("each site alone").sum()
    words += ["", f"Of {len(above)} rows above each site alone {said} begin with that."]
    write_table(page, "Methods at their defaults", words, rows)


if __name__ == "__main__":
    main()
