"""Profile intervals of Gaussian mixed models, from the totals that restricted maximum likelihood has.

The deviance of all rows at relative covariances θ, noise σ and fixed effects β, with S_ββ = XᵀV⁻¹X and ρ², is

    d = log|V| + N log 2πσ² + [ρ² + (β − β̂)ᵀ S_ββ (β − β̂)] / σ²

The 95 % interval of a parameter f holds its values where the smallest d is at most min d + 3.84 (Bates et al. 2015,
Section 5.1; lme4's ``confint``). At an end f is largest, or least, among the parameters with that d: f' = μ d' and
d = min d + 3.84 (Venzon and Moolgavkar 1988), solved by Newton's method around the θ that the totals are known at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import chi2
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.methods.mixed_model.effects import LOG_2PI
from fedgp_flower.methods.mixed_model.estimates import Totals, expanded
from fedgp_flower.typing import Array, Scalar

LEVEL = float(chi2.ppf(0.95, 1))
SHARES = (0.4, 0.7, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Of √3.84 that each exchange goes to: what is far away is found from what is near."""
INNER = 12
"""Steps of Newton's method between two exchanges, at most."""
REACH = 0.7
"""Largest step in log σ, in θ, and in a fixed effect's standard errors."""
NEAR, SETTLED = 1e-8, 1e-6

Spread: TypeAlias = Callable[[Tensor], Tensor]
"""Several parameters, as (θ, log σ) goes."""
Function: TypeAlias = Callable[[Tensor], Scalar]
"""Of θ and log σ; of a fixed effect also its value, in the last entry."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of an interval, or without a parameter the smallest deviance."""

    centre: Array
    """The θ that totals are known at."""
    start: Array
    """θ, log σ, and of a fixed effect its value, at the smallest deviance."""
    point: Array
    """The same here."""
    parameter: Function | None = None
    row: Array | None = None
    """The fixed effect among whitened ones."""
    multiplier: float = 0.0
    """μ."""
    lost: bool = False
    """Whether the steps led nowhere."""

    @property
    def theta(self) -> Array:
        """Where the totals are wanted next."""
        return self.point[: len(self.centre)]

    def farther(self, share: float) -> End:
        """So many times as far from the smallest deviance."""
        point = self.start + share * (self.point - self.start)
        return replace(self, point=point, multiplier=self.multiplier / share)


def entry(k: int, spread: Spread = torch.Tensor.clone) -> Function:
    """One of several parameters; by itself an entry of the point."""
    return lambda at: spread(at)[k]


def deviance(totals: Totals, end: End) -> Function:
    """The function d around the θ of the totals; over all other fixed effects at their best."""
    size, centre = len(end.centre), torch.tensor(end.centre)

    def value(point: Float[Tensor, " P"]) -> Scalar:
        log_v, factor = totals.at(point[:size] - centre)
        rest, log_noise = factor[-1, -1].square(), point[size]
        if end.row is not None:
            best, variance = effect(factor, end.row)
            rest = rest + (point[-1] - best).square() / variance
        return log_v + totals.count * (2 * log_noise + LOG_2PI) + rest * (-2 * log_noise).exp()

    return value


def effect(factor: Float[Tensor, "R R"], row: Array) -> tuple[Scalar, Scalar]:
    """The best value of a fixed effect and its variance, in units of σ²."""
    seen = torch.linalg.solve_triangular(factor[:-1, :-1], torch.tensor(row)[:, None], upper=False)[:, 0]
    return seen @ factor[-1, :-1], seen.square().sum()


def derivatives(function: Function, point: Array) -> tuple[float, Array, Array]:
    """Value, gradient and Hessian."""
    found = expanded(function, torch.tensor(point))
    return found.value, found.gradient, found.hessian


def lowest(totals: Totals, theta: Array, log_noise: float) -> End:
    """The smallest deviance, near the estimates that totals are known at."""
    start = np.append(theta, log_noise)
    best = moved(End(theta, start, start), totals, 0.0)
    return replace(best, start=best.point)


def first(best: End, totals: Totals, parameter: Function, row: Array | None, sign: int) -> End:
    """The first step to an end, by the curvature at the smallest deviance as Wald's interval."""
    start = best.point
    if row is not None:
        _, factor = totals.at(torch.tensor(best.theta - best.centre))
        start = np.append(start, float(effect(factor, row)[0]))
    end = replace(best, start=start, point=start, parameter=parameter, row=row)
    _, slope, _ = derivatives(parameter, start)
    _, _, curvature = derivatives(deviance(totals, end), start)
    along = np.linalg.solve(curvature, slope)
    reach = sign * SHARES[0] * float(np.sqrt(2 * LEVEL / (slope @ along)))
    return replace(end, point=start + reach * along, multiplier=1 / reach)


def moved(end: End, totals: Totals, level: float) -> End:
    """As near the end as the totals at its centre tell; ``level`` is the deviance there."""
    function, point, multiplier = deviance(totals, end), end.point, end.multiplier
    for _ in range(INNER * (not end.lost)):
        try:
            value, slope, curvature = derivatives(function, point)
            if end.parameter is None:
                step, change = np.linalg.solve(curvature, -slope), 0.0
            else:
                _, along, bend = derivatives(end.parameter, point)
                left = np.block([[bend - multiplier * curvature, -slope[:, None]], [-slope, np.zeros(1)]])
                step = np.linalg.solve(left, np.append(multiplier * slope - along, value - level))
                step, change = step[:-1], float(step[-1])
        except (NumericsError, np.linalg.LinAlgError):
            return replace(end, lost=True)
        share = min(1.0, REACH / float(np.abs(step).max()))
        point, multiplier = point + share * step, multiplier + share * change
        if np.abs(step).max() < NEAR:
            break
    right = multiplier * end.multiplier >= 0 and np.isfinite(point).all()
    return replace(end, point=point, multiplier=multiplier, lost=end.lost or not right)


def settled(before: Sequence[End], after: Sequence[End]) -> bool:
    """Whether no end moved any more; those that are lost are given up."""
    kept = [(a, b) for a, b in zip(before, after, strict=True) if not b.lost]
    return all(np.abs(a.point - b.point).max() < SETTLED for a, b in kept)
