"""The categorical likelihood with one function per class: P(y = c | f) = softmax(f)_c."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from fedgp_flower.gp.likelihoods.integrals import expected_log_sum_exp
from fedgp_flower.gp.likelihoods.point import ClassLikelihood
from fedgp_flower.scores import shares_of
from fedgp_flower.typing import Array


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
        """E softmax(f) [N, C]."""
        probability = expected_log_sum_exp(mean, variance)[1].mT
        return probability / probability.sum(-1, keepdim=True)

    def conditional(self, function: Tensor, hyper: Tensor) -> Categorical:
        """The class given functions [*S, C, N]."""
        return Categorical(logits=function.mT)


def of_class(targets: Tensor, values: Tensor) -> Tensor:
    """The entry of each row's class [*S, N] among values [*S, C, N]."""
    return values.gather(-2, targets.long().expand(values.shape[:-2] + targets.shape)[..., None, :])[..., 0, :]
