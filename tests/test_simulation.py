"""The launcher, from start to end: real SuperLink, real Ray, real data, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgp_flower.cli import run_in_process
from fedgp_flower.launch import complete_config, parse_assignments
from fedgp_flower.processes import ProcessEntry, belonging, from_proc

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
]
SMALL = ["num-server-rounds=2", "model.num-inducing=8", "evaluate-every=0", "baselines.pooled=false"]


class Launch:
    """The launcher as a process of its own; ``children`` are all processes that descend from it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "fedgp_flower.launch", "--sites", "2", "name=run", f"output-dir={folder}"]
        command += [*SMALL, *words]
        with (folder / "out.txt").open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
        self.children: dict[int, ProcessEntry] = {}

    def watch(self, until: str = "") -> str:
        """Note every descendant until the launcher ends or its output holds ``until``; returns the output."""
        while self.process.poll() is None and not (until and until in self.output):
            table = from_proc("")
            own = {pid: entry for pid, entry in table.items() if pid == self.process.pid}
            self.children |= {p: e for p, e in belonging(table, self.children | own).items() if p not in own}
            time.sleep(0.2)
        return self.output

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text(errors="replace")

    def survivors(self) -> list[int]:
        table = from_proc("")
        return list(belonging(table, self.children))


@pytest.fixture
def scratch_is_empty_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray keeps its sockets during a run; nothing of it may stay."""
    scratch = Path(os.path.realpath("/tmp")) / f"t{os.getpid()}"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield scratch
    left = list(scratch.glob("fedgp-*"))
    subprocess.run(["rm", "-rf", str(scratch)], check=True)
    assert left == []


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
    assert launch.survivors() == []
    config = parse_assignments([*SMALL, "name=in-process", f"output-dir={tmp_path}"])
    beside = json.loads((run_in_process(complete_config(config, tmp_path), 2) / "metrics.json").read_text())
    assert beside["test"] == pytest.approx(metrics["test"], rel=1e-6)  # Ray and one process agree


def test_a_run_that_fails_says_so_and_leaves_no_process(tmp_path: Path, scratch_is_empty_again: Path) -> None:
    launch = Launch(tmp_path, "dataset=no-such-data", "wait-seconds=20.0")
    output = launch.watch()
    assert launch.process.returncode == 1, output
    assert "error: the run ended as finished:failed" in output
    assert "no-such-data" in output
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert launch.survivors() == []


def test_an_interrupted_run_leaves_no_process(tmp_path: Path, scratch_is_empty_again: Path) -> None:
    launch = Launch(tmp_path, "num-server-rounds=100000", "fsgp.tolerance=0.0")
    launch.watch(until="round 1/")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(timeout=60) == 128 + signal.SIGTERM, launch.output
    assert len(launch.children) > 4
    assert launch.survivors() == []
