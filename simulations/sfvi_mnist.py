"""MNIST: multinomial regression with learned prior scales at many small sites (Hassan et al. 2023, S3.2, Table S1).

    python simulations/sfvi_mnist.py --data-dir DIR [--sites 25 200] [--only "SFVI" …]

5000 images at (200 rows, 25 sites) and (25 rows, 200 sites); 10 000 test images, dealt to the sites for scoring only.
Accuracy is that of the mixture of 10 draws. The table goes to ``simulations/results/``. Complete runs are not repeated.
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
from sfvi_runs import RESULTS, RUNS, ensure, write_table

NAME = "sfvi_mnist"
ROWS = 5000
TITLE = "MNIST: multinomial regression at small sites"
LINES = ("Made by `python simulations/sfvi_mnist.py`; accuracy on 10 000 test images, of a mixture of 10 draws.",)

AVERAGE: dict[str, Any] = {"method": "sfvi-avg", "sfvi.learning-rate": 0.003, "sfvi.initial-scale": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "SFVI-Avg, 1 round × 400": {**AVERAGE, "num-server-rounds": 1, "sfvi.local-steps": 400},
    "SFVI-Avg, 20 rounds × 10": {**AVERAGE, "num-server-rounds": 20, "sfvi.local-steps": 10},
    "5 rounds of SFVI-Avg, then SFVI": {
        "method": "sfvi",
        "num-server-rounds": 105,
        "sfvi.warm-start-rounds": 5,
        "sfvi.local-steps": 10,
        "sfvi.learning-rate": 0.01,
        "sfvi.initial-scale": 0.05,
    },
    "SFVI": {"method": "sfvi", "num-server-rounds": 300, "sfvi.learning-rate": 0.01, "sfvi.initial-scale": 0.1},
}


def images(data_dir: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [N, 784] between 0 and 1, and digits."""
    packed = (data_dir / "mnist" / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    pixels, digits = (gzip.decompress(path.read_bytes()) for path in packed)
    return np.frombuffer(pixels, np.uint8)[16:].reshape(-1, 784) / 255.0, np.frombuffer(digits, np.uint8)[8:]


def table_of(data_dir: Path) -> Path:
    """A table of 5000 training and 10 000 test images, the latter as split 0."""
    folder = RUNS / NAME / "data"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.parquet"
    if not path.exists():
        (x, y), (x_test, y_test) = images(data_dir, "train"), images(data_dir, "t10k")
        chosen = np.random.default_rng(0).permutation(len(x))[:ROWS]
        frame = pd.DataFrame(np.concatenate([x[chosen], x_test]), columns=[f"p{i}" for i in range(784)])
        frame["digit"] = np.concatenate([y[chosen], y_test]).astype(float)
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(ROWS, len(frame)))]}
        with gzip.open(folder / "digits.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        frame.to_parquet(path)
    return path


def keys(path: Path) -> dict[str, Any]:
    """What all variants share."""
    return {
        "dataset": str(path),
        "target": "digit",
        "split": 0,
        "standardise": False,
        "constant-columns": "keep",
        "evaluate-every": 20,
        "sfvi.model": "multinomial",
        "sfvi.samples": 1,
        "sfvi.prediction-draws": 10,
    }


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sites", nargs="*", type=int, default=[25, 200])
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    chosen = parser.parse_args()
    path = table_of(chosen.data_dir)
    rows = []
    for sites in chosen.sites:
        for variant, own in VARIANTS.items():
            name = "".join(c if c.isalnum() else "-" for c in f"{variant}-{sites}")
            if variant not in chosen.only and not (RUNS / NAME / name / "metrics.json").exists():
                continue
            run = ensure(NAME, name, sites, keys(path) | own)
            cost = {"MB up": run["bytes"]["up"] / 1e6, "seconds": run["seconds"]["total"]}
            accuracy = 100 * run["test"]["accuracy"]
            rows.append({"sites": sites, "variant": variant, "accuracy, %": accuracy, **cost})
            write_table(RESULTS / f"{NAME}.md", TITLE, LINES, pd.DataFrame(rows), digits=1)


if __name__ == "__main__":
    main()
