"""PVI on UCI regression: factors by pseudo-observations, against communications.

Ten sites, M = 100, standard splits, as in *Federated learning of sparse Gaussian processes* (Figure 4); rows dealt at
random (`iid`), unevenly by the target (`dirichlet`, α = 0.1), by size (1 : 10) or by blocks. NLL of held-out rows, in
units of the target, after so many communications, and NLL and RMSE at the end, means over splits; beside each site
alone and `sgpr`, the same model from sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulations.common import Row, averaged, figures, fit, history

SETS = ("yacht", "energy", "boston", "concrete", "wine", "power", "kin8nm")
MARKS = (5, 10, 20, 30)
PAPER: dict[str, Any] = {"method": "pvi", "pvi.local-update": "adam", "model.num-inducing": 100, "evaluate-every": 5}
METHODS: dict[str, dict[str, Any]] = {
    "sgpr": {"method": "sgpr", "model.num-inducing": 100},
    "local-only": {"method": "local-only"},
    "DPO, tied": PAPER,
    "DPO, free": {**PAPER, "pvi.factor": "free"},
    "CPO": {**PAPER, "pvi.factor": "cpo"},
    "DPO, fixed Z": {**PAPER, "pvi.inducing": "fixed"},
    "DPO, averaged Z": {**PAPER, "pvi.inducing": "average"},
    "DPO, synchronous": {**PAPER, "pvi.schedule": "synchronous", "evaluate-every": 1},
    "DPO, asynchronous": {**PAPER, "pvi.schedule": "asynchronous"},
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"partitioner": "iid"},
    "dirichlet": {"partitioner": "dirichlet", "partition.alpha": 0.1},
    "sizes": {"partitioner": "sizes", "partition.ratio": 10.0},
    "blocks": {"partitioner": "blocks"},
}


def study(
    sets: tuple[str, ...] = SETS,
    splits: tuple[int, ...] = (0, 1, 2, 3, 4),
    methods: tuple[str, ...] = tuple(METHODS),
    partition: str = "iid",
    rounds: int = 10,
) -> Iterator[Row]:
    """A row for each set and method."""
    for data in sets:
        rows = []
        for split in splits:
            for method in methods:
                keys = {"dataset": f"uci/{data}", "split": split, **PARTITIONS[partition], **METHODS[method]}
                keys |= {"num-server-rounds": rounds} if keys["method"] == "pvi" else {}
                run = fit(keys)
                row = {"set": data, "method": method}
                if keys["method"] == "pvi":
                    course = history(run).dropna(subset=["visits", "test_nll"]).set_index("visits")["test_nll"]
                    row |= {f"NLL @ {mark}": course.get(mark) for mark in MARKS}
                rows.append(row | figures(run))
        yield from averaged(rows, ("set", "method"))
