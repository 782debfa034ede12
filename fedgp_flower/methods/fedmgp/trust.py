"""Checks of unit statistics in exact rounds: real rows could produce them, and the unit shares g with most others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from fedgp_flower.errors import NumericsError, ProtocolError
from fedgp_flower.messages import add
from fedgp_flower.methods.fedmgp.latents import LatentPosterior, Move, UnitStatistics, shared_evidence
from fedgp_flower.typing import Array

START_NOISE = 0.09
"""Noise variance of a unit's starting parameters, relative to the mean square of its targets."""
_RANK = 1e-9
"""Eigenvalues of G below this fraction of the largest count as rounding error."""
_SLACK = 1e-6
"""Allowed rounding error per row."""


def best_lead(starts: Mapping[str, UnitStatistics]) -> str:
    """The site that shares g, up to sign, with most others, by the median over sites; bad sites may be a minority."""
    starts = {site: start for site, start in starts.items() if semidefinite(start)}
    valid, same = _gains(starts)
    if not valid:
        raise ProtocolError("no site sent starting statistics that data can produce; one is enough")
    return valid[int(np.argmax(_medians(np.fmax(same, _gains(starts, sign=-1.0)[1]))))]


def sharing(usable: Mapping[str, UnitStatistics]) -> tuple[str, ...]:
    """Units m whose median over k of log p(m, k share g) − log p(they do not) is positive, or the only unit."""
    valid, gains = _gains(usable)
    return tuple(s for s, middle in zip(valid, _medians(gains), strict=True) if middle > 0 or len(usable) == 1)


def _gains(statistics: Mapping[str, UnitStatistics], sign: float = 1.0) -> tuple[tuple[str, ...], Array]:
    """Sites by name, and the :func:`shared_evidence` of each pair, m and ``sign`` · k, less the single ones, or NaN."""
    single = {site: value for site in sorted(statistics) if math.isfinite(value := _evidence(statistics[site]))}
    gains = np.full((len(single), len(single)), np.nan)
    for (i, m), (j, k) in combinations(enumerate(single), 2):
        other = replace(statistics[k], shift=sign * statistics[k].shift)
        gains[i, j] = gains[j, i] = _evidence(add([statistics[m], other])) - single[m] - single[k]
    return tuple(single), gains


def _medians(gains: Array) -> list[float]:
    """Row medians of the finite entries; −∞ for a row without any."""
    finite = (row[np.isfinite(row)] for row in gains)
    return [float(np.median(row)) if row.size else -math.inf for row in finite]


@np.errstate(over="ignore", invalid="ignore")
def _evidence(statistics: UnitStatistics) -> float:
    """:func:`shared_evidence`, NaN where it cannot be computed."""
    try:
        return shared_evidence(statistics)
    except NumericsError:
        return math.nan


def possible_start(statistics: UnitStatistics, count: int) -> bool:
    """Whether any ``count`` rows could have produced these statistics at a unit's starting parameters.

    There σ² = :data:`START_NOISE` · yᵀy/N and the prior variance of f is yᵀy/N, so that with a = N / START_NOISE both
    yᵀy/σ² and tr G − 2 Σ slack are a; hence bᵀG⁺b ≤ a. This bounds the influence of a unit by its number of rows.
    """
    if not semidefinite(statistics, count):
        return False
    bound = count / START_NOISE * (1 + _SLACK)
    within = np.trace(statistics.precision) - 2 * statistics.slack.sum() <= bound
    return bool(within and _quadratic(statistics.precision, statistics.shift) <= bound)


@np.errstate(over="ignore")
def _quadratic(G: Array, vector: Array) -> float:
    """vᵀ(G + εI)⁻¹v ≤ vᵀG⁺v for v in the range of G, and large for any other v; ε is the rounding error of G."""
    eigenvalues, vectors = np.linalg.eigh(G)
    rounding = max(_RANK * float(eigenvalues[-1]), np.finfo(float).tiny)
    return float(np.sum((vectors.T @ vector) ** 2 / (np.maximum(eigenvalues, 0.0) + rounding)))


def consistent(answers: Sequence[UnitStatistics], moves: Sequence[Move], asked: LatentPosterior, count: int) -> bool:
    """Whether ``count`` rows could have produced the answers at all trial moves, the first of which is no move.

    A unit that took its M-step has E_q‖y − f‖² = Nσ² at the first move, hence a_0 = N + 2bᵀm − tr(G E uuᵀ) + 2 Σ slack
    with a = yᵀy/σ² ≥ κ = bᵀG⁺b, and (b − Gm)ᵀG⁺(b − Gm) + tr(GV) − 2 Σ slack ≤ N; a scaled or flipped answer violates
    this. Evidence e = −N/2 log 2πσ² − a/2 depends only on the noise, and that only on the stretch of a move. As yᵀy is
    constant, e − e_0 ≤ N/2 log(κ/a_0) − ½ (κ − a_0), with N for a smaller κ.
    """
    if not all(semidefinite(part, count) for part in answers):
        return False
    first, G, b = answers[0], answers[0].precision, answers[0].shift
    misfit = _quadratic(G, b - G @ asked.mean) + np.vdot(G, asked.covariance) - 2 * first.slack.sum()
    power = count + 2 * b @ asked.mean - np.vdot(G, asked.second_moment()) + 2 * first.slack.sum()
    if misfit > count * (1 + _SLACK) or power < count * (1 - _SLACK):
        return False
    evidences: dict[float, float] = {}
    for part, move in zip(answers, moves, strict=True):
        kappa = max(_quadratic(part.precision, part.shift), count)
        same = evidences.setdefault(move.stretch, part.evidence)
        most = 0.5 * count * math.log(kappa / power) - 0.5 * (kappa - power)
        if part.evidence - first.evidence > most + _SLACK * power:
            return False
        if abs(part.evidence - same) > _SLACK * (count + abs(same)):
            return False
    return True


def semidefinite(statistics: UnitStatistics, count: int | None = None) -> bool:
    """Whether the arrays are finite, G is positive semi-definite and, given ``count``, no slack is positive."""
    if not all(np.isfinite(part).all() for part in (statistics.precision, statistics.shift, statistics.slack)):
        return False
    eigenvalues = np.linalg.eigvalsh(statistics.precision)
    within = count is None or bool(np.all(statistics.slack <= _SLACK * count))
    return within and bool(eigenvalues[0] >= -_RANK * max(eigenvalues[-1], 0.0))
