"""The launcher, from start to end: real SuperLink, real Ray, real data, and nothing left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import SMALL, Launch, scratch_left_empty

from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import complete_config, parse_assignments

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
]


@pytest.fixture
def scratch_is_empty_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with scratch_left_empty(monkeypatch) as scratch:
        yield scratch


def test_a_run_completes_and_leaves_results_and_no_process(tmp_path: Path, scratch_is_empty_again: Path) -> None:
    launch = Launch(tmp_path, "method=fsgp", "dataset=diabetes")
    output = launch.watch()
    assert launch.process.returncode == 0, output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["method"], metrics["sites"], metrics["rounds"], metrics["failures"]) == ("fsgp", 2, 2, [])
    assert f"{metrics['test']['nll']:.4g}" in output
    assert f"{metrics['local_only']['nll']:.4g}" in output
    assert str(tmp_path / "run" / "report.html") in output
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(launch.children) > 4  # SuperLink, ServerApp, and Ray with its workers were seen
    assert launch.survivors() == set()
    config = parse_assignments([*SMALL, "method=fsgp", "name=in-process", f"output-dir={tmp_path}"])
    beside = json.loads((run_in_process(complete_config(config, tmp_path), 2) / "metrics.json").read_text())
    assert beside["test"] == pytest.approx(metrics["test"], rel=1e-6)  # Ray and one process agree


@pytest.mark.long
def test_a_run_that_fails_says_so_and_leaves_no_process(tmp_path: Path, scratch_is_empty_again: Path) -> None:
    launch = Launch(tmp_path, "dataset=no-such-data", "wait-seconds=20.0")
    output = launch.watch()
    assert launch.process.returncode == 1, output
    assert "error: the run ended as finished:failed" in output
    assert "no-such-data" in output
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert launch.survivors() == set()


def test_an_interrupted_run_leaves_no_process(tmp_path: Path, scratch_is_empty_again: Path) -> None:
    launch = Launch(tmp_path, "num-server-rounds=100000")
    launch.watch(until="round 1 of")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(timeout=60) == 128 + signal.SIGTERM, launch.output
    assert len(launch.children) > 4
    assert launch.survivors() == set()
