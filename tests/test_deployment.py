"""A federation of real SuperNodes on this machine: TLS, node keys, a CSV file per site, and nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import read_config


def table_of_patients(path: Path, seed: int) -> Path:
    """Dates, gaps and decimal commas; one patient has a ward of which there is no other, at either site."""
    draw = np.random.default_rng(seed)
    age, ward = draw.normal(60, 12, 40), draw.choice(["surgery", "general"], 40).astype(object)
    ward[7] = "burns" if seed == 0 else "eyes"
    days = 3 + 0.1 * age + 2 * (ward == "surgery") + draw.normal(0, 0.5, 40)
    admitted = pd.date_range("2024-01-01", periods=40, freq="9D").strftime("%Y-%m-%d")
    table = pd.DataFrame({"age": np.where(draw.random(40) < 0.1, np.nan, age), "ward": ward, "admitted": admitted})
    table.assign(days=days.round(3)).to_csv(path, index=False, sep=";", decimal=",")
    return path


@pytest.mark.deployment
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
def test_two_sites_with_their_own_files(tmp_path: Path) -> None:
    files = [table_of_patients(tmp_path / f"{name}.csv", place) for place, name in enumerate(("north", "south"))]
    table_of_patients(tmp_path / "south.test.csv", 2)  # the other site holds out rows by itself
    keys = ["method=fgpr", "num-server-rounds=1", "name=run", "target=days", "dates=season", "missing=drop"]
    keys += ["baselines.linear=false", "baselines.local-only=false"]  # each exchange takes seconds
    command = [sys.executable, "-m", "fedgp_flower.cli", "deploy", "demo", *keys, f"output-dir={tmp_path}"]
    command += ["--folder", str(tmp_path / "deploy"), "--data", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [row["site"] for row in metrics["per_site"]] == ["north", "south"]
    assert metrics["failures"] == []
    assert str(tmp_path / "run" / "report.html") in done.stdout
    config = read_config(tmp_path / "run" / "config.toml") | {"dataset": ",".join(map(str, files)), "name": "again"}
    simulated = read_run(run_in_process(config))
    again = simulated.metrics
    assert (simulated.predictions is not None, read_run(tmp_path / "run").predictions) == (True, None)
    assert metrics["test"] == pytest.approx(dict(again.test), rel=1e-9)
    assert metrics["data"]["columns"] == again.data["columns"]
    assert "burns" not in str(again.data)  # a level of one patient counts among others
    assert [row["num_examples"] for row in metrics["per_site"]] == [row["num_examples"] for row in again.per_site]
    (folder,) = (tmp_path / "deploy").iterdir()  # rows stay where they are
    assert not list((folder / "coordinator").rglob("*.csv"))
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert not [line for line in lines if str(tmp_path / "deploy") in line]
