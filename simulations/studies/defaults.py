"""Methods at their defaults.

No key but `method`, `dataset`, `split`, the likelihood of classes, and how rows lie: sites that are natural groups
where a set has them, ten sites dealt at random otherwise. NLL in nats per held-out row, in units of the target; mean,
linear (for classes logistic) regression, each site alone and all rows pooled are the baselines of the same run.
*Above* names those that the method does not reach. One split each: differences of a few hundredths are chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulations.common import Row, cost, figures, fit
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
BASELINES = {f"baselines.{name}": True for name in ("linear", "local-only", "pooled")}


def study(
    sets: tuple[str, ...] = tuple(SETS),
    methods: tuple[str, ...] = ("auto", "pvi", "hierarchical-gp", "sfvi-avg", "fedmgp-exact", "fgpr"),
) -> Iterator[Row]:
    """A row for each set and method."""
    for name in sets:
        keys = SETS[name] | ({"dataset": stations()} if name.startswith("weather") else {})
        for method in methods:
            run = fit({"method": method, **BASELINES, **keys}, 0 if keys.get("partitioner") == "natural" else 10)
            row = {"set": name, "method": method, **figures(run, ("mean", "linear", "local_only", "pooled"))}
            if "refused" not in run:
                above = [own for own in ("mean", "linear", "local_only") if (row[own] or row["NLL"]) < row["NLL"]]
                row |= cost(run) | {"converged": run["converged"], "above": ", ".join(above)}
            yield row
