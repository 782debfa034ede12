"""FSGP: RMSE against the number of inducing points.

The experiments of Guo et al., *Federated sparse Gaussian processes* (2022), Section 4: a sine (Eq. 18; 5 sites, 2 a
round), a plane wave (Eq. 19; 10 sites, 5 a round), and KIN40K with 10 000 training and 30 000 test rows (10 sites, 5 a
round), sites of uneven size as in the paper. FSGP takes 3 local steps at a rate of 0.1 that falls to 0.001.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Row, data_dir, figures, fit, kept_table


@dataclass(frozen=True)
class Experiment:
    """A data set with the paper's sites."""

    sites: int
    fraction: float
    ratio: float  # largest over smallest site, from the paper's difference of sizes
    inducing: tuple[int, ...]
    rounds: int  # of averaging
    evaluations: int  # of the pooled bound


SETS = {
    "sine": Experiment(5, 0.4, 1.84, (4, 6, 8, 12, 16, 24), 300, 300),
    "plane-wave": Experiment(10, 0.5, 4.7, (4, 8, 16, 32, 64), 300, 300),
    "kin40k": Experiment(10, 0.5, 4.7, (16, 32, 64, 128, 256, 512), 100, 150),
}
METHODS = ("fsgp", "sgpr", "fgpr", "pooled")


def kin40k() -> str:
    """Path of the table; which 10 000 rows are for training is our draw."""
    frame = pd.read_csv(data_dir() / "kin40k.csv.gz")
    return kept_table("kin40k", lambda: frame, [np.sort(np.random.default_rng(0).permutation(len(frame))[10_000:])])


def keys(name: str, method: str, inducing: int) -> dict[str, Any]:
    """Keys of a run; everything that is not the paper's is the default."""
    own = SETS[name]
    common = {
        "method": method,
        "dataset": kin40k() if name == "kin40k" else name,
        "split": 0,
        "partitioner": "sizes",
        "partition.ratio": own.ratio,
        "model.num-inducing": inducing,
        "model.noise": 0.01,
        "baselines.max-evaluations": own.evaluations,
    }
    if method not in {"fsgp", "fgpr"}:
        return common
    rounds = own.rounds if method == "fsgp" else 60
    steps = {"optimizer.steps": 3, "optimizer.learning-rate": 0.1, "averaging.fraction": own.fraction}
    return common | steps | {"num-server-rounds": rounds, "optimizer.decay": round(0.01 ** (1 / rounds), 3)}


def study(sets: tuple[str, ...] = tuple(SETS), methods: tuple[str, ...] = METHODS) -> Iterator[Row]:
    """A row for each set, method and number of inducing points."""
    for name in sets:
        for method in methods:
            for inducing in SETS[name].inducing[:1] if method == "fgpr" else SETS[name].inducing:
                run = fit(keys(name, method, inducing), SETS[name].sites)
                yield {"table": name, "method": method, "M": inducing, **figures(run)}
