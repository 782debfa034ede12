"""Labels and counts at sites that deviate: SFVI in closed form by pseudo-observations, beside the paper's gradients.

    python simulations/sfvi_duals.py --data-dir DIR [frost-0 counts-0 …] [--ledger FILE] [--seconds S]

``frost``: whether a weather station's coldest days are below the median of all stations, by country, folds as in
``sfvi_weather.py``. ``counts``: made here, eight sites of 40 rows for training and 40 held out, with a trend and
deviations of sites in two inputs; the number is the seed. ``cancer``: scikit-learn's `breast-cancer`, 30 inputs, its
rows dealt to ten sites that do not differ. Nothing is repeated that the ledger holds; the page is
``simulations/results/sfvi_duals.md``.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ledger import command_line, done, versions
from sfvi_runs import QUIET, RUNS, write_table
from sfvi_weather import table_of

NAME = "sfvi_duals"
CLOSED: dict[str, Any] = {"method": "sfvi", "sfvi.objective": "closed-form"}
ARMS: dict[str, dict[str, Any]] = {
    "closed form": CLOSED,
    "gradients": {"method": "sfvi", "sfvi.objective": "stochastic", "baselines.local-only": True},
}
SETS = ("frost-0", "counts-0", "cancer-0", "frost-1", "counts-1")
COMMON: dict[str, Any] = {"partitioner": "natural", "model.num-inducing": 40, "model.kernel": "matern52"}


def frost(data_dir: Path, fold: int) -> dict[str, Any]:
    """The table of ``sfvi_weather.py`` with labels."""
    path, _ = table_of(data_dir)
    folder = RUNS / NAME / "data"
    folder.mkdir(parents=True, exist_ok=True)
    frame = pd.read_csv(path)
    frame["frost"] = (frame["tmin"] < frame["tmin"].median()).astype(int)
    frame.to_csv(folder / "frost.csv", index=False)
    (folder / "frost.splits.json.gz").write_bytes((path.parent / "stations.splits.json.gz").read_bytes())
    own = {"features": "lon,lat,elev", "target": "frost", "partition.column": "country", "partition.min-rows": 8}
    return {"dataset": str(folder / "frost.csv"), "split": fold, "model.likelihood": "bernoulli", **own}


def counts(data_dir: Path, seed: int) -> dict[str, Any]:
    """Counts with rate exp(1 + trend + deviation of the site)."""
    del data_dir
    rng, sites, rows = np.random.default_rng([seed, 19]), 8, 80
    x, site = rng.uniform(-2, 2, (sites * rows, 2)), np.repeat(np.arange(sites), rows)
    centre, level = rng.uniform(-1, 1, (sites, 2)), rng.normal(0, 0.4, sites)
    own = level[site] + 0.8 * np.exp(-2 * ((x - centre[site]) ** 2).sum(1))
    y = rng.poisson(np.exp(1 + np.sin(1.5 * x[:, 0]) * np.cos(x[:, 1]) + own))
    folder = RUNS / NAME / "data"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"counts-{seed}.csv"
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "site": site, "y": y}).to_csv(path, index=False)
    listing = {"n": len(y), "n_splits": 1, "test": [np.flatnonzero(np.arange(len(y)) % rows >= rows // 2).tolist()]}
    with gzip.open(path.with_name(f"counts-{seed}.splits.json.gz"), "wt") as out:
        json.dump(listing, out)
    own_keys = {"features": "a,b", "target": "y", "partition.column": "site", "model.likelihood": "poisson"}
    return {"dataset": str(path), "split": 0, **own_keys}


def cancer(data_dir: Path, seed: int) -> dict[str, Any]:
    """Malignant or not, at ten sites."""
    del data_dir
    return {"dataset": "breast-cancer", "seed": seed, "partitioner": "iid", "model.likelihood": "bernoulli"}


def run(data_dir: Path, what: str, arm: str) -> dict[str, Any]:
    """The figures of one run."""
    from fedgp_flower.run.in_process import run_in_process

    kind, _, number = what.partition("-")
    keys = {"frost": frost, "counts": counts, "cancer": cancer}[kind](data_dir, int(number))
    name = f"{what}-{arm}-{time.time():.0f}".replace(" ", "-").replace(",", "")
    flat = {**QUIET, **COMMON, **keys, **ARMS[arm], "output-dir": str(RUNS / NAME), "name": name}
    sites = 0 if flat["partitioner"] == "natural" else 10
    found = json.loads((run_in_process(flat, sites) / "metrics.json").read_text())
    alone = found["local_only"]
    return {
        "set": what,
        "arm": arm,
        "nll": found["test"]["nll"],
        "alone": alone["nll"] if alone else None,
        "bound": found["method_details"]["bound"],
        "exchanges": found["exchanges"],
        "converged": found["converged"],
        "mb": found["bytes"]["up"] / found["sites"] / 1e6,
    }


def main() -> None:
    """Run what is missing and write the page."""
    parser = command_line(__doc__, SETS, NAME)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    chosen = parser.parse_args()
    tasks = [(f"{what}, {arm}", partial(run, chosen.data_dir, what, arm)) for what in chosen.parts for arm in ARMS]
    found = done(tasks, chosen.ledger, chosen.seconds)
    rows = [
        {
            "set": own["set"],
            "SFVI": own["arm"],
            "NLL": own["nll"],
            "each alone": own["alone"],
            "bound, nats": own["bound"],
            "exchanges": own["exchanges"],
            "converged": "yes" if own["converged"] else "no",
            "MB up a site": own["mb"],
            "processor s": f"{own['seconds']:.0f}",
        }
        for own in found.values()
    ]
    lines = [
        "Made by `python simulations/sfvi_duals.py`. NLL in nats per held-out row, each alone: the same model without",
        "the others, by gradients; the bounds of gradients are those of deviations that rest on 20 rows of a site.",
        "Seconds of all processes, those of each alone included. The closed form is not the default for labels and",
        "counts: its messages grow with M², and where sites do not differ (cancer) it predicts no better.",
        versions(found.values()),
    ]
    write_table(chosen.output, "SFVI in closed form for labels and counts", lines, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
