"""Remove a site from a finished run: a new run continues from the old one's checkpoint without that site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedgp_flower.errors import RunError
from fedgp_flower.files import write_json
from fedgp_flower.outcome import Progress, Snapshot, silent
from fedgp_flower.run.artefacts import Run, RunFolder, read_run, site_named
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import load, methods, parse_config
from fedgp_flower.run.report import write_report
from fedgp_flower.typing import Facts


def forget(run: Path, site: str, *, rounds: int, name: str, progress: Progress = silent) -> Path:
    """Continue a run without a site, in a new folder, from its history and checkpoint. Return the new folder."""
    data = read_run(run)
    if not data.method.forget:
        able = ", ".join(repr(name) for name, method in methods().items() if method.forget)
        raise RunError(f"{run} is a run of {data.metrics.method!r}; only a run of {able} can go on without a site")
    old = parse_config(data.config)
    saved = RunFolder(run, old.digest()).restore()
    if saved is None:
        raise RunError(f"{run} has no checkpoint to go on from")
    if not saved.facts["preparation"]["simulated"]:
        raise RunError("the sites of this run are real machines: start a run over those that remain")
    labels: Mapping[str, str] = saved.facts["preparation"]["labels"]
    chosen = site_named(labels, site) or site
    left: Snapshot = load(data.method.forget)(saved, chosen)
    remaining = sorted(left.facts["preparation"]["rows"], key=int)
    took_part = [one for one in left.facts.get("took_part", ()) if one != chosen]
    left = replace(left, facts={**left.facts, "took_part": took_part})
    if len(remaining) < old.min_sites:
        raise RunError(
            f"without site {chosen!r} {len(remaining)} site(s) remain, and `min-sites` = {old.min_sites}; "
            "train again over the remaining sites with a smaller `min-sites`"
        )
    flat = old.flat() | {
        "name": name,
        "output-dir": str(run.parent),
        "sites": len(remaining),
        "num-server-rounds": saved.facts["round"] + rounds,
        "resume": False,
        "baselines.pooled": False,  # it would use the rows of the forgotten site
    }
    folder = RunFolder.open(parse_config(flat))
    folder.set_history(data.history)
    folder.checkpoint(left)
    # The rows are still partitioned over the original number of sites.
    nodes = [{"partition-id": int(key), "num-partitions": len(labels)} for key in remaining]
    after = run_in_process(flat | {"resume": True}, nodes=nodes, progress=progress)
    write_json(after / "forgotten.json", _changes(data, read_run(after), chosen, rounds))
    write_report(after)
    return after


def _changes(old: Run, new: Run, site: str, rounds: int) -> Facts:
    """Summarise the removed rows and the changes on the held-out rows of the remaining sites."""
    per_site, forgotten = old.metrics.per_site, old.method.forgotten
    row = next((row for row in per_site if str(row["site"]) == site), {"site": site})
    kept = (old.metrics.labels.keys() & new.metrics.labels.keys()) - {str(row["site"])}
    return {
        "site": str(row["site"]),
        "label": row.get("label"),
        "from": old.path.name,
        "rounds_after": rounds,
        "sites_before": old.metrics.sites,
        "sites_after": new.metrics.sites,
        "training_rows_removed": row.get("training_rows"),
        "test_rows": sum(int(one["num_examples"]) for one in per_site if str(one["site"]) in kept),
        "test_before": _figures(per_site, kept),
        "test_after": _figures(new.metrics.per_site, kept),
        "predictions": _shift(old, new, kept),
        **(load(forgotten)(old, new) if forgotten else {}),
    }


def _figures(rows: Iterable[Facts], sites: set[str]) -> dict[str, float]:
    """Average the figures of some sites over their held-out rows; the RMSE through its square."""
    table = pd.DataFrame([row for row in rows if str(row["site"]) in sites and row["num_examples"]])
    names = [name for name in table if name not in {"site", "label", "num_examples", "training_rows"}]
    powers = {name: 2.0 if name == "rmse" else 1.0 for name in names}
    return {
        str(name): float(np.average(table[name].astype(float) ** power, weights=table["num_examples"]) ** (1 / power))
        for name, power in powers.items()
    }


def _shift(old: Run, new: Run, sites: set[str]) -> dict[str, float]:
    """Return the change of predictions of held-out rows; empty if a run kept none."""
    if old.predictions is None or new.predictions is None:
        return {}
    tables = (rows[rows["site"].isin(sites)] for rows in (old.predictions, new.predictions))
    before, after = (rows.sort_values("site", kind="stable").reset_index(drop=True) for rows in tables)
    if len(before) != len(after):
        return {}
    if "probability" in before:
        change = (after["probability"] - before["probability"]).abs()
        return {"mean_change_of_probability": float(change.mean())}
    steps = (after["mean"] - before["mean"]) / before["sd"]
    ratio = np.log(after["sd"] / before["sd"])
    return {"rms_shift_in_sd": float(np.sqrt((steps**2).mean())), "sd_ratio": float(np.exp(ratio.mean()))}
