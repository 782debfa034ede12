"""Counts: with mean eᶠ times an exposure, and of successes among trials with log odds f."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Binomial, NegativeBinomial, Poisson

from fedgp_flower import scores as rows_scores
from fedgp_flower.count_scores import BinomialLaw, Law, NegativeBinomialLaw, PoissonLaw, count_quantiles, count_scores
from fedgp_flower.gp.likelihoods.integrals import expected_softplus
from fedgp_flower.gp.likelihoods.point import PointLikelihood, in_float64, split_target
from fedgp_flower.lazy import special
from fedgp_flower.scores import Scores, TargetUnits
from fedgp_flower.typing import Array


class Counts(PointLikelihood):
    """Poisson counts with rate e · eᶠ, e the exposure beside the count; all but the predictive mass is closed form."""

    def start(self, target: Mapping[str, float], beside: float) -> float:
        """Log of all counts over all exposure."""
        return math.log(target["mean"] / beside)

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Y log μ − μ − log y!, μ = e · eᶠ."""
        return self.expected(targets, function, torch.zeros_like(function), hyper)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogPoisson`: GPyTorch has none."""
        return in_float64(LogPoisson(), self)

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Counts y suggest f = log((y + ½) / e) with precision y + ½, the inverse variance of that logarithm."""
        count, exposure = split_target(targets)
        return ((count + 0.5) / exposure).log(), count + 0.5

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E [y f − eᶠ − log y!] with E eᶠ = exp(m + ½ v), f with the logarithm of the exposure."""
        targets, mean = _with_exposure(targets, mean)
        return targets * mean - (mean + variance / 2).exp() - torch.lgamma(targets + 1.0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments r = E eᶠ, and var y = r + r² (eᵛ − 1), of an exposure of one."""
        rate = (mean + variance / 2).exp()
        return rate, rate + rate.square() * variance.expm1()

    def observed(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of the counts of each row's exposure."""
        return self.moments(_with_exposure(targets, mean)[1], variance, hyper)

    def law(self, hyper: Tensor) -> Law:
        """The distribution of a count given f."""
        del hyper
        return PoissonLaw()

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Of the counts of each row's exposure."""
        count, exposure = rows_scores.split_target(target)
        return count_scores(mean + np.log(exposure), variance, count, self.law(hyper))

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Least k with F(k) ≥ level, of an exposure of one."""
        return count_quantiles(mean, variance, levels, self.law(hyper))


class OverdispersedCounts(Counts):
    """Negative binomial counts: mean μ = e · eᶠ and variance μ + α μ²; the parameter is log α, of the dispersion."""

    initial = torch.tensor([math.log(0.3)], dtype=torch.float64)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogNegativeBinomial`: GPyTorch has none."""
        return in_float64(LogNegativeBinomial(-hyper.detach()[-1]), self)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """With r = 1/α: log Γ(y + r) / (Γ(r) y!) + y (m − log r) − (y + r) E log(1 + e^{f − log r})."""
        count, mean = _with_exposure(targets, mean)
        log_r = -hyper[..., -1:]
        r, moved = log_r.exp(), mean - log_r
        shape = torch.broadcast_shapes(moved.shape, variance.shape)
        both = expected_softplus(moved.expand(shape), variance.expand(shape))[0]
        ways = torch.lgamma(count + r) - torch.lgamma(r) - torch.lgamma(count + 1.0)
        return ways + count * moved - (count + r) * both

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments r = E eᶠ, and var y = r + r² (eᵛ − 1) + α E e²ᶠ, of an exposure of one."""
        rate, spread = super().moments(mean, variance, hyper)
        return rate, spread + hyper[..., -1:].exp() * rate.square() * variance.exp()

    def law(self, hyper: Tensor) -> Law:
        """The distribution of a count given f."""
        return NegativeBinomialLaw(math.exp(float(hyper.detach()[-1])))


class Successes(PointLikelihood):
    """Successes among the trials beside them, each with probability σ(f)."""

    def start(self, target: Mapping[str, float], beside: float) -> float:
        """Log odds of all successes among all trials."""
        return math.log(target["mean"] / (beside - target["mean"]))

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log (n choose y) + y f − n log(1 + eᶠ)."""
        return self._with(targets, function, torch.nn.functional.softplus(function))

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """The same with E log(1 + eᶠ)."""
        return self._with(targets, mean, expected_softplus(mean, variance)[0])

    def _with(self, targets: Tensor, mean: Tensor, softplus: Tensor) -> Tensor:
        count, trials = split_target(targets)
        ways = torch.lgamma(trials + 1.0) - torch.lgamma(count + 1.0) - torch.lgamma(trials - count + 1.0)
        return ways + count * mean - trials * softplus

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogisticTrials`: GPyTorch has none."""
        return in_float64(LogisticTrials(), self)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean E σ(f) and variance of the probability itself, since new rows have no trials yet."""
        probability = expected_softplus(mean, variance)[1]
        function, shares = self._at_nodes(mean, variance)
        return probability, (shares * (function.sigmoid() - probability).square()).sum(0)

    def observed(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments n p and n p (1 − p) + n (n − 1) var p of each row's successes."""
        (p, spread), trials = self.moments(mean, variance, hyper), split_target(targets)[1]
        return trials * p, trials * p * (1 - p) + trials * (trials - 1) * spread

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Of the successes among each row's trials."""
        count, trials = rows_scores.split_target(target)
        return count_scores(mean, variance, count, BinomialLaw(trials))

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Of the probability: new rows have no trials yet."""
        normal = special.ndtri(np.array(levels))[:, None]
        return np.asarray(special.expit(mean + np.sqrt(variance) * normal))


def _with_exposure(targets: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Counts, and the mean of f with the logarithm of the exposure."""
    count, exposure = split_target(targets)
    return count, mean + exposure.log()


class LogPoisson(_OneDimensionalLikelihood):
    """Counts with rate eᶠ, as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Poisson:
        """The distribution of y given f."""
        return Poisson(function_samples.exp(), validate_args=False)


class LogNegativeBinomial(_OneDimensionalLikelihood):
    """Counts with mean eᶠ and a dispersion e^{−log r}, as a likelihood of GPyTorch."""

    def __init__(self, log_r: Tensor) -> None:
        super().__init__()
        self.log_r = log_r

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> NegativeBinomial:
        """The distribution of y given f."""
        r = self.log_r.exp()
        return NegativeBinomial(r, logits=function_samples - self.log_r, validate_args=False)


class LogisticTrials(_OneDimensionalLikelihood):
    """One trial with log odds f, as a likelihood of GPyTorch; ``trials`` says of more."""

    def forward(self, function_samples: Tensor, *_: object, trials: Tensor | int = 1, **__: object) -> Binomial:
        """The distribution of y given f."""
        return Binomial(trials, logits=function_samples, validate_args=False)
