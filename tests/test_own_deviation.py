"""A unit's own deviation: the conditional Gaussian written out, and bands that cover what plain ones do not."""

from __future__ import annotations

import numpy as np
import pytest
from test_exact_q import OPTIONS, grid, random_unit

from fedgp_flower.methods.fedmgp import deviation as own_deviation
from fedgp_flower.methods.fedmgp.deviation import predict_with_deviation
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior
from fedgp_flower.methods.fedmgp.unit import UnitData, UnitParameters, features, maximise, predict, squared_gaps


@pytest.mark.parametrize(("num_latents", "dims"), [(1, 1), (2, 2)])
def test_prediction_is_the_conditional_of_the_joint(
    num_latents: int, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At fixed τ, P, σ²: every term of the covariance by hand, rows and new inputs in one matrix."""
    latents, q, data, phi, x = random_unit(num_latents, dims)
    monkeypatch.setattr(own_deviation._Deviation, "fit", lambda self, most: None)
    new = np.random.default_rng(4).uniform(-1.3, 1.3, (6, dims))
    mean, variance, noise = predict_with_deviation((x, data.y), new, latents, q, phi)
    both, J = np.vstack([x, new]), len(latents.inducing)
    K = features(squared_gaps(both, latents.inducing), latents, latents.whitening(), phi.smoothing)
    A = np.hstack([s * k for s, k in zip(phi.amplitudes, K, strict=True)])
    joint = A @ q.covariance @ A.T
    at_w = features(squared_gaps(latents.inducing, latents.inducing), latents, latents.whitening(), phi.smoothing)
    for i, (k, w) in enumerate(zip(K, at_w, strict=True)):
        shape, own = k @ q.mean[i * J : (i + 1) * J], w @ q.mean[i * J : (i + 1) * J]
        power = max(np.mean(shape[: len(x)] ** 2), 0.1 * np.mean(own**2))
        joint += np.outer(shape, shape) * np.mean(data.y**2) / power
    P = (0.1 * np.ptp(x, axis=0)) ** 2
    joint += 0.5 * phi.noise * np.exp(-0.5 * np.sum((both[:, None] - both) ** 2 / P, axis=-1))
    n = len(x)
    gain = np.linalg.solve(joint[:n, :n] + 0.5 * phi.noise * np.eye(n), joint[:n, n:]).T
    unexplained = np.sum((phi.amplitudes * latents.amplitudes) ** 2) - np.sum(A[n:] ** 2, axis=1)
    np.testing.assert_allclose(mean, gain @ data.y, rtol=1e-6, atol=1e-8)
    expected = np.diag(joint)[n:] + unexplained - np.sum(gain * joint[n:, :n], axis=1)
    np.testing.assert_allclose(variance, expected, rtol=1e-6, atol=1e-8)
    assert noise == pytest.approx(0.5 * phi.noise)


def known_curve() -> tuple[Latents, Posterior]:
    """g = sin(4w) + ½ cos(7w), known to a thousandth."""
    W = grid(1)
    latents = Latents(W, np.full((1, 1), 0.09), np.ones(1))
    g = np.sin(4 * W[:, 0]) + 0.5 * np.cos(7 * W[:, 0])
    return latents, Posterior(np.linalg.solve(latents.whitening()[0], g), 1e-6 * np.eye(len(W)))


def coverage(deviation: float) -> tuple[float, float, float]:
    """Share of the unseen half inside the 95 % band, plain and with a deviation; mean width over the noise's."""
    latents, q = known_curve()
    rng = np.random.default_rng(0)
    x = np.linspace(-1, 1, 120)[:, None]
    inside, widths = [], []
    K = 0.3**2 * np.exp(-0.5 * (x - x.T) ** 2 / 0.3**2) + 1e-8 * np.eye(120)
    for _ in range(6):
        f = 1.5 * (np.sin(4 * x[:, 0]) + 0.5 * np.cos(7 * x[:, 0]))
        y = f + deviation * np.linalg.cholesky(K) @ rng.standard_normal(120) + 0.02 * rng.standard_normal(120)
        seen = x[:, 0] < 0.2
        start = UnitParameters(np.full((1, 1), 0.01), np.ones(1), 0.1)
        phi = maximise(UnitData.build(x[seen], y[seen], latents.inducing), latents, q, start, OPTIONS, coarse=True)
        plain, spread = predict(x[~seen], latents, q, phi)
        own, wider, noise = predict_with_deviation((x[seen], y[seen]), x[~seen], latents, q, phi)
        z = np.abs(plain - y[~seen]) / np.sqrt(spread + phi.noise), np.abs(own - y[~seen]) / np.sqrt(wider + noise)
        inside.append([np.mean(part < 1.96) for part in z])
        widths.append(np.mean(np.sqrt(wider + noise)) / 0.02)
    return *np.mean(inside, axis=0), float(np.mean(widths))


def test_bands_cover_a_unit_that_is_no_exact_mixture() -> None:
    plain, own, _ = coverage(1.0)
    assert plain < 0.6
    assert own > 0.7


def test_an_exact_mixture_keeps_narrow_bands() -> None:
    _, own, width = coverage(0.0)
    assert own > 0.85
    assert width < 3


def test_a_function_that_is_flat_at_the_rows_does_not_explode_beyond_them() -> None:
    """g rises only where the unit saw nothing: no row speaks of its amplitude, which stays of the signal's size."""
    W = np.linspace(-1.1, 1.1, 24)[:, None]
    latents = Latents(W, np.full((1, 1), 0.04), np.ones(1))
    g = 1.5 * np.exp(-0.5 * ((W[:, 0] - 0.7) / 0.15) ** 2)
    q = Posterior(np.linalg.solve(latents.whitening()[0], g), 1e-6 * np.eye(len(W)))
    x = np.linspace(-1, -0.1, 30)[:, None]
    y = 0.3 * np.sqrt(2) * np.sin(9 * x[:, 0]) + 0.05 * np.random.default_rng(2).standard_normal(30)
    phi = UnitParameters(np.full((1, 1), 1e-3), np.array([0.3]), 0.09)
    mean, variance, _ = predict_with_deviation((x, y), np.linspace(0.3, 1, 15)[:, None], latents, q, phi)
    assert np.abs(mean).max() < 3
    assert 0.5 < np.sqrt(variance).max() < 3  # √10 times a signal of 0.3, where g is twice its mean square
