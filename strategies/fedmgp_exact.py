"""FedMGP with exact q(g): sums in, the best pooled bound out, no learning rate; for a Gaussian likelihood.

Beyond the paper (Chung and Al Kontar, Technometrics 66, 2024), on its model. A round down: pseudo-inputs, lengthscales,
q(u), trial moves. A round up: every unit improves φ_m with q fixed, and answers with statistics at every trial move.
The server takes the move with the best pooled bound; the first move keeps the lengthscales, so with all units present
the bound never falls (EM with an exact E-step, and an M-step expanded by the common amplitudes).

The bound needs only the sum over units, and rounds of ``aggregation = "sum"``, or under masks, ask a ``Total``. The
other rules ask ``Each``: an absent unit still counts by its last statistics, carried to the lengthscales of now,
answers are judged by what was asked, and ``agreement`` compares units with one another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.messages import decode, encode, message
from fedgp_flower.methods.fedmgp.latents import (
    Hold,
    Latents,
    Move,
    Posterior,
    Statistics,
    best_scales,
    posterior,
    still,
)
from fedgp_flower.methods.fedmgp.messages import Known, Trials, TrialStatistics
from fedgp_flower.methods.fedmgp.options import FedMGPExactOptions
from fedgp_flower.methods.fedmgp.trust import agreeing, consistent, possible
from fedgp_flower.typing import Array, NamedArrays
from strategies.fedmgp_shared import (
    EVERYONE,
    Record,
    SharedLatents,
    first_inducing,
    first_posterior,
    latents_at,
    notice_fresh,
    view,
)
from strategies.server.fedavg import sampled
from strategies.server.questions import Asking, Each, Figures, Refuse, Roster, Summed, Total

logger = logging.getLogger("fedgp")

QUORUM = 0.5
"""Under ``agreement`` a trial move must help more than this share of the units."""
GAIN: Hold = "gain"
WIDTH: Hold = "width"
_STEP_START, _STEP_MIN, _STEP_MAX, _STEP_GROW = 0.3, 0.02, 0.7, 1.5
_STRETCH_MIN, _STRETCH_MAX = 1.5, 16.0


@message()
class Shared:
    """What Flower's wrappers see: latent functions and q(u)."""

    latents: Latents
    posterior: Posterior


Replies = Mapping[str, Sequence[Statistics]]
"""Statistics at every trial move, by site."""


@message()
class Report:
    """A unit's last statistics that count: at the accepted move, and the latents they are whitened with."""

    statistics: Statistics
    latents: Latents
    move: Move


@message()
class ExactState:
    """One start: latents, q(u), the search steps, and the last report of every unit."""

    latents: Latents
    posterior: Posterior
    bound: float | None
    """Pooled, of the units that count; None before the first round."""
    gain_steps: Float[ndarray, "I D"]
    """Trial change of log S with the units' gains kept."""
    width_steps: Float[ndarray, "I D"]
    """The same with the widths of their outputs kept."""
    stretch: float = 2.0
    unsmoothed: int = 0
    """Rounds to come in which units do not smooth."""
    round: int = 0
    """Rounds of this start: whose turn it is to be moved."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    reported: Mapping[str, int] = field(default_factory=dict)
    """Round of a unit's last report; a unit that remembers another one starts afresh."""
    trusted: tuple[str, ...] = ()
    """Units that ``agreement`` counts."""


@message()
class ExactRun:
    """All starts of a run, and which one goes on."""

    starts: tuple[ExactState, ...]
    active: int
    record: Record

    @property
    def state(self) -> ExactState:
        """The start that is being worked on."""
        return self.starts[self.active]

    @property
    def latents(self) -> Latents:
        """Latent functions of that start."""
        return self.state.latents

    @property
    def posterior(self) -> Posterior:
        """The joint q(u) of that start."""
        return self.state.posterior

    @property
    def bounds(self) -> dict[str, Any]:
        """The pooled bound of that start, and of all."""
        return {"bound": self.state.bound, "bounds_of_starts": [start.bound for start in self.starts]}

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths that statistics must have: C moves, I latent functions, L whitened values."""
        latents = self.state.latents
        return {"C": len(trial_moves(self.state)), "I": len(latents.amplitudes), "L": latents.size}

    def known(self, site: str) -> Known:
        """The unit's last report; the units of a sum are all sent the same."""
        key = EVERYONE if EVERYONE in self.state.reports else site
        report, when = self.state.reports.get(key), self.state.reported.get(key, 0)
        return Known(self.active, when, still(self.state.latents.scales.shape) if report is None else report.move)

    def having(self, state: ExactState) -> ExactRun:
        """With the next state of that start."""
        return replace(self, starts=(*self.starts[: self.active], state, *self.starts[self.active + 1 :]))


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """How a round goes."""

    config: RunConfig
    options: FedMGPExactOptions
    rows: Mapping[str, int]
    """Training rows of every unit that was ever known."""

    @property
    def agreement(self) -> bool:
        """Whether only units that share g with most others count."""
        return self.options.aggregation == "agreement"


def first_state(inducing: Array, number: int, roster: Roster, plan: ExactPlan) -> Asking[ExactState]:
    """A start: lengthscales from the spacing of the pseudo-inputs, q(u) of one unit."""
    options, config = plan.options, plan.config
    latents = latents_at(
        inducing, [start_factor(number) * multiple for multiple in options.multiples], config.model.jitter
    )
    q = yield from first_posterior(latents, roster)
    steps = np.full(latents.scales.shape, _STEP_START)
    return ExactState(latents, q, None, steps, steps, unsmoothed=options.unsmoothed(config, inducing.shape[1]))


def start_factor(number: int) -> float:
    """Lengthscales of a start over those of the first one: 1, 2, ½, 4, ¼ and so on."""
    power = (number + 1) // 2
    return 2.0**power if number % 2 else 2.0**-power


def one_round(run: ExactRun, roster: Roster, plan: ExactPlan) -> Asking[tuple[ExactRun, Figures]]:
    """An exact round of the start that is being worked on, with max(⌈ρM⌉, 1) units.

    M-steps at these units, statistics at trial moves, and the move with the best pooled bound.
    """
    run = yield from next_start(run, roster, plan)
    chosen = sampled(roster, plan.options.fraction, plan.config.seed)
    moves = trial_moves(run.state)
    ask = the_sum if plan.options.aggregation == "sum" or roster.totals_only else individuals
    asked: Asked = yield from ask(run, moves, chosen, plan)
    state, weights = advance(run.state, asked, moves, roster.round, plan)
    if EVERYONE in weights:
        weights = dict.fromkeys(asked.sites, 1.0)
    run = replace(run.having(state), record=run.record.after(weights, asked.flat))
    rows = sum(plan.rows[site] for site, weight in weights.items() if weight)
    if not rows or state.bound is None or not math.isfinite(state.bound):
        return run, {}
    return run, {"bound": state.bound, "objective": state.bound / rows}


def next_start(run: ExactRun, roster: Roster, plan: ExactPlan) -> Asking[ExactRun]:
    """Begin another start, or choose the best one, when it is time."""
    done, starts, each = roster.round - 1, plan.options.num_starts(plan.config), plan.options.start_rounds
    if done and done % each == 0 and len(run.starts) < starts:
        state = yield from first_state(run.state.latents.inducing, len(run.starts), roster, plan)
        return replace(run, starts=(*run.starts, state), active=len(run.starts))
    if starts > 1 and done == starts * each:
        best = best_start(run.starts, agreement=plan.agreement)
        logger.info("start %d of %d has the best bound", best + 1, starts)
        return replace(run, active=best)
    return run


@dataclass(frozen=True, slots=True)
class Asked:
    """What a round was answered."""

    replies: Replies
    refused: Collection[str] = ()
    """Sites whose statistics no rows can produce."""
    flat: Mapping[str, float] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    """Whose the sum is."""


def individuals(run: ExactRun, moves: Sequence[Move], chosen: Sequence[str], plan: ExactPlan) -> Asking[Asked]:
    """Statistics of each unit, without those that its rows cannot have produced."""
    state = run.state
    requests = {site: Trials(view(run, site), tuple(moves), not state.unsmoothed) for site in chosen}
    answers: Mapping[str, TrialStatistics] = yield Each(TrialStatistics, requests)
    notice_fresh((site for site, own in answers.items() if float(own.fresh)), state.reported)
    replies = {site: own.each() for site, own in answers.items()}
    q, rows = state.posterior, plan.rows
    refused = [
        site
        for site, given in replies.items()
        if not (possible(given[0], q, rows[site]) and consistent(given, moves, q, rows[site]))
    ]
    for site in refused:
        yield Refuse(site, "statistics that no rows can produce")
        del replies[site]
    return Asked(replies, refused, {site: float(own.flat) for site, own in answers.items()})


def the_sum(run: ExactRun, moves: Sequence[Move], chosen: Sequence[str], plan: ExactPlan) -> Asking[Asked]:
    """Statistics of all units as if they were those of one; only those that answer count in this round."""
    del plan
    request = Trials(view(run, EVERYONE), tuple(moves), not run.state.unsmoothed)
    summed: Summed[TrialStatistics] = yield Total(TrialStatistics, request, tuple(chosen))
    if summed.total is None:
        return Asked({})
    share = float(summed.total.flat) / (len(summed.sites) - summed.silent)
    return Asked({EVERYONE: summed.total.each()}, flat={EVERYONE: share}, sites=summed.sites)


def advance(
    state: ExactState, asked: Asked, moves: Sequence[Move], server_round: int, plan: ExactPlan
) -> tuple[ExactState, dict[str, float]]:
    """The next state, and 1 or 0 for every site that has a report: whether it counts.

    A site whose statistics were refused loses its earlier report too. Under ``agreement`` everyone with a report is
    judged in every round, and a round with nobody to trust changes nothing but reports.
    """
    kept = {site: report for site, report in state.reports.items() if site not in asked.refused}
    state = replace(state, reports=kept)
    if plan.agreement:
        state = replace(state, trusted=_trusted(state, asked.replies, plan.rows))
    keep = state.trusted if plan.agreement else None
    try:
        if keep is None or keep:
            new = merge(state, asked.replies, moves=moves, keep=keep, quorum=QUORUM if plan.agreement else 0.0)
        else:
            logger.warning("no units agree on g yet; the round changes nothing but what is known of each")
            new = hold(state, asked.replies, moves)
    except (NumericsError, ProtocolError) as error:
        logger.warning("the round changes nothing: %s", error)
        return state, {}
    reported = {site: when for site, when in state.reported.items() if site not in asked.refused}
    new = replace(new, reported={**reported, **dict.fromkeys(asked.replies, server_round)})
    return new, {site: float(keep is None or site in keep) for site in sorted(new.reports)}


def _trusted(state: ExactState, replies: Replies, rows: Mapping[str, int]) -> tuple[str, ...]:
    """Who agrees with most of all who ever reported."""
    first = {site: answers[0] for site, answers in replies.items()}
    absent = {s: carried(report, state.latents) for s, report in state.reports.items() if s not in replies}
    return agreeing(first, asked=state.posterior, counts=rows, absent=absent)


def best_start(starts: Sequence[ExactState], *, agreement: bool) -> int:
    """Index of the start with the best bound over the sites that all starts count.

    The bound of more sites is another number, so starts that counted different ones cannot be compared as they are.
    """
    counted = [set(state.reports) & set(state.trusted if agreement else state.reports) for state in starts]
    common = set.intersection(*counted)
    if not common:
        logger.warning("the starts have no unit in common; the last one goes on")
        return len(starts) - 1
    return int(np.argmax([bound_of(state, common) for state in starts]))


def trial_moves(state: ExactState) -> tuple[Move, ...]:
    """Stay, extrapolate, and one lengthscale up or down with gains kept and, once units smooth, with widths kept.

    Lengthscales take turns. Keeping gains leaves the shape of every unit relative to g; keeping widths follows the
    ridge on which all units smooth less and g is smoother, along which the outputs' covariances do not change.
    """
    shape = state.latents.scales.shape
    turn = np.unravel_index(state.round % state.latents.scales.size, shape)
    moves = [still(shape), replace(still(shape), stretch=state.stretch)]
    for kept, steps in ((GAIN, state.gain_steps), (WIDTH, state.width_steps))[: 1 if state.unsmoothed else 2]:
        for sign in (-1.0, 1.0):
            offset = np.zeros(shape)
            offset[turn] = sign * steps[turn]
            moves.append(Move(offset, state.stretch, kept))
    return tuple(moves)


def merge(
    state: ExactState,
    replies: Replies,
    *,
    moves: Sequence[Move],
    keep: Collection[str] | None = None,
    quorum: float = 0.0,
) -> ExactState:
    """Take the trial move with the best pooled bound over all units, absent ones with their last, rotated statistics.

    Args:
        state: what the moves were made from.
        replies: statistics at every move, by site.
        moves: the trial moves that were sent; the first must keep the lengthscales.
        keep: sites to count, present or absent; None counts all. Others keep their last report outside the sums.
        quorum: take a move only if it raises the terms of the bound of more than this share of the sites that are
            counted and present, so that fewer cannot steer the lengthscales by what they claim at a trial.

    Raises:
        ProtocolError: nothing to count, or a reply does not have one answer per move.
    """
    trials = [replace(state.latents, scales=state.latents.scales * np.exp(m.offset)) for m in moves]
    totals = _totals(state, replies, trials, keep)
    results = [best_scales(total, state.latents.amplitudes.size) for total in totals]
    allowed, counted = [True] * len(moves), [own for s, own in sorted(replies.items()) if keep is None or s in keep]
    if quorum:
        gaining = _gaining(counted, totals, [factors for _, factors in results]) > quorum
        allowed = [True, *gaining[1:].tolist()]
    c = int(np.argmax([bound if may else -math.inf for (bound, _), may in zip(results, allowed, strict=True)]))
    (bound, factors), (gain, width) = results[c], _next_steps(state, moves, c)
    return replace(
        state,
        latents=replace(trials[c], amplitudes=state.latents.amplitudes * factors),
        posterior=posterior(totals[c].rescaled(factors)),
        bound=bound,
        gain_steps=gain,
        width_steps=width,
        stretch=min(state.stretch * 2, _STRETCH_MAX) if moves[c].stretch > 1 else max(state.stretch / 2, _STRETCH_MIN),
        unsmoothed=max(state.unsmoothed - 1, 0),
        round=state.round + 1,
        reports=_reported(state, replies, moves, trials[c], c),
    )


def hold(state: ExactState, replies: Replies, moves: Sequence[Move]) -> ExactState:
    """Keep what sites said at the first move, which stays where it is, and change nothing else.

    For a round in which nobody can be counted yet: who answers next has somebody to be compared with.
    """
    return replace(state, reports=_reported(state, replies, moves, state.latents, 0))


def _reported(
    state: ExactState, replies: Replies, moves: Sequence[Move], trial: Latents, chosen: int
) -> Mapping[str, Report]:
    new = {site: Report(answers[chosen], trial, moves[chosen]) for site, answers in replies.items()}
    return {**state.reports, **new}


def bound_of(state: ExactState, sites: Collection[str]) -> float:
    """The pooled bound over some sites that have a report, q(u) and the common amplitudes the best for them alone."""
    total = reduce(add, [carried(state.reports[site], state.latents) for site in sorted(sites)])
    return best_scales(total, state.latents.amplitudes.size)[0]


def _totals(
    state: ExactState,
    replies: Replies,
    trials: Sequence[Latents],
    keep: Collection[str] | None,
) -> list[Statistics]:
    """Sums over counted sites at every trial, in the order of site names, so that replies may come in any order."""
    for site, answers in replies.items():
        if len(answers) != len(trials):
            raise ProtocolError(f"site {site}: {len(answers)} statistics for {len(trials)} trial moves")
    absent = sorted(s for s in state.reports if s not in replies and (keep is None or s in keep))
    present = sorted(s for s in replies if keep is None or s in keep)
    if not present and not absent:
        raise ProtocolError("no unit's statistics can be counted; expected at least one trusted site")
    return [
        reduce(add, [replies[s][c] for s in present] + [carried(state.reports[s], trial) for s in absent])
        for c, trial in enumerate(trials)
    ]


def _gaining(replies: Sequence[Sequence[Statistics]], totals: Sequence[Statistics], factors: Sequence[Array]) -> Array:
    """Share of sites whose E_q log p(y_m | f_m), q the best at each trial, is above that of staying.  [C]."""
    terms = np.empty((len(replies), len(totals)))
    for c, (total, scale) in enumerate(zip(totals, factors, strict=True)):
        q = posterior(total.rescaled(scale))
        second = q.second_moment()
        for m, part in enumerate(own[c].rescaled(scale) for own in replies):
            fit = part.shift @ q.mean - 0.5 * np.vdot(part.precision, second)
            terms[m, c] = part.evidence + part.slack.sum() + fit
    share: Array = np.sum(terms > terms[:, :1], axis=0) / max(len(replies), 1)
    return share


def carried(report: Report, trial: Latents) -> Statistics:
    """An absent unit's statistics in the coordinates of a trial: its view of the values g(W) is kept."""
    turned = report.statistics.rotated(report.latents.whitening(), trial.whitening())
    return turned.rescaled(trial.amplitudes / report.latents.amplitudes)


def _next_steps(state: ExactState, moves: Sequence[Move], chosen: int) -> tuple[Array, Array]:
    """A step that won grows, both steps shrink where staying won; only the lengthscale whose turn it was is touched."""
    moving = np.any([m.offset != 0 for m in moves], axis=0)
    won = moves[chosen]
    stayed = not np.any(won.offset)
    new = []
    for kept, steps in ((GAIN, state.gain_steps), (WIDTH, state.width_steps)):
        grown = np.minimum(steps * _STEP_GROW, _STEP_MAX) if won.hold == kept and not stayed else steps
        changed = np.maximum(steps * 0.5, _STEP_MIN) if stayed else grown
        new.append(np.where(moving, changed, steps))
    return new[0], new[1]


class FedMGPExact(SharedLatents[ExactRun]):
    """Exact rounds from the first to the last; for a Gaussian likelihood and whole batches."""

    method = "fedmgp-exact"
    options_class = FedMGPExactOptions
    state_class = ExactRun
    options: FedMGPExactOptions

    @property
    def plan(self) -> ExactPlan:
        """How a round goes."""
        return ExactPlan(self.config, self.options, self.preparation.rows)

    def initialise(self, roster: Roster) -> Asking[ExactRun]:
        """One start, at pseudo-inputs from where inputs lie."""
        inducing = yield from first_inducing(self.config, roster)
        first = yield from first_state(inducing, 0, roster, self.plan)
        return ExactRun((first,), 0, Record())

    def watching(self) -> bool:
        """Once the best start goes on, and units smooth."""
        starts = self.options.num_starts(self.config)
        tried = starts * self.options.start_rounds if starts > 1 else 0
        return self.round > tried and not self.current.state.unsmoothed

    def one_round(self, state: ExactRun, roster: Roster) -> Asking[tuple[ExactRun, Figures]]:
        """An exact round."""
        self.sizes |= state.sizes
        return (yield from one_round(state, roster, self.plan))

    def public(self, state: ExactRun) -> NamedArrays:
        """Latent functions and q(u)."""
        return encode(Shared(state.latents, state.posterior))

    def adopt(self, state: ExactRun, arrays: NamedArrays) -> ExactRun:
        """Other latent functions and q(u); reports stay what they are."""
        return state.having(replace(state.state, **vars(decode(Shared, arrays))))
