"""What every likelihood answers: E_q log p(y | f), the predictive density, the moments, scores and quantiles of y.

Callers pass the parameters, as logarithms, so that one call serves many samples of them. GPyTorch rounds the nodes of
quadrature to float32, and its ``log_normal_cdf`` is wrong by up to 2e-3 just below −1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.scores import Scores, TargetUnits, gaussian_scores
from fedgp_flower.typing import Array, Targets

WEAK = 0.01
"""Precision of a label as a value of f: small enough for an update to move it anywhere."""
REACH, NODES = 7.0, 113
"""Of the trapezoidal rule over f, in standard deviations: wrong by less than 1e-9 where f is ten times as wide as ε."""
NONE = torch.zeros(0, dtype=torch.float64)
"""Parameters of a likelihood without any."""

Slopes: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise variance σ² e^{2ζ} with a Gaussian offset ζ: log σ², and under q its mean, variance, covariance with f."""

    log_variance: Tensor
    mean: Tensor
    variance: Tensor
    covariance: Tensor  # with each f_n  [N]


def split_target(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The target [N] and what stands beside it, such as exposure: ones where nothing does."""
    return (targets, torch.ones_like(targets)) if targets.ndim == 1 else (targets[:, 0], targets[:, 1])


def rule(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Values of f [Q, *S, N] and their shares [Q, 1, …]."""
    nodes = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64).view(-1, *[1] * mean.ndim)
    shares = (-0.5 * nodes.square()).exp()
    return mean + variance.sqrt() * nodes, shares / shares.sum()


class PointLikelihood(ABC):
    """A likelihood that factorises over rows. Samples S, rows N, parameters R; any leading shape broadcasts alike.

    Targets are [N], or [N, 2] with the column that stands beside the target. Where it is of several functions, their
    means and variances are [C, N].
    """

    initial: Float[Tensor, " R"] = NONE  # parameters at the start, in logarithms

    relative = False
    """Whether it is of several functions of which only the differences matter."""
    functions: tuple[str, ...] = ()
    """Names of functions that have a kernel each; where it is of several without names, they share one."""
    amplitude_spread = 1.0
    """Of the prior of the kernel's amplitudes: sd of their logarithms."""

    def __init__(self, nodes: int = 20) -> None:
        points, weights = np.polynomial.hermite.hermgauss(nodes)  # for N(0, ½)
        self.nodes, self.weights = torch.as_tensor(points), torch.as_tensor(weights / math.sqrt(math.pi))

    @abstractmethod
    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """The conditional log p(y | f)."""

    @abstractmethod
    def to_gpytorch(self, hyper: Float[Tensor, " R"]) -> Likelihood:
        """The same model as a likelihood of GPyTorch."""

    def start(self, target: Mapping[str, float], beside: float) -> float | Array:
        """The constant f, or each [C, 1], that suits what is known of targets and the mean of what is beside them."""
        del target, beside
        return 0.0

    def start_parameters(self, target: Mapping[str, float]) -> Float[Tensor, " R"]:
        """Parameters that suit what is known of all targets."""
        del target
        return self.initial

    def as_function(self, targets: Targets) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Values of f that targets suggest, and the precision of each: where factors start; here weak."""
        return targets, torch.full_like(targets, WEAK)

    def expected(self, targets: Targets, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> Tensor:
        """E log p(y | f) with f ~ N(mean, variance), both [*S, N]: Σ_j w_j log p(y | m + √(2v) x_j)."""
        function, weights = self._at_nodes(mean, variance)
        return (weights * self.log_density(targets, function, hyper)).sum(0)

    def slopes(self, targets: Targets, mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """Σ of :meth:`expected`, α = ∂/∂m and β = −2 ∂/∂s [N] of f ~ N(m, s), and the derivative by parameters [R]."""
        leaves = [values.detach().double().requires_grad_() for values in (mean, variance, hyper)]
        with torch.enable_grad():
            total = self.expected(targets, *leaves).sum()
        alpha, slope, by_hyper = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return total.detach(), alpha, -2 * slope, by_hyper

    def log_predictive(self, targets: Targets, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> Tensor:
        """Log ∫ p(y | f) N(f; mean, variance) df, in logarithms: far from every node it is small, but not zero."""
        function, weights = self._at_nodes(mean, variance)
        return torch.logsumexp(self.log_density(targets, function, hyper) + weights.log(), 0)

    @abstractmethod
    def moments(self, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a noisy observation."""

    def observed(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`moments` of rows with what stands beside their targets, such as their exposure."""
        del targets
        return self.moments(mean, variance, hyper)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores in original units of a standardised target; intervals and CRPS as of a Gaussian."""
        moments, hyper = (torch.from_numpy(mean), torch.from_numpy(variance)), hyper.detach().double().cpu()
        centre, spread = (part.numpy() for part in self.moments(*moments, hyper))
        scale = units.scale
        found = gaussian_scores(scale * centre, scale * spread**0.5, scale * target)
        density = self.log_predictive(torch.from_numpy(target), *moments, hyper)
        return Scores(found.sums | {"nll": len(target) * math.log(scale) - float(density.sum())}, found.arrays)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Quantiles [levels, N] of a noisy observation."""
        raise NotImplementedError

    def expected_with(self, targets: Tensor, mean: Tensor, variance: Tensor, noise: Noise) -> Tensor:
        """:meth:`expected` for jointly Gaussian (f, ζ): without Gaussian noise there is no ζ.

        Weighting by e^{−2ζ} moves the mean of f by −2 cov(f, ζ) and leaves its variance:
        E[e^{−2ζ}(y − f)²] = exp(−2 E ζ + 2 var ζ) [(y − m + 2 cov)² + v].
        """
        weighed = torch.atleast_1d(0.5 * noise.log_variance + noise.mean - noise.variance)
        return self.expected(targets, mean - 2 * noise.covariance, variance, weighed) - noise.variance

    def moments_with(self, mean: Tensor, variance: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """:meth:`moments` where E e^{2ζ} = exp(2 E ζ + 2 var ζ)."""
        return self.moments(mean, variance, torch.atleast_1d(0.5 * noise.log_variance + noise.mean + noise.variance))

    def _at_nodes(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1,) + (1,) * max(mean.ndim, variance.ndim)
        return mean + (2.0 * variance).sqrt() * self.nodes.view(shape), self.weights.view(shape)


class LearnedLikelihood(gpytorch.Module):
    """A likelihood whose parameters are learned; called as those of GPyTorch are."""

    def __init__(self, point: PointLikelihood, hyper: Tensor) -> None:
        super().__init__()
        self.point = point
        if hyper.numel():
            self.register_parameter("hyper", torch.nn.Parameter(hyper.clone()))
        else:
            self.register_buffer("hyper", hyper)

    def expected_log_prob(self, observations: Tensor, function_dist: MultivariateNormal) -> Tensor:
        """E log p(y_n | f_n) of each row, [N]."""
        return self.point.expected(observations, function_dist.mean, function_dist.variance, self.hyper)


def in_float64(likelihood: _OneDimensionalLikelihood, point: PointLikelihood) -> Likelihood:
    """With the same quadrature, in float64."""
    likelihood.quadrature.locations = point.nodes
    likelihood.quadrature.weights = point.weights * math.sqrt(math.pi)
    return likelihood
