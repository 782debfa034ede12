"""Transformed targets: densities that stay densities, and figures in the units people have."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.integrate import quad
from test_predict import by_hand

import fedgp_flower as fg
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.messages import add
from fedgp_flower.scores import transformed_moments, transformed_quantiles, transformed_scores
from fedgp_flower.shared_messages import TargetMoments
from fedgp_flower.transforms import Transform
from strategies.server.enrolment import chosen

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


@pytest.mark.parametrize(
    "own",
    [
        Transform("log"),
        Transform("sqrt"),
        Transform("yeo-johnson", 0.0),
        Transform("yeo-johnson", 0.5),
        Transform("yeo-johnson", 2.0),
    ],
)
def test_the_density_of_the_target_integrates_to_one_and_has_the_moments(own):
    mean, sd = np.array([0.4]), np.array([0.6])  # of √y, a quarter of the Gaussian is cut off

    def density(y):
        return float(np.exp(-transformed_scores(mean[None], sd[None], own.forward(np.array([y])), own).sums["nll"]))

    low, high = transformed_quantiles(mean, sd, (1e-12, 1 - 1e-12), own)[:, 0]
    points = transformed_quantiles(mean, sd, (0.01, 0.5, 0.99), own)[:, 0]
    whole = quad(density, low, high, points=points, limit=200)[0]
    assert whole == pytest.approx(1.0, abs=1e-6)
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

    parts = [sums(part) for part in np.split(y, [20, 90])]
    best, mean, sd = chosen(add(parts), centres)
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
    assert trained.metrics.test_standardised["rmse"] == pytest.approx(
        test["rmse"] / trained.metrics.training_target["sd"], rel=1e-9
    )
    with pytest.raises(RunError, match="use `sample`"):
        trained.posterior.distribution(pd.DataFrame({"x": [0.0]}))


def test_a_target_that_has_no_logarithm_is_refused_by_row(tmp_path):
    table = skewed(30).assign(days=lambda d: d["days"] - d["days"].iloc[4])
    with pytest.raises(DataError, match=r"target `days`.*'log' needs numbers above zero; another.*yeo-johnson"):
        fg.run(table, target="days", sites=2, options=few("log", tmp_path))
    with pytest.raises(ConfigError, match=r"`model.likelihood` = 'bernoulli' set it to 'none'"):
        fg.run(table, target="days", sites=2, options=few("log", tmp_path) | {"model.likelihood": "bernoulli"})
