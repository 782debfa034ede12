"""What exact rounds of FedMGP believe at trial moves: honest answers always, inflated ones never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_exact_q import OPTIONS, SHAPES, federate, grid, signals

from fedgp_flower.latent import Move, Statistics
from fedgp_flower.models.exact_q import SearchOptions, UnitData, UnitState, moved, respond, starting_parameters
from strategies.exact_q import ExactState, merge, start_state, trial_moves
from strategies.exact_trust import consistent, possible

ROWS = 50
Answers = dict[str, tuple[Statistics, ...]]


def asked(num_units: int, rounds: int, dims: int = 1) -> tuple[ExactState, tuple[Move, ...], Answers]:
    """A state, its trial moves, and what honest units answer."""
    states, phi, data = federate(signals(dims, num_units=num_units), grid(dims), rounds)
    state, moves = states[-1], trial_moves(states[-1])
    return (
        state,
        moves,
        {s: respond(d, state.latents, state.posterior, moves, phi[s], OPTIONS)[1] for s, d in data.items()},
    )


@pytest.mark.parametrize("options", [OPTIONS, SearchOptions(convolved=False)])
@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_honest_answers_are_consistent(num_latents: int, dims: int, options: SearchOptions) -> None:
    """From newcomers to convergence, stretched moves included, and where the noise is at its floor."""
    units, W = signals(dims), grid(dims)
    units[2] = (units[2][0], np.zeros(ROWS) + 1e-9 * units[2][1])
    state = start_state(W, (1.0, 2.0)[:num_latents])
    data = [UnitData.build(x, y, W) for x, y in units]
    memory: list[UnitState | None] = [None] * len(data)
    for _ in range(8):
        moves, replies = trial_moves(state), {}
        for m, own in enumerate(data):
            before, name = memory[m], str(m)
            phi = None if before is None else moved(own, before, state.reports[name].move)[1]
            memory[m], replies[name] = respond(own, state.latents, state.posterior, moves, phi, options)
            assert possible(replies[name][0], state.posterior, ROWS)
            assert consistent(replies[name], moves, state.posterior, ROWS)
        state = merge(state, replies, moves=moves)


def test_honest_answers_of_rows_without_noise_are_consistent() -> None:
    W = grid(1)
    state = start_state(W)
    x = np.linspace(-1, 1, ROWS)[:, None]
    data = UnitData.build(x, 1e-3 * np.cos(2 * x[:, 0]), W)
    phi = starting_parameters(data, state.latents, OPTIONS)
    for _ in range(6):
        moves = trial_moves(state)
        memory, told = respond(data, state.latents, state.posterior, moves, phi, OPTIONS)
        assert consistent(told, moves, state.posterior, ROWS)
        state = merge(state, {"a": told}, moves=moves)
        phi = moved(data, memory, state.reports["a"].move)[1]


def one_move(told: tuple[Statistics, ...]) -> list[Statistics]:
    return [replace(s, evidence=s.evidence + 2.0) if c == 3 else s for c, s in enumerate(told)]


def all_moves(told: tuple[Statistics, ...]) -> list[Statistics]:
    return [told[0], *(replace(s, evidence=s.evidence + 2 * ROWS) for s in told[1:])]


def strong(told: tuple[Statistics, ...]) -> list[Statistics]:
    return [replace(s, shift=2 * s.shift) if c == 4 else s for c, s in enumerate(told)]


def indefinite(told: tuple[Statistics, ...]) -> list[Statistics]:
    return [replace(s, precision=-s.precision) if c == 5 else s for c, s in enumerate(told)]


def quiet(told: tuple[Statistics, ...]) -> list[Statistics]:
    """Rows that explain less than nothing: the power that the first answer implies is below the noise's."""
    return [replace(told[0], slack=told[0].slack - 1e5), *told[1:]]


@pytest.mark.parametrize("lie", [one_move, all_moves, strong, indefinite, quiet])
def test_answers_that_no_rows_give_at_a_trial_are_refused(lie: Callable[..., list[Statistics]]) -> None:
    state, moves, replies = asked(3, 6)
    assert all(consistent(told, moves, state.posterior, ROWS) for told in replies.values())
    assert not consistent(lie(replies["1"]), moves, state.posterior, ROWS)


def test_few_sites_cannot_steer_the_lengthscales() -> None:
    """Two of seven claim more at every move against the one that honest answers lead to; most must gain."""
    state, moves, replies = asked(7, 25)
    honest = merge(state, replies, moves=moves, quorum=0.5)
    against = [c for c, move in enumerate(moves) if np.any(move.offset > 0)]
    lied = {
        site: tuple(replace(s, slack=s.slack + 20) if c in against and site in "56" else s for c, s in enumerate(own))
        for site, own in replies.items()
    }
    assert honest.latents.scales <= state.latents.scales
    assert merge(state, lied, moves=moves).latents.scales > state.latents.scales
    np.testing.assert_array_equal(merge(state, lied, moves=moves, quorum=0.5).latents.scales, honest.latents.scales)


def test_a_quorum_of_gains_reaches_the_same_bound() -> None:
    units, W = signals(1, 2, num_units=7), grid(1)
    plain, _, _ = federate(units, W, 20)
    states, _, data = federate(units, W, 0)
    state, memory = states[-1], dict[str, UnitState]()
    bounds = []
    for _ in range(20):
        moves, replies = trial_moves(state), {}
        for site, own in data.items():
            phi = moved(own, memory[site], state.reports[site].move)[1] if site in memory else None
            memory[site], replies[site] = respond(own, state.latents, state.posterior, moves, phi, OPTIONS)
        state = merge(state, replies, moves=moves, quorum=0.5)
        bounds.append(state.bound)
    assert min(np.diff(bounds)) >= -1e-7
    assert state.bound > plain[-1].bound - 1
