"""The categorical likelihood with one function per class: P(y = c | f) = softmax(f)_c.

A prediction is p_c ∝ (E softmax(f)_c)^{1/T}. The posterior takes the functions as independent, so that predictions at
T = 1 are less certain than the classes of rows warrant. T has the highest likelihood of all rows, each predicted from
the others, and the prior log T ~ N(0, .7²); it is the parameter of the likelihood, without which T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from fedgp_flower.gp.likelihoods.integrals import expected_log_sum_exp
from fedgp_flower.gp.likelihoods.point import ClassLikelihood, PointLikelihood
from fedgp_flower.scores import shares_of
from fedgp_flower.typing import Array

TEMPERATURES = 2.0 ** np.arange(-2, 0.51, 0.125)
"""Temperatures T that are compared."""
TEMPERATURE_SPREAD = 0.7
"""Prior standard deviation of log T."""


def best_temperature(log_scores: Array) -> Array:
    """Return log T [1] of the most probable temperature, from Σ log p_y at each [G]."""
    logs = np.log(TEMPERATURES)
    return logs[[np.argmax(log_scores - 0.5 * (logs / TEMPERATURE_SPREAD) ** 2)]]


def tempered(likelihood: PointLikelihood, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return Σ log p_y at each of :data:`TEMPERATURES` [G], over the rows whose moments [C, N] are known."""
    rows = variance.isfinite().all(0)
    known = targets[rows], mean[:, rows], variance[:, rows]
    each = [torch.full((1,), math.log(value), dtype=torch.float64) for value in TEMPERATURES]
    return torch.stack([likelihood.log_predictive(*known, log).sum() for log in each])


class Softmax(ClassLikelihood):
    """Classes y ∈ {0, …, C − 1}; functions, means and variances are [C, N], and q makes functions independent."""

    relative = True
    outputscale, weight_variance = 30.0, 0.3  # steps from a linear function to a smooth one are slow
    amplitude_spread = 3.0  # separable classes need large amplitudes; the softmax bounds each function by the others

    def start(self, target: Mapping[str, float], second_mean: float) -> Array:
        """Logarithms of the class frequencies [C, 1]."""
        return np.log(shares_of(target))[:, None]

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """f_y − log Σ e^{f_c}."""
        return of_class(targets, function.log_softmax(-2))

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """m_y − E log Σ e^{f_c}; autograd sees the closed-form derivatives of :func:`expected_log_sum_exp`."""
        with torch.no_grad():
            value, probability, curvature = expected_log_sum_exp(mean, variance)
        zero = probability * (mean - mean.detach()) + curvature / 2 * (variance - variance.detach())  # has gradients
        return of_class(targets, mean) - value - zero.sum(0)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log E softmax(f)_y."""
        return of_class(targets, self.probability(mean, variance, hyper).mT).log()

    @torch.no_grad()
    def probability(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E softmax(f) [N, C] to the power 1/T, normalised; ``hyper`` is log T [1], or [0] for T = 1."""
        logs = expected_log_sum_exp(mean, variance)[1].mT.log()
        return (logs / hyper.exp() if len(hyper) else logs).softmax(-1)

    def conditional(self, function: Tensor, hyper: Tensor) -> Categorical:
        """The class given functions [*S, C, N]."""
        return Categorical(logits=function.mT)


def of_class(targets: Tensor, values: Tensor) -> Tensor:
    """The entry of each row's class [*S, N] among values [*S, C, N]."""
    return values.gather(-2, targets.long().expand(values.shape[:-2] + targets.shape)[..., None, :])[..., 0, :]
