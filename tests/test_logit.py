"""E log σ and its slopes under a Gaussian: quadrature with very many nodes, and derivatives of the value itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import expit, log_expit

from fedgp_flower.gp.logit import Logit, expected_softplus, mixture

HYPER = torch.zeros(0, dtype=torch.float64)


def test_the_mixture_is_the_logistic_distribution():
    width, weight = (part.numpy()[:, None] for part in mixture())
    f = np.linspace(-40, 40, 4001)
    assert np.abs((weight * stats.norm.cdf(f / width)).sum(0) - expit(f)).max() < 1e-9
    assert (weight > 0).all()


@pytest.mark.parametrize(("mean", "sd"), [(0.3, 0.1), (-2.0, 1.0), (4.0, 6.0), (-1.0, 40.0)])
def test_expectations_are_integrals(mean, sd):
    def integral(function):
        ends = (mean - 12 * sd, mean + 12 * sd)
        points = [p for p in (-3.0, 0.0, 3.0) if ends[0] < p < ends[1]]
        return integrate.quad(lambda f: function(f) * stats.norm.pdf(f, mean, sd), *ends, points=points, limit=400)[0]

    found = expected_softplus(*(torch.tensor([v], dtype=torch.float64) for v in (mean, sd**2)))
    wanted = integral(lambda f: -log_expit(-f)), integral(expit), integral(lambda f: expit(f) * expit(-f))
    np.testing.assert_allclose([float(part) for part in found], wanted, rtol=0, atol=2e-8)


def test_slopes_are_the_derivatives_of_the_value():
    y = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    mean = torch.tensor([0.5, -3.0, 1.0], dtype=torch.float64)
    variance = torch.tensor([0.2, 4.0, 30.0], dtype=torch.float64)
    own, base = Logit(), super(Logit, Logit())
    for mine, other in zip(own.slopes(y, mean, variance, HYPER), base.slopes(y, mean, variance, HYPER), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_the_predictive_probability_is_that_of_both_labels():
    mean, variance = (torch.tensor(v, dtype=torch.float64) for v in ([-30.0, 0.4], [2.0, 9.0]))
    log_one = Logit().log_predictive(torch.ones(2), mean, variance, HYPER)
    torch.testing.assert_close(log_one.exp(), Logit().moments(mean, variance, HYPER)[0], rtol=1e-12, atol=1e-15)
    exact = stats.norm.expect(expit, loc=-30.0, scale=2.0**0.5)
    assert float(log_one[0].exp()) == pytest.approx(exact, abs=1e-12)
