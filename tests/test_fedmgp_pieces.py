"""The pure pieces of FedMGP's server, and whole rounds of exact q(g) against units that are plain objects."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from test_exact_q import grid, signals

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.sums import INPUT_EDGES, input_shape
from fedgp_flower.messages import decode, encode, is_summand
from fedgp_flower.methods.fedmgp.latents import (
    Latents,
    Posterior,
    grid_side,
    pooled_bound,
    posterior,
)
from fedgp_flower.methods.fedmgp.messages import FirstStatistics, Known, PseudoGradient, Trials, TrialStatistics, View
from fedgp_flower.methods.fedmgp.panels import weights_map
from fedgp_flower.methods.fedmgp.unit import (
    Memory,
    SearchOptions,
    UnitData,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.run.registry import parse_config
from fedgp_flower.shared_messages import Shape
from strategies import fedmgp, fedmgp_exact
from strategies.fedmgp import PseudoState
from strategies.fedmgp_exact import ExactPlan, ExactRun, ExactState, start_factor, trial_moves
from strategies.fedmgp_shared import EVERYONE, Record, first_inducing, view
from strategies.server.questions import Each, Roster, Total, drive

GRID = np.linspace(-1, 1, 6)[:, None]


def shared(latents: int = 1) -> tuple[Latents, Posterior]:
    rng = np.random.default_rng(latents)
    own = Latents(GRID, rng.uniform(0.1, 0.4, (latents, 1)), np.ones(latents))
    factor = rng.standard_normal((own.size, own.size))
    return own, Posterior(rng.standard_normal(own.size), factor @ factor.T + np.eye(own.size))


def planned(rule: str = "mean", rows: Mapping[str, int] | None = None) -> ExactPlan:
    """A plan of exact rounds."""
    config = parse_config({"method": "fedmgp-exact", "fedmgp.aggregation": rule})
    return ExactPlan(config, config.options, rows or dict.fromkeys("012", 50))


def answer(update: Mapping[str, np.ndarray]) -> PseudoGradient:
    return PseudoGradient(update, 0.0, np.array(0.0))


@pytest.mark.parametrize("gaussian", [True, False])
def test_two_functions_keep_their_conditional_precisions(gaussian: bool) -> None:
    latents, q = shared(2)
    product = fedmgp.begin(latents, q, gaussian=gaussian).posterior
    precision = np.linalg.solve(q.covariance, np.eye(12))
    for block in (slice(6), slice(6, 12)):
        identity = product.covariance[block, block] @ precision[block, block]
        np.testing.assert_allclose(identity, np.eye(6), rtol=1e-7, atol=1e-8)
    assert np.abs(product.covariance[:6, 6:]).max() == 0
    np.testing.assert_allclose(product.mean, q.mean)


def test_late_updates_count_less_and_are_forgotten() -> None:
    state = fedmgp.begin(*shared(), gaussian=False)
    zeros, ones = ({name: np.full_like(array, to) for name, array in state.parameters.items()} for to in (0.0, 1.0))
    options = parse_config({"method": "fedmgp", "fedmgp.aggregation": "staleness-weighted"}).options
    rule = options.aggregation
    state, _, _ = fedmgp.with_late(state, {"a": answer(ones), "b": answer(zeros)}, 1, rule)
    state, joined, late = fedmgp.with_late(state, {"b": answer(zeros)}, 3, rule)
    assert dict(zip(joined, late, strict=True)) == {"a": 2.0, "b": 0.0}
    after, weights = fedmgp.step(state, joined, fedmgp.signals_of(options, [0.0, 0.0], late), options)
    assert weights == pytest.approx({"a": 0.25, "b": 0.75})  # 1/3 against 1
    moved = state.parameters["kernel.raw_scales"] - after.parameters["kernel.raw_scales"]
    np.testing.assert_allclose(moved, np.full((1, 1), 0.25))
    kept = decode(PseudoState, encode(state))
    assert kept.late["a"].round == 1
    assert np.array_equal(kept.late["a"].update["kernel.raw_scales"], ones["kernel.raw_scales"])
    _, joined, _ = fedmgp.with_late(state, {"b": answer(zeros)}, 2 + fedmgp.PATIENCE, rule)
    assert list(joined) == ["b"]


def answers(x: np.ndarray) -> dict[str, Shape]:
    arrays = input_shape(x)
    return {"a": Shape(arrays["input.histogram"], arrays["input.products"], np.zeros(()), {})}


def placed(x: np.ndarray) -> np.ndarray:
    """Pseudo-inputs, nine at most, for the rows of one site."""
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9})
    running = first_inducing(config, Roster({"a": len(x)}, ("a",), (), 0))
    next(running)
    with pytest.raises(StopIteration) as end:
        running.send(answers(x))
    return end.value.value


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


def test_inputs_beyond_the_bins_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="fedgp"):
        placed(np.linspace(-1, 1, 50)[:, None])
        assert not caplog.records
        placed(np.linspace(-1, 7, 50)[:, None])
    assert "6 standard deviations" in caplog.text


def test_a_grid_has_as_many_points_as_fit() -> None:
    assert [grid_side(64, 3), grid_side(63, 3), grid_side(26, 3), grid_side(50, 10), grid_side(7, 1)] == [4, 3, 2, 1, 7]


@pytest.mark.parametrize("value", [1e308, -800.0, 800.0])
def test_a_step_out_of_the_numbers_is_refused(value: float) -> None:
    state = fedmgp.begin(*shared(), gaussian=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    bad = {**zeros, "kernel.raw_scales": np.full((1, 1), value)}
    options = parse_config({"method": "fedmgp"}).options
    with pytest.raises(NumericsError, match="far too much"):
        fedmgp.step(state, {"a": bad}, fedmgp.signals_of(options, [0.0], [0.0]), options)


def test_starts_spread_in_both_directions() -> None:
    assert [start_factor(n) for n in range(5)] == [1.0, 2.0, 0.5, 4.0, 0.25]


def test_messages_carry_latents_and_moves() -> None:
    latents, q = shared(2)
    steps = np.full((2, 1), 0.3)
    moves = trial_moves(ExactState(latents, q, None, steps, steps))
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

    def statistics(self, view: View) -> object:
        """At the parameters behind the report that counts."""
        data = UnitData.build(self.x, self.y, view.latents.inducing)
        return statistics(data, view.latents, self.memory.agreed(data, view.known))


def units(count: int = 3) -> dict[str, Unit]:
    return {str(index): Unit(*rows) for index, rows in enumerate(signals(1, num_units=count))}


def exact_rounds(rule: str, rounds: int = 6) -> tuple[list[ExactRun], dict[str, Unit]]:
    """States after each exact round, and the units."""
    sites, plan = units(), planned(rule)
    first = drive(fedmgp_exact.first_state(grid(1), 0, Roster(plan.rows, tuple(sites), (), 0), plan), sites)
    runs = [ExactRun((first,), 0, Record())]
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
    parts = [unit.statistics(view(last, site)) for site, unit in sites.items()]
    total = sum(parts[1:], parts[0])
    assert pooled_bound(total) == pytest.approx(last.state.bound, rel=1e-9)
    np.testing.assert_allclose(posterior(total).mean, last.state.posterior.mean, rtol=1e-6, atol=1e-8)
    assert last.record.weights[-1] == dict.fromkeys(sites, 1.0)


def test_rounds_of_the_sum_alone_are_rounds_of_the_individuals() -> None:
    """With all units present; the server then asks nothing but totals, and keeps nothing of one unit."""
    (summed, _), (individual, _) = exact_rounds("sum"), exact_rounds("mean")
    for own, other in zip(summed, individual, strict=True):
        np.testing.assert_allclose(own.state.posterior.mean, other.state.posterior.mean, rtol=1e-7, atol=1e-9)
    assert list(summed[-1].state.reports) == [EVERYONE]
    plan = planned("sum")
    question = next(fedmgp_exact.one_round(summed[-1], Roster(plan.rows, tuple("012"), (), 7), plan))
    assert isinstance(question, Total)
    assert is_summand(question.answer)
    assert question.request.view.known.report == 6


def test_a_kill_at_any_question_repeats_the_round() -> None:
    """A state is not touched by a round that does not end, and survives a checkpoint."""
    runs, sites = exact_rounds("mean", 3)
    plan = planned()
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
