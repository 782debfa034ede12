"""Likelihoods of censored event times: the accelerated failure time model log t = f + σ ε (Wei 1992).

With z = (log t − f) / σ, an observed event at t has likelihood p(z) / (σ t), and a time censored at t has S(z).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    ExpTransform,
    LogNormal,
    SigmoidTransform,
    TransformedDistribution,
    Uniform,
    Weibull,
)

from fedgp_flower.gp.likelihoods.integrals import expected_log_probit, expected_softplus
from fedgp_flower.gp.likelihoods.point import PointLikelihood, trapezoidal_rule
from fedgp_flower.scores import Scores, TargetUnits, split_target, time_scores
from fedgp_flower.typing import Array

HALVINGS = 60
"""Bisection steps for a quantile."""


class Times(PointLikelihood):
    """Event times; the second column is 1 for an observed event and 0 for censoring. The parameter is log σ."""

    initial = torch.zeros(1, dtype=torch.float64)

    def start(self, target: Mapping[str, float], second_mean: float) -> float:
        """Logarithm of the total time per observed event: the estimate for a constant hazard."""
        return math.log(target["mean"] / second_mean)

    @abstractmethod
    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """E log p and E log S of ε at an argument ~ N(z, variance) [*S, N]."""

    @abstractmethod
    def tail(self, z: Tensor) -> Tensor:
        """Log S(z) [*S, N]."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log p(t | f) for an observed event, log P(T > t | f) for a censored time."""
        expected = self.expected(targets, function, torch.zeros_like(function), hyper)
        time, event = split_target(targets)
        return torch.where(event == 1, expected, self.tail((time.log() - function) * (-hyper[..., -1:]).exp()))

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E log p(t | f) for an observed event, E log P(T > t | f) for a censored time, in closed form."""
        time, event = split_target(targets)
        log_scale, log_time = hyper[..., -1:], time.log()
        density, tail = self.parts((log_time - mean) / log_scale.exp(), variance * (-2 * log_scale).exp())
        return event * (density - log_scale - log_time) + (1 - event) * tail

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log t with precision :data:`WEAK`."""
        return super().as_function(split_target(targets)[0].log())

    def survival(self, times: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """P(T > t) [*, N] at ``times`` that broadcast with [*, N], in the units of the target."""
        shape = torch.broadcast_shapes(times.shape, mean.shape)
        function, weights = trapezoidal_rule(mean.expand(shape), variance.expand(shape))
        z = (times.log() - function) * (-hyper[..., -1:]).exp()
        return (weights * self.tail(z).exp()).sum(0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Median, and the square of half the width of the central 68 % interval; the mean may be infinite."""
        centre, spread = (part.detach().double().cpu().numpy() for part in (mean, variance))
        low, middle, high = self.quantiles(centre, spread, hyper, (0.16, 0.5, 0.84))
        return torch.from_numpy(middle), torch.from_numpy((high - low) / 2).square()

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores of censored times [N, 2] in their units; needs ``units.follow_up``."""
        targets, hyper = torch.from_numpy(target), hyper.detach().double().cpu()
        moments = torch.from_numpy(mean), torch.from_numpy(variance)

        def survival(times: Array) -> Array:
            return self.survival(torch.from_numpy(times), *moments, hyper).numpy()

        nll, follow_up = -self.log_predictive(targets, *moments, hyper).numpy(), units.follow_up
        assert follow_up is not None
        return time_scores(mean, 1 - survival(target[:, 0]), nll, target, follow_up, survival)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Times t [levels, N] with P(T ≤ t) = level, by bisection over log t."""
        moments, hyper = (torch.from_numpy(mean), torch.from_numpy(variance)), hyper.detach().double().cpu()
        reach = 40 * float(hyper[-1].exp()) + 8 * moments[1].sqrt()
        low, high = ((moments[0] + sign * reach).expand(len(levels), -1) for sign in (-1, 1))
        probabilities = torch.tensor(levels, dtype=torch.float64)[:, None]
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            early = 1 - self.survival(middle.exp(), *moments, hyper) < probabilities
            low, high = torch.where(early, middle, low), torch.where(early, high, middle)
        return ((low + high) / 2).exp().numpy()


class WeibullTimes(Times):
    """Weibull times, a proportional hazards model: S(z) = exp(−eᶻ)."""

    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Z − E eᶻ and −E eᶻ."""
        hazard = (z + variance / 2).exp()
        return z - hazard, -hazard

    def tail(self, z: Tensor) -> Tensor:
        """−eᶻ."""
        return -z.exp()

    def conditional(self, function: Tensor, hyper: Tensor) -> Distribution:
        """Weibull with shape 1/σ and scale eᶠ."""
        return Weibull(function.exp(), (-hyper[-1]).exp(), validate_args=False)


class LogLogisticTimes(Times):
    """Log-logistic times, a proportional odds model: S(z) = 1 / (1 + eᶻ)."""

    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Z − 2 E log(1 + eᶻ) and −E log(1 + eᶻ)."""
        softplus = expected_softplus(z, variance.expand_as(z))[0]
        return z - 2 * softplus, -softplus

    def tail(self, z: Tensor) -> Tensor:
        """−log(1 + eᶻ)."""
        return -torch.nn.functional.softplus(z)

    def conditional(self, function: Tensor, hyper: Tensor) -> Distribution:
        """The exponential of a logistic variable with mean f and scale σ."""
        uniform = Uniform(torch.zeros_like(function), torch.ones_like(function), validate_args=False)
        steps = [SigmoidTransform().inv, AffineTransform(function, hyper[-1].exp()), ExpTransform()]
        return TransformedDistribution(uniform, steps, validate_args=False)


class LogNormalTimes(Times):
    """Log-normal times: S(z) = Φ(−z)."""

    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """−½ (log 2π + z² + v) and E log Φ(−z)."""
        density = -0.5 * (math.log(2 * math.pi) + z.square() + variance)
        return density, expected_log_probit(-z, variance.expand_as(z))[0]

    def tail(self, z: Tensor) -> Tensor:
        """Log Φ(−z)."""
        values: Tensor = torch.special.log_ndtr(-z)
        return values

    def conditional(self, function: Tensor, hyper: Tensor) -> Distribution:
        """Log-normal with mean f and standard deviation σ of log t."""
        return LogNormal(function, hyper[-1].exp(), validate_args=False)
