"""Natural-parameter Gaussians against textbook formulas, and the algebra as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal, kl_divergence

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
def test_moments_are_those_that_were_put_in_and_kl_is_that_of_torch(make):
    mean, covariance = random_moments(3, 4)
    found_mean, found = make(3).moments()
    torch.testing.assert_close(found_mean, mean, **TIGHT)
    torch.testing.assert_close(found, covariance if make is full else covariance.diagonal(), **TIGHT)
    q, p = make(1), make(2)
    torch.testing.assert_close(q.kl(p), kl_divergence(torch_normal(q), torch_normal(p)), **TIGHT)
    assert float(q.kl(q)) == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.01, 1.0), st.sampled_from([full, diagonal]))
def test_factor_algebra(seed, size, rho, make):
    a, b = make(seed, size), make(seed + 1, size)
    for left, right in [
        (type(a).from_arrays(a.to_arrays()), a),
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
    for ask in (factor.moments, factor.described, factor.mean):
        with pytest.raises(NumericsError, match=r"precision of a .*Gaussian"):
            ask()
    assert not make(1).flat().is_proper()
    assert not type(factor)(make(1).eta1 * float("nan"), make(1).eta2).is_proper()
