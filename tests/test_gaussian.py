"""Natural-parameter Gaussians against textbook formulas, and the algebra as properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pvi_oracles import log_normaliser
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian

TIGHT = {"rtol": 1e-10, "atol": 1e-10}  # conditions stay below 1e3 here


def random_moments(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mean = torch.randn(size, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT / size + 0.3 * torch.eye(size, dtype=torch.float64)


def full(seed: int, size: int = 4) -> NaturalGaussian:
    return NaturalGaussian.from_moments(*random_moments(seed, size))


def diagonal(seed: int, size: int = 4) -> DiagonalGaussian:
    mean, covariance = random_moments(seed, size)
    return DiagonalGaussian.from_moments(mean, covariance.diagonal())


def torch_normal(q: Gaussian) -> MultivariateNormal:
    mean, covariance = q.moments()
    return MultivariateNormal(mean, covariance if covariance.ndim == 2 else covariance.diag())


@pytest.mark.parametrize("make", [full, diagonal])
def test_moments_return_what_was_put_in(make):
    mean, covariance = random_moments(3, 4)
    expected = covariance if make is full else covariance.diagonal()
    found_mean, found = make(3).moments()
    torch.testing.assert_close(found_mean, mean, **TIGHT)
    torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize("make", [full, diagonal])
def test_kl_is_that_of_torch(make):
    q, p = make(1), make(2)
    torch.testing.assert_close(q.kl(p), kl_divergence(torch_normal(q), torch_normal(p)), **TIGHT)
    assert float(q.kl(q)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("make", [full, diagonal])
def test_log_normaliser_turns_the_factor_into_the_density(make):
    """log N(x) = η₁ᵀx + xᵀη₂x − A(η) at any x."""
    q = make(5)
    x = torch.tensor([0.3, -1.2, 0.8, 2.0], dtype=torch.float64)
    quadratic = x @ q.eta2 @ x if q.eta2.ndim == 2 else q.eta2 @ x.square()
    torch.testing.assert_close(q.eta1 @ x + quadratic - log_normaliser(q), torch_normal(q).log_prob(x), **TIGHT)


def test_log_normaliser_of_one_dimension_is_the_integral():
    factor = DiagonalGaussian(*torch.tensor([[0.7], [-0.9]], dtype=torch.float64))
    x = torch.linspace(-15, 15, 200_001, dtype=torch.float64)
    integral = torch.trapezoid((0.7 * x - 0.9 * x.square()).exp(), x)
    assert float(log_normaliser(factor)) == pytest.approx(math.log(integral), abs=1e-10)


def test_product_of_two_normals():
    """N(0, 1) · N(3, ½): precision 3, mean 2."""
    one, half = torch.ones(1).double(), torch.full((1,), 0.5).double()
    product = DiagonalGaussian.from_moments(0 * one, one) * DiagonalGaussian.from_moments(3 * one, half)
    mean, variance = product.moments()
    assert float(mean) == pytest.approx(2.0)
    assert float(variance) == pytest.approx(1 / 3)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.01, 1.0), st.sampled_from([full, diagonal]))
def test_factor_algebra(seed, size, rho, make):
    a, b = make(seed, size), make(seed + 1, size)
    for left, right in [
        ((a * b) / b, a),
        (a * b, b * a),
        (a**rho * a ** (1 - rho), a),
        ((a * b) ** rho, a**rho * b**rho),
        (a * a.flat(), a),
    ]:
        torch.testing.assert_close(left.eta1, right.eta1, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(left.eta2, right.eta2, rtol=1e-9, atol=1e-9)
    assert (a * b).is_proper()
    assert float((a * b).kl(a)) >= 0.0


@pytest.mark.parametrize("make", [full, diagonal])
def test_an_improper_factor_is_allowed_until_moments_are_asked(make):
    factor = make(1) / make(1) ** 2.0
    assert not factor.is_proper()
    assert (factor * make(1) ** 2.0).is_proper()
    for ask in (factor.moments, factor.log_determinant, factor.mean):
        with pytest.raises(NumericsError, match=r"precision of a .*Gaussian"):
            ask()
    assert not make(1).flat().is_proper()


@pytest.mark.parametrize("make", [full, diagonal])
def test_non_finite_is_improper(make):
    q = make(1)
    assert not type(q)(q.eta1 * float("nan"), q.eta2).is_proper()


@pytest.mark.parametrize("make", [full, diagonal])
def test_arrays_are_bit_exact(make):
    q = make(9)
    back = type(q).from_arrays(q.to_arrays())
    assert torch.equal(back.eta1, q.eta1)
    assert torch.equal(back.eta2, q.eta2)
    assert all(a.dtype == np.float64 for a in q.to_arrays().values())


def test_variance_must_be_positive():
    with pytest.raises(NumericsError, match="must be positive"):
        DiagonalGaussian.from_moments(torch.zeros(2).double(), torch.tensor([1.0, 0.0]).double())


def test_standard_is_the_unit_normal():
    torch.testing.assert_close(
        torch_normal(DiagonalGaussian.standard(1)).log_prob(torch.zeros(1).double()),
        Normal(0.0, 1.0).log_prob(torch.zeros(()).double()),
    )
