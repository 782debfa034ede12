"""Maximisers for local objectives: Adam with a stopping rule for noisy ones, L-BFGS for deterministic ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from torch import Tensor

from fedgp_flower.errors import NumericsError

Reason = Literal["converged", "budget"]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Adam with one drop of the learning rate and a stop when window means no longer rise."""

    steps: int = 150
    learning_rate: float = 0.03
    final_fraction: float = 0.25
    """Share of the steps taken at a fifth of the learning rate."""
    window: int = 50
    """Steps averaged before two windows are compared: the objective is noisy."""
    tolerance: float = 1e-3
    """Smallest rise between windows worth going on for, in nats per row."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What an optimiser did."""

    values: tuple[float, ...]
    """Objective at every evaluation; after L-BFGS the last one is that of the point returned."""
    reason: Reason
    rejected: int = 0
    """Trial points at which a matrix lost positive definiteness; the line search stepped back from them."""


def adam(objective: Callable[[], Tensor], parameters: Sequence[Tensor], settings: AdamSettings, num_rows: int) -> Trace:
    """Maximise a noisy objective in place.

    Args:
        objective: Draws its own samples at every call; scalar, nats.
        parameters: Leaves with ``requires_grad``.
        settings: Steps, learning rate, stopping rule.
        num_rows: Rows the objective is summed over; scales the tolerance.

    Raises:
        NumericsError: the objective is not finite.
    """
    optimiser = torch.optim.Adam(parameters, lr=settings.learning_rate)
    values: list[float] = []
    remaining = settings.steps
    cooling = round(settings.final_fraction * settings.steps)
    reason: Reason = "budget"
    while remaining:
        optimiser.zero_grad()
        loss: Tensor = -objective()
        if not bool(torch.isfinite(loss)):
            raise NumericsError("the local free energy is not finite. Lower `pvi.learning-rate`.")
        torch.autograd.backward(loss)
        if remaining == cooling:
            for group in optimiser.param_groups:
                group["lr"] = 0.2 * settings.learning_rate
        optimiser.step()
        values.append(-loss.item())
        remaining -= 1
        if remaining > cooling and _flat(values, settings, num_rows):
            remaining, reason = cooling, "converged"
    return Trace(tuple(values), reason)


def _flat(values: Sequence[float], settings: AdamSettings, num_rows: int) -> bool:
    """Whether the last window's mean is no higher than the one's before it, beyond the tolerance."""
    window = settings.window
    if len(values) < 2 * window or len(values) % window:
        return False
    earlier, later = np.mean(values[-2 * window : -window]), np.mean(values[-window:])
    return bool(later - earlier < settings.tolerance * num_rows)


class _Negative:
    """Value and gradient of −objective at a flat vector, as SciPy wants them, with a record of all evaluations."""

    def __init__(self, objective: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
        self.objective = objective
        self.parameters = parameters
        self.values: list[float] = []
        self.rejected = 0

    def __call__(self, flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        _scatter(flat, self.parameters)
        try:
            value, slopes = self._evaluate()
        except NumericsError:
            if not self.values:
                raise
            self.rejected += 1
            return 10.0 * abs(self.values[0]) + 1e6, np.zeros_like(flat)
        self.values.append(value)
        return -value, -_gather(slopes)

    def _evaluate(self) -> tuple[float, list[Tensor]]:
        value = self.objective()
        if not bool(torch.isfinite(value)):
            raise NumericsError("the objective is not finite")
        slopes = torch.autograd.grad(value, self.parameters, allow_unused=True)
        pairs = zip(self.parameters, slopes, strict=True)
        return value.item(), [torch.zeros_like(p) if g is None else g for p, g in pairs]


def lbfgs(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    max_evaluations: int,
    tolerance: float = 1e-3,
    upper: Sequence[float] = (),
) -> Trace:
    """Maximise a deterministic objective in place, with SciPy's L-BFGS-B.

    A trial point at which a matrix is not positive definite counts as very bad, so that the line search steps back.

    Args:
        objective: The same function at every call: samples must be fixed. Scalar, nats.
        parameters: Leaves with ``requires_grad``.
        max_evaluations: Budget of value-and-gradient evaluations.
        tolerance: Stop when an iteration gains less than this, relative to max(|value|, 1), times 1e-3.
        upper: Largest value of the entries of each parameter; without it none has one.

    Raises:
        NumericsError: already the starting point is not admissible.
    """
    negative = _Negative(objective, parameters)
    limits = [limit for p, limit in zip(parameters, upper, strict=True) for _ in range(p.numel())] if upper else None
    result = minimize(
        negative,
        _gather(parameters),
        jac=True,
        method="L-BFGS-B",
        bounds=None if limits is None else Bounds(-np.inf, limits),
        options={"maxfun": max_evaluations, "maxiter": max_evaluations, "ftol": 1e-3 * tolerance, "maxcor": 20},
    )
    _scatter(result.x, parameters)
    values = (*negative.values, -float(result.fun))
    return Trace(values, "converged" if result.success else "budget", negative.rejected)


def _gather(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([t.detach().numpy().ravel() for t in tensors]).astype(np.float64)


def _scatter(flat: NDArray[np.float64], parameters: Sequence[Tensor]) -> None:
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.data.copy_(torch.from_numpy(flat[start:stop].copy()).view_as(parameter))
        start = stop
