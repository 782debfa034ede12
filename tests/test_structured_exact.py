"""SFVI against exact answers: the pooled gradient, the exact posterior, the exact conditional evidence."""

import numpy as np
import pytest
import torch
from scipy import stats
from structured_problems import (
    PlainSite,
    children,
    dealt,
    gp_sites,
    gradient_of,
    linear_gaussian_posterior,
    mixed_model,
    plan_of,
    prior_of,
    roster_of,
    sparse_gp,
    start_posteriors,
    state_of,
)

from fedgp_flower.methods.family import (
    GlobalPosterior,
    global_term,
    named,
    on_the_wire,
    unit_noise,
    with_named,
)
from fedgp_flower.methods.sfvi.classes import Multinomial
from fedgp_flower.methods.sfvi.learner import gradients
from fedgp_flower.methods.sfvi.structured import SampledModel
from strategies.server.questions import drive
from strategies.sfvi import global_noise, one_round, plus, server_term
from strategies.sfvi_avg import average


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def assert_close(found, expected, tolerance=1e-12):
    """Relative to the largest entry of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max() if np.size(value) else 1.0
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * scale, err_msg=name)


def split(values, parts):
    return [with_named(values, {name: value[part] for name, value in named(values).items()}) for part in parts]


def partitions(units):
    """Units in 1, 3 and 7 contiguous sites, and in 4 uneven ones in random order."""
    shuffled = torch.randperm(units, generator=torch.Generator().manual_seed(0))
    return [*(list(torch.arange(units).chunk(k)) for k in (1, 3, 7)), list(shuffled.split([1, 9, 3, units - 13]))]


@pytest.mark.parametrize("draws", [1, 4])
def test_a_round_takes_the_pooled_gradient_for_any_partition(generator, draws):
    """Server term + Σ shares = autograd of the pooled bound with the same draws; local gradients too."""
    model, plan = mixed_model(), plan_of(model="glmm", samples=3)
    features, targets, groups = children(generator)
    pooled = model.prepare(features, targets, groups)
    q_global, (q_local,) = start_posteriors(model, [pooled], generator)
    noise = torch.tensor(global_noise(plan[1], 1, 3, model.global_size))
    noise_local = unit_noise(11, 0, pooled.keys, (draws, 3), 1)

    def bound(eta, own):
        local = model.site_term(pooled, eta, own, (noise, noise_local))
        return global_term(model.prior_log_scale(), eta, noise) + local

    value, slopes = gradients(model, q_global, q_local, bound)
    sent, kept = dealt(slopes)
    for parts in partitions(21):
        sites = {}
        for part, own in zip(parts, split(q_local, parts), strict=True):
            keys, order = pooled.keys[part].sort()
            chosen = torch.isin(groups, keys)
            rows = model.prepare(features[chosen], targets[chosen], groups[chosen])
            sites[str(len(sites))] = PlainSite(model, rows, split(own, [order])[0], draws=draws)
        state, figures = drive(one_round(state_of(model, q_global), roster_of(sites), *plan), sites)
        assert_close(gradient_of(state), sent)
        assert state.bound == pytest.approx(value, rel=1e-13)
        assert figures == {"objective": state.bound / len(targets)}
        by_key = {int(k): s.local["local.mean"][i] for s in sites.values() for i, k in enumerate(s.learner.site.keys)}
        found = torch.stack([by_key[int(key)] for key in pooled.keys])
        torch.testing.assert_close(found, kept["local.mean"], rtol=0, atol=1e-12)


def learned_scales(model):
    """The model with prior scales that are not the ones it starts with."""
    with torch.no_grad():
        model.prior_log_scales.copy_(torch.tensor([-0.4, 0.7], dtype=torch.float64))
    return model


@pytest.mark.parametrize("triangular", [True, False])
def test_the_server_s_term_needs_the_prior_s_arrays_alone(generator, triangular):
    """With and without draws it is that of the model itself."""
    model = learned_scales(Multinomial(2, 3))
    site = model.prepare(torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    q_global, (q_local,) = start_posteriors(model, [site], generator, triangular=triangular)
    noise = torch.randn(5, model.global_size, generator=generator, dtype=torch.float64)
    parameters = on_the_wire(model.theta() | named(q_global))
    for term, draws in (
        (lambda eta, own: global_term(model.prior_log_scale(), eta, noise), noise.numpy()),
        (lambda eta, own: global_term(model.prior_log_scale(), eta, None), None),
    ):
        value, found = server_term(parameters, prior_of(model), draws)
        expected, slopes = gradients(model, q_global, q_local, term)
        assert value == pytest.approx(expected, rel=1e-12)
        assert_close(found, dealt(slopes)[0])


def conjugate_problem(generator):
    """A hierarchical GP with one noise: y is linear-Gaussian in the latents given the inducing inputs."""
    model = sparse_gp(inputs=torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None])
    sites = gp_sites(model, generator, num_inducing=2)
    with torch.no_grad():
        bases = [model._basis(site) for site in sites]
    designs = [(shared.numpy(), local.numpy()) for shared, local, _ in bases]
    q_global, q_local, evidence = linear_gaussian_posterior(designs, [site.targets.numpy() for site in sites], 0.2)
    left_open = sum(float(left.sum()) for _, _, left in bases) / (2 * 0.2)
    return model, sites, q_global, q_local, evidence - left_open


def test_sticking_the_landing_has_no_gradient_and_no_noise_at_the_exact_posterior(generator):
    """Every draw gives ∇η = 0 there: p/q is constant."""
    model, sites, q_global, q_local, exact_bound = conjugate_problem(generator)
    noise = torch.randn(2, model.global_size, generator=generator, dtype=torch.float64)
    parameters = on_the_wire(model.theta() | named(q_global))
    value, summed = server_term(parameters, prior_of(model), noise.numpy())
    for site, own in zip(sites, q_local, strict=True):
        noise_local = unit_noise(1, 0, site.keys, (1, 2), model.local_width(site))

        def term(eta, mine, site=site, noise_local=noise_local):
            return SampledModel.site_term(model, site, eta, mine, (noise, noise_local))

        share, slopes = gradients(model, q_global, own, term)
        sent, kept = dealt(slopes)
        value, summed = value + share, plus(summed, sent)
        assert max(float(slope.abs().max()) for slope in kept.values()) < 1e-10
    assert max(np.abs(gradient).max() for name, gradient in summed.items() if name.startswith("q.")) < 1e-10
    assert value == pytest.approx(exact_bound, abs=1e-9)


def test_a_round_at_the_exact_posterior_has_the_evidence_and_no_gradient(generator):
    """The conjugate model: the bound is log p(y) less what the inducing values leave open, and nothing pulls."""
    model, rows, q_global, q_local, exact_bound = conjugate_problem(generator)
    sites = {str(k): PlainSite(model, own, q) for k, (own, q) in enumerate(zip(rows, q_local, strict=True))}
    state, _ = drive(one_round(state_of(model, q_global), roster_of(sites), *plan_of()), sites)
    assert state.bound == pytest.approx(exact_bound, abs=1e-9)
    assert max(np.abs(v).max() for n, v in gradient_of(state).items() if n.startswith("q.")) < 1e-9
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
    correlation = np.corrcoef(many.T)[np.triu_indices(400, 1)]
    assert np.abs(correlation).max() < 6 / np.sqrt(500)


def test_averaging_equal_sites_changes_nothing_and_different_ones_meet_at_the_barycentre(generator):
    model = mixed_model()
    site = model.prepare(*children(generator))
    first, _ = start_posteriors(model, [site], generator)
    second, _ = start_posteriors(model, [site], generator)
    theta = [{"theta.noise": torch.tensor(value, dtype=torch.float64)} for value in (1.0, 3.0)]
    one, two = (on_the_wire(t | named(q)) for t, q in zip(theta, (first, second), strict=True))
    same, spread = average([one, one], np.array([1.0, 2.0]))
    assert_close(same, one, tolerance=1e-12)
    assert max(spread) < 1e-12
    both, spread = average([one, two], np.array([1.0, 3.0]))
    assert both["theta.noise"] == pytest.approx(2.5)
    np.testing.assert_allclose(both["q.mean"], (first.mean + 3 * second.mean) / 4, rtol=1e-13)
    s1, s2 = ((q.factor() @ q.factor().mT).numpy() for q in (first, second))
    root = GlobalPosterior.of(both).factor().numpy()
    halves = []
    for s in (s1, s2):
        values, vectors = np.linalg.eigh(root.T @ s @ root)
        halves.append(vectors * np.sqrt(values) @ vectors.T)
    np.testing.assert_allclose(root.T @ root, 0.25 * halves[0] + 0.75 * halves[1], atol=1e-12)
    assert spread[0] > spread[1] > 0
    diagonal = [{k: v for k, v in message.items() if k != "q.lower"} for message in (one, two)]
    scales = np.exp(average(diagonal, np.ones(2))[0]["q.log_scale"])
    np.testing.assert_allclose(scales, (first.log_scale.exp() + second.log_scale.exp()) / 2, rtol=1e-13)


def test_shift_keeps_the_conditional(generator):
    """q(Z_Lk | Z_G) is the same function of Z_G after the site moves to the new μ_G."""
    model = mixed_model()
    site = model.prepare(*children(generator))
    q_global, (q_local,) = start_posteriors(model, [site], generator)
    new_mean = q_global.mean + 1.5
    z_global = torch.randn(4, generator=generator, dtype=torch.float64)
    noise = torch.randn(21, 1, generator=generator, dtype=torch.float64)
    before = q_local.transform(z_global, q_global.mean, noise)
    after = q_local.shifted(q_global.mean, new_mean).transform(z_global, new_mean, noise)
    torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(q_local.transform(z_global, new_mean, noise), before)
