"""Profile intervals, from the totals that the search for the estimates has.

Of Gaussian models, the deviance of all rows at relative covariances θ, noise σ and fixed effects β is, with
S_ββ = XᵀV⁻¹X and ρ²,

    d = log|V| + N log 2πσ² + [ρ² + (β − β̂)ᵀ S_ββ (β − β̂)] / σ²

and of others −2 log likelihood as a function of (β, θ, shape), known to second order around any point.
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
from scipy.stats import chi2
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.methods.mixed_model.estimates import Expansion, Function, Totals, effect, expanded
from fedgp_flower.typing import Array

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
Around: TypeAlias = Totals | Expansion


@dataclass(frozen=True, slots=True)
class End:
    """One end of an interval, or without a parameter the smallest deviance."""

    centre: Array
    """The θ that totals are known at."""
    start: Array
    """θ, log σ, and of a fixed effect its value, at the smallest deviance; without Gaussian noise (β, θ, shape)."""
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


def weighed(row: Array) -> Function:
    """A fixed effect, of all whitened ones."""
    return lambda at: at[: len(row)] @ torch.tensor(row)


def derivatives(function: Function, point: Array) -> tuple[float, Array, Array]:
    """Value, gradient and Hessian."""
    found = expanded(function, torch.tensor(point))
    return found.value, found.gradient, found.hessian


def lowest(around: Around, centre: Array, start: Array) -> End:
    """The smallest deviance, near the estimates that totals are known at."""
    best = moved(End(centre, start, start), around, 0.0)
    return replace(best, start=best.point)


def first(best: End, around: Around, parameter: Function, row: Array | None, sign: int) -> End:
    """The first step to an end, by the curvature at the smallest deviance as Wald's interval."""
    start = best.point
    if row is not None and isinstance(around, Totals):
        _, factor = around.at(torch.tensor(best.theta - best.centre))
        start = np.append(start, float(effect(factor, row)[0]))
    end = replace(best, start=start, point=start, parameter=parameter, row=row)
    _, slope, _ = derivatives(parameter, start)
    _, _, curvature = derivatives(around.deviance(end.centre, row), start)
    along = np.linalg.solve(curvature, slope)
    reach = sign * SHARES[0] * float(np.sqrt(2 * LEVEL / (slope @ along)))
    return replace(end, point=start + reach * along, multiplier=1 / reach)


def moved(end: End, around: Around, level: float) -> End:
    """As near the end as the totals at its centre tell; ``level`` is the deviance there."""
    function, point, multiplier = around.deviance(end.centre, end.row), end.point, end.multiplier
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
        share = REACH / max(REACH, float(np.abs(step).max()))
        point, multiplier = point + share * step, multiplier + share * change
        if np.abs(step).max() < NEAR:
            break
    right = multiplier * end.multiplier >= 0 and np.isfinite(point).all()
    return replace(end, point=point, multiplier=multiplier, lost=end.lost or not right)


def settled(before: Sequence[End], after: Sequence[End]) -> bool:
    """Whether no end moved any more; those that are lost are given up."""
    kept = [(a, b) for a, b in zip(before, after, strict=True) if not b.lost]
    return all(np.abs(a.point - b.point).max() < SETTLED for a, b in kept)
