"""What lies and lost messages do.

Tiny runs of 4 rounds, four sites, test NLL (original units). First one site of four spoils the real numbers of every
reply from round 1 on; *drop*: its replies are lost instead; a dash behind a figure: the site was refused by name;
`ends`: the run ended with words, and no result. Projections (slopes of `svgp`) that are false alone, in eight rounds of
three sites, pass every check of one site. In the clear the run names who contradicts the others, but misses × 0.5, and
× 0 of `svgp`; under masks it counts the sites that predict much better alone. Then schedules of faults that are drawn
from a seed: every reply is hit with probability .3 by one of drop, delay, duplicate, out of order, replay, scale, flip,
shift, one entry, NaN, wrong shape, wrong schema, garbage, state lost; factors from 0 to 1e300; of one site, or every
other time of all. A run *fails* where it raises anything but its own words, where its posterior holds a number that is
not finite, or where one site was spoilt and another is blamed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from simulations.common import ROOT, Row, remembered

ROUNDS = 4
LIES = (("honest", 0.0), ("drop", 0.0), ("scale", 1.1), ("scale", 2.0), ("scale", 10.0), ("scale", 1e3), ("flip", -1.0))
LIES += (("entry", 3.0), ("entry", 1e300))

FORMS = ("sgpr", "sgpr, masked", "fsgp", "fsgp, masked", "svgp", "svgp, masked")
"""Methods whose projections are sums of rows."""


def forms() -> Any:
    """The module of the tests that draws faults: a tiny run of every Strategy."""
    sys.path.insert(0, str(ROOT / "tests"))
    import schedules

    return schedules


def lied(method: str, kind: str, size: float) -> Row:
    """One site of four spoils the real numbers of every reply from round 1 on."""
    tests = forms()
    lie = tests.Schedule(0, liar="1", rate=float(kind != "honest"), kinds=(kind,), size=size, first=1)
    ending = tests.ended(method, lie, num_server_rounds=ROUNDS)
    return {"cell": "ends" if ending.words else f"{ending.nll:.3f}" + " –" * ("1" in ending.blamed)}


def projected(form: str, size: float) -> Row:
    """One site of three multiplies its projections by a number."""
    tests, method = forms(), form.removesuffix(", masked")
    import faults

    keys = tests.METHODS[method] | {"num_server_rounds": 8, "baselines__local_only": True, "sgpr__exchanges": 20}
    keys |= {"privacy__secure_aggregation": form != method}
    with faults.false_projections("1", size):
        strategy = faults.run(faults.FaultyGrid(faults.configured(**keys), 3))
    found, better = strategy.outcome.metrics["test"], strategy.scoring.warnings
    row = {"NLL": found["nll"], "RMSE": found.get("rmse"), "named": ", ".join(strategy.session.doubted)}
    return row | {"better alone": better[0].partition(" sites")[0] if better else "0 of 3"}


def scheduled(seed: int) -> Row:
    """A run under a drawn schedule."""
    try:
        ending = forms().drawn(seed)
    except Exception as error:
        return {"nll": None, "failed": repr(error)}
    return {"nll": None if ending.words else ending.nll, "failed": ""}


def study(
    projections: bool = True, lies: bool = True, count: int = 500, methods: tuple[str, ...] = ("",)
) -> Iterator[Row]:
    """Tables of lies and of schedules."""
    known = list(forms().METHODS)
    for form, size in product(FORMS, (1.0, -1.0, 0.0, 0.5)) if projections else ():
        row = remembered("faults", [form, "projection", size], lambda f=form, s=size: projected(f, s))
        told = {"method": form, "times": size, **{name: row[name] for name in ("NLL", "RMSE", "named", "better alone")}}
        yield {"table": "Site 1 of three sends false projections", **told}
    for method in known if methods == ("",) else methods:
        row = {"table": "One site spoils every reply", "method": method}
        for kind, size in LIES if lies else ():
            found = remembered("faults", [method, kind, size], lambda m=method, k=kind, s=size: lied(m, k, s))
            row[kind if kind in {"honest", "drop", "flip"} else f"{kind} {size:g}"] = found["cell"]
        if lies:
            yield row
    found = [
        (known[s % len(known)], remembered("faults", ["drawn", s], lambda k=s: scheduled(k))) for s in range(count)
    ]
    for method in known:
        runs = [run for name, run in found if name == method]
        nll, failed = [run["nll"] for run in runs if run["nll"] is not None], sum(bool(run["failed"]) for run in runs)
        row = {"table": "Schedules", "method": method, "runs": len(runs), "completed": len(nll), "failed": failed}
        row["ended with words"] = len(runs) - len(nll) - failed
        if runs:
            yield row | ({"median NLL": float(np.median(nll)), "worst": float(np.max(nll))} if nll else {})
