"""Likelihoods equal GPyTorch, quadrature and closed forms; kernels from expressions and packages."""

import math
from itertools import pairwise
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from pydantic import ValidationError
from scipy import integrate, stats
from scipy.special import expit, log_expit

from fedgp_flower.errors import ConfigError
from fedgp_flower.gp.kernels import BatchedKernel, build_kernel
from fedgp_flower.gp.likelihoods import GaussianNoise, Logit, Noise, build_point_likelihood
from fedgp_flower.gp.likelihoods.integrals import expected_log_probit, expected_softplus
from fedgp_flower.gp.likelihoods.numbers import freedom_of
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.options import ModelSection, kernel_names
from fedgp_flower.scores import TargetUnits, bernoulli_scores

KINDS = ("gaussian", "bernoulli", "poisson", "student-t")


def setting(name):
    """Targets, mean and variance of f, and two samples of the parameters."""
    y = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    mean = torch.tensor([[0.3, -0.5, 0.1, 0.0], [0.1, 0.4, -0.2, 0.2]], dtype=torch.float64)
    point = Logit() if name == "logit" else build_point_likelihood(name, noise=0.3)
    hyper = torch.stack([point.initial, point.initial + 0.2])
    return point, y, mean, 1e-3 * (1 + 2 * mean.abs()), hyper


@pytest.mark.parametrize("name", [*KINDS, "logit"])
def test_they_are_the_likelihoods_of_gpytorch(name):
    """The variance is small because GPyTorch's log Φ is exact only for |f| < 1."""
    point, y, mean, variance, hyper = setting(name)
    near = {"rtol": 1e-8 if name == "logit" else 1e-9, "atol": 1e-12}  # ours is a mixture of normal distributions
    for s in range(2):
        theirs = point.to_gpytorch(hyper[s])
        q = MultivariateNormal(mean[s], DiagLinearOperator(variance[s]))
        ours = y, mean[s], variance[s], hyper[s]
        mixture = {"rtol": 0, "atol": 3e-6} if name == "bernoulli" else near
        torch.testing.assert_close(point.expected(*ours), theirs.expected_log_prob(y, q), **mixture)
        torch.testing.assert_close(point.log_predictive(*ours), theirs.log_marginal(y, q), **near)
        conditional = theirs(mean[s]) if name != "gaussian" else theirs(mean[s], noise=theirs.noise)
        torch.testing.assert_close(point.log_density(y, mean[s], hyper[s]), conditional.log_prob(y), **near)
        certain = point.moments(mean[s], torch.zeros_like(mean[s]), hyper[s])
        for mine, other in zip(certain, (conditional.mean, conditional.variance), strict=True):
            torch.testing.assert_close(mine, other.expand_as(mine), **near)


@pytest.mark.parametrize(
    ("name", "y", "mean", "variance"),
    [(name, 1.0, 0.3, v) for name in (*KINDS, "logit", "binomial") for v in (1e-4, 1.0, 25.0)]
    + [("poisson", 50.0, 1.0, 1.0)],
)
def test_expectations_and_densities_are_those_of_adaptive_quadrature(name, y, mean, variance):
    """Of log p(y | f) and p(y | f); moments follow from those given f. E log Φ is a mixture with an error of 3e-6."""
    point = Logit() if name == "logit" else build_point_likelihood(name, noise=0.3)
    targets = torch.tensor([[y, 60.0]] if name == "binomial" else [y]).double()
    certain = torch.tensor([[mean], [variance]], dtype=torch.float64)

    def mean_of(function):
        def integrand(z):
            f = torch.tensor([mean + variance**0.5 * z], dtype=torch.float64)
            return float(function(f)) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

        ends = pairwise((-18.0, -4.0, 0.0, 4.0, 18.0))
        return sum(integrate.quad(integrand, *pair, epsabs=1e-12, epsrel=1e-8, limit=200)[0] for pair in ends)

    def density(f):
        return point.log_density(targets, f, point.initial)

    def given(f):
        return point.moments(f, torch.zeros_like(f), point.initial)

    near = {"rel": 1e-6, "abs": 4e-6 if name == "bernoulli" else 1e-6}
    predicted = point.log_predictive(targets, *certain, point.initial).item()
    assert predicted == pytest.approx(math.log(mean_of(lambda f: density(f).exp())), **near)
    first, second = (found.item() for found in point.moments(*certain, point.initial))
    assert first == pytest.approx(mean_of(lambda f: given(f)[0]), rel=1e-6)
    spread = mean_of(lambda f: given(f)[1] + (given(f)[0] - first).square())
    assert second == pytest.approx(spread, rel=1e-6)


def test_the_log_density_of_a_count_far_from_every_node_is_finite() -> None:
    """At y = 1000 and f = 3 ± 0.2 every node's density is zero in float64; without width it is that of the mean."""
    likelihood, none = build_point_likelihood("poisson"), torch.zeros(1, 0).double()
    mean, variance, far = (torch.tensor(part).double() for part in ([[3.0]], [[0.05]], [1e3]))
    found, narrow = (likelihood.log_predictive(far, mean, v, none).item() for v in (variance, 1e-12 * variance))
    at_the_mean = 1000 * 3.0 - math.exp(3.0) - math.lgamma(1001.0)
    assert narrow == pytest.approx(at_the_mean, rel=1e-6)
    assert at_the_mean < found < 0, "a wider f comes nearer"


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "binomial", "time-to-event"])
def test_a_density_is_exact_where_f_is_wide_and_the_outcome_narrow_or_far(name):
    """By 60 001 trapezia: y = 150 000 tells f to .003 where f ~ N(6, 25), and y = 50 is 17 sd from f ~ N(-3, .1)."""
    point, f = build_point_likelihood(name, noise=0.3), torch.linspace(-30, 42, 60001, dtype=torch.float64)
    for y, second in ((0.0, 40.0), (50.0, 50.0), (1.5e5, 3e5)):
        row = [[y + 0.01, float(y > 0)]] if name == "time-to-event" else [[y, second]]
        targets = torch.tensor(row if name != "negative-binomial" else [y]).double()
        for mean, variance in ((6.0, 25.0), (-3.0, 0.1), (0.0, 1.0)):
            prior = -0.5 * (f - mean) ** 2 / variance - 0.5 * math.log(2 * math.pi * variance)
            height = point.log_density(targets, f[:, None], point.initial)[:, 0] + prior
            exact = float(height.logsumexp(0) + (f[1] - f[0]).log())
            at = torch.tensor([[mean], [variance]], dtype=torch.float64)
            assert point.log_predictive(targets, *at, point.initial).item() == pytest.approx(exact, rel=1e-8, abs=1e-8)


def test_degrees_of_freedom_stay_where_noise_has_a_variance():
    """With log κ far up or down; with a scale alone there are four."""
    hyper = torch.tensor([[-40.0, 0.0], [40.0, 0.0]], dtype=torch.float64)
    assert freedom_of(hyper).squeeze().tolist() == pytest.approx([2.5, 20.0])
    assert freedom_of(build_point_likelihood("student-t").initial).item() == pytest.approx(4.0)
    assert freedom_of(torch.zeros(1, dtype=torch.float64)).item() == pytest.approx(4.0)
    targets, at = torch.tensor([0.4, -1.3]).double(), (torch.zeros(2).double(), torch.full((2,), 0.3).double())
    nearly = build_point_likelihood("student-t").log_predictive(targets, *at, hyper[1])
    normal = build_point_likelihood("gaussian").log_predictive(targets, *at, hyper[1, 1:])
    torch.testing.assert_close(nearly, normal, atol=0.05, rtol=0)


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
    torch.testing.assert_close((flipped[1], flipped[2]), (-alpha, beta))


NOISE = Noise(*(torch.tensor(v, dtype=torch.float64) for v in (-1.2, 0.3, 0.2, 0.25)))


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


HYPER = torch.zeros(0, dtype=torch.float64)
Y, CENTRES = torch.tensor([1.5, -0.4, 0.2]).double(), torch.tensor([[0.4, -0.1, 0.3], [-1.2, 0.5, -3.0]]).double()
WIDTHS = torch.tensor([[0.9, 1e-4, 0.2], [0.3, 2.0, 1e-4]]).double()
"""Numbers, and mean and variance of f and of the logarithm of the noise."""


def test_noise_that_varies_is_what_quadrature_finds():
    """E log N(y | f, e^g) and E of its derivatives by f and g, of which α is the first and −β the second."""
    point = build_point_likelihood("heteroscedastic")
    total, alpha, beta, _ = point.slopes(Y, CENTRES, WIDTHS, HYPER)
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(60))
    share = (weights[:, None] * weights / weights.sum() ** 2)[..., None]
    f, g = (m + s.sqrt() * nodes[:, None] for m, s in zip(CENTRES, WIDTHS, strict=True))
    f, inverse, log_noise = f[:, None], (-g).exp()[None], g[None]
    squares = (Y - f).square() * inverse
    near = {"rtol": 1e-9, "atol": 1e-9}

    def mean_of(values):
        return (share * values).sum((0, 1))

    value = mean_of(-0.5 * (math.log(2 * math.pi) + log_noise + squares))
    torch.testing.assert_close(point.expected(Y, CENTRES, WIDTHS, HYPER), value, **near)
    assert float(total) == pytest.approx(float(value.sum()))
    torch.testing.assert_close(alpha, torch.stack([mean_of((Y - f) * inverse), mean_of(squares / 2 - 0.5)]), **near)
    torch.testing.assert_close(beta, torch.stack([mean_of(inverse), mean_of(squares / 2)]), **near)


def test_predictions_with_noise_that_varies_are_those_of_the_mixture():
    """Density, quantiles, intervals and moments by adaptive quadrature over the logarithm of the noise."""
    point, (m, a), (v, b) = build_point_likelihood("heteroscedastic"), CENTRES.numpy(), WIDTHS.numpy()
    density, levels = point.log_predictive(Y, CENTRES, WIDTHS, HYPER).exp(), (0.025, 0.5, 0.9)
    quantiles = point.quantiles(CENTRES.numpy(), WIDTHS.numpy(), HYPER, levels)
    scores = point.scores(CENTRES.numpy(), WIDTHS.numpy(), Y.numpy(), HYPER, TargetUnits(0.0, 2.0))
    assert scores.sums["nll"] == pytest.approx(3 * math.log(2) - float(density.log().sum()))
    mean, variance = point.moments(CENTRES, WIDTHS, HYPER)
    for n, y in enumerate(Y.tolist()):

        def over_noise(function, n=n):
            law = stats.norm(a[n], b[n] ** 0.5)
            each = lambda g: law.pdf(g) * function(m[n], (v[n] + math.exp(g)) ** 0.5)  # noqa: E731
            return integrate.quad(each, *law.ppf([1e-18, 1 - 1e-16]))[0]

        assert float(density[n]) == pytest.approx(over_noise(lambda m, sd, y=y: stats.norm.pdf(y, m, sd)), rel=1e-6)
        for level, at in zip(levels, quantiles[:, n], strict=True):
            assert over_noise(lambda m, sd, at=at: stats.norm.cdf(at, m, sd)) == pytest.approx(level, abs=1e-5)
        assert float(mean[n]) == m[n]
        assert float(variance[n]) == pytest.approx(over_noise(lambda m, sd: sd**2), rel=1e-6)
    given = point.to_gpytorch(HYPER)(CENTRES)
    torch.testing.assert_close(given.log_prob(Y), point.log_density(Y, CENTRES, HYPER))


def test_noise_that_is_certain_is_constant():
    point, constant, log_sd = build_point_likelihood("heteroscedastic"), GaussianNoise(), torch.tensor([-0.7]).double()
    centres, widths = torch.stack([CENTRES[0], torch.full((3,), -1.4)]), torch.stack([WIDTHS[0], torch.zeros(3)])
    same = constant.scores(CENTRES[0].numpy(), WIDTHS[0].numpy(), Y.numpy(), log_sd, TargetUnits(0.0, 1.0))
    found = point.scores(centres.numpy(), widths.numpy(), Y.numpy(), HYPER, TargetUnits(0.0, 1.0))
    assert found.sums == pytest.approx(same.sums)


@pytest.mark.parametrize("point", [Logit(), build_point_likelihood("bernoulli")])
def test_two_classes_are_scored_by_the_probability_of_the_second(point):
    mean, variance, y = np.array([0.4, -1.0, 2.0]), np.array([0.3, 1.5, 0.1]), np.array([1.0, 0.0, 0.0])
    probability = point.moments(torch.tensor(mean), torch.tensor(variance), point.initial)[0].numpy()
    found = point.scores(mean, variance, y, point.initial, TargetUnits(0.0, 1.0))
    assert found.sums == pytest.approx(bernoulli_scores(probability, y).sums)


@pytest.mark.parametrize(("mean", "sd"), [(0.3, 0.1), (-2.0, 1.0), (4.0, 6.0), (-1.0, 40.0)])
def test_expectations_are_integrals(mean, sd):
    def integral(function):
        ends = (mean - 12 * sd, mean + 12 * sd)
        points = [p for p in (-3.0, 0.0, 3.0) if ends[0] < p < ends[1]]
        return integrate.quad(lambda f: function(f) * stats.norm.pdf(f, mean, sd), *ends, points=points, limit=400)[0]

    found = expected_softplus(*(torch.tensor([v], dtype=torch.float64) for v in (mean, sd**2)))
    wanted = integral(lambda f: -log_expit(-f)), integral(expit), integral(lambda f: expit(f) * expit(-f))
    np.testing.assert_allclose([float(part) for part in found], wanted, rtol=0, atol=2e-8)


@pytest.mark.parametrize("variance", [1e-6, 0.1, 1.0, 10.0])
def test_no_probability_is_above_one_by_rounding(variance):
    """A site with such a row was left out: its probabilities were refused."""
    mean = torch.linspace(-60, 60, 4001, dtype=torch.float64)
    probability, _ = Logit().moments(mean, torch.full_like(mean, variance), HYPER)
    assert (probability <= 1).all()
    assert (probability.diff() >= -1e-15).all()
    assert bernoulli_scores(probability.numpy(), np.ones(4001)).sums["correct"] == 2001


def test_the_predictive_probability_is_that_of_both_labels():
    mean, variance = (torch.tensor(v, dtype=torch.float64) for v in ([-30.0, 0.4], [2.0, 9.0]))
    log_one = Logit().log_predictive(torch.ones(2), mean, variance, HYPER)
    torch.testing.assert_close(log_one.exp(), Logit().moments(mean, variance, HYPER)[0], rtol=1e-12, atol=1e-15)
    exact = stats.norm.expect(expit, loc=-30.0, scale=2.0**0.5)
    assert float(log_one[0].exp()) == pytest.approx(exact, abs=1e-12)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "toy_package")


def rows(n: int = 6, d: int = 2) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.usefixtures("toy")
def test_a_kernel_of_another_package_is_part_of_expressions():
    assert {"rational_quadratic", "rbf"} <= set(kernel_names())
    kernel = build_kernel(ModelSection(kernel="rational_quadratic + linear", lengthscale=1.5, outputscale=2.0), 2)
    theirs = gpytorch.kernels.RQKernel(ard_num_dims=2).double()
    theirs.lengthscale = 1.5
    x = rows()
    expected = 2.0 * theirs(x).to_dense() + 2.0 * x @ x.mT
    torch.testing.assert_close(kernel(x).to_dense(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("toy")
def test_what_is_no_kernel_is_refused():
    """A dash would be a minus; a parameter may be bounded by zero alone."""
    assert "with-dash" not in kernel_names()
    with pytest.raises(ValidationError, match=r"expected a sum or product of .*rational_quadratic; example"):
        ModelSection(kernel="with-dash")
    with pytest.raises(ConfigError, match=r"bounded.*raw_lengthscale"):
        build_kernel(ModelSection(kernel="bounded"), 2)


@pytest.mark.usefixtures("toy")
def test_such_a_kernel_is_batched_over_its_hyperparameters():
    model, x = SparseGP(ModelSection(kernel="rational_quadratic"), rows()), rows(5)
    assert set(model.wire_parameters()) >= {"kernel.log_alpha", "kernel.log_lengthscale"}
    batched = BatchedKernel(model.kernel)
    hyper = batched.initial() + torch.tensor([[0.0], [0.3]], dtype=torch.float64)
    matrices = batched(hyper, x.expand(2, 5, 2), x)
    for s in range(2):
        torch.testing.assert_close(matrices[s], batched.at(hyper[s])(x).to_dense(), rtol=1e-12, atol=1e-12)
