"""Section 5.2 of Chung and Al Kontar (2024): 10 or 200 units of 20 or 1000 rows; error, time and memory.

Exact rounds on all rows, and the paper's mini-batches of 10 (for 1000 rows), against independent GPs where they are
cheap. Every case runs in a process of its own, whose peak memory is recorded.

    python simulations/fedmgp_scale.py [--cases 20x10 20x200 1000x10 1000x200] [--seeds 3] [--mini-batches]

Runs that are complete are not repeated. The table goes to ``simulations/results/fedmgp_scale.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from fedmgp_common import RESULTS, RUNS, SIGNALS, finished, mse, spread, table
from fedmgp_signals import signals

CASES = {"20x10": (20, 10), "20x200": (20, 200), "1000x10": (1000, 10), "1000x200": (1000, 200)}
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "mini-batch": {
        "fedmgp.update": "pseudo-gradient",
        "optimizer.batch-size": 10,
        "optimizer.learning-rate": 0.03,
        "num-server-rounds": 40,
    },
}


def run_name(case: str, mode: str, seed: int) -> str:
    """Folder of a run."""
    return f"scale-{case}-{mode}-{seed}"


def one(task: tuple[str, str, int]) -> float:
    """A run in this process; keeps its peak memory beside it."""
    case, mode, seed = task
    rows, units = CASES[case]
    width = 1250 / 200  # widths of 8 to 10 steps of a grid of 200, on a grid of 1250
    path = signals(
        RUNS / "data" / f"scale-{case}-{seed}.parquet",
        units=units,
        rows=rows,
        seed=seed,
        widths=(8 * width, 10 * width),
        points=1250,
    )
    small = rows * units <= 10_000 and mode == "exact"
    keys = {**SIGNALS, **MODES[mode], "dataset": str(path), "seed": seed, "baselines.local-only": small and units < 100}
    found = finished(keys, run_name(case, mode, seed))
    memory = RUNS / run_name(case, mode, seed) / "memory.json"
    if not memory.exists():
        memory.write_text(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    return mse(found)


def line(case: str, mode: str, seeds: int) -> list[object] | None:
    """A row of the table, of the runs that are there."""
    folders = [RUNS / run_name(case, mode, seed) for seed in range(seeds)]
    done = [folder for folder in folders if (folder / "memory.json").exists()]
    if not done:
        return None
    found = [json.loads((folder / "metrics.json").read_text()) for folder in done]
    alone = [own["local_only"]["rmse"] ** 2 for own in found if own["local_only"]]
    cover = float(np.mean([own["test"]["coverage_95"] for own in found]))
    seconds = [own["seconds"]["training"] / own["rounds"] for own in found]
    at_units = [own["seconds"]["sites"] / own["rounds"] / own["sites"] for own in found]
    memory = max(json.loads((folder / "memory.json").read_text()) for folder in done)
    rows, units = CASES[case]
    total = float(np.mean([own["seconds"]["total"] for own in found]))
    errors = spread([mse(own) for own in found])
    alone_text = spread(alone) if alone else ""
    times = (float(np.mean(seconds)), 1e3 * float(np.mean(at_units)), total)
    return [rows, units, mode, len(done), errors, cover, alone_text, *times, round(memory)]


def write(seeds: int) -> None:
    """The table of what is there."""
    rows = [own for case in CASES for mode in MODES if (own := line(case, mode, seeds))]
    titles = ["rows N", "units M", "update", "seeds", "MSE", "95 % coverage", "independent GPs, MSE"]
    titles += ["s per round", "ms per unit and round", "s in all", "peak MiB"]
    lines = [
        "# FedMGP, Section 5.2: many units, many rows",
        "",
        "Made by `python simulations/fedmgp_scale.py`. Mean squared error on noisy held-out values, the noise alone is "
        "0.0100; seconds are wall time of one process on the machine as it was loaded, units one after the other.",
        "",
        table(titles, rows),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fedmgp_scale.md").write_text("\n".join(lines))


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mini-batches", action="store_true", help="also Algorithm 2 with batches of 10")
    chosen = parser.parse_args()
    modes = ["exact", "mini-batch"] if chosen.mini_batches else ["exact"]
    tasks = [
        (c, m, s) for s in range(chosen.seeds) for c in chosen.cases for m in modes if m == "exact" or c[:4] == "1000"
    ]
    for task in tasks:
        if not (RUNS / run_name(*task) / "memory.json").exists():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                print(*task, f"MSE {pool.submit(one, task).result():.4f}", flush=True)
    write(chosen.seeds)


if __name__ == "__main__":
    main()
