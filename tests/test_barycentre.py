"""The barycentre against POT, closed forms, and its defining equation in 60 digits."""

import mpmath
import numpy as np
import pytest
from ot.gaussian import bures_wasserstein_barycenter

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.barycentre import barycentre, wasserstein_distance


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def random_factors(rng, sites, size, condition):
    """Lower factors of randomly rotated covariances with the given condition number."""
    rotations = np.linalg.qr(rng.normal(size=(sites, size, size)))[0]
    roots = rotations * np.geomspace(1.0, condition**-0.5, size) * np.exp(rng.normal(size=(sites, 1, 1)) / 2)
    return np.linalg.cholesky(roots @ roots.mT)


@pytest.mark.parametrize("condition", [1e4, 1e10])
def test_solves_its_defining_equation_in_sixty_digits(rng, condition):
    """Whitened: ‖F⁻ᵀ Σ wₖ (FᵀSₖF)^½ F⁻¹ − I‖, which sees the smallest direction as well as the largest."""
    factors, weights = random_factors(rng, 3, 4, condition), np.array([0.2, 0.3, 0.5])
    _, found = barycentre(np.zeros((3, 4)), factors, weights)
    with mpmath.workdps(60):
        factor, total = mpmath.matrix(found.tolist()), mpmath.zeros(4)
        for weight, site in zip(weights, factors, strict=True):
            half = mpmath.matrix(site.tolist()).T * factor
            values, vectors = mpmath.eigsy(half.T * half)
            total += mpmath.mpf(weight) * vectors * mpmath.diag([mpmath.sqrt(v) for v in values]) * vectors.T
        inverse = factor**-1
        gap = inverse.T * total * inverse - mpmath.eye(4)
        worst = max(abs(entry) for entry in gap)
    assert worst < 1e-10


def test_agrees_with_python_optimal_transport(rng):
    means, weights, factors = rng.normal(size=(5, 8)), rng.dirichlet(np.ones(5)), random_factors(rng, 5, 8, 1e4)
    centre, factor = barycentre(means, factors, weights)
    mean, covariance = bures_wasserstein_barycenter(means, factors @ factors.mT, weights, num_iter=5000, eps=1e-14)
    np.testing.assert_allclose(centre, mean, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(factor @ factor.T, covariance, rtol=0, atol=1e-8 * np.abs(covariance).max())


def test_means_and_diagonal_scales_average_and_agree_with_the_full_iteration(rng):
    means, scales, weights = rng.normal(size=(4, 6)), rng.uniform(0.1, 3.0, (4, 6)), np.array([1.0, 2.0, 3.0, 4.0])
    centre, diagonal = barycentre(means, scales, weights)
    np.testing.assert_allclose([centre, diagonal], [weights / 10 @ part for part in (means, scales)], rtol=1e-13)
    _, full = barycentre(means, np.stack([np.diag(s) for s in scales]), weights, max_iterations=6)
    np.testing.assert_allclose(full, np.diag(diagonal), rtol=0, atol=1e-10)


def test_the_distance_is_that_of_the_trace_formula(rng):
    means, factors = rng.normal(size=(2, 4)), random_factors(rng, 2, 4, 1e2)
    nuclear = np.linalg.svd(factors[0].T @ factors[1], compute_uv=False).sum()
    squared = np.sum((means[0] - means[1]) ** 2) + np.sum(factors[0] ** 2) + np.sum(factors[1] ** 2) - 2 * nuclear
    assert wasserstein_distance(means[0], factors[0], means[1], factors[1]) == pytest.approx(squared**0.5, rel=1e-12)
    scalar = wasserstein_distance(np.zeros(1), np.array([2.0]), np.array([3.0]), np.array([6.0]))
    assert scalar == pytest.approx(5.0)


def test_what_does_not_converge_is_refused(rng):
    with pytest.raises(NumericsError, match="did not converge"):
        barycentre(np.zeros((2, 3)), random_factors(rng, 2, 3, 10.0), np.ones(2), max_iterations=1)
