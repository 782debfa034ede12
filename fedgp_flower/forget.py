"""Forgetting a site after a run: a new run that goes on from the old one's posterior, without that site's factor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedgp_flower import predict
from fedgp_flower.artefacts import RunFolder, read_run
from fedgp_flower.config import RunConfig, Value
from fedgp_flower.errors import RunError
from fedgp_flower.files import write_json
from fedgp_flower.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.records import Checkpoint, RunData, RunMetrics
from fedgp_flower.registry import parse_config
from fedgp_flower.shapes import NamedArrays
from strategies.base import Snapshot
from strategies.pvi_forget import without


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the in-process engine needs to go on: a configuration with ``resume``, and the nodes that remain."""

    flat: dict[str, Value]
    nodes: list[dict[str, Any]]


def prepare(run: Path, site: str, *, rounds: int, name: str) -> Continuation:
    """Write the folder of the new run: the old one's history and checkpoint, without the site's factor.

    The pooled yardstick is left out: it would learn from the rows of all sites, the forgotten one among them.

    Args:
        run: Folder of a finished run of ``pvi`` over simulated sites.
        site: Id or label of the site to forget.
        rounds: Rounds of training after that, to let the other sites' factors settle.
        name: Name of the new folder, beside the old one.

    Raises:
        RunError: the run is of another method or of real sites, or too few sites would remain.
        NumericsError: it has no such site, or what remains would be no density.
    """
    data = read_run(run)
    if data.metrics.method != "pvi":
        raise RunError(
            f"{run} is a run of {data.metrics.method!r}; only 'pvi' keeps a factor per site that can be removed"
        )
    old = parse_config(data.config)
    saved = _checkpoint(run, old)
    facts = saved.state
    labels: Mapping[str, str] = facts["preparation"]["labels"]
    chosen = next((key for key, label in labels.items() if site in {key, label}), site)
    left = without(Snapshot(saved.arrays, dict(facts)), chosen)
    nodes = _nodes(labels, {chosen, *facts["book"]["forgotten"]})
    if len(nodes) < old.min_sites:
        raise RunError(
            f"without site {chosen!r} {len(nodes)} site(s) remain, and `min-sites` = {old.min_sites}; "
            "train again over those that remain, with a smaller `min-sites`"
        )
    flat = old.flat() | {
        "name": name,
        "output-dir": str(run.parent),
        "sites": len(nodes),
        "num-server-rounds": saved.round + rounds,
        "resume": False,
        "baselines.pooled": False,
    }
    folder = RunFolder.open(parse_config(flat))
    _copy_history(data.history, folder)
    folder.checkpoint(saved.round, left.arrays, left.facts)
    return Continuation(flat | {"resume": True}, nodes)


def record(before: Path, after: Path, site: str, rounds: int) -> None:
    """Write ``forgotten.json``, what was removed and what that changed, and the report again with it.

    Figures before and after are over the same held-out rows, those of the sites that remain.
    """
    old, new = read_run(before), read_run(after)
    kept = {str(row["site"]) for row in new.metrics.per_site} & {str(row["site"]) for row in old.metrics.per_site}
    row = _row_of(old.metrics, site)
    content = {
        "site": site if row is None else str(row["site"]),
        "label": site if row is None else row.get("label"),
        "from": before.name,
        "rounds_after": rounds,
        "sites_before": old.metrics.sites,
        "sites_after": new.metrics.sites,
        "training_rows_removed": None if row is None else row["training_rows"],
        "test_rows": sum(int(own["num_examples"]) for own in old.metrics.per_site if str(own["site"]) in kept),
        "test_before": _figures(old.metrics.per_site, kept),
        "test_after": _figures(new.metrics.per_site, kept),
        "divergence": _divergences(old, new),
        "predictions": _shift(old, new, kept),
        "remains": _remains(old),
    }
    write_json(after / "forgotten.json", content)
    predict.report(after)


def _checkpoint(run: Path, config: RunConfig) -> Checkpoint:
    saved = RunFolder(run, config.digest()).restore()
    if saved is None:
        raise RunError(f"{run} has no checkpoint to go on from")
    if not saved.state["preparation"]["simulated"]:
        raise RunError("the sites of this run are real machines: start a run over those that remain")
    return saved


def _nodes(labels: Mapping[str, str], gone: set[str]) -> list[dict[str, Any]]:
    """Nodes of the sites that remain; rows go on being dealt to as many as there were."""
    return [
        {"partition-id": int(key), "num-partitions": len(labels)} for key in sorted(labels, key=int) if key not in gone
    ]


def _copy_history(history: pd.DataFrame, folder: RunFolder) -> None:
    for row in history.to_dict("records"):
        folder.append_history({str(name): value for name, value in row.items() if not pd.isna(value)})


def _row_of(metrics: RunMetrics, site: str) -> Mapping[str, Any] | None:
    return next((row for row in metrics.per_site if site in {str(row["site"]), str(row.get("label"))}), None)


def _figures(rows: Iterable[Mapping[str, Any]], sites: set[str]) -> dict[str, float]:
    """Figures over the held-out rows of some sites, from those of each: means over rows, RMSE through its square."""
    some = [row for row in rows if str(row["site"]) in sites and row["num_examples"]]
    counts = [int(row["num_examples"]) for row in some]
    facts = {"site", "label", "num_examples", "training_rows"}
    names = [name for name in (some[0] if some else ()) if name not in facts]
    found = {}
    for name in names:
        power = 2.0 if name == "rmse" else 1.0
        values = np.array([math.nan if row[name] is None else float(row[name]) for row in some])
        found[name] = float(np.average(values**power, weights=counts) ** (1.0 / power))
    return found


def _divergences(old: RunData, new: RunData) -> dict[str, float]:
    """KL(after ‖ before) in nats of the parts of q that are Gaussian: q(Z), q(β), and q(v) where Z and β are fixed."""
    if old.posterior is None or new.posterior is None:
        return {}
    before, after = _densities(old.posterior.arrays), _densities(new.posterior.arrays)
    return {name: float(after[name].kl(before[name])) for name in before if name in after}


def _densities(arrays: NamedArrays) -> dict[str, Gaussian]:
    found: dict[str, Gaussian] = {}
    for name, saved in (("inducing", "inducing.locations"), ("hyper", "hyper")):
        if f"{saved}.scale" in arrays:
            mean, scale = (arrays[f"{saved}.{part}"].ravel() for part in ("mean", "scale"))
            found[name] = DiagonalGaussian.from_arrays({"eta1": mean / scale**2, "eta2": -0.5 / scale**2})
    if "factor.whitened.eta2" in arrays:
        eta2 = arrays["factor.whitened.eta2"]
        own = {"eta1": arrays["factor.whitened.eta1"], "eta2": eta2 - 0.5 * np.eye(len(eta2))}
        found["whitened"] = NaturalGaussian.from_arrays(own)
    return found


def _shift(old: RunData, new: RunData, sites: set[str]) -> dict[str, float]:
    """How far predictions of the remaining sites' held-out rows moved; empty where a run kept none."""
    tables = [_predictions(data, sites) for data in (old, new)]
    before, after = tables
    if before is None or after is None or len(before) != len(after):
        return {}
    if "probability" in before:
        change = (after["probability"] - before["probability"]).abs()
        return {"mean_change_of_probability": float(change.mean())}
    steps = (after["mean"] - before["mean"]) / before["sd"]
    ratio = np.log(after["sd"] / before["sd"])
    return {"rms_shift_in_sd": float(np.sqrt((steps**2).mean())), "sd_ratio": float(np.exp(ratio.mean()))}


def _predictions(data: RunData, sites: set[str]) -> pd.DataFrame | None:
    if data.predictions is None:
        return None
    some = data.predictions[data.predictions["site"].isin(sites)]
    return some.sort_values("site", kind="stable").reset_index(drop=True)


def _remains(old: RunData) -> Sequence[str]:
    """What the posterior may still owe to the site, in words."""
    config = parse_config(old.config)
    own: Any = config.options
    remains = ["the standardisation and the first inducing inputs, which all sites agreed on"]
    if own.inducing == "average":
        remains.append("the inducing inputs, an average that the site took part in")
    if not (own.linear and config.model.likelihood == "gaussian"):
        remains.append("factors of other sites, fitted beside the site's; further visits let them settle")
    return remains
