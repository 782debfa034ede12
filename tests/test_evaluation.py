import math

import numpy as np
import pytest

from fedgp_flower.scores import bernoulli_scores, gaussian_scores
from fedgp_flower.shared_messages import ScoreSums
from strategies.server.scoring import combine


def predictions(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=n), rng.uniform(0.5, 2, n), rng.normal(size=n)


def test_figures_by_hand_with_sites_of_unequal_size():
    sites = {
        "b": gaussian_scores([0.0], [1.0], [3.0]),
        "a": gaussian_scores([0.0, 1.0, 2.0], [1.0] * 3, [0.0, 0.0, 2.0]),
    }
    result = combine({site: ScoreSums.of(score) for site, score in sites.items()}, 2.0)
    test = result["test"]
    assert test["rmse"] == pytest.approx(math.sqrt((9 + 0 + 1 + 0) / 4))
    assert test["mae"] == pytest.approx(1.0)
    assert test["nll"] == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5 * (9 + 1) / 4)
    assert (test["coverage_50"], test["coverage_90"], test["coverage_95"]) == (0.5, 0.75, 0.75)
    assert [row["site"] for row in result["per_site"]] == ["a", "b"]
    assert [row["num_examples"] for row in result["per_site"]] == [3, 1]
    assert result["per_site"][1]["rmse"] == pytest.approx(3.0)
    pit = sum(score.arrays["evaluation.pit"] for score in sites.values())
    assert result["calibration"] == {"pit": pit.tolist()}


def test_standardised_figures_are_those_of_standardised_predictions():
    m, s, y = predictions(40)
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
