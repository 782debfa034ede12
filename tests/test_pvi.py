"""Partitioned variational inference as a federation does it: through the engine, against closed forms."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, blamed, configured, csv_nodes, each, lost, numbers, run, waves
from faults import arrays as other_arrays

from fedgp_flower import server_app
from fedgp_flower.data.sites import load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import ConfigError, NumericsError
from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.messages import encode
from fedgp_flower.methods.pvi.linear import fixed_point_update, linear_site
from fedgp_flower.methods.pvi.model import Data, sparse_model
from fedgp_flower.methods.pvi.state import posterior
from fedgp_flower.run import forget, report
from fedgp_flower.run.artefacts import read_posterior
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config
from strategies.pvi import forget_site, predictive, state_of
from strategies.pvi_updates import marginals

FIXED = {"pvi__local_update": "analytic"}
QUICK = {"pvi__steps": 4, "pvi__local_update": "adam"}
SITES = 3


def keys(**changes: Any) -> dict[str, Any]:
    return configured(**{"method": "pvi", "num_server_rounds": SITES, **changes})


def fixed(**changes: Any) -> dict[str, Any]:
    return keys(**{**FIXED, **changes})


def quick(**changes: Any) -> dict[str, Any]:
    return keys(**{**QUICK, **changes})


def rows_of(strategy: Any, nodes: list[dict[str, Any]]) -> Data:
    prepared = strategy.preparation
    preparation = Preparation.from_wire(prepared.arrays, prepared.schema)
    data = [load_site(strategy.config, node).encode(preparation) for node in nodes]
    return Data(*(torch.from_numpy(np.concatenate([getattr(own, name) for own in data])) for name in ("x", "y")))


def standard(size: int) -> NaturalGaussian:
    """N(0, I)."""
    return NaturalGaussian.from_moments(torch.zeros(size).double(), torch.eye(size).double())


def whitened(strategy: Any) -> tuple[np.ndarray, np.ndarray]:
    mean, covariance = posterior(strategy.current)["whitened"].moments()
    return mean.numpy(), covariance.numpy()


def titsias(strategy: Any, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of q(v) from the rows of all sites, written with K."""
    z = strategy.current.first["inducing"].reshape(-1, data.inputs.shape[1])
    noise = strategy.config.model.noise

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    x, y = data.inputs.numpy(), data.targets.numpy()
    chol = np.linalg.cholesky(kernel(z, z) + 1e-8 * np.eye(len(z)))
    a = np.linalg.solve(chol, kernel(z, x))
    precision = np.eye(len(z)) + a @ a.T / noise
    return np.linalg.solve(precision, a @ y / noise), np.linalg.solve(precision, np.eye(len(z)))


def simulated(count: int = SITES) -> list[dict[str, Any]]:
    return [{"partition-id": index, "num-partitions": count} for index in range(count)]


def assert_exact(strategy: Any, nodes: list[dict[str, Any]]) -> None:
    for found, expected in zip(whitened(strategy), titsias(strategy, rows_of(strategy, nodes)), strict=True):
        assert found == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"pvi__preset": "vcl"},
        {"pvi__preset": "streaming-vb"},
        {"pvi__preset": "bcm-same"},
        {"pvi__preset": "bcm-split"},
        {"pvi__schedule": "synchronous", "pvi__damping": 1.0},
        {"pvi__schedule": "asynchronous", "pvi__damping": 1.0},
        {"pvi__local_update": "natural-gradient"},
        {"partitioner": "sizes", "partition__ratio": 4.0},
    ],
    ids=str,
)
def test_one_pass_of_a_conjugate_model_is_titsias(schedule: dict[str, Any]) -> None:
    strategy = run(FaultyGrid(fixed(**schedule), SITES))
    if schedule.get("pvi__preset") == "bcm-split":  # the prior is dealt out: p · ∏ t_k with t_k = q_k / p^(N_k/N)
        assert strategy.round == 1
    assert_exact(strategy, simulated())


def test_one_pass_presets_stop_after_every_site() -> None:
    strategy = run(FaultyGrid(fixed(pvi__preset="vcl", num_server_rounds=20), SITES))
    assert strategy.round == SITES
    assert set(strategy.current.record.visits.values()) == {1}


def test_global_vi_is_pooled_gradient_ascent_whatever_the_partition() -> None:
    def moments(sites: int) -> tuple[np.ndarray, np.ndarray]:
        changes = {"pvi__preset": "global-vi", "pvi__learning_rate": 1e-4, "split": -1}
        nodes = [{"partition-id": 0, "num-partitions": 1}] if sites == 1 else simulated(sites)
        return whitened(run(FaultyGrid(fixed(**changes, test_fraction=0.0, min_sites=1), nodes)))

    for one, three in zip(moments(1), moments(SITES), strict=True):
        assert one == pytest.approx(three, rel=1e-9, abs=1e-10)
        assert np.abs(one - np.eye(*one.shape) if one.ndim == 2 else one).max() > 1e-3


def test_asynchronous_one_at_a_time_is_sequential() -> None:
    changes = {"num_server_rounds": 5, "pvi__damping": 1.0}
    one = run(FaultyGrid(quick(**changes), SITES))
    other = run(FaultyGrid(quick(**changes, pvi__schedule="asynchronous", pvi__concurrency=1), SITES))
    same = encode(predictive(other.current))
    for name, array in encode(predictive(one.current)).items():
        assert np.array_equal(same[name], array), name
    assert set(other.current.record.staleness.values()) == {0}


def test_asynchronous_sites_answer_on_what_they_were_given() -> None:
    strategy = run(FaultyGrid(fixed(pvi__schedule="asynchronous", num_server_rounds=4), SITES))
    assert strategy.current.record.staleness == {"0": 2, "1": 1, "2": 2}
    assert strategy.current.record.visits == {"0": 2, "1": 1, "2": 1}


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson", "student-t"])
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


def test_bernoulli_fixed_point_is_that_of_the_pooled_rows(tmp_path: Path) -> None:
    frames = {name: waves(40, seed) for seed, name in enumerate("ab")}
    for frame in frames.values():
        frame["y"] = np.where(frame["y"] > 0, 1, 0)
    nodes = csv_nodes(tmp_path, frames)
    changes = {"pvi__local_update": "natural-gradient", "model__likelihood": "bernoulli", "num_server_rounds": 40}
    strategy = run(FaultyGrid(fixed(**changes), nodes))
    data = rows_of(strategy, nodes)
    model = sparse_model(strategy.config.model, 2)
    latents = marginals(strategy.current).latents()
    prior = standard(strategy.config.model.num_inducing)
    pooled = fixed_point_update(linear_site(model, data, latents), prior, prior.flat(), tolerance=1e-12)
    expected = (prior * pooled.factor).moments()
    for found, wanted in zip(whitened(strategy), expected, strict=True):
        assert found == pytest.approx(wanted.numpy(), rel=1e-6, abs=1e-7)


FORMS: dict[str, dict[str, Any]] = {
    "tied": {},
    "free": {"pvi__local_update": "lbfgs", "pvi__factor": "free"},
    "cpo": {"pvi__factor": "cpo", "pvi__order": "random"},
    "fixed": {"pvi__inducing": "fixed"},
    "average": {"pvi__inducing": "average"},
    "linear": FIXED,
    "damped": {"pvi__schedule": "synchronous"},
}


class Killed(BaseException):
    """Nothing in the program may catch it."""


def execute(folder: Path, *, kill_at: int = 0, **changes: Any) -> Path:
    def progress(row: Any, total: int) -> None:
        del total
        if row["round"] == kill_at:
            raise Killed

    flat = quick(**{"num_server_rounds": 5, "evaluate_every": 2, "output_dir": str(folder), "name": "run", **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda path: None)
        return server_app.execute(FaultyGrid(flat, SITES), flat, progress)


def rows_in(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.long] if index % 3 else []) for index, form in enumerate(FORMS)]
)
def test_a_killed_run_ends_where_it_would_have_ended(tmp_path: Path, form: str) -> None:
    """Sites that come back with no memory change nothing: the server gives each its own factor."""
    whole = execute(tmp_path / "whole", **FORMS[form])
    with pytest.raises(Killed):
        execute(tmp_path / "cut", kill_at=4, **FORMS[form])
    cut = execute(tmp_path / "cut", resume=True, **FORMS[form])
    expected, found = (json.loads((path / "metrics.json").read_text()) for path in (whole, cut))
    before, after = expected["method_details"], found["method_details"]
    assert found["test"] == pytest.approx(expected["test"], rel=1e-8)  # a BLAS rounds by where arrays lie in memory
    assert after["free_energy"]["fit"] == pytest.approx(before["free_energy"]["fit"], rel=1e-8)
    assert (after["visits"], after["halvings"]) == (before["visits"], before["halvings"])
    objectives = [[float(row["objective"]) for row in rows_in(path / "history.csv")] for path in (whole, cut)]
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-8)


def test_the_saved_posterior_predicts_what_sites_scored(tmp_path: Path) -> None:
    folder = execute(tmp_path, keep_predictions=True)
    rows = [row for row in rows_in(folder / "predictions.csv") if row["site"] == "1"]
    inputs = np.array([[float(row[name]) for name in row if name.startswith("input.")] for row in rows])
    mean, sd = Predictor.of_run(folder)(inputs)
    assert mean == pytest.approx(np.array([float(row["mean"]) for row in rows]), rel=1e-9)
    assert sd == pytest.approx(np.array([float(row["sd"]) for row in rows]), rel=1e-9)


def test_forgetting_is_never_having_had_the_site(tmp_path: Path) -> None:
    nodes = csv_nodes(tmp_path, {name: waves(30, seed) for seed, name in enumerate("abc")})
    recorder = Recorder()
    strategy = run(FaultyGrid(fixed(), nodes), recorder)
    state = state_of(forget_site(recorder.snapshots[-1], "b"))
    mean, covariance = posterior(state)["whitened"].moments()
    expected = titsias(strategy, rows_of(strategy, [nodes[0], nodes[2]]))
    assert mean.numpy() == pytest.approx(expected[0], rel=1e-8, abs=1e-8)
    assert covariance.numpy() == pytest.approx(expected[1], rel=1e-8, abs=1e-8)
    assert list(state.record.visits) == ["a", "c"]
    assert state.record.forgotten == ("b",)


def test_forgetting_a_run_leaves_the_posterior_of_the_other_sites(tmp_path: Path) -> None:
    folder = execute(tmp_path, **{**FIXED, "num_server_rounds": SITES})
    going_on = forget.prepare(folder, "1", rounds=1, name="left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda path: None)
        left = run_in_process(going_on.flat, 0, going_on.nodes)
    forget.record(folder, left, "1", 1)
    arrays = read_posterior(left).arrays
    precision = np.eye(5) - 2.0 * arrays["factor.whitened.eta2"]
    strategy = run(FaultyGrid(fixed(), SITES))
    expected = titsias(strategy, rows_of(strategy, [simulated()[0], simulated()[2]]))
    assert precision @ expected[1] == pytest.approx(np.eye(5), rel=1e-8, abs=1e-8)
    assert np.linalg.solve(precision, arrays["factor.whitened.eta1"]) == pytest.approx(expected[0], rel=1e-7, abs=1e-8)
    assert [row["round"] for row in rows_in(left / "history.csv")] == ["1", "2", "3", "4"]
    assert json.loads((left / "forgotten.json").read_text())["site"] == "1"
    with pytest.raises(NumericsError, match="'1'"):
        forget.prepare(left, "1", rounds=0, name="again")
    assert (folder / "metrics.json").exists()


def test_free_energy_of_the_parts_is_the_collapsed_bound() -> None:
    """Titsias' bound with dense matrices."""
    strategy = run(FaultyGrid(fixed(), SITES))
    data = rows_of(strategy, simulated())
    mean, covariance = titsias(strategy, data)
    z, noise = strategy.current.first["inducing"].reshape(-1, 1), strategy.config.model.noise
    x, y = data.inputs.numpy(), data.targets.numpy()
    kernel = lambda a, b: np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))  # noqa: E731
    a = np.linalg.solve(np.linalg.cholesky(kernel(z, z) + 1e-8 * np.eye(len(z))), kernel(z, x))
    marginal = a.T @ a + noise * np.eye(len(y))
    evidence = -0.5 * (y @ np.linalg.solve(marginal, y) + np.linalg.slogdet(2 * np.pi * marginal)[1])
    bound = evidence - (len(y) - (a * a).sum()) / (2 * noise)
    assert strategy.details()["free_energy"]["total"] == pytest.approx(bound, rel=1e-8)
    assert mean.shape == (5,)
    assert covariance.shape == (5, 5)


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


def test_an_improper_factor_is_damped_and_counted() -> None:
    """A factor of negative precision that would make q improper at ρ = 1, as after a gradient step that is too long."""

    def spoilt(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**own, "whitened.eta2": 0.9 * np.eye(5)}

    faults = [Fault("1", other_arrays(spoilt), ("train",))]
    strategy = run(FaultyGrid(keys(pvi__local_update="gradient", pvi__learning_rate=1e-3), SITES, *faults))
    assert strategy.current.record.halvings > 0
    assert strategy.current.record.refused == 0
    assert posterior(strategy.current)["whitened"].is_proper()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pvi__deletion": False}, "deletion"),
        ({"pvi__local_update": "analytic", "model__likelihood": "bernoulli"}, "model.likelihood"),
        ({"pvi__preset": "bcm-split", "pvi__factor": "cpo"}, "pvi.preset"),
        ({"pvi__local_update": "lbfgs", "optimizer__batch_size": 5}, "optimizer.batch-size"),
        ({"precision": "float32"}, "precision"),
        ({"pvi__damping": 0.5, "pvi__inducing": "fixed"}, "nothing to damp"),
        ({"optimizer__steps": 20}, "pvi.steps"),
        ({"optimizer__learning_rate": 0.01}, "pvi.learning-rate"),
    ],
)
def test_keys_that_do_not_go_together(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_config(keys(**{"pvi__local_update": "adam", **changes}))
