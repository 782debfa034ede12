"""What a site remembers between messages of one run: in the node's Context, and on its disk where it has a folder.

Flower keeps a Context in memory only, so a SuperNode that is restarted has lost it. With ``state-dir`` in the node
configuration the state is also a file, replaced as a whole. It carries the run's id: another run starts empty. The
server compares the count of updates that a site reports with its count and so knows when a site starts afresh.

A site also remembers with which rows it entered a run, and refuses to answer with others. It keeps HMAC(salt, table), a
hash with a salt drawn for the run: neither says anything of the rows to anybody who does not have them.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.files import read_json, write_bytes
from fedgp_flower.lazy import pd
from fedgp_flower.records import array_record, numpy_arrays, record_of
from fedgp_flower.typing import NamedArrays

ARRAYS, FACTS, ROWS = "site-state.arrays", "site-state.facts", "site-rows"
"""Records of the Context."""
STATE_FILE, ROWS_FILE = "site-state.safetensors", "site-rows.json"


def file_of(context: Context, name: str) -> Path | None:
    """A file in the folder that the node has for its state."""
    folder = context.node_config.get("state-dir")
    return None if not folder else Path(str(folder)).expanduser() / name


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that the site's owner alone may read, as a whole; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content, mode=0o600)


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
    record = record_of(context.state, ARRAYS, ArrayRecord)
    if facts is not None and record is not None and facts["run"] == run:
        return SiteState(run, int(str(facts["updates"])), numpy_arrays(record))
    try:
        with safe_open(file_of(context, STATE_FILE) or "", framework="numpy") as file:
            found = file.metadata()
            if found["run"] == run:
                arrays = {name: file.get_tensor(name) for name in list(file.keys())}
                return SiteState(run, int(found["updates"]), arrays)
    except (FileNotFoundError, SafetensorError):
        pass
    return SiteState(run)


def save_state(context: Context, state: SiteState) -> None:
    """Keep the state in the Context and, where the node has a ``state-dir``, on disk."""
    if not state.updates:
        return
    path = file_of(context, STATE_FILE)
    if path is not None:
        arrays = {name: array.copy(order="C") for name, array in state.arrays.items()}
        write_private(path, save(arrays, {"run": state.run, "updates": str(state.updates)}))
    context.state[ARRAYS] = array_record(state.arrays)
    context.state[FACTS] = ConfigRecord({"run": state.run, "updates": state.updates})


def require_same_rows(context: Context, run: str, site: RawSite) -> None:
    """Remember the rows of a real site at its first message of a run, and refuse others later."""
    if site.simulated:
        return
    kept = _kept(context)
    if kept.get("run") != run:
        salt = secrets.token_hex(16)
        _keep(context, {"run": run, "salt": salt, "rows": _fingerprint(site, salt)})
    elif not hmac.compare_digest(kept["rows"], _fingerprint(site, kept["salt"])):
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


def _kept(context: Context) -> dict[str, str]:
    record = record_of(context.state, ROWS, ConfigRecord)
    try:
        path = file_of(context, ROWS_FILE)
        found = record if record is not None or path is None else read_json(path)
    except RunError:
        found = None
    return {name: str(value) for name, value in (found or {}).items()}


def _keep(context: Context, facts: dict[str, str]) -> None:
    path = file_of(context, ROWS_FILE)
    if path is not None:
        write_private(path, json.dumps(facts).encode())
    context.state[ROWS] = ConfigRecord(dict(facts))
