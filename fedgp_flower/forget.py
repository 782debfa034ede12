"""Forgetting a site after a run: a new run that goes on from the old one's posterior, without that site's factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedgp_flower.artefacts import RunFolder, read_run
from fedgp_flower.config import Value
from fedgp_flower.errors import RunError
from fedgp_flower.files import write_json
from fedgp_flower.registry import parse_config
from strategies.base import Snapshot
from strategies.pvi_forget import without


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the in-process engine needs to go on: a configuration with ``resume``, and the nodes that remain."""

    flat: dict[str, Value]
    nodes: list[dict[str, Any]]


def prepare(run: Path, site: str, *, rounds: int, name: str) -> Continuation:
    """Write the folder of the new run: the old one's history and checkpoint, without the site's factor.

    Args:
        run: Folder of a finished run of ``pvi`` over simulated sites.
        site: Id or label of the site to forget.
        rounds: Rounds of training after that, to let the other sites' factors settle.
        name: Name of the new folder, beside the old one.

    Raises:
        RunError: the run is of another method or of real sites, or has no such site.
        NumericsError: what remains would be no density.
    """
    data = read_run(run)
    if data.metrics.method != "pvi":
        raise RunError(
            f"{run} is a run of {data.metrics.method!r}; only 'pvi' keeps a factor per site that can be removed"
        )
    old = parse_config(data.config)
    saved = RunFolder(run, old.digest()).restore()
    if saved is None:
        raise RunError(f"{run} has no checkpoint to go on from")
    facts: Mapping[str, Any] = saved.state
    if not facts["preparation"]["simulated"]:
        raise RunError("the sites of this run are real machines: start a run over those that remain")
    labels: Mapping[str, str] = facts["preparation"]["labels"]
    chosen = next((key for key, label in labels.items() if site in {key, label}), site)
    left = without(Snapshot(saved.arrays, dict(facts)), chosen)
    gone = {chosen, *facts["book"]["forgotten"]}
    nodes = [
        {"partition-id": int(key), "num-partitions": len(labels)} for key in sorted(labels, key=int) if key not in gone
    ]
    flat = old.flat() | {
        "name": name,
        "output-dir": str(run.parent),
        "sites": len(nodes),
        "num-server-rounds": saved.round + rounds,
        "resume": False,
    }
    folder = RunFolder.open(parse_config(flat))
    _copy_history(data.history, folder)
    folder.checkpoint(saved.round, left.arrays, left.facts)
    return Continuation(flat | {"resume": True}, nodes)


def record(before: Path, after: Path, site: str, rounds: int) -> None:
    """Write ``forgotten.json``: what was removed, and the figures before and after."""
    old, new = read_run(before).metrics, read_run(after).metrics
    content = {
        "site": site,
        "from": before.name,
        "rounds_after": rounds,
        "test_before": old.test,
        "test_after": new.test,
    }
    write_json(after / "forgotten.json", content)


def _copy_history(history: pd.DataFrame, folder: RunFolder) -> None:
    for row in history.to_dict("records"):
        folder.append_history({str(name): value for name, value in row.items() if not pd.isna(value)})
