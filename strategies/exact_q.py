"""The server's part of FedMGP with exact q(g): sums in, best pooled bound out, no learning rate.

A round down: pseudo-inputs, lengthscales, q(u), trial moves. A round up: every unit's statistics at every trial move.
The server takes the move with the best pooled bound; the first move keeps the lengthscales, so with all units present
the bound never falls (EM with an exact E-step, and an M-step expanded by the common amplitudes).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.latent import Latents, Move, Posterior, Statistics, spacing
from fedgp_flower.shapes import Array


@dataclass(frozen=True, slots=True)
class Report:
    """A unit's last word: its statistics at the accepted move, and the latents they are whitened with."""

    statistics: Statistics
    latents: Latents
    move: Move


@dataclass(frozen=True, slots=True)
class ExactState:
    """All the server knows: latents, q(u), the search steps, and the last report of every unit."""

    latents: Latents
    posterior: Posterior
    bound: float
    gain_steps: Array  # [I, D]  trial change of log S with the units' gains kept
    width_steps: Array  # [I, D]  ... with the widths of their outputs kept
    stretch: float = 2.0
    round: int = 0
    reports: Mapping[str, Report] = field(default_factory=dict)


_STEP_START, _STEP_MIN, _STEP_MAX, _STEP_GROW = 0.3, 0.02, 0.7, 1.5
_STRETCH_MIN, _STRETCH_MAX = 1.5, 16.0
_LOG_SCALE_BOUND = 2.0


def start_state(inducing: Array, multiples: Sequence[float] = (1.0,), *, jitter: float = 1e-8) -> ExactState:
    """Lengthscales = spacing of the pseudo-inputs times one multiple per latent function, q = prior; no data needed.

    A start that is too long is what makes the model collapse to a flat g.
    """
    scales = np.outer(np.square(multiples), spacing(inducing) ** 2)
    latents = Latents(inducing, scales, np.ones(len(multiples)), jitter)
    prior = Posterior(np.zeros(latents.size), np.eye(latents.size))
    steps = np.full(scales.shape, _STEP_START)
    return ExactState(latents, prior, -math.inf, steps, steps)


def posterior(total: Statistics) -> Posterior:
    """Optimal q(u): V = (I + ΣG)⁻¹, m = V Σb."""
    factor = _factor(total)
    covariance = cho_solve(factor, np.eye(total.shift.size))
    return Posterior(cho_solve(factor, total.shift), covariance)


def shared_evidence(total: Statistics) -> float:
    """½ bᵀP⁻¹b − ½ log|P| with P = I + G: what these statistics say about u, as log evidence."""
    lower, _ = _factor(total)
    z = solve_triangular(lower, total.shift, lower=True)
    return float(0.5 * z @ z - np.log(np.diag(lower)).sum())


def pooled_bound(total: Statistics) -> float:
    """The collapsed evidence lower bound, exact at the optimal q(u)."""
    return total.evidence + float(total.slack.sum()) + shared_evidence(total)


def _factor(total: Statistics) -> tuple[Array, bool]:
    try:
        return cho_factor(total.precision + np.eye(total.shift.size), lower=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: the sum is not finite
        raise NumericsError(
            f"precision of q(u) is not positive definite, shape {total.precision.shape}: a unit sent statistics that "
            "no data can produce. Use `fedmgp.aggregation = 'agreement'`."
        ) from error


def best_scales(total: Statistics, num_latents: int) -> tuple[float, Array]:
    """The common amplitudes a [I] that maximise the bound of rescaled statistics, and that bound.

    Its gradient in log a_i is 2 a_i² slack_i + Σ_{j in i} (m_j² + V_jj) − J. Without this step EM crawls along the
    ridge on which all amplitudes grow and g shrinks.
    """
    J = total.shift.size // num_latents

    def negative(log_a: Array) -> tuple[float, Array]:
        trial = total.rescaled(np.exp(log_a))
        q = posterior(trial)
        moments = (q.mean**2 + np.diag(q.covariance)).reshape(num_latents, J).sum(axis=1)
        return -pooled_bound(trial), J - 2 * trial.slack - moments

    start = np.zeros(num_latents)
    bounds = [(-_LOG_SCALE_BOUND, _LOG_SCALE_BOUND)] * num_latents
    found = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 50, "ftol": 1e-12, "gtol": 1e-7},
    )
    value = negative(start)[0]
    return (-float(found.fun), np.exp(found.x)) if found.fun < value else (-value, np.ones(num_latents))


def trial_moves(state: ExactState) -> tuple[Move, ...]:
    """Six trials: stay, extrapolate, and one lengthscale up or down with gains kept and with widths kept.

    Lengthscales take turns. Keeping gains leaves the shape of every unit relative to g; keeping widths follows the
    ridge on which all units smooth less and g is smoother, along which the outputs' covariances do not change.
    """
    shape = state.latents.scales.shape
    turn = np.unravel_index(state.round % state.latents.scales.size, shape)
    still = np.zeros(shape)
    moves = [Move(still, 1.0, "gain"), Move(still, state.stretch, "gain")]
    for hold, steps in (("gain", state.gain_steps), ("width", state.width_steps)):
        for sign in (-1.0, 1.0):
            offset = still.copy()
            offset[turn] = sign * steps[turn]
            moves.append(Move(offset, state.stretch, "gain" if hold == "gain" else "width"))
    return tuple(moves)


def lead(state: ExactState, statistics: Statistics) -> ExactState:
    """q(u) from one unit at its starting parameters; the others then find their signs by regression on it."""
    return replace(state, posterior=posterior(statistics))


def merge(
    state: ExactState,
    replies: Mapping[str, Sequence[Statistics]],
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
    return ExactState(
        latents=replace(trials[c], amplitudes=state.latents.amplitudes * factors),
        posterior=posterior(totals[c].rescaled(factors)),
        bound=bound,
        gain_steps=gain,
        width_steps=width,
        stretch=min(state.stretch * 2, _STRETCH_MAX) if moves[c].stretch > 1 else max(state.stretch / 2, _STRETCH_MIN),
        round=state.round + 1,
        reports=_reported(state, replies, moves, trials[c], c),
    )


def hold(state: ExactState, replies: Mapping[str, Sequence[Statistics]], moves: Sequence[Move]) -> ExactState:
    """Keep what sites said at the first move, which stays where it is, and change nothing else.

    For a round in which nobody can be counted yet: who answers next has somebody to be compared with.
    """
    return replace(state, reports=_reported(state, replies, moves, state.latents, 0))


def _reported(
    state: ExactState, replies: Mapping[str, Sequence[Statistics]], moves: Sequence[Move], trial: Latents, chosen: int
) -> Mapping[str, Report]:
    new = {site: Report(answers[chosen], trial, moves[chosen]) for site, answers in replies.items()}
    return {**state.reports, **new}


def bound_of(state: ExactState, sites: Collection[str]) -> float:
    """The pooled bound over some sites that have a report, q(u) and the common amplitudes the best for them alone."""
    total = reduce(add, [carried(state.reports[site], state.latents) for site in sorted(sites)])
    return best_scales(total, state.latents.amplitudes.size)[0]


def _totals(
    state: ExactState,
    replies: Mapping[str, Sequence[Statistics]],
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
        for m, told in enumerate(own[c].rescaled(scale) for own in replies):
            fit = told.shift @ q.mean - 0.5 * np.vdot(told.precision, second)
            terms[m, c] = told.evidence + told.slack.sum() + fit
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
    for hold, steps in (("gain", state.gain_steps), ("width", state.width_steps)):
        grown = np.minimum(steps * _STEP_GROW, _STEP_MAX) if won.hold == hold and not stayed else steps
        changed = np.maximum(steps * 0.5, _STEP_MIN) if stayed else grown
        new.append(np.where(moving, changed, steps))
    return new[0], new[1]


def is_flat(explained: Mapping[str, float], *, threshold: float = 0.1) -> bool:
    """Whether the model collapsed: in most units the noise explains all but ``threshold`` of the signal."""
    return bool(explained) and float(np.median(list(explained.values()))) < threshold
