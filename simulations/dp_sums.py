"""FSGP with differential privacy: NLL against ε, noise split under masks beside the central mechanism.

    python simulations/dp_sums.py --data-dir DIR [--splits 0 1 2 3 4]

Ten sites. *Masked*: the noise is split among the sites and only the total is seen; *central*: one site with all rows,
which adds the whole noise; *in the clear*: every site adds the whole noise. ``ε`` of 1e4 stands for no noise. Ranges
are those of the whole tables, rounded outwards, as if they were public; M = 100, lengthscale √D, all else at defaults:
nothing was chosen by the figures on this page. Noise differs by split. Complete runs are not repeated; the page
``simulations/results/dp_sums.md`` is written anew each time.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np
import pandas as pd
from sfvi_runs import RESULTS, ensure, write_table

NAME = "dp_sums"
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 1e4)
COMPARED = 1.0
"""Where the arms are compared."""
CLOSE = 0.02
"""Nats per row."""
ARMS: dict[str, tuple[int, dict[str, Any]]] = {
    "masked": (10, {"privacy.secure-aggregation": True}),
    "central": (1, {"min-sites": 1}),
    "in the clear": (10, {}),
}


def ranges(data_dir: str, dataset: str) -> dict[str, list[float]]:
    """The range of every column, rounded outwards to a tenth."""
    table = pd.read_csv(f"{data_dir}/{dataset}.csv.gz")
    return {str(name): [math.floor(10 * own.min()) / 10, math.ceil(10 * own.max()) / 10] for name, own in table.items()}


def keys(data_dir: str, dataset: str, epsilon: float, split: int) -> dict[str, Any]:
    """The configuration of a run."""
    known = ranges(data_dir, dataset)
    return {
        "method": "fsgp",
        "dataset": dataset,
        "data-dir": data_dir,
        "split": split,
        "seed": split,
        "model.num-inducing": 100,
        "model.lengthscale": round(math.sqrt(len(known) - 1), 3),
        "privacy.epsilon": epsilon,
        "privacy.ranges": json.dumps(known),
    }


def main() -> None:
    """Make the runs and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    rows, said = [], []
    for dataset in ("kin40k", "uci/power"):
        for epsilon in EPSILONS:
            found: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for arm, (sites, more) in ARMS.items():
                for split in given.splits if arm == "masked" or epsilon == COMPARED else ():
                    name = f"{dataset.rpartition('/')[2]}-{epsilon:g}-{arm.replace(' ', '-')}-{split}"
                    run = ensure(NAME, name, sites, keys(given.data_dir, dataset, epsilon, split) | more)
                    assert run["method_details"]["differential_privacy"]["epsilon"] <= epsilon * (1 + 1e-6)
                    found[arm].append(run["test"]["nll"])
            means = {arm: float(np.mean(values)) if values else math.nan for arm, values in found.items()}
            spread = float(np.std(found["masked"], ddof=1)) if len(given.splits) > 1 else math.nan
            rows.append({"data": dataset, "ε": f"{epsilon:g}", **means, "sd of masked over splits": spread})
            if epsilon == COMPARED:
                gap = means["masked"] - means["central"]
                verdict = "within" if abs(gap) <= CLOSE else "not within"
                said.append(f"{dataset} at ε = 1: masked − central {gap:+.3f} nats per row, {verdict} {CLOSE}.")
    lines = [
        f"`python simulations/dp_sums.py --data-dir DIR --splits {' '.join(map(str, given.splits))}`",
        "",
        f"Mean held-out NLL in nats per row, original units, δ = 1e-5, {len(given.splits)} splits; see the docstring"
        " there for what the arms are and what is taken for public.",
        "",
        *said,
    ]
    write_table(RESULTS / f"{NAME}.md", "FSGP with differential privacy", lines, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
