"""What sees all rows in one place: an exact GP from several starts, a sparse one of the run's size, and boosting."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedgp_flower as fg
from fedgp_flower.clients import baselines
from fedgp_flower.clients.boosting import LOSSES, boosted
from fedgp_flower.data.sites import SiteData
from fedgp_flower.gp.models import ExactGP
from fedgp_flower.options import MULTICLASS, ModelSection
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.summary import verdict
from fedgp_flower.scores import TargetUnits

UNITS = TargetUnits(0.0, 1.0)


def steps(likelihood: str, rows: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


@pytest.mark.parametrize("likelihood", sorted(LOSSES))
def test_boosting_comes_near_the_best_score(likelihood: str) -> None:
    """Never below the score of the truth by more than chance, and near it: noise is neither missed nor invented."""
    x, y, _ = steps(likelihood)
    x_test, y_test, known = steps(likelihood, seed=1)
    rows = SiteData(x, y, x_test, y_test, 0)
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


def test_the_slope_of_the_evidence_is_that_of_its_definition() -> None:
    """½ (ααᵀ − C⁻¹) against autograd through log N(y | 0, C)."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(30, 2, generator=draw).double(), torch.randn(30, generator=draw).double()
    model = ExactGP(ModelSection(kernel="rbf + linear"), x, y)
    plain = torch.distributions.MultivariateNormal(torch.zeros(30).double(), model.covariance()).log_prob(y) / 30
    torch.testing.assert_close(model.log_evidence(), plain)
    found, wanted = (torch.autograd.grad(v, [*model.parameters()]) for v in (model.log_evidence(), plain))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_sparse_fit_with_a_point_at_every_row_is_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where points are rows, bound and prediction are those of the exact GP, whose hyperparameters fit as well."""
    draw = np.random.default_rng(0)
    x, x_test = draw.uniform(-2, 2, (70, 1)), draw.uniform(-2, 2, (200, 1))
    rows = SiteData(x, np.sin(3 * x[:, 0]) + 0.1 * draw.standard_normal(70), x_test, np.sin(3 * x_test[:, 0]), 0)
    config = parse_config({"dataset": "sine", "method": "sgpr", "model.num-inducing": 20})
    exact = baselines.scores(rows, config, UNITS, 70).sums
    monkeypatch.setattr(baselines, "POOLED_ROWS", 50)
    sparse = baselines.scores(rows, config, UNITS, 70).sums
    assert sparse["nll"] / 200 == pytest.approx(exact["nll"] / 200, abs=0.02)
    assert sparse["squared-error"] == pytest.approx(exact["squared-error"], rel=0.1)
    assert exact["squared-error"] / 200 < 0.05**2


def test_a_run_says_where_all_rows_in_one_place_are_better(tmp_path: Any) -> None:
    x, y, _ = steps("gaussian", rows=300)
    frame = pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y})
    options = {"method": "local-only", "output-dir": str(tmp_path), "baselines.max-evaluations": 30}
    metrics = fg.run(frame, target="y", sites=3, options=options).metrics
    assert metrics.boosting["nll"] < metrics.pooled["nll"] < metrics.test["nll"]
    assert metrics.boosting["rmse"] == pytest.approx(0.1, abs=0.1)
    assert verdict(metrics).startswith("With a higher NLL than gradient boosting of all rows in one place (")


def test_noise_that_varies_does_not_explain_what_the_mean_can() -> None:
    """A fit that starts with all of q at the prior takes the function for noise and has R² near 0."""
    draw = np.random.default_rng(1)
    x = draw.uniform(-1.7, 1.7, 300)
    bump, width = np.exp(-np.square((x + 0.4) / 0.35)), np.exp(-np.square(x / 0.7))
    y = 1 - 3 * bump + (0.05 + 0.6 * width) * draw.standard_normal(300)
    rows = SiteData(x[:240, None], y[:240], x[240:, None], y[240:], 0)
    section = {"model.likelihood": "heteroscedastic", "model.num-inducing": 20, "baselines.max-evaluations": 50}
    found = baselines.scores(rows, parse_config({"dataset": "sine", "method": "svgp", **section}), UNITS, 20).sums
    assert found["squared-error"] < 0.5 * np.square(y[240:] - y[:240].mean()).sum()
