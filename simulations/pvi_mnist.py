"""MNIST by a Bayesian neural network under PVI, with images dealt evenly and two digits at a site.

    python simulations/pvi_mnist.py --data-dir DIR [--only "sequential PVI" …]

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
from pvi_runs import ensure
from sfvi_mnist import images
from sfvi_runs import RESULTS, RUNS, write_table

NAME = "pvi_mnist"
ROWS, HELD_OUT, STEPS = 6000, 2000, 100
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "even, 10 sites": (10, {"partitioner": "iid"}),
    "two digits, 20 sites": (20, {"partitioner": "pathological", "partition.classes-per-site": 2}),
}
LOOSE = {"bnn.early-stopping": False, "bnn.start-scale": 1.0}
"""A start at the posterior's own spread, and every step."""
METHODS: dict[str, tuple[float, dict[str, Any]]] = {
    "sequential PVI": (2, {}),
    "sequential PVI, no early stopping": (2, LOOSE),
    "synchronous PVI": (5, {"bnn.schedule": "synchronous"}),
    "streaming VB": (2, {"bnn.deletion": False}),
    "VCL": (1, {"bnn.preset": "vcl"}),
    "BCM (same)": (1, {"bnn.preset": "bcm-same"}),
    "BCM (split)": (1, {"bnn.preset": "bcm-split"}),
}
"""Visits of every site, and the keys of a method."""
DAMPING = {10: 0.2, 20: 0.1}
"""ρ of synchronous rounds, by sites: 0.2 is the paper's for ten; its 0.025 is for a hundred."""
LINES = (
    "Made by `python simulations/pvi_mnist.py`, one seed. Shrunk from the paper's for two cores: 6000 of 60 000",
    "training images and 2000 of 10 000 test images of 14 × 14 pixels (means of four), 50 hidden units instead of",
    "200, at most 100 steps a visit, two digits at 20 sites of 300 images instead of 100 of 600. N(0, 1) priors,",
    "mean-field q, Adam as `bnn.*` has it by default; nothing was tuned. `pooled` is global VI: the same update of",
    "all rows with the steps of a whole run. Without early stopping a visit starts from the spread of the",
    "posterior, at first the prior's, and 100 steps are far too few from there; the paper took more. The paper's",
    "figures are curves; it reports that both forms of PVI end near global VI, BCM poor, VCL reasonable but below",
    "PVI, and better scores with early stopping than without.",
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
            chosen = np.random.default_rng(0).permutation(len(x))[:count]
            small = x[chosen].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(count, -1)
            parts.append(
                pd.DataFrame(small, columns=[f"p{i}" for i in range(196)]).assign(digit=y[chosen].astype(float))
            )
        frame = pd.concat(parts, ignore_index=True)
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(ROWS, len(frame)))]}
        with gzip.open(folder / "digits.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        frame.to_parquet(path)
    return path


def row(path: Path, split: str, method: str) -> list[tuple[Any, ...]]:
    """Figures of a run, and of global VI beside the first."""
    (sites, dealt), (visits, own) = SPLITS[split], METHODS[method]
    together = own.get("bnn.schedule") == "synchronous" or str(own.get("bnn.preset", "")).startswith("bcm")
    keys = {
        "method": "pvi-bnn",
        "dataset": str(path),
        "target": "digit",
        "split": 0,
        "standardise": False,
        "constant-columns": "keep",
        "bnn.steps": STEPS,
        "num-server-rounds": int(visits if together else visits * sites),
        "baselines.pooled": method == "sequential PVI" and sites == 10,
        **dealt,
        **own,
    }
    if own.get("bnn.schedule"):
        keys["bnn.damping"] = DAMPING[sites]
    found = ensure(NAME, "".join(c if c.isalnum() else "-" for c in f"{method}-{sites}"), sites, keys)
    test, pooled = found["test"], found["pooled"]
    rows = [(split, method, int(visits), test["nll"], 100 * test["accuracy"])]
    return rows + ([(split, "pooled", np.nan, pooled["nll"], 100 * pooled["accuracy"])] if pooled else [])


def main() -> None:
    """All runs asked for; the page has what is there so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDGP_DATA"))
    parser.add_argument("--only", nargs="+", default=list(METHODS))
    asked = parser.parse_args()
    path, rows = table_of(Path(asked.data_dir)), []
    for split in SPLITS:
        for method in asked.only:
            rows += row(path, split, method)
            print(rows[-1], flush=True)
            table = pd.DataFrame(rows, columns=["split", "method", "visits of a site", "NLL", "accuracy %"])
            write_table(RESULTS / f"{NAME}.md", "MNIST by a Bayesian neural network under PVI", LINES, table)


if __name__ == "__main__":
    main()
