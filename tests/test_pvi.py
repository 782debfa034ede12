"""Partitioned variational inference as a federation does it: through the engine, against closed forms."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultyGrid, blamed, configured, csv_nodes, each, lost, numbers, run, waves
from faults import arrays as other_arrays

from fedgp_flower import server_app
from fedgp_flower.run import report
from fedgp_flower.run.predict import Predictor

QUICK = {"pvi__steps": 4, "pvi__local_update": "adam"}
SITES = 3


def keys(**changes: Any) -> dict[str, Any]:
    return configured(**{"method": "pvi", "num_server_rounds": SITES, **changes})


def quick(**changes: Any) -> dict[str, Any]:
    return keys(**{**QUICK, **changes})


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_other_likelihoods_predict_from_what_was_saved(tmp_path: Path, likelihood: str) -> None:
    frames = {name: waves(40, seed) for seed, name in enumerate("ab")}
    for frame in frames.values():
        if likelihood == "bernoulli":
            frame["y"] = np.where(frame["y"] > 0, "yes", "no")
        if likelihood == "poisson":
            frame["y"] = np.random.default_rng(0).poisson(np.exp(0.5 + frame["y"]))
    nodes = csv_nodes(tmp_path, frames)
    flat = quick(model__likelihood=likelihood, output_dir=str(tmp_path), name="r")
    folder = server_app.execute(FaultyGrid(flat, nodes), flat, lambda row, total: None)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert np.isfinite(metrics["test"]["nll"])
    assert metrics["method_details"]["free_energy"]["fit"] < 0
    arrays, kernel = Predictor.of_run(folder).saved.arrays, metrics["method_details"]["relevance"]["kernel"]
    assert kernel["log_sd"] == pytest.approx(arrays["hyper.scale"][1:3], rel=1e-12)  # after the amplitude
    assert kernel["value"] == pytest.approx(np.exp(arrays["hyper.mean"][1:3]), rel=1e-12)
    table = Predictor.of_run(folder).predict(frames["a"][["x1", "x2"]])
    assert np.isfinite(table.to_numpy()).all()


def execute(folder: Path, **changes: Any) -> Path:
    flat = quick(**{"output_dir": str(folder), "name": "run", **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda path: None)
        return server_app.execute(FaultyGrid(flat, SITES), flat, lambda row, total: None)


def rows_in(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("update", ["adam", "natural-gradient"])
def test_the_saved_posterior_predicts_what_sites_scored(tmp_path: Path, update: str) -> None:
    folder = execute(tmp_path, keep_predictions=True, pvi__local_update=update)
    rows = [row for row in rows_in(folder / "predictions.csv") if row["site"] == "1"]
    inputs = np.array([[float(row[name]) for name in row if name.startswith("input.")] for row in rows])
    mean, sd = Predictor.of_run(folder)(inputs)
    assert mean == pytest.approx(np.array([float(row["mean"]) for row in rows]), rel=1e-9)
    assert sd == pytest.approx(np.array([float(row["sd"]) for row in rows]), rel=1e-9)


def unequal(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**own, "points.targets": own["points.targets"][1:]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (each(lambda array: np.full_like(array, np.nan)), "not finite"),
        (lost, "no reply"),
        (numbers(num_examples=3), "rows"),
        (other_arrays(unequal), "one number"),
        (each(lambda array: array * 1e20), "numbers above"),
    ],
)
def test_a_bad_answer_is_its_sites_failure_and_changes_nothing(change: Any, words: str) -> None:
    flat = quick(num_server_rounds=4)
    strategy = run(FaultyGrid(flat, SITES, Fault("1", change, ("train",))))
    assert words in blamed(strategy)["1"][0]
    assert set(strategy.current.sites) == {"0", "2"}
    assert strategy.current.record.visits == {"0": 2, "2": 1}
    assert strategy.evaluation is not None


def test_a_site_without_held_out_rows_scores_none_of_them(tmp_path: Path) -> None:
    nodes = csv_nodes(tmp_path, {name: waves(20, seed) for seed, name in enumerate("ab")})
    strategy = run(FaultyGrid(quick(test_fraction=0.0, num_server_rounds=1), nodes))
    assert blamed(strategy) == {}
    assert strategy.evaluation is None
