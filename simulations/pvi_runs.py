"""What the experiments with PVI share: a run counts as done only if it was made with the settings wanted now."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfvi_runs import QUIET, RUNS
from sfvi_runs import ensure as make

from fedgp_flower.methods.sgpr.options import FSGPOptions
from fedgp_flower.options import Value
from fedgp_flower.run.config import RunConfig, flatten
from fedgp_flower.run.registry import default_config, parse_config

ELSEWHERE = {"data-dir", "output-dir", "name", "resume", "threads", "wait-seconds", "round-timeout"}
"""Keys that say where, and how patiently, a run is made, not what comes out of it."""

OTHERS = {
    "adam": {"pvi.evaluations", "pvi.refit-evaluations", "pvi.refit-steps", "pvi.step"},
    "replay": {"pvi.steps", "pvi.first-steps", "pvi.learning-rate", "pvi.step"},
}
"""Keys that a local update does not read."""


def differing(folder: Path, keys: Mapping[str, Any]) -> list[str]:
    """Keys at which the settings kept in a run's folder are not the wanted ones.

    A key that the folder does not know yet counts as having had today's default.
    """
    usual, now = default_config(), parse_config(keys).flat()
    before = flatten(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    names = (
        (now.keys() | before.keys())
        - ELSEWHERE
        - unread(parse_config(keys))
        - OTHERS.get(str(now.get("pvi.local-update")), set())
    )
    return sorted(n for n in names if _same(n, before.get(n, usual.get(n))) != _same(n, now.get(n)))


def unread(config: RunConfig) -> set[str]:
    """Keys whose values make no difference with this method and likelihood."""
    mixes = isinstance(config.options, FSGPOptions) and config.options.may_mix(config)
    return set() if mixes else {"model.hyperparameters"}


def _same(name: str, value: Value | None) -> Value | None:
    """Of a data set only the file counts, wherever it lies."""
    return Path(str(value)).name if name == "dataset" else value


def complete(folder: Path, keys: Mapping[str, Any]) -> bool:
    """Whether the run is there to its end, with these settings."""
    return (folder / "metrics.json").exists() and not differing(folder, keys)


def discard_stale(folder: Path, keys: Mapping[str, Any]) -> None:
    """Remove a run that was made, or begun, with other settings, and say so."""
    changed = differing(folder, keys) if (folder / "config.toml").exists() else []
    if changed:
        print(f"{folder.name}: made with other {', '.join(changed)}; once more", flush=True)
        shutil.rmtree(folder)


def ensure(experiment: str, name: str, sites: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run with these settings; made, made again, or gone on with where need be."""
    discard_stale(RUNS / experiment / name, {**QUIET, **keys})
    return make(experiment, name, sites, keys)
