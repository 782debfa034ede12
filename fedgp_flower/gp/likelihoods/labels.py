"""Likelihoods of two classes: the probability of the second class is Φ(f) (probit) or σ(f) (logit)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor
from torch.distributions import Bernoulli

from fedgp_flower.gp.likelihoods.integrals import expected_log_probit, expected_softplus, logistic_mixture
from fedgp_flower.gp.likelihoods.point import ClassLikelihood, in_float64
from fedgp_flower.lazy import special


class Probit(ClassLikelihood):
    """Labels y ∈ {0, 1} with p(y = 1 | f) = Φ(f); the predictive probability is Φ(m / √(1 + v))."""

    def start(self, target: Mapping[str, float], second_mean: float) -> float:
        """Φ⁻¹ of the frequency of the second class."""
        return float(special.ndtri(target["share"]))

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log Φ((2y − 1) f)."""
        values: Tensor = torch.special.log_ndtr((2.0 * targets - 1.0) * function)
        return values

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Bernoulli likelihood."""
        return in_float64(BernoulliLikelihood())

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E log Φ((2y − 1) f), by :func:`expected_log_probit`, whose derivatives autograd sees."""
        sign = 2.0 * targets - 1.0
        with torch.no_grad():
            value, alpha, beta = expected_log_probit(sign * mean, variance)
        return value + sign * alpha * (mean - mean.detach()) - beta / 2 * (variance - variance.detach())

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log Φ(±m / √(1 + v))."""
        return self.log_density(targets, mean / (1.0 + variance).sqrt(), hyper)

    def probability(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E Φ(f) = Φ(m / √(1 + v))."""
        values: Tensor = torch.special.ndtr(mean / (1.0 + variance).sqrt())
        return values


class Logit(ClassLikelihood):
    """Labels y ∈ {0, 1} with p(y = 1 | f) = σ(f)."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log σ((2y − 1) f)."""
        return torch.nn.functional.logsigmoid((2.0 * targets - 1.0) * function)

    def conditional(self, function: Tensor, hyper: Tensor) -> Bernoulli:
        """Bernoulli with log odds f."""
        return Bernoulli(logits=function)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−E log(1 + e^{−(2y − 1) f})."""
        return -expected_softplus((1.0 - 2.0 * targets) * mean, variance)[0]

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log E σ((2y − 1) f), by the logistic mixture in logarithms."""
        width, weight = (part.view(-1, *[1] * mean.ndim) for part in logistic_mixture())
        z = (2.0 * targets - 1.0) * mean / (variance + width.square()).sqrt()
        return torch.logsumexp(weight.log() + torch.special.log_ndtr(z), 0)

    def probability(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E σ(f)."""
        return expected_softplus(mean, variance)[1]
