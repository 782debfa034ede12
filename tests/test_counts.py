"""Scores of counts against sums and integrals written out, and a run whose targets are counts."""

import numpy as np
import pytest
from scipy import integrate, stats

from fedgp_flower.errors import NumericsError
from fedgp_flower.run.predict import QUANTILES
from fedgp_flower.scores import count_quantiles, count_scores

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
        low, high = (int(np.searchsorted(below, p)) for p in (tail, 1 - tail))
        assert found.sums[f"inside-{level}"] == float(low <= count <= high)
    bins = found.arrays["evaluation.pit"]
    assert bins.sum() == pytest.approx(1.0)
    edges = np.linspace(0, 1, 21)
    overlap = np.clip(np.minimum(edges[1:], below[count]) - np.maximum(edges[:-1], before), 0, None)
    assert bins == pytest.approx(overlap / (below[count] - before), abs=1e-6)


def test_quantiles_of_counts() -> None:
    """From the two moments of a count alone; they are whole numbers, and none is negative."""
    mean, variance = (np.array(column, dtype=float) for column in zip(*(case[:2] for case in CASES), strict=True))
    rate = np.exp(mean + variance / 2)
    found = count_quantiles(rate, np.sqrt(rate + rate**2 * np.expm1(variance)), QUANTILES)
    for column, case in zip(found.T, CASES, strict=True):
        below = np.cumsum(exact(*case[:2]))
        assert column.tolist() == [float(np.searchsorted(below, level)) for level in QUANTILES]


@pytest.mark.parametrize(("variance", "target"), [(-0.1, 1.0), (0.1, 1.5), (0.1, -1.0)])
def test_what_are_no_counts(variance: float, target: float) -> None:
    with pytest.raises(NumericsError):
        count_scores(np.zeros(1), np.array([variance]), np.array([target]))
