"""PVI at an agreed (Z, β): one visit each is the pooled posterior, by any schedule; forgetting is exact."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from faults import Fault, FaultyGrid, blamed, configured, crashed, csv_nodes, lost, run, waves
from numpy import ndarray

from fedgp_flower.clients.baselines import PRIORS, log_prior
from fedgp_flower.errors import RunError
from fedgp_flower.gp.fitc import weighted_sums
from fedgp_flower.gp.models import LatentGP, SparseGP
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.sgpr.duals import expectations
from fedgp_flower.methods.sgpr.messages import PooledPosterior, TrialSums
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config
from strategies import svgp
from strategies.pvi import one_round
from strategies.pvi_state import PVIState, forget
from strategies.pvi_updates import agreed, exact_factor, natural_gradient, product
from strategies.server.questions import Roster, drive
from strategies.sgpr import EXCHANGES_AFTER, prior_of

NOISE, AMPLITUDE, LENGTH = 0.07, 1.7, 0.9
RNG = np.random.default_rng(0)
Z = RNG.uniform(-2, 2, (6, 2))
X, Y, NEW = RNG.uniform(-2, 2, (42, 2)), RNG.standard_normal(42), RNG.uniform(-2, 2, (9, 2))
VALUES = {
    "inducing.locations": Z,
    "kernel.log_outputscale": np.log([AMPLITUDE]).reshape(()),
    "kernel.log_lengthscale": np.log([[LENGTH, LENGTH]]),
    "likelihood.log_noise": np.log([NOISE]),
}


@dataclass
class Site:
    x: ndarray
    y: ndarray

    def trials(self, request):
        models = [SparseGP.from_arrays(ModelSection(), at.values) for at in request.each]
        rows = torch.from_numpy(self.x), torch.from_numpy(self.y)
        return TrialSums.of([weighted_sums(model, *rows) for model in models])

    def expectations(self, request):
        model = LatentGP.from_arrays(ModelSection(noise=NOISE), request.values)
        rows = torch.from_numpy(self.x), torch.from_numpy(self.y)
        return expectations(model, *rows, request.whitened(), model.factor())


def shards(number):
    cuts = np.array_split(np.random.default_rng(number).permutation(42), number)
    return {str(k): Site(X[own], Y[own]) for k, own in enumerate(cuts)}


def kernel(a, b):
    return AMPLITUDE * np.exp(-0.5 * np.square((a[:, None] - b[None]) / LENGTH).sum(-1))


def pooled(x, y, *, own_noise=True):
    """Of f at NEW: k_*z Σ⁻¹ K_zx Λ⁻¹ y and k_** − k_*z (K_zz⁻¹ − Σ⁻¹) k_z*, Σ = K_zz + K_zx Λ⁻¹ K_xz.

    Λ is diagonal, σ² and what Z leaves of each row (Snelson and Ghahramani 2006), or σ² alone (Titsias 2009).
    """
    jitter = ModelSection().jitter * AMPLITUDE * np.eye(6)
    Kzz, Kzx, Kzs = kernel(Z, Z) + jitter, kernel(Z, x), kernel(Z, NEW)
    left = AMPLITUDE - np.einsum("mn,mn->n", Kzx, np.linalg.solve(Kzz, Kzx))
    spread = NOISE + own_noise * left
    whole = Kzz + Kzx / spread @ Kzx.T
    mean = Kzs.T @ np.linalg.solve(whole, Kzx @ (y / spread))
    variance = AMPLITUDE - np.einsum("mn,mn->n", Kzs, np.linalg.solve(Kzz, Kzs) - np.linalg.solve(whole, Kzs))
    return mean, variance


def predicted(state):
    model = SparseGP.from_arrays(ModelSection(), VALUES)
    with torch.no_grad():
        mean, variance = model.predict(torch.from_numpy(NEW), product(state).whitened())
    return mean.numpy(), variance.numpy() - NOISE


def visited(sites, plan, rounds, asked=None):
    state = agreed(PVIState(), VALUES)
    for number in range(1, rounds + 1):
        roster = Roster({k: len(own.y) for k, own in sites.items()}, tuple(sites), (), number)
        state, _ = drive(one_round(state, roster, plan, asked or exact_factor(VALUES)), sites)
        state = replace(state, sent={})
    return state


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize("schedule", ["sequential", "synchronous", "asynchronous"])
def test_one_visit_each_is_the_pooled_posterior_whatever_the_partition(number, schedule):
    plan = Plan(schedule, damping=1.0, concurrency=1)
    state = visited(shards(number), plan, 1 if schedule == "synchronous" else number)
    close(predicted(state), pooled(X, Y))


def test_a_site_that_is_forgotten_was_never_there():
    sites = shards(3)
    others = [sites[name] for name in "02"]
    state = forget(visited(sites, Plan(damping=1.0), 3), "1", {})
    close(predicted(state), pooled(np.concatenate([s.x for s in others]), np.concatenate([s.y for s in others])))


def test_damping_halves_the_way_to_the_same_fixed_point():
    """After r visits tₖ is its exact value to the power 1 − ½ʳ."""
    exact, sites = visited(shards(3), Plan("synchronous", damping=1.0), 1), shards(3)
    for rounds in (1, 3, 40):
        state = visited(sites, Plan("synchronous", damping=0.5), rounds)
        for own, whole in zip(state.sites.values(), exact.sites.values(), strict=True):
            found, known = (site.factors["whitened"].gaussian for site in (own, whole))
            share = known ** (1 - 0.5**rounds)
            torch.testing.assert_close((found.eta1, found.eta2), (share.eta1, share.eta2), rtol=1e-10, atol=1e-10)
    close(predicted(state), pooled(X, Y))


def test_with_gaussian_noise_the_natural_gradient_anywhere_is_the_exact_factor():
    """Property 3.2 of Ashman et al. (2022) in a conjugate model: Λ = A/σ², η = b/σ² from any q, Titsias' posterior."""
    root = RNG.standard_normal((6, 6))
    values = {n: a for n, a in VALUES.items() if n != "likelihood.log_noise"}
    latent = LatentGP(ModelSection(noise=NOISE), torch.from_numpy(Z)).to_arrays()
    q = PooledPosterior(latent | values, RNG.standard_normal(6), root @ root.T / 6 + np.eye(6))
    found = visited(shards(3), Plan("synchronous", damping=1.0), 1, natural_gradient(q))
    close(predicted(found), pooled(X, Y, own_noise=False))


KEYS = {"method": "pvi", "model__num_inducing": 12, "num_server_rounds": 12}


def test_the_default_is_the_posterior_of_sgpr_one_exchange_earlier(tmp_path):
    """Also in its errors, which have heavy tails here."""
    frames = {name: waves(60, seed) for seed, name in enumerate("abc")}
    heavy = {name: own.assign(y=own["y"] + 0.3 * RNG.standard_t(2, 60)) for name, own in frames.items()}
    nodes = csv_nodes(tmp_path, heavy)
    end = run(FaultyGrid(configured(**KEYS, pvi__exchanges=9), nodes))
    same = run(FaultyGrid(configured(**KEYS | {"method": "sgpr", "sgpr__exchanges": 8}), nodes))
    exchanges = same.details()["exchanges"] - EXCHANGES_AFTER
    assert (end.round, end.details()["exchanges"]) == (same.round + 3, exchanges)
    assert end.converged(end.current) == same.converged(same.current)
    assert end.details()["visits"] == {"a": 1, "b": 1, "c": 1}
    for name in ("inducing.mean", "inducing.covariance", "likelihood.noise", "errors.mixture"):
        expected = same.outcome.posterior.arrays[name]
        assert end.outcome.posterior.arrays[name] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert end.outcome.metrics["test"]["nll"] == pytest.approx(same.outcome.metrics["test"]["nll"], abs=1e-9)


def test_without_deletion_rows_count_again_at_every_visit():
    """Factors are exact, but no visit is the last one: the run does not end as converged after one of each."""
    keys = {"pvi__exchanges": 3, "pvi__schedule": "synchronous", "pvi__damping": 1.0}
    once, again = (run(FaultyGrid(configured(**KEYS, **keys, pvi__deletion=own), 3)) for own in (True, False))
    assert set(once.details()["visits"].values()) == {1}
    assert again.round == again.config.num_server_rounds
    assert min(again.details()["visits"].values()) > 2
    assert not again.converged(again.current)
    facts, most = again.details(), max(again.details()["visits"].values())
    assert f"rows count again at every visit, up to {most} times" in facts["notes"][0]
    assert once.details()["notes"] == []
    assert facts["forecast_rise"] is facts["latest_gain_per_row"] is None  # the report says that visits had not ended


def test_few_rounds_leave_a_visit_for_everyone():
    end = run(FaultyGrid(configured(**KEYS | {"num_server_rounds": 4}, pvi__exchanges=50), 3))
    assert (end.round, end.details()["visits"]) == (4, {"0": 1, "1": 1, "2": 1})
    assert not end.converged(end.current)  # Z and β had gains to come, as `sgpr` would say
    assert math.isfinite(end.outcome.metrics["test"]["nll"])


def test_a_site_that_is_lost_has_no_factor_and_holds_up_nobody(tmp_path):
    nodes = csv_nodes(tmp_path, {name: waves(30, seed) for seed, name in enumerate("abc")})
    fault = Fault("b", lost, ("query.trials",), range(3, 99))
    end = run(FaultyGrid(configured(**KEYS, pvi__exchanges=7), nodes, fault))
    assert set(blamed(end)) == {"b"}
    assert set(end.details()["visits"]) == {"a", "c"}


def test_a_site_that_the_agreement_refused_is_not_let_in_by_a_visit(tmp_path):
    frames = {name: waves(30, seed) for seed, name in enumerate("abcd")}
    frames["b"] = frames["b"].assign(y=50 * frames["b"]["y"])
    keys = KEYS | {"evaluate_every": 1, "num_server_rounds": 30}  # it answers evaluations, and so is back in between
    end = run(FaultyGrid(configured(**keys, pvi__exchanges=7), csv_nodes(tmp_path, frames)))
    assert set(end.details()["visits"]) == {"a", "c", "d"}
    assert any("times the mean of the other sites" in failure.reason for failure in end.network.failures)
    assert end.round < 30


def test_without_a_factor_there_is_no_result():
    faults = [Fault(site, crashed, ("query.trials",), range(2, 99)) for site in "012"]
    with pytest.raises(RunError, match=r"no site could be visited, so the run has no result\. Latest failures"):
        run(FaultyGrid(configured(**KEYS | {"num_server_rounds": 4}), 3, *faults))
    end = run(FaultyGrid(configured(**KEYS | {"num_server_rounds": 0}), 3))  # nothing was to be learned
    assert math.isfinite(end.outcome.metrics["test"]["nll"])


def test_classes_work_by_default(tmp_path):
    """Every factor is what the pooled bound has there, so that visits leave the agreed posterior in place."""
    frames = {name: waves(50, seed) for seed, name in enumerate("ab")}
    frames = {name: own.assign(y=np.where(own["y"] > 0.1, "yes", "no")) for name, own in frames.items()}
    keys = KEYS | {"model__likelihood": "bernoulli", "num_server_rounds": 15}
    end = run(FaultyGrid(configured(**keys), csv_nodes(tmp_path, frames)))
    assert end.outcome.metrics["test"]["nll"] < 0.35
    pooled, found = svgp.posterior(end.current.svgp), product(end.current)
    assert found.mean == pytest.approx(pooled.mean, abs=0.05)
    assert found.covariance == pytest.approx(pooled.covariance, abs=0.02)


def test_the_pooled_fit_has_the_prior_of_the_method_that_it_judges():
    """Weak priors where sums are agreed on; with local steps LN(0, 1)."""
    model = SparseGP(ModelSection(lengthscale=0.7), torch.from_numpy(Z))
    expected = prior_of(model.to_arrays(), ModelSection())[0]
    chosen = [("fsgp", {}), ("pvi", {}), ("fsgp", {"method": "sgpr"}), ("pvi", {"pvi.local-update": "adam"})]
    options = [parse_config({"method": method, **keys}).options for method, keys in chosen]
    found = [float(PRIORS[own.hyperprior](model).detach()) for own in options]
    assert found == pytest.approx([0.0, expected, expected, float(log_prior(model).detach())], abs=1e-9)
    assert expected < 0
