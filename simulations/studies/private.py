"""Differentially private sums: NLL against ε.

`sgpr-private` at ten sites, δ = 1e-5, NLL in nats per held-out row in original units; ε = 10000 is all but no noise.
*Masked*: the noise is split among the sites and only the total is seen. *Central*: one party with all rows adds the
whole noise. *In the clear*: every site adds the whole noise to its own sums. Ranges are those of the whole tables,
rounded outwards to a tenth, taken for public. M and the lengthscale are chosen by central noise for each ε on the
training rows of each split, a fifth of them held out; that choice is not paid for in ε.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Row, averaged, data_dir, fit, train_and_test

SETS = ("uci/power", "kin40k")
SIZES, FACTORS, DRAWS = (25, 50, 100, 200), (0.7, 1.0, 1.4), 3
"""M; lengthscales over √D; draws of noise for a choice."""
ARMS: dict[str, tuple[int, bool]] = {"masked": (10, True), "central": (1, False), "in the clear": (10, False)}
"""Sites, and whether totals are masked."""


def ranges(table: pd.DataFrame) -> str:
    """Of every column, rounded outwards."""
    found = {str(n): [math.floor(10 * own.min()) / 10, math.ceil(10 * own.max()) / 10] for n, own in table.items()}
    return json.dumps(found)


def nll(
    table: pd.DataFrame, path: str, split: int, arm: str, epsilon: float, size: int, factor: float, seed: int
) -> float:
    """Of one run."""
    sites, masked = ARMS[arm]
    keys: dict[str, Any] = {
        "method": "sgpr-private",
        "dataset": path,
        "split": split,
        "seed": seed,
        "min-sites": min(sites, 2),
        "model.num-inducing": size,
        "model.lengthscale": round(factor * math.sqrt(table.shape[1] - 1), 3),
        "privacy.epsilon": epsilon,
        "privacy.ranges": ranges(table),
        "privacy.secure-aggregation": masked,
    }
    return float(fit(keys, sites)["test"]["nll"])


def chosen(table: pd.DataFrame, dataset: str, split: int, epsilon: float) -> tuple[int, float]:
    """M and the factor of the lengthscale with the lowest mean NLL on training rows that are held out."""
    with gzip.open(data_dir() / f"{dataset}.splits.json.gz") as file:
        train = table.drop(index=json.load(file)["test"][split])
    last = np.arange(len(train)) % 5 == 0
    path = train_and_test(f"private-{dataset.replace('/', '-')}-{split}", lambda: (train[~last], train[last]))

    def mean(size: int, factor: float) -> float:
        return float(np.mean([nll(table, path, 0, "central", epsilon, size, factor, seed) for seed in range(DRAWS)]))

    return min(itertools.product(SIZES, FACTORS), key=lambda pair: mean(*pair))


def study(
    sets: tuple[str, ...] = SETS,
    splits: tuple[int, ...] = (0, 1, 2, 3, 4),
    epsilons: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 1e4),
    draws: int = 10,
    choose: bool = True,
) -> Iterator[Row]:
    """A row for each set and ε; without a choice M = 50 and the lengthscale is √D."""
    for dataset in sets:
        table = pd.read_csv(data_dir() / f"{dataset}.csv.gz")
        for epsilon in epsilons:
            rows = []
            for split in splits:
                size, factor = chosen(table, dataset, split, epsilon) if choose else (50, 1.0)
                for seed in range(draws):
                    found = {arm: nll(table, dataset, split, arm, epsilon, size, factor, seed) for arm in ARMS}
                    rows.append({"data": dataset, "ε": f"{epsilon:g}", **found, "M": size, "lengthscale / √D": factor})
            yield from averaged(rows, ("data", "ε"))
