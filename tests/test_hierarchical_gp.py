"""The hierarchical GP as a federation runs it: the same for any partition, resumed, without a site, under masks."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, csv_nodes, lost, run, waves
from structured_problems import gp_sites, shaped_gp
from test_closed_form import dense_bound

from fedgp_flower.messages import add
from fedgp_flower.methods.family import GlobalPosterior, on_the_wire
from fedgp_flower.methods.hierarchical_gp.messages import ExpansionShare
from fedgp_flower.methods.hierarchical_gp.smooth import WIDTHS, SmoothDeviation, inducing_factor
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from strategies.hierarchical_gp import USUAL_SITES, one_round, smooth_start, widened
from strategies.server.questions import Roster, drive

POINTS = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]


def tiny(**changes: Any) -> dict[str, Any]:
    """A hierarchical GP of the sine set, or what the changes make of it."""
    return configured(**{"method": "hierarchical-gp", "num_server_rounds": 30, "model__num_inducing": 4, **changes})


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Sites a, b and c with 16 training rows each."""
    tables = {site: waves(20, seed) for seed, site in enumerate("abc")}
    return csv_nodes(tmp_path_factory.mktemp("three"), tables)


@pytest.fixture(scope="module")
def calm(three: list[dict[str, Any]]) -> tuple[Any, Recorder]:
    """A run of all three, until it converges, and what was recorded of it."""
    recorder = Recorder()
    return run(FaultyGrid(tiny(), three), recorder), recorder


class Units:
    """A site with several units, each with a deviation and a noise of its own; it sends their sum."""

    def __init__(self, model: Any, units: list[SmoothDeviation]) -> None:
        self.model, self.units = model, units

    def expansion(self, request: Any) -> ExpansionShare:
        """As the client does it."""
        self.model.load_theta(request.values)
        q_global = GlobalPosterior.of(request.values)
        return add([unit.derivatives(q_global) for unit in self.units])


def trajectory(sizes: tuple[int, ...], rounds: int, **keys: Any) -> tuple[Any, list[Any], list[SmoothDeviation]]:
    """The model, the states of some rounds, and four units dealt to sites of so many."""
    model = shaped_gp(inputs=POINTS, **keys)
    rows = gp_sites(model, torch.Generator().manual_seed(5), sizes=(9, 12, 7, 10))
    units = [SmoothDeviation(model, own.features, own.targets) for own in rows]
    starts = np.cumsum([0, *sizes])
    sites = {str(k): Units(model, units[a:b]) for k, (a, b) in enumerate(pairwise(starts))}
    states: list[Any] = [smooth_start(on_the_wire(model.theta()), POINTS.numpy(), 7)]
    roster, start = Roster(dict.fromkeys(sites, 1), tuple(sites), (), 1), deepcopy(model)
    for _ in range(rounds):
        states.append(drive(one_round(states[-1], roster, partial(inducing_factor, start)), sites)[0])
    return model, states, units


def test_any_partition_of_units_takes_the_same_steps() -> None:
    _, one, _ = trajectory((4,), 4)
    _, other, _ = trajectory((1, 3), 3)
    for before, after in zip(one, other, strict=False):
        assert after.trial == pytest.approx(before.trial, rel=1e-9, abs=1e-9)
    assert one[-1].value > one[1].value + 1


def test_the_bound_of_a_run_is_that_of_a_dense_gp_at_its_optimum() -> None:
    """Without noise offsets nothing lags behind; L-BFGS of the dense bound from there finds no more."""
    model, states, units = trajectory((2, 2), 12, widths=(0.0, 0.0, 0.0))
    state = states[-1]
    model.load_theta(state.parameters)
    value = dense_bound(model, units, torch.zeros(4, 0))
    assert state.bound == pytest.approx(float(value.detach()), abs=1e-8)
    leaves = [own for _, own in sorted(model.theta().items())]
    slopes = torch.cat([own.flatten() for own in torch.autograd.grad(value, leaves)]).numpy()
    away = np.concatenate([own.detach().numpy().ravel() for own in leaves]) - state.mode
    size = {
        "theta.deviation.log_outputscale": 0.5,
        "theta.log_site_slope": 1.0,
    }  # of e^(κθ): P(sd > its first) = .05
    power = np.concatenate([np.full(own.numel(), size.get(n, 0.0)) for n, own in sorted(model.theta().items())])
    prior = away / state.scale**2 + np.log(20) * power * np.exp(power * away)
    assert slopes == pytest.approx(prior, abs=1e-5)  # of F and of the log prior, which are equal at the optimum
    assert state.rise < 1e-6


def test_widths_rest_where_those_of_em_do() -> None:
    """At (K + n₀) w² = Σ E(w zₖ)² + n₀ w₀²; if sites differ by more, they grow, and F is another one."""
    _, states, _ = trajectory((4,), 1)
    [(name, now)], squares = states[-1].widths.items(), np.array([6.0, 0.4, 1.0])
    first = now + np.array([0.2, -0.1, 0.0])
    variances = 4 + USUAL_SITES - squares - USUAL_SITES * np.exp(2 * (first - now))  # summed over K = 4 sites
    state = replace(states[-1], rise=0.0, first_widths=first, squares=squares, known=4 - variances)
    assert widened(state) is state
    wider = widened(replace(state, squares=2 * squares))
    assert wider.value is None
    assert (wider.widths[name][1:] > now[1:]).all()
    assert wider.widths[name][0] == now[0]  # that of noise stays
    late = replace(state, squares=2 * squares, rise=2.0)
    assert widened(late) is late


def test_a_run_converges_and_says_so(calm: tuple[Any, Recorder]) -> None:
    strategy, recorder = calm
    assert strategy.round < 20
    assert strategy.outcome.metrics["converged"]
    details = strategy.outcome.metrics["method_details"]
    assert details["promised_rise"] < 0.1
    assert set(details["relevance"]) == {"trend", "deviation"}
    values = [row["objective"] for row in recorder.rows]
    assert values[-1] > values[0] + 0.3


def test_a_lost_site_ends_a_step_not_the_run(three: list[dict[str, Any]], calm: tuple[Any, Recorder]) -> None:
    """Without it the total belongs to another bound, so the point is taken; when it is back, once more."""
    strategy = run(FaultyGrid(tiny(), three, Fault("b", lost, ("train.expansion",), range(3, 4))))
    assert "b" in blamed(strategy)
    assert strategy.current.sites == ("a", "b", "c")
    assert strategy.details()["bound"] == pytest.approx(calm[0].details()["bound"], abs=0.3)


def test_a_site_whose_target_is_constant_does_not_break_the_others(tmp_path: Path) -> None:
    tables = {site: waves(20, seed) for seed, site in enumerate("abc")}
    tables["c"] = tables["c"].assign(y=tables["c"]["y"].mean() + 1e-6 * tables["c"]["y"])
    strategy = run(FaultyGrid(tiny(), csv_nodes(tmp_path, tables)))
    assert not blamed(strategy)
    assert strategy.outcome.metrics["converged"]
    assert max(row["nll"] for row in strategy.outcome.metrics["per_site"][:2]) < 1.2
    assert all(math.isfinite(row["nll"]) for row in strategy.outcome.metrics["per_site"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: {**own, "precision": -own["precision"]}, "not positive semi-definite"),
        (lambda own: {**own, "count": own["count"] + 1}, "introduced itself with"),
        (lambda own: {**own, "shift": own["shift"][1:]}, "shape"),
        (lambda own: {**own, "precision": 1e9 * own["precision"]}, "its precision is"),
    ],
    ids=["indefinite", "other rows", "other shape", "huge"],
)
def test_sums_that_no_rows_have_are_refused(change: Any, reason: str, three: list[dict[str, Any]]) -> None:
    strategy = run(FaultyGrid(tiny(num_server_rounds=1), three, Fault("c", arrays(change), ("train.expansion",))))
    assert any(reason in said for said in blamed(strategy)["c"])
    assert strategy.current.sites == ("a", "b")


def dense_prediction(unit: SmoothDeviation, others: list[SmoothDeviation], new: torch.Tensor) -> tuple[Any, Any]:
    """Mean and variance of y at new rows of a unit, from the joint covariance of all rows; noise without offset."""
    model = unit.model
    units = [*others, unit]
    every = torch.cat([*(own.features for own in units), new])
    size = len(every) - len(new)
    shared, left_over = model.shared(every)
    covariance, alike = shared.mT @ shared, torch.ones(3).double()
    start = 0
    for own in units:
        here = [*range(start, start + len(own.features)), *(range(size, len(every)) if own is unit else ())]
        covariance[np.ix_(here, here)] += unit._covariance(every[here], every[here], alike)
        start += len(own.features)
    noise = model.log_noise.exp()
    prior = covariance[:size, :size] + noise * torch.eye(size, dtype=torch.float64)
    gain = torch.linalg.solve(prior, covariance[:size, size:]).mT
    left = covariance[size:, size:] - gain @ covariance[:size, size:]
    targets = torch.cat([own.targets for own in units])
    return gain @ targets, left.diagonal() + left_over[size:] + noise


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "low rank"])
def test_a_site_predicts_as_a_dense_pooled_gp(dense: bool) -> None:
    model, states, units = trajectory((2, 2), 4, widths=(0.0, 0.0, 0.0), jitter=1e-12)
    model.load_theta(states[-1].parameters)
    new = torch.linspace(-2.5, 2.5, 6, dtype=torch.float64)[:, None]
    for unit in units:
        unit.dense = dense
    with torch.no_grad():
        found = units[1].predict(new, GlobalPosterior.of(states[-1].parameters))
        mean, variance = dense_prediction(units[1], [units[0], *units[2:]], new)
    torch.testing.assert_close(found.mean, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.variance, variance, rtol=1e-7, atol=1e-7)


def test_a_prediction_is_the_mixture_over_shapes() -> None:
    """By hand: predictions at each node with its shape in the model itself."""
    model, states, units = trajectory((4,), 2)
    model.load_theta(states[-1].parameters)
    q_global, new = GlobalPosterior.of(states[-1].parameters), torch.tensor([[0.3], [2.4]], dtype=torch.float64)
    found = units[0].predict(new, q_global)
    offsets, shares = units[0].mixture(q_global)
    means, variances = [], []
    plain = shaped_gp(inputs=POINTS, widths=(0.0, 0.0, 0.0))
    for offset in offsets:
        root, size, stretch = model.log_width.detach().exp() * offset
        theta = {name: own.detach().clone() for name, own in model.theta().items() if name != WIDTHS}
        theta["theta.log_noise"] += 2 * root
        theta["theta.deviation.log_outputscale"] += 2 * size
        theta["theta.deviation.log_lengthscale"] += stretch
        plain.load_theta(theta)
        own = SmoothDeviation(plain, units[0].features, units[0].targets).predict(new, q_global)
        means.append(own.mean)
        variances.append(own.variance)
    mean = shares @ torch.stack(means)
    torch.testing.assert_close(found.mean, mean, rtol=1e-9, atol=1e-9)
    spread = shares @ (torch.stack(means) - mean).square()
    torch.testing.assert_close(found.variance, shares @ torch.stack(variances) + spread, rtol=1e-9, atol=1e-9)


def test_a_run_predicts_at_a_site_for_a_new_one_and_as_a_model_of_gpytorch(tmp_path: Path) -> None:
    own = {"partitioner": "blocks", "test_fraction": 0.8, "keep_predictions": True, "num_server_rounds": 3}
    folder = run_in_process(tiny(**own, output_dir=str(tmp_path), name="run"), 3)
    told = pd.read_csv(folder / "predictions.csv", dtype={"site": str}).query("site == '1'")
    frame = told.rename(columns={"input.x": "x"})[["x"]]
    own, new = Predictor.at_site(folder, "1").predict(frame), Predictor.of_run(folder)
    for name in ("mean", "sd"):
        assert own[name].to_numpy() == pytest.approx(told[name].to_numpy(), rel=1e-9)
    assert told["trend"].to_numpy() == pytest.approx(new.predict(frame)["mean"].to_numpy(), rel=1e-9)
    assert (told["trend"] + told["deviation"]).to_numpy() == pytest.approx(told["mean"].to_numpy())
    assert np.abs(own["mean"] - new.predict(frame)["mean"]).max() > 1e-3
    exported = new.distribution(frame, noise=True)
    assert exported.mean.numpy() == pytest.approx(new.predict(frame)["mean"].to_numpy(), rel=1e-8)
    assert exported.stddev.numpy() == pytest.approx(new.predict(frame)["sd"].to_numpy(), rel=1e-6)
