"""Scores: against their definitions, by hand, added over pieces and sites, and of counts."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from fedgp_flower.count_scores import count_quantiles, count_scores, log_rate_of
from fedgp_flower.errors import NumericsError
from fedgp_flower.run.predict import QUANTILES
from fedgp_flower.scores import Scores, bernoulli_scores, class_scores, gaussian_scores, mixture_scores
from fedgp_flower.shared_messages import ScoreSums
from strategies.server.scoring import combine

MANY = ([-1.0, 0.5, 3.0, 3.1], [0.3, 1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("means", "sds", "y"),
    [([0.3], [0.7], 1.1), ([-2.0], [3.0], 4.0), ([5.0], [0.05], 5.2), (*MANY, -3.0), (*MANY, 0.4), (*MANY, 2.5)],
)
def test_scores_of_one_row_meet_the_definitions(means, sds, y):
    """Of a Gaussian and of mixtures, against scipy and integrals."""
    m, s = np.array(means), np.array(sds)
    score = gaussian_scores(m, s, [y]) if len(m) == 1 else mixture_scores(m[:, None], s[:, None], [y])

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

    def score(rows: slice) -> Scores:
        if kind == "gaussian":
            return gaussian_scores(m[0, rows], s[0, rows], y[rows])
        if kind == "mixture":
            return mixture_scores(m[:, rows], s[:, rows], y[rows])
        return bernoulli_scores(1 / (1 + np.exp(-m[0, rows])), y[rows] > 0)

    whole, pieces = score(slice(None)), [score(slice(*ends)) for ends in ((0, 1), (1, 30), (30, 30), (30, 50))]
    sums = {name: sum(piece.sums[name] for piece in pieces) for name in whole.sums}
    assert sums == pytest.approx(whole.sums, rel=1e-12)
    for name, expected in whole.arrays.items():
        np.testing.assert_allclose(sum(piece.arrays[name] for piece in pieces), expected, rtol=1e-12)


def test_bernoulli_scores_by_hand():
    scores = bernoulli_scores([0.9, 0.2, 0.6, 1.0], [1, 0, 0, 1])
    assert (scores.sums["count"], scores.sums["correct"]) == (4, 3)
    assert scores.sums["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.8) + math.log(0.4)))
    assert scores.sums["brier"] == pytest.approx(0.01 + 0.04 + 0.36)
    reliability = scores.arrays["evaluation.reliability"]
    assert bernoulli_scores([0.0], [1]).sums["nll"] == math.inf  # a wrong certainty
    np.testing.assert_allclose(reliability[9], [2, 1.9, 2])
    np.testing.assert_allclose(reliability.sum(axis=0), [4, 2.7, 2])


def test_class_scores_by_hand():
    """Three rows of three classes; the second one is wrong."""
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.15, 0.75], [0.0, 1.0, 0.0]])
    scores = class_scores(p, [0, 1, 1])
    assert (scores.sums["count"], scores.sums["correct"]) == (3, 2)
    assert scores.sums["nll"] == pytest.approx(-math.log(0.5) - math.log(0.15))
    assert scores.sums["brier"] == pytest.approx(0.25 + 0.09 + 0.04 + 0.01 + 0.7225 + 0.5625)
    reliability = scores.arrays["evaluation.reliability"]
    filled = {i: tuple(row) for i, row in enumerate(reliability) if row.any()}
    assert filled == {5: (1, 0.5, 1), 7: (1, 0.75, 0), 9: (1, 1.0, 1)}  # bin 5 is [0.5, 0.6)


CASES = ((0.3, 0.5, 0), (1.2, 0.2, 7), (-2.0, 0.9, 1), (3.0, 0.0, 20), (4.0, 0.3, 31))


def exact(mean: float, variance: float) -> np.ndarray:
    """P(y = k) of the mixture for k = 0 … 2999, by adaptive quadrature over f."""
    k = np.arange(3000)
    if variance == 0:
        return stats.poisson.pmf(k, np.exp(mean))
    sd = np.sqrt(variance)

    def part(f: float) -> np.ndarray:
        return stats.poisson.pmf(k, np.exp(f)) * stats.norm.pdf(f, mean, sd)

    found, _ = integrate.quad_vec(part, mean - 9 * sd, mean + 9 * sd, epsabs=1e-12)
    return found


@pytest.mark.parametrize(("mean", "variance", "count"), CASES)
def test_scores_of_a_count(mean: float, variance: float, count: int) -> None:
    pmf = exact(mean, variance)
    below = np.cumsum(pmf)
    found = count_scores(np.array([mean]), np.array([variance]), np.array([float(count)]))
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


def test_quantiles_of_counts() -> None:
    """From the two moments of a count alone; they are whole numbers, and none is negative."""
    mean, variance = (np.array(column, dtype=float) for column in zip(*(case[:2] for case in CASES), strict=True))
    rate = np.exp(mean + variance / 2)
    found = count_quantiles(*log_rate_of(rate, np.sqrt(rate + rate**2 * np.expm1(variance))), QUANTILES)
    for column, case in zip(found.T, CASES, strict=True):
        below = np.cumsum(exact(*case[:2]))
        assert column.tolist() == [float(np.searchsorted(below, level)) for level in QUANTILES]


@pytest.mark.parametrize(("variance", "target"), [(-0.1, 1.0), (0.1, 1.5), (0.1, -1.0)])
def test_what_are_no_counts(variance: float, target: float) -> None:
    with pytest.raises(NumericsError):
        count_scores(np.zeros(1), np.array([variance]), np.array([target]))


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


def test_classification_figures_have_no_units():
    sites = {"x": bernoulli_scores([0.8, 0.4], [1, 1]), "y": bernoulli_scores([0.1], [0])}
    result = combine({site: ScoreSums.of(score) for site, score in sites.items()}, 1.0)
    nll = -(math.log(0.8) + math.log(0.4) + math.log(0.9)) / 3
    expected = {"accuracy": 2 / 3, "nll": nll, "brier": (0.04 + 0.36 + 0.01) / 3}
    assert {name: result["test"][name] for name in expected} == pytest.approx(expected)
    assert result["test_standardised"] == result["test"]
    assert result["per_site"][0]["accuracy"] == 0.5
