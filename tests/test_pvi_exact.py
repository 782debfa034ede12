"""Exact facts of PVI: conjugate models, fixed points, merging, rounds against plain functions, local updates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.methods.pvi import model as mathematics
from fedgp_flower.methods.pvi import updates
from fedgp_flower.methods.pvi.messages import LatentFactor, Marginals, NaturalParameters, PseudoPoints, Refined
from fedgp_flower.methods.pvi.model import Data, Draws, PseudoObservations, SparseModel, local_free_energy
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.pvi.updates import LocalProblem, adam_update, first_factor
from fedgp_flower.methods.pvi_weights.model import LinearRows, optimum
from fedgp_flower.options import ModelSection
from strategies.pvi import damping_of, due, in_turn, next_visits, one_round
from strategies.pvi_state import Contribution, PVIState, cavities, cavity, forget, merge, posterior
from strategies.pvi_updates import averaged, local_optimum
from strategies.server.questions import First, Refuse, Roster, drive

EXACT = {"rtol": 1e-8, "atol": 1e-8}  # cond(K_zz) is about 1e3
NOISE = 0.04


class Problem:
    """42 rows of a noisy sine in two inputs, 8 inducing points, fixed β; reference formulas without whitening."""

    def __init__(self, num_sites=3, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = 4 * torch.rand(42, 2, generator=generator, dtype=torch.float64)
        self.y = (self.x.sum(-1)).sin() + NOISE**0.5 * torch.randn(42, generator=generator, dtype=torch.float64)
        self.z = 4 * torch.rand(8, 2, generator=generator, dtype=torch.float64)
        section = ModelSection(lengthscale=1.2, outputscale=1.5, noise=NOISE, jitter=0.0)
        self.kernel, self.model = build_kernel(section, 2), SparseModel(section, 2)
        order = torch.randperm(42, generator=generator)
        self.rows = [part.sort().values for part in order.tensor_split(num_sites)]
        self.draws = Draws(self.model, self.z[None], self.model.initial_hyper()[None])

    def k(self, left, right):
        with torch.no_grad():
            return self.kernel(left, right).to_dense()

    def titsias(self, rows=slice(None)):
        """Titsias' optimal q(u) from some rows: Σ = K_zz + K_zx K_xz/σ², m = K_zz Σ⁻¹ K_zx y/σ², S = K_zz Σ⁻¹ K_zz."""
        kzz, kzx = self.k(self.z, self.z), self.k(self.z, self.x[rows])
        sigma = kzz + kzx @ kzx.mT / NOISE
        return kzz @ torch.linalg.solve(sigma, kzx @ self.y[rows]) / NOISE, kzz @ torch.linalg.solve(sigma, kzz)

    def data(self, site):
        return Data(self.x[self.rows[site]], self.y[self.rows[site]])

    def exact_dpo(self, site):
        data = self.data(site)
        return PseudoObservations(data.inputs, data.targets, torch.ones(len(data)).double())

    def site(self, site, likelihood="gaussian"):
        """Its rows as linear functions of v."""
        rows = self.rows[site]
        a = self.draws.project(self.x[rows])[0].mT.detach()
        point = canonical_likelihood(likelihood, NOISE)
        targets = self.y[rows] if likelihood == "gaussian" else (self.y[rows] > 0).double()
        return LinearRows(a, targets, point, point.initial)

    def unwhitened(self, q):
        L = torch.linalg.cholesky(self.k(self.z, self.z))
        mean, covariance = q.moments()
        return L @ mean, L @ covariance @ L.mT


def blocks(**gaussians):
    return {name: NaturalParameters.of(gaussian) for name, gaussian in gaussians.items()}


def test_dpo_prediction_is_the_sparse_gp_of_the_textbook():
    problem = Problem(3)
    mixture = mathematics.predict(problem.draws, [problem.exact_dpo(k) for k in range(3)], problem.x, problem.y)
    mean, covariance = problem.titsias()
    b = torch.linalg.solve(problem.k(problem.z, problem.z), problem.k(problem.z, problem.x))  # K_zz⁻¹ K_zx
    explained = ((problem.k(problem.z, problem.z) - covariance) @ b * b).sum(0)
    variance = problem.k(problem.x, problem.x).diagonal() - explained + NOISE
    torch.testing.assert_close((mixture.mean(), mixture.variance()), (b.mT @ mean, variance), **EXACT)
    expected = -0.5 * ((2 * math.pi * variance).log() + (problem.y - b.mT @ mean).square() / variance)
    torch.testing.assert_close(mixture.log_density(), expected, **EXACT)


def test_at_the_data_the_local_free_energy_is_stationary_and_equals_the_collapsed_bound():
    problem = Problem(3)
    data, others = problem.data(2), [problem.exact_dpo(0), problem.exact_dpo(1)]
    parts = [data.inputs.clone(), data.targets.clone(), torch.zeros(len(data)).double()]
    inputs, targets, log_root = (p.requires_grad_() for p in parts)
    own = PseudoObservations(inputs, targets, log_root.exp())
    energy = local_free_energy(problem.draws, others, own, data).sum()
    collapsed = collapsed_local_bound(problem.draws, others, data).sum()
    assert energy.item() == pytest.approx(collapsed.item(), abs=1e-9)
    for gradient in torch.autograd.grad(energy, (inputs, targets, log_root)):
        assert float(gradient.abs().max()) < 1e-9
    worse = PseudoObservations(data.inputs, data.targets + 0.1, torch.ones(len(data)).double())
    assert float(local_free_energy(problem.draws, others, worse, data)) < energy.item() - 1e-3


def contribution_of(precision):
    zero = torch.zeros(1).double()
    return Contribution(blocks(b=Gaussian(zero, zero - 0.5 * precision)))


def test_cavities_of_all_sites_at_once_are_those_of_each():
    """Sites `a` and `c` have a block that `b` has not, and that has no prior."""
    sites = {name: contribution_of(4.0**k) for k, name in enumerate("abc")}
    for name in "ac":
        own = Contribution(blocks(u=Gaussian.standard(2)))
        sites[name] = Contribution({**sites[name].factors, **own.factors})
    state = PVIState(blocks(b=Gaussian.standard(1)), sites)
    for site, found in zip(sites, cavities(state), strict=True):
        expected = cavity(state, site)
        assert found.keys() == expected.keys()
        for name, own in expected.items():
            torch.testing.assert_close(found[name].eta2, own.eta2, rtol=1e-14, atol=0)
    assert list(cavities(PVIState(state.prior))) == []


def test_an_improper_site_does_not_hold_up_the_others():
    """Precisions: prior 1, a proposes 4, b −3, c −1e20. Alone b is proper at ρ/4, c at none; together a and b are."""
    state = PVIState(blocks(b=Gaussian.standard(1)), {"c": contribution_of(1.0)}, version=3)
    replies = {"a": contribution_of(4.0), "b": contribution_of(-3.0), "c": contribution_of(-1e20)}
    merged, record = merge(state, replies, damping=1.0)
    assert record.refused == ("c",)
    assert record.halvings == 2
    assert record.damping == 0.25
    found = {name: float(site.factors["b"].gaussian.precision) for name, site in merged.sites.items()}
    assert found == {"a": 4.0, "b": -0.75, "c": 1.0}
    moved = {"a": 6.0, "b": 1.25}  # of q from precision 2, by each alone
    kl = {name: (2 / after - 1 + math.log(after / 2)) / 2 for name, after in moved.items()}
    assert record.size == pytest.approx(kl)
    assert merged.version == 4


@pytest.mark.parametrize(("known", "told", "halvings"), [({}, {"a": -0.6, "b": -0.6}, 1), ({"a": 4.0}, {"s": -2.0}, 2)])
def test_what_is_improper_together_or_in_a_cavity_is_damped(known, told, halvings):
    """Each takes 0.6 of a prior precision of 1: alone proper, together not. q of 1 + 4 − 2 = 3 has −1 without a."""
    sites, replies = ({name: contribution_of(own) for name, own in part.items()} for part in (known, told))
    _, record = merge(PVIState(blocks(b=Gaussian.standard(1)), sites), replies, damping=1.0)
    assert (record.damping, record.halvings, record.refused) == (0.5**halvings, halvings, ())


def test_pseudo_observations_are_replaced_undamped():
    def points(targets):
        return PseudoPoints(np.zeros((len(targets), 1)), targets, targets + 1)

    state = PVIState({}, {"s": Contribution({}, points(np.zeros(2)))})
    merged, _ = merge(state, {"s": Contribution({}, points(np.ones(3)))}, damping=0.1)
    np.testing.assert_array_equal(merged.sites["s"].points.targets, np.ones(3))


def test_points_are_averaged_by_share_of_rows():
    state = PVIState(shared={"inducing": LatentFactor(value=np.array([0.0, 4.0]))})
    found = averaged(state, {"inducing": LatentFactor(value=np.array([1.0, 0.0]))}, 0.25)
    np.testing.assert_allclose(found.shared["inducing"].value, [0.25, 3.0])


def test_schedules():
    rng, sites = np.random.default_rng(0), ["c", "a", "b"]

    def in_order(plan, rounds):
        attempts = {}
        for _ in range(rounds):
            (site,) = in_turn(plan, sites, attempts, 1, rng)
            attempts[site] = attempts.get(site, 0) + 1
            yield site

    assert list(in_order(Plan(), 6)) == ["a", "b", "c", "a", "b", "c"]
    order = list(in_order(Plan(order="random"), 30))
    passes = [tuple(order[i:j]) for i, j in pairwise(range(0, 31, 3))]
    assert all(sorted(p) == ["a", "b", "c"] for p in passes)
    assert len(set(passes)) > 1
    assert in_turn(Plan(), sites, {"a": 1}, 2, rng) == ["b", "c"]
    assert in_turn(Plan(), [], {}, 1, rng) == []
    roster = Roster(dict.fromkeys(sites, 1), tuple(sites), (), 1)
    assert next_visits(PVIState(), roster, Plan("synchronous")) == ["a", "b", "c"]
    assert due(Plan(passes=2), sites, {"a": 2, "b": 1}) == ["c", "b"]
    assert (damping_of(Plan("synchronous"), 4), damping_of(Plan("sequential"), 1)) == (0.25, 1.0)


LINEAR = local_optimum("weights")


def first():
    return PVIState({"weights": NaturalParameters(np.zeros(8), -0.5 * np.eye(8))})


@dataclass
class Rows:
    """Rows whose factor of v is known in closed form, or at its optimum."""

    rows: LinearRows

    def train(self, request):
        context = request.context["weights"].gaussian
        return Refined(0.0, 1, weights=NaturalParameters.of(optimum(self.rows, context, context)[0].factor))


def sites_of(problem, likelihood="gaussian"):
    return {str(k): Rows(problem.site(k, likelihood)) for k in range(len(problem.rows))}


def roster_of(problem, number, busy=()):
    rows = {str(k): len(own) for k, own in enumerate(problem.rows)}
    return Roster(rows, tuple(rows), busy, number)


def trained(problem, plan, rounds, sites=None):
    state = first()
    for number in range(1, rounds + 1):
        asking = one_round(state, roster_of(problem, number), plan, LINEAR)
        state, _ = drive(asking, sites or sites_of(problem))
    return state


def q_of(state):
    return posterior(state)["weights"]


def test_an_answer_of_another_size_is_refused_and_the_others_are_merged():
    problem = Problem(3)
    state = trained(problem, Plan(), 1)
    asking = one_round(state, roster_of(problem, 2), Plan("synchronous", damping=1.0), LINEAR)
    question = next(asking)
    answers = {name: site.train(question.requests[name]) for name, site in sites_of(problem).items()}
    answers["1"] = Refined(0.0, 1, weights=NaturalParameters(np.zeros(3), -np.eye(3)))
    refusal = asking.send(answers)
    assert isinstance(refusal, Refuse)
    assert (refusal.site, "3 entries" in refusal.reason) == ("1", True)
    with pytest.raises(StopIteration) as done:
        asking.send(None)
    merged, figures = done.value.value
    assert set(merged.sites) == {"0", "2"}
    assert figures["visits"] == 3


@dataclass
class Line:
    """Answers that arrive in an order that a test chooses."""

    sites: Mapping[str, Rows]
    waiting: dict[str, Refined] = field(default_factory=dict)

    def arrive(self, asking, which, *, lost=False):
        """Put the questions of a round, and let the answer of one site arrive, or get lost."""
        question = next(asking)
        assert isinstance(question, First)
        self.waiting |= {name: self.sites[name].train(request) for name, request in question.requests.items()}
        site = which or next(iter(self.waiting))
        answer = self.waiting.pop(site)
        with pytest.raises(StopIteration) as done:
            asking.send((site, None if lost else answer))
        return done.value.value


def test_staleness_counts_merges_the_site_did_not_see():
    problem, plan = Problem(3), Plan("asynchronous", damping=1.0)
    line, state = Line(sites_of(problem)), first()
    seen = []
    for number, site in enumerate(["1", "0", "1", "2"], 1):
        roster = roster_of(problem, number, tuple(line.waiting))
        state, figures = line.arrive(one_round(state, roster, plan, LINEAR), site)
        seen.append(figures["staleness"])
    assert seen == [0, 1, 1, 3]
    assert state.record.staleness == {"1": 1, "0": 1, "2": 3}
    torch.testing.assert_close(problem.unwhitened(q_of(state)), problem.titsias(), **EXACT)


def test_asynchronous_one_at_a_time_is_sequential():
    problem = Problem(3)
    sites, line = sites_of(problem, "bernoulli"), Line(sites_of(problem, "bernoulli"))
    expected = trained(problem, Plan(damping=1.0), 6, sites)
    state, plan = first(), Plan("asynchronous", damping=1.0, concurrency=1)
    for number in range(1, 7):
        state, figures = line.arrive(one_round(state, roster_of(problem, number), plan, LINEAR), None)
        assert figures["staleness"] == 0
    assert torch.equal(q_of(state).eta1, q_of(expected).eta1)
    assert torch.equal(q_of(state).eta2, q_of(expected).eta2)


def test_a_lost_answer_moves_nothing_and_its_site_is_asked_again():
    problem, plan = Problem(3), Plan("asynchronous")
    line, state = Line(sites_of(problem)), first()
    after, figures = line.arrive(one_round(state, roster_of(problem, 1), plan, LINEAR), "0", lost=True)
    assert (after.version, figures, dict(after.sent)) == (0, {}, {"1": 0, "2": 0})
    question = next(one_round(after, roster_of(problem, 2, ("1", "2")), plan, LINEAR))
    assert set(question.requests) == {"0"}


def test_what_cannot_be_forgotten_is_named():
    """A site without a factor, the only one with a factor, and one without which the posterior is improper."""
    one = trained(Problem(2), Plan(), 1)
    two = PVIState(blocks(b=Gaussian.standard(1)), {"a": contribution_of(4.0), "b": contribution_of(-2.0)})
    cases = (one, "1", r"no factor.*; sites that have one: 0 \(Norge\)"), (one, "0", "has the only factor")
    for state, site, words in (*cases, (two, "a", "improper")):
        with pytest.raises(NumericsError, match=words):
            forget(state, site, {"0": "Norge"})


def collapsed_local_bound(draws, others, data):
    r"""The local free energy maximised over the site's own factor, for a Gaussian likelihood.  [S].

    log ∫ N(y; Aᵀv, σ²I) q_\k(v) dv − Σ (k_xx − aᵀa)/2σ²: Titsias' bound with the cavity in place of the prior.
    """
    cavity, A, noise = draws.product(others), draws.project(data.inputs), draws.noise[:, None]
    middle, spread = cavity.moments()
    covariance = A.mT @ spread @ A + torch.diag_embed(noise.expand(-1, len(data)))
    mean = (A * middle[..., None]).sum(-2)
    missing = (draws.prior_variance(data.inputs) - A.square().sum(-2)) / noise
    return MultivariateNormal(mean, covariance).log_prob(data.targets) - 0.5 * missing.sum(-1)


INDUCING = 8


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sine(rows=60, seed=0):
    x = 3 * torch.randn(rows, 1, generator=generator(seed), dtype=torch.float64)
    return Data(x, x[:, 0].sin() + 0.2 * torch.randn(rows, generator=generator(seed + 1), dtype=torch.float64))


def model(likelihood="gaussian"):
    return SparseModel(ModelSection(likelihood=likelihood, lengthscale=1.5, noise=0.04), 1)


def grid(likelihood="gaussian"):
    hyper = model(likelihood).initial_hyper().numpy()
    return Marginals(LatentFactor(value=torch.linspace(-6, 6, INDUCING).double().numpy()), LatentFactor(value=hyper))


def standard():
    return {"inducing": Gaussian.standard(INDUCING), "hyper": Gaussian.standard(3)}


def narrow(data):
    """Where a first visit may start: q(Z) around rows, q(β) around the initial values."""
    means = (data.inputs[:INDUCING].flatten(), model().initial_hyper())
    return Marginals(*(LatentFactor.of(Gaussian.from_moments(mean, torch.full_like(mean, 0.01))) for mean in means))


def exact(data):
    return PseudoObservations(data.inputs, data.targets, torch.ones(len(data)).double())


def start_near(data, least=3):
    own = updates.averages(data, least)
    return PseudoObservations(own.inputs + 0.2, 0.5 * own.targets, own.root)


@pytest.mark.parametrize("form", ["tied", "free", "cpo"])
def test_every_form_of_factor_reaches_the_collapsed_bound_at_fixed_latents(form):
    """With as many pseudo-points as inducing points the local optimum is the closed form."""
    data, latents, others = sine(), grid(), [exact(sine(20, 5))]
    problem, before = LocalProblem(model(), data, others, {}, num_samples=1), start_near(data)
    if form == "free":
        before = PseudoObservations(before.inputs, before.targets, 3 * before.root, tied=False)
    if form == "cpo":
        before = first_factor(model(), sine(30), latents, "cpo")
    found, draws = adam_update(problem, before, latents, 100, generator()), model().at_means(latents)
    best = collapsed_local_bound(draws, others, data).item()
    assert best - 3.0 < found.free_energy <= best + 1e-9
    assert all(latent.answer() is None for latent in found.latents.values())


def test_the_new_posterior_is_always_more_precise_than_the_cavity():
    data = sine()
    problem, start = LocalProblem(model(), data, [], standard()), narrow(data)
    found = adam_update(problem, start_near(data), start, 30, generator(1))
    for latent in found.latents.values():
        assert bool((latent.answer().natural().gaussian.precision > 0).all())
    before = adam_update(problem, start_near(data), start, 1, generator(1)).free_energy
    assert found.free_energy > before + 5


def test_kl_of_beta_is_taken_from_the_cavity_and_alpha_weighs_that_of_z_alone():
    """The same samples under two cavities of β and two weights: objectives differ by the difference of the KLs."""
    data, prior = sine(), standard()
    start, wide = narrow(data), Gaussian(prior["hyper"].eta1 + 0.1, 0.25 * prior["hyper"].eta2)

    def energy(alpha=0.0, hyper=prior["hyper"]):
        problem = LocalProblem(model(), data, [], prior | {"hyper": hyper}, alpha=alpha)
        return adam_update(problem, exact(data), start, 1, generator(3)).free_energy

    q = start.hyper.natural().gaussian
    expected = float(q.kl(wide) - q.kl(prior["hyper"]))
    assert energy() - energy(hyper=wide) == pytest.approx(expected, rel=1e-8)
    assert abs(expected) > 0.1
    half = 0.5 * float(start.inducing.natural().gaussian.kl(prior["inducing"]))
    assert energy() - energy(alpha=0.5) == pytest.approx(half, rel=1e-9)


def test_an_averaged_z_moves_and_every_other_point_stays():
    """A site that fitted its factor at a β of its own would send it to a posterior at another β."""
    data, latents = sine(), grid()
    for learn in (True, False):
        problem = LocalProblem(model(), data, [], {}, num_samples=1, learn_inducing=learn)
        found = adam_update(problem, start_near(data), latents, 5, generator())
        answer = found.latents["inducing"].answer()
        assert (answer is not None) == learn
        assert found.latents["hyper"].answer() is None
        at = Marginals(answer or latents.inducing, latents.hyper)
        assert learn == (at.inducing.value != latents.inducing.value).any()
        value = local_free_energy(model().at_means(at), [], found.factor, data).item()
        assert value > found.values[0], "at the β that all sites share"


@pytest.mark.parametrize("form", ["tied", "free", "cpo"])
def test_first_factor_of_all_rows_is_exact_at_the_starting_latents(form):
    """With a pseudo-observation per row the local free energy of the first factor is the collapsed bound."""
    data, latents = sine(), grid()
    draws, factor = model().at_means(latents), first_factor(model(), data, latents, form, least=1)
    value = local_free_energy(draws, [], factor, data).item()
    assert value == pytest.approx(collapsed_local_bound(draws, [], data).item(), abs=1e-6)


def test_a_first_factor_of_counts_starts_near_the_optimum():
    """The raw counts would be off by thousands of nats; log(y + ½) is off by less than one per row."""
    x = 6 * torch.rand(60, 1, generator=generator(), dtype=torch.float64) - 3
    data = Data(x, torch.poisson((5 + 0.7 * x[:, 0].sin()).exp(), generator=generator(1)))
    poisson, latents = model("poisson"), grid("poisson")
    starts = {form: first_factor(poisson, data, latents, form, least=1) for form in ("tied", "free", "cpo")}
    problem = LocalProblem(poisson, data, [], {}, num_samples=1)
    best = adam_update(problem, starts["free"], latents, 100, generator()).free_energy
    for start in starts.values():
        value = local_free_energy(poisson.at_means(latents), [], start, data).item()
        assert best - len(data) < value <= best + 1


def test_averaged_counts_weigh_what_their_rows_say_of_the_logarithm():
    """Var log y ≈ 1/E y: a mean of n counts near λ suggests log λ with precision nλ."""
    same = Data(torch.zeros(6, 1).double(), torch.full((6,), 20.0).double())
    factor = first_factor(model("poisson"), same, grid("poisson"), "tied", least=3)
    assert factor.targets.tolist() == pytest.approx([math.log(20.5)] * 2)
    assert factor.root.square().tolist() == pytest.approx([3 * 20.5] * 2)


def test_a_mini_batch_stands_for_all_rows():
    """All rows are equal, so N/|B| times any batch is the sum over all rows: the update is that of all rows."""
    same = Data(torch.full((24, 1), 0.7).double(), torch.full((24,), 1.1).double())
    factor = PseudoObservations(same.inputs[:3] + 0.1, same.targets[:3], torch.ones(3).double())
    problems = [LocalProblem(model(), same, [], {}, num_samples=1, batch_size=size) for size in (0, 8)]
    found = [adam_update(problem, factor, grid(), 4, generator()) for problem in problems]
    assert found[1].values == pytest.approx(found[0].values, rel=1e-10)
    torch.testing.assert_close(found[1].factor.targets, found[0].factor.targets)
    assert abs(found[0].values[0]) > 1.0
