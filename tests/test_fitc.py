"""FITC from sums: the evidence against its textbook density, the posterior, gradients, and sums that add up."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from test_sgpr import rows, unit_values

from fedgp_flower.gp.fitc import evidence, posterior, weighted_gradient, weighted_sums
from fedgp_flower.gp.models import LOCATIONS, SparseGP
from fedgp_flower.options import ModelSection

KERNELS = ("rbf", "rbf + l1", "matern52 + linear", "warp(rbf + l1)")


def model_of(kernel: str, shift: float = 0.0) -> SparseGP:
    return SparseGP.from_arrays(ModelSection(kernel=kernel), unit_values(kernel, shift))


def textbook(model: SparseGP, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Q + diag(K − Q) + σ²I of the rows, and Q between inducing points and rows' functions, by inverses."""
    z, kernel = model.inducing_points, model.kernel
    kzz, kzx, kxx = (k.to_dense().detach().numpy() for k in (kernel(z), kernel(z, x), kernel(x)))
    kzz = kzz + model.jitter * kzz.diagonal().mean() * np.eye(len(kzz))
    q = kzx.T @ np.linalg.solve(kzz, kzx)
    return q + np.diag(kxx.diagonal() - q.diagonal()) + float(model.noise.detach()) * np.eye(len(x)), q


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_evidence_and_its_best_scale_are_those_of_the_textbook_density(kernel):
    """N(y | 0, τ² C), C = Q + diag(K − Q) + σ²I; at half and double τ² it is lower."""
    (x, y), model = rows(), model_of(kernel)
    sums = weighted_sums(model, x, y)
    found, (covariance, _) = evidence(sums), textbook(model, x)
    at = lambda scale: multivariate_normal(np.zeros(len(x)), scale * covariance).logpdf(y.numpy())  # noqa: E731
    assert found.value == pytest.approx(at(found.scale), abs=1e-8)
    assert max(at(0.5 * found.scale), at(2 * found.scale)) < found.value
    folded = evidence(sums.scaled(found.scale))
    assert (folded.value, folded.scale) == (pytest.approx(found.value), pytest.approx(1.0))


def test_sums_of_parts_are_those_of_all_and_hold_those_of_the_first_points():
    (x, y), model = rows(), model_of("rbf + l1")
    whole, parts = weighted_sums(model, x, y), zip(x.split([7, 53]), y.split([7, 53]), strict=True)
    first, second = (weighted_sums(model, *part) for part in parts)
    for name, array in vars(first + second).items():
        np.testing.assert_allclose(array, getattr(whole, name), rtol=1e-12)
    curve = evidence(whole).curve
    for count in (1, 4, 7):
        assert curve[count - 1] == pytest.approx(evidence(whole.leading(count)).value)


def test_the_posterior_predicts_what_the_textbook_joint_does():
    """E[f* | y] = Q_*x C⁻¹ y and its variance, at the inducing points and elsewhere."""
    (x, y), model = rows(), model_of("rbf + l1")
    places = torch.cat([model.inducing_points.detach(), rows(9, 5)[0]])
    covariance, _ = textbook(model, x)
    cross = textbook(model, torch.cat([places, x]))[1][: len(places), len(places) :]
    with torch.no_grad():
        mean, variance = model.predict(places, posterior(weighted_sums(model, x, y)))
        prior = model.kernel(places, diag=True)
    assert mean.numpy() == pytest.approx(cross @ np.linalg.solve(covariance, y.numpy()), abs=1e-8)
    expected = prior.numpy() - np.sum(cross.T * np.linalg.solve(covariance, cross.T), 0) + float(model.noise.detach())
    assert variance.numpy() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_shares_of_the_gradient_add_up_to_finite_differences_of_the_evidence(kernel):
    (x, y), values = rows(), unit_values(kernel)
    section = ModelSection(kernel=kernel)

    def at(arrays: dict[str, np.ndarray]) -> float:
        covariance, _ = textbook(SparseGP.from_arrays(section, arrays), x)
        return multivariate_normal(np.zeros(len(x)), covariance).logpdf(y.numpy())

    model = SparseGP.from_arrays(section, values)
    q = posterior(weighted_sums(model, x, y))
    parts = zip(x.split([11, 49]), y.split([11, 49]), strict=True)
    (first, _), (second, _) = (weighted_gradient(model, *part, q) for part in parts)
    assert set(first) == set(values) - {LOCATIONS}
    for name, share in first.items():
        for index in np.ndindex(values[name].shape):
            step = np.zeros_like(values[name])
            step[index] = 1e-5
            slope = (at(values | {name: values[name] + step}) - at(values | {name: values[name] - step})) / 2e-5
            assert share[index] + second[name][index] == pytest.approx(slope, abs=1e-4), name


def test_the_score_of_the_noise_is_the_slope_of_the_evidence_by_noise_that_varies():
    """Σ z t is twice the slope by γ of the textbook density with λ e^{γz}; Σ (z t)² is that of each row alone."""
    (x, y), model = rows(), model_of("rbf + l1")
    (covariance, explained), q = textbook(model, x), posterior(weighted_sums(model, x, y))
    own = covariance.diagonal() - explained.diagonal()
    score = weighted_gradient(model, x, y, q)[1]
    each = np.stack([weighted_gradient(model, x[n : n + 1], y[n : n + 1], q)[1] for n in range(len(x))])
    np.testing.assert_allclose(score[0], each[:, 0].sum(0), atol=1e-10)
    np.testing.assert_allclose(score[1], (each[:, 0] ** 2).sum(0), rtol=1e-10)
    for number, z in enumerate([*x.numpy().T, *(x.numpy() ** 2 - 1).T]):
        varying = (explained + np.diag(own * np.exp(step * z)) for step in (1e-5, -1e-5))
        up, down = (multivariate_normal(cov=matrix).logpdf(y.numpy()) for matrix in varying)
        assert score[0, number] == pytest.approx((up - down) / 1e-5, abs=1e-4)
