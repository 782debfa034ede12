"""SFVI-Avg: local steps at the sites; the server averages θ and takes the Wasserstein barycentre of their q(Z_G).

Hassan, Salomone and Mengersen, *Federated variational inference methods for structured latent variable models* (2023),
Algorithm 2. A site takes many steps on a bound that stands in for all sites, and moves its q(Z_Lk | Z_G) to the new
μ_G when it next reads it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.barycentre import Barycentre, barycentre, wasserstein_distance
from fedgp_flower.methods.sfvi.messages import LocalEnd, LocalEndSum, LocalStepsRequest
from fedgp_flower.methods.sfvi.options import SFVIAvgOptions, SFVIOptions
from fedgp_flower.typing import Array, NamedArrays
from strategies.server.questions import Asking, Each, Figures, Refuse, Roster, Summed, Total
from strategies.sfvi_state import Averaged, SFVIState, StructuredVI

logger = logging.getLogger("fedgp")

DECAYS = (0.9, 0.999)
"""Of Adam's moments."""


@dataclass(frozen=True, slots=True)
class SFVIPlan:
    """How a round of SFVI-Avg goes."""

    options: SFVIOptions
    seed: int
    rate: float
    """Of the sites' steps in this round."""


def one_round(state: SFVIState, roster: Roster, plan: SFVIPlan) -> Asking[tuple[SFVIState, Figures]]:
    """Algorithm 2 of the paper. The server asks :class:`Each` site: a barycentre is not made of a sum.

    That of diagonal Gaussians is, so that where there are totals only, it asks for one.
    """
    rows = sum(roster.rows.values())
    request = LocalStepsRequest(state.parameters, plan.rate, float(rows))  # 1. sites take m steps from {θ, η_G}
    if roster.totals_only:
        return (yield from _averaged_total(state, request, roster))
    answers: dict[str, LocalEnd] = yield Each(LocalEnd, dict.fromkeys(roster.sites, request))
    limit = move_limit(plan.rate, plan.options.local_steps)
    for site, reason in too_far(answers, state.parameters, limit).items():
        yield Refuse(site, reason)
        del answers[site]
    if not answers:
        return state, {}
    state = state.joined(answers, sum(end.fresh for end in answers.values()))
    weights = np.array([float(roster.rows[site]) for site in answers])
    try:
        mean = average([end.values for end in answers.values()], weights)  # 2. mean of θ, barycentre of q(Z_G)
    except NumericsError as error:
        logger.warning("round %d: parameters stay as they were: %s", roster.round, error)
        return state, {}
    spread = dict(zip(answers, mean.spread, strict=True))
    estimate = float(np.average([end.objective for end in answers.values()], weights=weights))
    state, figures = averaged(state, mean, spread, estimate, rows)
    return state, {**figures, "spread": float(np.mean(mean.spread))}


def _averaged_total(state: SFVIState, request: LocalStepsRequest, roster: Roster) -> Asking[tuple[SFVIState, Figures]]:
    """The same from Σ w, Σ w θ, Σ w μ and Σ w σ; how far sites are from one another is not known then."""
    summed: Summed[LocalEndSum] = yield Total(LocalEndSum, request, retries=0)
    if summed.total is None or summed.silent:
        return state, {}
    end = summed.total.mean()
    state = state.joined(summed.sites, summed.total.fresh)
    return averaged(state, average([end.values], np.ones(1)), {}, end.objective, sum(roster.rows.values()))


def averaged(
    state: SFVIState, mean: Average, spread: Mapping[str, float], estimate: float, rows: int
) -> tuple[SFVIState, Figures]:
    """The state at an average, and how it was reached."""
    centre = mean.centre
    how = Averaged(centre.iterations, centre.residual, spread, estimate)
    figures = {"barycentre_iterations": float(centre.iterations), "barycentre_residual": centre.residual}
    return replace(state, parameters=mean.parameters, averaged=how), {"site_estimate": estimate / rows, **figures}


@dataclass(frozen=True, slots=True)
class Average:
    """The parameters after a round, the barycentre in them, and W₂ from each site's q(Z_G) to it."""

    parameters: NamedArrays
    centre: Barycentre
    spread: Sequence[float]


def average(sites: Sequence[Mapping[str, np.ndarray]], weights: Array, *, tolerance: float = 1e-10) -> Average:
    """θ ← Σ wₖ θₖ and q(Z_G) ← Wasserstein barycentre of the sites' q(Z_G), weights divided by their sum.

    Raises:
        NumericsError: there is no barycentre, or the iteration does not converge.
    """
    shares = weights / weights.sum()
    means = np.stack([site["q.mean"] for site in sites])
    factors = np.stack([factor(site) for site in sites])
    centre = barycentre(means, factors, weights, tolerance=tolerance)
    merged: NamedArrays = {
        name: np.asarray(np.tensordot(shares, np.stack([site[name] for site in sites]), 1))
        for name in sites[0]
        if name.startswith("theta.")
    }
    scale = centre.factor if centre.factor.ndim == 1 else np.diagonal(centre.factor)
    merged |= {"q.mean": centre.mean, "q.log_scale": np.log(scale)}
    if centre.factor.ndim == 2:
        lower = centre.factor / scale[:, None]
        merged["q.lower"] = lower[np.tril_indices(len(lower), -1)]
    spread = [wasserstein_distance(centre.mean, centre.factor, m, f) for m, f in zip(means, factors, strict=True)]
    return Average(merged, centre, spread)


def factor(parameters: Mapping[str, np.ndarray]) -> Array:
    """diag(σ) L [M, M], a factor of the covariance of q(Z_G); σ [M] itself when q is diagonal."""
    scale = np.exp(parameters["q.log_scale"])
    if "q.lower" not in parameters:
        return scale
    lower: Array = np.eye(len(scale))
    lower[np.tril_indices(len(scale), -1)] = parameters["q.lower"]
    return scale[:, None] * lower


def move_limit(rate: float, steps: int) -> float:
    """The farthest that ``steps`` steps of Adam can carry any parameter.

    By Cauchy-Schwarz |m| ≤ (1 − β₁) / √((1 − β₂) (1 − β₁²/β₂)) √v, whatever the gradients; the corrections for the
    start of the moments only make a step smaller.
    """
    one, two = DECAYS
    return rate * steps * (1 - one) / math.sqrt((1 - two) * (1 - one**2 / two))


def too_far(answers: Mapping[str, LocalEnd], sent: Mapping[str, np.ndarray], limit: float) -> dict[str, str]:
    """Sites whose parameters are farther from those sent than local steps can have gone."""
    refused = {}
    for site, end in answers.items():
        for name, array in end.values.items():
            farthest = float(np.abs(array - sent[name]).max(initial=0.0))
            if farthest > limit * (1 + 1e-9):
                refused[site] = f"`{name}` moved by {farthest:.3g}; its steps reach no farther than {limit:.3g}"
                break
    return refused


class SFVIAvg(StructuredVI):
    """Rounds of local steps and averages."""

    method = "sfvi-avg"
    watched = "site_estimate"
    options_class = SFVIAvgOptions

    def one_round(self, state: SFVIState, roster: Roster) -> Asking[tuple[SFVIState, Figures]]:
        """Algorithm 2 of the paper."""
        return (yield from one_round(state, roster, SFVIPlan(self.options, self.config.seed, self.rate(roster.round))))
