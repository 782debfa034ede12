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
_RANK = 1e-9
"""Eigenvalues of G below this share of the largest are rounding."""


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
    except np.linalg.LinAlgError as error:
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


def best_lead(starts: Mapping[str, Statistics]) -> str:
    """The site that shares g, up to a sign, with the most others, from everyone's statistics at their starts.

    Its score is the median over k of the better log evidence of b_m + b_k and b_m − b_k, so that a minority of bad
    sites cannot become lead by agreeing with one another. It needs individual statistics.

    Raises:
        ProtocolError: no site sent statistics that data can produce.
    """
    valid = [site for site in sorted(starts) if semidefinite(starts[site])]
    if not valid:
        raise ProtocolError("no site sent starting statistics that data can produce; one is enough")
    flipped = {site: replace(starts[site], shift=-starts[site].shift) for site in valid}
    alone = {site: shared_evidence(starts[site]) for site in valid}

    def support(m: str) -> float:
        pairs = [
            max(shared_evidence(starts[m] + starts[k]), shared_evidence(starts[m] + flipped[k])) - alone[m] - alone[k]
            for k in valid
            if k != m
        ]
        return float(np.median(pairs)) if pairs else 0.0

    return max(valid, key=support)


def merge(
    state: ExactState,
    replies: Mapping[str, Sequence[Statistics]],
    *,
    moves: Sequence[Move],
    keep: Collection[str] | None = None,
) -> ExactState:
    """Take the trial move with the best pooled bound over all units, absent ones with their last, rotated statistics.

    Args:
        state: what the moves were made from.
        replies: statistics at every move, by site.
        moves: the trial moves that were sent; the first must keep the lengthscales.
        keep: sites to count, present or absent; None counts all. Others keep their last report outside the sums.

    Raises:
        ProtocolError: nothing to count, or a reply does not have one answer per move.
    """
    for site, answers in replies.items():
        if len(answers) != len(moves):
            raise ProtocolError(f"site {site}: {len(answers)} statistics for {len(moves)} trial moves")
    trials = [replace(state.latents, scales=state.latents.scales * np.exp(m.offset)) for m in moves]
    totals = _totals(state, replies, trials, keep)
    results = [best_scales(total, state.latents.amplitudes.size) for total in totals]
    c = int(np.argmax([bound for bound, _ in results]))
    bound, factors = results[c]
    reports = {s: Report(answers[c], trials[c], moves[c]) for s, answers in replies.items()}
    gain, width = _next_steps(state, moves, c)
    return ExactState(
        latents=replace(trials[c], amplitudes=state.latents.amplitudes * factors),
        posterior=posterior(totals[c].rescaled(factors)),
        bound=bound,
        gain_steps=gain,
        width_steps=width,
        stretch=min(state.stretch * 2, _STRETCH_MAX) if moves[c].stretch > 1 else max(state.stretch / 2, _STRETCH_MIN),
        round=state.round + 1,
        reports={**state.reports, **reports},
    )


def _totals(
    state: ExactState,
    replies: Mapping[str, Sequence[Statistics]],
    trials: Sequence[Latents],
    keep: Collection[str] | None,
) -> list[Statistics]:
    """Sums over counted sites at every trial, in the order of site names, so that replies may come in any order."""
    absent = sorted(s for s in state.reports if s not in replies and (keep is None or s in keep))
    present = sorted(s for s in replies if keep is None or s in keep)
    if not present and not absent:
        raise ProtocolError("no unit's statistics can be counted; expected at least one trusted site")
    return [
        reduce(add, [replies[s][c] for s in present] + [_carried(state.reports[s], trial) for s in absent])
        for c, trial in enumerate(trials)
    ]


def _carried(report: Report, trial: Latents) -> Statistics:
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


def agreeing(statistics: Mapping[str, Statistics], *, asked: Posterior, counts: Mapping[str, int]) -> tuple[str, ...]:
    """Sites whose answers data can produce and that share g with most others: the `agreement` rule.

    Unit m stays if :func:`possible` and the median over k of log p(m, k share g) − log p(they do not) is positive, from
    :func:`shared_evidence` of the pair and of each alone. It needs individual statistics.

    Args:
        statistics: of every site at the first trial move.
        asked: q(u) that was sent with the moves.
        counts: number of rows behind each site's statistics.
    """
    valid = [site for site in sorted(statistics) if possible(statistics[site], asked, counts[site])]
    if len(valid) < 2:
        return tuple(valid)
    alone = {site: shared_evidence(statistics[site]) for site in valid}
    gain = np.full((len(valid), len(valid)), np.nan)
    for i, m in enumerate(valid):
        for j, k in enumerate(valid[:i]):
            gain[i, j] = gain[j, i] = shared_evidence(statistics[m] + statistics[k]) - alone[m] - alone[k]
    return tuple(site for site, row in zip(valid, gain, strict=True) if np.nanmedian(row) > 0)


def possible(statistics: Statistics, asked: Posterior, count: int) -> bool:
    """Whether any ``count`` rows could have produced this answer to q(u) = N(m, V) at the first trial move.

    A unit that took its M-step has E_q‖y − f‖²/σ² = N, and yᵀy/σ² ≥ bᵀG⁺b. Hence G is positive semi-definite and
    (b − Gm)ᵀG⁺(b − Gm) + tr(GV) − 2 Σ slack ≤ N, whatever q was; a scaled or flipped answer breaks it.
    """
    if not semidefinite(statistics):
        return False
    G, b = statistics.precision, statistics.shift
    eigenvalues, vectors = np.linalg.eigh(G)
    floor = _RANK * max(eigenvalues[-1], 0.0)
    seen = eigenvalues > floor
    residual = vectors[:, seen].T @ (b - G @ asked.mean)
    misfit = np.sum(residual**2 / eigenvalues[seen]) + np.vdot(G, asked.covariance) - 2 * statistics.slack.sum()
    return bool(misfit <= count * (1 + 1e-6) and np.all(statistics.slack <= 1e-6 * count))


def semidefinite(statistics: Statistics) -> bool:
    """Whether everything is finite and G positive semi-definite to rounding."""
    if not all(np.isfinite(part).all() for part in (statistics.precision, statistics.shift, statistics.slack)):
        return False
    eigenvalues = np.linalg.eigvalsh(statistics.precision)
    return bool(eigenvalues[0] >= -_RANK * max(eigenvalues[-1], 0.0))


def is_flat(explained: Mapping[str, float], *, threshold: float = 0.1) -> bool:
    """Whether the model collapsed: in most units the noise explains all but ``threshold`` of the signal."""
    return bool(explained) and float(np.median(list(explained.values()))) < threshold
