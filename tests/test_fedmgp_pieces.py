"""The pure pieces of FedMGP's server: pseudo-gradient steps, late updates, starts, checkpoints, figures; whole rounds
of both algorithms against units that are plain objects."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from faults import TINY
from test_exact_q import grid, signals

from fedgp_flower import client_app
from fedgp_flower.errors import NumericsError, RunError
from fedgp_flower.gp.sums import INPUT_EDGES, input_shape
from fedgp_flower.messages import decode, encode, is_summand
from fedgp_flower.methods.fedmgp.exact_q import pooled_bound, posterior
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior, from_parameters, grid_side
from fedgp_flower.methods.fedmgp.learner import LocalSteps, Memory, fit_alone, local_update
from fedgp_flower.methods.fedmgp.messages import (
    Broadcast,
    FirstStatistics,
    Known,
    PseudoGradient,
    Trials,
    TrialStatistics,
    View,
)
from fedgp_flower.methods.fedmgp.multi_output import load, shared_parameters, to_exact, unit_model
from fedgp_flower.methods.fedmgp.panels import weights_map
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    UnitState,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.methods.messages import Shape
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.run.registry import parse_config
from strategies import fedmgp, fedmgp_exact, fedmgp_then_exact
from strategies.fedmgp import PseudoState
from strategies.fedmgp_exact import ExactRun, start_factor, start_state, trial_moves
from strategies.fedmgp_shared import Plan, Record, latents_at, pseudo_inputs
from strategies.fedmgp_then_exact import TwoPhases
from strategies.multi_output_references import ModularGP
from strategies.server.enrolment import Preparation
from strategies.server.questions import Each, Roster, Total, drive

GRID = np.linspace(-1, 1, 6)[:, None]


def shared(latents: int = 1) -> tuple[Latents, Posterior]:
    rng = np.random.default_rng(latents)
    own = Latents(GRID, rng.uniform(0.1, 0.4, (latents, 1)), np.ones(latents))
    factor = rng.standard_normal((own.size, own.size))
    return own, Posterior(rng.standard_normal(own.size), factor @ factor.T + np.eye(own.size))


def planned(rows: Mapping[str, int] | str, **options: object) -> Plan:
    """A plan with these keys of ``fedmgp.*``; nine pseudo-inputs, ten rounds; rows by unit, or ten of each letter."""
    keys = {f"fedmgp.{name.replace('_', '-')}": value for name, value in options.items()}
    if set(options) & {"aggregation", "server_step", "local_steps"} and options.get("aggregation") != "sum":
        keys["fedmgp.update"] = "pseudo-gradient"
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9, "num-server-rounds": 10, **keys})
    return Plan(config, dict.fromkeys(rows, 10) if isinstance(rows, str) else rows)


def answer(update: Mapping[str, np.ndarray]) -> PseudoGradient:
    return PseudoGradient(update, 0.0, np.array(0.0))


def test_momentum_by_hand() -> None:
    state = fedmgp.begin(*shared(), learn_inducing=True)
    ones = {name: np.ones_like(array) for name, array in state.parameters.items()}
    for _ in range(2):
        state = fedmgp.step(state, ones, size=0.1, momentum=0.5)
    begin = fedmgp.begin(*shared(), learn_inducing=True)
    for name, array in state.parameters.items():  # v: 1, then 1.5
        np.testing.assert_allclose(begin.parameters[name] - array, 0.25)
    assert set(state.parameters) == {
        "inducing",
        "kernel.raw_scales",
        "variational.variational_mean",
        "variational.chol_variational_covar",
    }


def test_one_function_survives_the_change_of_coordinates() -> None:
    latents, q = shared()
    state = fedmgp.begin(latents, q, learn_inducing=False)
    back, posterior = from_parameters(state.parameters, GRID, latents.jitter)
    np.testing.assert_allclose(back.scales, latents.scales)
    np.testing.assert_allclose(posterior.mean, q.mean)
    np.testing.assert_allclose(posterior.covariance, q.covariance)


def test_two_functions_keep_their_conditional_precisions() -> None:
    latents, q = shared(2)
    state = fedmgp.begin(latents, q, learn_inducing=False)
    _, product = from_parameters(state.parameters, GRID, latents.jitter)
    precision = np.linalg.solve(q.covariance, np.eye(12))
    for block in (slice(6), slice(6, 12)):
        own = product.covariance[block, block] @ precision[block, block]
        np.testing.assert_allclose(own, np.eye(6), rtol=1e-7, atol=1e-8)
    assert np.abs(product.covariance[:6, 6:]).max() == 0


def test_late_updates_count_less_and_are_forgotten() -> None:
    state = fedmgp.begin(*shared(), learn_inducing=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    ones = {name: np.ones_like(array) for name, array in state.parameters.items()}
    plan = planned("ab", aggregation="staleness-weighted", patience=2)
    state, _, _ = fedmgp.with_late(state, {"a": answer(ones), "b": answer(zeros)}, 1, plan)
    state, joined, late = fedmgp.with_late(state, {"b": answer(zeros)}, 3, plan)
    assert dict(zip(joined, late, strict=True)) == {"a": 2.0, "b": 0.0}
    moved, weights = fedmgp.merge(state, joined, fedmgp.signals_of(plan, [0.5, 0.5], [0.0, 0.0], late), plan)
    assert weights == pytest.approx({"a": 0.25, "b": 0.75})  # 1/3 against 1
    np.testing.assert_allclose(
        state.parameters["kernel.raw_scales"] - moved.parameters["kernel.raw_scales"], np.full((1, 1), 0.25)
    )
    kept = decode(PseudoState, encode(state))
    assert kept.late["a"].round == 1
    assert np.array_equal(kept.late["a"].update["kernel.raw_scales"], ones["kernel.raw_scales"])
    _, joined, _ = fedmgp.with_late(state, {"b": answer(zeros)}, 4, plan)
    assert list(joined) == ["b"]


def answers(x: np.ndarray) -> dict[str, Shape]:
    arrays = input_shape(x)
    return {"a": Shape(arrays["input.histogram"], arrays["input.products"], np.zeros(()), {})}


def placed(x: np.ndarray, **options: object) -> np.ndarray:
    """Pseudo-inputs, nine at most, for the rows of one site."""
    return pseudo_inputs(planned({"a": len(x)}, **options), answers(x))


def test_pseudo_inputs_cover_the_inputs_and_a_little_more() -> None:
    x = np.linspace(-1.73, 1.73, 50)[:, None]
    W = placed(x)
    assert W.shape == (9, 1)
    np.testing.assert_allclose(np.diff(W[:, 0]), np.diff(W[:, 0])[0])
    width = INPUT_EDGES[1] - INPUT_EDGES[0]
    assert -1.73 - 1.5 * width < W[0, 0] < -1.73
    assert 1.73 < W[-1, 0] < 1.73 + 1.5 * width
    square = np.column_stack([x[:, 0], x[::-1, 0] / 2])
    two = placed(square)
    assert two.shape == (9, 2)
    assert np.ptp(two[:, 0]) > 1.7 * np.ptp(two[:, 1])
    many = np.repeat(x, 4, axis=1)
    assert placed(many).shape == (9, 4)
    with pytest.raises(RunError, match="scattered"):
        placed(many, pseudo_inputs="grid")
    assert placed(many, pseudo_inputs="scattered").shape == (9, 4)


def test_inputs_beyond_the_bins_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="fedgp"):
        placed(np.linspace(-1, 1, 50)[:, None])
        assert not caplog.records
        placed(np.linspace(-1, 7, 50)[:, None])
    assert "6 standard deviations" in caplog.text


def test_a_grid_has_as_many_points_as_fit() -> None:
    assert [grid_side(64, 3), grid_side(63, 3), grid_side(26, 3), grid_side(50, 10), grid_side(7, 1)] == [4, 3, 2, 1, 7]
    prepared = Preparation(
        {name: np.zeros(10) for name in ("input.mean", "input.scale")}, "", {}, {}, simulated=True, names=()
    )
    with pytest.raises(RunError, match="features"):
        ModularGP().adjusted(prepared)


def test_server_adam_is_torch_s() -> None:
    """Large gradients, so that Flower's τ = 10⁻³ and torch's ε are both nothing."""
    InProcessGrid(client_app.app, TINY, [])  # names the process, which Flower's messages want
    state = fedmgp.begin(*shared(), learn_inducing=True)
    theta = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in state.parameters.items()}
    reference, rng = torch.optim.Adam(theta.values(), lr=0.05, betas=(0.9, 0.99), eps=1e-12), np.random.default_rng(0)
    for _ in range(4):
        update = {name: 1e6 * rng.standard_normal(array.shape) for name, array in state.parameters.items()}
        state = fedmgp.adam(state, update, size=0.05)
        for name, parameter in theta.items():
            parameter.grad = torch.from_numpy(update[name])
        reference.step()
    for name, parameter in theta.items():
        np.testing.assert_allclose(state.parameters[name], parameter.detach().numpy(), atol=1e-6, err_msg=name)
    kept = decode(PseudoState, encode(state))
    assert kept.steps == 4
    for name, array in state.squares.items():
        assert np.array_equal(kept.squares[name], array)


@pytest.mark.parametrize("value", [1e308, -800.0, 800.0])
def test_a_step_out_of_the_numbers_is_refused(value: float) -> None:
    state = fedmgp.begin(*shared(), learn_inducing=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    bad = {**zeros, "kernel.raw_scales": np.full((1, 1), value)}
    plan = planned("a", server_step=2.0)
    with pytest.raises(NumericsError, match="far too much"):
        fedmgp.merge(state, {"a": bad}, fedmgp.signals_of(plan, [1.0], [0.0], [0.0]), plan)


def test_starts_spread_in_both_directions() -> None:
    assert [start_factor(n) for n in range(5)] == [1.0, 2.0, 0.5, 4.0, 0.25]


def test_messages_carry_latents_and_moves() -> None:
    latents, q = shared(2)
    moves = trial_moves(start_state(latents_at(GRID, [1.0, 2.0], 1e-8), q))
    known = Known(1, 3, moves[2])
    back = decode(Trials, encode(Trials(View(latents, q, known), moves)))
    assert np.array_equal(back.view.latents.scales, latents.scales)
    assert np.array_equal(back.view.posterior.covariance, q.covariance)
    assert (back.view.known.start, back.view.known.report, back.view.known.move.hold) == (1, 3, "gain")
    for own, other in zip(moves, back.moves, strict=True):
        assert np.array_equal(own.offset, other.offset)
        assert (own.stretch, own.hold) == (other.stretch, other.hold)
    assert {move.hold for move in moves} == {"gain", "width"}


def test_absent_units_stay_white_in_the_map_of_weights() -> None:
    figure = weights_map([{"a": 1.0, "b": 0.0}, {"a": 1.0}])
    [image, *_] = figure.axes[0].images
    data = np.ma.filled(image.get_array(), np.nan)
    assert np.array_equal(data, [[1, 1], [0, np.nan]], equal_nan=True)


class Unit:
    """A unit that knows no Flower."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y, self.memory, self.round = x, y, None, 0
        self.options = SearchOptions()

    def first(self, latents: Latents) -> FirstStatistics:
        data = UnitData.build(self.x, self.y, latents.inducing)
        return FirstStatistics(statistics(data, latents, starting_parameters(data, latents, self.options)))

    def exact(self, request: Trials) -> TrialStatistics:
        self.round += 1
        view = request.view
        data = UnitData.build(self.x, self.y, view.latents.inducing)
        phi = None if self.memory is None else self.memory.agreed(data, view.known)
        state, own = respond(data, view.latents, view.posterior, request.moves, phi, self.options)
        self.memory = Memory(state, self.round, view.known.report)
        return TrialStatistics.of(own, flat=False, fresh=phi is None)

    def train(self, request: Broadcast) -> PseudoGradient:
        self.round += 1
        latents, q = from_parameters(request.parameters, request.inducing, 1e-8)
        data = UnitData.build(self.x, self.y, latents.inducing)
        phi = self.memory.unit.proposed if self.memory else fit_alone(data, latents, q, self.options)
        model = unit_model(latents, phi)
        load(shared_parameters(model), request.parameters)
        steps = LocalSteps(1, request.learning_rate)
        rows = torch.from_numpy(self.x), torch.from_numpy(self.y)
        update = local_update(model, *rows, steps, weight=1 / request.whole, generator=torch.Generator())
        latents, phi = to_exact(model)
        self.memory = Memory(UnitState(phi, phi, latents.scales), self.round, request.known.report)
        return PseudoGradient(update, 0.0, np.array(0.0), np.array(0.0))

    def statistics(self, view: View) -> object:
        """At the parameters behind the report that counts."""
        data = UnitData.build(self.x, self.y, view.latents.inducing)
        return statistics(data, view.latents, self.memory.agreed(data, view.known))


def units(count: int = 3) -> dict[str, Unit]:
    return {str(index): Unit(*rows) for index, rows in enumerate(signals(1, num_units=count))}


def exact_rounds(rule: str, rounds: int = 6, **options: object) -> tuple[list[ExactRun], dict[str, Unit]]:
    """States after each exact round, and the units."""
    sites, own = units(), {"aggregation": rule, "update": "exact", **options}
    plan = planned(dict.fromkeys(sites, 50))
    keys = {f"fedmgp.{name}": value for name, value in own.items()}
    plan = Plan(parse_config({"method": "fedmgp", "num-server-rounds": rounds, **keys}), plan.rows)
    roster = Roster(plan.rows, tuple(sites), (), 0)
    first = drive(fedmgp_exact.first_state(grid(1), 0, roster, plan), sites)
    runs = [ExactRun((first,), 0, Record((), {}))]
    for number in range(1, rounds + 1):
        here = Roster(plan.rows, tuple(sites), (), number)
        runs.append(drive(fedmgp_exact.one_round(runs[-1], here, plan), sites)[0])
    return runs, sites


@pytest.mark.parametrize("rule", ["mean", "agreement", "sum"])
def test_q_is_the_optimum_of_the_pooled_bound_after_every_round(rule: str) -> None:
    """Of the units' statistics at the parameters that they go on with; the bound never falls."""
    runs, sites = exact_rounds(rule)
    bounds = [run.state.bound for run in runs[1:]]
    assert min(np.diff(bounds)) >= -1e-7
    assert bounds[-1] > bounds[0] + 1
    last = runs[-1]
    parts = [unit.statistics(fedmgp_exact.view(last, site)) for site, unit in sites.items()]
    total = sum(parts[1:], parts[0])
    assert pooled_bound(total) == pytest.approx(last.state.bound, rel=1e-9)
    np.testing.assert_allclose(posterior(total).mean, last.state.posterior.mean, rtol=1e-6, atol=1e-8)
    assert last.record.weights[-1] == dict.fromkeys(sites, 1.0)


def test_rounds_of_the_sum_alone_are_rounds_of_the_individuals() -> None:
    """With all units present; the server then asks nothing but totals, and keeps nothing of one unit."""
    (summed, _), (individual, _) = exact_rounds("sum"), exact_rounds("mean")
    for own, other in zip(summed, individual, strict=True):
        np.testing.assert_allclose(own.state.posterior.mean, other.state.posterior.mean, rtol=1e-7, atol=1e-9)
    assert list(summed[-1].state.reports) == [fedmgp_exact.EVERYONE]
    plan = Plan(parse_config({"method": "fedmgp", "fedmgp.aggregation": "sum"}), dict.fromkeys("012", 50))
    question = next(fedmgp_exact.one_round(summed[-1], Roster(plan.rows, tuple("012"), (), 7), plan))
    assert isinstance(question, Total)
    assert is_summand(question.answer)
    assert question.request.view.known.report == 6


def test_a_kill_at_any_question_repeats_the_round() -> None:
    """A state is not touched by a round that does not end, and survives a checkpoint."""
    runs, sites = exact_rounds("mean", 3)
    plan = Plan(parse_config({"method": "fedmgp"}), dict.fromkeys(sites, 50))
    roster = Roster(plan.rows, tuple(sites), (), 4)
    killed = fedmgp_exact.one_round(runs[-1], roster, plan)
    assert isinstance(next(killed), Each)
    killed.close()
    kept = decode(ExactRun, encode(runs[-1]))
    memories = {site: unit.memory for site, unit in sites.items()}
    one, _ = drive(fedmgp_exact.one_round(runs[-1], roster, plan), sites)
    for site, unit in sites.items():
        unit.memory, unit.round = memories[site], 3
    again, _ = drive(fedmgp_exact.one_round(kept, roster, plan), sites)
    assert again.state.bound == one.state.bound
    assert np.array_equal(again.state.posterior.mean, one.state.posterior.mean)


def test_one_unit_one_step_is_plain_adam_and_exact_rounds_go_on_from_there() -> None:
    """M = 1, E = 1, η = 1: θ moves by Adam's step; the exact rounds at the end start from θ and from φ_m."""
    keys = {"fedmgp.update": "pseudo-gradient", "fedmgp.local-steps": 1, "fedmgp.final-rounds": 1}
    config = parse_config({"method": "fedmgp", "num-server-rounds": 2, "optimizer.learning-rate": 0.02, **keys})
    sites, plan = units(1), Plan(config, {"0": 50})
    latents = latents_at(grid(1), [1.0], 1e-8)
    roster = Roster(plan.rows, ("0",), (), 1)
    q = drive(fedmgp_exact.first_posterior(latents, roster), sites)
    start = TwoPhases(fedmgp.begin(latents, q, learn_inducing=False))
    state, _ = drive(fedmgp_then_exact.one_round(start, roster, plan), sites)
    unit = sites["0"]
    model = unit_model(latents, fit_alone(UnitData.build(unit.x, unit.y, grid(1)), latents, q, unit.options))
    load(shared_parameters(model), start.pseudo.parameters)
    (model.kl() - model.expected_log_likelihood(torch.from_numpy(unit.x), torch.from_numpy(unit.y)).sum()).backward()
    torch.optim.Adam(model.parameters(), lr=0.02).step()
    for name, value in shared_parameters(model).items():
        np.testing.assert_allclose(state.pseudo.parameters[name], value.detach().numpy(), atol=1e-9, err_msg=name)
    assert state.exact is None
    question = next(fedmgp_then_exact.one_round(state, Roster(plan.rows, ("0",), (), 2), plan))
    assert question.answer is TrialStatistics
    assert np.array_equal(question.requests["0"].view.latents.scales, state.pseudo.shared.latents.scales)
    end, figures = drive(fedmgp_then_exact.one_round(state, Roster(plan.rows, ("0",), (), 2), plan), sites)
    assert end.exact is not None
    assert figures["bound"] == end.exact.state.bound
    assert len(end.exact.record.weights) == 2
