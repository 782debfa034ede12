"""Methods at their defaults.

No key but `method`, `dataset`, `split`, the likelihood of classes, and how rows lie: sites that are natural groups
where a set has them, ten sites dealt at random otherwise. NLL in nats per held-out row, in units of the target; mean,
linear (for classes logistic) regression, each site alone and all rows pooled are the baselines of the same run.
*Above* names those that the method does not reach. One split each: differences of a few hundredths are chance.

Networks: three sites at random, pooled and alone are the same model. *waves* has three classes with log odds 2 sin 2a,
2 b and 0, 900 rows, whose true probabilities have NLL .763; *glyphs* are noisy copies of four images of 64 pixels, of
which none is hard to tell; *themes* are 600 documents of 80 words, three topics drawn as the model of topics has it;
*mnist* are 6000 images at ten sites, nine of ten of one digit at each, as in the study `networks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import IMAGES, Row, cost, figures, fit, image_table, kept_table
from simulations.studies.networks import dealt
from simulations.studies.weather import KEYS as WEATHER
from simulations.studies.weather import stations

SETS: dict[str, dict[str, Any]] = {
    "diabetes": {"dataset": "diabetes"},
    "energy": {"dataset": "uci/energy", "split": 5},
    "concrete": {"dataset": "uci/concrete", "split": 5},
    "concrete, by blocks": {"dataset": "uci/concrete", "split": 5, "partitioner": "blocks"},
    "weather, by country": {
        "split": 0,
        **{k: WEATHER[k] for k in ("features", "target", "partitioner", "partition.column")},
    },
    "breast-cancer": {"dataset": "breast-cancer", "model.likelihood": "bernoulli"},
}
NETWORKS = {
    "waves": ("pvi-bnn", "deep-kernel", "fedpop", "hierarchical-bnn"),
    "breast-cancer": ("pvi-bnn", "deep-kernel", "fedpop"),
    "glyphs": ("vae",),
    "themes": ("prodlda",),
    "mnist": ("fedpop", "hierarchical-bnn"),
}
DIGITS = {key: IMAGES[key] for key in ("target", "split", "partitioner", "partition.column")}
BASELINES = {f"baselines.{name}": True for name in ("linear", "local-only", "pooled")}


def generated(name: str) -> pd.DataFrame:
    """Rows whose classes are known to be so hard to tell apart."""
    draw = np.random.default_rng(0)
    if name == "waves":
        x = draw.normal(size=(900, 2))
        odds = np.stack([2 * np.sin(2 * x[:, 0]), 2 * x[:, 1], np.zeros(len(x))], 1)
        kind = (odds + draw.gumbel(size=odds.shape)).argmax(1)
    elif name == "glyphs":
        shapes, kind = draw.random((4, 64)) < 0.3, draw.integers(0, 4, 900)
        x = (draw.random((900, 64)) < np.where(shapes[kind], 0.9, 0.08)).astype(float)
    else:
        topics, shares = draw.dirichlet(np.full(60, 0.08), 3), draw.dirichlet(np.full(3, 0.2), 600)
        x, kind = np.stack([draw.multinomial(80, share @ topics) for share in shares]), shares.argmax(1)
    return pd.DataFrame(x, columns=[f"x{k}" for k in range(x.shape[1])]).assign(kind=[f"kind {k}" for k in kind])


def networks() -> Iterator[Row]:
    """A row for each set and network."""
    for name, models in NETWORKS.items():
        if name == "mnist":
            path = image_table("digits-10-0", lambda: dealt(10, 0))
        else:
            path = SETS[name]["dataset"] if name in SETS else kept_table(name, lambda own=name: generated(own))
        for model in models:
            keys = {"method": model} if "-k" in model or model == "pvi-bnn" else {"method": "sfvi", "sfvi.model": model}
            keys |= {"model.likelihood": "bernoulli" if name in SETS else "categorical"}
            keys |= DIGITS if name == "mnist" else {}
            run = fit({"dataset": path, **keys, **BASELINES}, 0 if name == "mnist" else 3)
            row = {"table": "Networks", "set": name, "model": model, "rounds": run["rounds"]}
            row |= figures(run, ("linear", "local_only", "pooled"))
            yield row | {"pooled accuracy": run["pooled"]["accuracy"], "converged": run["converged"]}


def study(
    sets: tuple[str, ...] = (*SETS, "networks"),
    methods: tuple[str, ...] = ("auto", "pvi", "hierarchical-gp", "sfvi-avg", "fedmgp-exact", "fgpr"),
) -> Iterator[Row]:
    """A row for each set and method, and for each network."""
    if "networks" in sets:
        yield from networks()
    for name in (name for name in sets if name in SETS):
        keys = SETS[name] | ({"dataset": stations()} if name.startswith("weather") else {})
        for method in methods:
            run = fit({"method": method, **BASELINES, **keys}, 0 if keys.get("partitioner") == "natural" else 10)
            row = {"set": name, "method": method, **figures(run, ("mean", "linear", "local_only", "pooled"))}
            if "refused" not in run:
                above = [own for own in ("mean", "linear", "local_only") if (row[own] or row["NLL"]) < row["NLL"]]
                row |= cost(run) | {"converged": run["converged"], "above": ", ".join(above)}
            yield row
