"""Many sites and many rounds.

Five rows a site. `rounds`: 100 sites, 200 rounds in one process, MiB after the first, the middle and the last round.
`sites`: 1000 sites, two rounds of every form of a Strategy, in one process, which under masks computes the masks of all
pairs. `ray`: 200 sites, two rounds through Flower's SuperLink and Ray.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from simulations.common import ROOT, Row, kept_table, remembered

ROWS = 5
VISITS_ALL = {"pvi-glm", "pvi-bnn", "pvi classes"}
"""Forms whose schedule is synchronous here, so that a round visits all sites."""


def table(sites: int) -> pd.DataFrame:
    """Rows of a smooth function, and its sign for classes."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-1.7, 1.7, (ROWS * sites, 2))
    y = np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] + 0.2 * draw.standard_normal(len(x))
    return pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y, "positive": (y > 0).astype(int)})


def keys(method: str, rounds: int, sites: int, folder: str) -> dict[str, Any]:
    """A tiny configuration of a method."""
    sys.path.insert(0, str(ROOT / "tests"))
    import schedules

    flat = {k: v for k, v in schedules.keys_of(method, num_server_rounds=rounds).items() if k != "round-timeout"}
    target = "positive" if flat.get("model.likelihood") == "bernoulli" else "y"
    path = kept_table(f"load-{sites}", lambda: table(sites))
    flat |= {"dataset": path, "target": target, "features": "x1,x2", "test-fraction": 0.2, "wait-seconds": 300.0}
    flat |= {"pvi.schedule": "synchronous"} if method in VISITS_ALL else {}
    if "privacy.ranges" in flat:
        flat["privacy.ranges"] = json.dumps({"x1": [-2, 2], "x2": [-2, 2], "y": [-3, 3]})
    return flat | {"output-dir": folder, "name": "x", "keep-predictions": False}


def watched(method: str, rounds: int, sites: int, *, ray: bool = False) -> Row:
    """A run, and the memory of this process after its rounds."""
    from fedgp_flower.deploy.submission import simulate
    from fedgp_flower.run.in_process import run_in_process

    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        flat = keys(method, rounds, sites, folder)
        if ray:
            simulate(flat, sites)
        else:
            run_in_process(
                flat, sites, progress=lambda row, total: memory.append(psutil.Process().memory_info().rss / 2**20)
            )
        metrics = json.loads((Path(folder) / "x" / "metrics.json").read_text(encoding="utf-8"))
    row: Row = {"sites": metrics["sites"], "failures": len(metrics["failures"]), "NLL": metrics["test"]["nll"]}
    named = {"first": 0, "middle": len(memory) // 2, "last": -1}
    return row | ({f"MiB, {name}": round(memory[place]) for name, place in named.items()} if memory else {})


def study(
    parts: tuple[str, ...] = ("rounds", "sites", "ray"), sites: int = 1000, methods: tuple[str, ...] = ("",)
) -> Iterator[Row]:
    """A table for each part."""
    from simulations.studies.faults import forms

    known = tuple(forms().METHODS)
    plans = {"rounds": (("fsgp", "pvi-glm"), 200, 100), "sites": (known, 2, sites), "ray": (("fsgp",), 2, 200)}
    for part in parts:
        usual, rounds, count = plans[part]
        for method in usual if methods == ("",) else methods:
            found = remembered(
                "load",
                [part, method, count],
                lambda p=part, m=method, r=rounds, c=count: watched(m, r, c, ray=p == "ray"),
            )
            yield {"table": part, "method": method, **found}
