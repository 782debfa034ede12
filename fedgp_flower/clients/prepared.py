"""A real site's rows as messages use them, kept beside its state: a later message reads no table, imports no pandas.

Flower starts a process for each message of a real site. What is kept is of one run, one configuration, one agreement
on columns and scales, and files of rows and policy with the same bytes; anything else is removed and made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedgp_flower.clients.state import file_of, write_private
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.privacy.policy import Decision, Rules
from fedgp_flower.typing import NamedArrays

FILE = "site-prepared.safetensors"
FACTS = ("site", "label", "target", "dropped")


class PreparedSite(RawSite):
    """A site with its encoded rows, which reads its tables when something first asks for them."""

    __slots__ = ("_load",)

    def __init__(self, facts: Mapping[str, Any], encoded: dict[bytes, SiteData], load: Callable[[], RawSite]) -> None:
        for name, value in {**facts, "partitions": 0, "_encoded": encoded, "_load": load}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """One of the tables, which are not there at first."""
        if name not in {"train", "test"}:
            raise AttributeError(name)
        raw = self._load()
        for part in ("train", "test"):
            object.__setattr__(self, part, getattr(raw, part))
        return getattr(raw, name)

    @property
    def num_examples(self) -> int:
        """Training rows."""
        return len(next(iter(self._encoded.values())).y)


def prepared_site(
    context: Context,
    run: tuple[str, RunConfig, Preparation | None],
    rules: Rules,
    load: Callable[[Rules], RawSite],
) -> RawSite:
    """The site as a message of a run may know it: from what is kept, else as ``load`` has it, which is then kept."""
    preparation, path = run[2], file_of(context, FILE)
    if preparation is None or path is None or "data-path" not in context.node_config:
        return load(rules)
    key = _key(context, run[0], run[1], preparation)
    found = _read(path, key)
    if found is not None:
        facts, arrays, decisions = found
        rules.decisions += decisions
        encoded = {preparation.fingerprint(): SiteData(**arrays, unknown_levels=facts.pop("unknown_levels"))}
        return PreparedSite(facts, encoded, lambda: load(replace(rules, decisions=[])))
    path.unlink(missing_ok=True)
    before = len(rules.decisions)
    site = load(rules)
    _write(path, key, site, site.encode(preparation), rules.decisions[before:])
    return site


def _key(context: Context, run: str, config: RunConfig, preparation: Preparation) -> str:
    """A hash of all that the encoded rows follow from."""
    digest = hashlib.sha256(json.dumps([run, config.flat(), dict(context.node_config)], sort_keys=True).encode())
    digest.update(preparation.fingerprint())
    for name in ("data-path", "test-path", "policy"):
        path = Path(str(context.node_config.get(name) or "")).expanduser()
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"none")
    return digest.hexdigest()


def _write(path: Path, key: str, site: RawSite, data: SiteData, decisions: list[Decision]) -> None:
    arrays: NamedArrays = {name: np.ascontiguousarray(getattr(data, name)) for name in ("x", "y", "x_test", "y_test")}
    facts = {name: getattr(site, name) for name in FACTS} | {"features": site.features}
    facts |= {"unknown_levels": data.unknown_levels}
    words = {"facts": json.dumps(facts), "decisions": json.dumps([asdict(entry) for entry in decisions])}
    write_private(path, save(arrays, {"key": key, "sum": _sum(arrays, words), **words}))


def _read(path: Path, key: str) -> tuple[dict[str, Any], NamedArrays, list[Decision]] | None:
    """Facts, arrays and decisions; None where they are of something else, or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            words = file.metadata()
            arrays = {name: file.get_tensor(name) for name in list(file.keys())} if words["key"] == key else {}
        if words.pop("key") != key or words.pop("sum") != _sum(arrays, words):
            return None
        facts = json.loads(words["facts"])
        decisions = [Decision(**entry) for entry in json.loads(words["decisions"])]
        return {**facts, "features": tuple(facts["features"])}, arrays, decisions
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def _sum(arrays: NamedArrays, words: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps([words["facts"], words["decisions"]]).encode())
    for name in sorted(arrays):
        digest.update(repr((name, arrays[name].shape)).encode() + arrays[name].tobytes())
    return digest.hexdigest()
