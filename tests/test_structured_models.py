"""The shipped SFVI models against densities, integrals and exact Gaussian processes written out by other means."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from structured_problems import (
    children,
    gp_sites,
    linear_gaussian_posterior,
    mixed_model,
    randomised,
    sparse_gp,
    start_posteriors,
)

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods.family import (
    GlobalPosterior,
    initial_global,
    initial_local,
    named,
    normal_log_density,
    unit_noise,
)
from fedgp_flower.methods.sfvi.classes import Multinomial
from fedgp_flower.methods.sfvi.gp import farthest_points
from fedgp_flower.methods.sfvi.learner import Learner
from fedgp_flower.methods.sfvi.structured import SampledModel

FIVE_ERRORS = 5.0


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(4)


def test_family_density_is_that_of_the_transformed_draws(generator):
    """Both densities against torch's multivariate normal, and the draws against their noise."""
    q = randomised(initial_global(4, scale=0.5, triangular=True), generator)
    z = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    reference = torch.distributions.MultivariateNormal(q.mean, scale_tril=q.factor())
    torch.testing.assert_close(q.log_density(z), reference.log_prob(z))
    torch.testing.assert_close(q.entropy(), reference.entropy())
    torch.testing.assert_close(q.transform(z), q.mean + z @ q.factor().mT)
    for given in (q, replace(q, lower=None)):  # weights on ε for weights on Z_G
        torch.testing.assert_close(given.mixed(z) @ z.mT, z @ (given.transform(z) - q.mean).mT)
    local = randomised(initial_local(2, 3, 4, scale=0.5, whole=True), generator)
    own = torch.randn(6, 2, 3, generator=generator, dtype=torch.float64)
    for unit in range(2):
        centre = local.mean[unit] + (z - q.mean) @ local.coupling[unit].mT
        reference = torch.distributions.MultivariateNormal(centre, scale_tril=local.factor()[unit])
        torch.testing.assert_close(local.log_density(own, z, q.mean)[:, unit], reference.log_prob(own[:, unit]))
        drawn = local.transform(z, q.mean, own)[:, unit]
        torch.testing.assert_close(drawn, centre + own[:, unit] @ local.factor()[unit].mT)
    entropies = [torch.distributions.MultivariateNormal(torch.zeros(3).double(), scale_tril=f) for f in local.factor()]
    torch.testing.assert_close(local.entropy(), sum(normal.entropy() for normal in entropies))


def test_new_child_is_predicted_by_integrating_its_intercept(generator):
    model = mixed_model()
    features, targets, groups = children(generator, units=1, visits=3)
    site = model.prepare(features, targets, groups)
    point = GlobalPosterior(torch.tensor([0.3, -0.5, 0.8, -0.4]).double(), torch.full((4,), -40.0).double(), None)
    noise = torch.tensor(special.ndtri((np.arange(20000) + 0.5) / 20000))[:, None, None]
    nothing = torch.zeros(20000, 4, dtype=torch.float64)
    found = model.mixture(site, point, None, (nothing, noise))
    for row in range(3):
        fixed = 0.3 + float(features[row] @ point.mean[1:3])

        def density(b, fixed=fixed):
            return special.expit(fixed + b) * stats.norm.pdf(b, scale=math.exp(0.4))

        expected, _ = integrate.quad(density, -15, 15, epsabs=1e-12)
        assert float(found.mean[row]) == pytest.approx(expected, abs=1e-6)  # midpoint rule in the quantile
        assert float(found.variance[row]) == pytest.approx(expected * (1 - expected), abs=1e-6)


def test_multinomial_density_and_its_learned_prior(generator):
    model = Multinomial(2, 3)
    with torch.no_grad():
        model.prior_log_scales.copy_(torch.tensor([-0.4, 0.7], dtype=torch.float64))
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    site = model.prepare(x, torch.tensor([0.0, 2.0, 1.0, 1.0, 0.0]), key=4)
    z = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    empty = torch.zeros(2, 1, 0, dtype=torch.float64)
    found = model.log_local(site, z, empty)
    for draw in range(2):
        logits = x.numpy() @ z[draw, :6].reshape(3, 2).numpy().T + z[draw, 6:].numpy()
        rows = special.log_softmax(logits, -1)[np.arange(5), [0, 2, 1, 1, 0]]
        assert float(found[draw, 0]) == pytest.approx(rows.sum(), rel=1e-12)
        prior = stats.norm.logpdf(z[draw, :6], scale=math.exp(-0.4)).sum()
        prior += stats.norm.logpdf(z[draw, 6:], scale=math.exp(0.7)).sum()
        assert float(normal_log_density(z[draw], model.prior_log_scale(), None).detach()) == pytest.approx(
            prior, rel=1e-12
        )
    probability, variance = model.observation(site, z, empty)
    torch.testing.assert_close(probability.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    torch.testing.assert_close(variance, probability * (1 - probability))


@pytest.mark.parametrize(
    ("likelihood", "spread", "coupled"),
    [("gaussian", 0.5, True), ("gaussian", 0.0, False), ("bernoulli", 0.5, True)],
)
def test_expected_local_part_is_the_mean_of_the_sampled_one(generator, likelihood, spread, coupled):
    """Everything in E_q log p − E_q log q is where it should be, once: 20 000 draws, five standard errors."""
    inputs = torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None]
    model = sparse_gp(inputs=inputs, likelihood=likelihood, noise_spread=spread)
    site = gp_sites(model, generator, sizes=(5,), num_inducing=2, binary=likelihood == "bernoulli")[0]
    q_global, (q_local,) = start_posteriors(model, [site], generator, whole=coupled)
    with torch.no_grad():
        noise = torch.randn(20000, model.global_size, generator=generator, dtype=torch.float64)
        z_global = q_global.transform(noise)
        own_noise = unit_noise(3, 0, site.keys, (20000,), model.local_width(site))
        z_local = q_local.transform(z_global, q_global.mean, own_noise)
        sampled = model.log_local(site, z_global, z_local)[:, 0]
        expected = model.expected_log_local(site, q_global, q_local)
    error = float(sampled.std()) / math.sqrt(20000)
    assert abs(float(sampled.mean() - expected)) < FIVE_ERRORS * error
    assert error < 0.02 * float(expected.abs())


def exact_hierarchical_gp(model, sites, tests, noise):
    """Dense regression with cov(f_k(x), f_l(x')) = k_G + 1 + x x' + δ_kl (k_L + τ² (1 + x x'))."""

    def covariance(x1, k1, x2, k2):
        linear = 1 + x1 @ x2.mT
        tau = float(model.log_site_slope.detach().exp()[0]) ** 2
        shared = model.trend(x1, x2).to_dense() + linear
        own = model.deviation(x1, x2).to_dense() + tau * linear
        return shared + (k1[:, None] == k2[None, :]) * own

    with torch.no_grad():
        x = torch.cat([site.features for site in sites])
        k = torch.cat([torch.full((len(site.features),), i) for i, site in enumerate(sites)])
        y = torch.cat([site.targets for site in sites])
        gram = covariance(x, k, x, k) + noise * torch.eye(len(y)).double()
        answers = []
        for label in (*range(len(sites)), -1):
            at = torch.full((len(tests),), label)
            cross = covariance(tests, at, x, k)
            mean = cross @ torch.linalg.solve(gram, y)
            reduction = (cross * torch.linalg.solve(gram, cross.mT).mT).sum(-1)
            answers.append((mean, covariance(tests, at, tests, at).diagonal() - reduction))
    return answers


def test_gp_with_every_row_inducing_predicts_like_the_exact_hierarchical_gp(generator):
    """At every site and at a new one: mean and variance of f, and of a noisy observation."""
    rows = torch.cat([torch.linspace(-2, 2, n, dtype=torch.float64) + 0.1 * k for k, n in enumerate((6, 5, 7))])
    model = sparse_gp(inputs=torch.unique(rows)[:, None], jitter=1e-10)
    sites = gp_sites(model, generator, num_inducing=20)
    with torch.no_grad():
        bases = [model._basis(site) for site in sites]
    designs = [(shared.numpy(), local.numpy()) for shared, local, _ in bases]
    q_global, q_local, _ = linear_gaussian_posterior(designs, [site.targets.numpy() for site in sites], 0.2)
    tests = torch.tensor([[-2.7], [0.05], [1.3]], dtype=torch.float64)
    answers = exact_hierarchical_gp(model, sites, tests, 0.2)
    for index, q in enumerate((*q_local, None)):
        mean, variance = model.latent(sites[min(index, 2)].at(tests), q_global, q)
        torch.testing.assert_close(mean, answers[index][0], rtol=1e-5, atol=1e-5)  # jitter against cond(K_zz)
        torch.testing.assert_close(variance, answers[index][1], rtol=1e-5, atol=1e-5)
        noisy = model.predict(sites[min(index, 2)].at(tests), q_global, q)
        torch.testing.assert_close(noisy.mean, mean)
        torch.testing.assert_close(noisy.variance, variance + 0.2)


@pytest.mark.parametrize("known", [True, False])
def test_gp_prediction_agrees_with_draws(generator, known):
    """Closed form against the mixture over draws of Z_G and Z_L, ζ included, at a site and at a new one."""
    inputs = torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None]
    model = sparse_gp(inputs=inputs, noise_spread=0.3)
    site = gp_sites(model, generator, sizes=(5,), num_inducing=5)[0].at(inputs)
    q_global, (q_local,) = start_posteriors(model, [site], generator)
    q = q_local if known else None
    closed = model.predict(site, q_global, q)
    noise = torch.randn(40000, model.global_size, generator=generator, dtype=torch.float64)
    own = unit_noise(3, 0, site.keys, (40000,), model.local_width(site))
    drawn = SampledModel.mixture(model, site, q_global, q, (noise, own))
    torch.testing.assert_close(drawn.mean, closed.mean, rtol=0, atol=0.04)  # five errors of a mean over 40 000
    torch.testing.assert_close(drawn.variance, closed.variance, rtol=0.05, atol=0)
    _, variance = model.latent(site, q_global, q)
    mean_offset = 0.3 * float(q_local.mean[0, -1]) if known else 0.0
    coupled = (q_local.coupling[0, -1] @ q_global.factor()).square().sum() + q_local.factor()[0, -1].square().sum()
    spread = 0.09 * float(coupled) if known else 0.09
    expected = 0.2 * math.exp(2 * mean_offset + 2 * spread)  # σ² E e^{2ζ}
    torch.testing.assert_close(closed.variance - variance, torch.full((3,), expected, dtype=torch.float64))


def test_farthest_points_spread_and_do_not_repeat():
    rows = torch.tensor([[0.0], [0.1], [1.0], [1.0], [0.45], [-1.0]], dtype=torch.float64)
    chosen = farthest_points(rows, 3)
    assert sorted(float(v) for v in chosen[:, 0]) == [-1.0, 0.1, 1.0] or sorted(float(v) for v in chosen[:, 0]) == [
        -1.0,
        0.45,
        1.0,
    ]
    everything = farthest_points(rows, 10)
    assert sorted(float(v) for v in everything[:, 0]) == [-1.0, 0.0, 0.1, 0.45, 1.0]


def test_theta_from_another_model_is_refused():
    model = sparse_gp(inputs=torch.zeros(2, 1, dtype=torch.float64))
    values = {name: value.detach() + 0.5 for name, value in model.theta().items()}
    model.load_theta(values)
    torch.testing.assert_close(model.log_noise.detach(), values["theta.log_noise"])
    with pytest.raises(ProtocolError, match="model parameters"):
        model.load_theta({name: value for name, value in values.items() if name != "theta.log_noise"})


def test_local_steps_are_those_of_torchs_adam(generator):
    """Three steps, and two more that go on with the moments, on θ, η_G and η_Lk at once."""
    rates, ratio = (0.1, 0.05, 0.02, 0.04, 0.03), 3.0

    def parts():
        model = sparse_gp(inputs=torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None], noise_spread=0.5)
        site = gp_sites(model, torch.Generator().manual_seed(1), sizes=(6,))[0]
        q_global, [q_local] = start_posteriors(model, [site], torch.Generator().manual_seed(2), triangular=False)
        return Learner(model, site, 0, 0, 0, 1), (q_global, q_local, AdamState())

    learner, start = parts()
    middle, _ = learner.local_steps(start, ratio, first_step=0, rates=rates[:3])
    end, value = learner.local_steps(middle, ratio, first_step=3, rates=rates[3:])
    other, (q_global, q_local, _) = parts()
    eta, own = ({name: value.requires_grad_() for name, value in named(q).items()} for q in (q_global, q_local))
    adam = torch.optim.Adam([*other.model.theta().values(), *eta.values(), *own.values()], maximize=True)
    values = []
    for rate in rates:
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        bound = other.whole_term(q_global, q_local, None, 0, ratio)
        bound.backward()
        adam.step()
        values.append(bound.item())
    assert value == pytest.approx(np.mean(values[3:]))
    for found, wanted in ((end[0], q_global), (end[1], q_local)):
        for name, moved in named(found).items():
            torch.testing.assert_close(moved, named(wanted)[name].detach())
    for name, moved in learner.model.theta().items():
        torch.testing.assert_close(moved, other.model.theta()[name])
    assert end[2].step == len(rates)
