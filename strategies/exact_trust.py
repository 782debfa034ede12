"""Whom exact rounds of FedMGP believe: what rows can produce, who shares g with most others, who may lead.

All of it needs individual statistics. A unit that took its M-step with q fixed has E_q‖y − f‖²/σ² = N, which ties what
it sends together; a lie that respects every tie is one that other rows could have told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedgp_flower.errors import ProtocolError
from fedgp_flower.latent import Move, Posterior, Statistics
from fedgp_flower.shapes import Array
from strategies.exact_q import shared_evidence

_RANK = 1e-9
"""Eigenvalues of G below this share of the largest are rounding."""
_SLACK = 1e-6
"""Rounding that is let pass, per row."""


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
    misfit = _length(G, b - G @ asked.mean) + np.vdot(G, asked.covariance) - 2 * statistics.slack.sum()
    return bool(misfit <= count * (1 + _SLACK) and np.all(statistics.slack <= _SLACK * count))


def _length(G: Array, vector: Array) -> float:
    """vᵀG⁺v."""
    eigenvalues, vectors = np.linalg.eigh(G)
    seen = eigenvalues > _RANK * max(eigenvalues[-1], 0.0)
    return float(np.sum((vectors[:, seen].T @ vector) ** 2 / eigenvalues[seen]))


def consistent(told: Sequence[Statistics], moves: Sequence[Move], asked: Posterior, count: int) -> bool:
    """Whether ``count`` rows could have produced the answers at all trial moves; the first must be :func:`possible`.

    Evidence e = −N/2 log 2πσ² − a/2 with a = yᵀy/σ² depends on the noise alone, and that on a move's stretch alone: at
    equal stretch it is equal. At the first move E_q‖y − f‖² = Nσ² gives a_0 = N + 2bᵀm − tr(G E uuᵀ) + 2 Σ slack. As
    yᵀy is the same throughout and a ≥ κ = bᵀG⁺b, e − e_0 ≤ N/2 log(κ/a_0) − ½ (κ − a_0), with N for a smaller κ.
    """
    first = told[0]
    for part in told:
        if not semidefinite(part) or not np.all(part.slack <= _SLACK * count):
            return False
    fitted = 2 * first.shift @ asked.mean - np.vdot(first.precision, asked.second_moment())
    power = count + fitted + 2 * first.slack.sum()
    if power < count * (1 - _SLACK):
        return False
    claimed: dict[float, float] = {}
    for part, move in zip(told, moves, strict=True):
        kappa = max(_length(part.precision, part.shift), count)
        most = 0.5 * count * math.log(kappa / power) - 0.5 * (kappa - power)
        if part.evidence - first.evidence > most + _SLACK * power:
            return False
        same = claimed.setdefault(move.stretch, part.evidence)
        if abs(part.evidence - same) > _SLACK * (count + abs(same)):
            return False
    return True


def semidefinite(statistics: Statistics) -> bool:
    """Whether everything is finite and G positive semi-definite to rounding."""
    if not all(np.isfinite(part).all() for part in (statistics.precision, statistics.shift, statistics.slack)):
        return False
    eigenvalues = np.linalg.eigvalsh(statistics.precision)
    return bool(eigenvalues[0] >= -_RANK * max(eigenvalues[-1], 0.0))
