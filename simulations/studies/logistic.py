"""Bayesian logistic regression by PVI.

Ashman et al. (2022), Section 5.1, Figure 4 and Table 2. Ten sites; split A deals rows evenly, split B makes five small
and five large sites, and the share of positive labels at the small ones η (1 − κ), η that of all rows. A fifth of the
rows is held out; a seed deals rows and sites. Inputs are numeric columns and 0/1 columns of every level but the first,
standardised. θ ~ N(0, I). `global VI` is the same bound of all rows in one place. *Visits* are those after which the
NLL stays within .001 nats of it, the mean over the seeds in which it does. Local updates are Newton steps to the
optimum. ρ = 0.2 is the paper's; in asynchronous runs three sites work at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Row, averaged, data_dir, figures, fit, history, train_and_test

SITES, PASSES, NEAR = 10, 6, 0.001
TARGETS = {"adult": ("income", ">50K"), "bank": ("y", "yes"), "credit": ("A16", "+")}
UNEVEN = {"adult": (0.7, -3.0), "bank": (0.7, -3.0), "credit": (0.3, -0.7)}
"""(β, κ) of split B, Table 2; split A is (0, 0)."""
METHODS: dict[str, dict[str, Any]] = {
    "sequential PVI": {"num-server-rounds": PASSES * SITES},
    "synchronous PVI, ρ = 0.2": {"pvi.schedule": "synchronous", "pvi.damping": 0.2, "num-server-rounds": 25},
    "asynchronous PVI": {"pvi.schedule": "asynchronous", "pvi.concurrency": 3, "num-server-rounds": PASSES * SITES},
    "streaming VB": {"pvi.deletion": False, "num-server-rounds": PASSES * SITES},
    "VCL": {"pvi.preset": "vcl", "num-server-rounds": SITES},
    "BCM (same)": {"pvi.preset": "bcm-same", "num-server-rounds": 1},
    "BCM (split)": {"pvi.preset": "bcm-split", "num-server-rounds": 1},
}
KEYS: dict[str, Any] = {
    "method": "pvi-glm",
    "target": "y",
    "split": 0,
    "partitioner": "natural",
    "partition.column": "site",
    "model.likelihood": "bernoulli",
    "evaluate-every": 1,
}


def encoded(name: str) -> pd.DataFrame:
    """Numeric columns, an indicator for every level but the first, and y."""
    target, positive = TARGETS[name]
    missing = "?" if name == "credit" else "(none)"
    raw = pd.read_csv(data_dir() / f"{name}.csv.gz", keep_default_na=False, na_values=missing).dropna()
    raw = raw.reset_index(drop=True).drop(columns="split", errors="ignore")
    inputs = pd.get_dummies(raw.drop(columns=target), dtype=int, drop_first=True)
    inputs.columns = pd.Index([f"x{i}" for i in range(inputs.shape[1])])
    return inputs.assign(y=(raw[target] == positive).astype(int))


def dealt(y: np.ndarray, beta: float, kappa: float, rng: np.random.Generator) -> np.ndarray:
    """Site of every row: small sites 0 to 4, large ones 5 to 9, of the sizes and shares of Table 2."""
    order = rng.permutation(len(y))
    positive, negative = (list(order[y[order] == label]) for label in (1, 0))
    small = int(len(y) / SITES * (1 - beta))
    ones = round(small * y.mean() * (1 - kappa))
    sites = np.empty(len(y), int)
    for site in range(SITES // 2):
        for pool, count in ((positive, ones), (negative, small - ones)):
            sites[pool[:count]] = site
            del pool[:count]
    for pool in (positive, negative):
        sites[pool] = SITES // 2 + np.arange(len(pool)) % (SITES - SITES // 2)
    return sites


def tables(name: str, split: str, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training rows and held-out rows with their sites; held-out rows are dealt in turn, to be scored."""
    frame, rng = encoded(name), np.random.default_rng([seed, *name.encode()])
    order = rng.permutation(len(frame))
    test, train = frame.iloc[order[: len(frame) // 5]], frame.iloc[order[len(frame) // 5 :]]
    owner = dealt(train["y"].to_numpy(), *(UNEVEN[name] if split == "B" else (0.0, 0.0)), rng)
    train = train.assign(site=[f"s{k}" for k in owner])
    return train, test.assign(site=[f"s{k % SITES}" for k in range(len(test))])


def study(
    sets: tuple[str, ...] = tuple(UNEVEN), seeds: tuple[int, ...] = (0,), covariance: str = "diagonal"
) -> Iterator[Row]:
    """A row for each set, split and method."""
    for name in sets:
        for split in "AB":
            rows: list[Row] = []
            for seed in seeds:
                path = train_and_test(f"{name}-{split}-{seed}", lambda n=name, s=split, k=seed: tables(n, s, k))
                common = KEYS | {"dataset": path, "glm.covariance": covariance, "seed": seed}
                pooled = {"partitioner": "iid", "partition.column": "", "features": "-site", "min-sites": 1}
                whole = figures(fit(common | {"num-server-rounds": 1, **pooled}, 1))
                rows.append({"set": f"{name} {split}", "method": "global VI", **whole})
                for method, keys in METHODS.items():
                    run = fit(common | keys, 0)
                    course = history(run).dropna(subset=["visits", "test_nll"])
                    away = course.loc[course["test_nll"] > whole["NLL"] + NEAR, "visits"]
                    later = course.loc[course["visits"] > (away.max() if len(away) else -1), "visits"]
                    row = {"set": f"{name} {split}", "method": method, **figures(run)}
                    row |= {
                        "above global VI": row["NLL"] - whole["NLL"],
                        "visits": later.min() if len(later) else np.nan,
                    }
                    rows.append(row)
            yield from averaged(rows, ("set", "method"))
