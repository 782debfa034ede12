"""Prediction from a run's folder alone is what the sites themselves predicted, and what the written equation says."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from scipy.stats import norm

from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.errors import RunError
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import QUANTILES, Predictor, predict_file
from fedgp_flower.run.registry import METHODS, parse_config
from fedgp_flower.run.user_config import read_config

BASE = {"baselines.local-only": False, "baselines.pooled": False, "evaluate-every": 0, "model.num-inducing": 7}
SITES = 3


def table(rows: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"age": rng.uniform(20, 80, rows), "dose": rng.lognormal(3, 0.5, rows)})
    frame["sex"], frame["clinic"] = rng.choice(["f", "m"], rows), rng.choice(["north", "south", "west"], rows)
    effect = frame["clinic"].map({"north": 0.0, "south": 8.0, "west": -5.0}) + 4 * (frame["sex"] == "m")
    frame["outcome"] = 300 + frame["age"] + 9 * np.sin(frame["dose"] / 9) + effect + rng.normal(0, 3, rows)
    return frame


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    table().to_csv(folder / "mixed.csv", index=False)
    keys = {"dataset": str(folder / "mixed.csv"), "output-dir": str(folder), "name": "run", "num-server-rounds": 4}
    return run_in_process(BASE | keys | {"model.kernel": "rbf"}, SITES)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """A run with one input, whose predictions are kept with it; another kernel and no ARD."""
    keys = {"dataset": "sine", "split": 0, "num-server-rounds": 1, "model.kernel": "matern52", "model.ard": False}
    return run_in_process(BASE | keys | {"output-dir": str(tmp_path_factory.mktemp("line")), "name": "run"}, SITES)


def test_the_saved_posterior_predicts_what_every_site_predicted(mixed):
    told = pd.read_csv(mixed / "predictions.csv", dtype={"site": str})
    sites = load_all_sites(parse_config(read_config(mixed / "config.toml")), SITES)
    predictor = Predictor.of_run(mixed)
    assert set(told["site"]) == {site.site for site in sites}
    for site in sites:
        own, again = told[told["site"] == site.site], predictor.predict(site.test)
        np.testing.assert_allclose(own["target"], site.test["outcome"], rtol=1e-12)
        np.testing.assert_allclose(again["mean"], own["mean"], rtol=1e-10)
        np.testing.assert_allclose(again["sd"], own["sd"], rtol=1e-10)


def test_a_kernel_whose_package_is_missing_is_named(line):
    run = read_run(line)
    elsewhere = replace(run, saved=replace(run.saved, model={**run.saved.model, "kernel": "brownian"}))
    with pytest.raises(RunError, match=r"run was made with 'brownian': .*expected a sum .* Install the package"):
        Predictor.of(elsewhere)


def test_a_file_of_new_rows_is_predicted_row_by_row(line, tmp_path):
    told = pd.read_csv(line / "predictions.csv")
    shuffled = told.sample(frac=1, random_state=0)
    ids = [f"00{number}" for number in range(len(told))]
    new = pd.DataFrame({"sd": "own", "x": shuffled["input.x"], "id": ids, "note": None})
    new.to_csv(tmp_path / "new.csv", index=False)
    assert predict_file({"": Predictor.of_run(line)}, tmp_path / "new.csv", tmp_path / "out.csv")[:2] == (len(told), 0)
    found = pd.read_csv(tmp_path / "out.csv", dtype={"id": str})
    assert list(found)[:5] == ["input.sd", "id", "note", "mean", "sd"]
    assert list(found["id"]) == ids
    assert found["note"].isna().all()
    np.testing.assert_allclose(found["mean"], shuffled["mean"], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found["sd"], shuffled["sd"], rtol=1e-10)
    for level in QUANTILES:
        expected = norm.ppf(level, shuffled["mean"], shuffled["sd"])
        np.testing.assert_allclose(found[f"q{100 * level:g}"], expected, rtol=1e-9, atol=1e-9)


def test_rows_beyond_all_training_rows_are_marked(line, tmp_path):
    predictor = Predictor.of_run(line)
    mean, scale = float(predictor.preparation.input_mean[0]), float(predictor.preparation.input_scale[0])
    frame = pd.DataFrame({"x": [mean, mean + 5.7 * scale, mean - 9 * scale]})
    assert predictor.outside(frame).tolist() == ["", "x", "x"]
    frame.to_csv(tmp_path / "new.csv", index=False)
    assert predict_file({"": predictor}, tmp_path / "new.csv", tmp_path / "out.csv") == (3, 0, 2)
    assert pd.read_csv(tmp_path / "out.csv")["outside"].fillna("").tolist() == ["", "x", "x"]


def by_hand(run, inputs):
    """The equation of posterior.json in numpy, for an RBF kernel: mean and sd in original units."""
    a, facts = load_file(run / "posterior.safetensors"), json.loads((run / "posterior.json").read_text())
    x, z = (inputs - a["input.mean"]) / a["input.scale"], a["inducing.locations"]

    def k(left, right):
        apart = (left[:, None, :] - right[None, :, :]) / a["kernel.lengthscale"].reshape(-1)
        return a["kernel.outputscale"] * np.exp(-0.5 * (apart**2).sum(axis=2))

    jitter = facts["model"]["jitter"] * a["kernel.outputscale"]
    factor = np.linalg.cholesky(k(z, z) + jitter * np.eye(len(z)))
    w = np.linalg.solve(factor, k(z, x))  # a = L⁻¹ k(Z, x), a column per row
    mean = w.T @ a["inducing.mean"]
    unexplained = a["kernel.outputscale"] - (w**2).sum(axis=0)
    variance = unexplained + np.einsum("in,ij,jn->n", w, a["inducing.covariance"], w) + a["likelihood.noise"]
    return mean * a["target.scale"] + a["target.mean"], np.sqrt(variance) * a["target.scale"]


def encoded(frame):
    """Inputs in the order of the schema: two levels are one indicator, three are three."""
    columns = [frame["age"], frame["dose"], frame["sex"] == "m"]
    columns += [frame["clinic"] == level for level in ("north", "south", "west")]
    return np.stack(columns, axis=1).astype(float)


def test_the_equation_beside_the_posterior_is_the_prediction_whatever_the_order_and_the_levels(mixed, tmp_path):
    new = table(20)
    new.loc[[3, 7], "clinic"] = "east"
    new[["clinic", "sex", "dose", "age"]].to_csv(tmp_path / "new.csv", index=False)
    assert predict_file({"": Predictor.of_run(mixed)}, tmp_path / "new.csv", tmp_path / "out.csv")[:2] == (20, 2)
    mean, sd = by_hand(mixed, encoded(new))
    found = pd.read_csv(tmp_path / "out.csv")
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-8)
    np.testing.assert_allclose(found["sd"], sd, rtol=1e-8)
    assert np.corrcoef(mean, new["outcome"])[0, 1] > 0.8  # a prediction of something


def test_a_method_without_a_shared_posterior_says_so(tmp_path):
    keys = {"dataset": "five-blocks", "method": "fgpr", "num-server-rounds": 1, "output-dir": str(tmp_path)}
    run = run_in_process(BASE | keys | {"name": "run"}, 2)
    assert not (run / "posterior.safetensors").exists()
    with pytest.raises(RunError, match=r"no posterior to predict from.*`method` = 'fgpr'") as caught:
        Predictor.of_run(run)
    assert METHODS["fgpr"].why_no_posterior in str(caught.value)
