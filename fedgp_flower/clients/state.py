"""What a site remembers between messages of one run: in its Context, and on its disk where it has a ``state-dir``.

A SuperNode that is restarted has lost its Context. Of its rows a site keeps HMAC(salt, table), to refuse other ones
later, and the encoded rows, so that a later message reads no table and imports no pandas.
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
from fedgp_flower.files import read_json, write_bytes
from fedgp_flower.lazy import pd
from fedgp_flower.privacy.policy import Decision, Rules
from fedgp_flower.records import array_record, arrays_of, record_of
from fedgp_flower.typing import NamedArrays

ARRAYS, FACTS, ROWS = "site-state.arrays", "site-state.facts", "site-rows"
STATE_FILE, ROWS_FILE, PREPARED_FILE = "site-state.safetensors", "site-rows.json", "site-prepared.safetensors"


def file_of(context: Context, name: str) -> Path | None:
    """A file in the folder that the node has for its state."""
    folder = context.node_config.get("state-dir")
    return None if not folder else Path(str(folder)).expanduser() / name


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that the site's owner alone may read, as a whole; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content, mode=0o600)


def _write_arrays(path: Path, arrays: NamedArrays, facts: dict[str, str]) -> None:
    write_private(path, save({name: array.copy(order="C") for name, array in arrays.items()}, facts))


def _read_arrays(path: Path | None, key: str, value: str) -> tuple[NamedArrays, dict[str, str]] | None:
    """Arrays and facts of a file whose fact ``key`` has this value; None without such a file."""
    try:
        with safe_open(path or "", framework="numpy") as file:
            facts: dict[str, str] = file.metadata()
            names = list(file.keys()) if facts[key] == value else None
            return None if names is None else ({name: file.get_tensor(name) for name in names}, facts)
    except (OSError, SafetensorError):
        return None


@dataclass(slots=True)
class SiteState:
    """Arrays of a method that never leave the site, and how many updates of this run made them."""

    run: str
    updates: int = 0
    arrays: NamedArrays = field(default_factory=dict)

    def replace(self, arrays: Mapping[str, Any]) -> None:
        """Keep these arrays and count an update."""
        self.arrays = dict(arrays)
        self.updates += 1


def load_state(context: Context, run: str) -> SiteState:
    """The state of this run: from the Context, else from the disk, else empty."""
    facts = record_of(context.state, FACTS, ConfigRecord)
    if facts is not None and facts["run"] == run:
        return SiteState(run, int(str(facts["updates"])), arrays_of(context.state, ARRAYS))
    arrays, words = _read_arrays(file_of(context, STATE_FILE), "run", run) or ({}, {"updates": "0"})
    return SiteState(run, int(words["updates"]), arrays)


def save_state(context: Context, state: SiteState) -> None:
    """Keep the state in the Context and, where the node has a ``state-dir``, on disk."""
    path = file_of(context, STATE_FILE)
    if path is not None:
        _write_arrays(path, state.arrays, {"run": state.run, "updates": str(state.updates)})
    context.state[ARRAYS] = array_record(state.arrays)
    context.state[FACTS] = ConfigRecord({"run": state.run, "updates": state.updates})


def require_same_rows(context: Context, run: str, site: RawSite) -> None:
    """Remember the rows of a real site at its first message of a run, and refuse others later."""
    if site.simulated:
        return
    path = file_of(context, ROWS_FILE)
    known: Mapping[str, object] = record_of(context.state, ROWS, ConfigRecord) or {}
    if not known and path is not None:
        try:
            known = read_json(path)
        except RunError:
            known = {}
    if known.get("run") != run:
        salt = secrets.token_hex(16)
        facts = {"run": run, "salt": salt, "rows": _fingerprint(site, salt)}
        if path is not None:
            write_private(path, json.dumps(facts).encode())
        context.state[ROWS] = ConfigRecord({**facts})
    elif not hmac.compare_digest(str(known["rows"]), _fingerprint(site, str(known["salt"]))):
        table = Path(str(context.node_config.get("data-path", "the table"))).name
        raise DataError(
            f"{table} is no longer the table with which this site entered the run; put that one back, or start a new"
            " run with this one"
        )


def _fingerprint(site: RawSite, salt: str) -> str:
    digest = hmac.new(bytes.fromhex(salt), digestmod="sha256")
    for frame in (site.train, site.test):
        digest.update(json.dumps([list(map(str, frame.columns)), len(frame)]).encode())
        digest.update(pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes())
    return digest.hexdigest()


class PreparedSite(RawSite):
    """A site with its encoded rows, which reads its tables when something first asks for them."""

    __slots__ = ("_load",)

    def __init__(
        self, facts: Mapping[str, object], encoded: dict[bytes, SiteData], load: Callable[[], RawSite]
    ) -> None:
        fields = {**facts, "partitions": 0, "shared_table": False, "_encoded": encoded, "_load": load}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """One of the tables, which are not there at first."""
        if name not in {"train", "test"}:
            raise AttributeError(name)
        raw = self._load()
        object.__setattr__(self, "train", raw.train)
        object.__setattr__(self, "test", raw.test)
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
    preparation, path = run[2], file_of(context, PREPARED_FILE)
    if preparation is None or path is None or "data-path" not in context.node_config:
        return load(rules)
    key = _key(context, run[0], run[1], preparation)
    kept = _read_arrays(path, "key", key)
    if kept is not None:
        facts = json.loads(kept[1]["facts"])
        rules.decisions += [Decision(**entry) for entry in facts.pop("decisions")]
        encoded = {preparation.fingerprint(): SiteData(**kept[0], unknown_levels=facts.pop("unknown_levels"))}
        facts["features"] = tuple(facts["features"])
        return PreparedSite(facts, encoded, lambda: load(replace(rules, decisions=[])))
    path.unlink(missing_ok=True)
    before = len(rules.decisions)
    site = load(rules)
    rows = site.encode(preparation)
    arrays: NamedArrays = {"x": rows.x, "y": rows.y, "x_test": rows.x_test, "y_test": rows.y_test}
    facts = {"site": site.site, "label": site.label, "target": site.target, "features": site.features}
    facts |= {"dropped": site.dropped, "unknown_levels": rows.unknown_levels}
    facts |= {"decisions": [asdict(entry) for entry in rules.decisions[before:]]}
    _write_arrays(path, arrays, {"key": key, "facts": json.dumps(facts)})
    return site


def _key(context: Context, run: str, config: RunConfig, preparation: Preparation) -> str:
    """A hash of all that the encoded rows follow from."""
    digest = hashlib.sha256(json.dumps([run, config.flat(), dict(context.node_config)], sort_keys=True).encode())
    digest.update(preparation.fingerprint())
    paths = [
        Path(str(context.node_config.get(name) or "")).expanduser() for name in ("data-path", "test-path", "policy")
    ]
    for path in (*paths, held_out_file(paths[0]) or Path()):
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"none")
    return digest.hexdigest()
