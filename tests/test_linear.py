"""Scores, and what a run is compared with: the mean, the linear model from sums, what sees all rows in one place."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from faults import FaultyGrid, configured, run
from scipy import integrate, linalg, optimize, special, stats

import fedgp_flower as fg
from fedgp_flower import scores as measures
from fedgp_flower.clients import baselines, numpy_client
from fedgp_flower.clients.boosting import LOSSES, boosted
from fedgp_flower.clients.numpy_client import linear_scores
from fedgp_flower.count_scores import count_quantiles, log_rate_of
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import NumericsError
from fedgp_flower.gp import error_law
from fedgp_flower.gp.likelihoods.counts import Counts
from fedgp_flower.gp.likelihoods.point import NONE
from fedgp_flower.gp.linalg import counting_repairs
from fedgp_flower.gp.models import ExactGP
from fedgp_flower.messages import add
from fedgp_flower.options import MULTICLASS, ModelSection
from fedgp_flower.run.predict import QUANTILES
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.summary import verdict
from fedgp_flower.scores import TargetUnits, bernoulli_scores, gaussian_scores
from fedgp_flower.shared_messages import Moments, OneArray, ScoreSums, with_ones
from strategies.server.questions import drive
from strategies.server.scoring import PENALTIES, combine, count_regression, linear_fit, ridge

ROWS, INPUTS = 57, 4
UNITS = TargetUnits(0.0, 1.0)


def regression_rows(inputs=INPUTS):
    draw = np.random.default_rng(3)
    x = draw.normal(size=(ROWS, inputs)) + 0.7
    return x, 0.4 + x[:, 0] - 0.5 * x[:, 1] + 0.6 * draw.normal(size=ROWS)


class Regressing(SimpleNamespace):
    """A site that has rows and answers what every client answers of a regression."""

    moments, logistic = numpy_client.moments, numpy_client.logistic
    count_regression, time_regression = numpy_client.count_regression, numpy_client.time_regression


def dealt(x, y, cuts, likelihood="gaussian"):
    config = SimpleNamespace(model=SimpleNamespace(likelihood=likelihood))
    parts = zip(np.split(x, cuts), np.split(y, cuts), strict=True)
    return {str(k): Regressing(rows=SimpleNamespace(x=x, y=y), config=config) for k, (x, y) in enumerate(parts)}


def fitted(rows, likelihood, cuts):
    sites = dealt(*rows, cuts)
    return drive(linear_fit(tuple(sites), likelihood, rows[0].shape[1]), sites)


def test_ridge_is_the_bayesian_regression_of_all_rows():
    """Evidence of N − 1 orthonormal contrasts of y, which do not see the intercept: N(0, σ² (X_c X_cᵀ/λ + I))."""
    x, y = regression_rows()
    found = fitted((x, y), "gaussian", [9, 30])
    contrasts = np.linalg.qr(np.column_stack([np.ones(ROWS), np.eye(ROWS)[:, 1:]]))[0][:, 1:].T

    def highest(p):
        shape = contrasts @ x @ x.T @ contrasts.T / p + np.eye(ROWS - 1)
        density = lambda s: stats.multivariate_normal(cov=math.exp(s) * shape).logpdf(contrasts @ y)  # noqa: E731
        return optimize.minimize_scalar(lambda s: -density(s), bounds=(-4, 2))

    penalty = float(min(PENALTIES, key=lambda p: highest(p).fun))
    centred, goal = x - x.mean(axis=0), y - y.mean()
    root = linalg.cho_factor(centred.T @ centred + penalty * np.eye(INPUTS))
    weights = linalg.cho_solve(root, centred.T @ goal)
    variance = float(goal @ (goal - centred @ weights)) / (ROWS - 1)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-10)
    np.testing.assert_allclose(found.centre, x.mean(axis=0), rtol=1e-12)
    assert found.intercept == pytest.approx(y.mean(), rel=1e-12)
    assert found.variance == pytest.approx(variance * (1 + 1 / ROWS), rel=1e-10)
    covariance = variance * linalg.cho_solve(root, np.eye(INPUTS))
    np.testing.assert_allclose(found.spread.T @ found.spread, covariance, rtol=1e-9)
    assert highest(penalty).x == pytest.approx(math.log(variance), abs=1e-5)


def test_logistic_regression_is_at_the_mode_of_all_rows():
    x, goal = regression_rows()
    y = (goal > 0.9).astype(float)
    found, design = fitted((x, y), "bernoulli", [9, 30]), with_ones(x)

    def loss(w):
        return float(np.sum(np.logaddexp(0, (1 - 2 * y) * (design @ w))) + 0.5 * w[1:] @ w[1:])

    best = optimize.minimize(loss, np.zeros(1 + INPUTS), tol=1e-12).x
    np.testing.assert_allclose([found.intercept, *found.weights], best, atol=1e-5)
    p = 1 / (1 + np.exp(-found.intercept - x @ found.weights))
    gradient = design.T @ (y - p) - np.array([0, *found.weights])
    assert np.abs(gradient).max() < 1e-5  # a decrement of 1e-10 nats
    assert found.spread is None


def test_more_inputs_than_rows_and_rows_on_a_plane_have_a_fit():
    x, y = regression_rows(90)
    many = fitted((x, y), "gaussian", [9])
    assert np.isfinite(many.weights).all()
    assert many.variance > 0
    exact = fitted((x[:, :3], x[:, :3] @ [1.0, 2.0, 3.0]), "gaussian", [9])
    np.testing.assert_allclose(exact.weights, [1, 2, 3], rtol=1e-5)


@pytest.mark.parametrize("likelihood", ["poisson", "negative-binomial", "binomial"])
@pytest.mark.parametrize("used", [0, 2])
def test_a_regression_of_counts_from_sums_is_that_of_all_rows(likelihood, used):
    draw = np.random.default_rng(5)
    x, beside = draw.normal(size=(400, 2)), draw.integers(1, 9, 400).astype(float)
    design = np.column_stack([np.ones(400), x[:, :used]])
    f = 0.3 + x @ [0.6, -0.4]
    shares = likelihood == "binomial"
    rate = beside * np.exp(f)
    y = draw.binomial(beside.astype(int), special.expit(f)) if shares else draw.negative_binomial(2, 2 / (2 + rate))
    target = np.column_stack([y.astype(float), beside])
    sites = dealt(x, target, [130, 260], likelihood)
    found = drive(count_regression(tuple(sites), likelihood, 2, used), sites)

    def law(w):
        f = design @ w
        return stats.binom(beside, special.expit(f)) if shares else stats.poisson(beside * np.exp(f))

    told = add(site.count_regression(OneArray(np.full(1 + used, 0.1))) for site in sites.values())
    at = np.full(1 + used, 0.1)
    assert float(told.likelihood) == pytest.approx(law(at).logpmf(y).sum(), rel=1e-8)
    best = optimize.minimize(lambda w: -law(w).logpmf(y).sum() + 0.5 * w[1:] @ w[1:], 0 * at, tol=1e-9).x
    mu = law(best).mean()
    alpha = 0.0 if shares else float((np.square(y - mu) - mu).sum() / np.square(mu).sum())
    variance = math.log1p(alpha) if likelihood == "poisson" else alpha
    assert shares or alpha > 0.2
    assert found.variance == pytest.approx(variance, rel=1e-4)
    shift = variance / 2 if likelihood == "poisson" else 0.0
    np.testing.assert_allclose([found.intercept + shift, *found.weights[:used]], best, atol=1e-4)
    assert not found.weights[used:].any()
    held_out = SimpleNamespace(x_test=x[:50], y_test=target[:50])
    scored = SimpleNamespace(rows=held_out, config=sites["0"].config, units=UNITS)
    f = found.intercept + x @ found.weights
    if likelihood == "poisson":  # a normal log rate
        nodes, weight = np.polynomial.hermite_e.hermegauss(80)
        mass = stats.poisson.pmf(y[:, None], beside[:, None] * np.exp(f[:, None] + variance**0.5 * nodes))
        mass = mass @ weight / weight.sum()
    else:
        r = 1 / max(alpha, 1e-9)
        mass = law(best).pmf(y) if shares else stats.nbinom.pmf(y, r, r / (r + beside * np.exp(f)))
    assert linear_scores(scored, found).nll == pytest.approx(-np.log(mass[:50]).sum(), rel=1e-4)


def test_figures_of_ranks_from_summed_histograms():
    """Log odds in the middles of bins: the histograms lose nothing."""
    draw = np.random.default_rng(1)
    middles = (np.arange(measures.RANK_BINS) + 0.5) * 2 * measures.RANK_REACH / measures.RANK_BINS - measures.RANK_REACH
    odds = middles[draw.integers(25, 55, 500)]
    y = (draw.random(500) < 1 / (1 + np.exp(-0.6 * odds - 0.3))).astype(float)
    scores = {str(k): bernoulli_scores(1 / (1 + np.exp(-odds[k::3])), y[k::3]) for k in range(3)}
    test = combine({k: ScoreSums.of(v) for k, v in scores.items()}, 1.0)["test"]
    pairs = np.sign(odds[y == 1][:, None] - odds[y == 0])
    assert test["auc"] == pytest.approx((1 + pairs.mean()) / 2, abs=1e-12)
    assert test["base_rate"] == pytest.approx(y.mean())

    def loss(w):
        return float(np.logaddexp(0, (1 - 2 * y) * (w[0] + w[1] * odds)).sum())

    best = optimize.minimize(loss, [0.0, 1.0]).x
    assert test["calibration_slope"] == pytest.approx(best[1], abs=1e-4)
    assert test["calibration_slope"] < 0.9  # predictions are more extreme than the classes
    design = with_ones(odds[:, None])
    p = 1 / (1 + np.exp(-design @ best))
    error = math.sqrt(np.linalg.solve(design.T * (p * (1 - p)) @ design, [0.0, 1.0])[1])
    assert test["calibration_slope_se"] == pytest.approx(error, rel=1e-3)


LINEAR = {"baselines__linear": True, "num_server_rounds": 1}


def rows_of_all(strategy, sites):
    prepared = strategy.preparation
    agreed = Preparation.from_wire(prepared.arrays, prepared.schema)
    data = [site.encode(agreed) for site in load_all_sites(strategy.config, sites)]
    return [np.concatenate([getattr(entry, name) for entry in data]) for name in ("x", "y", "x_test", "y_test")]


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_scores_the_mean_and_the_linear_model_on_the_rows_of_all_sites(masked):
    strategy = run(FaultyGrid(configured(**LINEAR, dataset="diabetes", privacy__secure_aggregation=masked), 4))
    x, y, x_test, y_test = rows_of_all(strategy, 4)
    metrics, scale = strategy.outcome.metrics, strategy.preparation.target_scale
    at_mean = np.sqrt(np.mean((y_test - y.mean()) ** 2)) * scale
    assert metrics["mean"]["rmse"] == pytest.approx(at_mean, rel=1e-9)
    nll = -stats.norm.logpdf(y_test, y.mean(), y.std(ddof=1) * math.sqrt(1 + 1 / len(y))).mean() + math.log(scale)
    assert metrics["mean"]["nll"] == pytest.approx(nll, rel=1e-9)
    design = with_ones(x)
    line = ridge(Moments(design.T @ design, design.T @ y, np.array(y @ y)))
    mean = line.intercept + (x_test - line.centre) @ line.weights
    sd = np.sqrt(line.variance + np.square((x_test - line.centre) @ line.spread.T).sum(axis=1))
    assert metrics["linear"]["nll"] == pytest.approx(-stats.norm.logpdf(y_test, mean, sd).mean() + math.log(scale))
    assert metrics["linear"]["r2"] == pytest.approx(1 - np.mean((y_test - mean) ** 2) * scale**2 / at_mean**2)
    assert metrics["test"]["r2"] == pytest.approx(1 - (metrics["test"]["rmse"] / at_mean) ** 2)
    assert [len(metrics[name]["per_site"]) for name in ("mean", "linear")] == [0 if masked else 4] * 2


def test_classes_are_compared_with_their_shares_and_logistic_regression():
    keys = {"method": "sfvi", "dataset": "breast-cancer", "model__likelihood": "bernoulli"}
    strategy = run(FaultyGrid(configured(**LINEAR, **keys), 3))
    x, y, x_test, y_test = rows_of_all(strategy, 3)
    metrics = strategy.outcome.metrics
    assert metrics["mean"]["brier"] == pytest.approx(np.mean((y_test - y.mean()) ** 2))
    assert (metrics["mean"]["auc"], metrics["mean"]["brier_skill"]) == (0.5, 0.0)
    line = fitted((x, y), "bernoulli", [])
    p = 1 / (1 + np.exp(-line.intercept - x_test @ line.weights))
    assert metrics["linear"]["brier"] == pytest.approx(np.mean((y_test - p) ** 2), rel=1e-6)
    assert metrics["test"]["brier_skill"] == pytest.approx(1 - metrics["test"]["brier"] / metrics["mean"]["brier"])
    assert 0.9 < metrics["linear"]["auc"] <= 1


def steps(likelihood, rows=400, seed=0):
    """Inputs, targets, and what the best prediction knows: a mean, a rate or a probability with steps."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(-1, 1, (rows, 2))
    high = (x[:, 0] > 0.3) ^ (x[:, 1] > -0.2)
    if likelihood in MULTICLASS:
        shares = np.where(high[:, None], [0.8, 0.15, 0.05], [0.1, 0.2, 0.7])
        return x, (draw.random(rows)[:, None] > shares.cumsum(axis=1)).sum(axis=1).astype(float), shares
    if likelihood == "bernoulli":
        share = np.where(high, 0.9, 0.2)
        return x, (draw.random(rows) < share).astype(float), share
    if likelihood == "poisson":
        rate = np.where(high, 9.0, 2.0)
        return x, draw.poisson(rate).astype(float), rate
    return x, high + 0.1 * draw.standard_normal(rows), high.astype(float)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "categorical", "poisson"])  # a loss each
def test_boosting_comes_near_the_best_score(likelihood):
    """Never below the score of the truth by more than chance, and near it: noise is neither missed nor invented."""
    x, y, _ = steps(likelihood)
    x_test, y_test, known = steps(likelihood, seed=1)
    rows = SiteData(x, y, x_test, y_test)
    found = boosted(x, y, likelihood).scores(rows, likelihood, UNITS).sums
    if likelihood in MULTICLASS:
        best = -np.log(known[np.arange(len(y_test)), y_test.astype(int)]).mean()
    elif likelihood == "bernoulli":
        best = -np.log(np.where(y_test == 1, known, 1 - known)).mean()
    elif likelihood == "poisson":
        best = (known - y_test * np.log(known) + [math.lgamma(count + 1) for count in y_test]).mean()
    else:
        best = -math.log(1 / 0.1) + 0.5 * math.log(2 * math.pi) + 0.5 * (((y_test - known) / 0.1) ** 2).mean()
    slack = 0.6 if LOSSES[likelihood] == "squared_error" else 0.12
    assert best - 0.03 < found["nll"] / found["count"] < best + slack


def test_the_slope_of_the_evidence_is_that_of_its_definition():
    """½ (ααᵀ − C⁻¹) against autograd through log N(y | 0, C)."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(30, 2, generator=draw).double(), torch.randn(30, generator=draw).double()
    model = ExactGP(ModelSection(kernel="rbf + linear"), x, y)
    plain = torch.distributions.MultivariateNormal(torch.zeros(30).double(), model.covariance()).log_prob(y) / 30
    torch.testing.assert_close(model.log_evidence(), plain)
    found, wanted = (torch.autograd.grad(v, [*model.parameters()]) for v in (model.log_evidence(), plain))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_without_noise_a_gp_of_many_rows_predicts_with_a_repair_that_is_counted():
    x = torch.linspace(-1, 1, 60)[:, None].double()
    model, new = ExactGP(ModelSection(noise=1e-18), x, torch.sin(2 * x[:, 0])), x[:-1] + 1 / 60
    with counting_repairs() as repairs:
        mean, variance = model.predict(new)
        assert math.isfinite(float(model.log_evidence().detach()))
    torch.testing.assert_close(mean, torch.sin(2 * new[:, 0]), rtol=0, atol=1e-3)
    assert (variance > -1e-6).all()
    assert repairs == {"K_xx + σ²I": 2}


def test_a_sparse_fit_with_a_point_at_every_row_is_the_exact_one(monkeypatch):
    """Where points are rows, bound and prediction are those of the exact GP, whose hyperparameters fit as well.

    A site of many rows alone has a sparse fit, too, without a warning.
    """
    draw = np.random.default_rng(0)
    x, x_test = draw.uniform(-2, 2, (70, 1)), draw.uniform(-2, 2, (200, 1))
    rows = SiteData(x, np.sin(3 * x[:, 0]) + 0.1 * draw.standard_normal(70), x_test, np.sin(3 * x_test[:, 0]))
    section = {"model.num-inducing": 20, "baselines.max-evaluations": 40}
    config = parse_config({"dataset": "sine", "method": "sgpr", **section})
    monkeypatch.setattr(error_law, "STRENGTHS", np.zeros(1))  # 70 rows may decide either way on a scale that varies
    exact = baselines.scores(rows, config, UNITS, 70).sums
    monkeypatch.setattr(baselines, "POOLED_ROWS", 50)
    sparse = baselines.scores(rows, config, UNITS, 70).sums
    assert sparse["nll"] / 200 == pytest.approx(exact["nll"] / 200, abs=0.02)
    assert sparse["squared-error"] == pytest.approx(exact["squared-error"], rel=0.1)
    monkeypatch.setattr(baselines, "EXACT_ROWS", 50)
    alone = baselines.scores(rows, config, UNITS, 0).sums
    assert max(exact["squared-error"], alone["squared-error"]) / 200 < 0.05**2


def test_a_run_says_where_all_rows_in_one_place_are_better(tmp_path):
    x, y, _ = steps("gaussian", rows=300)
    frame = pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y})
    options = {"method": "local-only", "output-dir": str(tmp_path), "baselines.max-evaluations": 30}
    metrics = fg.run(frame, target="y", sites=3, options=options).metrics
    assert metrics.boosting["nll"] < metrics.pooled["nll"] < metrics.test["nll"]
    assert metrics.boosting["rmse"] == pytest.approx(0.1, abs=0.1)
    assert " has a higher NLL than gradient boosting of all rows in one place (" in verdict(metrics)


def test_noise_that_varies_does_not_explain_what_the_mean_can():
    """A fit that starts with all of q at the prior takes the function for noise and has R² near 0."""
    draw = np.random.default_rng(1)
    x = draw.uniform(-1.7, 1.7, 300)
    bump, width = np.exp(-np.square((x + 0.4) / 0.35)), np.exp(-np.square(x / 0.7))
    y = 1 - 3 * bump + (0.05 + 0.6 * width) * draw.standard_normal(300)
    rows = SiteData(x[:240, None], y[:240], x[240:, None], y[240:])
    section = {"model.likelihood": "heteroscedastic", "model.num-inducing": 12, "baselines.max-evaluations": 30}
    found = baselines.scores(rows, parse_config({"dataset": "sine", "method": "svgp", **section}), UNITS, 20).sums
    assert found["squared-error"] < 0.5 * np.square(y[240:] - y[:240].mean()).sum()


@pytest.mark.parametrize(
    ("likelihood", "seen", "unseen"),
    [
        ("bernoulli", np.zeros(140), np.ones(20)),
        ("poisson", np.zeros(140), np.ones(20)),
        ("binomial", np.tile([0.0, 1.0], (140, 1)), np.ones((20, 2))),
        ("categorical", np.arange(140) % 2.0, np.full(20, 2.0)),
        ("ordinal", np.arange(140) % 2.0, np.full(20, 2.0)),
    ],
)
def test_what_a_site_has_not_seen_in_140_rows_has_a_chance_of_about_half_a_row(likelihood, seen, unseen):
    """Not of e⁻¹⁷ to e⁻²²; the gaps between grades had no end."""
    draw = np.random.default_rng(2)
    rows = SiteData(draw.normal(size=(140, 2)), seen, draw.normal(size=(20, 2)), unseen)
    section = {"model.likelihood": likelihood, "model.num-inducing": 20, "target": "a,b" * (seen.ndim > 1)}
    section["baselines.max-evaluations"] = 60
    units = replace(UNITS, classes=3 if unseen.max() == 2 else 0)
    found = baselines.scores(rows, parse_config({"dataset": "sine", "method": "svgp", **section}), units, 0).sums
    assert found["nll"] / 20 == pytest.approx(np.log(280), abs=1.2)


MANY = ([-1.0, 0.5, 3.0, 3.1], [0.3, 1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("means", "sds", "y"),
    [([0.3], [0.7], 1.1), ([-2.0], [3.0], 4.0), ([5.0], [0.05], 5.2), (*MANY, -3.0), (*MANY, 0.4), (*MANY, 2.5)],
)
def test_scores_of_one_row_meet_the_definitions(means, sds, y):
    """Of a Gaussian and of mixtures, against scipy and integrals."""
    m, s = np.array(means), np.array(sds)
    score = gaussian_scores(m, s, [y]) if len(m) == 1 else measures.mixture_scores(m[:, None], s[:, None], [y])

    def cdf(t):
        return float(np.mean(stats.norm.cdf(t, m, s)))

    assert score.sums["count"] == 1
    assert score.sums["squared-error"] == pytest.approx((m.mean() - y) ** 2)
    assert score.sums["absolute-error"] == pytest.approx(abs(m.mean() - y))
    assert score.sums["nll"] == pytest.approx(-math.log(np.mean(stats.norm.pdf(y, m, s))), rel=1e-12)
    low, high = (m - 12 * s).min(), max((m + 12 * s).max(), y + s[0])
    below, _ = integrate.quad(lambda t: cdf(t) ** 2, low, y, epsabs=1e-12, limit=200)
    above, _ = integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, high, epsabs=1e-12, limit=200)
    assert score.sums["crps"] == pytest.approx(below + above, rel=1e-8)  # ∫ (F(t) − 1[t ≥ y])² dt
    assert np.flatnonzero(score.arrays["evaluation.pit"]) == [min(int(cdf(y) * 20), 19)]
    for level in (50, 90, 95):
        assert score.sums[f"inside-{level}"] == float(abs(cdf(y) - 0.5) <= level / 200)


@pytest.mark.parametrize("kind", ["gaussian", "mixture", "bernoulli"])
def test_scores_of_pieces_add_to_the_scores_of_the_whole(kind):
    rng = np.random.default_rng(2)
    m, s, y = rng.normal(size=(3, 50)), rng.uniform(0.5, 2, (3, 50)), rng.normal(size=50)

    def score(rows):
        if kind == "gaussian":
            return gaussian_scores(m[0, rows], s[0, rows], y[rows])
        if kind == "mixture":
            return measures.mixture_scores(m[:, rows], s[:, rows], y[rows])
        return bernoulli_scores(1 / (1 + np.exp(-m[0, rows])), y[rows] > 0)

    whole, pieces = score(slice(None)), [score(slice(*ends)) for ends in ((0, 1), (1, 30), (30, 30), (30, 50))]
    sums = {name: sum(piece.sums[name] for piece in pieces) for name in whole.sums}
    assert sums == pytest.approx(whole.sums, rel=1e-12)
    for name, expected in whole.arrays.items():
        np.testing.assert_allclose(sum(piece.arrays[name] for piece in pieces), expected, rtol=1e-12)


def test_bernoulli_scores_and_figures_by_hand():
    scores = bernoulli_scores([0.9, 0.2, 0.6, 1.0], [1, 0, 0, 1])
    assert (scores.sums["count"], scores.sums["correct"]) == (4, 3)
    assert scores.sums["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.8) + math.log(0.4)))
    assert scores.sums["brier"] == pytest.approx(0.01 + 0.04 + 0.36)
    reliability = scores.arrays["evaluation.reliability"]
    assert bernoulli_scores([0.0], [1]).sums["nll"] == math.inf  # a wrong certainty
    np.testing.assert_allclose(reliability[9], [2, 1.9, 2])
    np.testing.assert_allclose(reliability.sum(axis=0), [4, 2.7, 2])
    result = combine({"x": ScoreSums.of(scores)}, 5.0)  # figures of classes have no units
    expected = {"accuracy": 3 / 4, "nll": scores.sums["nll"] / 4, "brier": 0.41 / 4}
    assert {name: result["test"][name] for name in expected} == pytest.approx(expected)
    assert result["test_standardised"] == result["test"]
    assert result["per_site"][0]["accuracy"] == 3 / 4


def test_class_scores_by_hand():
    """Three rows of three classes; the second one is wrong."""
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.15, 0.75], [0.0, 1.0, 0.0]])
    scores = measures.class_scores(p, [0, 1, 1])
    assert (scores.sums["count"], scores.sums["correct"]) == (3, 2)
    assert scores.sums["nll"] == pytest.approx(-math.log(0.5) - math.log(0.15))
    assert scores.sums["brier"] == pytest.approx(0.25 + 0.09 + 0.04 + 0.01 + 0.7225 + 0.5625)
    reliability = scores.arrays["evaluation.reliability"]
    filled = {i: tuple(row) for i, row in enumerate(reliability) if row.any()}
    assert filled == {5: (1, 0.5, 1), 7: (1, 0.75, 0), 9: (1, 1.0, 1)}  # bin 5 is [0.5, 0.6)
    alike = measures.class_scores(np.tile(p[0], (4, 1)), [0, 0, 0, 1]).arrays["evaluation.reliability"]
    assert tuple(alike[5]) == (4, 2.0, 3)  # every hit counts


CASES = ((0.3, 0.5, 0), (1.2, 0.2, 7), (-2.0, 0.9, 1), (3.0, 0.0, 20), (4.0, 0.3, 31))


@cache
def exact(mean, variance):
    """P(y = k) of the mixture for k = 0 … 2999, by adaptive quadrature over f."""
    k = np.arange(3000)
    if variance == 0:
        return stats.poisson.pmf(k, np.exp(mean))
    sd = np.sqrt(variance)

    def part(f):
        return stats.poisson.pmf(k, np.exp(f)) * stats.norm.pdf(f, mean, sd)

    found, _ = integrate.quad_vec(part, mean - 9 * sd, mean + 9 * sd, epsabs=1e-12)
    return found


@pytest.mark.parametrize(("mean", "variance", "count"), CASES)
def test_scores_of_a_count(mean, variance, count):
    pmf = exact(mean, variance)
    below = np.cumsum(pmf)
    found = Counts().scores(np.array([mean]), np.array([variance]), np.array([float(count)]), NONE, UNITS)
    assert found.sums["nll"] == pytest.approx(-np.log(pmf[count]), rel=1e-6)
    crps = np.sum((below - (np.arange(3000) >= count)) ** 2)
    assert found.sums["crps"] == pytest.approx(crps, rel=5e-3)  # F between the integers that are looked at
    rate = pmf @ np.arange(3000)
    assert found.sums["squared-error"] == pytest.approx((rate - count) ** 2, rel=1e-6)
    assert found.sums["absolute-error"] == pytest.approx(abs(rate - count), rel=1e-6)
    before = below[count - 1] if count else 0.0
    for level in (50, 90, 95):
        tail = (1 - level / 100) / 2
        inside = min(below[count], 1 - tail) - max(before, tail)
        assert found.sums[f"inside-{level}"] == pytest.approx(max(inside, 0.0) / (below[count] - before), abs=1e-6)
    bins = found.arrays["evaluation.pit"]
    assert bins.sum() == pytest.approx(1.0)
    edges = np.linspace(0, 1, 21)
    overlap = np.clip(np.minimum(edges[1:], below[count]) - np.maximum(edges[:-1], before), 0, None)
    assert bins == pytest.approx(overlap / (below[count] - before), abs=1e-6)


def test_quantiles_of_counts():
    """From the two moments of a count alone; they are whole numbers, and none is negative."""
    mean, variance = (np.array(column, dtype=float) for column in zip(*(case[:2] for case in CASES), strict=True))
    rate = np.exp(mean + variance / 2)
    found = count_quantiles(*log_rate_of(rate, np.sqrt(rate + rate**2 * np.expm1(variance))), QUANTILES)
    for column, case in zip(found.T, CASES, strict=True):
        below = np.cumsum(exact(*case[:2]))
        assert column.tolist() == [float(np.searchsorted(below, level)) for level in QUANTILES]


@pytest.mark.parametrize(("variance", "target"), [(-0.1, 1.0), (0.1, 1.5), (0.1, -1.0)])
def test_what_are_no_counts(variance, target):
    with pytest.raises(NumericsError):
        Counts().scores(np.zeros(1), np.array([variance]), np.array([target]), NONE, UNITS)


def test_figures_by_hand_with_sites_of_unequal_size():
    one, three = gaussian_scores([0.0], [1.0], [3.0]), gaussian_scores([0.0, 1.0, 2.0], [1.0] * 3, [0.0, 0.0, 2.0])
    result = combine({"b": ScoreSums.of(one), "a": ScoreSums.of(three)}, 2.0)
    test = result["test"]
    assert test["rmse"] == pytest.approx(math.sqrt((9 + 0 + 1 + 0) / 4))
    assert test["mae"] == pytest.approx(1.0)
    assert test["nll"] == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5 * (9 + 1) / 4)
    assert (test["coverage_50"], test["coverage_90"], test["coverage_95"]) == (0.5, 0.75, 0.75)
    assert [row["site"] for row in result["per_site"]] == ["a", "b"]
    assert [row["num_examples"] for row in result["per_site"]] == [3, 1]
    assert result["per_site"][1]["rmse"] == pytest.approx(3.0)
    assert result["calibration"] == {"pit": (one.arrays["evaluation.pit"] + three.arrays["evaluation.pit"]).tolist()}


def test_standardised_figures_are_those_of_standardised_predictions():
    rng = np.random.default_rng(0)
    m, s, y = rng.normal(size=40), rng.uniform(0.5, 2, 40), rng.normal(size=40)
    location, scale = 12.0, 5.0
    original = gaussian_scores(location + scale * m, scale * s, location + scale * y)
    expected = combine({"0": ScoreSums.of(gaussian_scores(m, s, y))}, 1.0)["test"]
    found = combine({"0": ScoreSums.of(original)}, scale)
    assert found["test_standardised"] == pytest.approx(expected, rel=1e-10)
    assert found["test"]["nll"] == pytest.approx(expected["nll"] + math.log(5.0))
    assert found["test"]["crps"] == pytest.approx(expected["crps"] * 5.0)
