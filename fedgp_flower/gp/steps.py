"""Steps at common values of the inputs, which no smooth function follows.

Ages, doses and amounts are often whole or round numbers, and what happens at one of them says little about the next.
A GP gets an additive term h(x) = Σ_d Σ_{c < x_d} w_c with independent w_c ~ N(0, a_d): for each input d a random walk
over its common values, with a step w_c at each cut c between two of them. The steps are inducing variables beside f(Z),
with cov(w_c, f(x)) = a_d if c < x_d and 0 otherwise (inter-domain, Lázaro-Gredilla and Figueiras-Vidal 2009).
In an array of inducing points a row with x_d = c and :data:`ABSENT` elsewhere stands for w_c.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor

from fedgp_flower.typing import Array

ABSENT = 2.0**40
"""Stands for the other inputs of a step."""
STEPS_PRIOR = 1.5
"""Standard deviation of the prior of log a_d, whose mean is −log(P_d G) for P_d cuts and G inputs with steps."""
RANGE = 6.0
"""Common values are counted in bins between −RANGE and RANGE, standardised; the outer bins are unbounded."""
BINS, ENTRIES = 4096, 2**18
"""Most bins of an input, and of all inputs together."""
NEARLY_ALL = 0.9
"""Least share of the rows that have a common value of an input with steps."""
MOST_STEPS = 400
"""Largest number of steps."""


def num_bins(num_inputs: int) -> int:
    """Return the number of bins of each input."""
    return min(BINS, ENTRIES // num_inputs)


def common_values(inputs: Array, least: int) -> tuple[Array, Array]:
    """Return the rows [D, B] with a value that at least ``least`` rows share, and the sums [D, B] of these values."""
    bins = num_bins(inputs.shape[1])
    rows, sums = np.zeros((2, inputs.shape[1], bins))
    for column, (counts, totals) in zip(inputs.T, zip(rows, sums, strict=True), strict=True):
        values, shared = np.unique(column, return_counts=True)
        values, shared = values[shared >= least], shared[shared >= least]
        places = ((values / RANGE + 1) / 2 * bins).astype(np.int64).clip(0, bins - 1)
        np.add.at(counts, places, shared)
        np.add.at(totals, places, shared * values)
    return rows, sums


def step_points(rows: Array, sums: Array, count: float) -> Array:
    """Return the inducing points [P, D] of the steps, from totals of :func:`common_values` over ``count`` rows.

    An input has steps if nearly all of its rows have a common value and there are more than two. A single input has
    none, since its steps could not be told from its points.
    """
    num_inputs = len(rows)
    stepped = (rows.sum(1) >= NEARLY_ALL * count) & ((rows > 0).sum(1) > 2)
    if num_inputs == 1 or not stepped.any():
        return np.empty((0, num_inputs))
    known = {d: np.flatnonzero(rows[d]) for d in np.flatnonzero(stepped)}
    gaps = np.array([len(filled) - 1 for filled in known.values()])
    limit = next(n for n in range(gaps.max(), 0, -1) if np.minimum(gaps, n).sum() <= MOST_STEPS or n == 1)
    points = []
    for d, filled in known.items():
        values = sums[d, filled] / rows[d, filled]
        reached = np.cumsum(np.sqrt(rows[d, filled]))
        wanted = np.linspace(0, reached[-1], limit + 2)[1:-1] if len(filled) > limit + 1 else reached[:-1]
        below = np.unique(np.searchsorted(reached[:-1], wanted).clip(0, len(filled) - 2))
        points.append(np.full((len(below), num_inputs), ABSENT))
        points[-1][:, d] = (values[below] + values[below + 1]) / 2
    return np.concatenate(points)


def are_steps(points: Float[Tensor, "*B N D"]) -> Bool[Tensor, "*B N"]:
    """Return which rows stand for a step."""
    return (points == ABSENT).any(-1)


class WithSteps(Kernel):
    """k(x, z) + Σ_d a_d min(r_d(x), r_d(z)), where r_d(x) is the number of cuts of input d below x_d.

    ``inner`` is the kernel k of whole rows. Some of the inducing points [M, D] stand for steps.
    """

    def __init__(self, inner: Kernel, points: Tensor) -> None:
        super().__init__()
        self.inner, steps = inner, points.detach()[are_steps(points)]
        self.register_buffer("input", (steps != ABSENT).long().argmax(1))
        self.register_buffer("cut", steps.gather(1, self.input[:, None])[:, 0])
        _, group, count = torch.unique(self.input, return_inverse=True, return_counts=True)
        self.register_buffer("group", group)
        self.register_buffer("log_mean", -(count.double() * len(count)).log())
        self.register_parameter("raw_step", torch.nn.Parameter(self.log_mean.clone()))

    def log_prior(self) -> Tensor:
        """Return the log prior of log a_d up to a constant, under which the sum of all walks has a variance near 1."""
        return -0.5 * ((self.raw_step - self.log_mean) / STEPS_PRIOR).square().sum()

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Covariances [..., N, M], or the diagonal [..., N], of rows and steps."""
        (left, left_walk), (right, right_walk) = map(self._parts, (x1, x2))
        inner = self.inner(*(torch.where(of[..., None], x, 0.0) for of, x in ((left, x1), (right, x2))), diag=diag)
        if diag:
            return inner * (left & right) + (left_walk * right_walk).sum(-1)
        return inner.to_dense() * (left[..., :, None] & right[..., None, :]) + left_walk @ right_walk.mT

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows are whole [..., N], and the covariances of all rows with the steps [..., N, P]."""
        whole, values = ~are_steps(x), x.detach()[..., self.input]
        size = (self.raw_step[self.group] / 2).exp()
        return whole, size * torch.where(whole[..., None], values > self.cut, values == self.cut)
