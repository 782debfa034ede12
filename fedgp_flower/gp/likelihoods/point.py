"""The interface of a likelihood: E_q log p(y | f), predictive density, and moments, scores and quantiles of y.

Callers pass the likelihood parameters as logarithms, so that one call evaluates many samples of them. GPyTorch rounds
quadrature nodes to float32, and its ``log_normal_cdf`` has errors of up to 2e-3 just below −1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from fedgp_flower.scores import Scores, TargetUnits, bernoulli_scores, class_scores, mixture_scores
from fedgp_flower.typing import Array, Targets

WEAK = 0.01
"""Initial precision of f at a row, small enough for the first update to move f freely."""
REACH, NODES = 7.0, 113
"""Range in standard deviations and number of nodes of :func:`trapezoidal_rule`.

The error is below 1e-9 as long as the standard deviation of f is at most ten times that of the noise.
"""
HALVINGS, MOST_SLOPE = 60, 1e9
"""Bisections for the mode of an integrand, and the steepest slope from which it is found."""
NONE = torch.zeros(0, dtype=torch.float64)
"""The parameters of a likelihood without parameters."""

Slopes: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise variance σ² e^{2ζ} with a Gaussian offset ζ: log σ², and mean, variance and covariance under q(f, ζ)."""

    log_variance: Tensor
    mean: Tensor
    variance: Tensor
    covariance: Tensor  # cov(f_n, ζ)  [N]


def trapezoidal_rule(mean: Tensor, variance: Tensor, count: int = NODES) -> tuple[Tensor, Tensor]:
    """``count`` nodes [Q, *S, N] and weights [Q, 1, …], with sum 1, for expectations over f ~ N(mean, variance)."""
    nodes = torch.linspace(-REACH, REACH, count, dtype=torch.float64, device=mean.device).view(-1, *[1] * mean.ndim)
    weights = (-0.5 * nodes.square()).exp()
    return mean + variance.sqrt() * nodes, weights / weights.sum()


class PointLikelihood(ABC):
    """A likelihood ∏ p(y_n | f_n) over rows, for N rows, R parameters and any leading sample dimensions S.

    ``targets`` are [N], or [N, 2] with a second column: exposure, trials or event. ``hyper`` [*S, R] are the logarithms
    of the parameters. ``mean`` and ``variance`` [*S, N] are those of f ~ N(mean, variance), or [C, N] if p(y | f) takes
    C functions. Arrays are standardised unless a method names other units.
    """

    initial: Float[Tensor, " R"] = NONE
    """Initial parameters, as logarithms."""
    relative = False
    """Whether p(y | f) takes several functions and depends on their differences alone."""
    functions: tuple[str, ...] = ()
    """Names of functions with a kernel each. Several functions without names share one kernel."""
    outputscale, weight_variance = 2.0, 2.0
    """Initial k(x, x), for ``linear`` of a weight, unless ``model.outputscale`` is set."""
    amplitude_spread = 1.0
    """Prior standard deviation of the logarithm of a kernel's amplitude."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """The conditional log p(y | f) at values ``function`` [*S, N] of f: :meth:`expected` without variance."""
        return self.expected(targets, function, torch.zeros_like(function), hyper)

    def conditional(self, function: Tensor, hyper: Tensor) -> Distribution:
        """The distribution p(y | f) in torch, for an exposure or a number of trials of 1 and without censoring."""
        raise NotImplementedError

    def to_gpytorch(self, hyper: Float[Tensor, " R"]) -> Likelihood:
        """A GPyTorch likelihood; with several functions it samples them [*S, C, N]."""
        several = self.relative or self.functions
        return ConditionalLikelihood(self, hyper) if several else in_float64(QuadratureLikelihood(self, hyper))

    def start(self, target: Mapping[str, float], second_mean: float) -> float | Array:
        """Initial constant of f, or [C, 1] for C functions.

        ``target`` holds statistics of the target, ``second_mean`` is the mean of the second column (1 without one).
        """
        return 0.0

    def start_parameters(self, target: Mapping[str, float]) -> Float[Tensor, " R"]:
        """Initial parameters from statistics of the target."""
        return self.initial

    def as_function(self, targets: Targets) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Initial value and precision of f at each row; by default the target with precision :data:`WEAK`."""
        return targets, torch.full_like(targets, WEAK)

    @abstractmethod
    def expected(self, targets: Targets, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> Tensor:
        """E log p(y | f) [*S, N]."""

    def slopes(self, targets: Targets, mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """Σ_n :meth:`expected`, α = ∂/∂m [N], β = −2 ∂/∂s [N] for f ~ N(m, s), and the gradient by parameters [R]."""
        leaves = [values.detach().double().requires_grad_() for values in (mean, variance, hyper)]
        with torch.enable_grad():
            total = self.expected(targets, *leaves).sum()
        alpha, slope, by_hyper = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return total.detach(), alpha, -2 * slope, by_hyper

    def log_predictive(self, targets: Targets, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> Tensor:
        """Log ∫ p(y | f) N(f; mean, variance) df [*S, N], by default for a p(y | f) that is log-concave in f.

        By the trapezoidal rule in t, f = f̂ + s sinh t, with the mode f̂ of the integrand and its curvature s⁻² there.
        The nodes are dense where the integrand is narrow and reach as far as N(f; mean, variance) does.
        """
        sd, u = variance.sqrt(), torch.zeros_like(mean + variance, requires_grad=True)  # f = mean + sd u

        def slope(u: Tensor) -> Tensor:
            density = self.log_density(targets, mean + sd * u, hyper).sum()
            return torch.autograd.grad(density, u, create_graph=True)[0]

        with torch.enable_grad():
            end = slope(u).detach().clamp(-MOST_SLOPE, MOST_SLOPE)  # the mode is between 0 and the slope at 0
            low, high = end.clamp(max=0), end.clamp(min=0)
            for _ in range(HALVINGS):
                u = ((low + high) / 2).requires_grad_()
                rises = slope(u).detach() > u.detach()
                low, high = torch.where(rises, u.detach(), low), torch.where(rises, high, u.detach())
            root = (1 - torch.autograd.grad(slope(u).sum(), u)[0]).clamp(min=1).sqrt()
        nodes = torch.linspace(-1, 1, NODES, dtype=root.dtype, device=root.device).view(-1, *[1] * root.ndim)
        reach = ((REACH + 2) * root).asinh()
        shift = u.detach() + (reach * nodes).sinh() / root
        height = self.log_density(targets, mean + sd * shift, hyper) - shift.square() / 2 + (reach * nodes).cosh().log()
        spacing = 2 * reach / (NODES - 1) / root / math.sqrt(2 * math.pi)
        return torch.logsumexp(height, 0) + spacing.log()

    @abstractmethod
    def moments(self, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> tuple[Tensor, Tensor]:
        """Predictive mean and variance of y [*S, N]."""

    def observed(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`moments` given the second column of ``targets``, such as the exposure of each row."""
        return self.moments(mean, variance, hyper)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores in original units for a standardised target [N]; intervals and CRPS are those of :meth:`mixture`."""
        moments, hyper = (torch.from_numpy(mean), torch.from_numpy(variance)), hyper.detach().double().cpu()
        means, sds, weights = self.mixture(*moments, hyper)
        result = mixture_scores(units.scale * means, units.scale * sds, units.scale * target, weights)
        density = self.log_predictive(torch.from_numpy(target), *moments, hyper)
        return Scores(result.sums | {"nll": len(target) * math.log(units.scale) - float(density.sum())}, result.arrays)

    def mixture(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Array, Array, Array]:
        """Means and standard deviations [Q, N], and weights [Q], of Gaussians that stand for y; by default one."""
        centre, spread = self.moments(mean, variance, hyper)
        return centre[None].numpy(), spread.sqrt()[None].numpy(), np.ones(1)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Predictive quantiles of y [levels, N]; NotImplementedError if y is Gaussian or binary."""
        raise NotImplementedError

    def expected_with(self, targets: Tensor, mean: Tensor, variance: Tensor, noise: Noise) -> Tensor:
        """:meth:`expected` for jointly Gaussian (f, ζ), if the likelihood is Gaussian; others have no ζ.

        The weight e^{−2ζ} shifts the mean of f by −2 cov(f, ζ) and keeps its variance:
        E[e^{−2ζ}(y − f)²] = exp(−2 E ζ + 2 var ζ) [(y − m + 2 cov)² + v].
        """
        log_sd = torch.atleast_1d(0.5 * noise.log_variance + noise.mean - noise.variance)
        return self.expected(targets, mean - 2 * noise.covariance, variance, log_sd) - noise.variance

    def moments_with(self, mean: Tensor, variance: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """:meth:`moments` with the expected noise variance, σ² E e^{2ζ} = σ² exp(2 E ζ + 2 var ζ)."""
        return self.moments(mean, variance, torch.atleast_1d(0.5 * noise.log_variance + noise.mean + noise.variance))


class ClassLikelihood(PointLikelihood):
    """A likelihood of classes; moments are those of the indicator of the second of two classes, or of each class."""

    @abstractmethod
    def probability(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Predictive probability of the second of two classes [*S, N], or of each class [*S, N, C]."""

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """The probability p, and p (1 − p)."""
        probability = self.probability(mean, variance, hyper)
        return probability, probability * (1.0 - probability)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores of the probabilities."""
        moments = torch.from_numpy(mean), torch.from_numpy(variance)
        probability = self.probability(*moments, hyper.detach().double().cpu()).numpy()
        return bernoulli_scores(probability, target) if probability.ndim == 1 else class_scores(probability, target)


class ConditionalLikelihood(Likelihood):
    """A :class:`PointLikelihood` with fixed parameters [R] as a GPyTorch likelihood, which samples f."""

    def __init__(self, point: PointLikelihood, hyper: Tensor) -> None:
        super().__init__()
        self.point, self.hyper = point, hyper.detach()

    def forward(self, function_samples: Tensor, *_: object, **keywords: Tensor) -> Distribution:
        """The distribution p(y | f); keywords go to :meth:`PointLikelihood.conditional`."""
        return self.point.conditional(function_samples, self.hyper, **keywords)


class QuadratureLikelihood(ConditionalLikelihood, _OneDimensionalLikelihood):
    """The same for a single function, with Gauss–Hermite quadrature instead of samples."""


def in_float64(likelihood: _OneDimensionalLikelihood, nodes: int = 20) -> Likelihood:
    """Give a GPyTorch likelihood Gauss–Hermite quadrature in float64; returns the likelihood."""
    rule = likelihood.quadrature
    rule.locations, rule.weights = map(torch.from_numpy, np.polynomial.hermite.hermgauss(nodes))
    return likelihood
