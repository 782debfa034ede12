"""Prediction from a run's folder is what sites predicted and what the written equation says; transformed targets."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from scipy import stats
from scipy.integrate import quad

import fedgp_flower as fg
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.messages import add
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor, predict_file
from fedgp_flower.run.registry import methods, parse_config
from fedgp_flower.run.user_config import read_config
from fedgp_flower.scores import transformed_moments, transformed_quantiles, transformed_scores
from fedgp_flower.shared_messages import TargetMoments
from fedgp_flower.transforms import Transform
from strategies.server.enrolment import chosen

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
    predictor = Predictor.of(read_run(mixed))
    assert set(told["site"]) == {site.site for site in sites}
    for site in sites:
        own, again = told[told["site"] == site.site], predictor.predict(site.test)
        np.testing.assert_allclose(own["target"], site.test["outcome"], rtol=1e-12)
        np.testing.assert_allclose(again[["mean", "sd"]], own[["mean", "sd"]], rtol=1e-10)


@pytest.mark.parametrize("method", ["sgpr", "deep-kernel", "pvi-glm"])
def test_means_alone_are_those_of_the_predictions(method, tmp_path):
    keys = {"dataset": "sine", "split": 0, "num-server-rounds": 1, "method": method, "output-dir": str(tmp_path)}
    found = Predictor.of(read_run(run_in_process(BASE | keys | {"name": "run"}, SITES)))
    frame = pd.DataFrame({"x": [-1.0, 0.5]})
    np.testing.assert_allclose(found.mean(frame), found.predict(frame)["mean"], rtol=1e-9)


def test_predictions_have_the_distribution_of_the_errors(tmp_path):
    """Student-t noise: the log score is that of the mixture and better than a normal one; all intervals agree."""
    draw = np.random.default_rng(1)
    x = draw.uniform(-2, 2, 400)
    frame = pd.DataFrame({"x": x, "y": 5 * np.sin(x) + draw.standard_t(2, 400)})
    keys = {"num-server-rounds": 30, "model.num-inducing": 10, "output-dir": str(tmp_path)}
    run = fg.run(frame, target="y", method="sgpr", sites=SITES, options=BASE | keys)
    rows, (factors, shares) = run.predictions, run.saved.arrays["errors.mixture"]
    assert (factors**2 @ shares, shares.sum()) == (pytest.approx(1.0), pytest.approx(1.0))
    z = ((rows["target"] - rows["mean"]) / rows["sd"]).to_numpy()
    score = -np.log(stats.norm.pdf(z[:, None], 0, factors) @ shares) + np.log(rows["sd"])
    assert run.metrics.test["nll"] == pytest.approx(score.mean(), rel=1e-9)
    assert score.mean() < np.mean(-stats.norm.logpdf(z) + np.log(rows["sd"])) - 0.05
    again = run.posterior.predict(pd.DataFrame({"x": rows["input.x"]}))
    np.testing.assert_allclose(again[["sd", "q2.5", "q97.5"]], rows[["sd", "low", "high"]], atol=1e-9)
    inside = shares @ stats.norm.cdf(((again["q75"] - again["mean"]) / again["sd"]).to_numpy() / factors[:, None])
    np.testing.assert_allclose(inside, 0.75, atol=1e-9)
    assert run.posterior.sample(pd.DataFrame({"x": [0.0]}), 0).shape == (0, 1)
    draws = run.posterior.sample(pd.DataFrame({"x": [0.0]}), 20_000)
    expected = run.posterior.predict(pd.DataFrame({"x": [0.0]}))[["q2.5", "q25", "q75", "q97.5"]].to_numpy()[0]
    np.testing.assert_allclose(np.quantile(draws, [0.025, 0.25, 0.75, 0.975]), expected, rtol=0.06)


def noisy(draw: np.random.Generator, count: int, height: float, rise: float) -> pd.DataFrame:
    """The sd of the noise rises by e^{2 rise} along `b`."""
    x = draw.uniform(-1, 1, (count, 2))
    y = height * np.sin(3 * x[:, 0]) + 0.2 * np.exp(rise * x[:, 1]) * draw.standard_normal(count)
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})


def held(new: pd.DataFrame, found: pd.DataFrame) -> list[float]:
    """The shares of rows that 95 % intervals hold where there is little noise and where there is much."""
    inside, edges = new["y"].between(found["q2.5"], found["q97.5"]), pairwise((-1, -0.5, 0, 0.5, 1))
    return [inside[new["b"].between(*ends)].mean() for ends in edges]


VARYING = {"model.kernel": "rbf", "model.num-inducing": 30}


def test_intervals_follow_noise_that_varies(tmp_path):
    draw, keys = np.random.default_rng(3), VARYING | {"output-dir": str(tmp_path)}
    run = fg.run(noisy(draw, 600, 1.0, 2.0), target="y", sites=SITES, num_rounds=20, options=BASE | keys)
    new = noisy(draw, 4000, 1.0, 2.0)
    found = run.posterior.predict(new)
    assert all(0.89 < share < 0.995 for share in held(new, found))
    assert found["sd"].max() > 15 * found["sd"].min()
    mean, sd = by_hand(run.path, new[["a", "b"]].to_numpy())
    np.testing.assert_allclose(found[["mean", "sd"]].T, [mean, sd], rtol=1e-8, atol=1e-8)
    few = new[:2]
    np.testing.assert_allclose(run.posterior.distribution(few, noise=True).stddev, found["sd"][:2], rtol=1e-8)
    drawn_quantiles = np.quantile(run.posterior.sample(few, 20_000), [0.025, 0.975], axis=0)
    np.testing.assert_allclose(drawn_quantiles.T, found[["q2.5", "q97.5"]][:2], rtol=0.06)


def test_a_transformed_target_has_noise_that_varies_and_normal_errors(tmp_path):
    draw, keys = np.random.default_rng(3), VARYING | {"transform.target": "log", "output-dir": str(tmp_path)}
    rows, new = (noisy(draw, n, 0.5, 1.0).assign(y=lambda own: np.exp(1 + own["y"])) for n in (600, 4000))
    run = fg.run(rows, target="y", sites=SITES, num_rounds=20, options=BASE | keys)
    assert "errors.scale" in run.saved.arrays
    assert "errors.mixture" not in run.saved.arrays
    assert all(0.91 < share < 0.985 for share in held(new, run.posterior.predict(new)))


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
    predicted = predict_file({"": Predictor.of(read_run(line))}, tmp_path / "new.csv", tmp_path / "out.csv")
    assert predicted[:2] == (len(told), 0)
    found = pd.read_csv(tmp_path / "out.csv", dtype={"id": str})
    assert list(found)[:5] == ["input.sd", "id", "note", "mean", "sd"]
    assert list(found["id"]) == ids
    assert found["note"].isna().all()
    np.testing.assert_allclose(found["mean"], shuffled["mean"], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found["sd"], shuffled["sd"], rtol=1e-10)
    for level, column in (("q2.5", "low"), ("q50", "mean"), ("q97.5", "high")):
        np.testing.assert_allclose(found[level], shuffled[column], rtol=1e-9, atol=1e-9)


def test_rows_beyond_all_training_rows_are_marked(line, tmp_path):
    predictor = Predictor.of(read_run(line))
    mean, scale = float(predictor.preparation.input_mean[0]), float(predictor.preparation.input_scale[0])
    frame = pd.DataFrame({"x": [mean, mean + 5.7 * scale, mean - 9 * scale]})
    assert predictor.outside(frame).tolist() == ["", "x", "x"]
    frame.to_csv(tmp_path / "new.csv", index=False)
    assert predict_file({"": predictor}, tmp_path / "new.csv", tmp_path / "out.csv") == (3, 0, 2)
    assert pd.read_csv(tmp_path / "out.csv")["outside"].fillna("").tolist() == ["", "x", "x"]


def test_predictions_have_the_index_of_the_table(mixed):
    predictor, plain = Predictor.of(read_run(mixed)), table(6)
    plain.loc[2, "age"] = 500.0
    new = plain.set_index(pd.Index([9, 4, 4, 7, 0, 1]))
    pd.testing.assert_frame_equal(predictor.predict(new), predictor.predict(plain).set_axis(new.index))
    found = predictor.outside(new)
    assert list(found.index) == list(new.index)
    assert found.str.contains("age").tolist() == [False, False, True, False, False, False]


def test_levels_that_no_site_had_are_said_once(mixed):
    new = table(4).assign(clinic=["north", "nort", "east", "nort"], sex=[0, 1, 1, 0])
    with pytest.warns(UserWarning, match="`sex`: '0', '1'; `clinic`: 'nort', 'east'$") as told:
        Predictor.of(read_run(mixed)).predict(new)
    assert len(told) == 1


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
    if "errors.scale" in a:
        correlation = lambda p, q: k(p / 2, q / 2) / a["kernel.outputscale"]  # noqa: E731
        root = np.linalg.cholesky(correlation(z[:256], z[:256]) + facts["model"]["jitter"] * np.eye(len(z[:256])))
        features = np.vstack([np.ones_like(mean), mean, mean**2 - 1, np.linalg.solve(root, correlation(z[:256], x))])
        variance = variance * np.exp(a["errors.scale"] @ features)
    return mean * a["target.scale"] + a["target.mean"], np.sqrt(variance) * a["target.scale"]


def test_the_equation_beside_the_posterior_is_the_prediction_whatever_the_order_and_the_levels(mixed, tmp_path):
    new = table(20)
    new.loc[[3, 7], "clinic"] = "east"
    new[["clinic", "sex", "dose", "age"]].to_csv(tmp_path / "new.csv", index=False)
    assert predict_file({"": Predictor.of(read_run(mixed))}, tmp_path / "new.csv", tmp_path / "out.csv")[:2] == (20, 2)
    columns = [new["age"], new["dose"], new["sex"] == "m"]  # as in the schema: two levels are one indicator
    columns += [new["clinic"] == level for level in ("north", "south", "west")]
    inputs = np.stack(columns, axis=1).astype(float)
    inputs[[3, 7], 3:] = load_file(mixed / "posterior.safetensors")["input.mean"][3:]  # a level that no site had
    mean, sd = by_hand(mixed, inputs)
    found = pd.read_csv(tmp_path / "out.csv")
    assert "clinic" in found.loc[3, "outside"]
    np.testing.assert_allclose(found[["mean", "sd"]].T, [mean, sd], rtol=1e-8)
    assert np.corrcoef(mean, new["outcome"])[0, 1] > 0.8  # a prediction of something


def test_a_method_without_a_shared_posterior_says_so(tmp_path):
    keys = {"dataset": "five-blocks", "method": "fgpr", "num-server-rounds": 1, "output-dir": str(tmp_path)}
    run = run_in_process(BASE | keys | {"name": "run"}, 2)
    assert not (run / "posterior.safetensors").exists()
    with pytest.raises(RunError, match=r"no posterior to predict from.*`method` = 'fgpr'") as caught:
        Predictor.of(read_run(run))
    assert methods()["fgpr"].why_no_posterior in str(caught.value)


POWERS = Transform("yeo-johnson").powers
Y = np.array([-3.0, -0.2, 0.0, 0.5, 7.0])


@pytest.mark.parametrize("power", POWERS)
def test_yeo_johnson_is_scipys_and_its_slope_is_a_derivative(power):
    own = Transform("yeo-johnson", power)
    np.testing.assert_allclose(own.forward(Y), stats.yeojohnson(Y, power), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(own.inverse(own.forward(Y)), Y, rtol=1e-12, atol=1e-15)
    step = 1e-6
    slope = (own.forward(Y + step) - own.forward(Y - step)) / (2 * step)
    np.testing.assert_allclose(own.log_slope(Y), np.log(slope), atol=1e-5)  # central differences, kink at zero


@pytest.mark.parametrize("own", [Transform("log"), Transform("sqrt"), Transform("yeo-johnson", 2.0)])
def test_the_density_of_the_target_integrates_to_one_and_has_the_moments(own):
    mean, sd = np.array([0.4]), np.array([0.6])  # of √y, a quarter of the Gaussian is cut off

    def density(y):
        return float(np.exp(-transformed_scores(mean[None], sd[None], own.forward(np.array([y])), own).sums["nll"]))

    low, high = transformed_quantiles(mean, sd, (1e-12, 1 - 1e-12), own)[:, 0]
    points = transformed_quantiles(mean, sd, (0.01, 0.5, 0.99), own)[:, 0]
    assert quad(density, low, high, points=points, limit=200)[0] == pytest.approx(1.0, abs=1e-6)
    first = quad(lambda y: y * density(y), low, high, points=points, limit=200)[0]
    second = quad(lambda y: y**2 * density(y), low, high, points=points, limit=200)[0]
    found = transformed_moments(mean[None], sd[None], own)
    assert found[0][0] == pytest.approx(first, rel=1e-5)
    assert found[1][0] == pytest.approx(np.sqrt(second - first**2), rel=1e-4)
    assert (quad(density, low, points[1], limit=200)[0]) == pytest.approx(0.5, abs=1e-6)  # the median is one


def test_log_scores_are_those_of_a_log_normal():
    m, s, y = 0.3, 0.7, 2.5
    law = stats.lognorm(s, scale=np.exp(m))
    scores = transformed_scores(np.array([[m]]), np.array([[s]]), np.log([y]), Transform("log")).sums
    assert scores["nll"] == pytest.approx(-law.logpdf(y), rel=1e-12)
    assert scores["absolute-error"] == pytest.approx(abs(law.mean() - y), rel=1e-9)
    crps = quad(lambda v: law.cdf(v) ** 2, 0, y)[0] + quad(lambda v: law.sf(v) ** 2, y, np.inf)[0]
    assert scores["crps"] == pytest.approx(crps, rel=1e-7)


def test_the_power_is_that_of_all_rows_whatever_the_partition():
    y = np.random.default_rng(1).gamma(1.5, 3.0, 200) - 1
    centres = np.array([float(Transform("yeo-johnson", p).forward(np.array(4.0))) for p in POWERS])

    def sums(part):
        moved = np.stack([Transform("yeo-johnson", p).forward(part) for p in POWERS]) - centres[:, None]
        slopes = np.array([Transform("yeo-johnson", p).log_slope(part).sum() for p in POWERS])
        return TargetMoments(moved.sum(1), (moved**2).sum(1), slopes, np.array(float(len(part))))

    best, mean, sd = chosen(add([sums(part) for part in np.split(y, [20, 90])]), centres)
    assert best == int(np.argmax([stats.yeojohnson_llf(p, y) for p in POWERS]))
    t = stats.yeojohnson(y, POWERS[best])
    assert (mean, sd) == pytest.approx((t.mean(), t.std()), rel=1e-10)


def skewed(rows=90):
    rng = np.random.default_rng(3)
    x = rng.uniform(-2, 2, rows)
    return pd.DataFrame({"x": x, "days": np.exp(1 + np.sin(2 * x) + 0.2 * rng.normal(size=rows))})


def few(transform, folder, **more):
    quick = {"model.num-inducing": 8, "baselines.local-only": False, "baselines.pooled": False}
    return quick | {"transform.target": transform, "output-dir": str(folder), "sgpr.exchanges": 6} | more


@pytest.fixture(scope="module", params=["log", "sqrt", "yeo-johnson"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformed")
    return fg.run(skewed(), target="days", method="fsgp", num_rounds=10, sites=3, options=few(request.param, folder))


def test_the_saved_equation_predicts_with_numpy_alone(trained):
    words, new = json.loads((trained.path / "posterior.json").read_text()), pd.DataFrame({"x": [-1.5, 0.2, 1.1]})
    mean, sd = by_hand(trained.path, new.to_numpy())
    named = words["schema"]["target"]["transform"]
    low = stats.norm.cdf((0.0 - mean) / sd) if named["name"] == "sqrt" else 0.0
    t = mean + sd * stats.norm.ppf(low + 0.975 * (1 - low))
    power = named["power"]
    yeo = np.expm1(t) if power == 0 else (1 + power * np.abs(t)) ** (1 / power) - 1  # all t are above zero here
    expected = {"log": np.exp(t), "sqrt": t**2, "yeo-johnson": yeo}[named["name"]]
    predicted = trained.posterior.predict(new)
    np.testing.assert_allclose(predicted["q97.5"], expected, rtol=1e-6)
    draws = trained.posterior.sample(new, 4000, seed=1)
    np.testing.assert_allclose(draws.mean(0), predicted["mean"], rtol=0.05)  # about three standard errors
    assert {"target", "low", "high"} <= set(trained.predictions)


def test_figures_are_in_units_of_the_target(trained):
    rows, test = trained.predictions, trained.metrics.test
    assert test["rmse"] == pytest.approx(np.sqrt(np.mean((rows["mean"] - rows["target"]) ** 2)), rel=1e-9)
    inside = ((rows["low"] <= rows["target"]) & (rows["target"] <= rows["high"])).mean()
    assert test["coverage_95"] == pytest.approx(inside)
    assert rows["low"].min() > 0
    assert test["r2"] > 0.7
    share = trained.metrics.test_standardised["rmse"] / test["rmse"]
    assert share == pytest.approx(1 / trained.metrics.training_target["sd"], rel=1e-9)
    with pytest.raises(RunError, match="use `sample`"):
        trained.posterior.distribution(pd.DataFrame({"x": [0.0]}))


def test_a_target_that_has_no_logarithm_is_refused_by_row(tmp_path):
    table = skewed(30).assign(days=lambda d: d["days"] - d["days"].iloc[4])
    with pytest.raises(DataError, match=r"target `days`.*'log' needs numbers above zero; another.*yeo-johnson"):
        fg.run(table, target="days", sites=2, options=few("log", tmp_path))
    with pytest.raises(ConfigError, match=r"`model.likelihood` = 'bernoulli' set it to 'none'"):
        fg.run(table, target="days", sites=2, options=few("log", tmp_path) | {"model.likelihood": "bernoulli"})
