"""Counts whose logarithmic rate is f."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Poisson

from fedgp_flower.gp.likelihoods.point import PointLikelihood, in_float64
from fedgp_flower.scores import Scores, count_quantiles, count_scores
from fedgp_flower.typing import Array


class Counts(PointLikelihood):
    """Poisson counts with rate eᶠ; all but the predictive mass is closed form."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Y f − eᶠ − log y!."""
        return targets * function - function.exp() - torch.lgamma(targets + 1.0)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogPoisson`: GPyTorch has none."""
        return in_float64(LogPoisson(), self)

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Counts y suggest f = log(y + ½) with precision y + ½, the inverse variance of that logarithm."""
        return (targets + 0.5).log(), targets + 0.5

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E [y f − eᶠ − log y!] with E eᶠ = exp(m + ½ v)."""
        return targets * mean - (mean + variance / 2).exp() - torch.lgamma(targets + 1.0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments r = E eᶠ, and var y = r + r² (eᵛ − 1)."""
        rate = (mean + variance / 2).exp()
        return rate, rate + rate.square() * variance.expm1()

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, scale: float) -> Scores:
        """Of a mixture of Poisson distributions."""
        return count_scores(mean, variance, target)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Least k with F(k) ≥ level."""
        return count_quantiles(mean, variance, levels)


class LogPoisson(_OneDimensionalLikelihood):
    """Counts with rate eᶠ, as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Poisson:
        """The distribution of y given f."""
        return Poisson(function_samples.exp(), validate_args=False)
