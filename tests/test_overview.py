"""What is said of the data before training, with and without a run."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FaultyGrid, configured, csv_nodes, no_waiting, waves
from test_missing_cells import patients

from fedgp_flower import server_app
from fedgp_flower.cli import main
from fedgp_flower.config import CoreConfig
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.check import check


def hospitals(folder: Path) -> list[Path]:
    """Three, one of which weighs in grams."""
    frames = {name: patients(seed=k) for k, name in enumerate(["north", "south", "grams"])}
    frames["grams"]["weight"] *= 1000
    csv_nodes(folder, frames)
    return [folder / f"{name}.csv" for name in frames]


IMPUTED = CoreConfig.model_validate({"missing": "impute", "test-fraction": 0.0})


def test_tables_are_summed_up_as_a_run_would(tmp_path: Path) -> None:
    found = check(hospitals(tmp_path), IMPUTED)
    assert found.problems == ()
    counted = {key: found.data[key] for key in ("sites", "rows", "inputs", "dropped")}
    assert counted == {"sites": 3, "rows": 267, "inputs": 5, "dropped": 3}
    age, weight, ward = found.data["columns"]
    gone = [patients(seed=k).dropna(subset=["y"]).isna().sum() for k in range(3)]
    assert (age["missing"], ward["missing"]) == (sum(own["age"] for own in gone), sum(own["ward"] for own in gone))
    assert (age["differs"], weight["differs"]) == ([], ["grams"])
    assert (ward["kind"], ward["levels"], ward["inputs"]) == ("text", 3, 3)


def test_every_problem_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    north, south, _ = hospitals(tmp_path)
    patients().assign(ward=[f"id {k}" for k in range(90)]).to_csv(tmp_path / "ids.csv", index=False)
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(north), str(south), str(tmp_path / "ids.csv"), "missing=impute"])
    assert stopped.value.code == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "`ward` has" in out
    assert "as an identifier has" in out
    assert "178 training rows at 2 sites, 2 rows left out for a missing cell; 5 inputs of 3 columns" in out
    with pytest.raises(SystemExit):
        main(["check", str(north)])
    assert "set `missing` to" in capsys.readouterr().out


def test_a_run_says_it_before_training_and_in_its_report(tmp_path: Path, caplog: Any) -> None:
    frames = {str(k): waves(60, k).assign(x1=lambda own, k=k: own["x1"] + 50 * (k == 2)) for k in range(3)}
    flat = configured(sites=3, num_server_rounds=1, output_dir=str(tmp_path), name="run")
    with no_waiting(), caplog.at_level(logging.INFO):
        folder = server_app.execute(FaultyGrid(flat, csv_nodes(tmp_path, frames)), flat, lambda row, total: None)
    words = ["144 training rows at 3 sites; 2 inputs of 2 columns", "`x1`: mean far from that of the other sites at 2"]
    assert [own.message for own in caplog.records if own.name == "fedgp.data"] == words
    page = (folder / "report.html").read_text()
    assert all(line.replace("`", "") in page for line in words)
    assert read_run(folder).metrics.data["rows"] == 144
    assert np.isfinite(read_run(folder).metrics.data["columns"][0]["mean"])
