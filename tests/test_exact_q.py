"""Exact q(g): the unit's step against autograd, the server's against dense optimisation, rounds that never lose."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.gp.convolved import smoothed_covariance
from fedgp_flower.gp.sums import INPUT_EDGES, input_shape
from fedgp_flower.messages import add
from fedgp_flower.methods.fedmgp.latents import (
    LatentFunctions,
    LatentPosterior,
    Move,
    UnitStatistics,
    best_scales,
    latents_at,
    pooled_bound,
    posterior,
    spacing,
)
from fedgp_flower.methods.fedmgp.model import MultiOutputGP, fit_pooled
from fedgp_flower.methods.fedmgp.unit import (
    UnitData,
    UnitParameters,
    UnitState,
    maximise,
    moved,
    predict,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.run.registry import parse_config
from fedgp_flower.shared_messages import Shape
from strategies.fedmgp_exact import ExactState, merge, trial_moves
from strategies.fedmgp_shared import first_inducing
from strategies.server.questions import Roster

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]


def grid(dims: int) -> np.ndarray:
    axis = np.linspace(-1.1, 1.1, 16 if dims == 1 else 5)
    return np.stack(np.meshgrid(*[axis] * dims, indexing="ij"), -1).reshape(-1, dims)


def signals(dims: int, seed: int = 0, num_units: int = 3, rows: int = 50) -> list[tuple[np.ndarray, np.ndarray]]:
    """Units that are shifted views of one smooth function, with different gains and signs."""
    rng = np.random.default_rng(seed)
    units = []
    for m in range(num_units):
        x = rng.uniform(-1, 1, (rows, dims))
        f = np.sin(4 * x.sum(1)) + 0.5 * np.cos(7 * x[:, 0])
        units.append((x, (-1) ** m * (0.5 + m) * f + 0.1 * rng.normal(size=rows)))
    return units


def start(inducing, multiples=(1.0,)):  # type: ignore[no-untyped-def]
    """Before the first round: lengthscales from the spacing of the pseudo-inputs, q(u) the prior."""
    latents = latents_at(inducing, list(multiples), 1e-8)
    steps = np.full((2, *latents.scales.shape), 0.3)
    return ExactState(latents, LatentPosterior(np.zeros(latents.size), np.eye(latents.size)), None, steps)


def federate(units, inducing, rounds, *, multiples=(1.0,), unsmoothed=0, reach=None):  # type: ignore[no-untyped-def]
    """The whole protocol in one process; returns every state and every unit's parameters."""
    data = {str(i): UnitData.build(x, y, inducing) for i, (x, y) in enumerate(units)}
    state = start(inducing, multiples)
    first = statistics(data["0"], state.latents, starting_parameters(data["0"], state.latents))
    state = replace(state, posterior=posterior(first), unsmoothed=unsmoothed)
    memory: dict[str, UnitState] = {}
    states = [state]
    for r in range(rounds):
        moves, replies = trial_moves(state), {}
        for site in sorted(data) if reach is None else reach(r, sorted(data)):
            phi = moved(data[site], memory[site], state.reports[site].move)[1] if site in memory else None
            smooth = not state.unsmoothed
            memory[site], replies[site] = respond(data[site], state.latents, state.posterior, moves, phi, smooth=smooth)
        state = merge(state, replies, moves=moves)
        states.append(state)
    return states, {s: moved(data[s], memory[s], state.reports[s].move)[1] for s in memory}, data


def random_unit(num_latents: int, dims: int, seed: int = 0):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    W = grid(dims)[:: 2 if dims == 1 else 3]
    latents = LatentFunctions(W, rng.uniform(0.1, 0.5, (num_latents, dims)), rng.uniform(0.5, 2, num_latents))
    factor = 0.3 * rng.normal(size=(latents.size, latents.size))
    q = LatentPosterior(rng.normal(size=latents.size), factor @ factor.T + 0.1 * np.eye(latents.size))
    x, y = signals(dims, seed)[0]
    R = rng.uniform(0.01, 0.3, (num_latents, dims))
    return latents, q, UnitData.build(x, y, W), UnitParameters(R, rng.normal(size=num_latents), 0.05), x


def expected_fit(latents: LatentFunctions, q: LatentPosterior, data: UnitData, phi: UnitParameters) -> float:
    """E_q log p(y | f) from the statistics."""
    return statistics(data, latents, phi).expected(q)


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_statistics_give_the_expected_log_likelihood_of_the_model(num_latents: int, dims: int) -> None:
    """Against the torch model's marginals and the density written out, with a joint q(u)."""
    latents, q, data, phi, x = random_unit(num_latents, dims)
    mean, variance = predict(x, latents, q, phi)
    by_hand = -0.5 * (np.log(2 * math.pi * phi.noise) + ((data.y - mean) ** 2 + variance) / phi.noise).sum()
    assert expected_fit(latents, q, data, phi) == pytest.approx(by_hand, rel=1e-10)
    model = MultiOutputGP.of(latents, q, phi)
    value = float(model.expected_log_likelihood(torch.from_numpy(x), torch.from_numpy(data.y)).sum().detach())
    assert value == pytest.approx(by_hand, rel=1e-8)


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_unit_step_is_a_maximum_with_q_fixed(num_latents: int, dims: int) -> None:
    """Autograd of E_q log p(y | f) vanishes in s and log σ², R is no worse than before, and E‖y − f‖² = Nσ²."""
    latents, q, data, phi, x = random_unit(num_latents, dims)
    best = maximise(data, latents, q, phi)
    s = torch.tensor(best.amplitudes, requires_grad=True)
    log_noise = torch.tensor(math.log(best.noise), dtype=torch.float64, requires_grad=True)
    S, R, W = map(torch.from_numpy, (latents.scales, best.smoothing, latents.inducing))
    L = torch.linalg.cholesky(smoothed_covariance(W, W, S, 0 * S, 0 * S) + 1e-8 * torch.eye(len(W)).double())
    unit = torch.linalg.solve_triangular(L, smoothed_covariance(W, torch.from_numpy(x), S, 0 * S, R), upper=False)
    amplitude = s * torch.from_numpy(latents.amplitudes)
    A = (amplitude[:, None, None] * unit).reshape(latents.size, -1)
    variance = (
        amplitude.square().sum() - A.square().sum(0) + torch.einsum("jn,jk,kn->n", A, torch.tensor(q.covariance), A)
    )
    squares = (torch.from_numpy(data.y) - torch.from_numpy(q.mean) @ A) ** 2 + variance
    fit = -0.5 * (math.log(2 * math.pi) + log_noise + squares / log_noise.exp()).sum()
    for gradient in torch.autograd.grad(fit, (s, log_noise)):
        assert gradient.abs().max() < 1e-6 * len(data.y)
    assert float(fit.detach()) == pytest.approx(expected_fit(latents, q, data, best), rel=1e-8)
    assert float(squares.mean().detach()) == pytest.approx(best.noise, rel=1e-8)
    assert expected_fit(latents, q, data, best) > expected_fit(latents, q, data, phi)


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_bound_never_falls_and_is_the_model_s(num_latents: int, dims: int) -> None:
    """With several functions or inputs the first two rounds have the narrowest R, and four trial moves."""
    units, W = signals(dims), grid(dims)
    wide = num_latents * dims > 1
    states, phi, data = federate(units, W, 6, multiples=(1.0, 2.0)[:num_latents], unsmoothed=2 * wide)
    bounds = [s.bound for s in states[1:]]
    assert min(np.diff(bounds)) >= -1e-7
    assert bounds[-1] > bounds[0] + 1
    assert [len(trial_moves(s)) for s in states[:3]] == ([4, 4, 6] if wide else [6] * 3)
    last = states[-1]
    parts = [statistics(data[s], last.latents, phi[s]) for s in sorted(data)]
    assert pooled_bound(add(parts)) == pytest.approx(last.bound, rel=1e-9)
    np.testing.assert_allclose(posterior(add(parts)).mean, last.posterior.mean, rtol=1e-6, atol=1e-7)
    assert max(float(np.max(phi[s].smoothing / data[s].lower)) for s in data) > 10


def test_rounds_reach_the_pooled_optimum() -> None:
    """Units of one random function, one half unobserved: 1 nat from L-BFGS in 20 rounds, error near the noise."""
    rng = np.random.default_rng(2)
    x = np.linspace(-1.6, 1.6, 321)
    g = np.linalg.cholesky(np.exp(-0.5 * (x[:, None] - x) ** 2 / 0.01) + 1e-9 * np.eye(321)) @ rng.normal(size=321)
    inside = np.abs(x) <= 1
    units = []
    for _ in range(4):
        width = rng.uniform(2, 10)
        weights = np.exp(-0.5 * np.arange(-50, 51) ** 2 / width**2)
        f = rng.uniform(0.5, 3) * np.convolve(g, weights / weights.sum(), mode="same")[inside]
        units.append((x[inside][:, None], f + 0.1 * rng.normal(size=inside.sum())))
    seen = units[0][0][:, 0] <= 0
    missing = (units[0][0][~seen], units[0][1][~seen])
    units = [*units[1:], (units[0][0][seen], units[0][1][seen])]
    W = np.linspace(-1.1, 1.1, 30)[:, None]
    states, phi, _ = federate(units, W, 20)
    assert min(np.diff([s.bound for s in states[1:]])) >= -1e-7
    order = [phi[s] for s in sorted(phi)]
    assert states[-1].bound > fit_pooled(units, states[-1].latents, order)[-1] - 1
    mean, variance = predict(missing[0], states[-1].latents, states[-1].posterior, phi["3"])
    assert np.mean((mean - missing[1]) ** 2) < 0.02
    inside95 = np.abs(mean - missing[1]) < 1.96 * np.sqrt(variance + phi["3"].noise)
    assert inside95.mean() > 0.85


def test_rotation_keeps_what_is_known_about_g() -> None:
    """bᵀu − ½uᵀGu is the same number for the same g under old and new lengthscales; amplitudes likewise."""
    latents, _, data, phi, _ = random_unit(2, 2)
    new = replace(latents, scales=latents.scales * 1.3)
    told = statistics(data, latents, phi)
    turned = told.rotated(latents.whitening(), new.whitening()).rescaled(np.array([2.0, 0.5]))
    rng = np.random.default_rng(1)
    u_new = rng.normal(size=latents.size)
    J = len(latents.inducing)
    pieces = []
    for i, factor in enumerate((2.0, 0.5)):
        g = factor * new.whitening()[i] @ u_new[i * J : (i + 1) * J]
        pieces.append(np.linalg.solve(latents.whitening()[i], g))
    u_old = np.concatenate(pieces)

    def value(s: UnitStatistics, u: np.ndarray) -> float:
        return float(s.shift @ u - 0.5 * u @ s.precision @ u)

    assert value(turned, u_new) == pytest.approx(value(told, u_old), rel=1e-6)
    np.testing.assert_allclose(turned.slack, told.slack * [4.0, 0.25])


def test_best_scales_is_a_stationary_maximum() -> None:
    rng = np.random.default_rng(3)
    x = np.linspace(-1, 1, 50)[:, None]
    basis = np.hstack([np.sin(4 * x), np.cos(9 * x)])  # two functions, mixed differently by every unit
    mixed = [(x, basis @ rng.normal(size=2) + 0.1 * rng.normal(size=50)) for _ in range(5)]
    states, parameters, units = federate(mixed, grid(1), 6, multiples=(1.0, 2.0))
    parts = [statistics(units[s], states[-1].latents, parameters[s]) for s in sorted(units)]
    total = add(parts).rescaled(np.array([1.5, 0.8]))
    bound, factors = best_scales(total, 2)
    assert bound == pytest.approx(pooled_bound(total.rescaled(factors)), rel=1e-12)
    for i in range(2):
        for step in (-0.1, 0.1):
            other = factors.copy()
            other[i] *= math.exp(step)
            assert pooled_bound(total.rescaled(other)) < bound
    assert bound == pytest.approx(best_scales(total.rescaled(np.array([0.7, 1.2])), 2)[0], abs=1e-6)
    assert bound > pooled_bound(total) + 0.1


def test_moves_keep_what_they_promise() -> None:
    """`width`: every output covariance is unchanged. `gain`: v = s (|2R + S| / |S|)^¼ and R are unchanged."""
    latents, _, data, phi, x = random_unit(2, 2)
    state = UnitState(phi, phi, latents.scales)
    offset = np.array([[0.02, 0.0], [0.0, -0.03]])
    scales, wide = moved(data, state, Move(offset, 1.0, "width"))
    rows = torch.from_numpy(x)

    def outputs(S: np.ndarray, p: UnitParameters) -> torch.Tensor:
        R = torch.from_numpy(p.smoothing)
        unit = smoothed_covariance(rows, rows, torch.from_numpy(S), R, R)
        return (torch.from_numpy(p.amplitudes**2)[:, None, None] * unit).sum(0)

    torch.testing.assert_close(outputs(scales, wide), outputs(latents.scales, phi))
    scales, same = moved(data, state, Move(offset, 1.0, "gain"))
    np.testing.assert_allclose(same.smoothing, phi.smoothing)

    def gain(S: np.ndarray, p: UnitParameters) -> np.ndarray:
        return p.amplitudes * (np.prod(2 * p.smoothing + S, 1) / np.prod(S, 1)) ** 0.25

    np.testing.assert_allclose(gain(scales, same), gain(latents.scales, phi))
    np.testing.assert_allclose(scales, latents.scales * np.exp(offset))


def test_stretch_extrapolates_the_unit_s_own_step() -> None:
    latents, _, data, phi, _ = random_unit(1, 1)
    after = UnitParameters(phi.smoothing * 1.1, phi.amplitudes * 3, phi.noise * 0.8)
    still = np.zeros((1, 1))
    _, further = moved(data, UnitState(phi, after, latents.scales), Move(still, 2.0, "gain"))
    np.testing.assert_allclose(further.smoothing, phi.smoothing * 1.21)
    assert further.noise == pytest.approx(phi.noise * 0.64)
    _, plain = moved(data, UnitState(phi, after, latents.scales), Move(still, 1.0, "gain"))
    np.testing.assert_allclose(plain.amplitudes, after.amplitudes)
    assert plain.noise == after.noise


def test_merge_does_not_depend_on_the_order_and_checks_replies() -> None:
    units, W = signals(1), grid(1)
    states, phi, data = federate(units, W, 3)
    state = states[-1]
    moves = trial_moves(state)
    replies = {s: respond(data[s], state.latents, state.posterior, moves, phi[s])[1] for s in sorted(data)}
    a, b = merge(state, replies, moves=moves), merge(state, dict(reversed(replies.items())), moves=moves)
    assert a.bound == b.bound
    np.testing.assert_array_equal(a.posterior.mean, b.posterior.mean)
    with pytest.raises(ProtocolError, match="no unit's statistics"):
        merge(state, replies, moves=moves, keep=())
    told = replies["0"][0]
    with pytest.raises(NumericsError, match="agreement"):
        posterior(UnitStatistics(*(-5 * part for part in (told.precision, told.shift, told.evidence, told.slack))))
    only = merge(state, replies, moves=moves, keep=("1",))
    np.testing.assert_allclose(only.bound, max(best_scales(r, 1)[0] for r in replies["1"]))


def test_trial_moves_take_turns() -> None:
    state = start(grid(2), (1.0, 3.0))
    np.testing.assert_allclose(state.latents.scales, np.outer([1.0, 9.0], spacing(grid(2)) ** 2))
    rounds = [trial_moves(replace(state, round=r)) for r in range(4)]
    assert all(len(moves) == 6 and moves[0].stretch == 1 and not moves[0].offset.any() for moves in rounds)
    touched = [np.argwhere(np.any([move.offset != 0 for move in moves], axis=0)).tolist() for moves in rounds]
    assert sorted(touched) == [[[0, 0]], [[0, 1]], [[1, 0]], [[1, 1]]]


def placed(x: np.ndarray) -> np.ndarray:
    """Pseudo-inputs, nine at most, for the rows of one site."""
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9})
    running = first_inducing(config, Roster({"a": len(x)}, ("a",), (), 0))
    next(running)
    arrays = input_shape(x)
    with pytest.raises(StopIteration) as end:
        running.send({"a": Shape(arrays["input.histogram"], arrays["input.products"], np.zeros(()), {})})
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
