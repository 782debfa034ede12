"""Section 5.2 of Chung and Al Kontar (2024): 10 or 200 units of 20 or 1000 rows; error, time and memory.

Exact rounds on all rows, and the paper's mini-batches of 10 (for 1000 rows, ended by exact rounds), against
independent GPs where they are cheap. Between 10 and 200 units the cost of a round is drawn. Every case runs in a
process of its own, whose processor time and peak memory are recorded.

    python simulations/fedmgp_scale.py [--cases 20x10 20x200 1000x10 1000x200] [--modes exact mini-batch]

Runs that are complete are not repeated. The table goes to ``simulations/results/fedmgp_scale.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from fedmgp_common import RESULTS, RUNS, SIGNALS, finished, metrics, mse, spread, table
from fedmgp_signals import signals
from matplotlib.figure import Figure

CASES = {f"{rows}x{units}": (rows, units) for rows in (20, 1000) for units in (10, 50, 100, 200)}
SHOWN = ("20x10", "20x200", "1000x10", "1000x200")
"""Cases of the paper; the others are only drawn."""
SEEDS = {"20x10": 3, "20x200": 3, "1000x10": 3}
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "mini-batch": {
        "fedmgp.update": "pseudo-gradient",
        "optimizer.batch-size": 10,
        "optimizer.learning-rate": 0.03,
        "num-server-rounds": 25,
    },
}


def run_name(case: str, mode: str, seed: int) -> str:
    """Folder of a run."""
    return f"scale-{case}-{mode}-{seed}"


def one(task: tuple[str, str, int]) -> float:
    """A run in this process; keeps its processor time and peak memory beside it."""
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
    alone = case in SEEDS and units < 100 and mode == "exact"
    keys = {**SIGNALS, **MODES[mode], "dataset": str(path), "seed": seed, "baselines.local-only": alone}
    stamps: list[float] = []
    found = finished(keys, run_name(case, mode, seed), each_round=lambda: stamps.append(time.process_time()))
    cost = RUNS / run_name(case, mode, seed) / "cost.json"
    if not cost.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        per_round = float(np.median(np.diff(stamps)))
        cost.write_text(json.dumps({"peak": peak, "round": per_round, "all": time.process_time()}))
    return mse(found)


def costs(case: str, mode: str, seed: int) -> dict[str, float] | None:
    """Peak memory (MiB) and processor seconds of a run: a round, and all of it."""
    path = RUNS / run_name(case, mode, seed) / "cost.json"
    return json.loads(path.read_text()) if path.exists() else None


def line(case: str, mode: str) -> list[object] | None:
    """A row of the table, of the runs that are there."""
    done = [seed for seed in range(SEEDS.get(case, 1)) if costs(case, mode, seed)]
    if not done:
        return None
    found = [own for seed in done if (own := metrics(run_name(case, mode, seed)))]
    cost = [own for seed in done if (own := costs(case, mode, seed))]
    alone = [own["local_only"]["rmse"] ** 2 for own in found if own["local_only"]]
    cover = float(np.mean([own["test"]["coverage_95"] for own in found]))
    rows, units = CASES[case]
    per_round = float(np.mean([own["round"] for own in cost]))
    every = float(np.mean([own["all"] for own in cost]))
    errors = spread([mse(own) for own in found]) if len(done) > 1 else mse(found[0])
    times = (per_round, 1e3 * per_round / units, every, round(max(own["peak"] for own in cost)))
    return [rows, units, mode, len(done), errors, cover, spread(alone) if alone else "", *times]


def draw() -> list[str]:
    """Processor seconds of a round against the number of units, with the line through the origin and M = 200."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    ax, lines = figure.subplots(), []
    for rows, mode, color in ((20, "exact", "#1f5f99"), (1000, "exact", "#b3261e")):
        points = [
            (units, own["round"]) for case, (n, units) in CASES.items() if n == rows and (own := costs(case, mode, 0))
        ]
        if len(points) < 3:
            continue
        units, seconds = (np.array(part, dtype=float) for part in zip(*points, strict=True))
        slope, start = np.polyfit(units, seconds, 1)
        fit = start + slope * units
        explained = 1 - np.sum((seconds - fit) ** 2) / np.sum((seconds - seconds.mean()) ** 2)
        ax.plot(units, seconds, "o", color=color, label=f"{rows} rows, {mode}")
        ax.plot([0, 210], [start, start + slope * 210], color=color, lw=1)
        lines.append(
            f"{rows} rows, {mode}: {1e3 * start:.0f} ms + {1e3 * slope:.1f} ms × M over M = "
            f"{', '.join(f'{u:.0f}' for u in units)}; R² = {explained:.4f}."
        )
    ax.set(xlabel="units M", ylabel="processor seconds per round", xlim=(0, 210), ylim=(0, None))
    if lines:
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "fedmgp_scale.png", dpi=150)
    return lines


def write() -> None:
    """The table and the figure of what is there."""
    rows = [own for case in SHOWN for mode in MODES if (own := line(case, mode))]
    titles = ["rows N", "units M", "update", "seeds", "MSE", "95 % coverage", "independent GPs, MSE"]
    titles += ["s per round", "ms per unit and round", "s in all", "peak MiB"]
    RESULTS.mkdir(exist_ok=True)
    lines = [
        "# FedMGP, Section 5.2: many units, many rows",
        "",
        "Made by `python simulations/fedmgp_scale.py`. Mean squared error on noisy held-out values, the noise alone is "
        "0.0100; processor seconds of one process and one thread with all units in it, messages as Flower packs them "
        "included. `exact`: 20 rounds; `mini-batch`: 20 rounds of 20 local steps on 10 rows, then 5 exact rounds, with "
        "the median over all rounds as the cost of one.",
        "",
        table(titles, rows),
        "",
        "A line through the cost of a round as the number of units grows:",
        "",
        *(f"- {text}" for text in draw()),
        "",
        "![cost of a round](fedmgp_scale.png)",
        "",
    ]
    (RESULTS / "fedmgp_scale.md").write_text("\n".join(lines))


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    chosen = parser.parse_args()
    tasks = [(c, m, s) for c in chosen.cases for m in chosen.modes for s in range(SEEDS.get(c, 1))]
    for task in tasks:
        case, mode, _ = task
        if (mode == "exact" or case in ("1000x10", "1000x200")) and costs(*task) is None:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                print(*task, f"MSE {pool.submit(one, task).result():.4f}", flush=True)
    write()


if __name__ == "__main__":
    main()
