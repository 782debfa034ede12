"""SFVI in closed form for labels and counts: against the Gaussian one, finite differences and quadrature; it rises."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import FaultyGrid, Recorder, blamed, configured, csv_nodes, run, waves
from structured_problems import gp_sites, randomised, sparse_gp
from test_sfvi_closed import POINTS, Units

from fedgp_flower.gp.ascent import pack
from fedgp_flower.gp.likelihoods import GaussianNoise
from fedgp_flower.messages import add
from fedgp_flower.methods.closed_form import divergence, flattened, naturals, posterior
from fedgp_flower.methods.expansions import ExpansionRequest
from fedgp_flower.methods.family import GlobalPosterior, initial_global, named, on_the_wire
from fedgp_flower.methods.sfvi import exact_deviation
from fedgp_flower.methods.sfvi.exact_deviation import ExactDeviation
from fedgp_flower.methods.sfvi.pseudo_observed import PseudoObserved
from fedgp_flower.methods.sfvi.shaped import WIDTHS, ShapedGP
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from strategies.server.questions import Roster, drive
from strategies.sfvi_closed import beginning, inducing_factor
from strategies.sfvi_duals import DualNewtonState, bound_at, one_round


class KnownNoise(GaussianNoise):
    """Gaussian noise as a likelihood whose parameter nobody learns."""

    def slopes(self, targets, mean, variance, hyper):
        return super().slopes(targets, mean, variance, self.initial)


def model_of(likelihood: str, jitter: float = 1e-8) -> ShapedGP:
    base = sparse_gp(inputs=POINTS, likelihood=likelihood, jitter=jitter)
    return ShapedGP(base.trend, base.deviation, base.inputs, base.options, (0.0, 0.0, 0.0))


def somewhere(size: int, seed: int = 1) -> GlobalPosterior:
    """A q(Z_G) that is no optimum."""
    start = initial_global(size, scale=0.6, triangular=True)
    return randomised(start, torch.Generator().manual_seed(seed))


def units_of(model: ShapedGP, sizes: tuple[int, ...] = (6, 5)) -> list[PseudoObserved]:
    """Units with labels, or with counts."""
    binary = model.options.likelihood == "bernoulli"
    rows = gp_sites(model, torch.Generator().manual_seed(5), sizes=sizes, binary=binary)
    seen = [own.targets if binary else own.targets.exp().round() for own in rows]
    return [PseudoObserved(model, own.features, y) for own, y in zip(rows, seen, strict=True)]


@pytest.mark.parametrize("large", [False, True], ids=["dense", "low rank"])
def test_with_gaussian_noise_it_is_the_closed_form(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(exact_deviation, "DENSE_ROWS", 5)
    model, q_global = model_of("gaussian"), somewhere(7)
    [rows] = gp_sites(model, torch.Generator().manual_seed(3), sizes=(9,))
    exact = ExactDeviation(model, rows.features, rows.targets)
    noise = float(model.log_noise.detach().exp())
    seen = PseudoObserved(model_of("bernoulli"), rows.features, rows.targets)  # the same θ but for the noise
    seen.likelihood = KnownNoise(noise)
    nothing, _ = seen.mode(q_global)
    for ours, theirs in zip(seen.sums(nothing).parts(), exact.sums(nothing).parts(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    new = torch.linspace(-2.5, 2.5, 6, dtype=torch.float64)[:, None]
    ours, theirs = seen.link(new, q_global), exact.predict(new, q_global)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.variance + noise, theirs.variance, rtol=1e-10, atol=1e-10)
    wanted, found = exact.derivatives(q_global), seen.derivatives(q_global)
    names = [name for name, own in sorted(model.theta().items()) for _ in range(own.numel())]
    kept = [i for i, name in enumerate(names) if name != "log_noise"]
    torch.testing.assert_close(found.slopes, wanted.slopes[kept], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.curvature, wanted.curvature[kept][:, kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_derivatives_are_those_of_the_settled_term(likelihood: str) -> None:
    """The gradient of L_k by θ, with pseudo-observations found anew at each, at a q(Z_G) that is no optimum."""
    model, q_global = model_of(likelihood), somewhere(7)
    [unit] = units_of(model, (6,))

    def term() -> float:
        offset, _ = unit.mode(q_global)
        with torch.no_grad():
            return float(unit.sums(offset).expected(q_global))

    leaves = [own for name, own in sorted(model.theta().items()) if name != WIDTHS]
    found = unit.derivatives(q_global)
    size = len(found.sums.shift)
    rows, columns = torch.tril_indices(size, size)
    second = q_global.factor() @ q_global.factor().mT + torch.outer(q_global.mean, q_global.mean)
    weights = torch.where(rows == columns, 0.5, 1.0) * second[rows, columns]
    slopes = found.slopes @ torch.cat([-weights, q_global.mean, torch.ones(1).double()])
    assert term() == pytest.approx(float(found.sums.expected(q_global)), abs=1e-8)
    generator, h = torch.Generator().manual_seed(2), 1e-3
    direction = torch.randn(len(slopes), generator=generator, dtype=torch.float64)
    start, ends = flattened(tuple(own.detach() for own in leaves)).clone(), []
    for sign in (1, -1):
        torch.nn.utils.vector_to_parameters(start + sign * h * direction, leaves)
        ends.append(term())
    assert float(slopes @ direction) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-4)


def test_naturals_and_divergence() -> None:
    q_global = somewhere(5)
    back, _ = posterior(*naturals(q_global))
    torch.testing.assert_close(back.mean, q_global.mean)
    torch.testing.assert_close(back.factor(), q_global.factor())
    ours = torch.distributions.MultivariateNormal(q_global.mean, scale_tril=q_global.factor())
    prior = torch.distributions.MultivariateNormal(torch.zeros(5).double(), torch.eye(5).double())
    torch.testing.assert_close(divergence(q_global), torch.distributions.kl_divergence(ours, prior))


def rounds(model: ShapedGP, dealt: list[list[PseudoObserved]], count: int) -> list[Any]:
    """States of some rounds with units dealt to sites."""
    sites = {str(k): Units(model, own) for k, own in enumerate(dealt)}
    theta = {f"theta.{name}": own.detach().numpy().copy() for name, own in model.theta().items()}
    start = beginning({**theta, "q.mean": np.zeros(7)}, {}, 1)
    states = [DualNewtonState(**{own.name: getattr(start, own.name) for own in fields(start)})]
    roster = Roster(dict.fromkeys(sites, 1), tuple(sites), (), 1)
    same = ShapedGP(model.trend, model.deviation, model.inputs, model.options, (0.0, 0.0, 0.0))
    for _ in range(count):
        states.append(drive(one_round(states[-1], roster, partial(inducing_factor, same)), sites)[0])
    return states


@pytest.mark.parametrize("likelihood", ["bernoulli", pytest.param("poisson", marks=pytest.mark.long)])
def test_the_bound_rises_to_rest_whatever_the_partition(likelihood: str) -> None:
    ends = []
    for sizes in ((2,), (1, 1)):
        model = model_of(likelihood)
        units, dealt = units_of(model), []
        for size in sizes:
            dealt.append(units[:size])
            units = units[size:]
        states = rounds(model, dealt, 6)
        values = [own.value for own in states[1:]]
        assert all(b >= a for a, b in pairwise(values))
        ends.append(states[-1])
    assert ends[0].value > values[0] + 1
    assert ends[0].rise < 0.5
    assert ends[0].trial == pytest.approx(ends[1].trial, rel=1e-7, abs=1e-7)
    assert ends[0].value == pytest.approx(ends[1].value, rel=1e-9)


def test_a_trial_that_loses_is_taken_back_and_the_next_one_is_nearer() -> None:
    model = model_of("poisson")
    units = units_of(model)
    state = rounds(model, [units], 3)[-1]
    boasting = replace(state, value=state.value + 100.0, promised=1.0)
    roster = Roster({"0": 1}, ("0",), (), 1)
    after = drive(one_round(boasting, roster, partial(inducing_factor, model)), {"0": Units(model, units)})[0]
    assert after.share == state.share / 2
    assert after.value == boasting.value
    assert after.theta.keys() == state.theta.keys()
    assert all(np.array_equal(own, state.theta[name]) for name, own in after.theta.items())
    best = pack(state.theta)
    assert np.abs(after.trial - best).max() < np.abs(state.trial - best).max()


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_the_bound_is_below_the_evidence_and_near_it(likelihood: str) -> None:
    """Two sites of one row each; the evidence by quadrature over the two values of f."""
    model = model_of(likelihood, jitter=1e-10)
    inputs = POINTS[1:3]
    targets = (
        [torch.ones(1).double(), torch.zeros(1).double()]
        if likelihood == "bernoulli"
        else [torch.full((1,), 3.0).double(), torch.ones(1).double()]
    )
    units = [PseudoObserved(model, x[None], y) for x, y in zip(inputs, targets, strict=True)]
    q_global = initial_global(7, scale=1.0, triangular=True)
    for _ in range(12):
        request = ExpansionRequest(on_the_wire({}, named(q_global)))
        total = add([Units(model, [own]).expansion(WithTheta(model, request)) for own in units])
        bound = bound_at(q_global, total)
        q_global, _ = posterior(torch.from_numpy(total.precision), torch.from_numpy(total.shift))
    with torch.no_grad():
        shared, left_over = units[0]._shared(inputs)
        own = torch.cat([units[0]._covariance(x[None], x[None], torch.ones(3).double())[0] for x in inputs])
        assert float(left_over.abs().max()) < 1e-6  # rows are at inducing inputs, so that nothing is left open
        factor = torch.linalg.cholesky(shared.mT @ shared + torch.diag(own))
        nodes, weights = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(80))
        grid = torch.cartesian_prod(nodes, nodes) @ factor.mT
        log_weight = (weights / math.sqrt(2 * math.pi)).log()
        each = model.likelihood.log_density(torch.cat(targets), grid, torch.zeros(0)).sum(-1)
        evidence = float((each + torch.cartesian_prod(log_weight, log_weight).sum(-1)).logsumexp(0))
    assert bound < evidence
    assert bound == pytest.approx(evidence, abs=0.05)


class WithTheta:
    """A request with the θ that a model has."""

    def __init__(self, model: ShapedGP, request: ExpansionRequest) -> None:
        self.values = {f"theta.{n}": own.detach().numpy() for n, own in model.theta().items()} | dict(request.values)


@pytest.fixture
def counts(tmp_path: Path) -> list[dict[str, Any]]:
    """Sites a, b and c with 24 counts each."""
    tables = {site: waves(30, seed).assign(y=lambda own: np.rint(np.exp(own["y"]))) for seed, site in enumerate("abc")}
    return csv_nodes(tmp_path, tables)


def keys(**changes: Any) -> dict[str, Any]:
    """A hierarchical GP of counts in closed form."""
    own = {"method": "sfvi", "sfvi__objective": "closed-form", "model__likelihood": "poisson", "num_server_rounds": 25}
    return configured(**own, **changes)


def test_a_run_converges_resumes_and_predicts_at_a_site(counts: list[dict[str, Any]]) -> None:
    recorder = Recorder()
    unbroken = run(FaultyGrid(keys(), counts), recorder)
    assert not blamed(unbroken)
    assert unbroken.outcome.metrics["converged"]
    assert unbroken.outcome.metrics["test"]["nll"] < 2.5
    resumed = run(FaultyGrid(keys(), counts), Recorder(), recorder.snapshots[3])
    assert resumed.round == unbroken.round
    assert resumed.outcome.metrics["test"] == unbroken.outcome.metrics["test"]


def test_labels_in_a_folder_predict_at_a_site_and_for_a_new_one(tmp_path: Path) -> None:
    own = {"method": "sfvi", "sfvi.objective": "closed-form", "model.likelihood": "bernoulli", "num-server-rounds": 1}
    own |= {
        "dataset": "breast-cancer",
        "features": "mean radius,mean texture",
        "test-fraction": 0.9,
        "model.num-inducing": 6,
    }
    own |= {"output-dir": str(tmp_path), "name": "run"}
    own |= {f"baselines.{name}": False for name in ("local-only", "pooled", "linear")}
    folder = run_in_process(own, 3)
    told = pd.read_csv(folder / "predictions.csv", dtype={"site": str}).query("site == '1'")
    frame = told.filter(like="input.").rename(columns=lambda name: name.removeprefix("input."))
    at_site, new = Predictor.at_site(folder, "1").predict(frame), Predictor.of_run(folder).predict(frame)
    malignant = told["probability"].to_numpy()
    assert at_site["probability of malignant"].to_numpy() == pytest.approx(malignant, rel=1e-9)
    assert new["probability of malignant"].between(0, 1).all()
    assert np.abs(new["probability of malignant"] - malignant).max() > 1e-3
