"""E log σ(f) in closed form, f ~ N(m, v), at any variance: the logistic distribution as a scale mixture of normals.

A logistic variable is 2KZ with Z ~ N(0, 1) and K of the Kolmogorov distribution (Andrews & Mallows 1974), so that
σ(f) = E Φ(f / 2K). The trapezoidal rule over log K gives Σ pᵢ Φ(f / wᵢ) with pᵢ > 0, and integrated once and twice the
normal stays closed: with tᵢ = √(v + wᵢ²) and z = m/tᵢ,

    E log(1 + eᶠ) = Σ pᵢ [m Φ(z) + tᵢ φ(z)],   E σ(f) = Σ pᵢ Φ(z),   E σ′(f) = Σ pᵢ φ(z)/tᵢ,

each the derivative of the one before (the last two by m; ∂/∂v of the first is half the third).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Bernoulli

from fedgp_flower.gp.likelihoods import PointLikelihood, build_point_likelihood

NODES, LEAST, MOST = 14, 0.25, 3.0
"""Of the rule, and the ends of K: σ is wrong by less than 1e-9."""


@cache
def mixture() -> tuple[Tensor, Tensor]:
    """Widths w = 2K and weights p [NODES], with Σ p = 1 exactly."""
    k = np.exp(np.linspace(math.log(LEAST), math.log(MOST), NODES))
    n = np.arange(1, 30)[:, None]
    right = 8 * k * ((-1.0) ** (n + 1) * n**2 * np.exp(-2 * (n * k) ** 2)).sum(0)
    odd = ((2 * n - 1) * math.pi) ** 2
    left = math.sqrt(2 * math.pi) * ((odd / (4 * k**4) - 1 / k**2) * np.exp(-odd / (8 * k**2))).sum(0)
    weights = k * np.where(k < 1, left, right)  # two series of one density; each converges on its side
    return torch.from_numpy(2 * k), torch.from_numpy(weights / weights.sum())


def expected_softplus(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log(1 + eᶠ), E σ(f) and E σ′(f) of each row [N]."""
    m, v, (squares, weight, normal) = mean.reshape(-1), variance.reshape(-1), _rule()
    scale = (v + squares).rsqrt()  # 1 / tᵢ
    z = scale * m
    below = weight @ torch.special.ndtr(z)
    slope, rest = normal @ ((-0.5 * z.square()).exp() * scale)  # of φ(z) / tᵢ, and tᵢ² = v + wᵢ²
    value = m * below + v * slope + rest
    return value.view_as(mean), below.view_as(mean), slope.view_as(mean)


@cache
def _rule() -> tuple[Tensor, Tensor, Tensor]:
    """wᵢ² [NODES, 1], pᵢ [NODES], and the rows pᵢ / √(2π) and pᵢ wᵢ² / √(2π)."""
    width, weight = mixture()
    return width.square()[:, None], weight, torch.stack([weight, weight * width.square()]) / math.sqrt(2 * math.pi)


class Logit(PointLikelihood):
    """Labels y ∈ {0, 1} with p(y = 1 | f) = σ(f): logistic regression where f is linear."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log σ((2y − 1) f)."""
        return torch.nn.functional.logsigmoid((2.0 * targets - 1.0) * function)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−E log(1 + e^{−(2y − 1) f})."""
        return -expected_softplus((1.0 - 2.0 * targets) * mean, variance)[0]

    def slopes(
        self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In closed form: α = y − E σ(f), β = E σ′(f)."""
        sign = 1.0 - 2.0 * targets
        value, share, density = expected_softplus(sign * mean, variance)
        return -value.sum(), -sign * share, density, torch.zeros_like(hyper)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log E σ((2y − 1) f), summed in logarithms."""
        width, weight = (part.view(-1, *[1] * mean.ndim) for part in mixture())
        z = (2.0 * targets - 1.0) * mean / (variance + width.square()).sqrt()
        return torch.logsumexp(weight.log() + torch.special.log_ndtr(z), 0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments p = E σ(f) and p (1 − p)."""
        probability = expected_softplus(mean, variance)[1]
        return probability, probability * (1.0 - probability)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogitBernoulli`: GPyTorch's is the probit."""
        return LogitBernoulli()


class LogitBernoulli(_OneDimensionalLikelihood):
    """The same as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Bernoulli:
        """The distribution of y given f."""
        return Bernoulli(logits=function_samples)


def canonical_likelihood(name: str, noise: float = 0.1) -> PointLikelihood:
    """The likelihood of ``model.likelihood`` with its canonical link: for two classes the logit.

    ``noise`` is the variance of Gaussian noise.
    """
    return Logit() if name == "bernoulli" else build_point_likelihood(name, noise=noise)
