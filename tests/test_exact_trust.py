"""What exact rounds of FedMGP believe at trial moves: honest answers always, inflated ones never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_exact_q import OPTIONS, SHAPES, federate, grid, random_unit, signals, start

from fedgp_flower.errors import ProtocolError
from fedgp_flower.methods.fedmgp.latents import Move, Statistics, posterior
from fedgp_flower.methods.fedmgp.trust import START_NOISE, agreeing, best_lead, consistent, possible, possible_start
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    UnitState,
    maximise,
    moved,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.run.registry import parse_config
from strategies.fedmgp_exact import (
    Asked,
    ExactPlan,
    ExactState,
    advance,
    best_start,
    bound_of,
    carried,
    merge,
    trial_moves,
)

ROWS = 50
AGREEMENT = parse_config({"method": "fedmgp-exact", "fedmgp.aggregation": "agreement"})
Answers = dict[str, tuple[Statistics, ...]]


def planned(rows: dict[str, int]) -> ExactPlan:
    """A plan whose rule is agreement."""
    return ExactPlan(AGREEMENT, AGREEMENT.options, rows)


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
    state = start(W, (1.0, 2.0)[:num_latents])
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
    state = start(W)
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


def starts(dims: int = 1, num_latents: int = 1, options: SearchOptions = OPTIONS) -> dict[str, Statistics]:
    """First looks of honest units."""
    W = grid(dims)
    latents = start(W, (1.0, 2.0)[:num_latents]).latents
    found = {}
    for m, (x, y) in enumerate(signals(dims, num_units=5)):
        data = UnitData.build(x, y, W)
        own = starting_parameters(data, latents, options)
        assert own.noise == pytest.approx(START_NOISE * np.mean(y**2))
        found[str(m)] = statistics(data, latents, own)
    return found


@pytest.mark.parametrize("options", [OPTIONS, SearchOptions(convolved=False)])
@pytest.mark.parametrize(("num_latents", "dims"), SHAPES)
def test_honest_first_looks_are_possible(num_latents: int, dims: int, options: SearchOptions) -> None:
    for told in starts(dims, num_latents, options).values():
        assert possible_start(told, ROWS)
        assert not possible_start(told, ROWS // 2)


HUGE = {
    "precision": lambda s: replace(s, precision=1e16 * np.ones_like(s.precision)),
    "shift": lambda s: replace(s, shift=s.shift + 1e200),
    "shift where nothing is known": lambda s: replace(s, precision=0 * s.precision, shift=0 * s.shift + 9.0),
    "a hundred times": lambda s: Statistics(100 * s.precision, 100 * s.shift, s.evidence, 100 * s.slack),
    "ten times the shift": lambda s: replace(s, shift=10 * s.shift),
}


@pytest.mark.parametrize("lie", HUGE)
def test_a_first_look_outweighs_no_rows_and_ends_no_run(lie: str) -> None:
    """The liar is first in the alphabet, where a score that is not a number would put it in front."""
    told = starts()
    assert not possible_start(HUGE[lie](told["0"]), ROWS)
    assert best_lead({**told, "0": HUGE[lie](told["0"])}) != "0"


def test_no_answer_knows_what_its_rows_did_not_see() -> None:
    """G = 0 says that nothing is known of g; a shift beside it would move q(g) freely."""
    state, _, replies = asked(3, 4)
    nothing = replace(replies["1"][0], precision=0 * replies["1"][0].precision)
    assert not possible(nothing, state.posterior, ROWS)
    assert possible(replace(nothing, shift=0 * nothing.shift, slack=0 * nothing.slack), state.posterior, ROWS)


def stranger(state: ExactState, moves: tuple[Move, ...]) -> tuple[Statistics, ...]:
    """What a unit that sees g out of phase answers, with noise that lets it insist."""
    x = signals(1, num_units=1)[0][0]
    data = UnitData.build(x, 2 * np.cos(23 * x[:, 0]), grid(1))
    lone = start(grid(1))
    phi = starting_parameters(data, lone.latents, OPTIONS)
    told = statistics(data, state.latents, replace(phi, noise=0.1))
    return tuple(told for _ in moves)


def test_who_answers_alone_is_compared_with_those_that_are_absent() -> None:
    states, _, _ = federate(signals(1, num_units=5), grid(1), 4)
    state, moves = states[-1], trial_moves(states[-1])
    told = stranger(state, moves)
    rows = dict.fromkeys(["0", "1", "2", "3", "4", "s"], 10**6)  # so many that only the comparison can refuse it
    known = {site: carried(report, state.latents) for site, report in state.reports.items()}
    found = agreeing({"s": told[0]}, asked=state.posterior, counts=rows, absent=known)
    assert found == ("0", "1", "2", "3", "4")
    after, weights = advance(state, Asked({"s": told}), moves, 5, planned(rows))
    assert weights == {"0": 1.0, "1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0, "s": 0.0}
    honest = merge(state, {}, moves=moves, quorum=0.5)
    np.testing.assert_allclose(after.posterior.mean, honest.posterior.mean, rtol=1e-9)


def test_the_first_unit_to_answer_is_kept_in_mind_and_not_believed() -> None:
    states, _, data = federate(signals(1, num_units=2), grid(1), 0)
    state, moves = states[-1], trial_moves(states[-1])
    replies = {s: respond(d, state.latents, state.posterior, moves, None, OPTIONS)[1] for s, d in data.items()}
    plan = planned(dict.fromkeys("01", ROWS))
    first, weights = advance(state, Asked({"0": replies["0"]}), moves, 7, plan)
    assert weights == {"0": 0.0}
    assert first.reported == {"0": 7}
    np.testing.assert_array_equal(first.posterior.mean, state.posterior.mean)
    second, weights = advance(first, Asked({"1": replies["1"]}), moves, 8, plan)
    assert weights == {"0": 1.0, "1": 1.0}
    assert second.reported == {"0": 7, "1": 8}
    alone, _ = advance(state, Asked({"0": replies["0"]}), moves, 7, planned({"0": ROWS}))
    assert alone.trusted == ("0",)


def test_starts_are_compared_over_the_units_that_all_of_them_count() -> None:
    """The bound of fewer units is a larger number where every unit's evidence is negative."""
    units, W = signals(1, num_units=4), grid(1)
    better, worse = (federate(units, W, rounds)[0][-1] for rounds in (12, 1))
    few = replace(worse, reports={site: worse.reports[site] for site in "01"}, bound=better.bound + 100)
    assert bound_of(better, "0123") == pytest.approx(better.bound, rel=1e-6)
    assert best_start([few, better], agreement=False) == 1
    trusting = [replace(few, trusted=tuple("01")), replace(better, trusted=tuple("0123"))]
    assert best_start(trusting, agreement=True) == 1
    assert best_start([replace(worse, reports={}), better], agreement=False) == 1


def answers(seed: int = 0, num_units: int = 7):  # type: ignore[no-untyped-def]
    units, W = signals(1, seed, num_units), grid(1)
    states, phi, data = federate(units, W, 4)
    state: ExactState = states[-1]
    told = {
        s: respond(data[s], state.latents, state.posterior, trial_moves(state), phi[s], OPTIONS)[1][0] for s in data
    }
    return told, state, dict.fromkeys(data, 50)


LIES = {
    "flipped": lambda s: replace(s, shift=-s.shift),
    "flipped and five times stronger": lambda s: replace(s, precision=5 * s.precision, shift=-5 * s.shift),
    "negated": lambda s: Statistics(-5 * s.precision, -5 * s.shift, -5 * s.evidence, -5 * s.slack),
    "a hundred times": lambda s: Statistics(100 * s.precision, 100 * s.shift, 100 * s.evidence, 100 * s.slack),
    "not a number": lambda s: replace(s, shift=s.shift * np.nan),
}


@pytest.mark.parametrize("lie", LIES)
def test_agreement_keeps_the_honest_and_drops_liars(lie: str) -> None:
    told, state, counts = answers()
    everyone = tuple(sorted(told))
    assert agreeing(told, asked=state.posterior, counts=counts) == everyone
    attacked = {s: LIES[lie](v) if s in {"4", "5"} else v for s, v in told.items()}
    kept = agreeing(attacked, asked=state.posterior, counts=counts)
    assert kept == tuple(s for s in everyone if s not in {"4", "5"})


def test_agreement_drops_a_unit_with_another_function() -> None:
    """Its own statistics are honest; it only does not share g."""
    told, state, counts = answers()
    rng = np.random.default_rng(5)
    x = signals(1, 0, 7)[0][0]
    stranger = UnitData.build(x, np.sin(23 * x[:, 0] + 1) + 0.1 * rng.normal(size=len(x)), grid(1))
    alone = maximise(
        stranger, state.latents, posterior(told["0"]), starting_parameters(stranger, state.latents, OPTIONS), OPTIONS
    )
    forced = statistics(stranger, state.latents, replace(alone, amplitudes=np.ones(1), noise=0.3))
    assert "0" not in agreeing({**told, "0": forced}, asked=state.posterior, counts=counts)


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
        starts[name] = statistics(data, latents, starting_parameters(data, latents, OPTIONS))
    assert best_lead(starts) in {"2", "3", "4"}
    negative = {"1": LIES["negated"](starts["1"])}
    with pytest.raises(ProtocolError, match="starting statistics"):
        best_lead(negative)


def test_possible_is_an_identity_for_any_q() -> None:
    """A unit's M-step spends its rows exactly: with yᵀy/σ² known, the misfit is N."""
    latents, q, data, phi, _ = random_unit(2, 1)
    best = maximise(data, latents, q, phi, OPTIONS)
    s = statistics(data, latents, best)
    spent = (
        data.y @ data.y / best.noise
        - 2 * s.shift @ q.mean
        + np.vdot(s.precision, q.second_moment())
        - 2 * s.slack.sum()
    )
    assert spent == pytest.approx(len(data.y), rel=1e-9)
    assert possible(s, q, len(data.y))
