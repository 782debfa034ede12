"""Several classes, each with a function of its own: P(y = c) = softmax(f)_c."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Categorical

from fedgp_flower.gp.likelihoods.integrals import expected_log_sum_exp
from fedgp_flower.gp.likelihoods.point import PointLikelihood, Slopes
from fedgp_flower.scores import Scores, TargetUnits, class_scores, shares_of
from fedgp_flower.typing import Array


class Softmax(PointLikelihood):
    """Classes y ∈ {0, …, C − 1}; functions, their means and variances are [C, N], independent under q."""

    relative = True
    amplitude_spread = 3.0  # classes may lie far apart; several bound each other's functions

    def start(self, target: Mapping[str, float], beside: float) -> Array:
        """Logarithms of the shares of the classes [C, 1]."""
        del beside
        return np.log(shares_of(target))[:, None]

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """f_y − log Σ e^{f_c}."""
        return of_class(targets, function.log_softmax(-2))

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """m_y − E log Σ e^{f_c}; what autograd differentiates are its derivatives in closed form."""
        with torch.no_grad():
            value, share, curvature = expected_log_sum_exp(mean, variance)
        moved = share * (mean - mean.detach()) + curvature / 2 * (variance - variance.detach())  # nothing but gradients
        return of_class(targets, mean) - value - moved.sum(0)

    def slopes(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """In closed form: α_c = 1[y = c] − π_c, β_c = E softmax(f)_c (1 − softmax(f)_c)."""
        mean, variance = mean.double(), variance.double()
        value, share, curvature = expected_log_sum_exp(mean, variance)
        indicator = (targets.long() == torch.arange(len(mean))[:, None].to(targets)).to(mean)
        total = of_class(targets, mean).sum() - value.sum()
        return total, indicator - share, curvature, torch.zeros_like(hyper)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log E softmax(f)_y."""
        return of_class(targets, self.moments(mean, variance, hyper)[0].mT).log()

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities p = E softmax(f) [N, C], and p (1 − p)."""
        with torch.no_grad():
            share = expected_log_sum_exp(mean, variance)[1].mT
        probability = share / share.sum(-1, keepdim=True)
        return probability, probability * (1.0 - probability)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Of the probabilities of all classes."""
        probability, _ = self.moments(torch.from_numpy(mean), torch.from_numpy(variance), hyper)
        return class_scores(probability.numpy(), target)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`Classes`, which draws functions."""
        return ClassesOfFunctions()


class ClassesOfFunctions(Likelihood):
    """Classes of functions that come as a batch [*S, C, N], as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Categorical:
        """The distribution of y given f."""
        return Categorical(logits=function_samples.mT)


def of_class(targets: Tensor, values: Tensor) -> Tensor:
    """The entry [*, N] of each row's class among values [*, C, N]."""
    return values.gather(-2, targets.long().expand(values.shape[:-2] + targets.shape)[..., None, :])[..., 0, :]
