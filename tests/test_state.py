"""A site's memory: kept within a run, found again after a restart, never taken into another run."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedgp_flower.clients.state import SiteState, load_state, save_state


def context(**node_config) -> Context:
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})


def updated(run: str) -> SiteState:
    state = SiteState(run)
    state.replace({"a": np.arange(3.0), "b": np.array(2.5)})
    return state


def same(one: SiteState, other: SiteState) -> bool:
    arrays = one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(one.arrays[k], other.arrays[k]) and one.arrays[k].shape == other.arrays[k].shape
        for k in one.arrays
    )
    return arrays and (one.run, one.updates) == (other.run, other.updates)


def test_the_context_carries_the_state_of_its_run():
    node = context()
    save_state(node, updated("r1"))
    assert same(load_state(node, "r1"), updated("r1"))
    assert same(load_state(node, "r2"), SiteState("r2"))


def test_a_restarted_node_finds_its_file_and_counts_on(tmp_path):
    folder = str(tmp_path / "state")
    save_state(context(**{"state-dir": folder}), updated("r1"))
    again = load_state(context(**{"state-dir": folder}), "r1")
    assert same(again, updated("r1"))
    again.replace(again.arrays)
    save_state(context(**{"state-dir": folder}), again)
    assert load_state(context(**{"state-dir": folder}), "r1").updates == 2
    assert load_state(context(**{"state-dir": folder}), "r2").updates == 0
    assert load_state(context(), "r1").updates == 0


def test_a_kill_while_writing_leaves_the_state_before(tmp_path, monkeypatch):
    node = {"state-dir": str(tmp_path)}
    save_state(context(**node), updated("r1"))
    second = updated("r1")
    second.replace({"a": np.zeros(1)})
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_state(context(**node), second)
    monkeypatch.undo()
    assert same(load_state(context(**node), "r1"), updated("r1"))


def test_a_damaged_file_is_a_fresh_start(tmp_path):
    (tmp_path / "site-state.safetensors").write_bytes(b"not a state")
    assert same(load_state(context(**{"state-dir": str(tmp_path)}), "r1"), SiteState("r1"))
