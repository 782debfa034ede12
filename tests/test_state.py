"""A site's memory: kept within a run, found again after a restart, never taken into another run."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, Recorder, blamed, configured, csv_nodes, run, waves
from flwr.app import Context, RecordDict

from fedgp_flower.clients.rows import require_same_rows
from fedgp_flower.clients.state import SiteState, load_state, save_state
from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import DataError


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


def site(*values: float) -> RawSite:
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": list(values)})
    return RawSite("a", "a", 0, frame, frame[:0], ("x",), "y")


def test_a_site_refuses_other_rows_within_a_run_and_says_so(tmp_path):
    folder = {"state-dir": str(tmp_path), "data-path": "/data/north.csv"}
    node = context(**folder)
    require_same_rows(node, "r1", site(1, 2, 3))
    require_same_rows(node, "r1", site(1, 2, 3))
    for other in (node, context(**folder)):  # in memory, and after a restart
        with pytest.raises(DataError, match=r"north\.csv is no longer the table with which this site entered the run"):
            require_same_rows(other, "r1", site(1, 2, 4))
    require_same_rows(context(**folder), "r2", site(1, 2, 4))
    other = tmp_path / "other"
    require_same_rows(context(**{"state-dir": str(other)}), "r2", site(1, 2, 4))
    kept = [json.loads((path / "site-rows.json").read_text()) for path in (tmp_path, other)]
    assert kept[0]["rows"] != kept[1]["rows"]  # the same rows, salted


def test_a_table_that_is_swapped_in_the_middle_of_a_run_is_seen_by_the_site(tmp_path):
    nodes = csv_nodes(tmp_path, {name: waves(30, seed) for seed, name in enumerate("abc")})
    recorder = Recorder(at={2: lambda: waves(30, 9).to_csv(tmp_path / "b.csv", index=False)})
    strategy = run(FaultyGrid(configured(), nodes), recorder)
    [(name, reasons)] = blamed(strategy).items()
    assert name == "b"
    assert all("b.csv is no longer the table" in reason for reason in reasons)
    assert strategy.current.sites == ("a", "c")
