"""``examples/own_flower_app``: a Flower app that a user writes, in one process."""

import runpy
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedgp_flower.run.in_process import InProcessGrid, simulated_nodes

APP = Path(__file__).resolve().parents[1] / "examples" / "own_flower_app"


def test_it_runs_in_one_process_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints a figure after each round, and the arrays of the result."""
    monkeypatch.chdir(tmp_path)
    grid = InProcessGrid(runpy.run_path(f"{APP}/client_app.py")["app"], {}, simulated_nodes(2))
    runpy.run_path(f"{APP}/server_app.py")["main"](grid, Context(1, 1, {}, RecordDict(), {"num-rounds": 2, "sites": 2}))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "RMSE" in line]
    assert (len(lines), "round 2: RMSE 0." in lines[-1]) == (2, True)
    assert "inducing points: (15, 2)" in printed
    assert list(tmp_path.iterdir()) == []
