"""FedMGP on signals that the model describes, seeds that no setting was chosen on.

Five units, the right half of the first one's curve hidden, which is what is predicted; noise variance .01. `exact`:
rounds that take the best q(g) from sums; `natural`: 60 rounds of 20 local steps on batches of 50 rows, pseudo-gradients
in natural parameters, with a first rate of .02: 20 steps of Adam then change a logarithm by about .4 at most. Mean
squared error against noisy held-out values and coverage of 95 % intervals. With `--baselines` a Gaussian process of
each unit's own rows stands beside an arm, and the same model of all rows in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulations.common import Row, averaged, fit

SIGNALS: dict[str, Any] = {
    "dataset": "convolved-signals",
    "partitioner": "natural",
    "partition.column": "unit",
    "split": 0,
    "model.num-inducing": 30,
}
EXACT: dict[str, Any] = {"method": "fedmgp-exact", "num-server-rounds": 20}
NATURAL: dict[str, Any] = {
    "method": "fedmgp",
    "num-server-rounds": 60,
    "optimizer.batch-size": 50,
    "optimizer.learning-rate": 0.02,
}
ARMS = {"exact": EXACT, "natural": NATURAL}
BASELINES: dict[str, Any] = {
    "baselines.local-only": True,
    "baselines.pooled": True,
    "baselines.max-evaluations": 300,
}


def scores(run: Row) -> Row:
    """Mean squared error and coverage."""
    return {"MSE": run["test"]["rmse"] ** 2, "coverage": run["test"]["coverage_95"]}


def study(
    arms: tuple[str, ...] = tuple(ARMS), first: int = 100, seeds: int = 5, baselines: bool = False
) -> Iterator[Row]:
    """A row for each arm, and for its baselines."""
    rows, more = [], BASELINES if baselines else {}
    for arm in arms:
        for seed in range(first, first + seeds):
            run = fit(SIGNALS | ARMS[arm] | more | {"seed": seed}, 0)
            rows.append({"arm": arm, **scores(run)})
            beside = {name: run[name] for name in ("local_only", "pooled") if baselines}
            rows += [{"arm": f"{arm}, {name}", **scores({"test": found})} for name, found in beside.items()]
    yield from averaged(rows, ("arm",), worst=("MSE",))
