"""The pure pieces of FedMGP's server: pseudo-gradient steps, late updates, starts, records, tracks, figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from faults import TINY, Recorder

from fedgp_flower import client_app
from fedgp_flower.engine import InProcessGrid
from fedgp_flower.errors import NumericsError, RunError
from fedgp_flower.latent import Latents, Posterior, from_parameters, from_wire, moves_from_wire, moves_to_wire, to_wire
from fedgp_flower.registry import parse_config
from fedgp_flower.statistics import INPUT_EDGES, input_shape
from fedgp_flower.unit_figures import weights_map
from strategies import pseudo_gradient
from strategies.aggregators import Signals
from strategies.exact_q import start_state, trial_moves
from strategies.fedmgp_comparison import create_modular
from strategies.fedmgp_record import pseudo_from_record, pseudo_to_record
from strategies.fedmgp_start import grid_side, pseudo_inputs, start_factor
from strategies.meeting import Preparation
from strategies.wire import Answer

GRID = np.linspace(-1, 1, 6)[:, None]


def shared(latents: int = 1) -> tuple[Latents, Posterior]:
    rng = np.random.default_rng(latents)
    own = Latents(GRID, rng.uniform(0.1, 0.4, (latents, 1)), np.ones(latents))
    factor = rng.standard_normal((own.size, own.size))
    return own, Posterior(rng.standard_normal(own.size), factor @ factor.T + np.eye(own.size))


def test_momentum_by_hand() -> None:
    state = pseudo_gradient.start(*shared(), learn_inducing=True)
    ones = {name: np.ones_like(array) for name, array in state.parameters.items()}
    for _ in range(2):
        state = pseudo_gradient.step(state, ones, size=0.1, momentum=0.5)
    begin = pseudo_gradient.start(*shared(), learn_inducing=True)
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
    state = pseudo_gradient.start(latents, q, learn_inducing=False)
    back, posterior = from_parameters(state.parameters, GRID, latents.jitter)
    np.testing.assert_allclose(back.scales, latents.scales)
    np.testing.assert_allclose(posterior.mean, q.mean)
    np.testing.assert_allclose(posterior.covariance, q.covariance)


def test_two_functions_keep_their_conditional_precisions() -> None:
    latents, q = shared(2)
    state = pseudo_gradient.start(latents, q, learn_inducing=False)
    _, product = from_parameters(state.parameters, GRID, latents.jitter)
    precision = np.linalg.solve(q.covariance, np.eye(12))
    for block in (slice(6), slice(6, 12)):
        own = product.covariance[block, block] @ precision[block, block]
        np.testing.assert_allclose(own, np.eye(6), rtol=1e-7, atol=1e-8)
    assert np.abs(product.covariance[:6, 6:]).max() == 0


def test_late_updates_count_less_and_are_forgotten() -> None:
    state = pseudo_gradient.start(*shared(), learn_inducing=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    ones = {name: np.ones_like(array) for name, array in state.parameters.items()}
    state, _, _ = pseudo_gradient.with_late(state, {"a": ones, "b": zeros}, 1, patience=2)
    state, joined, late = pseudo_gradient.with_late(state, {"b": zeros}, 3, patience=2)
    assert late == {"a": 2.0, "b": 0.0}
    signals = Signals(shares=np.array([0.5, 0.5]), staleness=np.array([late[s] for s in joined]), decay=1.0)
    moved, weights = pseudo_gradient.merge(state, joined, "staleness-weighted", signals, size=1.0, momentum=0.0)
    assert weights == pytest.approx({"a": 0.25, "b": 0.75})  # 1/3 against 1
    np.testing.assert_allclose(
        state.parameters["kernel.raw_scales"] - moved.parameters["kernel.raw_scales"], np.full((1, 1), 0.25)
    )
    record = pseudo_from_record(*pseudo_to_record(state))
    assert record.late["a"].round == 1
    assert np.array_equal(record.late["a"].update["kernel.raw_scales"], ones["kernel.raw_scales"])
    _, joined, _ = pseudo_gradient.with_late(state, {"b": zeros}, 4, patience=2)
    assert list(joined) == ["b"]


def answers(x: np.ndarray) -> dict[str, Answer]:
    return {"a": Answer("a", input_shape(x), {"num-examples": float(len(x))}, {})}


def test_pseudo_inputs_cover_the_inputs_and_a_little_more() -> None:
    x = np.linspace(-1.73, 1.73, 50)[:, None]
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9})
    W = pseudo_inputs(config, config.options, answers(x))
    assert W.shape == (9, 1)
    np.testing.assert_allclose(np.diff(W[:, 0]), np.diff(W[:, 0])[0])
    width = INPUT_EDGES[1] - INPUT_EDGES[0]
    assert -1.73 - 1.5 * width < W[0, 0] < -1.73
    assert 1.73 < W[-1, 0] < 1.73 + 1.5 * width
    square = np.column_stack([x[:, 0], x[::-1, 0] / 2])
    two = pseudo_inputs(config, config.options, answers(square))
    assert two.shape == (9, 2)
    assert np.ptp(two[:, 0]) > 1.7 * np.ptp(two[:, 1])
    many = np.repeat(x, 4, axis=1)
    assert pseudo_inputs(config, config.options, answers(many)).shape == (9, 4)
    fixed = parse_config({"method": "fedmgp", "model.num-inducing": 9, "fedmgp.pseudo-inputs": "grid"})
    with pytest.raises(RunError, match="scattered"):
        pseudo_inputs(fixed, fixed.options, answers(many))
    free = parse_config({"method": "fedmgp", "model.num-inducing": 9, "fedmgp.pseudo-inputs": "scattered"})
    assert pseudo_inputs(free, free.options, answers(many)).shape == (9, 4)


def test_inputs_beyond_the_bins_are_said(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9})
    with caplog.at_level("WARNING", logger="fedgp"):
        pseudo_inputs(config, config.options, answers(np.linspace(-1, 1, 50)[:, None]))
        assert not caplog.records
        pseudo_inputs(config, config.options, answers(np.linspace(-1, 7, 50)[:, None]))
    assert "6 standard deviations" in caplog.text


def test_a_grid_has_as_many_points_as_fit() -> None:
    assert [grid_side(64, 3), grid_side(63, 3), grid_side(26, 3), grid_side(50, 10), grid_side(7, 1)] == [4, 3, 2, 1, 7]
    prepared = Preparation(
        {name: np.zeros(10) for name in ("input.mean", "input.scale")}, "", {}, {}, simulated=True, names=()
    )
    strategy = create_modular(parse_config({"method": "modular-gp"}), Recorder())
    with pytest.raises(RunError, match="features"):
        strategy.adjusted(prepared)


def test_server_adam_is_torch_s() -> None:
    """Large gradients, so that Flower's τ = 10⁻³ and torch's ε are both nothing."""
    InProcessGrid(client_app.app, TINY, [])  # names the process, which Flower's messages want
    state = pseudo_gradient.start(*shared(), learn_inducing=True)
    theta = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in state.parameters.items()}
    reference, rng = torch.optim.Adam(theta.values(), lr=0.05, betas=(0.9, 0.99), eps=1e-12), np.random.default_rng(0)
    for _ in range(4):
        update = {name: 1e6 * rng.standard_normal(array.shape) for name, array in state.parameters.items()}
        state = pseudo_gradient.adam(state, update, size=0.05)
        for name, parameter in theta.items():
            parameter.grad = torch.from_numpy(update[name])
        reference.step()
    for name, parameter in theta.items():
        np.testing.assert_allclose(state.parameters[name], parameter.detach().numpy(), atol=1e-6, err_msg=name)
    record = pseudo_from_record(*pseudo_to_record(state))
    assert record.steps == 4
    for name, array in state.squares.items():
        assert np.array_equal(record.squares[name], array)


@pytest.mark.parametrize("value", [1e308, -800.0, 800.0])
def test_a_step_out_of_the_numbers_is_refused(value: float) -> None:
    state = pseudo_gradient.start(*shared(), learn_inducing=False)
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    bad = {**zeros, "kernel.raw_scales": np.full((1, 1), value)}
    signals = Signals(shares=np.array([1.0]))
    with pytest.raises(NumericsError, match="far too much"):
        pseudo_gradient.merge(state, {"a": bad}, "mean", signals, size=2.0, momentum=0.0)


def test_starts_spread_in_both_directions() -> None:
    assert [start_factor(n) for n in range(5)] == [1.0, 2.0, 0.5, 4.0, 0.25]


def test_messages_carry_latents_and_moves() -> None:
    latents, q = shared(2)
    back, posterior = from_wire(to_wire(latents, q), latents.jitter)
    assert np.array_equal(back.scales, latents.scales)
    assert np.array_equal(posterior.covariance, q.covariance)
    moves = trial_moves(start_state(GRID, (1.0, 2.0)))
    for own, other in zip(moves, moves_from_wire(moves_to_wire(moves, "m"), "m"), strict=True):
        assert np.array_equal(own.offset, other.offset)
        assert (own.stretch, own.hold) == (other.stretch, other.hold)
    assert {move.hold for move in moves} == {"gain", "width"}


def test_absent_units_stay_white_in_the_map_of_weights() -> None:
    figure = weights_map([{"a": 1.0, "b": 0.0}, {"a": 1.0}])
    [image, *_] = figure.axes[0].images
    data = np.ma.filled(image.get_array(), np.nan)
    assert np.array_equal(data, [[1, 1], [0, np.nan]], equal_nan=True)
