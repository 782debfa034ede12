"""Times to an event, some of them censored: log t = f + σ ε, an accelerated failure time model (Wei 1992).

With z = (log t − f) / σ a time that was seen has the density p(z) / (σ t), and one that is censored says S(z) alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
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
from fedgp_flower.gp.likelihoods.point import PointLikelihood, in_float64, rule, split_target
from fedgp_flower.scores import Scores, TargetUnits, time_scores
from fedgp_flower.typing import Array

HALVINGS = 60
"""Steps of the bisection for a quantile."""


class Times(PointLikelihood):
    """Times to an event; beside each stands 1 where the event was seen and 0 where it is censored. σ is learned."""

    initial = torch.zeros(1, dtype=torch.float64)

    def start(self, target: Mapping[str, float], beside: float) -> float:
        """Log of all time over all events: exact for a constant risk."""
        return math.log(target["mean"] / beside)

    @abstractmethod
    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """E log p(z) and E log S(z) of ε at z ~ N(z, variance)."""

    @abstractmethod
    def noise(self, function: Tensor, scale: Tensor) -> Distribution:
        """The distribution of t given f."""

    @abstractmethod
    def tail(self, z: Tensor) -> Tensor:
        """Log S(z)."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log p(t | f), or log P(T > t | f)."""
        found = self._of_parts(targets, function, torch.zeros_like(function), hyper)
        time, seen = split_target(targets)
        return torch.where(seen == 1, found, self.tail((time.log() - function) * (-hyper[..., -1:]).exp()))

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """The same for f ~ N(m, v), in closed form."""
        return self._of_parts(targets, mean, variance, hyper)

    def _of_parts(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        time, seen = split_target(targets)
        log_scale, log_time = hyper[..., -1:], time.log()
        seen_part, tail = self.parts((log_time - mean) / log_scale.exp(), variance * (-2 * log_scale).exp())
        return seen * (seen_part - log_scale - log_time) + (1 - seen) * tail

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the time."""
        return super().as_function(split_target(targets)[0].log())

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """By the trapezoidal rule over f."""
        function, shares = rule(mean, variance)
        return torch.logsumexp(self.log_density(targets, function, hyper) + shares.log(), 0)

    def survival(self, times: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """P(T > t) of each row [N], for times that broadcast with [*, N]."""
        shape = torch.broadcast_shapes(times.shape, mean.shape)
        function, shares = rule(mean.expand(shape), variance.expand(shape))
        z = (times.log() - function) * (-hyper[..., -1:]).exp()
        return (shares * self.tail(z).exp()).sum(0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Median, and the square of half the central 68 %: the mean of a time may be infinite."""
        centre, spread = (part.detach().double().cpu().numpy() for part in (mean, variance))
        low, middle, high = self.quantiles(centre, spread, hyper, (0.16, 0.5, 0.84))
        return torch.from_numpy(middle), torch.from_numpy((high - low) / 2).square()

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Of times some of which are censored."""
        targets, hyper = torch.from_numpy(target), hyper.detach().double().cpu()
        moments = torch.from_numpy(mean), torch.from_numpy(variance)

        def survival(times: Array) -> Array:
            return self.survival(torch.from_numpy(times), *moments, hyper).numpy()

        nll, follow_up = -self.log_predictive(targets, *moments, hyper).numpy(), units.follow_up
        assert follow_up is not None
        return time_scores(mean, 1 - survival(target[:, 0]), nll, target, follow_up, survival)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Times [levels, N] by which so many have had the event, by bisection of log t."""
        moments, hyper = (torch.from_numpy(mean), torch.from_numpy(variance)), hyper.detach().double().cpu()
        reach = 40 * float(hyper[-1].exp()) + 8 * moments[1].sqrt()
        low, high = ((moments[0] + sign * reach).expand(len(levels), -1) for sign in (-1, 1))
        wanted = torch.tensor(levels, dtype=torch.float64)[:, None]
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            early = 1 - self.survival(middle.exp(), *moments, hyper) < wanted
            low, high = torch.where(early, middle, low), torch.where(early, high, middle)
        return ((low + high) / 2).exp().numpy()

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`AcceleratedTimes`: GPyTorch has none."""
        return in_float64(AcceleratedTimes(self, hyper.detach()[-1].exp()), self)


class WeibullTimes(Times):
    """Weibull times, also proportional hazards: S(z) = exp(−eᶻ)."""

    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Z − E eᶻ and −E eᶻ."""
        hazard = (z + variance / 2).exp()
        return z - hazard, -hazard

    def tail(self, z: Tensor) -> Tensor:
        """−eᶻ."""
        return -z.exp()

    def noise(self, function: Tensor, scale: Tensor) -> Distribution:
        """Weibull with shape 1/σ and scale eᶠ."""
        return Weibull(function.exp(), 1 / scale, validate_args=False)


class LogLogisticTimes(Times):
    """Times whose odds are proportional: S(z) = 1 / (1 + eᶻ)."""

    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Z − 2 E log(1 + eᶻ) and −E log(1 + eᶻ)."""
        both = expected_softplus(z, variance.expand_as(z))[0]
        return z - 2 * both, -both

    def tail(self, z: Tensor) -> Tensor:
        """−log(1 + eᶻ)."""
        return -torch.nn.functional.softplus(z)

    def noise(self, function: Tensor, scale: Tensor) -> Distribution:
        """The exponential of a logistic variable."""
        even = Uniform(torch.zeros_like(function), torch.ones_like(function), validate_args=False)
        steps = [SigmoidTransform().inv, AffineTransform(function, scale), ExpTransform()]
        return TransformedDistribution(even, steps, validate_args=False)


class LogNormalTimes(Times):
    """Times whose logarithm is normal: S(z) = Φ(−z)."""

    def parts(self, z: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """−½ (log 2π + z² + v) and E log Φ(−z)."""
        seen = -0.5 * (math.log(2 * math.pi) + z.square() + variance)
        return seen, expected_log_probit(-z, variance.expand_as(z))[0]

    def tail(self, z: Tensor) -> Tensor:
        """Log Φ(−z)."""
        values: Tensor = torch.special.log_ndtr(-z)
        return values

    def noise(self, function: Tensor, scale: Tensor) -> Distribution:
        """Log-normal."""
        return LogNormal(function, scale, validate_args=False)


class AcceleratedTimes(_OneDimensionalLikelihood):
    """Times without censoring, as a likelihood of GPyTorch."""

    def __init__(self, times: Times, scale: Tensor) -> None:
        super().__init__()
        self.times, self.scale = times, scale

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Distribution:
        """The distribution of t given f."""
        return self.times.noise(function_samples, self.scale)
