"""MNIST by a Bayesian neural network under PVI, with images dealt evenly and two digits at a site.

    python simulations/pvi_mnist.py --data-dir DIR [--splits even uneven] [--only "sequential PVI" …]

Section 5.3 of Ashman et al. (2022), made small: see the page in ``simulations/results/``. Complete runs are not
repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pvi_runs import complete, ensure
from sfvi_mnist import images
from sfvi_runs import QUIET, RESULTS, RUNS, write_table

from fedgp_flower.errors import RunError

NAME, DIVERGED = "pvi_mnist", "diverged.txt"
ROWS, HELD_OUT, STEPS = 60_000, 10_000, 100
FEW = {"bnn.prediction-draws": 10}
TWO = {"partitioner": "pathological"}
SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "even": ("even, 10 sites", 10, {"partitioner": "iid", **FEW}),
    "study": ("two digits, 20 sites", 20, {**TWO, **FEW}),
    "uneven": ("two digits, 100 sites", 100, TWO),
}
"""Words for a page, sites, and how rows are dealt."""
NEVER = {"bnn.early-stopping": False}
LOOSE = {**NEVER, "bnn.start-scale": 1.0}
"""A start at the posterior's own spread, and every step."""
METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "sequential PVI": (3, {}),
    "streaming VB": (2, {"bnn.deletion": False}),
    "VCL": (1, {"bnn.preset": "vcl"}),
    "BCM (same)": (1, {"bnn.preset": "bcm-same"}),
    "BCM (split)": (1, {"bnn.preset": "bcm-split"}),
}
"""Visits of every site, and the keys of a method."""
STOPPING: dict[str, tuple[int, dict[str, Any]]] = {
    "sequential PVI, tight start, all steps": (3, NEVER),
    "sequential PVI, wide start, all steps": (3, LOOSE),
    "sequential PVI, wide start, 2000 steps": (1, {**LOOSE, "bnn.steps": 2000}),
}
"""Beside the default, a tight start and an early stop: of the even split."""
DAMPING = {"even": (5, (0.2,)), "study": (4, (0.1, 0.2, 0.5, 1.0)), "uneven": (4, (0.1, 0.2, 0.5, 1.0))}
"""Visits, and values of ρ, of synchronous PVI; asynchronous PVI has as many visits."""
LINES = (
    "Made by `python simulations/pvi_mnist.py`, one seed. All 60 000 training and 10 000 test images, of 14 × 14",
    "pixels (means of four); shrunk from the paper's for two cores: 50 hidden units instead of 200, 100 steps a visit",
    "at most, few visits. Ten sites of 6000 images; with two digits each, a hundred sites of 600 images, and for a",
    "study of damping twenty of 3000. N(0, 1) priors, mean-field q, Adam as `bnn.*` has it by default. Free energy: of",
    "the training images under the posterior, nats an image; by it, and not by test images, a ρ may be chosen. `global",
    "VI` is the same update of all rows with the steps that the sites take together, from the same start. A visit",
    "starts from a tight q (sd .05) and may end early, but for the rows that say otherwise; where `all steps` has the",
    "same figures, none did. Scores are of 30 draws, at ten and at twenty sites of 10.",
    "",
    "The paper's figures are curves; it reports that both forms of PVI end near global VI, BCM poor, VCL reasonable",
    "but below PVI, better scores with early stopping than without, and slow progress of strongly damped rounds.",
)


def table_of(data_dir: Path) -> Path:
    """Training images and test images, the latter as split 0."""
    folder = (RUNS / NAME / "data").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.parquet"
    if not path.exists():
        parts = []
        for part, count in (("train", ROWS), ("t10k", HELD_OUT)):
            x, y = images(data_dir, part)
            small = x[:count].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(count, -1)
            columns = [f"p{i}" for i in range(196)]
            parts.append(pd.DataFrame(small, columns=columns).assign(digit=y[:count].astype(float)))
        frame = pd.concat(parts, ignore_index=True)
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(ROWS, len(frame)))]}
        with gzip.open(folder / "digits.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        frame.to_parquet(path)
    return path


def runs_of(split: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Everything that is run on a split: visits and keys."""
    visits, values = DAMPING[split]
    found = {"sequential PVI": (visits, METHODS["sequential PVI"][1])} if split == "study" else dict(METHODS)
    for rho in values:
        found[f"synchronous PVI, ρ = {rho:g}"] = (visits, {"bnn.schedule": "synchronous", "bnn.damping": rho})
    found["asynchronous PVI, ρ = 0.2"] = (visits, {"bnn.schedule": "asynchronous", "bnn.damping": 0.2})
    return found | (STOPPING if split == "even" else {})


def keys_of(path: Path, split: str, method: str) -> dict[str, Any]:
    """The configuration of a run."""
    (_, sites, dealt), (visits, own) = SPLITS[split], runs_of(split)[method]
    together = own.get("bnn.schedule") == "synchronous" or str(own.get("bnn.preset", "")).startswith("bcm")
    return {
        "method": "pvi-bnn",
        "dataset": str(path),
        "target": "digit",
        "split": 0,
        "standardise": False,
        "bnn.steps": STEPS,
        "num-server-rounds": visits if together else visits * sites,
        "baselines.pooled": method == "sequential PVI" and split == "even",
        **dealt,
        **own,
    }


def folder_of(split: str, method: str) -> Path:
    """Of a run."""
    return RUNS / NAME / "".join(c if c.isalnum() else "-" for c in f"{method}-{SPLITS[split][1]}")


def row(path: Path, split: str, method: str) -> list[tuple[Any, ...]]:
    """Figures of a run, and of global VI beside the first."""
    words, sites, _ = SPLITS[split]
    folder, visits = folder_of(split, method), runs_of(split)[method][0]
    if (folder / DIVERGED).exists():
        return [(words, f"{method}: diverges", visits, np.nan, np.nan, np.nan)]
    try:
        found = ensure(NAME, folder.name, sites, keys_of(path, split, method))
    except RunError as error:  # no prediction is finite any more
        (folder / DIVERGED).write_text(str(error))
        return row(path, split, method)
    test, pooled = found["test"], found["pooled"]
    energy = found["method_details"].get("free_energy", {}).get("total", np.nan) / ROWS
    rows = [(words, method, visits, energy, test["nll"], 100 * test["accuracy"])]
    if pooled:
        rows.append((words, "global VI", np.nan, np.nan, pooled["nll"], 100 * pooled["accuracy"]))
    return rows


def page(path: Path) -> None:
    """What is there so far."""
    rows = []
    for split in SPLITS:
        for method in runs_of(split):
            folder = folder_of(split, method)
            if (folder / DIVERGED).exists() or complete(folder, {**QUIET, **keys_of(path, split, method)}):
                rows += row(path, split, method)
    columns = ["split", "method", "visits of a site", "free energy", "NLL", "accuracy %"]
    table = pd.DataFrame(rows, columns=columns).astype({"visits of a site": "Int64"})
    write_table(RESULTS / f"{NAME}.md", "MNIST by a Bayesian neural network under PVI", LINES, table)


def main() -> None:
    """All runs asked for; the page has what is there so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDGP_DATA"))
    parser.add_argument("--splits", nargs="*", default=list(SPLITS), choices=list(SPLITS))
    parser.add_argument("--only", nargs="+")
    asked = parser.parse_args()
    path = table_of(Path(asked.data_dir))
    for split in asked.splits:
        for method in runs_of(split):
            if not asked.only or method in asked.only:
                print(*row(path, split, method), flush=True)
                page(path)
    page(path)


if __name__ == "__main__":
    main()
