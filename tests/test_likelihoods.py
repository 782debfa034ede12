"""The likelihoods: equal to those of GPyTorch, to quadrature, to Monte Carlo and to closed forms."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy import integrate, stats

from fedgp_flower.gp.likelihoods import (
    GaussianNoise,
    LearnedLikelihood,
    Noise,
    build_point_likelihood,
)
from fedgp_flower.gp.probit import expected_log_probit

KINDS = ("gaussian", "bernoulli", "poisson", "student-t")


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def setting(name):
    """Targets, mean and variance of f, and two samples of the parameters."""
    y = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    mean = torch.tensor([[0.3, -0.5, 0.1, 0.0], [0.1, 0.4, -0.2, 0.2]], dtype=torch.float64)
    point = build_point_likelihood(name, noise=0.3)
    hyper = torch.stack([point.initial, point.initial + 0.2])
    return point, y, mean, 1e-3 * (1 + 2 * mean.abs()), hyper


@pytest.mark.parametrize("name", KINDS)
def test_they_are_the_likelihoods_of_gpytorch(name):
    """The variance is small because GPyTorch's log Φ is exact only for |f| < 1."""
    point, y, mean, variance, hyper = setting(name)
    for s in range(2):
        theirs = point.to_gpytorch(hyper[s])
        q = MultivariateNormal(mean[s], DiagLinearOperator(variance[s]))
        ours = y, mean[s], variance[s], hyper[s]
        torch.testing.assert_close(point.expected(*ours), theirs.expected_log_prob(y, q), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(point.log_predictive(*ours), theirs.log_marginal(y, q), rtol=1e-9, atol=1e-12)
        conditional = theirs(mean[s]) if name != "gaussian" else theirs(mean[s], noise=theirs.noise)
        torch.testing.assert_close(point.log_density(y, mean[s], hyper[s]), conditional.log_prob(y), rtol=1e-9, atol=0)
        certain = point.moments(mean[s], torch.zeros_like(mean[s]), hyper[s])
        for mine, other in zip(certain, (conditional.mean, conditional.variance), strict=True):
            torch.testing.assert_close(mine, other.expand_as(mine), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_samples_of_the_parameters_are_computed_at_once(name):
    point, y, mean, variance, hyper = setting(name)
    for function in (point.expected, point.log_predictive):
        together = function(y, mean, variance, hyper)
        torch.testing.assert_close(
            together, torch.stack([function(y, mean[s], variance[s], hyper[s]) for s in range(2)]), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("name", KINDS)
def test_closed_forms_are_what_quadrature_finds(name):
    """The base class integrates; what a likelihood replaces by a closed form stays the same integral."""
    _, y, mean, _, hyper = setting(name)
    variance, point = 0.3 + mean.abs(), build_point_likelihood(name, noise=0.3, nodes=100)
    base = super(type(point), point)
    arguments = y, mean, variance, hyper
    torch.testing.assert_close(point.expected(*arguments), base.expected(*arguments), rtol=1e-9, atol=1e-9)
    narrow = 1e-4 if name == "gaussian" else 1e-9  # a density narrower than f
    torch.testing.assert_close(
        point.log_predictive(*arguments), base.log_predictive(*arguments), rtol=narrow, atol=1e-9
    )


@pytest.mark.parametrize("name", KINDS)
def test_moments_follow_from_those_given_f(name):
    """The laws of total expectation and variance, over 100 nodes."""
    point, _, mean, _, hyper = setting(name)
    variance = 0.3 + mean.abs()
    nodes, weights = (torch.from_numpy(part)[:, None, None] for part in np.polynomial.hermite_e.hermegauss(100))
    f = mean + variance.sqrt() * nodes
    centre, spread = point.moments(f, torch.zeros_like(f), hyper)
    weights = weights / weights.sum()
    first, second = (weights * centre).sum(0), (weights * (spread + centre.square())).sum(0)
    found = point.moments(mean, variance, hyper)
    torch.testing.assert_close(found[0], first, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], second - first.square(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
def test_an_offset_that_is_known_changes_nothing(name):
    point, y, mean, variance, _ = setting(name)
    zero = torch.zeros(()).double()
    noise, plain = Noise(2 * point.initial[0] if name == "gaussian" else zero, zero, zero, zero), point.initial
    torch.testing.assert_close(
        point.expected_with(y, mean, variance, noise), point.expected(y, mean, variance, plain), rtol=1e-12, atol=0
    )
    for with_offset, without in zip(
        point.moments_with(mean, variance, noise), point.moments(mean, variance, plain), strict=True
    ):
        torch.testing.assert_close(with_offset, without, rtol=1e-12, atol=0)


def test_a_learned_likelihood_has_a_gradient_by_its_parameters():
    point, y, mean, variance, hyper = setting("student-t")
    learned = LearnedLikelihood(point, hyper[0])
    q = MultivariateNormal(mean[0], DiagLinearOperator(variance[0]))
    torch.testing.assert_close(learned.expected_log_prob(y, q), point.expected(y, mean[0], variance[0], hyper[0]))
    learned.expected_log_prob(y, q).sum().backward()
    assert bool((learned.own.grad != 0).all())
    assert not list(LearnedLikelihood(build_point_likelihood("bernoulli"), torch.zeros(0)).parameters())


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "student-t"])
def test_quadrature_likelihoods_agree_with_monte_carlo(name):
    likelihood = build_point_likelihood(name, noise=0.3)
    hyper = likelihood.initial.expand(2, -1)
    mean, variance = torch.tensor([[0.3, -0.5], [0.1, 0.9]]).double(), torch.tensor([[0.4, 0.2], [0.3, 0.5]]).double()
    y = torch.tensor([1.0, 0.0]).double()
    f = mean + variance.sqrt() * rand(200_000, 2, 2)
    densities = {
        "bernoulli": lambda: torch.distributions.Bernoulli(torch.distributions.Normal(0, 1).cdf(f)).log_prob(y),
        "poisson": lambda: torch.distributions.Poisson(f.exp()).log_prob(y),
        "student-t": lambda: torch.distributions.StudentT(4.0, f, math.sqrt(0.3)).log_prob(y),
    }
    log_density = densities[name]()
    expected = likelihood.expected(y, mean, variance, hyper)
    torch.testing.assert_close(expected, log_density.mean(0), rtol=0, atol=6e-3)  # 2e5 draws, sd below 1
    predictive = likelihood.log_predictive(y, mean, variance, hyper)
    torch.testing.assert_close(predictive, log_density.exp().mean(0).log(), rtol=0, atol=6e-3)
    assert bool((predictive >= expected).all()), "Jensen"


def test_observation_moments_by_quadrature():
    mean, variance = torch.tensor([[0.2]]).double(), torch.tensor([[0.5]]).double()
    none = torch.zeros(1, 0).double()
    first, second = build_point_likelihood("poisson").moments(mean, variance, none)
    rate = math.exp(0.2 + 0.25)
    assert float(first) == pytest.approx(rate, rel=1e-8)
    assert float(second) == pytest.approx(rate + rate**2 * (math.exp(0.5) - 1), rel=1e-8)
    p, spread = build_point_likelihood("bernoulli").moments(mean, variance, none)
    exact = gpytorch.likelihoods.BernoulliLikelihood().marginal(torch.distributions.Normal(mean, variance.sqrt())).probs
    assert float(p) == pytest.approx(float(exact), abs=1e-8)
    assert float(spread) == pytest.approx(float(exact * (1 - exact)), abs=1e-8)
    loc, scale2 = build_point_likelihood("student-t", noise=0.3).moments(
        mean, variance, torch.tensor([[0.5 * math.log(0.3), math.log(2.0)]]).double()
    )
    assert float(loc) == pytest.approx(0.2, abs=1e-8)
    assert float(scale2) == pytest.approx(0.5 + 0.3 * 4 / 2, rel=1e-8)  # ν = 4: variance is scale² ν/(ν−2)


def test_the_log_density_of_a_count_far_from_every_node_is_finite() -> None:
    """At y = 1000 and f = 3 ± 0.2 every node's density is zero in float64; without width it is that of the mean."""
    likelihood, none = build_point_likelihood("poisson"), torch.zeros(1, 0).double()
    far, mean, variance = (
        torch.tensor([1000.0]).double(),
        torch.tensor([[3.0]]).double(),
        torch.tensor([[0.05]]).double(),
    )
    found, narrow = (likelihood.log_predictive(far, mean, v, none).item() for v in (variance, 1e-12 * variance))
    at_the_mean = 1000 * 3.0 - math.exp(3.0) - math.lgamma(1001.0)
    assert narrow == pytest.approx(at_the_mean, rel=1e-6)
    assert at_the_mean < found < 0, "a wider f comes nearer"


def test_log_predictive_of_counts_is_the_logarithm_of_a_normalised_mass() -> None:
    likelihood, y = build_point_likelihood("poisson"), torch.arange(200.0).double()
    mean, variance = torch.full((1, 200), 1.2).double(), torch.full((1, 200), 0.3).double()
    mass = likelihood.log_predictive(y, mean, variance, torch.zeros(1, 0).double()).exp()
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float((mass * y).sum()) == pytest.approx(math.exp(1.2 + 0.15), rel=1e-6)


@pytest.mark.parametrize("variance", [1e-8, 1.0, 25.0, 300.0])
def test_the_wide_probit_is_what_fine_quadrature_finds_and_its_slopes_are_its_own(variance):
    """α by the mean and β = −2 ∂/∂s, by central differences of the value; the value by 20 001 trapezia."""
    mean = torch.tensor([-12.0, -3.0, -0.4, 0.0, 0.7, 2.0, 9.0], dtype=torch.float64)
    value, alpha, beta = expected_log_probit(mean, torch.full_like(mean, variance))
    nodes = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    weights = torch.exp(-0.5 * nodes.square()) / torch.exp(-0.5 * nodes.square()).sum()
    exact = (weights[:, None] * torch.special.log_ndtr(mean + variance**0.5 * nodes[:, None])).sum(0)
    torch.testing.assert_close(value, exact, rtol=3e-6, atol=3e-6)

    def at(shift, factor):
        return expected_log_probit(mean + shift, torch.full_like(mean, variance * factor))[0]

    torch.testing.assert_close(alpha, (at(1e-5, 1) - at(-1e-5, 1)) / 2e-5, rtol=1e-7, atol=1e-8)
    if variance >= 1:
        slope = (at(0, 1 + 1e-5) - at(0, 1 - 1e-5)) / (2e-5 * variance)
        torch.testing.assert_close(beta, -2 * slope, rtol=1e-6, atol=1e-8)
    at_nodes = mean + variance**0.5 * nodes[:, None]
    ratio = math.sqrt(2 / math.pi) / torch.special.erfcx(-at_nodes / math.sqrt(2))  # φ/Φ
    torch.testing.assert_close(alpha, (weights[:, None] * ratio).sum(0), rtol=1e-4, atol=3e-6)
    torch.testing.assert_close(beta, (weights[:, None] * ratio * (ratio + at_nodes)).sum(0), rtol=0, atol=5e-4)
    point, y = build_point_likelihood("bernoulli"), torch.ones_like(mean)
    flipped = point.slopes(1 - y, -mean, torch.full_like(mean, variance), point.initial)
    torch.testing.assert_close(flipped[1], -alpha)
    torch.testing.assert_close(flipped[2], beta)


@pytest.mark.parametrize("name", ["gaussian", "poisson", "student-t"])
def test_slopes_are_differences_of_the_expectation(name):
    point, y, mean, _, hyper = setting(name)
    mean, variance, own = mean[0], 0.3 + mean[0].abs(), hyper[0]
    value, alpha, beta, by_own = point.slopes(y, mean, variance, own)

    def change(**moved):
        sums = []
        for sign in (1, -1):
            given = {"mean": mean, "variance": variance, "hyper": own}
            given |= {key: given[key] + sign * 1e-5 * step for key, step in moved.items()}
            sums.append(point.expected(y, **given).sum())
        return (sums[0] - sums[1]) / 2e-5

    assert float(value) == pytest.approx(float(point.expected(y, mean, variance, own).sum()))
    for n, one in enumerate(torch.eye(4, dtype=torch.float64)):
        assert float(alpha[n]) == pytest.approx(float(change(mean=one)), rel=1e-7, abs=1e-9)
        assert float(beta[n]) == pytest.approx(float(-2 * change(variance=one)), rel=1e-7, abs=1e-9)
    for r, one in enumerate(torch.eye(len(own), dtype=torch.float64)):
        assert float(by_own[r]) == pytest.approx(float(change(hyper=one)), rel=1e-7)


NOISE = Noise(*(torch.tensor(v, dtype=torch.float64) for v in (-1.2, 0.3, 0.2, 0.25)))


@pytest.mark.parametrize(
    ("name", "y", "density"),
    [
        ("bernoulli", 0.0, lambda f: stats.norm.logcdf(-f)),
        ("bernoulli", 1.0, stats.norm.logcdf),
        ("poisson", 3.0, lambda f: stats.poisson.logpmf(3, np.exp(f))),
    ],
)
def test_expected_log_densities_match_quadrature(name, y, density):
    mean, variance = 0.4, 0.9
    expected, _ = integrate.quad(lambda f: density(f) * stats.norm.pdf(f, mean, variance**0.5), -9, 9, epsabs=1e-12)
    arguments = (torch.tensor([v], dtype=torch.float64) for v in (y, mean, variance))
    assert float(build_point_likelihood(name, nodes=32).expected_with(*arguments, NOISE)) == pytest.approx(
        expected, abs=1e-9
    )


def test_gaussian_expectation_with_a_correlated_noise_offset_matches_quadrature():
    """E log N(y | f, σ² e^{2ζ}) and var y with cov(f, ζ) = 0.25, by two-dimensional Gauss–Hermite."""
    y, mean, variance = 1.5, 0.4, 0.9
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    factor = np.linalg.cholesky([[variance, 0.25], [0.25, 0.2]])
    first, second = np.meshgrid(nodes, nodes, indexing="ij")
    f, zeta = np.einsum("ij,j...->i...", factor, np.stack([first, second])) + np.array([mean, 0.3])[:, None, None]
    mass = np.outer(weights, weights) / (2 * np.pi)
    sd = math.exp(-0.6) * np.exp(zeta)
    arguments = [torch.tensor([v], dtype=torch.float64) for v in (y, mean, variance)]
    found = GaussianNoise().expected_with(*arguments, NOISE)
    assert float(found) == pytest.approx((mass * stats.norm.logpdf(y, f, sd)).sum(), rel=1e-10)
    observed_mean, observed_variance = GaussianNoise().moments_with(*arguments[1:], NOISE)
    assert float(observed_mean) == pytest.approx((mass * f).sum(), rel=1e-10)
    assert float(observed_variance) == pytest.approx((mass * ((f - mean) ** 2 + sd**2)).sum(), rel=1e-10)


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("bernoulli", lambda f: (stats.norm.cdf(f), stats.norm.cdf(f))),
        ("poisson", lambda f: (np.exp(f), np.exp(f) + np.exp(2 * f))),
    ],
)
def test_observations_have_the_moments_of_the_mixture(name, moments):
    mean, variance = 0.4, 0.9
    first, second = (
        integrate.quad(lambda f, i=i: moments(f)[i] * stats.norm.pdf(f, mean, variance**0.5), -10, 12)[0]
        for i in (0, 1)
    )
    found = build_point_likelihood(name).moments_with(
        torch.tensor(mean).double(), torch.tensor(variance).double(), NOISE
    )
    assert float(found[0]) == pytest.approx(first, rel=1e-6)
    assert float(found[1]) == pytest.approx(second - first**2, rel=1e-6)
