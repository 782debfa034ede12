"""Local updates reach known optima; replay keeps the evidence; pseudo-points respect the floor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pvi_oracles import collapsed_local_bound

from fedgp_flower.errors import ConfigError
from fedgp_flower.gp.batched_kernel import BatchedKernel
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.optimisers import AdamSettings
from fedgp_flower.methods.pvi.factors import InducingFactor, PseudoObservations, log_noise_evidence
from fedgp_flower.methods.pvi.hierarchical import (
    Cavity,
    Data,
    Draws,
    Latents,
    Point,
    SparseModel,
    collapsed_evidence,
    local_free_energy,
    predict,
)
from fedgp_flower.methods.pvi.pseudo_points import microaggregate
from fedgp_flower.methods.pvi.replay import (
    Replay,
    ReplaySettings,
    distil,
    noise_residual,
    refit,
    replay_update,
    withhold,
)
from fedgp_flower.methods.pvi.updates import LocalProblem, adam_update, first_factor, first_latents, lbfgs_update
from fedgp_flower.options import ModelSection

INDUCING = 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sine(rows: int = 60, seed: int = 0) -> Data:
    x = 3 * torch.randn(rows, 1, generator=generator(seed), dtype=torch.float64)
    return Data(x, x[:, 0].sin() + 0.2 * torch.randn(rows, generator=generator(seed + 1), dtype=torch.float64))


def model() -> SparseModel:
    section = ModelSection(lengthscale=1.5, outputscale=1.0)
    return SparseModel(BatchedKernel(build_kernel(section, 1)), build_point_likelihood("gaussian", noise=0.04), 1)


def grid() -> Latents:
    return Latents(Point(torch.linspace(-6, 6, INDUCING).double()), Point(model().initial_hyper()))


def draws_at(latents: Latents) -> Draws:
    return Draws(latents.inducing.value.reshape(1, -1, 1), latents.hyper.value[None])


def standard(latents: Latents) -> Latents:
    sizes = (len(latents.inducing.value), len(latents.hyper.value))
    return Latents(*(DiagonalGaussian.standard(size) for size in sizes))


def exact(data: Data) -> PseudoObservations:
    return PseudoObservations(data.inputs, data.targets, torch.ones(len(data)).double(), True, float(len(data)))


def start_near(data: Data, size: int = 20) -> PseudoObservations:
    own = microaggregate(data, size, 1)
    return PseudoObservations(own.inputs + 0.2, 0.5 * own.targets, own.root, own.tied, own.count)


@pytest.mark.parametrize("form", ["tied", "free", "full", "cpo"])
def test_every_form_of_factor_reaches_the_collapsed_bound_at_fixed_latents(form):
    """With as many pseudo-points as inducing points the local optimum is the closed form."""
    data, latents, others = sine(), grid(), [exact(sine(20, 5))]
    problem = LocalProblem(model(), data, others, latents, num_samples=1)
    near = start_near(data)
    own = {
        "tied": near,
        "free": PseudoObservations(near.inputs, near.targets, 3 * near.root, tied=False),
        "full": PseudoObservations(near.inputs, near.targets, near.root.diag()),
        "cpo": InducingFactor(NaturalGaussian(torch.zeros(INDUCING).double(), -0.05 * torch.eye(INDUCING).double())),
    }[form]
    found = lbfgs_update(problem, own, latents, max_evaluations=400, generator=generator())
    best = collapsed_local_bound(model(), draws_at(latents), others, data).item()
    assert best - 0.05 < found.trace.values[-1] <= best + 1e-9
    assert found.trace.values[0] < best - 3
    assert torch.equal(found.latents.inducing.value, latents.inducing.value)


def test_adam_reaches_the_same_optimum():
    data, latents = sine(), grid()
    problem = LocalProblem(model(), data, [], latents, num_samples=1)
    settings = AdamSettings(steps=200, tolerance=1e-4)
    found = adam_update(problem, start_near(data), latents, settings, generator())
    best = collapsed_local_bound(model(), draws_at(latents), [], data).item()
    assert best - 1.0 < found.free_energy <= best
    assert found.trace.reason in {"converged", "budget"}


def test_the_new_posterior_is_always_more_precise_than_the_cavity():
    data = sine()
    prior = standard(grid())
    problem = LocalProblem(model(), data, [], prior)
    start = first_latents(problem, INDUCING, generator())
    found = adam_update(problem, start_near(data), start, AdamSettings(steps=30), generator(1))
    for new, old in ((found.latents.inducing, prior.inducing), (found.latents.hyper, prior.hyper)):
        assert bool((new.precision > old.precision).all())
        factor = new / old
        assert bool((factor.precision > 0).all())
    before = adam_update(problem, start_near(data), start, AdamSettings(steps=1), generator(1)).free_energy
    assert found.free_energy > before + 5


def test_alpha_weighs_the_kl_of_z_alone():
    data = sine()
    prior = standard(grid())
    first = LocalProblem(model(), data, [], prior, alpha=0.0)
    start = first_latents(first, INDUCING, generator())
    values = {}
    for alpha in (0.0, 0.5):
        problem = LocalProblem(model(), data, [], prior, alpha=alpha)
        one_step = adam_update(problem, exact(data), start, AdamSettings(steps=1), generator(3))
        values[alpha] = one_step.free_energy
    expected = 0.5 * float(start.inducing.kl(prior.inducing))
    assert values[0.0] - values[0.5] == pytest.approx(expected, rel=1e-9)


def test_kl_of_beta_is_taken_from_the_cavity():
    """The same samples under two cavities of β: the objectives differ by the difference of the KLs."""
    data, prior = sine(), standard(grid())
    wide = DiagonalGaussian(prior.hyper.eta1 + 0.1, 0.25 * prior.hyper.eta2)
    start = first_latents(LocalProblem(model(), data, [], prior), INDUCING, generator())
    values = [
        adam_update(
            LocalProblem(model(), data, [], Latents(prior.inducing, cavity), alpha=0.0),
            exact(data),
            start,
            AdamSettings(steps=1),
            generator(3),
        ).free_energy
        for cavity in (prior.hyper, wide)
    ]
    expected = float(start.hyper.kl(wide) - start.hyper.kl(prior.hyper))
    assert values[0] - values[1] == pytest.approx(expected, rel=1e-8)
    assert abs(expected) > 0.1


def test_first_means_of_z_differ_from_each_other():
    """Even where all rows coincide: equal inducing points would stay equal."""
    same = Data(torch.ones(5, 1).double(), torch.zeros(5).double())
    start = first_latents(LocalProblem(model(), same, [], standard(grid())), INDUCING, generator())
    assert float(torch.pdist(start.inducing.mean()[:, None]).min()) > 0


def test_an_averaged_z_moves_and_every_other_point_stays():
    """A site that fitted its factor at a β of its own would send it to a posterior at another β."""
    data, latents = sine(), grid()
    for learn in (True, False):
        problem = LocalProblem(model(), data, [], latents, num_samples=1, learn_inducing=learn)
        found = adam_update(problem, start_near(data), latents, AdamSettings(steps=5), generator())
        moved = not torch.equal(found.latents.inducing.value, latents.inducing.value)
        assert moved == learn
        assert torch.equal(found.latents.hyper.value, latents.hyper.value)
        draws = Draws(found.latents.inducing.value.reshape(1, -1, 1), latents.hyper.value[None])
        value = local_free_energy(model(), draws, [], found.own, data).item()
        assert value > found.trace.values[0], "at the β that all sites share"


def test_same_seed_same_update_and_mini_batches_differ():
    data = sine()
    prior = standard(grid())
    results = []
    for batch in (0, 0, 20):
        problem = LocalProblem(model(), data, [], prior, batch_size=batch)
        start = first_latents(problem, INDUCING, generator())
        results.append(adam_update(problem, start_near(data), start, AdamSettings(steps=3), generator(2)).free_energy)
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(("name", "label"), [("bernoulli", "binary"), ("poisson", "count"), ("student-t", "real")])
def test_updates_of_other_likelihoods_raise_the_free_energy_and_predict(name, label):
    data = sine()
    targets = {"binary": (data.targets > 0).double(), "count": data.targets.abs().round(), "real": data.targets}[label]
    likelihood = build_point_likelihood(name)
    other = SparseModel(model().kernel, likelihood, 1)
    hyper = other.initial_hyper()
    latents = Latents(grid().inducing, Point(hyper))
    problem = LocalProblem(other, Data(data.inputs, targets), [], latents, num_samples=1)
    own = PseudoObservations(data.inputs[:20], 0.1 * targets[:20], torch.ones(20).double(), tied=False)
    found = lbfgs_update(problem, own, latents, max_evaluations=60, generator=generator())
    assert found.trace.values[-1] > found.trace.values[0] + 1
    before, after = (
        predict(other, draws_at(latents), [f], data.inputs, targets).log_density().mean() for f in (own, found.own)
    )
    assert float(after) > float(before)


def test_refit_with_everything_as_pseudo_observations_is_refit_on_the_rows():
    """V = X, m = y, w = 1, c = 0 is lossless: same optimum from the other sites' factors as from the rows."""
    data, latents = sine(), grid()
    prior = standard(latents)
    settings = ReplaySettings(refit_evaluations=60, adam=AdamSettings(steps=0))
    half = [data.subset(torch.arange(0, 30)), data.subset(torch.arange(30, 60))]
    pooled = refit(Replay(model(), [], data, prior, settings), latents, generator())
    replayed = refit(Replay(model(), [exact(half[0])], half[1], prior, settings), latents, generator())
    assert replayed.bound == pytest.approx(pooled.bound, abs=1e-4)
    torch.testing.assert_close(replayed.latents.hyper.value, pooled.latents.hyper.value, rtol=1e-2, atol=1e-2)
    start = collapsed_evidence(model(), draws_at(latents), [], data).item()
    assert pooled.bound > start


def test_refit_without_any_evidence_returns_the_prior():
    """Mode 0 of N(0, I), and from there −α KL(q(Z)) − KL(q(β)) with the starting width."""
    latents = grid()
    prior = standard(latents)
    settings = ReplaySettings(alpha=0.2, start_scale=(0.5, 0.5), adam=AdamSettings(steps=1))
    found = refit(Replay(model(), [], None, prior, settings), latents, generator())
    kl = -0.5 * (1 + np.log(0.25) - 0.25)  # of N(0, ¼) from N(0, 1), per entry
    assert found.traces[0].values[-1] == pytest.approx(0.0, abs=1e-4)
    expected = -0.2 * kl * len(latents.inducing.value) - kl * len(latents.hyper.value)
    assert found.traces[1].values[0] == pytest.approx(expected, abs=1e-3)


def test_refit_keeps_a_latent_whose_prior_is_a_point():
    data, latents = sine(), grid()
    prior = Latents(latents.inducing, standard(latents).hyper)
    found = refit(Replay(model(), [], data, prior, ReplaySettings(adam=AdamSettings(steps=5))), latents, generator())
    assert torch.equal(found.latents.inducing.value, latents.inducing.value)
    assert isinstance(found.latents.hyper, DiagonalGaussian)


def test_refit_of_distributions_raises_the_bound_and_narrows_beta():
    data, latents = sine(), grid()
    settings = ReplaySettings(adam=AdamSettings(steps=60, window=20))
    found = refit(Replay(model(), [], data, standard(latents), settings), latents, generator())
    adam_values = found.traces[1].values
    assert np.mean(adam_values[-10:]) > np.mean(adam_values[:10])
    assert float(found.latents.hyper.moments()[1].max()) < 1.0


def test_replay_refuses_free_noise_and_other_likelihoods():
    data, latents = sine(), grid()
    free = PseudoObservations(data.inputs, data.targets, torch.ones(60).double(), tied=False)
    with pytest.raises(ConfigError, match="tied"):
        collapsed_evidence(model(), draws_at(latents), [free], data)
    binary = SparseModel(model().kernel, build_point_likelihood("bernoulli"), 1)
    with pytest.raises(ConfigError, match="Gaussian likelihood"):
        collapsed_evidence(binary, draws_at(latents), [], data)


def test_residual_is_zero_at_the_rows_and_the_lost_squares_after_averaging():
    data, latents = sine(), grid()
    fit = refit(
        Replay(model(), [], data, standard(latents), ReplaySettings(adam=AdamSettings(steps=0))), latents, generator()
    )
    draws = draws_at(fit.latents)
    assert float(noise_residual(Cavity.at(model(), draws, [], data), exact(data), data)) == pytest.approx(0.0, abs=1e-9)
    pairs = Data(data.inputs.repeat(2, 1), torch.cat([data.targets + 0.1, data.targets - 0.1]))
    merged = PseudoObservations(data.inputs, data.targets, torch.full((60,), 2.0).double().sqrt())
    lost = noise_residual(Cavity.at(model(), draws, [], pairs), merged, pairs)
    assert float(lost) == pytest.approx(120 * 0.1**2, rel=1e-9)


@pytest.mark.parametrize("known", [0.1, 0.5, 1.0])
def test_noise_claims_are_withheld_without_moving_the_slope_in_the_noise(known):
    own = replace(microaggregate(sine(), 30, 1), residual=torch.tensor(0.4).double())
    noise = torch.tensor([0.04]).double().requires_grad_()

    def slope(factor, orders):
        value = log_noise_evidence(factor, noise).sum()
        for _ in range(orders):
            (value,) = torch.autograd.grad(value, noise, create_graph=True)
            value = value * noise.squeeze()
        return value.item()

    kept = withhold(own, noise.detach().squeeze(), known)
    assert slope(kept, 1) == pytest.approx(slope(own, 1), rel=1e-12)
    assert float(kept.residual) == pytest.approx(0.4 * known)
    assert kept.count == pytest.approx(60 - (1 - known) * 10)
    assert slope(kept, 2) >= slope(own, 2)  # less curvature: a smaller noise is less unlikely


def test_no_fewer_rows_are_counted_than_pseudo_observations():
    own = replace(microaggregate(sine(), 30, 1), residual=torch.tensor(8.0).double())
    assert withhold(own, torch.tensor(0.04).double(), 0.1).count == 30


def test_distillation_of_few_points_keeps_most_of_the_bound():
    data, latents, others = sine(), grid(), [exact(sine(20, 5))]
    own = microaggregate(data, 20, 3)
    settings = ReplaySettings(num_samples=4, distil_evaluations=80)
    found, trace = distil(Replay(model(), others, data, latents, settings), own, latents, generator())
    best = collapsed_local_bound(model(), draws_at(latents), others, data).item()
    assert trace.values[-1] > trace.values[0]
    reached = collapsed_evidence(model(), draws_at(latents), [*others, found], None).item()
    known = collapsed_evidence(model(), draws_at(latents), others, None).item()
    assert reached - known == pytest.approx(best, abs=2.0)  # of about 60 nats
    assert float(found.residual) >= 0
    assert found.count == 60


def test_a_replay_pass_predicts_like_pooled_training():
    train, test = sine(90, 3), sine(100, 11)
    sites = [train.subset(rows) for rows in torch.arange(90).chunk(3)]
    prior, start = standard(grid()), grid()
    settings = ReplaySettings(adam=AdamSettings(steps=20, window=10))
    factors: dict[int, PseudoObservations] = {}
    for k, data in enumerate(sites):
        others = [factors[j] for j in factors]
        own = microaggregate(data, 12, 2)
        factors[k], fitted, _ = replay_update(Replay(model(), others, data, prior, settings), own, start, generator(k))
        start = fitted.latents
    mean = [start.inducing.mean(), start.hyper.mean()]
    federated = predict(
        model(), draws_at(Latents(*map(Point, mean))), list(factors.values()), test.inputs, test.targets
    )
    gold = refit(Replay(model(), [], train, prior, settings), grid(), generator()).latents
    mean = [gold.inducing.mean(), gold.hyper.mean()]
    pooled = predict(model(), draws_at(Latents(*map(Point, mean))), [exact(train)], test.inputs, test.targets)
    assert float(federated.log_density().mean()) > float(pooled.log_density().mean()) - 0.1


@pytest.mark.parametrize("form", ["tied", "free", "full", "cpo"])
def test_first_factor_of_all_rows_is_exact_at_the_starting_latents(form):
    """With a pseudo-observation per row the local free energy of the first factor is the collapsed bound."""
    data, latents = sine(), grid()
    own = first_factor(model(), data, latents, form, num_points=60, min_rows=1)
    value = local_free_energy(model(), draws_at(latents), [], own, data).item()
    assert value == pytest.approx(collapsed_local_bound(model(), draws_at(latents), [], data).item(), abs=1e-6)


def test_first_factor_of_labels_is_weak():
    data = sine()
    binary = SparseModel(model().kernel, build_point_likelihood("bernoulli"), 1)
    latents = Latents(grid().inducing, Point(binary.initial_hyper()))
    labels = Data(data.inputs, (data.targets > 0).double())
    own = first_factor(binary, labels, latents, "free", num_points=12, min_rows=5)
    assert not own.tied
    assert float(own.root.square().sum()) == pytest.approx(0.6)
