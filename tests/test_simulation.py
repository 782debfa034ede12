"""``fedgp simulate``, from start to end: real SuperLink, real Ray, real data, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
from faults import alike

from fedgp_flower.deploy.processes import family
from fedgp_flower.run.artefacts import read_posterior
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import complete_config, parse_assignments

pytestmark = pytest.mark.simulation
SMALL = ("model.num-inducing=8", "evaluate-every=0")
SMALL += ("baselines.linear=false", "baselines.local-only=false", "baselines.pooled=false")


class Launch:
    """The launcher with ``words`` of the run configuration; ``children`` are all processes that descend from it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.children = folder, set[psutil.Process]()
        command = [sys.executable, "-m", "fedgp_flower.cli", "simulate", "--sites", "2", "name=run"]
        command += [f"output-dir={folder}", *SMALL, *words]
        with (folder / "out.txt").open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)

    def watch(self, until: str = "") -> str:
        """Note every descendant until the launcher ends or its output holds ``until``; returns the output."""
        launcher = psutil.Process(self.process.pid)
        while self.process.poll() is None and not (until and until in self.output):
            self.children |= family("none", {launcher, *self.children}) - {launcher}
            time.sleep(1)
        return self.output

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text(errors="replace")

    def require_nothing_left(self) -> None:
        """SuperLink, ServerApp, and Ray with its workers were seen, and are gone."""
        assert len(self.children) > 4
        assert family("none", self.children) == set()


@pytest.fixture(autouse=True)
def _scratch_is_empty_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Ray keeps its sockets during a run; nothing of it may stay."""
    scratch = Path(os.path.realpath("/tmp")) / f"t{os.getpid()}"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield
    left = list(scratch.glob("fedgp-*"))
    subprocess.run(["rm", "-rf", str(scratch)], check=True)
    assert left == []


METHODS = dict.fromkeys(("fsgp", "fedmgp", "sfvi"), ()) | {"pvi": ("pvi.local-update=adam", "pvi.steps=10")}


@pytest.mark.parametrize("method", ["fsgp", *(pytest.param(m, marks=pytest.mark.long) for m in METHODS if m != "fsgp")])
def test_ray_and_one_process_give_the_same_posterior(method: str, tmp_path: Path) -> None:
    """The run prints its figures and leaves results, and no process."""
    rounds = 1 if method == "fsgp" else 4
    keys = [f"method={method}", "dataset=diabetes", f"num-server-rounds={rounds}", *METHODS[method]]
    launch = Launch(tmp_path, *keys)
    output = launch.watch()
    assert launch.process.returncode == 0, output
    launch.require_nothing_left()
    words = [*SMALL, *keys, "name=in-process", f"output-dir={tmp_path}"]
    folders = [tmp_path / "run", run_in_process(complete_config(parse_assignments(words)), 2)]
    there, here = (json.loads((folder / "metrics.json").read_text()) for folder in folders)
    assert (there["method"], there["sites"], there["failures"]) == (method, 2, [])
    assert f"{there['test']['nll']:.4g}" in output
    assert str(tmp_path / "run" / "report.html") in output
    assert (tmp_path / "run" / "report.html").is_file()
    if method == "pvi":
        assert there["method_details"]["visits"] == {"0": 2, "1": 2}
    assert here["test"] == pytest.approx(there["test"], rel=1e-6)
    objectives = [pd.read_csv(folder / "history.csv")["objective"] for folder in folders]
    np.testing.assert_allclose(objectives[1], objectives[0], rtol=1e-6)
    arrays = [read_posterior(folder).arrays for folder in folders]
    assert set(arrays[0]) == set(arrays[1])
    alike(*arrays, rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_a_run_that_fails_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "dataset=no-such-data", "wait-seconds=20.0")
    output = launch.watch()
    assert launch.process.returncode == 1, output
    assert "error: the run ended as finished:failed" in output
    assert "no-such-data" in output
    assert [words for words in ("Traceback", "Exit Code", "exception occurred") if words in output] == []
    assert not (tmp_path / "run" / "metrics.json").exists()
    launch.require_nothing_left()


@pytest.mark.long
def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "method=fsgp", "num-server-rounds=100000")
    launch.watch(until="round 1 of")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(timeout=60) == 128 + signal.SIGTERM, launch.output
    launch.require_nothing_left()
