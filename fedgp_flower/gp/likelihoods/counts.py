"""Likelihoods of counts: Poisson and negative binomial with mean exposure · eᶠ, and binomial with log odds f."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Binomial, Distribution, NegativeBinomial, Poisson

from fedgp_flower.count_scores import count_quantiles, count_scores, poisson
from fedgp_flower.errors import DataError
from fedgp_flower.gp.likelihoods.integrals import expected_softplus
from fedgp_flower.gp.likelihoods.point import PointLikelihood, trapezoidal_rule
from fedgp_flower.lazy import special
from fedgp_flower.scores import Scores, TargetUnits, split_target
from fedgp_flower.typing import Array


class Counts(PointLikelihood):
    """Poisson counts with mean μ = e eᶠ; the second column is the exposure e. Expectations are in closed form."""

    def start(self, target: Mapping[str, float], second_mean: float) -> float:
        """Logarithm of the total count per unit of exposure."""
        return math.log(target["mean"] / second_mean)

    def conditional(self, function: Tensor, hyper: Tensor) -> Distribution:
        """Poisson with rate eᶠ."""
        return Poisson(function.exp(), validate_args=False)

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log((y + ½) / e) with precision y + ½, the inverse variance of that logarithm."""
        count, exposure = split_target(targets)
        return ((count + 0.5) / exposure).log(), count + 0.5

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Y m − exp(m + ½ v) − log y!, with log e added to m."""
        targets, mean = _with_exposure(targets, mean)
        return targets * mean - (mean + variance / 2).exp() - torch.lgamma(targets + 1.0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """E y = r = E eᶠ and var y = r + r² (eᵛ − 1), for an exposure of 1."""
        rate = (mean + variance / 2).exp()
        return rate, rate + rate.square() * variance.expm1()

    def observed(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the count at each row's exposure."""
        return self.moments(_with_exposure(targets, mean)[1], variance, hyper)

    def cumulative(self, hyper: Tensor, count: Array, f: Array) -> Array:
        """P(y ≤ k | f), for scores and quantiles."""
        return poisson(count, f)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores of the counts at each row's exposure."""
        count, exposure = split_target(target)
        known, law = _known(self, mean, variance, target, hyper), partial(self.cumulative, hyper)
        return count_scores(mean + np.log(exposure), variance, count, *known, law)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """The least k with P(y ≤ k) ≥ level, for an exposure of 1."""
        return count_quantiles(mean, variance, levels, partial(self.cumulative, hyper))


class OverdispersedCounts(Counts):
    """Negative binomial counts with mean μ = e eᶠ and variance μ + α μ²; the parameter is the log dispersion log α."""

    initial = torch.tensor([math.log(0.3)], dtype=torch.float64)

    def conditional(self, function: Tensor, hyper: Tensor) -> Distribution:
        """Negative binomial with mean eᶠ."""
        log_r = -hyper[-1]
        return NegativeBinomial(log_r.exp(), logits=function - log_r, validate_args=False)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log Γ(y + r) / (Γ(r) y!) + y (m − log r) − (y + r) E log(1 + e^{f − log r}) with r = 1/α."""
        count, mean = _with_exposure(targets, mean)
        log_r = -hyper[..., -1:]
        r, log_odds = log_r.exp(), mean - log_r
        shape = torch.broadcast_shapes(log_odds.shape, variance.shape)
        softplus = expected_softplus(log_odds.expand(shape), variance.expand(shape))[0]
        log_binomial = torch.lgamma(count + r) - torch.lgamma(r) - torch.lgamma(count + 1.0)
        return log_binomial + count * log_odds - (count + r) * softplus

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """E y = r = E eᶠ and var y = r + r² (eᵛ − 1) + α E e²ᶠ, for an exposure of 1."""
        rate, spread = super().moments(mean, variance, hyper)
        return rate, spread + hyper[..., -1:].exp() * rate.square() * variance.exp()

    def cumulative(self, hyper: Tensor, count: Array, f: Array) -> Array:
        """P(y ≤ k | f) by the incomplete beta function."""
        log_r = -float(hyper.detach()[-1])
        return np.asarray(special.betainc(math.exp(log_r), count + 1, special.expit(log_r - f)))


class Successes(PointLikelihood):
    """Binomial counts of successes with probability σ(f); the second column is the number of trials n."""

    def start(self, target: Mapping[str, float], second_mean: float) -> float:
        """Log odds of the fraction of all trials that succeeded; DataError if that is all of them."""
        failures = second_mean - target["mean"]
        if failures < 1e-9 * second_mean:  # the means are rounded
            raise DataError("every trial succeeded at every site; there is nothing to learn")
        return math.log(target["mean"] / failures)

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log (n choose y) + y f − n log(1 + eᶠ)."""
        return self._log_density(targets, function, torch.nn.functional.softplus(function))

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log (n choose y) + y m − n E log(1 + eᶠ)."""
        return self._log_density(targets, mean, expected_softplus(mean, variance)[0])

    def _log_density(self, targets: Tensor, mean: Tensor, softplus: Tensor) -> Tensor:
        count, trials = split_target(targets)
        log_binomial = torch.lgamma(trials + 1.0) - torch.lgamma(count + 1.0) - torch.lgamma(trials - count + 1.0)
        return log_binomial + count * mean - trials * softplus

    def conditional(self, function: Tensor, hyper: Tensor, trials: Tensor | int = 1) -> Distribution:
        """Binomial with log odds f."""
        return Binomial(trials, logits=function, validate_args=False)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean E σ(f) and variance of the success probability, because new rows have no number of trials."""
        probability = expected_softplus(mean, variance)[1]
        function, weights = trapezoidal_rule(mean, variance)
        return probability, (weights * (function.sigmoid() - probability).square()).sum(0)

    def observed(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean n p and variance n p (1 − p) + n (n − 1) var p of each row's successes."""
        (p, spread), trials = self.moments(mean, variance, hyper), split_target(targets)[1]
        return trials * p, trials * p * (1 - p) + trials * (trials - 1) * spread

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores of the successes among each row's trials."""
        count, trials = split_target(target)

        def cumulative(count: Array, f: Array) -> Array:
            """P(y ≤ k | f) by the incomplete beta function."""
            tail = special.betainc(np.maximum(trials - count, 1), count + 1, special.expit(-f))
            return np.where(count >= trials, 1.0, tail)

        return count_scores(mean, variance, count, *_known(self, mean, variance, target, hyper), cumulative)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Quantiles of the success probability σ(f), because new rows have no number of trials."""
        normal = special.ndtri(np.array(levels))[:, None]
        return np.asarray(special.expit(mean + np.sqrt(variance) * normal))


def _with_exposure(targets: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [N], and the mean of f plus the logarithm of the exposure [*S, N]."""
    count, exposure = split_target(targets)
    return count, mean + exposure.log()


def _known(
    likelihood: PointLikelihood, mean: Array, variance: Array, target: Array, hyper: Tensor
) -> tuple[Array, Array]:
    """E y and −log p(y) of each row."""
    at = *map(torch.tensor, (target, mean, variance)), hyper.detach().double().cpu()
    return likelihood.observed(*at)[0].numpy(), -likelihood.log_predictive(*at).numpy()
