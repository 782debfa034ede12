"""``examples/own_flower_app``: a Flower app of a user's own, in one process, on Ray, and on real SuperNodes."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedgp_flower.deploy.launch import HOST, SIMULATION
from fedgp_flower.deploy.processes import Processes, free_ports
from fedgp_flower.deploy.submission import COMPLETED, Flower, environment, install_profiles, program
from fedgp_flower.run.in_process import InProcessGrid, simulated_nodes

APP = Path(__file__).resolve().parents[1] / "examples" / "own_flower_app"


def keys(rounds: int) -> tuple[str, str]:
    """The run configuration; an exchange with real SuperNodes takes seconds, however little it carries."""
    return "--run-config", f"num-rounds={rounds} sites=2"


def module(name: str) -> Any:
    """A module of the example, which is no package."""
    spec = importlib.util.spec_from_file_location(f"own_flower_app_{name}", APP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def judged(printed: str, rounds: int = 2) -> None:
    """A figure after each round, and the arrays of the result."""
    lines = [line for line in printed.splitlines() if "RMSE" in line]
    assert len(lines) == rounds
    assert f"round {rounds}: RMSE 0." in lines[-1]
    assert "inducing points: (15, 2)" in printed


def test_it_is_short() -> None:
    lines = [line for path in APP.glob("*.py") for line in path.read_text().splitlines()]
    assert len([line for line in lines if line.strip()]) <= 40


def test_it_runs_in_one_process_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = InProcessGrid(module("client_app").app, {}, simulated_nodes(2))
    context = Context(1, 1, {}, RecordDict(), {"num-rounds": 2, "sites": 2})
    module("server_app").main(grid, context)
    judged(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


def log_of(flower: Flower, rounds: int, *options: str) -> str:
    """Submit the app, wait for its end, and return what it printed."""
    run = str(flower.json("run", str(APP), flower.connection, *keys(rounds), *options)["run-id"])
    status, details = flower.outcome(run)
    log = flower.processes.call([program("flwr"), "log", run, flower.connection, "--show"], flower.home).stdout
    assert status == COMPLETED, f"{details}\n{log}"
    return str(log)


@pytest.mark.long
@pytest.mark.simulation
def test_it_runs_in_flowers_simulation(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    install_profiles(tmp_path)
    with tempfile.TemporaryDirectory(prefix="fedgp-", ignore_cleanup_errors=True) as scratch:
        variables = environment(tmp_path) | {
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "RAY_TMPDIR": scratch,
        }
        with Processes(variables, tmp_path / "logs") as processes:
            flower = Flower(processes, tmp_path, SIMULATION)
            options = ["--insecure", "--simulation", "--host", HOST, "--port", str(port)]
            processes.start("superlink", [program("flower-superlink"), *options], tmp_path)
            flower.wait_until_ready(f"http://{HOST}:{port}")
            judged(log_of(flower, 2, "--federation-config", "num-supernodes=2 client-resources-num-cpus=1"))
