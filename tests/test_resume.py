"""A run that is killed and resumed ends where it would have ended; a site's memory is kept within a run."""

import csv
import json
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, Killed, Recorder, alike, configured, csv_nodes, fill, no_waiting, run, waves
from flwr.app import Context, RecordDict
from safetensors.numpy import save

from fedgp_flower import server_app
from fedgp_flower.agreement import Column
from fedgp_flower.clients import state as memory
from fedgp_flower.data.sites import RawSite, load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.lazy import Lazy
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.run.artefacts import read_posterior
from fedgp_flower.run.registry import parse_config

KEYS = {"method": "fsgp", "averaging__fraction": 0.5, "averaging__server_optimizer": "fedadam"}
ROUNDS = 6


def killed():
    raise Killed


def execute(folder, kill_at=0, then=killed, resume=False, keys=KEYS, nodes=3):
    """The ServerApp over three sites; killed after the history of a round, before its checkpoint."""

    def progress(row, total):
        if row["round"] == kill_at:
            then()

    kept = {"evaluate_every": 3, "name": "run", "output_dir": str(folder), "resume": resume}
    flat = configured(**keys, num_server_rounds=ROUNDS, **kept)
    with no_waiting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgp_flower.run.report.write_report", lambda path: None)
        return server_app.execute(FaultyGrid(flat, nodes), flat, progress)


def read(path):
    with (path / "history.csv").open() as lines:
        return json.loads((path / "metrics.json").read_text()), list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return execute(tmp_path_factory.mktemp("calm"))


def test_a_killed_run_ends_where_it_would_have_ended(tmp_path, calm):
    """Bytes and seconds of its history are those of each round."""
    kills = (3, ROUNDS)
    for kill in kills:
        with pytest.raises(Killed):
            execute(tmp_path, kill_at=kill, resume=kill > kills[0])
    resumed = execute(tmp_path, resume=True)
    (expected, history), (found, own) = read(calm), read(resumed)
    for name in ("test", "test_standardised"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12)
    for name, value in expected["method_details"].items():
        same = found["method_details"][name]
        assert same == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), name
    assert [row["round"] for row in own] == [str(n) for n in range(1, ROUNDS + 1)]
    greeting = int(own[2]["bytes_up"]) - int(history[2]["bytes_up"])
    assert 0 < greeting < int(history[0]["bytes_up"])  # the sites introduce themselves to the new process
    spare = 200  # bytes; a record may be a few shorter or longer when its texts are
    for number, (row, other) in enumerate(zip(own, history, strict=True), 1):
        assert row["objective"] == other["objective"]
        assert row["test_nll"] == other["test_nll"]
        assert int(row["bytes_up"]) == pytest.approx(int(other["bytes_up"]) + greeting * (number in kills), abs=spare)
    assert sum(int(row["bytes_up"]) for row in own) <= found["bytes"]["up"]
    assert sum(float(row["seconds"]) for row in own) <= found["seconds"]["total"] * (1 + 1e-9)
    alike(read_posterior(resumed).arrays, read_posterior(calm).arrays)


def test_sites_of_a_resumed_run_describe_the_target_before_its_transformation(tmp_path):
    """Their sums are of the transformed target, and no contradiction."""
    frames = {str(k): waves(40, k).assign(y=lambda own: np.exp(3 + own["y"])) for k in range(3)}
    run = {"keys": {"method": "sgpr", "transform__target": "log"}, "nodes": csv_nodes(tmp_path, frames)}
    with pytest.raises(Killed):
        execute(tmp_path, kill_at=2, **run)
    found, history = read(execute(tmp_path, resume=True, **run))
    assert found["failures"] == []
    assert len(history) > 2


def test_a_full_disk_ends_the_run_with_words_and_nothing_is_lost(disk, calm):
    with pytest.raises(RunError, match=r"cannot write .*: No space left"):
        execute(disk, kill_at=4, then=lambda: fill(disk))
    (disk / "filler").unlink()
    resumed = execute(disk, resume=True)
    alike(read_posterior(resumed).arrays, read_posterior(calm).arrays)


def test_a_site_that_does_not_return_ends_the_segment():
    recorder = Recorder()
    run(FaultyGrid(configured(), 3), recorder)
    nodes = [{"partition-id": index, "num-partitions": 3} for index in (1, 2)]
    resumed = run(FaultyGrid(configured(num_server_rounds=8), nodes), Recorder(), recorder.snapshots[-1])
    assert resumed.current.sites == ("1", "2")
    assert resumed.current.rows == sum(resumed.preparation.rows[site] for site in "12")


def context(**node_config):
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})


def updated(run):
    state = memory.SiteState(run)
    state.replace({"a": np.arange(3.0), "b": np.array(2.5)})
    return state


def same(one, other):
    alike = all(np.array_equal(array, other.arrays.get(name)) for name, array in one.arrays.items())
    facts = [(own.run, own.updates, own.arrays.keys()) for own in (one, other)]
    return alike and facts[0] == facts[1]


def test_a_restarted_node_finds_its_file_and_counts_on(tmp_path):
    folder = str(tmp_path / "state")
    memory.save_state(context(**{"state-dir": folder}), updated("r1"))
    again = memory.load_state(context(**{"state-dir": folder}), "r1")
    assert same(again, updated("r1"))
    again.replace(again.arrays)
    memory.save_state(context(**{"state-dir": folder}), again)
    assert memory.load_state(context(**{"state-dir": folder}), "r1").updates == 2
    assert memory.load_state(context(**{"state-dir": folder}), "r2").updates == 0
    assert memory.load_state(context(), "r1").updates == 0
    for content in (b"not a state", save({"a": np.zeros(1)})):
        (tmp_path / "state" / "site-state.safetensors").write_bytes(content)
        assert same(memory.load_state(context(**{"state-dir": folder}), "r1"), memory.SiteState("r1"))
    node = context()
    memory.save_state(node, updated("r1"))
    assert same(memory.load_state(node, "r1"), updated("r1"))


def site(*values):
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": list(values)})
    return RawSite("a", "a", 0, frame, frame[:0], ("x",), "y")


def test_a_site_refuses_other_rows_within_a_run_and_says_so(tmp_path):
    folder = {"state-dir": str(tmp_path), "data-path": "/data/north.csv"}
    node = context(**folder)
    memory.require_same_rows(node, "r1", site(1, 2, 3))
    memory.require_same_rows(node, "r1", site(1, 2, 3))
    for other in (node, context(**folder)):  # in memory, and after a restart
        with pytest.raises(DataError, match=r"north\.csv is no longer the table with which this site entered the run"):
            memory.require_same_rows(other, "r1", site(1, 2, 4))
    memory.require_same_rows(context(**folder), "r2", site(1, 2, 4))
    other = tmp_path / "other"
    memory.require_same_rows(context(**{"state-dir": str(other)}), "r2", site(1, 2, 4))
    kept = [json.loads((path / "site-rows.json").read_text()) for path in (tmp_path, other)]
    assert kept[0]["rows"] != kept[1]["rows"]  # the same rows, salted


SCALES = {"input_mean": np.array([0.5]), "input_scale": np.array([2.0]), "target_mean": 1.0, "target_scale": 3.0}
AGREED = Preparation((Column("x", "numeric"),), Column("y", "numeric"), **SCALES)
CONFIG = parse_config({})


def prepared(node, run="r1", agreed=AGREED):
    rules = Rules("query.statistics").read(node.node_config)

    def read(applied):
        return applied.site(load_site(CONFIG, node.node_config))

    return memory.prepared_site(node, (run, CONFIG, agreed), rules, read), rules.decisions


def edited(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def test_a_later_message_reads_prepared_rows_and_no_table(tmp_path, monkeypatch):
    [node] = csv_nodes(tmp_path, {"a": waves(30, 0)})
    columns = tuple(Column(name, "numeric") for name in waves(30, 0).columns[:-1])
    agreed = replace(AGREED, columns=columns, input_mean=np.zeros(len(columns)), input_scale=np.ones(len(columns)))
    node = context(**node, **{"state-dir": str(tmp_path / "state")})
    (first, decisions), path = prepared(node, agreed=agreed), tmp_path / "state" / memory.PREPARED_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(Lazy, "__getattr__", lambda *_: pytest.fail("pandas was imported"))
        later, again = prepared(node, agreed=agreed)
        one, other = first.encode(agreed), later.encode(agreed)
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("x", "y", "x_test", "y_test"))
    assert isinstance(later, memory.PreparedSite)
    assert json.dumps(list(map(asdict, again))) == json.dumps(list(map(asdict, decisions))) != "[]"
    assert later.num_examples == first.num_examples
    assert (later.site, later.features, later.target) == (first.site, first.features, first.target)
    pd.testing.assert_frame_equal(later.train, first.train)


@pytest.mark.parametrize(
    ("file", "spoil", "run"),
    [
        ("a.csv", edited("0.1", "0.2"), "r1"),
        ("sites.toml", edited("0", "1"), "r1"),
        (f"state/{memory.PREPARED_FILE}", lambda path: path.write_bytes(b"none"), "r1"),
        ("a.csv", lambda path: None, "r2"),
    ],
    ids=["table", "policy", "damaged", "run"],
)
def test_prepared_rows_of_something_else_are_made_anew(tmp_path, file, spoil, run):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 2)), columns=["x", "y"]).round(3)
    frame.loc[0, "x"] = 0.1
    [node] = csv_nodes(tmp_path, {"a": frame})
    node = context(**node, **{"state-dir": str(tmp_path / "state")})
    prepared(node)
    assert isinstance(prepared(node)[0], memory.PreparedSite)
    spoil(tmp_path / file)
    assert not isinstance(prepared(node, run)[0], memory.PreparedSite)
    assert isinstance(prepared(node, run)[0], memory.PreparedSite)
