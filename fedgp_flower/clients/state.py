"""The state of a site between messages of one run: in its Context, and on disk if the node has a ``state-dir``.

A restarted SuperNode loses its Context. A site stores HMAC(salt, table), to refuse other rows later in the run, and the
encoded rows, so that later messages neither read a table nor import pandas.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, SiteData
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.data.tables import held_out_file
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.files import make_folder, read_json, write_bytes
from fedgp_flower.lazy import pd
from fedgp_flower.privacy.policy import Decision, Rules
from fedgp_flower.records import array_record, arrays_of, record_of
from fedgp_flower.typing import NamedArrays

ARRAYS, FACTS, ROWS = "site-state.arrays", "site-state.facts", "site-rows"
STATE_FILE, ROWS_FILE, PREPARED_FILE = "site-state.safetensors", "site-rows.json", "site-prepared.safetensors"


def file_of(context: Context, name: str) -> Path | None:
    """The path of a file in the state folder of the node; None without a ``state-dir``."""
    folder = context.node_config.get("state-dir")
    return None if not folder else Path(str(folder)).expanduser() / name


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only; creates the folder."""
    make_folder(path.parent)
    write_bytes(path, content, mode=0o600)


def _write_arrays(path: Path, arrays: NamedArrays, facts: dict[str, str]) -> None:
    write_private(path, save({name: array.copy(order="C") for name, array in arrays.items()}, facts))


def _read_arrays(path: Path | None, key: str, value: str) -> tuple[NamedArrays, dict[str, str]] | None:
    """Arrays and metadata of a file; None without a file, or if its metadata ``key`` has another value."""
    try:
        with safe_open(path or "", framework="numpy") as file:
            facts: dict[str, str] = file.metadata() or {}
            names = list(file.keys()) if facts.get(key) == value else None
            return None if names is None else ({name: file.get_tensor(name) for name in names}, facts)
    except (OSError, SafetensorError):
        return None


@dataclass(slots=True)
class SiteState:
    """Arrays of a method that never leave the site, and the number of their updates in this run."""

    run: str
    updates: int = 0
    arrays: NamedArrays = field(default_factory=dict)

    def replace(self, arrays: Mapping[str, Any]) -> None:
        """Replace the arrays and count an update."""
        self.arrays = dict(arrays)
        self.updates += 1


def load_state(context: Context, run: str) -> SiteState:
    """The state of a run from the Context, else from disk, else empty."""
    facts = record_of(context.state, FACTS, ConfigRecord)
    if facts is not None and facts["run"] == run:
        return SiteState(run, int(str(facts["updates"])), arrays_of(context.state, ARRAYS))
    arrays, words = _read_arrays(file_of(context, STATE_FILE), "run", run) or ({}, {"updates": "0"})
    return SiteState(run, int(words["updates"]), arrays)


def save_state(context: Context, state: SiteState) -> None:
    """Store the state in the Context, and on disk if the node has a ``state-dir``."""
    path = file_of(context, STATE_FILE)
    if path is not None:
        _write_arrays(path, state.arrays, {"run": state.run, "updates": str(state.updates)})
    context.state[ARRAYS] = array_record(state.arrays)
    context.state[FACTS] = ConfigRecord({"run": state.run, "updates": state.updates})


def require_same_rows(context: Context, run: str, site: RawSite) -> None:
    """Store the hash of a real site's rows at the first message of a run; DataError if later rows differ."""
    if site.simulated:
        return
    path = file_of(context, ROWS_FILE)
    stored: Mapping[str, object] = record_of(context.state, ROWS, ConfigRecord) or {}
    if not stored and path is not None:
        try:
            stored = read_json(path)
        except RunError:
            stored = {}
    if stored.get("run") != run:
        salt = secrets.token_hex(16)
        facts = {"run": run, "salt": salt, "rows": _fingerprint(site, salt)}
        if path is not None:
            write_private(path, json.dumps(facts).encode())
        context.state[ROWS] = ConfigRecord({**facts})
    elif not hmac.compare_digest(str(stored["rows"]), _fingerprint(site, str(stored["salt"]))):
        table = Path(str(context.node_config.get("data-path", "the table"))).name
        raise DataError(
            f"{table} is no longer the table with which this site entered the run; restore it, or start a new run"
        )


def _fingerprint(site: RawSite, salt: str) -> str:
    """HMAC-SHA256 of the training and held-out rows."""
    digest = hmac.new(bytes.fromhex(salt), digestmod="sha256")
    for frame in (site.train, site.test):
        digest.update(json.dumps([list(map(str, frame.columns)), len(frame)]).encode())
        digest.update(pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes())
    return digest.hexdigest()


class PreparedSite(RawSite):
    """A site with encoded rows that reads its tables on first use."""

    __slots__ = ("_load",)

    def __init__(
        self, facts: Mapping[str, object], encoded: dict[bytes, SiteData], load: Callable[[], RawSite]
    ) -> None:
        fields = {**facts, "partitions": 0, "shared_table": False, "_encoded": encoded, "_load": load}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Read the tables, and return one of them."""
        if name not in {"train", "test"}:
            raise AttributeError(name)
        raw = self._load()
        object.__setattr__(self, "train", raw.train)
        object.__setattr__(self, "test", raw.test)
        return getattr(raw, name)

    @property
    def num_examples(self) -> int:
        """The number of training rows."""
        return len(next(iter(self._encoded.values())).y)


def prepared_site(
    context: Context,
    run: tuple[str, RunConfig, Preparation | None],
    rules: Rules,
    load: Callable[[Rules], RawSite],
) -> RawSite:
    """The site of a message, from the prepared file if its hash matches; else from ``load``, which writes that file."""
    preparation, path = run[2], file_of(context, PREPARED_FILE)
    if preparation is None or path is None or "data-path" not in context.node_config:
        return load(rules)
    key = _key(context, run[0], run[1], preparation)
    prepared = _read_arrays(path, "key", key)
    if prepared is not None:
        facts = json.loads(prepared[1]["facts"])
        rules.decisions += [Decision(**entry) for entry in facts.pop("decisions")]
        encoded = {preparation.fingerprint(): SiteData(**prepared[0])}
        facts["features"] = tuple(facts["features"])
        return PreparedSite(facts, encoded, lambda: load(replace(rules, decisions=[])))
    path.unlink(missing_ok=True)
    before = len(rules.decisions)
    site = load(rules)
    facts = {"site": site.site, "label": site.label, "target": site.target, "features": site.features}
    facts |= {"dropped": site.dropped, "decisions": [asdict(entry) for entry in rules.decisions[before:]]}
    _write_arrays(path, site.encode(preparation)._asdict(), {"key": key, "facts": json.dumps(facts)})
    return site


def _key(context: Context, run: str, config: RunConfig, preparation: Preparation) -> str:
    """A hash of everything that determines the encoded rows."""
    digest = hashlib.sha256(json.dumps([run, config.flat(), dict(context.node_config)], sort_keys=True).encode())
    digest.update(preparation.fingerprint())
    paths = [
        Path(str(context.node_config.get(name) or "")).expanduser() for name in ("data-path", "test-path", "policy")
    ]
    for path in (*paths, held_out_file(paths[0]) or Path()):
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"none")
    return digest.hexdigest()
