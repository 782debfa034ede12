"""As accurate as what an analyst with all rows would use.

`default` is a run with no key but `dataset`, `split` and, for classes, the likelihood: ten sites of rows dealt at
random (relief: 100 tiles). Beside it two yardsticks see all training rows in one place. `boosting` is scikit-learn's
histogram gradient boosting with early stopping, learning rate and leaves searched on the same grid everywhere, and for
numbers one variance from its errors out of fold. `exact GP` is a GP of all rows with a squared exponential and several
starts, up to 3000 rows. The shape of errors is fitted for all three: of boosting to its errors out of fold, else to
those of rows predicted from all others. The two GPs also fit how the scale of their errors varies. RMSE and NLL (nats a
row) in units of the target, and standardised; share of held-out rows in 95 % intervals; exchanges with every site,
megabytes that a site sends, seconds of the wall, inducing points M. Every split, and the means over them last. Settings
of the methods were chosen on splits 0 to 2 alone. Of wine, a quarter of the held-out rows are copies of training rows:
who sees the rows can repeat their targets, and sums over cells of rows cannot; `copies` scores both kinds apart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedgp_flower.run.user_config import parse_assignments
from simulations import common
from simulations.common import Keys, Row, averaged, cost, figures, fit, kept_table, remembered, sites_of, tuned
from simulations.studies.classes import table

if TYPE_CHECKING:
    from fedgp_flower.data.sites import SiteData
    from fedgp_flower.scores import Scores, TargetUnits

CLASSES = ("bank", "adult", "breast-cancer")
SPLITS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("kin40k", "protein"), (3, 4)),
    **dict.fromkeys(("power", "concrete", "wine", "energy", "boston", "yacht"), (3, 4, 5, 6, 7, 8, 9)),
    **dict.fromkeys(("kin8nm", "naval"), (3, 4, 5)),
    **dict.fromkeys((*CLASSES, "relief"), (-1,)),
}
"""The sets, and the splits on which nothing was tuned; -1: one draw of held-out rows."""
TUNED: Keys = {"rate": (0.05, 0.15), "leaves": (8, 20, 50), "most": (2000,)}
EXACT_ROWS = 3000


def relief(rows: int) -> pd.DataFrame:
    """Heights with ridges at several scales, over the unit square."""
    rng = np.random.default_rng(0)
    place, height = rng.uniform(size=(rows, 2)), np.zeros(rows)
    for octave in range(5):
        angles, shifts = rng.uniform(0, 2 * np.pi, 3), rng.uniform(0, 2 * np.pi, 3)
        phase = 2.0**octave * 2 * np.pi * place @ np.stack([np.cos(angles), np.sin(angles)]) + shifts
        height += 0.6**octave * (1 - np.abs(np.sin(phase))).mean(1)
    return pd.DataFrame(place, columns=["east", "north"]).assign(y=height + 0.01 * rng.standard_normal(rows))


def keys_of(name: str, split: int) -> dict[str, Any]:
    """What has to be said of a set."""
    if name in CLASSES:
        return {"dataset": table(name, 0), "model.likelihood": "bernoulli"}
    if name == "relief":
        return {"dataset": kept_table("relief-30000", lambda: relief(30_000)), "partitioner": "kmeans"}
    return {"dataset": name if name == "kin40k" else f"uci/{name}", "split": split}


def pooled(keys: Keys, sites: int) -> tuple[SiteData, TargetUnits]:
    """The rows of all sites in one place, and the scale of the target."""
    from fedgp_flower.data.sites import SiteData
    from fedgp_flower.scores import TargetUnits

    encoded, scale = sites_of(keys, sites)
    parts = ([getattr(own, name) for own in encoded.values()] for name in ("x", "y", "x_test", "y_test"))
    return SiteData(*map(np.concatenate, parts)), TargetUnits(0.0, scale)


def scored(scores: Scores, units: TargetUnits) -> Row:
    """Figures of held-out rows."""
    from fedgp_flower.shared_messages import ScoreSums
    from strategies.server.scoring import combine

    return combine({"0": ScoreSums.of(scores)}, units.scale)


def boosting(keys: Keys, sites: int) -> Row:
    """Figures of tuned gradient boosting of the pooled rows."""
    begun, (rows, units) = time.perf_counter(), pooled(keys, sites)
    likelihood = keys.get("model.likelihood", "gaussian")
    told = scored(tuned(rows.x, rows.y, likelihood, TUNED).scores(rows, likelihood, units), units)
    return {"test": told["test"], "test_standardised": told["test_standardised"], "wall": time.perf_counter() - begun}


def one(keys: Keys, sites: int) -> Row:
    """Figures of a run, its cost and the model that it ended with."""
    begun, run = time.perf_counter(), fit(keys, sites)
    if "refused" in run:
        return {"refused": run["refused"]}
    found = {"test": run["test"], "test_standardised": run["test_standardised"], **cost(run)}
    found |= {"wall": run["seconds"]["total"] or time.perf_counter() - begun}
    path = run["folder"] / "posterior.json"
    saved = json.loads(path.read_text(encoding="utf-8"))["model"] if path.exists() else {}
    return found | {"M": run["method_details"].get("num_inducing"), "kernel": saved.get("kernel")}


def alone(words: list[str], work: Callable[[Keys, int], Row], keys: Keys, sites: int) -> Row:
    """What a function returns in a process of its own, where nothing was computed before; made once."""
    if common.CHECKING:
        return work(keys, sites)

    def made() -> Row:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(work, keys, sites).result()

    return remembered("accuracy", words, made)


def row_of(name: str, split: int, method: str, more: Keys) -> Row | None:
    """Figures of a method on a split; None for an exact GP of too many rows, or of classes."""
    sites, keys = 100 if name == "relief" else 10, keys_of(name, split)
    words, settings = [name, str(split), method], ", ".join(f"{key}={value}" for key, value in more.items())
    if method == "boosting":
        found = alone(words, boosting, keys, sites)
    elif method == "exact GP":
        if name in CLASSES or sum(len(own.y) for own in sites_of(keys, sites)[0].values()) > EXACT_ROWS:
            return None
        found = alone(words, one, {**keys, "method": "pooled", "model.kernel": "rbf"}, sites)
    else:
        told = {} if method == "default" else {"method": method}
        found = alone([*words, settings] if more else words, one, {**keys, **told, **more}, sites)
    row: Row = {"set": name, "method": " ".join([method, settings]).strip(), "split": split, **figures(found)}
    if "rmse" in row:
        scaled = found["test_standardised"]
        row |= {"rmse, standardised": scaled["rmse"], "NLL, standardised": scaled["nll"]}
    shown = ("exchanges", "MB up a site", "wall", "M", "kernel")
    return row | {name: found[name] for name in shown if name in found}


def study(
    sets: tuple[str, ...] = tuple(SPLITS),
    splits: tuple[int, ...] = (-1,),
    methods: tuple[str, ...] = ("default", "boosting", "exact GP"),
    keys: tuple[str, ...] = ("",),
) -> Iterator[Row]:
    """A row for each set, method and split, and the means; without ``splits`` those that are not for choosing."""
    more, found = parse_assignments([word for word in keys if word]), []
    for name in sets:
        for split in SPLITS[name] if -1 in (*splits, *SPLITS[name]) else splits:
            for method in methods if not common.CHECKING else ("default",):
                row = row_of(name, split, method, more)
                found += [row] if row else []
                yield from [{"table": name, **row}] if row else []
    for row in averaged(found, ("set", "method")):
        yield {"table": "means", **{name: value for name, value in row.items() if name != "split"}}
