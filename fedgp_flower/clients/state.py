"""What a site remembers between messages of one run: in the node's Context, and on its disk where it has a folder.

Flower keeps a Context in memory only, so a SuperNode that is restarted has lost it. With ``state-dir`` in the node
configuration the state is also a file, replaced as a whole. It carries the run's id: another run starts empty. The
server compares the count of updates a site reports with its own and so knows when a site starts afresh.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedgp_flower.errors import RunError
from fedgp_flower.records import array_record, numpy_arrays, record_of
from fedgp_flower.typing import NamedArrays

ARRAYS, FACTS = "site-state.arrays", "site-state.facts"


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
    path = _file(context)
    return (_read(path, run) if path is not None else None) or SiteState(run)


def save_state(context: Context, state: SiteState) -> None:
    """Keep the state in the Context and, where the node has a ``state-dir``, on disk."""
    if not state.updates:
        return
    path = _file(context)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        facts = {"run": state.run, "updates": str(state.updates)}
        try:
            save_file({name: array.copy(order="C") for name, array in state.arrays.items()}, scratch, metadata=facts)
            scratch.replace(path)  # a kill leaves the old file or the new one, never half of one
        except (OSError, SafetensorError) as error:
            scratch.unlink(missing_ok=True)
            raise RunError(f"cannot write the site's state into {path.parent}: {error}") from None
    context.state[ARRAYS] = array_record(state.arrays)
    context.state[FACTS] = ConfigRecord({"run": state.run, "updates": state.updates})


def _read(path: Path, run: str) -> SiteState | None:
    try:
        with safe_open(path, framework="numpy") as file:
            facts = file.metadata()
            if facts["run"] != run:
                return None
            return SiteState(run, int(facts["updates"]), {name: file.get_tensor(name) for name in list(file.keys())})
    except (FileNotFoundError, SafetensorError):
        return None


def _file(context: Context) -> Path | None:
    folder = context.node_config.get("state-dir")
    return None if not folder else Path(str(folder)).expanduser() / "site-state.safetensors"
