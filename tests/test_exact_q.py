"""FedMGP: exact q(g) and natural pseudo-gradients against autograd and dense algebra; what rounds believe; rules."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgp_flower.data.synthetic import convolved_signals
from fedgp_flower.errors import ConfigError, NumericsError, ProtocolError
from fedgp_flower.gp.sums import INPUT_EDGES, input_shape
from fedgp_flower.messages import add
from fedgp_flower.methods.fedmgp import latents as latent_gp
from fedgp_flower.methods.fedmgp import unit as one_unit
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, SHIFT, LatentPosterior, UnitStatistics, posterior
from fedgp_flower.methods.fedmgp.model import fit_pooled, smoothed_covariance
from fedgp_flower.methods.fedmgp.options import NATURAL_STEP, FedMGPOptions
from fedgp_flower.methods.fedmgp.trust import START_NOISE, best_lead, consistent, possible_start
from fedgp_flower.methods.fedmgp.unit import UnitData, UnitParameters, UnitState, maximise, moved, respond, statistics
from fedgp_flower.run.registry import parse_config
from fedgp_flower.shared_messages import Shape
from strategies import fedmgp
from strategies import fedmgp_rules as rules
from strategies.fedmgp_exact import ExactState, advance, agreeing, merge, trial_moves
from strategies.fedmgp_rules import mean, merged
from strategies.fedmgp_shared import first_inducing
from strategies.server.questions import Roster, Summed

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]


def grid(dims):
    axis = np.linspace(-1.1, 1.1, 16 if dims == 1 else 5)
    return np.stack(np.meshgrid(*[axis] * dims, indexing="ij"), -1).reshape(-1, dims)


def signals(dims, seed=0, num_units=3, rows=50):
    """Units that are shifted views of one smooth function, with different gains and signs."""
    rng = np.random.default_rng(seed)
    units = []
    for m in range(num_units):
        x = rng.uniform(-1, 1, (rows, dims))
        f = np.sin(4 * x.sum(1)) + 0.5 * np.cos(7 * x[:, 0])
        units.append((x, (-1) ** m * (0.5 + m) * f + 0.1 * rng.normal(size=rows)))
    return units


def start(inducing, multiples=(1.0,)):
    """Before the first round: lengthscales from the spacing of the pseudo-inputs, q(u) the prior."""
    latents = latent_gp.latents_at(inducing, list(multiples), 1e-8)
    steps = np.full((2, *latents.scales.shape), 0.3)
    return ExactState(latents, LatentPosterior(np.zeros(latents.size), np.eye(latents.size)), None, steps)


def federate(units, inducing, rounds, *, multiples=(1.0,), unsmoothed=0):
    """The whole protocol in one process, in which every answer is consistent; all states, and parameters of units."""
    data = {str(i): UnitData.build(x, y, inducing) for i, (x, y) in enumerate(units)}
    state = start(inducing, multiples)
    first = statistics(data["0"], state.latents, one_unit.starting_parameters(data["0"], state.latents))
    state = replace(state, posterior=posterior(first), unsmoothed=unsmoothed)
    memory = {}
    states = [state]
    for _ in range(rounds):
        moves, replies = trial_moves(state), {}
        for site in sorted(data):
            phi = moved(data[site], memory[site], state.reports[site].move)[1] if site in memory else None
            smooth = not state.unsmoothed
            memory[site], replies[site] = respond(data[site], state.latents, state.posterior, moves, phi, smooth=smooth)
            assert consistent(replies[site], moves, state.posterior, len(data[site].y))
        state = merge(state, replies, moves=moves)
        states.append(state)
    return states, {s: moved(data[s], memory[s], state.reports[s].move)[1] for s in memory}, data


def random_unit(num_latents, dims, seed=0):
    rng = np.random.default_rng(seed)
    W = grid(dims)[:: 2 if dims == 1 else 3]
    latents = latent_gp.LatentFunctions(W, rng.uniform(0.1, 0.5, (num_latents, dims)), rng.uniform(0.5, 2, num_latents))
    factor = 0.3 * rng.normal(size=(latents.size, latents.size))
    q = LatentPosterior(rng.normal(size=latents.size), factor @ factor.T + 0.1 * np.eye(latents.size))
    x, y = signals(dims, seed)[0]
    R = rng.uniform(0.01, 0.3, (num_latents, dims))
    return latents, q, UnitData.build(x, y, W), UnitParameters(R, rng.normal(size=num_latents), 0.05), x


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_unit_step_is_a_maximum_with_q_fixed(num_latents, dims):
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
    open_part = torch.tensor(q.covariance) - torch.eye(latents.size).double()
    variance = amplitude.square().sum() + torch.einsum("jn,jk,kn->n", A, open_part, A)
    squares = (torch.from_numpy(data.y) - torch.from_numpy(q.mean) @ A) ** 2 + variance
    fit = -0.5 * (math.log(2 * math.pi) + log_noise + squares / log_noise.exp()).sum()
    for gradient in torch.autograd.grad(fit, (s, log_noise)):
        assert gradient.abs().max() < 1e-6 * len(data.y)
    assert float(fit.detach()) == pytest.approx(statistics(data, latents, best).expected(q), rel=1e-8)
    assert float(squares.mean().detach()) == pytest.approx(best.noise, rel=1e-8)
    assert statistics(data, latents, best).expected(q) > statistics(data, latents, phi).expected(q)


def test_a_unit_of_few_rows_does_not_explain_all_of_its_noise():
    """One amplitude passes through one row; the noise stays at the share of the power that units start from."""
    latents, q, *_ = random_unit(1, 1)
    known = LatentPosterior(q.mean, 1e-8 * np.eye(latents.size))
    data = UnitData.build(latents.inducing[3:4], np.array([2.0]), latents.inducing)
    best = maximise(data, latents, known, one_unit.starting_parameters(data, latents, smooth=False))
    assert best.noise == pytest.approx(START_NOISE * 2.0**2)


def test_a_unit_whose_targets_are_all_zero_takes_part():
    latents, q, *_ = random_unit(1, 1)
    data = UnitData.build(np.linspace(-1, 1, 12)[:, None], np.zeros(12), latents.inducing)
    still = latent_gp.Move(np.zeros((1, 1)))
    _, [answer] = one_unit.respond(data, latents, q, [still], None)
    assert not answer.shift.any()  # it has amplitude zero and says nothing about g
    assert consistent([answer], [still], q, 12)


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_bound_never_falls_and_is_the_model_s(num_latents, dims):
    """With several functions or inputs the first two rounds have the narrowest R, and four trial moves."""
    units, W = signals(dims), grid(dims)
    units[2] = units[2][0], 1e-9 * units[2][1]  # noise at its floor
    wide = num_latents * dims > 1
    states, phi, data = federate(units, W, 6, multiples=(1.0, 2.0)[:num_latents], unsmoothed=2 * wide)
    bounds = [s.bound for s in states[1:]]
    assert min(np.diff(bounds)) >= -1e-7
    assert bounds[-1] > bounds[0] + 1
    assert [len(trial_moves(s)) for s in states[:3]] == ([4, 4, 6] if wide else [6] * 3)
    last = states[-1]
    parts = [statistics(data[s], last.latents, phi[s]) for s in sorted(data)]
    assert latent_gp.pooled_bound(add(parts)) == pytest.approx(last.bound, rel=1e-9)
    np.testing.assert_allclose(posterior(add(parts)).mean, last.posterior.mean, rtol=1e-6, atol=1e-7)
    assert max(float(np.max(phi[s].smoothing / data[s].lower)) for s in data) > 10


def test_rounds_reach_the_pooled_optimum():
    """Units of one random function, one half unobserved: 1 nat from L-BFGS in 20 rounds, error near the noise."""
    frame, (test,) = convolved_signals(2)
    missing, parts = frame.iloc[test], frame.drop(index=test).groupby("unit")
    units = [(part[["x"]].to_numpy(copy=True), part["y"].to_numpy(copy=True)) for _, part in parts]
    states, phi, _ = federate(units, np.linspace(-1.1, 1.1, 24)[:, None], 20)
    assert min(np.diff([s.bound for s in states[1:]])) >= -1e-7
    order = [phi[s] for s in sorted(phi)]
    assert states[-1].bound > fit_pooled(units, states[-1].latents, order)[-1] - 1
    mean, variance = one_unit.predict(missing[["x"]].to_numpy(), states[-1].latents, states[-1].posterior, phi["0"])
    error = np.abs(mean - missing["y"].to_numpy())
    assert np.mean(error**2) < 0.02
    assert (error < 1.96 * np.sqrt(variance + phi["0"].noise)).mean() > 0.85


def test_rotation_keeps_what_is_known_about_g():
    """bᵀu − ½uᵀGu is the same number for the same g under old and new lengthscales; amplitudes likewise."""
    latents, _, data, phi, _ = random_unit(2, 2)
    new = replace(latents, scales=latents.scales * 1.3)
    told = statistics(data, latents, phi)
    turned = told.rotated(latents.whitening(), new.whitening()).rescaled(np.array([2.0, 0.5]))
    u_new = np.random.default_rng(1).normal(size=latents.size)
    g = np.array([[2.0], [0.5]]) * np.einsum("ijk,ik->ij", new.whitening(), u_new.reshape(2, -1))
    u_old = np.linalg.solve(latents.whitening(), g[..., None]).ravel()

    def value(s, u):
        return float(s.shift @ u - 0.5 * u @ s.precision @ u)

    assert value(turned, u_new) == pytest.approx(value(told, u_old), rel=1e-6)
    np.testing.assert_allclose(turned.slack, told.slack * [4.0, 0.25])


def test_best_scales_is_a_stationary_maximum():
    rng = np.random.default_rng(3)
    x = np.linspace(-1, 1, 50)[:, None]
    basis = np.hstack([np.sin(4 * x), np.cos(9 * x)])  # two functions, mixed differently by every unit
    mixed = [(x, basis @ rng.normal(size=2) + 0.1 * rng.normal(size=50)) for _ in range(5)]
    states, parameters, units = federate(mixed, grid(1), 6, multiples=(1.0, 2.0))
    parts = [statistics(units[s], states[-1].latents, parameters[s]) for s in sorted(units)]
    total = add(parts).rescaled(np.array([1.5, 0.8]))
    bound, factors = latent_gp.best_scales(total, 2)
    assert bound == pytest.approx(latent_gp.pooled_bound(total.rescaled(factors)), rel=1e-12)
    for i in range(2):
        for step in (-0.1, 0.1):
            other = factors.copy()
            other[i] *= math.exp(step)
            assert latent_gp.pooled_bound(total.rescaled(other)) < bound
    assert bound == pytest.approx(latent_gp.best_scales(total.rescaled(np.array([0.7, 1.2])), 2)[0], abs=1e-6)
    assert bound > latent_gp.pooled_bound(total) + 0.1


def test_moves_keep_what_they_promise():
    """`width`: every output covariance is unchanged. `gain`: v = s (|2R + S| / |S|)^¼ and R are unchanged."""
    latents, _, data, phi, x = random_unit(2, 2)
    state = UnitState(phi, phi, latents.scales)
    offset = np.array([[0.02, 0.0], [0.0, -0.03]])
    scales, wide = moved(data, state, latent_gp.Move(offset, 1.0, "width"))
    rows = torch.from_numpy(x)

    def outputs(S, p):
        R = torch.from_numpy(p.smoothing)
        unit = smoothed_covariance(rows, rows, torch.from_numpy(S), R, R)
        return (torch.from_numpy(p.amplitudes**2)[:, None, None] * unit).sum(0)

    torch.testing.assert_close(outputs(scales, wide), outputs(latents.scales, phi))
    scales, same = moved(data, state, latent_gp.Move(offset, 1.0, "gain"))
    np.testing.assert_allclose(same.smoothing, phi.smoothing)

    def gain(S, p):
        return p.amplitudes * (np.prod(2 * p.smoothing + S, 1) / np.prod(S, 1)) ** 0.25

    np.testing.assert_allclose(gain(scales, same), gain(latents.scales, phi))
    np.testing.assert_allclose(scales, latents.scales * np.exp(offset))


def test_merge_does_not_depend_on_the_order_and_checks_replies():
    units, W = signals(1), grid(1)
    states, phi, data = federate(units, W, 3)
    state = states[-1]
    moves = trial_moves(state)
    replies = {s: respond(data[s], state.latents, state.posterior, moves, phi[s])[1] for s in sorted(data)}
    a, b = merge(state, replies, moves=moves), merge(state, dict(reversed(replies.items())), moves=moves)
    assert a.bound == b.bound
    np.testing.assert_array_equal(a.posterior.mean, b.posterior.mean)
    with pytest.raises(ProtocolError, match="no unit sent usable statistics"):
        merge(state, replies, moves=moves, keep=())
    told = replies["0"][0]
    with pytest.raises(NumericsError, match="agreement"):
        posterior(UnitStatistics(*(-5 * part for part in (told.precision, told.shift, told.evidence, told.slack))))
    only = merge(state, replies, moves=moves, keep=("1",))
    np.testing.assert_allclose(only.bound, max(latent_gp.best_scales(r, 1)[0] for r in replies["1"]))


def placed(x):
    """Pseudo-inputs, nine at most, for the rows of one site."""
    config = parse_config({"method": "fedmgp", "model.num-inducing": 9})
    running = first_inducing(config, Roster({"a": len(x)}, ("a",), (), 0))
    next(running)
    with pytest.raises(StopIteration) as end:
        running.send(Summed(Shape(*input_shape(x), np.zeros(())), ("a",)))
    return end.value.value


def test_pseudo_inputs_cover_the_inputs_and_a_little_more():
    x = np.linspace(-1.73, 1.73, 50)[:, None]
    W = placed(x)
    assert W.shape == (9, 1)
    np.testing.assert_allclose(np.diff(W[:, 0]), np.diff(W[:, 0])[0])
    width = INPUT_EDGES[1] - INPUT_EDGES[0]
    assert -1.73 - 1.5 * width < W[0, 0] < -1.73
    assert 1.73 < W[-1, 0] < 1.73 + 1.5 * width
    two = placed(np.column_stack([x[:, 0], x[::-1, 0] / 2]))
    assert two.shape == (9, 2)
    assert np.ptp(two[:, 0]) > 1.7 * np.ptp(two[:, 1])
    assert placed(np.repeat(x, 4, axis=1)).shape == (9, 4)


ROWS = 50
Answers = dict[str, list[UnitStatistics]]


@cache
def asked(num_units, rounds, dims=1):
    states, phi, data = federate(signals(dims, num_units=num_units), grid(dims), rounds)
    state, moves = states[-1], trial_moves(states[-1])
    return (state, moves, {s: respond(d, state.latents, state.posterior, moves, phi[s])[1] for s, d in data.items()})


AT_TRIALS = {
    "one move": lambda c, s: replace(s, evidence=s.evidence + 2.0 * (c == 3)),
    "all moves": lambda c, s: replace(s, evidence=s.evidence + 2 * ROWS * (c > 0)),
    "strong": lambda c, s: replace(s, shift=(1 + (c == 4)) * s.shift),
    "indefinite": lambda c, s: replace(s, precision=-s.precision) if c == 5 else s,
    "less than nothing is explained": lambda c, s: replace(s, slack=s.slack - 1e5 * (c == 0)),
}


@pytest.mark.parametrize("lie", AT_TRIALS)
def test_answers_that_no_rows_give_at_a_trial_are_refused(lie):
    state, moves, replies = asked(3, 6)
    assert all(consistent(told, moves, state.posterior, ROWS) for told in replies.values())
    lied = [AT_TRIALS[lie](c, told) for c, told in enumerate(replies["1"])]
    assert not consistent(lied, moves, state.posterior, ROWS)


def test_few_sites_cannot_steer_the_lengthscales():
    """Two of seven claim more at every move against the one that honest answers lead to; most must gain."""
    state, moves, replies = asked(7, 4)
    honest = merge(state, replies, moves=moves, quorum=0.5)
    against = [c for c, move in enumerate(moves) if np.any(move.offset > 0)]
    lied = dict(replies)
    for site in "56":
        lied[site] = [replace(s, slack=s.slack + 20 * (c in against)) for c, s in enumerate(replies[site])]
    assert honest.latents.scales <= state.latents.scales
    assert merge(state, lied, moves=moves).latents.scales > state.latents.scales
    np.testing.assert_array_equal(merge(state, lied, moves=moves, quorum=0.5).latents.scales, honest.latents.scales)


@cache
def starts(dims=1, num_latents=1):
    W = grid(dims)
    latents = start(W, (1.0, 2.0)[:num_latents]).latents
    found = {}
    for m, (x, y) in enumerate(signals(dims, num_units=5)):
        data = UnitData.build(x, y, W)
        phi = one_unit.starting_parameters(data, latents)
        assert phi.noise == pytest.approx(START_NOISE * np.mean(y**2))
        found[str(m)] = statistics(data, latents, phi)
    return found


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_honest_first_looks_are_possible(num_latents, dims):
    for told in starts(dims, num_latents).values():
        assert possible_start(told, ROWS)
        assert not possible_start(told, ROWS // 2)


HUGE = {
    "precision": lambda s: replace(s, precision=1e16 * np.ones_like(s.precision)),
    "shift": lambda s: replace(s, shift=s.shift + 1e200),
    "shift where nothing is known": lambda s: replace(s, precision=0 * s.precision, shift=0 * s.shift + 9.0),
    "a hundred times": lambda s: UnitStatistics(100 * s.precision, 100 * s.shift, s.evidence, 100 * s.slack),
    "ten times the shift": lambda s: replace(s, shift=10 * s.shift),
}


@pytest.mark.parametrize("lie", HUGE)
def test_a_first_look_outweighs_no_rows_and_ends_no_run(lie):
    """The liar is first in the alphabet, where a score that is not a number would put it in front."""
    told = starts()
    assert not possible_start(HUGE[lie](told["0"]), ROWS)
    assert best_lead({**told, "0": HUGE[lie](told["0"])}) != "0"


def test_who_answers_alone_is_compared_with_those_that_are_absent():
    """It sees g out of phase, with noise that lets it insist; only the comparison can refuse it."""
    states, _, _ = federate(signals(1, num_units=5), grid(1), 4)
    state, moves, x = states[-1], trial_moves(states[-1]), signals(1, num_units=1)[0][0]
    data = UnitData.build(x, 2 * np.cos(23 * x[:, 0]), grid(1))
    phi = one_unit.starting_parameters(data, start(grid(1)).latents)
    told = [statistics(data, state.latents, replace(phi, noise=0.1))] * len(moves)
    after, counted = advance(state, {"s": told}, moves, 5, dict.fromkeys("01234s", 10**6))
    assert counted == ("0", "1", "2", "3", "4")
    honest = merge(state, {}, moves=moves, quorum=0.5)
    np.testing.assert_allclose(after.posterior.mean, honest.posterior.mean, rtol=1e-9)


def test_the_first_unit_to_answer_is_kept_in_mind_and_not_believed():
    states, _, data = federate(signals(1, num_units=2), grid(1), 0)
    state, moves = states[-1], trial_moves(states[-1])
    replies = {s: respond(d, state.latents, state.posterior, moves, None)[1] for s, d in data.items()}
    rows = dict.fromkeys("01", ROWS)
    first, counted = advance(state, {"0": replies["0"]}, moves, 7, rows)
    assert counted == ()
    assert first.reports["0"].round == 7
    np.testing.assert_array_equal(first.posterior.mean, state.posterior.mean)
    second, counted = advance(first, {"1": replies["1"]}, moves, 8, rows)
    assert counted == ("0", "1")
    assert [second.reports[site].round for site in "01"] == [7, 8]
    _, counted = advance(state, {"0": replies["0"]}, moves, 7, {"0": ROWS})
    assert counted == ("0",)


LIES = {
    "flipped": lambda s: replace(s, shift=-s.shift),
    "flipped and five times stronger": lambda s: replace(s, precision=5 * s.precision, shift=-5 * s.shift),
    "negated": lambda s: UnitStatistics(-5 * s.precision, -5 * s.shift, -5 * s.evidence, -5 * s.slack),
    "a hundred times": lambda s: UnitStatistics(100 * s.precision, 100 * s.shift, 100 * s.evidence, 100 * s.slack),
    "not a number": lambda s: replace(s, shift=s.shift * np.nan),
}


@pytest.mark.parametrize("lie", LIES)
def test_agreement_keeps_the_honest_and_drops_liars(lie):
    state, moves, told = asked(7, 4)
    state, rows = replace(state, reports={}), dict.fromkeys(told, ROWS)
    assert agreeing(state, told, rows) == tuple(sorted(told))
    attacked = {site: [LIES[lie](each[0])] if site in {"4", "5"} else each for site, each in told.items()}
    believed = {site: each for site, each in attacked.items() if consistent(each[:1], moves[:1], state.posterior, ROWS)}
    assert agreeing(state, believed, rows) == ("0", "1", "2", "3", "6")


def test_lead_is_a_site_that_most_others_agree_with():
    """The units with most rows see another function; the lead is still an honest one, whatever its sign."""
    W = grid(1)
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (90, 1))
    strangers = [(x, g * np.sin(23 * x[:, 0] + 1) + 0.1 * rng.normal(size=90)) for g in (2.0, 3.0)]
    latents = start(W).latents
    starts = {}
    for name, (rows, y) in zip("01234", [*strangers, *signals(1)], strict=True):
        data = UnitData.build(rows, y, W)
        starts[name] = statistics(data, latents, one_unit.starting_parameters(data, latents))
    assert best_lead(starts) in {"2", "3", "4"}
    negative = {"1": LIES["negated"](starts["1"])}
    with pytest.raises(ProtocolError, match="starting statistics"):
        best_lead(negative)


MOVED = 1 - (1 - NATURAL_STEP) ** 4


def steps(count, rho, weight=1.0, rows=None):
    """Local steps that leave hyperparameters alone."""
    return one_unit.LocalSteps(count, 0.0, rho, weight, lambda: rows)


def rule(name, **more):
    """Four local steps, merged by a rule."""
    return FedMGPOptions.model_validate({"aggregation": name, "local-steps": 4, **more})


def prior(latents):
    """θ before any unit has answered: q(u_i) = N(0, I)."""
    count, J = len(latents.scales), len(latents.inducing)
    return {SCALES: np.log(latents.scales), PRECISION: np.stack([np.eye(J)] * count), SHIFT: np.zeros((count, J))}


def sent(units, weight):
    zeros = prior(units[0][1])
    ends = [one_unit.natural_steps(zeros, *unit, steps(4, NATURAL_STEP, weight))[0] for unit in units]
    return {str(m): {name: zeros[name] - end[name] for name in zeros} for m, end in enumerate(ends)}


def test_two_functions_know_of_each_other():
    """The best product of two functions has the mean of the joint posterior, and a step leaves it where it is."""
    latents, _, data, phi, _ = random_unit(2, 1)
    J, sums = len(latents.inducing), statistics(data, latents, phi)
    mean, whole = posterior(sums).mean.reshape(2, J), sums.precision.reshape(2, J, 2, J)
    precision = np.stack([np.eye(J) + whole[i, :, i] for i in range(2)])
    best = {SCALES: np.log(latents.scales), PRECISION: precision, SHIFT: np.einsum("iab,ib->ia", precision, mean)}
    after, _ = one_unit.natural_steps(best, data, latents, phi, steps(1, 0.5))
    for name in (PRECISION, SHIFT):
        np.testing.assert_allclose(after[name], best[name], rtol=1e-7, atol=1e-7)


def test_averages_over_units_settle_at_the_pooled_posterior():
    """Still hyperparameters, three units: λ = I + Σ G_m and h = Σ b_m."""
    latents, _, data, phi, _ = random_unit(1, 1)
    J, weights = len(latents.inducing), (0.5, 0.2, 0.3)
    scaled = ((replace(data, y=gain * data.y), gain * phi.amplitudes) for gain in (1.0, -0.5, 2.0))
    units = [(rows, latents, replace(phi, amplitudes=amplitudes)) for rows, amplitudes in scaled]
    theta = prior(latents)
    for _ in range(10):
        ends = [
            one_unit.natural_steps(theta, *unit, steps(5, 0.5, p))[0] for unit, p in zip(units, weights, strict=True)
        ]
        theta = {name: sum(p * end[name] for p, end in zip(weights, ends, strict=True)) for name in theta}
    total = add([statistics(*unit) for unit in units])
    np.testing.assert_allclose(theta[PRECISION][0], np.eye(J) + total.precision, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(theta[SHIFT][0], total.shift, rtol=1e-6, atol=1e-6)


def test_agreement_reads_what_rows_say_and_counts_out_another_process():
    """Δ_m of still hyperparameters is G_m and b_m; with a unit of another g the mean is as if it had no rows."""
    latents, _, data, phi, x = random_unit(1, 1)
    g, J, weight, zeros = np.sin(3 * x[:, 0]), len(latents.inducing), 0.2, prior(latents)
    units = [(replace(data, y=gain * g), latents, phi) for gain in (1.0, 0.9, 1.1, 1.2, -1.0)]
    updates = sent(units, weight)
    parts = [statistics(*unit) for unit in units]
    for part, update in zip(parts, updates.values(), strict=True):
        [said] = rules.statistics_of(zeros, update, MOVED, weight)
        np.testing.assert_allclose(said.precision, part.precision, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(said.shift, part.shift, rtol=1e-7, atol=1e-7)
    merged, counted = rules.merge_natural(rule("agreement"), zeros, updates)
    assert counted == ("0", "1", "2", "3")
    expected = np.eye(J) + MOVED * sum(part.precision for part in parts[:4])
    np.testing.assert_allclose((zeros[PRECISION] - merged[PRECISION])[0], expected, rtol=1e-7, atol=1e-7)
    flipped = {site: {name: -array for name, array in update.items()} for site, update in updates.items()}
    with pytest.raises(NumericsError, match="no unit sent an update that rows can produce"):
        rules.merge_natural(rule("mean"), zeros, flipped)
    spoilt = {**updates, "0": flipped["0"]}  # the same without unit 0, under any rule
    rest = {site: update for site, update in updates.items() if site != "0"}
    for name in ("mean", "median", "agreement"):
        found, counted = rules.merge_natural(rule(name), zeros, spoilt)
        assert "0" not in counted
        wanted, _ = rules.merge_natural(rule(name), zeros, rest)
        np.testing.assert_allclose(found[PRECISION], wanted[PRECISION], rtol=1e-9)


@pytest.mark.parametrize(("name", "select"), [("median", 1), ("trimmed-mean", 1), ("krum", 1), ("krum", 3)])
def test_units_that_say_next_to_nothing_have_no_vote(name, select):
    """Two of six have an amplitude near zero, as pure noise makes it: the rule does without them."""
    latents, _, data, phi, x = random_unit(1, 1)
    draw = np.random.default_rng(0)
    silent = replace(phi, amplitudes=1e-3 * phi.amplitudes)
    noisy = [np.sin(3 * x[:, 0]) + 0.1 * draw.standard_normal(len(x)) for _ in range(4)]
    units = [(replace(data, y=y), latents, phi) for y in noisy]
    units += [(replace(data, y=draw.standard_normal(len(x))), latents, silent) for _ in range(2)]
    zeros, updates = prior(latents), sent(units, 1 / 6)
    found, counted = rules.merge_natural(rule(name, malicious=2, select=select), zeros, updates)
    wanted, _ = rules.merge_natural(rule(name, select=select), zeros, {site: updates[site] for site in "0123"})
    assert counted == ("0", "1", "2", "3")
    for part in wanted:
        np.testing.assert_allclose(found[part], wanted[part], rtol=1e-9, atol=1e-12)


def test_coordinates_of_q_change_no_mean():
    """What a mean makes of updates is the same in them; and in them q(u) is N(0, I)."""
    draw = np.random.default_rng(0)
    factor = np.tril(draw.standard_normal((8, 8))) + 3 * np.eye(8)
    precision, shift = latent_gp.to_natural(LatentPosterior(draw.standard_normal(8), factor @ factor.T), 2)
    theta = {SCALES: np.zeros((2, 1)), PRECISION: precision, SHIFT: shift}
    frame = rules.Frame(np.linalg.cholesky(precision), latent_gp.from_natural(precision, shift)[0])
    whole = frame.whiten({**theta})
    np.testing.assert_allclose(whole[PRECISION], np.stack([np.eye(4)] * 2), atol=1e-12)
    np.testing.assert_allclose(whole[SHIFT], 0, atol=1e-12)
    symmetric = np.diag([-1.0, 0.2, 0.7, 2.0])[None] + np.zeros((2, 4, 4))
    within = rules.within_averages(symmetric, 0.5)
    np.testing.assert_allclose(within, np.minimum(symmetric, 0.5 * np.eye(4)), atol=1e-12)
    other = {name: draw.standard_normal(array.shape) for name, array in theta.items()}
    other[PRECISION] = other[PRECISION] + other[PRECISION].transpose(0, 2, 1)
    again = frame.unwhiten(frame.whiten(other))
    np.testing.assert_allclose(again[SHIFT], other[SHIFT], atol=1e-10)
    np.testing.assert_allclose(again[PRECISION], other[PRECISION], atol=1e-10)


@pytest.mark.parametrize("value", [1e308, -800.0, 800.0])
def test_a_step_out_of_the_numbers_is_refused(value):
    state = fedmgp.begin(
        latent_gp.latents_at(grid(1), [1.0], 1e-8), LatentPosterior(np.zeros(16), np.eye(16)), gaussian=False
    )
    zeros = {name: np.zeros_like(array) for name, array in state.parameters.items()}
    with pytest.raises(NumericsError, match="far too large"):
        fedmgp.step(state, {"a": {**zeros, SCALES: np.full((1, 1), value)}}, rule("mean"))


def test_the_local_rate_falls_to_its_last_share_over_the_rounds():
    config = parse_config({"method": "fedmgp", "optimizer.learning-rate": 0.02, "optimizer.decay": 0.5})
    rates = [fedmgp.learning_rate(config, t, 3) for t in (1, 2, 3)]
    np.testing.assert_allclose(rates, [0.02 * 0.5**t * fedmgp.FINAL_RATE ** (t / 2) for t in range(3)])


VECTORS = np.array([[1.0, 2.0], [3.0, -4.0], [100.0, 6.0]])
USUAL = FedMGPOptions()


def test_the_mean_keeps_names_and_shapes():
    found = merged(mean, USUAL, [{"b": row[1:], "a": row[:1].reshape(1, 1)} for row in VECTORS])
    np.testing.assert_allclose(found["a"], [[104 / 3]])
    np.testing.assert_allclose(found["b"], [4 / 3])


def test_norm_clipping_bounds_every_site():
    rows = np.array([[3.0, 4.0], [0.0, 1.0], [600.0, 800.0]])  # norms 5, 1, 1000: the median is 5
    np.testing.assert_allclose(rules.norm_clipped(rows, USUAL), np.array([6.0, 9.0]) / 3)
    np.testing.assert_allclose(rules.norm_clipped(rows * 0, USUAL), [0.0, 0.0])


def test_median_and_trimmed_mean_by_coordinate():
    np.testing.assert_allclose(rules.median(VECTORS, USUAL), [3.0, 2.0])
    np.testing.assert_allclose(rules.median(np.vstack([VECTORS, [[5.0, 5.0]]]), USUAL), [4.0, 3.5])
    rows = np.arange(10.0)[:, None] ** 2
    np.testing.assert_allclose(rules.trimmed_mean(rows, FedMGPOptions(trim=0.2)), [np.mean([4, 9, 16, 25, 36, 49])])


def test_krum_takes_an_honest_update_or_averages_several():
    rng = np.random.default_rng(0)
    honest = 1.0 + 0.1 * rng.normal(size=(5, 4))
    rows = np.vstack([honest, np.full((2, 4), -50.0) + rng.normal(size=(2, 4))])
    distance = np.square(rows[:, None] - rows[None]).sum(-1)
    scores = np.sort(distance, axis=1)[:, 1 : 7 - 2 - 2 + 1].sum(1)
    for select in (1, 3):
        options = FedMGPOptions(aggregation="krum", malicious=2, select=select)
        np.testing.assert_allclose(rules.krum(rows, options), rows[np.argsort(scores)[:select]].mean(0))
    with pytest.raises(ConfigError, match="2f"):
        rules.krum(VECTORS, options)


@settings(max_examples=30)
@given(st.integers(5, 9), st.integers(0, 10_000))
def test_no_rule_depends_on_the_order_of_sites_and_robust_ones_stay_in_the_honest_range(count, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 3))
    rows[0] *= 1e6
    order = rng.permutation(count)
    for name, rule in rules.RULES.items():
        options = FedMGPOptions(aggregation=name, trim=0.25, malicious=1, select=2)
        update = rule(rows, options)
        np.testing.assert_allclose(update, rule(rows[order], options), rtol=1e-9, err_msg=name)
        if name in {"median", "trimmed-mean", "krum"}:
            assert np.all(update <= rows[1:].max(0)), name
            assert np.all(update >= rows[1:].min(0)), name
