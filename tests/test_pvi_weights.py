"""PVI over weights: exact where conjugate, global VI at convergence, and networks."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from faults import FaultyGrid, configured, csv_nodes, run
from scipy.optimize import minimize, minimize_scalar
from scipy.special import gammaln, log_expit
from scipy.stats import multivariate_normal

from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.messages import NaturalParameters, Refined, Visit
from fedgp_flower.methods.pvi.model import Data
from fedgp_flower.methods.pvi.options import PRESETS, Plan
from fedgp_flower.methods.pvi.updates import late_mean
from fedgp_flower.methods.pvi_weights import model
from fedgp_flower.methods.pvi_weights.model import optimum
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, GLMOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Described
from strategies.pvi import one_round
from strategies.pvi_state import PVIState, posterior
from strategies.pvi_updates import local_optimum, weights
from strategies.server.questions import Roster, drive

SITES = ("a", "b", "c")
NOISE = 0.3
OPTIMUM = local_optimum(WEIGHTS)


def rows(likelihood, n=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3))
    x[:, 2] = 0.8 * x[:, 1] + 0.6 * x[:, 2]
    f = 0.5 + x @ np.array([1.0, -0.7, 0.4])
    draws = {
        "gaussian": f + NOISE**0.5 * rng.standard_normal(n),
        "bernoulli": (rng.uniform(size=n) < 1 / (1 + np.exp(-f))).astype(float),
        "poisson": rng.poisson(np.exp(0.5 * f)).astype(float),
    }
    return x, draws[likelihood]


def section(likelihood):
    return ModelSection(likelihood=likelihood, noise=NOISE)


class Site:
    def __init__(self, likelihood, x, y, update="optimum"):
        self.site, self.update = model.glm_rows(section(likelihood), x, y), update

    def train(self, request):
        where = self.site, request.posterior.gaussian, request.context[WEIGHTS].gaussian
        done = model.NewtonStep.at(*where) if self.update == "gradient" else optimum(*where)[0]
        return Refined(done.free_energy, 1, weights=NaturalParameters.of(done.factor))


def problem(likelihood, covariance, update="optimum"):
    """Sites of very different rows, the first state, a site with all rows, and who is there."""
    x, y = rows(likelihood)
    parts = np.split(np.argsort(x[:, 0] + y, kind="stable"), [8, 25])
    sites = {name: Site(likelihood, x[own], y[own], update) for name, own in zip(SITES, parts, strict=True)}
    counts = {name: len(own) for name, own in zip(SITES, parts, strict=True)}
    state = PVIState({WEIGHTS: model.prior_of(GLMOptions(covariance=covariance), 3)}, rows=counts)
    return sites, state, Site(likelihood, x, y), Roster(counts, SITES, (), 1)


def driven(sites, state, roster, plan, rounds):
    for number in range(1, rounds + 1):
        state, _ = drive(one_round(state, replace(roster, round=number), plan, OPTIMUM), sites)
    return state


def same(found, wanted, tolerance):
    for name in ("eta1", "eta2"):
        scale = float(getattr(wanted, name).abs().max())
        assert float((getattr(found, name) - getattr(wanted, name)).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("times", [1, 2])
def test_a_gaussian_linear_model_is_exact_and_without_deletion_rows_count_at_every_visit(times):
    """One visit each, or two without deletion, which are as if every row were there twice."""
    sites, state, _, roster = problem("gaussian", "full")
    found = posterior(driven(sites, state, roster, Plan(passes=times, deletion=times == 1), 3 * times))[WEIGHTS]
    x, y = rows("gaussian")
    phi = np.hstack([np.ones((len(x), 1)), x])
    precision = times * phi.T @ phi / NOISE + np.eye(4)
    np.testing.assert_allclose(found.precision, precision, rtol=1e-12)
    np.testing.assert_allclose(found.mean(), np.linalg.solve(precision, times * phi.T @ y / NOISE), rtol=1e-10)


def test_the_noise_of_numbers_is_that_of_the_highest_evidence_of_all_rows(tmp_path):
    x, y = rows("gaussian", 200)
    table = pd.DataFrame(x, columns=list("pqr")).assign(y=y)
    nodes = csv_nodes(tmp_path, dict(zip(SITES, (table[:40], table[40:90], table[90:]), strict=True)))
    end = run(FaultyGrid(configured(method="pvi-glm", test_fraction=0.0, num_server_rounds=6), nodes))
    phi, t = np.hstack([np.ones((200, 1)), (x - x.mean(0)) / x.std(0)]), (y - y.mean()) / y.std()

    def evidence(log_noise):
        return multivariate_normal.logpdf(t, cov=phi @ phi.T + np.exp(log_noise) * np.eye(200))

    best = float(np.exp(minimize_scalar(lambda log_noise: -evidence(log_noise), (-3.0, 0.0)).x))
    prior = model.prior_of(GLMOptions(), 3).gaussian
    assert model.alone(section("gaussian"), phi[:, 1:], t, prior)[1] == pytest.approx(best, rel=1e-5)
    noise = end.current.noise
    assert noise == pytest.approx(best, rel=0.01)  # a flat prior on the intercept, and one width for all slopes
    found, precision = posterior(end.current)[WEIGHTS], phi.T @ phi / noise + np.eye(4)
    np.testing.assert_allclose(found.precision, precision, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found.mean(), np.linalg.solve(precision, phi.T @ t / noise), rtol=1e-6, atol=1e-8)
    assert end.outcome.posterior.model["noise"] == noise


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_optimum_is_that_of_the_bound_by_quadrature(likelihood, covariance):
    """L-BFGS over a mean and a root of the covariance, expectations by 60 nodes, the bound written without η."""
    x, y = rows(likelihood, 25)
    phi = np.hstack([np.ones((len(x), 1)), x])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    density = {
        "bernoulli": lambda f: log_expit((2 * y - 1) * f),
        "poisson": lambda f: y * f - np.exp(f) - gammaln(y + 1),
    }
    below = np.tril_indices(4) if covariance == "full" else np.diag_indices(4)

    def root_of(free):
        root = np.zeros((4, 4))
        root[below] = free
        return root

    def bound(values):
        mean, root = values[:4], root_of(values[4:])
        spread = np.sqrt(((phi @ root) ** 2).sum(1))
        fit = (weights[:, None] * density[likelihood](phi @ mean + spread * nodes[:, None])).sum()
        log_determinant = 2 * np.log(np.abs(np.diag(root))).sum()
        return -(fit - 0.5 * ((root**2).sum() + mean @ mean - 4 - log_determinant))

    start = np.concatenate([np.zeros(4), np.eye(4)[below]])
    best = minimize(bound, start, options={"gtol": 1e-7, "maxiter": 2000})
    prior = problem(likelihood, covariance)[1].prior[WEIGHTS].gaussian
    done, _ = optimum(model.glm_rows(section(likelihood), x, y), prior, prior)
    assert done.free_energy == pytest.approx(-best.fun, abs=1e-6)
    mean, covariance_found = (prior * done.factor).moments()
    np.testing.assert_allclose(mean, best.x[:4], atol=2e-4)
    wanted = root_of(best.x[4:]) @ root_of(best.x[4:]).T
    np.testing.assert_allclose(covariance_found, wanted if covariance == "full" else wanted.diagonal(), atol=2e-4)


@pytest.mark.parametrize(
    ("likelihood", "covariance", "plan", "rounds"),
    [
        ("bernoulli", "full", Plan(), 15),
        ("poisson", "diagonal", Plan(), 36),
        ("bernoulli", "diagonal", Plan("synchronous", damping=0.6), 36),
    ],
)
def test_at_convergence_it_is_global_vi_of_all_rows(likelihood, covariance, plan, rounds):
    sites, state, everything, roster = problem(likelihood, covariance)
    found = driven(sites, state, roster, plan, rounds)
    prior = state.prior[WEIGHTS].gaussian
    same(posterior(found)[WEIGHTS], prior * optimum(everything.site, prior, prior)[0].factor, 1e-6)


def test_special_cases_are_what_their_papers_write():
    sites, state, _, roster = problem("bernoulli", "full")
    prior, total = state.prior[WEIGHTS].gaussian, sum(roster.rows.values())

    def alone(name, context):
        return context * optimum(sites[name].site, context, context)[0].factor

    same_prior, split, running = prior, prior**0.0, prior
    for name in SITES:
        same_prior = same_prior * alone(name, prior) / prior  # ∏ q_k / p^(K−1)
        split = split * alone(name, prior ** (roster.rows[name] / total))  # ∏ q_k
        running = alone(name, running)
    expected = {"bcm-same": same_prior, "bcm-split": split, "vcl": running, "streaming-vb": running}
    for preset, wanted in expected.items():
        rounds = 3 if PRESETS[preset].schedule == "sequential" else 1
        same(posterior(driven(sites, state, roster, PRESETS[preset], rounds))[WEIGHTS], wanted, 1e-9)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_global_vi_takes_the_same_steps_however_rows_are_dealt(covariance):
    sites, state, everything, roster = problem("bernoulli", covariance, "gradient")
    pooled, one = state, Roster({"all": 60}, ("all",), (), 1)
    everything.update = "gradient"
    plan = Plan("synchronous", damping=0.5)
    for number in range(1, 6):
        state = drive(one_round(state, replace(roster, round=number), plan, OPTIMUM), sites)[0]
        pooled = drive(one_round(pooled, replace(one, round=number), plan, OPTIMUM), {"all": everything})[0]
    same(posterior(state)[WEIGHTS], posterior(pooled)[WEIGHTS], 1e-12)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_factor_with_negative_precision_is_refused(covariance):
    sites, state, _, _ = problem("bernoulli", covariance)
    prior = state.prior[WEIGHTS]
    honest = sites["a"].train(Visit({WEIGHTS: prior}, weights(state, prior)))
    assert honest.refusal(Described(8)) is None
    lie = replace(honest, weights=replace(honest.weights, eta2=-honest.weights.eta2))
    assert "precision" in lie.refusal(Described(8))
    torch.testing.assert_close(honest.weights.gaussian.eta1, torch.from_numpy(honest.weights.eta1))


NETWORK = model.WeightSpaceNetwork(2, 4, 3)
SIZE = 4 * 3 + 3 * 5


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_draws_for_each_row_are_those_of_the_weights():
    """Mean and spread of every logit over 40 000 draws of all weights, written out."""
    x = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)
    mean = torch.randn(SIZE, generator=generator()).double()
    variance = torch.rand(SIZE, generator=generator(1)).double()
    q = Gaussian.from_moments(mean, variance)
    theta = mean + variance.sqrt() * torch.randn(40000, SIZE, generator=generator(2), dtype=torch.float64)
    first, second = theta[:, :12].view(-1, 4, 3), theta[:, 12:].view(-1, 3, 5)
    hidden = torch.relu(first @ torch.cat([x, torch.ones(2, 1)], 1).T)
    wanted = second @ torch.cat([hidden, hidden.new_ones(40000, 1, 2)], 1)  # [S, C, N]
    found = torch.stack([NETWORK.logits(x.repeat(20000, 1), q, generator(3))]).view(-1, 2, 3)
    torch.testing.assert_close(found.mean(0), wanted.mean(0).T, atol=0.08, rtol=0)
    torch.testing.assert_close(found.std(0), wanted.std(0).T, atol=0, rtol=0.04)


def test_a_visit_raises_the_bound_and_its_factor_is_proper():
    label, centres = np.arange(90) % 3, np.array([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])
    x = centres[label] + 0.5 * np.random.default_rng(0).standard_normal((90, 2))
    rows, prior = Data(torch.tensor(x), torch.tensor(label.astype(float))), Gaussian.standard(SIZE)
    start = Gaussian.from_moments(NETWORK.initial(generator()), torch.full((SIZE,), 0.05**2).double())
    q, values = model.refined(NETWORK, rows, prior, start, 200, 0.02, generator())
    assert late_mean(values) > values[0] + 50
    assert ((q / prior).precision > 0).all()
    probability, _ = NETWORK.indicators(rows.inputs.numpy(), q, 20, binary=False)
    assert (probability.argmax(1) == rows.targets.numpy()).mean() > 0.95
