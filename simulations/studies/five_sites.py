"""Five sites along a line: averaged inducing inputs against a distribution over them.

The synthetic problem of *Federated learning of sparse Gaussian processes* (Figures 1 and 2, Section 6.1): five sites
with 30 rows each in adjacent intervals of width 0.64 with gaps of 0.2, a draw of a Gaussian process with lengthscale
0.3, amplitude 1 and noise sd 0.15 where hyperparameters start; M = 20, sequential visits in turn, DPO factors, Adam
with learning rate 0.01. A visit takes at most J steps, the first one twice as many. NLL of held-out rows in the
intervals and in the gaps, mean and standard error over draws of the data; `exact` is the Gaussian process of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Array, Row, fit, history, kept_table, spread

SITES, ROWS, HELD_OUT, WIDTH, GAP, LENGTHSCALE, NOISE_SD = 5, 30, 30, 0.64, 0.2, 0.3, 0.15
KEYS: dict[str, Any] = {
    "method": "pvi",
    "split": 0,
    "features": "x",
    "target": "y",
    "standardise": False,
    "partitioner": "natural",
    "partition.column": "site",
    "num-server-rounds": 20,
    "evaluate-every": 1,
    "model.num-inducing": 20,
    "model.lengthscale": LENGTHSCALE,
    "model.noise": NOISE_SD**2,
    "pvi.local-update": "adam",
    "pvi.learning-rate": 0.01,
}
WAYS: dict[str, dict[str, Any]] = {"q(Z)": {"pvi.inducing": "distribution"}, "averaged Z": {"pvi.inducing": "average"}}


def kernel(left: Array, right: Array) -> Array:
    """exp(−(x − x')² / 2l²)."""
    covariance: Array = np.exp(-0.5 * ((left[:, None] - right[None]) / LENGTHSCALE) ** 2)
    return covariance


def draw(seed: int) -> pd.DataFrame:
    """Rows of one draw: site, x, y, and whether held out. A gap is held out by the site on its left."""
    rng = np.random.default_rng(seed)
    start = -0.5 * (SITES * WIDTH + (SITES - 1) * GAP) + np.arange(SITES) * (WIDTH + GAP)
    inside = start[:, None] + WIDTH * rng.random((SITES, ROWS))
    stretch = np.where(np.arange(SITES) < SITES - 1, WIDTH + GAP, WIDTH)[:, None]
    outside = start[:, None] + stretch * rng.random((SITES, HELD_OUT))
    x = np.concatenate([inside, outside], axis=1).ravel()
    held_out = np.tile(np.arange(ROWS + HELD_OUT) >= ROWS, SITES)
    f = np.linalg.cholesky(kernel(x, x) + 1e-8 * np.eye(len(x))) @ rng.standard_normal(len(x))
    site = [f"site {k}" for k in np.repeat(np.arange(SITES), ROWS + HELD_OUT)]
    return pd.DataFrame({"site": site, "x": x, "y": f + NOISE_SD * rng.standard_normal(len(x)), "held_out": held_out})


def exact(rows: pd.DataFrame) -> float:
    """NLL of the held-out rows under the Gaussian process of all training rows."""
    train, test = rows[~rows["held_out"]], rows[rows["held_out"]]
    cross = kernel(train["x"].to_numpy(), test["x"].to_numpy())
    gram = kernel(train["x"].to_numpy(), train["x"].to_numpy()) + NOISE_SD**2 * np.eye(len(train))
    weights = np.linalg.solve(gram, cross)
    variance = 1.0 - (cross * weights).sum(0) + NOISE_SD**2
    error = test["y"].to_numpy() - weights.T @ train["y"].to_numpy()
    return float(np.mean(0.5 * np.log(2 * np.pi * variance) + 0.5 * error**2 / variance))


def study(seeds: tuple[int, ...] = (0, 1, 2), steps: tuple[int, ...] = (1, 10, 100)) -> Iterator[Row]:
    """A row for each way to learn Z and number of steps."""
    tables = {seed: draw(seed) for seed in seeds}
    for way, more in WAYS.items():
        for count in steps:
            found = []
            for seed, rows in tables.items():
                held_out = np.flatnonzero(rows["held_out"]).tolist()
                path = kept_table(f"line-{seed}", lambda r=rows: r.drop(columns="held_out"), [held_out])
                keys = {**KEYS, **more, "dataset": path, "seed": seed, "pvi.steps": count}
                found.append(history(fit(keys, SITES)).set_index("visits")["test_nll"])
            yield {"Z": way, "J": count, **{f"after {n}": spread(own[n] for own in found) for n in (5, 10, 20)}}
    yield {"Z": "exact", "after 20": spread(exact(rows) for rows in tables.values())}
