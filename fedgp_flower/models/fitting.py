"""Maximising an objective over torch parameters: a few steps of an optimiser, or L-BFGS to convergence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedgp_flower.config import OptimizerSection
from fedgp_flower.errors import NumericsError
from fedgp_flower.linalg import LOG_RANGE
from fedgp_flower.models.placement import to_array
from fedgp_flower.shapes import Array


def ascend(
    objective: Callable[[], Tensor], parameters: Sequence[Tensor], optimizer: OptimizerSection, *, learning_rate: float
) -> float:
    """Take ``optimizer.steps`` ascent steps; returns the objective before the last step.

    Raises:
        NumericsError: if a parameter is not finite afterwards, so that a diverged step is never sent.
    """
    if optimizer.name == "lbfgs":
        return maximise(objective, parameters, max_evaluations=optimizer.steps)[0]
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer.name]
    stepper = kind([*parameters], lr=learning_rate, maximize=True)
    value = torch.zeros(())
    for _ in range(optimizer.steps):
        stepper.zero_grad()
        value = objective()
        value.backward()
        stepper.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")
    return float(value.detach())


def maximise(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    max_evaluations: int,
    bounded: Sequence[bool] | None = None,
    tolerance: float = 1e-7,
) -> tuple[float, int]:
    """L-BFGS-B on the parameters in place; returns the best value and the evaluations it took.

    Args:
        objective: Recomputes the value at the parameters' current data.
        parameters: Leaves to optimise; they hold the best point afterwards.
        max_evaluations: Bound on the calls of ``objective``.
        bounded: Which parameters are logarithms, kept within ± ``LOG_RANGE``; default none.
        tolerance: Relative change of the value at which it stops.
    """
    flags = [False] * len(parameters) if bounded is None else bounded

    def value_and_gradient(point: Array) -> tuple[float, Array]:
        _assign(parameters, point)
        value = objective()
        gradients = torch.autograd.grad(value, list(parameters), allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return -float(value.detach()), -_flatten(flat)

    limits = [
        (-LOG_RANGE, LOG_RANGE) if f else (None, None)
        for f, p in zip(flags, parameters, strict=True)
        for _ in range(p.numel())
    ]
    options = {"maxcor": 20, "maxfun": max_evaluations, "maxiter": max_evaluations, "ftol": tolerance, "gtol": 1e-6}
    result = minimize(
        value_and_gradient, _flatten(parameters), jac=True, method="L-BFGS-B", bounds=limits, options=options
    )
    _assign(parameters, result.x)
    return -float(result.fun), int(result.nfev)


def _flatten(tensors: Sequence[Tensor]) -> Array:
    return np.concatenate([to_array(tensor).ravel() for tensor in tensors])


def _assign(parameters: Sequence[Tensor], point: Array) -> None:
    pieces = torch.from_numpy(point).split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data.copy_(piece.view_as(parameter))
