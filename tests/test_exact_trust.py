"""What exact rounds of FedMGP believe at trial moves: honest answers always, inflated ones never."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_exact_q import SHAPES, federate, grid, signals, start

from fedgp_flower.errors import ProtocolError
from fedgp_flower.methods.fedmgp.latents import Move, UnitStatistics
from fedgp_flower.methods.fedmgp.trust import START_NOISE, best_lead, consistent, possible, possible_start
from fedgp_flower.methods.fedmgp.unit import (
    UnitData,
    UnitState,
    moved,
    respond,
    starting_parameters,
    statistics,
)
from strategies.fedmgp_exact import ExactState, advance, agreeing, merge, trial_moves

ROWS = 50
Answers = dict[str, list[UnitStatistics]]


def asked(num_units: int, rounds: int, dims: int = 1) -> tuple[ExactState, tuple[Move, ...], Answers]:
    """A state, its trial moves, and what honest units answer."""
    states, phi, data = federate(signals(dims, num_units=num_units), grid(dims), rounds)
    state, moves = states[-1], trial_moves(states[-1])
    return (
        state,
        moves,
        {s: respond(d, state.latents, state.posterior, moves, phi[s])[1] for s, d in data.items()},
    )


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_honest_answers_are_consistent(num_latents: int, dims: int) -> None:
    """From newcomers to convergence, stretched moves included, and where the noise is at its floor."""
    units, W = signals(dims), grid(dims)
    units[2] = (units[2][0], np.zeros(ROWS) + 1e-9 * units[2][1])
    state = start(W, (1.0, 2.0)[:num_latents])
    data = [UnitData.build(x, y, W) for x, y in units]
    memory: list[UnitState | None] = [None] * len(data)
    for _ in range(5):
        moves, replies = trial_moves(state), {}
        for m, rows in enumerate(data):
            before, name = memory[m], str(m)
            phi = None if before is None else moved(rows, before, state.reports[name].move)[1]
            memory[m], replies[name] = respond(rows, state.latents, state.posterior, moves, phi)
            assert possible(replies[name][0], state.posterior, ROWS)
            assert consistent(replies[name], moves, state.posterior, ROWS)
        state = merge(state, replies, moves=moves)


AT_TRIALS: dict[str, Callable[[int, UnitStatistics], UnitStatistics]] = {
    "one move": lambda c, s: replace(s, evidence=s.evidence + 2.0 * (c == 3)),
    "all moves": lambda c, s: replace(s, evidence=s.evidence + 2 * ROWS * (c > 0)),
    "strong": lambda c, s: replace(s, shift=(1 + (c == 4)) * s.shift),
    "indefinite": lambda c, s: replace(s, precision=-s.precision) if c == 5 else s,
    "less than nothing is explained": lambda c, s: replace(s, slack=s.slack - 1e5 * (c == 0)),
}


@pytest.mark.parametrize("lie", AT_TRIALS)
def test_answers_that_no_rows_give_at_a_trial_are_refused(lie: str) -> None:
    state, moves, replies = asked(3, 6)
    assert all(consistent(told, moves, state.posterior, ROWS) for told in replies.values())
    lied = [AT_TRIALS[lie](c, told) for c, told in enumerate(replies["1"])]
    assert not consistent(lied, moves, state.posterior, ROWS)


def test_few_sites_cannot_steer_the_lengthscales() -> None:
    """Two of seven claim more at every move against the one that honest answers lead to; most must gain."""
    state, moves, replies = asked(7, 25)
    honest = merge(state, replies, moves=moves, quorum=0.5)
    against = [c for c, move in enumerate(moves) if np.any(move.offset > 0)]
    lied = {
        site: tuple(replace(s, slack=s.slack + 20) if c in against and site in "56" else s for c, s in enumerate(told))
        for site, told in replies.items()
    }
    assert honest.latents.scales <= state.latents.scales
    assert merge(state, lied, moves=moves).latents.scales > state.latents.scales
    np.testing.assert_array_equal(merge(state, lied, moves=moves, quorum=0.5).latents.scales, honest.latents.scales)


def starts(dims: int = 1, num_latents: int = 1) -> dict[str, UnitStatistics]:
    """First looks of honest units."""
    W = grid(dims)
    latents = start(W, (1.0, 2.0)[:num_latents]).latents
    found = {}
    for m, (x, y) in enumerate(signals(dims, num_units=5)):
        data = UnitData.build(x, y, W)
        phi = starting_parameters(data, latents)
        assert phi.noise == pytest.approx(START_NOISE * np.mean(y**2))
        found[str(m)] = statistics(data, latents, phi)
    return found


@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_honest_first_looks_are_possible(num_latents: int, dims: int) -> None:
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
def test_a_first_look_outweighs_no_rows_and_ends_no_run(lie: str) -> None:
    """The liar is first in the alphabet, where a score that is not a number would put it in front."""
    told = starts()
    assert not possible_start(HUGE[lie](told["0"]), ROWS)
    assert best_lead({**told, "0": HUGE[lie](told["0"])}) != "0"


def test_who_answers_alone_is_compared_with_those_that_are_absent() -> None:
    """It sees g out of phase, with noise that lets it insist; only the comparison can refuse it."""
    states, _, _ = federate(signals(1, num_units=5), grid(1), 4)
    state, moves, x = states[-1], trial_moves(states[-1]), signals(1, num_units=1)[0][0]
    data = UnitData.build(x, 2 * np.cos(23 * x[:, 0]), grid(1))
    phi = starting_parameters(data, start(grid(1)).latents)
    told = [statistics(data, state.latents, replace(phi, noise=0.1))] * len(moves)
    after, counted = advance(state, {"s": told}, moves, 5, dict.fromkeys("01234s", 10**6))
    assert counted == ("0", "1", "2", "3", "4")
    honest = merge(state, {}, moves=moves, quorum=0.5)
    np.testing.assert_allclose(after.posterior.mean, honest.posterior.mean, rtol=1e-9)


def test_the_first_unit_to_answer_is_kept_in_mind_and_not_believed() -> None:
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
def test_agreement_keeps_the_honest_and_drops_liars(lie: str) -> None:
    state, _, told = asked(7, 4)
    state, rows = replace(state, reports={}), dict.fromkeys(told, ROWS)
    assert agreeing(state, told, rows) == tuple(sorted(told))
    attacked = {site: [LIES[lie](each[0])] if site in {"4", "5"} else each for site, each in told.items()}
    believed = {site: each for site, each in attacked.items() if possible(each[0], state.posterior, ROWS)}
    assert agreeing(state, believed, rows) == ("0", "1", "2", "3", "6")


def test_lead_is_a_site_that_most_others_agree_with() -> None:
    """The units with most rows see another function; the lead is still an honest one, whatever its sign."""
    W = grid(1)
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (90, 1))
    strangers = [(x, g * np.sin(23 * x[:, 0] + 1) + 0.1 * rng.normal(size=90)) for g in (2.0, 3.0)]
    latents = start(W).latents
    starts = {}
    for name, (rows, y) in zip("01234", [*strangers, *signals(1)], strict=True):
        data = UnitData.build(rows, y, W)
        starts[name] = statistics(data, latents, starting_parameters(data, latents))
    assert best_lead(starts) in {"2", "3", "4"}
    negative = {"1": LIES["negated"](starts["1"])}
    with pytest.raises(ProtocolError, match="starting statistics"):
        best_lead(negative)
