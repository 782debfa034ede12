"""Optimisers of torch parameters in place, Adam with explicit state, forecasts, and parameters as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.placement import to_array
from fedgp_flower.typing import Array, NamedArrays

Bound: TypeAlias = tuple[float | None, float | None]
V = TypeVar("V", Tensor, Array)

FREE: Bound = (None, None)
LOGARITHM: Bound = (-LOG_RANGE, LOG_RANGE)
"""Bounds of the logarithm of a hyperparameter."""
COOLING = 0.25
"""Fraction of Adam's steps with a fifth of the learning rate."""
WINDOW, TOLERANCE = 50, 1e-3
"""Adam's steps in a window, and the smallest increase between windows for which it continues, in nats per row."""
PAIRS = 20
"""Steps and gradient changes in the memory of L-BFGS."""


@dataclass(frozen=True)
class AdamState(Generic[V]):
    """Moments of Adam (Kingma & Ba 2015) by name of the parameter, of torch tensors or of arrays.

    first ← first + (1 − β₁)(g − first),  second ← second + (1 − β₂)(g² − second),  with β = (0.9, 0.999).
    """

    step: int = 0
    first: Mapping[str, V] = field(default_factory=dict)
    second: Mapping[str, V] = field(default_factory=dict)

    def update(self, gradient: Mapping[str, V], rate: float) -> tuple[dict[str, V], AdamState[V]]:
        """Return the ascent step, rate · (first / (1 − β₁ᵗ)) / (√(second / (1 − β₂ᵗ)) + 1e-8), and the next state."""

        def as_array(value: Any) -> Any:  # NumPy makes scalars of arrays without axes
            return value if isinstance(value, Tensor) else np.asarray(value)

        step = self.step + 1
        first, second, moves = dict(self.first), dict(self.second), {}
        for name, slope in gradient.items():
            one, two = (moment.get(name, 0.0 * slope) for moment in (self.first, self.second))
            first[name] = as_array(one + 0.1 * (slope - one))
            second[name] = as_array(two + 0.001 * (slope**2 - two))
            scale = second[name] ** 0.5 / (1 - 0.999**step) ** 0.5 + 1e-8
            moves[name] = as_array(rate * (first[name] / ((1 - 0.9**step) * scale)))
        return moves, AdamState(step, first, second)


def ascend(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    name: Literal["sgd", "adam", "lbfgs"],
    steps: int,
    learning_rate: float,
) -> float:
    """Take ascent steps; return the objective before the last step, or the final one of L-BFGS or without steps."""
    if not steps:
        return float(objective().detach())
    if name == "lbfgs":
        return maximise(objective, parameters, max_evaluations=steps)[-1]
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    optimiser = kind([*parameters], lr=learning_rate, maximize=True)
    value = torch.zeros(())
    for _ in range(steps):
        optimiser.zero_grad()
        value = objective()
        torch.autograd.backward(value)
        optimiser.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")
    return float(value.detach())


def adam(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    num_rows: int,
    steps: int,
    learning_rate: float,
    watched: Sequence[float] | None = None,
) -> list[float]:
    """Maximise in place a Monte Carlo objective, a sum over ``num_rows`` rows; return its values.

    The last quarter of the steps has a fifth of the learning rate. It begins early if ``watched``, by default the
    objective, is :func:`flat`.
    """
    optimiser = torch.optim.Adam(parameters, lr=learning_rate, maximize=True)
    values: list[float] = []
    remaining, cooling = steps, round(COOLING * steps)
    while remaining:
        optimiser.zero_grad()
        value = objective()
        if not bool(torch.isfinite(value)):
            raise NumericsError("the objective is not finite. Lower the learning rate.")
        torch.autograd.backward(value)
        if remaining == cooling:
            for group in optimiser.param_groups:
                group["lr"] = 0.2 * learning_rate
        optimiser.step()
        values.append(value.item())
        remaining -= 1
        if remaining > cooling and flat(values if watched is None else watched, num_rows):
            remaining = cooling
    return values


def flat(values: Sequence[float], num_rows: int) -> bool:
    """Whether the mean of the last window exceeds that of the one before by less than the tolerance."""
    if len(values) < 2 * WINDOW or len(values) % WINDOW:
        return False
    earlier, later = np.mean(values[-2 * WINDOW : -WINDOW]), np.mean(values[-WINDOW:])
    return bool(later - earlier < TOLERANCE * num_rows)


def maximise(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    max_evaluations: int,
    bounds: Sequence[Bound] | None = None,
    tolerance: float = 1e-7,
    gradient_tolerance: float = 1e-6,
) -> list[float]:
    """L-BFGS-B on torch parameters, in place; trial points without a finite value are rejected.

    Return the objective at every admissible point, then at the result.
    """
    from scipy.optimize import minimize  # noqa: PLC0415  slow to import, and rarely needed

    values: list[float] = []

    def negative(flat: Array) -> tuple[float, Array]:
        scatter(flat, parameters)
        try:
            value = objective()
            if not bool(torch.isfinite(value)):
                raise NumericsError("the objective is not finite")
            slopes = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        except NumericsError:
            if not values:
                raise
            return 10.0 * abs(values[0]) + 1e6, np.zeros_like(flat)
        values.append(value.item())
        return -value.item(), -gather(slopes)

    limits = [bound for p, bound in zip(parameters, bounds, strict=True) for _ in range(p.numel())] if bounds else None
    options: dict[str, float] = {"maxcor": PAIRS, "maxfun": max_evaluations, "maxiter": max_evaluations}
    options |= {"ftol": tolerance, "gtol": gradient_tolerance}
    end = minimize(negative, gather(parameters), jac=True, method="L-BFGS-B", bounds=limits, options=options)
    scatter(np.asarray(end.x), parameters)
    return [*values, -float(end.fun)]


def gather(tensors: Sequence[Tensor]) -> Array:
    """Tensors as one vector."""
    return np.concatenate([to_array(tensor).ravel() for tensor in tensors])


def scatter(flat: Array, parameters: Sequence[Tensor]) -> None:
    """The inverse: set parameters from one vector."""
    pieces = torch.from_numpy(flat.copy()).split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data.copy_(piece.view_as(parameter))


def outlook(gains: Array, rounds: int) -> float | None:
    """Expected gain of more rounds by a geometric series with r = Σ gᵢ₊₁/Σ gᵢ ≤ 1; None for fewer than three gains."""
    if len(gains) < 3 or gains[:-1].sum() <= 0 or gains[1:].sum() <= 0:
        return None if len(gains) < 3 else 0.0
    ratio = _ratio(gains)
    latest = gains.sum() / (ratio ** -np.arange(len(gains))).sum()
    return float(latest * (ratio ** np.arange(1, rounds + 1)).sum())


def _ratio(gains: Array) -> float:
    return min(1.0, float(gains[1:].sum() / gains[:-1].sum()))


def rounds_to_come(gains: Array, rounds: int, threshold: float) -> int | None:
    """Rounds until the expected gain of ``rounds`` more is below ``threshold``; None if it cannot be determined."""
    gain = outlook(gains, rounds)
    if gain is None or threshold <= 0:
        return None
    if gain < threshold:
        return 0
    ratio = _ratio(gains)
    return None if ratio == 1 else math.ceil(math.log(threshold / gain) / math.log(ratio))


def pack(arrays: Mapping[str, ndarray]) -> Array:
    """Named arrays as one vector w, in the order of their names."""
    return np.concatenate([np.zeros(0), *(np.asarray(arrays[name], np.float64).ravel() for name in sorted(arrays))])


def unpack(point: Array, like: Mapping[str, ndarray]) -> NamedArrays:
    """The inverse of :func:`pack`, with the names and shapes of ``like``."""
    names = sorted(like)
    pieces = np.split(point, np.cumsum([like[name].size for name in names])[:-1])
    return {name: piece.reshape(like[name].shape) for name, piece in zip(names, pieces, strict=True)}
