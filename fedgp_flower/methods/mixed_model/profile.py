"""Profile likelihood intervals, from the same sums as the estimates.

For Gaussian models, the deviance at relative covariances θ, noise σ and fixed effects β is, with S_ββ = XᵀV⁻¹X and ρ²,

    d = log|V| + N log 2πσ² + [ρ² + (β − β̂)ᵀ S_ββ (β − β̂)] / σ².

For other models, d is −2 log likelihood as a function of (β, θ, shape), by its second-order expansion around a point.
The 95 % interval of a parameter f contains the values with minimal d at most min d + 3.84 (Bates et al. 2015, Section
5.1; lme4's ``confint``). An endpoint maximises or minimises f among the parameters with that d: f' = μ d' and
d = min d + 3.84 (Venzon and Moolgavkar 1988). Newton's method solves these equations around the θ of the sums.
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
"""Fractions of √3.84 that successive exchanges aim at; a near endpoint is the start for a farther one."""
INNER = 12
"""Largest number of Newton steps between two exchanges."""
REACH = 0.7
"""Largest Newton step of log σ, of θ, and of a fixed effect in standard errors."""
NEAR, SETTLED = 1e-8, 1e-6
"""Largest final Newton step, and largest final move of an endpoint between two exchanges."""
AT_LEVEL, CLOSE = 1e-4, 0.01
"""Largest error of the deviance at a reported endpoint, and largest final change of the parameter."""

Spread: TypeAlias = Callable[[Tensor], Tensor]
"""Several parameters as a function of (θ, log σ)."""
Around: TypeAlias = Totals | Expansion


@dataclass(frozen=True, slots=True)
class End:
    """One endpoint of an interval; without a parameter, the minimum of the deviance."""

    centre: Array
    """The θ of the sums."""
    start: Array
    """The minimum of the deviance: (θ, log σ) and a fixed effect, or (β, θ, shape) without Gaussian noise."""
    point: Array
    """The same parameters at this endpoint."""
    parameter: Function | None = None
    row: Array | None = None
    """The fixed effect as a linear combination of the whitened ones."""
    multiplier: float = 0.0
    """The Lagrange multiplier μ."""
    lost: bool = False
    """Whether Newton's method failed."""
    solved: bool = False
    """Whether the deviance at this endpoint was that wanted, with the last sums."""

    @property
    def theta(self) -> Array:
        """The θ at which the next exchange evaluates the sums."""
        return self.point[: len(self.centre)]

    def farther(self, share: float) -> End:
        """The endpoint ``share`` times as far from the minimum of the deviance."""
        point = self.start + share * (self.point - self.start)
        return replace(self, point=point, multiplier=self.multiplier / share)


def entry(k: int, spread: Spread = torch.Tensor.clone) -> Function:
    """The function that returns entry ``k`` of ``spread``, by default of the point itself."""
    return lambda at: spread(at)[k]


def combination(row: Array) -> Function:
    """The function that returns a fixed effect, a linear combination of the whitened ones."""
    return lambda at: at[: len(row)] @ torch.tensor(row)


def minimum(around: Around, centre: Array, start: Array) -> End:
    """The minimum of the deviance, from the estimates ``start``."""
    best = newton(End(centre, start, start), around, 0.0)
    return replace(best, start=best.point)


def first_step(best: End, around: Around, parameter: Function, row: Array | None, sign: int) -> End:
    """The first step to an endpoint: a fraction of the Wald interval, by the curvature at the minimum."""
    start = best.point
    if row is not None and isinstance(around, Totals):
        _, factor = around.at(torch.tensor(best.theta - best.centre))
        start = np.append(start, float(effect(factor, row)[0]))
    end = replace(best, start=start, point=start, parameter=parameter, row=row)
    slope = expanded(parameter, torch.tensor(start)).gradient
    curvature = expanded(around.deviance(end.centre, row), torch.tensor(start)).hessian
    direction = np.linalg.solve(curvature, slope)
    length = sign * SHARES[0] * float(np.sqrt(2 * LEVEL / (slope @ direction)))
    return replace(end, point=start + length * direction, multiplier=1 / length)


def newton(end: End, around: Around, level: float) -> End:
    """The endpoint after Newton's method with the sums at its centre; ``level`` is the deviance at the endpoint."""
    function, point, multiplier = around.deviance(end.centre, end.row), end.point, end.multiplier
    solved = False
    for _ in range(INNER * (not end.lost)):
        try:
            here = expanded(function, torch.tensor(point))
            if end.parameter is None:
                step, change = np.linalg.solve(here.hessian, -here.gradient), 0.0
            else:
                aim, slope = expanded(end.parameter, torch.tensor(point)), here.gradient
                matrix = np.block([[aim.hessian - multiplier * here.hessian, -slope[:, None]], [-slope, np.zeros(1)]])
                step = np.linalg.solve(matrix, np.append(multiplier * slope - aim.gradient, here.value - level))
                step, change = step[:-1], float(step[-1])
        except (NumericsError, np.linalg.LinAlgError):
            return replace(end, lost=True)
        share = REACH / max(REACH, float(np.abs(step).max()))
        point, multiplier = point + share * step, multiplier + share * change
        solved = abs(here.value - level) < AT_LEVEL
        if np.abs(step).max() < NEAR:
            break
    valid = multiplier * end.multiplier >= 0 and np.isfinite(point).all()
    return replace(end, point=point, multiplier=multiplier, lost=end.lost or not valid, solved=solved)


def settled(before: Sequence[End], after: Sequence[End]) -> bool:
    """Whether no endpoint moved by :data:`SETTLED` or more; lost endpoints do not count."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if not b.lost]
    return all(np.abs(a.point - b.point).max() < SETTLED for a, b in pairs)


def reached(parameter: Function, before: End, after: End) -> bool:
    """Whether an endpoint can be reported: it has the wanted deviance, and its parameter changed by little."""
    change = parameter(torch.tensor(after.point)) - parameter(torch.tensor(before.point))
    return after.solved and not after.lost and abs(float(change)) < CLOSE
