"""Partitioned variational inference as a federation does it, with lying and starved sites."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, blamed, configured, csv_nodes, each, lost, numbers, run, waves
from faults import arrays as other_arrays

from fedgp_flower import server_app
from fedgp_flower.errors import RunError
from fedgp_flower.methods.pvi.messages import NaturalParameters, PseudoPoints
from fedgp_flower.methods.pvi.state import Contribution, factor_strengths
from fedgp_flower.run import report
from fedgp_flower.run.predict import Predictor
from strategies.pvi import forget_site, state_of
from strategies.pvi_updates import PVIState

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


ADAM = {"pvi__local_update": "adam", "pvi__steps": 2}
SYNCHRONOUS = {"pvi__schedule": "synchronous", "pvi__damping": 1.0, "num_server_rounds": 1}


def changed(**values: Any) -> Any:
    """A reply whose arrays of these names (``__`` for a dot) are functions of what they were."""

    def apply(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        new = {name.replace("__", "."): change for name, change in values.items()}
        return {name: new[name](array) if name in new else array for name, array in own.items()}

    return other_arrays(apply)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (changed(values__eta2=lambda a: 500.0 * np.eye(len(a))), "negative eigenvalue"),
        (changed(values__eta2=lambda a: np.diag([1.0, -1.0, -1.0, -1.0, -1.0])), "negative eigenvalue"),
        (changed(values__eta1=lambda a: np.full_like(a, 1e200)), "numbers above"),
        (changed(values__eta2=lambda a: a + np.triu(np.ones_like(a), 1)), "not symmetric"),
    ],
)
def test_a_lying_factor_of_u_ends_no_run(lie: Any, words: str) -> None:
    flat = quick(**ADAM, pvi__factor="cpo")
    strategy = run(FaultyGrid(flat, SITES, Fault("0", lie, ("train",))))
    assert words in blamed(strategy)["0"][0]
    assert set(strategy.current.sites) == {"1", "2"}
    assert strategy.evaluation is not None


def test_a_refused_update_moves_no_averaged_inducing_points() -> None:
    lie = changed(hyper__eta2=lambda a: np.full_like(a, 1e20), inducing__value=lambda a: a + 1e6)
    flat = quick(**ADAM, pvi__inducing="average", **SYNCHRONOUS)
    strategy = run(FaultyGrid(flat, SITES, Fault("1", lie, ("train",))))
    assert "no damping" in blamed(strategy)["1"][0]
    assert np.abs(strategy.current.shared["inducing"].value).max() < 100
    assert strategy.current.record.visits == {"0": 1, "2": 1}


def test_a_round_of_improper_updates_alone_changes_nothing() -> None:
    """And a run of such rounds alone has no result."""
    improper = changed(hyper__eta2=lambda a: np.full_like(a, 1e20))
    lies = [Fault(site, improper, ("train",), range(1, 2)) for site in "012"]
    recorder = Recorder()
    run(FaultyGrid(quick(**ADAM | SYNCHRONOUS | {"num_server_rounds": 2}), SITES, *lies), recorder)
    states = [state_of(snapshot) for snapshot in recorder.snapshots]
    assert (states[0].record.visits, states[0].version) == ({}, 0)
    assert "objective" not in recorder.rows[0]
    assert states[1].record.visits == {"0": 1, "1": 1, "2": 1}
    with pytest.raises(RunError, match="no damping makes its update proper"):
        run(FaultyGrid(quick(**ADAM, **SYNCHRONOUS), SITES, *lies))


def test_visits_of_a_forgotten_site_stay_on_the_abscissa_of_the_history(tmp_path: Path) -> None:
    nodes = csv_nodes(tmp_path, {name: waves(20, seed) for seed, name in enumerate("abc")})
    before, after = Recorder(), Recorder()
    asynchronous = {**ADAM, "pvi__schedule": "asynchronous"}
    whole = run(FaultyGrid(quick(**asynchronous), nodes), before)
    flat = quick(**asynchronous, num_server_rounds=whole.round + 1)
    left = run(FaultyGrid(flat, [nodes[0], nodes[2]]), after, forget_site(before.snapshots[-1], "b"))
    assert after.rows[-1]["visits"] == SITES + 1
    assert sum(left.current.record.visits.values()) == SITES


def test_strengths_of_factors() -> None:
    diagonal = NaturalParameters(np.zeros(2), np.array([-1.0, -2.0]))  # precisions 2 and 4
    full = NaturalParameters(np.zeros(2), -0.5 * np.diag([3.0, 1.0]))
    points = PseudoPoints(np.zeros((3, 1)), np.zeros(3), np.array([1.0, 2.0, 3.0]))
    sites = {
        "a": Contribution({"hyper": diagonal}, points),
        "b": Contribution({"whitened": full}),
        "c": Contribution({"values": full}),
    }
    assert factor_strengths(PVIState({}, sites, rows={"a": 20, "b": 30, "c": 40})) == {
        "a": {"rows": 20, "points": 3, "weight": pytest.approx(14.0), "hyper": pytest.approx(3.0)},
        "b": {"rows": 30, "directions": pytest.approx(0.75 + 0.5)},
        "c": {"rows": 40, "values": pytest.approx(2.0)},
    }
