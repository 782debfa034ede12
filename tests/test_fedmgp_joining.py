"""A unit that joins with few rows: integration over φ_m against brute force, and what must hold whatever the rows."""

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from fedgp_flower.methods.fedmgp.joining import AMPLITUDES, DECAY, SPREAD, WIDEST, predict_joining
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior
from fedgp_flower.methods.fedmgp.unit import UnitParameters, feature, predict, squared_gaps

AT = np.array([[-0.9], [0.05], [0.6]])


@pytest.fixture(scope="module")
def shared() -> tuple[LatentFunctions, LatentPosterior]:
    """One latent function, its values known where units saw it, and less at the right."""
    inducing = np.linspace(-1, 1, 8)[:, None]
    draw = np.random.default_rng(1).standard_normal(8)
    sd = np.where(inducing[:, 0] > 0.3, 0.5, 0.1)
    return LatentFunctions(inducing, np.array([[0.09]]), np.array([1.3]), 1e-8), LatentPosterior(draw, np.diag(sd**2))


def rows(count: int, shared: tuple[LatentFunctions, LatentPosterior]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a unit with s = .8, R = .05 and σ = .1."""
    rng = np.random.default_rng(count)
    x = rng.uniform(-1, 1, (count, 1))
    f, _ = predict(x, *shared, UnitParameters(np.array([[0.05]]), np.array([0.8]), 0.01))
    return x, f + 0.1 * rng.standard_normal(count)


def by_hand(
    x: np.ndarray, y: np.ndarray, shared: tuple[LatentFunctions, LatentPosterior]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and variance of f, and the mean of σ², by sums over an even grid of ρ, log σ and s."""
    latents, q = shared
    [factor], [a], scale, n = latents.whitening(), latents.amplitudes, latents.scales[0], len(y)
    power = np.mean(y**2)
    logs, means, seconds, noises = [], [], [], []
    for rho in WIDEST * (np.arange(25) + 0.5) / 25:
        both = np.concatenate([x, AT])
        A = feature(squared_gaps(both, latents.inducing), scale, float(a), factor, scale * (math.exp(rho) - 1) / 2)
        B = A @ q.covariance @ A.T + np.diag(a**2 - (A**2).sum(1))
        for log_sd in 0.5 * math.log(0.09 * power) + np.linspace(-4.5, 4.5, 15):
            for s in np.linspace(-3, 3, 41):
                C = s**2 * B + math.exp(2 * log_sd) * np.diag([1.0] * n + [0.0] * len(AT))
                prior = -0.5 * s**2 * a**2 / (AMPLITUDES * power) - DECAY * rho
                prior -= 0.5 * ((log_sd - 0.5 * math.log(0.09 * power)) / SPREAD) ** 2
                m = s * (A @ q.mean)
                logs.append(multivariate_normal.logpdf(y, m[:n], C[:n, :n]) + prior)
                gain = np.linalg.solve(C[:n, :n], C[:n, n:]).T
                means.append(m[n:] + gain @ (y - m[:n]))
                seconds.append(np.diag(C[n:, n:] - gain @ C[:n, n:]) + means[-1] ** 2)
                noises.append(math.exp(2 * log_sd))
    w = np.exp(np.array(logs) - max(logs))
    mean, second = (w @ np.array(each) / w.sum() for each in (means, seconds))
    return mean, second - mean**2, float(w @ np.array(noises) / w.sum())


def test_it_is_the_posterior_mixture_over_all_parameters(shared) -> None:
    """Three rows: both sums are within a few per cent of the integral, which spans orders of magnitude of σ."""
    x, y = rows(3, shared)
    mean, variance, noise = predict_joining((x, y), AT, *shared)
    expected = by_hand(x, y, shared)
    np.testing.assert_allclose(mean, expected[0], atol=0.04 * np.sqrt(expected[1]).max())
    np.testing.assert_allclose(variance, expected[1], rtol=0.08)
    assert noise == pytest.approx(expected[2], rel=0.1)


def test_with_many_rows_it_is_what_the_true_parameters_predict_and_the_rows_are_used(shared) -> None:
    x, y = rows(150, shared)
    truth = UnitParameters(np.array([[0.05]]), np.array([0.8]), 0.01)
    mean, variance, noise = predict_joining((x, y), AT, *shared)
    told, known = predict(AT, *shared, truth)
    assert noise == pytest.approx(0.01, rel=0.4)
    assert np.all(np.abs(mean - told) < 3 * np.sqrt(variance + known))
    assert np.all(variance < known)  # 150 rows say more of f than q(u) alone


def test_signs_and_units_do_not_matter_and_fewer_rows_mean_wider_bands(shared) -> None:
    x, y = rows(20, shared)
    mean, variance, noise = predict_joining((x, y), AT, *shared)
    turned = predict_joining((x, -1000 * y), AT, *shared)
    np.testing.assert_allclose(turned[0], -1000 * mean, rtol=1e-6)
    np.testing.assert_allclose(turned[1], 1e6 * variance, rtol=1e-6)
    assert turned[2] == pytest.approx(1e6 * noise, rel=1e-6)
    wide = predict_joining((x[:3], y[:3]), AT, *shared)
    assert np.all(wide[1] + wide[2] > variance + noise)
