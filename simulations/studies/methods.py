"""What methods reach, cost and give away.

Ten sites, one run each, no key but `method`, `dataset`, how rows lie (dealt at random, or by blocks), and where it says
so the number of inducing points; so many rows of a table. NLL in nats per held-out row in units of the target; alone:
every site by itself; pooled: a GP of all rows with as many inducing points as `sgpr`. Exchanges with every site, and MB
that a site sends in the clear. Membership of a training row: AUC, .5 at chance. *Loss*: by log p(y | x) of the
posterior; *range*: by how far the features of a row lie in the range of what the server holds of each site in the
clear (*server*), and of the sum over sites, all that is seen under masks (*total*). Empty: no attack is known here,
which is not to say that it is safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulations.common import Row, averaged, cost, figures, fit, sampled
from simulations.studies.attacks import attacked

SETS: dict[str, dict[str, Any]] = {name: {} for name in ("yacht", "boston", "energy", "concrete", "wine")}
SETS["concrete, by blocks"] = {"partitioner": "blocks"}
METHODS: dict[str, dict[str, Any]] = {
    "sgpr": {},
    "sgpr, 100 points": {"method": "sgpr", "model.num-inducing": 100},
    "pvi": {},
    "hierarchical-gp": {},
    "sfvi-avg": {},
    "fedmgp-exact": {},
    "fgpr": {},
}


def study(
    sets: tuple[str, ...] = tuple(SETS), methods: tuple[str, ...] = tuple(METHODS), rows: int = 400
) -> Iterator[Row]:
    """Means over sets, then a row for each set and method."""
    found = []
    for name in sets:
        keys = {"dataset": sampled(name.partition(",")[0], rows), **SETS[name]}
        beside = {"alone": fit({**keys, "method": "local-only"}), "pooled": fit({**keys, "method": "pooled"})}
        for method in methods:
            run = fit({"method": method, **keys, **METHODS[method]})
            row = {"table": "Each set", "set": name, "method": method, **figures(run), **cost(run)}
            row |= {who: own["test"]["nll"] for who, own in beside.items()}
            if method.startswith(("sgpr", "pvi")):
                seen = attacked({"method": method, **keys, **METHODS[method]})
                row |= {
                    "loss": seen["loss: reader"],
                    "range, server": seen["range: server"],
                    "range, total": seen["range: reader"],
                }
            found.append(row | {"above pooled": row["NLL"] - row["pooled"]})
    for row in averaged(found, ("method",)):
        yield {**row, "table": "Means over sets"}
    yield from found
