"""A run that is killed and resumed ends where it would have ended, and its history tells it once."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FaultyGrid, Killed, Recorder, configured, fill, no_waiting, run

from fedgp_flower import server_app
from fedgp_flower.errors import RunError
from fedgp_flower.run.artefacts import read_posterior

KEYS = {"method": "fsgp", "averaging__fraction": 0.5, "averaging__server_optimizer": "fedadam"}
ROUNDS = 6


def killed() -> None:
    raise Killed


def execute(folder: Path, kill_at: int = 0, then: Callable[[], None] = killed, resume: bool = False) -> Path:
    """The ServerApp over three sites; killed after the history of a round, before its checkpoint."""

    def progress(row: Mapping[str, float], total: int) -> None:
        if row["round"] == kill_at:
            then()

    kept = {"evaluate_every": 3, "name": "run", "output_dir": str(folder), "resume": resume}
    flat = configured(**KEYS, num_server_rounds=ROUNDS, **kept)
    with no_waiting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgp_flower.run.report.write_report", lambda path: None)
        return server_app.execute(FaultyGrid(flat, 3), flat, progress)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    with (path / "history.csv").open() as lines:
        return json.loads((path / "metrics.json").read_text()), list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute(tmp_path_factory.mktemp("calm"))


def test_a_killed_run_ends_where_it_would_have_ended(tmp_path: Path, calm: Path) -> None:
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
    for name, array in read_posterior(calm).arrays.items():
        assert np.array_equal(read_posterior(resumed).arrays[name], array), name


def test_a_full_disk_ends_the_run_with_words_and_nothing_is_lost(disk: Path, calm: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*: No space left"):
        execute(disk, kill_at=4, then=lambda: fill(disk))
    (disk / "filler").unlink()
    resumed = execute(disk, resume=True)
    for name, array in read_posterior(calm).arrays.items():
        assert np.array_equal(read_posterior(resumed).arrays[name], array), name


def test_a_site_that_does_not_return_ends_the_segment() -> None:
    recorder = Recorder()
    run(FaultyGrid(configured(), 3), recorder)
    nodes = [{"partition-id": index, "num-partitions": 3} for index in (1, 2)]
    resumed = run(FaultyGrid(configured(num_server_rounds=8), nodes), Recorder(), recorder.snapshots[-1])
    assert resumed.current.sites == ("1", "2")
    assert resumed.current.rows == sum(resumed.preparation.rows[site] for site in "12")
