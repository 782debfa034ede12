"""A federation of real SuperNodes on this machine: TLS, node keys, a CSV file per site, and nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedgp_flower.data.sites import write_partition
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.user_config import read_config

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
]


def test_two_sites_with_their_own_files(tmp_path: Path) -> None:
    files = write_partition(parse_config({"dataset": "diabetes"}), 2, tmp_path / "data")
    files[0].with_suffix(".test.csv").unlink()  # this site holds out rows by itself
    keys = ["method=fsgp", "num-server-rounds=1", "model.num-inducing=8", "name=run"]
    keys += ["baselines.linear=false", "baselines.local-only=false", "keep-predictions=false"]
    command = [sys.executable, "-m", "fedgp_flower.cli", "deploy", "demo", *keys, f"output-dir={tmp_path}"]
    command += ["--folder", str(tmp_path / "deploy"), "--data", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [row["site"] for row in metrics["per_site"]] == ["site-00", "site-01"]
    assert metrics["failures"] == []
    assert str(tmp_path / "run" / "report.html") in done.stdout
    config = read_config(tmp_path / "run" / "config.toml") | {"dataset": ",".join(map(str, files)), "name": "again"}
    again = read_run(run_in_process(config)).metrics
    assert metrics["test"] == pytest.approx(dict(again.test), rel=1e-9)
    assert [row["num_examples"] for row in metrics["per_site"]] == [row["num_examples"] for row in again.per_site]
    (folder,) = (tmp_path / "deploy").iterdir()  # rows stay where they are
    assert not list((folder / "coordinator").rglob("*.csv"))
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert not [line for line in lines if str(tmp_path / "deploy") in line]
