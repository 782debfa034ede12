"""SFVI and its models against exact answers: gradients, posteriors, densities, dense processes."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import structured_problems as problems
import torch
from scipy import integrate, special, stats

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.barycentre import barycentre, wasserstein_distance
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods import family
from fedgp_flower.methods.family import GlobalPosterior, global_term, named, on_the_wire, unit_noise
from fedgp_flower.methods.sfvi.classes import Multinomial
from fedgp_flower.methods.sfvi.learner import Learner, gradients
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import ModelInputs, SampledModel
from strategies.server.questions import drive
from strategies.sfvi import average, global_noise, gradient_round, plus, server_term


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(4)


def assert_close(found, expected, tolerance=1e-12):
    """Relative to the largest entry of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max() if np.size(value) else 1.0
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * scale, err_msg=name)


def split(values, parts):
    return [family.with_named(values, {name: value[part] for name, value in named(values).items()}) for part in parts]


def partitions(units):
    """Units in 1, 3 and 7 contiguous sites, and in 4 uneven ones in random order."""
    shuffled = torch.randperm(units, generator=torch.Generator().manual_seed(0))
    return [*(list(torch.arange(units).chunk(k)) for k in (1, 3, 7)), list(shuffled.split([1, 9, 3, units - 13]))]


@pytest.mark.parametrize("draws", [1, 4])
def test_a_round_takes_the_pooled_gradient_for_any_partition(generator, draws):
    """Server term + Σ shares = autograd of the pooled bound with the same draws; local gradients too."""
    model, plan = problems.mixed_model(), problems.plan_of(model="glmm", samples=3)
    features, targets, groups = problems.children(generator)
    pooled = model.prepare(features, targets, groups)
    q_global, (q_local,) = problems.start_posteriors(model, [pooled], generator)
    noise = torch.tensor(global_noise(plan[1], 1, 3, model.global_size))
    noise_local = unit_noise(11, 0, pooled.keys, (draws, 3), 1)

    def bound(eta, own):
        local = model.site_term(pooled, eta, own, (noise, noise_local))
        return global_term(model.prior_log_scale(), eta, noise) + local

    value, slopes = gradients(model, q_global, q_local, bound)
    sent, kept = problems.dealt(slopes)
    for parts in partitions(21):
        sites = {}
        for part, own in zip(parts, split(q_local, parts), strict=True):
            keys, order = pooled.keys[part].sort()
            chosen = torch.isin(groups, keys)
            rows = model.prepare(features[chosen], targets[chosen], groups[chosen])
            sites[str(len(sites))] = problems.PlainSite(model, rows, split(own, [order])[0], draws=draws)
        asking = gradient_round(problems.state_of(model, q_global), problems.roster_of(sites), *plan)
        state, figures = drive(asking, sites)
        assert_close(problems.gradient_of(state), sent)
        assert state.bound == pytest.approx(value, rel=1e-13)
        assert figures == {"objective": state.bound / len(targets)}
        by_key = {int(k): s.local["local.mean"][i] for s in sites.values() for i, k in enumerate(s.learner.site.keys)}
        found = torch.stack([by_key[int(key)] for key in pooled.keys])
        torch.testing.assert_close(found, kept["local.mean"], rtol=0, atol=1e-12)


def multinomial():
    """The model with prior scales that are not the ones it starts with."""
    model = Multinomial(2, SFVIOptions(model="multinomial", classes=3))
    with torch.no_grad():
        model.prior_log_scales.copy_(torch.tensor([-0.4, 0.7], dtype=torch.float64))
    return model


@pytest.mark.parametrize("triangular", [True, False])
def test_the_server_s_term_needs_the_prior_s_arrays_alone(generator, triangular):
    """With and without draws it is that of the model itself."""
    model = multinomial()
    site = model.prepare(torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    q_global, (q_local,) = problems.start_posteriors(model, [site], generator, triangular=triangular)
    noise = torch.randn(5, model.global_size, generator=generator, dtype=torch.float64)
    parameters = on_the_wire(model.theta() | named(q_global))
    for term, draws in (
        (lambda eta, own: global_term(model.prior_log_scale(), eta, noise), noise.numpy()),
        (lambda eta, own: global_term(model.prior_log_scale(), eta, None), None),
    ):
        value, found = server_term(parameters, problems.prior_of(model), draws)
        expected, slopes = gradients(model, q_global, q_local, term)
        assert value == pytest.approx(expected, rel=1e-12)
        assert_close(found, problems.dealt(slopes)[0])


def conjugate_problem(generator):
    """A hierarchical GP with one noise: y is linear-Gaussian in the latents given the inducing inputs."""
    model = problems.sparse_gp(inputs=torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None])
    sites = problems.gp_sites(model, generator, num_inducing=2)
    with torch.no_grad():
        bases = [model._basis(site) for site in sites]
    designs = [(shared.numpy(), local.numpy()) for shared, local, _ in bases]
    targets = [site.targets.numpy() for site in sites]
    q_global, q_local, evidence = problems.linear_gaussian_posterior(designs, targets, 0.2)
    left_open = sum(float(left.sum()) for _, _, left in bases) / (2 * 0.2)
    return model, sites, q_global, q_local, evidence - left_open


def test_sticking_the_landing_has_no_gradient_and_no_noise_at_the_exact_posterior(generator):
    """Every draw gives ∇η = 0 there: p/q is constant."""
    model, sites, q_global, q_local, exact_bound = conjugate_problem(generator)
    noise = torch.randn(2, model.global_size, generator=generator, dtype=torch.float64)
    parameters = on_the_wire(model.theta() | named(q_global))
    value, summed = server_term(parameters, problems.prior_of(model), noise.numpy())
    for site, own in zip(sites, q_local, strict=True):
        noise_local = unit_noise(1, 0, site.keys, (1, 2), model.local_width(site))

        def term(eta, mine, site=site, noise_local=noise_local):
            return SampledModel.site_term(model, site, eta, mine, (noise, noise_local))

        share, slopes = gradients(model, q_global, own, term)
        sent, kept = problems.dealt(slopes)
        value, summed = value + share, plus(summed, sent)
        assert max(float(slope.abs().max()) for slope in kept.values()) < 1e-10
    assert max(np.abs(gradient).max() for name, gradient in summed.items() if name.startswith("q.")) < 1e-10
    assert value == pytest.approx(exact_bound, abs=1e-9)


def test_a_round_at_the_exact_posterior_has_the_evidence_and_no_gradient(generator):
    """The conjugate model: the bound is log p(y) less what the inducing values leave open, and nothing pulls."""
    model, rows, q_global, q_local, exact_bound = conjugate_problem(generator)
    sites = {str(k): problems.PlainSite(model, own, q) for k, (own, q) in enumerate(zip(rows, q_local, strict=True))}
    asking = gradient_round(problems.state_of(model, q_global), problems.roster_of(sites), *problems.plan_of())
    state, _ = drive(asking, sites)
    assert state.bound == pytest.approx(exact_bound, abs=1e-9)
    assert max(np.abs(v).max() for n, v in problems.gradient_of(state).items() if n.startswith("q.")) < 1e-9
    assert max(float(v.abs().max()) for site in sites.values() for v in site.local.values()) < 1e-9


def test_noise_belongs_to_the_unit_and_is_standard_normal():
    keys = torch.tensor([7, 3, 9])
    draws = unit_noise(1, 2, keys, (2, 5), 4)
    assert draws.shape == (2, 5, 3, 4)
    alone = unit_noise(1, 2, keys[1:2], (2, 5), 4)
    torch.testing.assert_close(alone[..., 0, :], draws[..., 1, :], rtol=0, atol=0)
    assert not torch.isclose(unit_noise(1, 3, keys, (2, 5), 4), draws).any()
    assert not torch.isclose(unit_noise(2, 2, keys, (2, 5), 4), draws).any()
    many = unit_noise(0, 0, torch.arange(200), (500,), 2).reshape(500, -1).numpy()  # [500, 400]
    assert stats.kstest(many.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(many.T)[np.triu_indices(400, 1)]).max() < 6 / np.sqrt(500)


def test_averaging_equal_sites_changes_nothing_and_different_ones_meet_at_the_barycentre(generator):
    model = problems.mixed_model()
    site = model.prepare(*problems.children(generator))
    first, _ = problems.start_posteriors(model, [site], generator)
    second, _ = problems.start_posteriors(model, [site], generator)
    theta = [{"theta.noise": torch.tensor(value, dtype=torch.float64)} for value in (1.0, 3.0)]
    one, two = (on_the_wire(t | named(q)) for t, q in zip(theta, (first, second), strict=True))
    same, spread = average([one, one], np.array([1.0, 2.0]))
    assert_close(same, one, tolerance=1e-12)
    assert max(spread) < 1e-12
    both, spread = average([one, two], np.array([1.0, 3.0]))
    assert both["theta.noise"] == pytest.approx(2.5)
    np.testing.assert_allclose(both["q.mean"], (first.mean + 3 * second.mean) / 4, rtol=1e-13)
    factors = np.stack([q.factor().numpy() for q in (first, second)])
    _, wanted = barycentre(np.zeros((2, 4)), factors, np.array([1.0, 3.0]))
    np.testing.assert_allclose(GlobalPosterior.of(both).factor(), wanted, atol=1e-12)
    assert spread[0] > spread[1] > 0
    diagonal = [{k: v for k, v in message.items() if k != "q.lower"} for message in (one, two)]
    scales = np.exp(average(diagonal, np.ones(2))[0]["q.log_scale"])
    np.testing.assert_allclose(scales, (first.log_scale.exp() + second.log_scale.exp()) / 2, rtol=1e-13)


def test_shift_keeps_the_conditional(generator):
    """q(Z_Lk | Z_G) is the same function of Z_G after the site moves to the new μ_G."""
    model = problems.mixed_model()
    site = model.prepare(*problems.children(generator))
    q_global, (q_local,) = problems.start_posteriors(model, [site], generator)
    new_mean = q_global.mean + 1.5
    z_global = torch.randn(4, generator=generator, dtype=torch.float64)
    noise = torch.randn(21, 1, generator=generator, dtype=torch.float64)
    before = q_local.transform(z_global, q_global.mean, noise)
    after = q_local.shifted(q_global.mean, new_mean).transform(z_global, new_mean, noise)
    torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(q_local.transform(z_global, new_mean, noise), before)


def test_family_density_is_that_of_the_transformed_draws(generator):
    """Both densities against torch's multivariate normal, and the draws against their noise."""
    q = problems.randomised(family.initial_global(4, scale=0.5, triangular=True), generator)
    z = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    reference = torch.distributions.MultivariateNormal(q.mean, scale_tril=q.factor())
    torch.testing.assert_close((q.log_density(z), q.entropy()), (reference.log_prob(z), reference.entropy()))
    torch.testing.assert_close(q.transform(z), q.mean + z @ q.factor().mT)
    for given in (q, replace(q, lower=None)):  # weights on ε for weights on Z_G
        torch.testing.assert_close(given.mixed(z) @ z.mT, z @ (given.transform(z) - q.mean).mT)
    sizes = ((2, 3), (2, 3), (2, 3, 4), (2, 3))  # two units, three latents, four shared ones
    local = problems.randomised(family.LocalPosterior(*(torch.zeros(n).double() for n in sizes)), generator)
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
    model = problems.mixed_model()
    features, targets, groups = problems.children(generator, units=1, visits=3)
    site = model.prepare(features, targets, groups)
    point = GlobalPosterior(torch.tensor([0.3, -0.5, 0.8, -0.4]).double(), torch.full((4,), -40.0).double(), None)
    noise = torch.tensor(special.ndtri((np.arange(20000) + 0.5) / 20000))[:, None, None]
    nothing = torch.zeros(20000, 4, dtype=torch.float64)
    mean, variance = model.mixture(site, point, None, (nothing, noise))
    for row in range(3):
        fixed = 0.3 + float(features[row] @ point.mean[1:3])

        def density(b, fixed=fixed):
            return special.expit(fixed + b) * stats.norm.pdf(b, scale=math.exp(0.4))

        expected, _ = integrate.quad(density, -15, 15, epsabs=1e-12)
        assert float(mean[row]) == pytest.approx(expected, abs=1e-6)  # midpoint rule in the quantile
        assert float(variance[row]) == pytest.approx(expected * (1 - expected), abs=1e-6)


def test_multinomial_density_and_its_learned_prior(generator):
    model, x = multinomial(), torch.randn(5, 2, generator=generator, dtype=torch.float64)
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
        density = family.normal_log_density(z[draw], model.prior_log_scale(), None)
        assert float(density.detach()) == pytest.approx(prior, rel=1e-12)
    probability, variance = model.observation(site, z, empty)
    torch.testing.assert_close(probability.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    torch.testing.assert_close(variance, probability * (1 - probability))


@pytest.mark.parametrize(
    ("likelihood", "spread", "coupled"), [("gaussian", 0.5, True), ("gaussian", 0.0, False), ("bernoulli", 0.5, True)]
)
def test_expected_local_part_is_the_mean_of_the_sampled_one(generator, likelihood, spread, coupled):
    """Everything in E_q log p − E_q log q is where it should be, once: 20 000 draws, five standard errors."""
    inputs = torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None]
    model = problems.sparse_gp(inputs=inputs, likelihood=likelihood, noise_spread=spread)
    site = problems.gp_sites(model, generator, sizes=(5,), num_inducing=2, binary=likelihood == "bernoulli")[0]
    q_global, (q_local,) = problems.start_posteriors(model, [site], generator, whole=coupled)
    with torch.no_grad():
        noise = torch.randn(20000, model.global_size, generator=generator, dtype=torch.float64)
        z_global = q_global.transform(noise)
        own_noise = unit_noise(3, 0, site.keys, (20000,), model.local_width(site))
        z_local = q_local.transform(z_global, q_global.mean, own_noise)
        sampled = model.log_local(site, z_global, z_local)[:, 0]
        expected = model.site_term(site, q_global, q_local, None) - q_local.entropy()
    error = float(sampled.std()) / math.sqrt(20000)
    assert abs(float(sampled.mean() - expected)) < 5 * error
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
    model = problems.sparse_gp(inputs=torch.unique(rows)[:, None], jitter=1e-10)
    sites = problems.gp_sites(model, generator, num_inducing=20)
    with torch.no_grad():
        bases = [model._basis(site) for site in sites]
    designs = [(shared.numpy(), local.numpy()) for shared, local, _ in bases]
    q_global, q_local, _ = problems.linear_gaussian_posterior(designs, [site.targets.numpy() for site in sites], 0.2)
    tests = torch.tensor([[-2.7], [0.05], [1.3]], dtype=torch.float64)
    answers = exact_hierarchical_gp(model, sites, tests, 0.2)
    for index, q in enumerate((*q_local, None)):
        site, rows = sites[min(index, 2)], ModelInputs(tests, torch.zeros(3, dtype=torch.int64))
        mean, variance = model.moments(site, q_global, q, rows, link=True)
        torch.testing.assert_close(mean, answers[index][0], rtol=1e-5, atol=1e-5)  # jitter against cond(K_zz)
        torch.testing.assert_close(variance, answers[index][1], rtol=1e-5, atol=1e-5)
        noisy, spread = model.moments(site, q_global, q, rows, link=False)
        torch.testing.assert_close((noisy, spread), (mean, variance + 0.2))


@pytest.mark.parametrize("known", [True, False])
def test_gp_prediction_agrees_with_draws(generator, known):
    """Closed form against the mixture over draws of Z_G and Z_L, ζ included, at a site and at a new one."""
    inputs = torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None]
    model = problems.sparse_gp(inputs=inputs, noise_spread=0.3)
    site = problems.gp_sites(model, generator, sizes=(5,), num_inducing=5)[0].at(inputs)
    q_global, (q_local,) = problems.start_posteriors(model, [site], generator)
    q = q_local if known else None
    rows = ModelInputs(inputs, torch.zeros(3, dtype=torch.int64))
    closed, width = model.moments(site, q_global, q, rows, link=False)
    noise = torch.randn(40000, model.global_size, generator=generator, dtype=torch.float64)
    own = unit_noise(3, 0, site.keys, (40000,), model.local_width(site))
    drawn, scatter = SampledModel.mixture(model, site, q_global, q, (noise, own))
    torch.testing.assert_close(drawn, closed, rtol=0, atol=0.04)  # five errors of a mean over 40 000
    torch.testing.assert_close(scatter, width, rtol=0.05, atol=0)
    _, variance = model.moments(site, q_global, q, rows, link=True)
    mean_offset = 0.3 * float(q_local.mean[0, -1]) if known else 0.0
    coupled = (q_local.coupling[0, -1] @ q_global.factor()).square().sum() + q_local.factor()[0, -1].square().sum()
    spread = 0.09 * float(coupled) if known else 0.09
    expected = 0.2 * math.exp(2 * mean_offset + 2 * spread)  # σ² E e^{2ζ}
    torch.testing.assert_close(width - variance, torch.full((3,), expected, dtype=torch.float64))


def test_local_steps_are_those_of_torchs_adam(generator):
    """Three steps, and two more that go on with the moments, on θ, η_G and η_Lk at once."""
    rates, ratio = (0.1, 0.05, 0.02, 0.04, 0.03), 3.0

    def parts():
        model = problems.sparse_gp(inputs=torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None], noise_spread=0.5)
        site = problems.gp_sites(model, torch.Generator().manual_seed(1), sizes=(6,))[0]
        draw = torch.Generator().manual_seed(2)
        q_global, [q_local] = problems.start_posteriors(model, [site], draw, triangular=False)
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
        bracket = global_term(other.model.prior_log_scale(), q_global, None)
        bound = bracket + ratio * other.site_term(q_global, q_local, None, 0)
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
