"""Grades in an order: two grades are two classes, whole runs."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from test_outcomes import GAPS, log_mass

import fedgp_flower as fg
from fedgp_flower.agreement import agree
from fedgp_flower.data.standardisation import describe
from fedgp_flower.errors import DataError
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.likelihoods.grades import edges_of

HYPER = torch.tensor(GAPS, dtype=torch.float64).log()
GRADES = build_point_likelihood("ordinal")


def test_two_grades_are_two_classes():
    probit, none = build_point_likelihood("bernoulli"), torch.zeros(0).double()
    labels = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    at = torch.tensor([0.4, -2.0, 1.0], dtype=torch.float64), torch.tensor([0.1, 3.0, 25.0], dtype=torch.float64), none
    torch.testing.assert_close(GRADES.log_predictive(labels, *at), probit.log_predictive(labels, *at))
    torch.testing.assert_close(GRADES.moments(*at)[0][:, 1], probit.moments(*at)[0])
    assert GRADES.start({"share": 0.3}, 1.0) == pytest.approx(probit.start({"share": 0.3}, 1.0))
    assert GRADES.start_parameters({"share": 0.3}).numel() == 0


def test_without_inputs_grades_have_the_shares_that_they_start_from():
    known = {f"share of {level}": share for level, share in zip("abcd", (0.1, 0.4, 0.3, 0.2), strict=True)}
    f, hyper = torch.tensor([GRADES.start(known, 1.0)]).double(), GRADES.start_parameters(known)
    torch.testing.assert_close(
        GRADES.moments(f, torch.zeros(1), hyper)[0][0], torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    )
    exported = GRADES.to_gpytorch(hyper)
    torch.testing.assert_close(exported(f).probs[0], torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64))
    samples = torch.stack([HYPER, HYPER + 0.1])
    assert edges_of(samples).shape == (2, 6)
    assert GRADES.expected(torch.arange(5.0), torch.zeros(2, 5).double(), torch.ones(2, 5).double(), samples).shape == (
        2,
        5,
    )


def test_far_from_its_grade_a_density_is_small_but_not_zero():
    found = GRADES.log_density(
        torch.tensor([0.0, 2.0, 4.0]), torch.tensor([60.0, -70.0, -90.0], dtype=torch.float64), HYPER
    )
    assert found.tolist() == pytest.approx(
        [log_mass(g, None, f) for g, f in ((0, 60.0), (2, -70.0), (4, -90.0))], rel=1e-9
    )


def test_grades_are_agreed_in_their_order():
    frames = [pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": grades}) for grades in (["2", "10", "2"], ["10", "9", "9"])]
    told = {str(site): describe(frame, ["x"], "y") for site, frame in enumerate(frames)}
    found = agree(told, likelihood="ordinal")
    assert list(found.training_target) == ["share of 2", "share of 9", "share of 10"]
    assert not found.refused
    np.testing.assert_allclose(found.sums["0"][-1], [2.0, 0.0, 4.0 - 4.0 / 3])  # of numbers 0, 2, 0
    turned = agree(told, likelihood="ordinal", order=("9", "10", "2"))
    assert list(turned.training_target) == ["share of 9", "share of 10", "share of 2"]


def graded(rows=300):
    draw = np.random.default_rng(3)
    x = draw.uniform(-2, 2, rows)
    f = 2 * np.sin(2 * x) + draw.normal(size=rows)
    return pd.DataFrame({"x": x, "grade": 3 + np.digitize(f, [-1.5, 0.0, 1.2])})


QUICK = {"model.num-inducing": 12, "baselines.pooled": False, "baselines.max-evaluations": 20, "evaluate-every": 0}


def test_grades_are_learned_under_masks(tmp_path):
    frame = graded()
    options = QUICK | {"output-dir": str(tmp_path), "model.likelihood": "ordinal", "privacy.secure-aggregation": True}
    found = fg.run(frame, target="grade", sites=3, options=options | {"sgpr.exchanges": 25})
    table = found.posterior.predict(frame)
    assert list(table)[:4] == [f"probability of {grade}" for grade in (3, 4, 5, 6)]
    np.testing.assert_allclose(table.iloc[:, :4].sum(axis=1), 1)
    latent = 2 * np.sin(2 * frame["x"])
    right = np.diff(stats.norm.cdf(np.array([-np.inf, -1.5, 0, 1.2, np.inf]) - latent.to_numpy()[:, None]), axis=1)
    assert np.abs(table.iloc[:, :4].to_numpy() - right).mean() < 0.05
    np.testing.assert_allclose(table["mean"], table.iloc[:, :4] @ [3, 4, 5, 6])
    assert set(table["median"]) <= {3.0, 4.0, 5.0, 6.0}


def test_grades_that_are_words_need_their_order(tmp_path):
    frame = graded().assign(grade=lambda f: f["grade"].map({3: "none", 4: "mild", 5: "severe", 6: "worst"}))
    options = QUICK | {"output-dir": str(tmp_path), "model.likelihood": "ordinal", "sgpr.exchanges": 12}
    with pytest.raises(DataError, match=r"whole numbers.*`target` = 'grade,low<middle<high'"):
        fg.run(frame, target="grade", sites=3, options=options)
    with pytest.raises(DataError, match="another grade in row"):
        fg.run(frame, target="grade,none<mild<severe", sites=3, options=options)
    found = fg.run(frame, target="grade,none<mild<severe<worst", sites=3, options=options)
    table = found.posterior.predict(frame)
    assert list(table) == [f"probability of {grade}" for grade in ("none", "mild", "severe", "worst")] + ["median"]
    assert found.metrics.test["accuracy"] > 0.4
    assert found.metrics.local_only["nll"] > found.metrics.test["nll"]
    assert (found.path / "report.html").exists() or found.report().exists()
