"""FedMGP with several latent functions of several inputs, at defaults: does it find them, and does it say when not?

Ten units of 40 rows; f_m = Σ_i s_mi (g_i smoothed by N(0, r_mi² I)) with g_i of lengthscales .35, .7, 1.2, signs at
random, noise of sd .1. Keys: ``method``, data, partition, and ``fedmgp.latents`` = I; baselines on the same held-out
rows.

    python simulations/fedmgp_latents.py [--seeds 5] [--cases 2x2 1x2 3x3]

A case is I x D. Runs that are complete are not repeated; the page goes to ``simulations/results/fedmgp_latents.md``,
where rows of other cases and seeds stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fedmgp_common import RESULTS, RUNS, finished, kept, mse, table
from scipy.interpolate import RegularGridInterpolator
from scipy.ndimage import gaussian_filter

UNITS, ROWS, HELD_OUT, NOISE = 10, 40, 100, 0.1
LENGTHSCALES = (0.35, 0.7, 1.2)
REACH = 1.2
"""Latent functions are drawn on [−1.2, 1.2]^D, inputs in [−1, 1]^D."""


def latent(lengthscale: float, dims: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The axis of a grid, and a draw of a Gaussian process on it."""
    axis = np.linspace(-REACH, REACH, 41 if dims < 3 else 17)
    correlation = np.exp(-0.5 * (axis[:, None] - axis) ** 2 / lengthscale**2) + 1e-8 * np.eye(len(axis))
    values, factor = rng.standard_normal([len(axis)] * dims), np.linalg.cholesky(correlation)
    for along in range(dims):
        values = np.moveaxis(np.tensordot(factor, values, (1, along)), 0, along)
    return axis, values


def signals(seed: int, latents: int, dims: int) -> Path:
    """Write the table of one seed; returns its path."""
    path = RUNS / "data" / f"latents-{latents}x{dims}-{seed}.csv"
    rng, frames = np.random.default_rng([seed, latents, dims]), []
    drawn = [latent(LENGTHSCALES[i], dims, rng) for i in range(latents)]
    for m in range(UNITS):
        f = np.zeros_like(drawn[0][1])
        for axis, values in drawn:
            gain, width = rng.uniform(0.5, 2) * rng.choice([-1, 1]), rng.uniform(0.02, 0.25)
            f = f + gain * gaussian_filter(values, width / (axis[1] - axis[0]), mode="nearest")
        x = rng.uniform(-1, 1, (ROWS + HELD_OUT, dims))
        y = RegularGridInterpolator([axis] * dims, f)(x) + NOISE * rng.standard_normal(len(x))
        frame = pd.DataFrame(x, columns=[f"x{d}" for d in range(dims)])
        split = np.where(np.arange(len(x)) < ROWS, "train", "test")
        frames.append(frame.assign(unit=f"unit-{m}", y=y, split=split))
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.concat(frames, ignore_index=True).to_csv(path, index=False)
    return path


def figures(seed: int, latents: int, dims: int) -> list[object]:
    """A row of the page: errors of the run, of the same model fitted pooled, of each unit alone; what the run says."""
    keys: dict[str, Any] = {
        "method": "fedmgp",
        "dataset": str(signals(seed, latents, dims)),
        "target": "y",
        "split": 0,
        "partitioner": "natural",
        "partition.column": "unit",
        "fedmgp.latents": latents,
        "output-dir": str(RUNS),
    }
    found = finished(keys, f"latents-{latents}x{dims}-{seed}")
    alone, pooled = (found[name]["rmse"] ** 2 for name in ("local_only", "pooled"))
    details = found["method_details"]
    return [
        f"{latents} × {dims}",
        seed,
        mse(found),
        float(pooled),
        float(alone),
        mse(found) / float(pooled),
        "yes" if details["collapsed"] else "no",
        float(details["bound"]),
        found["seconds"]["training"],
    ]


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=["2x2", "3x3"])
    chosen = parser.parse_args()
    rows = []
    for case in chosen.cases:
        latents, dims = map(int, case.split("x"))
        for seed in range(chosen.seeds):
            rows.append(figures(seed, latents, dims))
            print(*rows[-1], flush=True)
    titles = [
        "I × D",
        "seed",
        "MSE",
        "pooled",
        "alone",
        "MSE / pooled",
        "says collapsed",
        "bound",
        "seconds of training",
    ]
    page = RESULTS / "fedmgp_latents.md"
    lines = [
        "# FedMGP: several latent functions of several inputs, at defaults",
        "",
        "Made by `python simulations/fedmgp_latents.py --seeds N --cases I x D …`, some cases and seeds at a time. "
        f"{UNITS} units of {ROWS} rows, {HELD_OUT} held out at each; noise variance {NOISE**2:g}. `pooled` is the same "
        "model, all rows in one place, from one start.",
        "",
        table(titles, kept(page, titles, rows)),
        "",
    ]
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
