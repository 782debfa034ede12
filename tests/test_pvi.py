"""Partitioned variational inference as a federation does it, with lying and starved sites, and forgetting."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, blamed, configured, csv_nodes, each, run, run_of_units, waves
from faults import arrays as other_arrays
from torch.distributions import MultivariateNormal, kl_divergence

from fedgp_flower import server_app
from fedgp_flower.count_scores import log_rate_of
from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods.counts import Counts
from fedgp_flower.gp.likelihoods.point import NONE
from fedgp_flower.methods.pvi import panels as pvi_figures
from fedgp_flower.methods.pvi.messages import NaturalParameters, PseudoPoints
from fedgp_flower.run import forget
from fedgp_flower.run.artefacts import read_run, site_named
from fedgp_flower.run.predict import Predictor
from fedgp_flower.scores import TargetUnits
from strategies.pvi import forget_site, state_of
from strategies.pvi_state import Contribution, PVIState, factor_strengths

QUICK = {"pvi__steps": 4, "pvi__local_update": "adam"}
SITES = 3


def quick(**changes):
    return configured(**{"method": "pvi", "num_server_rounds": SITES, **QUICK, **changes})


def executed(folder, sites=SITES, **changes):
    known = {"output_dir": str(folder), "name": "run", "num_server_rounds": sites, "keep_predictions": True}
    flat = quick(**{**known, **changes})
    return server_app.execute(FaultyGrid(flat, sites), flat, lambda row, total: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return executed(tmp_path_factory.mktemp("finished"), baselines__pooled=True, baselines__max_evaluations=4)


def test_the_saved_posterior_predicts_what_sites_scored(tmp_path, finished):
    for folder in (finished, executed(tmp_path, pvi__local_update="sums", pvi__steps=0)):
        rows = pd.read_csv(folder / "predictions.csv").query("site == 1")
        found = Predictor.of(read_run(folder))(rows.filter(like="input.").to_numpy())
        np.testing.assert_allclose(found, rows[["mean", "sd"]].T, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_arrays(lambda own: {**own, "points.targets": own["points.targets"][1:]}), "differ in number"),
        (each(lambda array: array * 1e20), "numbers above"),
    ],
)
def test_a_bad_answer_is_its_sites_failure_and_changes_nothing(change, words):
    strategy = run(FaultyGrid(quick(num_server_rounds=4), SITES, Fault("1", change, ("train",))))
    assert words in blamed(strategy)["1"][0]
    assert set(strategy.current.sites) == {"0", "2"}
    assert strategy.current.record.visits == {"0": 2, "2": 1}
    assert strategy.evaluation is not None


def test_a_site_without_held_out_rows_scores_none_of_them(tmp_path):
    nodes = csv_nodes(tmp_path, {name: waves(20, seed) for seed, name in enumerate("ab")})
    strategy = run(FaultyGrid(quick(test_fraction=0.0, num_server_rounds=1), nodes))
    assert blamed(strategy) == {}
    assert strategy.evaluation is None


def test_counts_are_scored_as_counts(tmp_path):
    frame = waves(80, 1).assign(y=lambda t: np.floor(np.exp(t.y)), unit=np.arange(80) % 2, split="train")
    frame.loc[60:, "split"] = "test"
    keys = {"method": "pvi", "num_server_rounds": 2, **QUICK}
    done = read_run(run_of_units(tmp_path, frame, **keys, model__likelihood="poisson"))
    rows, found = done.predictions, done.metrics.test
    moments, units = log_rate_of(rows["mean"].to_numpy(), rows["sd"].to_numpy()), TargetUnits(0.0, 1.0)
    wanted = Counts().scores(*moments, rows["target"].to_numpy(), NONE, units)
    assert found["crps"] == pytest.approx(wanted.sums["crps"] / len(rows))
    assert found["coverage_95"] == pytest.approx(wanted.sums["inside-95"] / len(rows))


ADAM = {"pvi__local_update": "adam", "pvi__steps": 2}
SYNCHRONOUS = {"pvi__schedule": "synchronous", "pvi__damping": 1.0, "num_server_rounds": 1}


def improper(own):
    return own | {"hyper.eta2": np.full_like(own["hyper.eta2"], 1e20)}


def test_a_refused_update_moves_no_averaged_inducing_points():
    lie = other_arrays(lambda own: improper(own) | {"inducing.value": own["inducing.value"] + 1e6})
    flat = quick(**ADAM, pvi__inducing="average", **SYNCHRONOUS)
    strategy = run(FaultyGrid(flat, SITES, Fault("1", lie, ("train",))))
    assert strategy.details()["budgets"] == []  # `pvi.exchanges` is for sums
    assert "no damping" in blamed(strategy)["1"][0]
    assert np.abs(strategy.current.shared["inducing"].value).max() < 100
    assert strategy.current.record.visits == {"0": 1, "2": 1}


def test_a_round_of_improper_updates_alone_changes_nothing():
    """And a run of such rounds alone has no result."""
    lies = [Fault(site, other_arrays(improper), ("train",), range(1, 2)) for site in "012"]
    recorder = Recorder()
    run(FaultyGrid(quick(**ADAM | SYNCHRONOUS | {"num_server_rounds": 2}), SITES, *lies), recorder)
    states = [state_of(snapshot) for snapshot in recorder.snapshots]
    assert (states[0].record.visits, states[0].version) == ({}, 0)
    assert "objective" not in recorder.rows[0]
    assert states[1].record.visits == {"0": 1, "1": 1, "2": 1}
    with pytest.raises(RunError, match="no damping makes its update proper"):
        run(FaultyGrid(quick(**ADAM, **SYNCHRONOUS), SITES, *lies))


def test_visits_of_a_forgotten_site_stay_on_the_abscissa_of_the_history(tmp_path):
    nodes = csv_nodes(tmp_path, {name: waves(20, seed) for seed, name in enumerate("abc")})
    before, after = Recorder(), Recorder()
    asynchronous = {**ADAM, "pvi__schedule": "asynchronous"}
    whole = run(FaultyGrid(quick(**asynchronous), nodes), before)
    flat = quick(**asynchronous, num_server_rounds=whole.round + 1)
    left = run(FaultyGrid(flat, [nodes[0], nodes[2]]), after, forget_site(before.snapshots[-1], "b"))
    assert after.rows[-1]["visits"] == SITES + 1
    assert sum(left.current.record.visits.values()) == SITES


def test_strengths_of_factors():
    diagonal = NaturalParameters(np.zeros(2), np.array([-1.0, -2.0]))  # precisions 2 and 4
    full = NaturalParameters(np.zeros(2), -0.5 * np.diag([3.0, 1.0]))
    points = PseudoPoints(np.zeros((3, 1)), np.zeros(3), np.array([1.0, 2.0, 3.0]))
    sites = {"b": Contribution({"whitened": full}), "c": Contribution({"values": full})}
    sites["a"] = Contribution({"hyper": diagonal}, points)
    assert factor_strengths(PVIState({}, sites, rows={"a": 20, "b": 30, "c": 40})) == {
        "a": {"rows": 20, "points": 3, "weight": pytest.approx(14.0), "hyper": pytest.approx(3.0)},
        "b": {"rows": 30, "directions": pytest.approx(0.75 + 0.5)},
        "c": {"rows": 40, "values": pytest.approx(2.0)},
    }


def forgotten(run, site, rounds=1):
    folder = forget.forget(run, site, rounds=rounds, name=f"left-{site}")
    return folder, json.loads((folder / "forgotten.json").read_text())


def test_both_figures_are_over_the_rows_of_the_sites_that_remain(finished):
    run = finished
    left, record = forgotten(run, "1")
    assert read_run(run).metrics.pooled is not None
    assert read_run(left).metrics.pooled is None  # it would learn from the forgotten rows
    for when, folder in (("before", run), ("after", left)):
        rows, found = pd.read_csv(folder / "predictions.csv").query("site != 1"), record[f"test_{when}"]
        assert record["test_rows"] == len(rows)
        assert found["rmse"] == pytest.approx(np.sqrt(np.mean((rows["target"] - rows["mean"]) ** 2)), rel=1e-6)
        assert {"nll", "crps", "mae"} <= found.keys()
    assert record["test_before"]["rmse"] != pytest.approx(read_run(run).metrics.test["rmse"])
    assert (record["sites_before"], record["sites_after"]) == (3, 2)
    rows = {row["site"]: row["training_rows"] for row in read_run(run).metrics.per_site}
    assert record["training_rows_removed"] == rows["1"]
    assert record["predictions"]["rms_shift_in_sd"] > 0
    assert all(value > 0 for value in record["divergence"].values())
    assert record["divergence"].keys() == {"inducing", "hyper"}
    page = (left / "report.html").read_text()
    assert f"the same {record['test_rows']:,} held-out rows" in page
    for when in ("before", "after"):
        assert f"{record[f'test_{when}']['nll']:#.4g}".replace("-", "−") in page
    titles = {panel.title for panel in pvi_figures.panels(read_run(run))}
    assert {"Posterior of the hyperparameters", "Strength of each factor", "Free energy"} <= titles
    with pytest.raises(RunError, match="min-sites"):
        forget.forget(left, "0", rounds=0, name="too-few")
    assert not (left.parent / "too-few").exists()


def test_a_site_whose_name_is_the_id_of_another_is_forgotten_by_its_name(tmp_path):
    frame = pd.concat(waves(20, seed).assign(unit=unit) for seed, unit in enumerate("123"))
    frame.to_csv(tmp_path / "units.csv", index=False)
    dealt = {"dataset": str(tmp_path / "units.csv"), "partitioner": "natural", "partition__column": "unit"}
    run = executed(tmp_path, partition__min_rows=2, **dealt)
    assert read_run(run).metrics.labels == {"0": "1", "1": "2", "2": "3"}
    labels = read_run(run).metrics.labels
    assert [site_named(labels, name) for name in ("1", "2", "3", "0", "9")] == ["0", "1", "2", "0", None]
    left, record = forgotten(run, "2", rounds=0)
    assert (record["site"], record["label"]) == ("1", "2")
    assert {row["label"] for row in read_run(left).metrics.per_site} == {"1", "3"}


def test_a_conjugate_run_depends_on_the_site_no_more(tmp_path):
    run = executed(tmp_path, pvi__local_update="sums", pvi__steps=0, pvi__exchanges=4, num_server_rounds=5)
    left, record = forgotten(run, "2", rounds=0)
    saved = [read_run(folder).saved.arrays for folder in (left, run)]
    moments = [[torch.from_numpy(own[f"inducing.{name}"]) for name in ("mean", "covariance")] for own in saved]
    kl = float(kl_divergence(*(MultivariateNormal(*own) for own in moments)))
    assert record["divergence"] == {"whitened": pytest.approx(kl, rel=1e-6)}
    assert len(record["remains"]) == 2  # the standardisation, and the agreed Z and β
