"""FedMGP with exact q(g) from sums, without a learning rate; for a Gaussian likelihood.

The model is that of Chung and Al Kontar, Technometrics 66 (2024); the algorithm is not in the paper. In a round each
unit improves φ_m at fixed q and sends statistics at each trial move of the lengthscales. The server accepts the move
with the best pooled bound; the first move keeps the lengthscales, so with all units present the bound never falls. An
absent unit counts with its last statistics, transformed to the current lengthscales; under masks with none.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.messages import add, decode, encode, message
from fedgp_flower.methods.fedmgp import latents as shared
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior, Move, UnitStatistics, posterior
from fedgp_flower.methods.fedmgp.messages import Known, TrialMoves, TrialStatistics, View
from fedgp_flower.methods.fedmgp.options import FedMGPExactOptions
from fedgp_flower.methods.fedmgp.trust import consistent, sharing
from fedgp_flower.typing import NamedArrays
from strategies.fedmgp_shared import EVERYONE, collapse, first_look, predicted, pseudo_inputs, scaled_targets, sizes
from strategies.server.fedavg import sampled
from strategies.server.questions import Asking, Each, Figures, Refuse, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

QUORUM = 0.5
"""Under ``agreement`` a trial move must raise the bound of more than this share of the units."""
UNSMOOTHED_ROUNDS = 10
"""First rounds without smoothing, for several latent functions or inputs; at most half of all."""
HOLDS: tuple[shared.Hold, shared.Hold] = ("gain", "width")
_STEP_START, _STEP_MIN, _STEP_MAX, _STEP_GROW = 0.3, 0.02, 0.7, 1.5
_STRETCH_MIN, _STRETCH_MAX = 1.5, 16.0

Replies: TypeAlias = Mapping[str, Sequence[UnitStatistics]]
"""Statistics at every trial move, by site."""


@message()
class Report:
    """A unit's last statistics, at the accepted move, and the latents that whiten them."""

    statistics: UnitStatistics
    latents: LatentFunctions
    move: Move
    round: int
    """A unit whose memory is of another round starts again."""


@message()
class ExactState:
    """Latents, q(u), the search steps, and the last report of each unit."""

    latents: LatentFunctions
    posterior: LatentPosterior
    bound: float | None
    """The pooled bound of the units that count; None before the first round."""
    steps: Float[ndarray, "2 I D"]
    """Trial changes of log S at constant gains of the units, and at constant widths of their outputs."""
    stretch: float = 2.0
    unsmoothed: int = 0
    """Remaining rounds without smoothing."""
    round: int = 0
    """Rounds that changed the state; lengthscales take turns by this count."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    counted: tuple[str, ...] = ()

    def known(self, site: str) -> Known:
        """Return the unit's last report; under masks the same for all units."""
        report = self.reports.get(EVERYONE) or self.reports.get(site)
        return Known(0, Move(np.zeros_like(self.steps[0]))) if report is None else Known(report.round, report.move)

    def view(self, site: str) -> View:
        """Return the message from which a unit predicts."""
        return View(self.latents, self.posterior, self.known(site))


def advance(
    state: ExactState, replies: Replies, moves: Sequence[Move], server_round: int, rows: Mapping[str, int] | None
) -> tuple[ExactState, tuple[str, ...]]:
    """Return the next state and the sites that count; with ``rows`` only sites that share g with most others count."""
    keep = None if rows is None else agreeing(state, replies, rows)
    try:
        if keep is None or keep:
            quorum = 0.0 if rows is None else QUORUM
            new = merge(state, replies, moves=moves, keep=keep, quorum=quorum, server_round=server_round)
        else:
            logger.warning("no units agree on g yet; the round only updates the reports of units")
            new = replace(state, reports=_reported(state, replies, state.latents, moves, 0, server_round))
    except (NumericsError, ProtocolError) as error:
        logger.warning("the round is skipped: %s", error)
        return state, ()
    return new, tuple(sorted(new.reports) if keep is None else keep)


def agreeing(state: ExactState, replies: Replies, rows: Mapping[str, int]) -> tuple[str, ...]:
    """Return the sites that share g with most sites, by their last reports; none if only one site reported."""
    usable = {site: each[0] for site, each in replies.items()}
    usable |= {site: carried(report, state.latents) for site, report in state.reports.items() if site not in replies}
    return sharing(usable) if len(usable) > 1 or len(rows) == 1 else ()


def trial_moves(state: ExactState) -> tuple[Move, ...]:
    """Return the trial moves: stay, extrapolate, one lengthscale up or down at constant gains or widths."""
    still = np.zeros_like(state.steps[0])
    turn = np.unravel_index(state.round % still.size, still.shape)
    moves = [Move(still), Move(still, state.stretch)]
    for kept, steps in list(zip(HOLDS, state.steps, strict=True))[: 1 if state.unsmoothed else 2]:
        for sign in (-1.0, 1.0):
            offset = still.copy()
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
    server_round: int = 0,
) -> ExactState:
    """Accept the trial move with the best pooled bound over all units; absent units count with their last statistics.

    The first move must keep the lengthscales. With ``keep`` only these sites count. With a ``quorum`` a move must raise
    the bound of more than this share of the present sites that count, so that fewer cannot steer the lengthscales by
    false statistics. An accepted step grows; if the first move wins, both steps shrink.
    """
    present = sorted(s for s in replies if keep is None or s in keep)
    absent = sorted(s for s in state.reports if s not in replies and (keep is None or s in keep))
    if not present and not absent:
        raise ProtocolError("no unit sent usable statistics; expected at least one trusted site")
    trials = [replace(state.latents, scales=state.latents.scales * np.exp(m.offset)) for m in moves]
    totals = [
        add([*(replies[s][c] for s in present), *(carried(state.reports[s], trial) for s in absent)])
        for c, trial in enumerate(trials)
    ]
    found, scales = zip(*(shared.best_scales(total, len(state.latents.scales)) for total in totals), strict=True)
    best = [posterior(total.rescaled(factors)) for total, factors in zip(totals, scales, strict=True)]
    bounds = np.array(found)
    if quorum:
        terms = [[replies[s][c].rescaled(scales[c]).expected(q) for c, q in enumerate(best)] for s in present]
        gains = np.array(terms).reshape(-1, len(moves))
        helpful = np.sum(gains > gains[:, :1], axis=0) > quorum * len(present)
        bounds[1:][~helpful[1:]] = -np.inf
    c = int(np.argmax(bounds))
    steps = np.maximum(state.steps * 0.5, _STEP_MIN)
    if np.any(moves[c].offset):
        steps, kept = state.steps.copy(), HOLDS.index(moves[c].hold)
        steps[kept] = np.minimum(steps[kept] * _STEP_GROW, _STEP_MAX)
    moving = np.any([m.offset != 0 for m in moves], axis=0)
    return replace(
        state,
        latents=replace(trials[c], amplitudes=state.latents.amplitudes * scales[c]),
        posterior=best[c],
        bound=found[c],
        steps=np.where(moving, steps, state.steps),
        stretch=min(state.stretch * 2, _STRETCH_MAX) if moves[c].stretch > 1 else max(state.stretch / 2, _STRETCH_MIN),
        unsmoothed=max(state.unsmoothed - 1, 0),
        round=state.round + 1,
        reports=_reported(state, replies, trials[c], moves, c, server_round),
    )


def _reported(
    state: ExactState, replies: Replies, trial: LatentFunctions, moves: Sequence[Move], c: int, server_round: int
) -> Mapping[str, Report]:
    return {**state.reports, **{s: Report(each[c], trial, moves[c], server_round) for s, each in replies.items()}}


def carried(report: Report, trial: LatentFunctions) -> UnitStatistics:
    """Return an absent unit's statistics in the coordinates of a trial; its posterior of g(W) does not change."""
    turned = report.statistics.rotated(report.latents.whitening(), trial.whitening())
    return turned.rescaled(trial.amplitudes / report.latents.amplitudes)


class FedMGPExact(FederatedStrategy[ExactState]):
    """Exact rounds for a Gaussian likelihood and full batches."""

    method = "fedmgp-exact"
    options_class = FedMGPExactOptions
    state_class = ExactState
    watched = "objective"
    options: FedMGPExactOptions
    adjusted, constants, predictive, warnings = scaled_targets, pseudo_inputs, predicted, collapse

    def initialise(self, roster: Roster) -> Asking[ExactState]:
        """Return pseudo-inputs from histograms, lengthscales from their spacing, and q(u) of one unit."""
        latents, q = yield from first_look(self.config, roster)
        steps = np.full((2, *latents.scales.shape), _STEP_START)
        unsmoothed = min(UNSMOOTHED_ROUNDS, self.planned_rounds // 2) if latents.scales.size > 1 else 0
        return ExactState(latents, q, None, steps, unsmoothed=unsmoothed)

    def watching(self) -> bool:
        """Whether units smooth, after :data:`UNSMOOTHED_ROUNDS`."""
        return not self.current.unsmoothed

    def one_round(self, state: ExactState, roster: Roster) -> Asking[tuple[ExactState, Figures]]:
        """Ask max(⌈ρM⌉, 1) units for M-steps and statistics at trial moves, and accept the best move.

        A site is refused, and its earlier report dropped, if no rows can produce its statistics.
        """
        rows, moves = self.preparation.rows, trial_moves(state)
        chosen = sampled(roster, self.config.averaging.fraction, self.config.seed)
        lengths = {"C": len(moves), **sizes(state.latents)}
        replies: dict[str, Sequence[UnitStatistics]] = {}
        sites: tuple[str, ...] = ()
        if roster.totals_only:
            request = TrialMoves(state.view(EVERYONE), moves, not state.unsmoothed)
            summed: Summed[TrialStatistics] = yield Total(TrialStatistics, request, tuple(chosen), sizes=lengths)
            if summed.total is not None:
                replies, sites = {EVERYONE: summed.total.each()}, summed.sites
        else:
            requests = {site: TrialMoves(state.view(site), moves, not state.unsmoothed) for site in chosen}
            answers: Mapping[str, TrialStatistics] = yield Each(TrialStatistics, requests, sizes=lengths)
            for site, answer in answers.items():
                statistics = answer.each()
                if consistent(statistics, moves, state.posterior, rows[site]):
                    replies[site] = statistics
                else:
                    yield Refuse(site, "statistics that no rows can produce")
            accepted = {s: report for s, report in state.reports.items() if s in replies or s not in answers}
            state = replace(state, reports=accepted)
        compared = rows if self.options.aggregation == "agreement" else None
        state, counted = advance(state, replies, moves, roster.round, compared)
        state = replace(state, counted=sites if EVERYONE in counted else counted)
        total = sum(rows[site] for site in state.counted)
        if not total or state.bound is None:
            return state, {}
        return state, {"bound": state.bound, "objective": state.bound / total}

    def public(self, state: ExactState) -> NamedArrays:
        """Return latent functions and q(u)."""
        return {name: array for name, array in encode(state).items() if name.startswith(("latents.", "posterior."))}

    def adopt(self, state: ExactState, arrays: NamedArrays) -> ExactState:
        """Return the state with other latent functions and q(u); reports do not change."""
        return decode(ExactState, {**encode(state), **arrays})
