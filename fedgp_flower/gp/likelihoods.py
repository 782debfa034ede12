"""Likelihoods: E_q log p(y | f), the predictive density, and the moments of y.

Callers pass the parameters, as logarithms, so that one call serves many samples of them. GPyTorch rounds the nodes of
quadrature to float32, and its ``log_normal_cdf`` is wrong by up to 2e-3 just below −1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood, StudentTLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Bernoulli, Poisson, StudentT

from fedgp_flower.gp.kernels import log_positive
from fedgp_flower.lazy import special
from fedgp_flower.scores import (
    Scores,
    bernoulli_scores,
    count_quantiles,
    count_scores,
    gaussian_scores,
    mixture_quantiles,
    mixture_scores,
)
from fedgp_flower.typing import Array

WEAK = 0.01
"""Precision of a label as a value of f: small enough for an update to move it anywhere."""
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


class PointLikelihood(ABC):
    """A likelihood that factorises over rows. Samples S, rows N, parameters R; any leading shape broadcasts alike."""

    initial: Float[Tensor, " R"] = NONE  # parameters at the start, in logarithms

    def __init__(self, nodes: int = 20) -> None:
        points, weights = np.polynomial.hermite.hermgauss(nodes)  # for N(0, ½)
        self._nodes, self._weights = torch.as_tensor(points), torch.as_tensor(weights / math.sqrt(math.pi))

    @abstractmethod
    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """The conditional log p(y | f)."""

    @abstractmethod
    def to_gpytorch(self, hyper: Float[Tensor, " R"]) -> Likelihood:
        """The same model as a likelihood of GPyTorch."""

    def as_function(self, targets: Float[Tensor, " N"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Values of f that targets suggest, and the precision of each: where factors start; here weak."""
        return targets, torch.full_like(targets, WEAK)

    def expected(
        self, targets: Float[Tensor, " N"], mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]
    ) -> Tensor:
        """E log p(y | f) with f ~ N(mean, variance), both [*S, N]: Σ_j w_j log p(y | m + √(2v) x_j)."""
        function, weights = self._at_nodes(mean, variance)
        return (weights * self.log_density(targets, function, hyper)).sum(0)

    def slopes(self, targets: Float[Tensor, " N"], mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """Σ of :meth:`expected`, α = ∂/∂m and β = −2 ∂/∂s [N] of f ~ N(m, s), and the derivative by parameters [R]."""
        leaves = [values.detach().double().requires_grad_() for values in (mean, variance, hyper)]
        with torch.enable_grad():
            total = self.expected(targets, *leaves).sum()
        alpha, slope, by_hyper = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return total.detach(), alpha, -2 * slope, by_hyper

    def log_predictive(
        self, targets: Float[Tensor, " N"], mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]
    ) -> Tensor:
        """Log ∫ p(y | f) N(f; mean, variance) df, in logarithms: far from every node it is small, but not zero."""
        function, weights = self._at_nodes(mean, variance)
        return torch.logsumexp(self.log_density(targets, function, hyper) + weights.log(), 0)

    @abstractmethod
    def moments(self, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "*S R"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a noisy observation."""

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Float[Tensor, " R"], scale: float) -> Scores:
        """Scores in original units of a target standardised by ``scale``; intervals and CRPS as of a Gaussian."""
        moments, hyper = (torch.from_numpy(mean), torch.from_numpy(variance)), hyper.detach().double().cpu()
        centre, spread = (part.numpy() for part in self.moments(*moments, hyper))
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
        return mean + (2.0 * variance).sqrt() * self._nodes.view(shape), self._weights.view(shape)


class GaussianNoise(PointLikelihood):
    """p(y | f) = N(y; f, σ²) with σ = exp(β_last): everything in closed form."""

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        self.initial = torch.tensor([0.5 * math.log(noise)], dtype=torch.float64)

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log N(y; f, σ²)."""
        return self.expected(targets, function, torch.zeros_like(function), hyper)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Gaussian likelihood."""
        return gaussian_likelihood(float((2.0 * hyper[-1]).exp()))

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets themselves, with precision 1 in units of 1/σ²."""
        return targets, torch.ones_like(targets)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−½ log 2πσ² − ((y − m)² + v) / 2σ²."""
        noise = (2.0 * hyper[..., -1:]).exp()
        return -0.5 * (torch.log(2 * math.pi * noise) + ((targets - mean).square() + variance) / noise)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log density log N(y; m, v + σ²)."""
        total = variance + (2.0 * hyper[..., -1:]).exp()
        return -0.5 * (torch.log(2 * math.pi * total) + (targets - mean).square() / total)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + σ²."""
        return mean, variance + (2.0 * hyper[..., -1:]).exp()


class Probit(PointLikelihood):
    """Labels y ∈ {0, 1} with p(y = 1 | f) = Φ(f); the predictive probability Φ(m / √(1 + v)) is closed form."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log Φ((2y − 1) f)."""
        values: Tensor = torch.special.log_ndtr((2.0 * targets - 1.0) * function)
        return values

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Bernoulli likelihood."""
        return _float64(BernoulliLikelihood(), self)

    def slopes(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """In closed form, also where f is wide."""
        sign = 2.0 * targets.double() - 1.0
        value, alpha, beta = expected_log_probit(sign * mean.double(), variance.double())
        return value.sum(), sign * alpha, beta, torch.zeros_like(hyper)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log Φ(±m / √(1 + v))."""
        return self.log_density(targets, mean / (1.0 + variance).sqrt(), hyper)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments p = E Φ(f) = Φ(m / √(1 + v)) and p (1 − p)."""
        probability = torch.special.ndtr(mean / (1.0 + variance).sqrt())
        return probability, probability * (1.0 - probability)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, scale: float) -> Scores:
        """Of the probability of the second class."""
        probability, _ = self.moments(torch.from_numpy(mean), torch.from_numpy(variance), hyper)
        return bernoulli_scores(probability.numpy(), target)


class Counts(PointLikelihood):
    """Poisson counts with rate eᶠ; all but the predictive mass is closed form."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Y f − eᶠ − log y!."""
        return targets * function - function.exp() - torch.lgamma(targets + 1.0)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogPoisson`: GPyTorch has none."""
        return _float64(LogPoisson(), self)

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


FREEDOM = 4.0
"""Degrees of freedom ν of Student-t noise: tails that outliers do not move, and a variance, 2σ²."""
SPACING = 0.3
"""Of the trapezoidal rule in a logarithm: for integrands that end as exp(−eˣ) it is wrong by less than 1e-10."""


def logarithmic_rule(low: float, high: float, trailing: int) -> Tensor:
    """Nodes eˣ with x evenly spaced, [Q] and as many axes of length one as values have."""
    nodes = torch.arange(low, high, SPACING, dtype=torch.float64).exp()
    return nodes.view(-1, *[1] * trailing)


class HeavyTailed(PointLikelihood):
    """Student-t noise with ν = 4; the parameter is log of its scale σ."""

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__(nodes=200)
        self.initial = torch.tensor([0.5 * math.log(noise)], dtype=torch.float64)

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log density of Student-t noise around f."""
        return StudentT(FREEDOM, function, hyper[..., -1:].exp(), validate_args=False).log_prob(targets)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """By an integral of closed forms, as exact where f is wider than the noise.

        With a = νσ², r = y − f ~ N(d, s) and any B > 0 (Frullani's integral),

            E log(a + r²) = log B + ∫ [e^{−t} − E e^{−t (a + r²)/B}] dt/t,
            E e^{−t r²/B} = (1 + 2ts/B)^{−½} exp(−t d²/(B + 2ts)).

        With B = E(a + r²) the integrand vanishes as t² where t is small.
        """
        scale, apart = FREEDOM * (2.0 * hyper[..., -1:]).exp(), (targets - mean).square()
        size = scale + apart + variance
        t = logarithmic_rule(-13.0, 17.0, size.ndim)
        wide = 1.0 + 2.0 * t * variance / size
        inside = (-t * (scale + apart / wide) / size).exp() * wide.rsqrt()
        logarithm = size.log() + SPACING * ((-t).exp() - inside).sum(0)
        half = (FREEDOM + 1.0) / 2.0
        normaliser = math.lgamma(half) - math.lgamma(FREEDOM / 2.0) - 0.5 * math.log(math.pi)
        return normaliser + FREEDOM / 2.0 * scale.log() - half * logarithm

    def components(self, mean: Tensor, variance: Tensor, hyper: Tensor, low: float = -9.0) -> tuple[Tensor, Tensor]:
        """Variances and shares [Q, *S, N] of Gaussians around the mean that are the predictive distribution.

        Student-t noise is normal with variance σ²/g, g ~ Gamma(ν/2, ν/2).
        """
        del mean
        g, half = logarithmic_rule(low, 3.2, variance.ndim), FREEDOM / 2.0
        shares = SPACING * (half * (half * g).log() - half * g - math.lgamma(half)).exp()
        return variance + (2.0 * hyper[..., -1:]).exp() / g, shares

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log density of Student-t noise and a normal f together."""
        total, shares = self.components(mean, variance, hyper, low=-45.0)
        parts = shares.log() - 0.5 * (torch.log(2 * math.pi * total) + (targets - mean).square() / total)
        return torch.logsumexp(parts, 0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + σ² ν / (ν − 2)."""
        return mean, variance + (2.0 * hyper[..., -1:]).exp() * FREEDOM / (FREEDOM - 2.0)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, scale: float) -> Scores:
        """Of the true predictive distribution."""
        centre, spread, hyper = torch.from_numpy(mean), torch.from_numpy(variance), hyper.detach().double().cpu()
        total, shares = (part.numpy() for part in self.components(centre, spread, hyper))
        sds = scale * np.sqrt(total)
        found = mixture_scores(np.broadcast_to(scale * mean, sds.shape), sds, scale * target, shares[:, 0])
        density = self.log_predictive(torch.from_numpy(target), centre, spread, hyper)
        return Scores(found.sums | {"nll": len(target) * math.log(scale) - float(density.sum())}, found.arrays)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Of the true predictive distribution."""
        spread = torch.from_numpy(variance)
        total, shares = (part.numpy() for part in self.components(spread, spread, hyper))
        sds = np.sqrt(total)
        return mixture_quantiles(np.broadcast_to(mean, sds.shape), sds, levels, shares[:, 0])

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Student-t likelihood."""
        likelihood = StudentTLikelihood(noise_constraint=log_positive()).double()
        likelihood.noise, likelihood.deg_free = (2.0 * hyper[-1]).exp(), FREEDOM
        return _float64(likelihood, self)


def build_point_likelihood(name: str, *, noise: float = 0.1, nodes: int = 20) -> PointLikelihood:
    """The likelihood that ``model.likelihood`` names; ``noise`` is the initial σ² or squared scale."""
    if name in {"gaussian", "student-t"}:
        return (GaussianNoise if name == "gaussian" else HeavyTailed)(noise)
    return (Probit if name == "bernoulli" else Counts)(nodes)


def gaussian_likelihood(noise: float) -> GaussianLikelihood:
    """Gaussian noise of this variance, learned in log coordinates without a floor."""
    likelihood = GaussianLikelihood(noise_constraint=log_positive()).double()
    likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    return likelihood


class LogisticLabels(_OneDimensionalLikelihood):
    """Labels with log odds f, as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Bernoulli:
        """The distribution of y given f."""
        return Bernoulli(logits=function_samples)


class LogPoisson(_OneDimensionalLikelihood):
    """Counts with rate eᶠ, as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Poisson:
        """The distribution of y given f."""
        return Poisson(function_samples.exp(), validate_args=False)


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


def _float64(likelihood: _OneDimensionalLikelihood, point: PointLikelihood) -> Likelihood:
    """With the same quadrature, in float64."""
    likelihood.quadrature.locations = point._nodes
    likelihood.quadrature.weights = point._weights * math.sqrt(math.pi)
    return likelihood


STEP, WIDTH, GROWTH, RIGHT, LEFT = 0.25, 1.5, 0.18, 4.0, 60.0
"""Spacing of centres and width over spacing at the right end, growth of both to the left, and how far they go."""


@cache
def probit_mixture() -> tuple[Array, Array, Array]:
    """Centres c, widths w and weights p [27], by relative least squares on 1 + (log Φ)″ = 1 − h (h + x), h = φ/Φ."""
    size = STEP / GROWTH
    count = math.ceil(math.asinh((LEFT + RIGHT) / size) / GROWTH) + 1
    index = np.arange(count)
    centres, widths = RIGHT - size * np.sinh(GROWTH * index), WIDTH * STEP * np.cosh(GROWTH * index)
    x = RIGHT - size * np.sinh(GROWTH * np.linspace(-2, count - 1, 2000))
    ratio = math.sqrt(2 / math.pi) / special.erfcx(-x / math.sqrt(2))
    wanted = 1 - ratio * (ratio + x)
    exact = 1 / np.maximum(wanted, 1e-3)
    rows = np.vstack([exact[:, None] * special.ndtr((x[:, None] - centres) / widths), np.full(count, 100.0)])  # Σ p = 1
    weights = np.linalg.lstsq(rows, np.append(exact * wanted, 100.0), rcond=1e-13)[0]
    return centres, widths, weights


def expected_log_probit(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log Φ(f), f ~ N(m, s), α = ∂/∂m and β = −2 ∂/∂s of each row [N], at any variance.

    1 + (log Φ)″ rises from 0 to 1, so it is a distribution function, which Σ pᵢ Φ((x − cᵢ)/wᵢ) approximates as Monahan
    and Stefanski (1992) do for the logistic. Integrated twice, with tᵢ = √(s + wᵢ²), uᵢ = m − cᵢ and z = uᵢ/tᵢ,

        E log Φ = −½ Σ pᵢ [(uᵢ² + tᵢ²) Φ(−z) − uᵢ tᵢ φ(z)],   α = Σ pᵢ [tᵢ φ(z) − uᵢ Φ(−z)],   β = Σ pᵢ Φ(−z).
    """
    value, alpha, beta = (torch.zeros_like(mean) for _ in range(3))
    for centre, width, weight in zip(*probit_mixture(), strict=True):
        apart, spread = mean - centre, (variance + width**2).sqrt()
        z = apart / spread
        tail, density = torch.special.ndtr(-z), spread * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        value -= 0.5 * weight * ((apart.square() + spread.square()) * tail - apart * density)
        alpha += weight * (density - apart * tail)
        beta += weight * tail
    return value, alpha, beta


NODES, LEAST, MOST = 14, 0.25, 3.0
"""Of the rule, and the ends of K: σ is wrong by less than 1e-9."""


@cache
def logistic_mixture() -> tuple[Tensor, Tensor]:
    """Widths w = 2K and weights p [NODES], with Σ p = 1 exactly."""
    k = np.exp(np.linspace(math.log(LEAST), math.log(MOST), NODES))
    n = np.arange(1, 30)[:, None]
    right = 8 * k * ((-1.0) ** (n + 1) * n**2 * np.exp(-2 * (n * k) ** 2)).sum(0)
    odd = ((2 * n - 1) * math.pi) ** 2
    left = math.sqrt(2 * math.pi) * ((odd / (4 * k**4) - 1 / k**2) * np.exp(-odd / (8 * k**2))).sum(0)
    weights = k * np.where(k < 1, left, right)  # two series of one density; each converges on its side
    return torch.from_numpy(2 * k), torch.from_numpy(weights / weights.sum())


def expected_softplus(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E log(1 + eᶠ), E σ(f) and E σ′(f), f ~ N(m, v), of each row [N], at any variance.

    A logistic variable is 2KZ with Z ~ N(0, 1) and K of the Kolmogorov distribution (Andrews & Mallows 1974), so that
    σ(f) = E Φ(f / 2K). The trapezoidal rule over log K gives Σ pᵢ Φ(f / wᵢ), and with tᵢ = √(v + wᵢ²) and z = m/tᵢ

        E log(1 + eᶠ) = Σ pᵢ [m Φ(z) + tᵢ φ(z)],   E σ(f) = Σ pᵢ Φ(z),   E σ′(f) = Σ pᵢ φ(z)/tᵢ.
    """
    m, v, (width, weight) = mean.reshape(-1), variance.reshape(-1), logistic_mixture()
    squares, normal = width.square()[:, None], torch.stack([weight, weight * width.square()]) / math.sqrt(2 * math.pi)
    scale = (v + squares).rsqrt()  # 1 / tᵢ
    z = scale * m
    below = weight @ torch.special.ndtr(z)
    slope, rest = normal @ ((-0.5 * z.square()).exp() * scale)  # of φ(z) / tᵢ, and tᵢ² = v + wᵢ²
    value = m * below + v * slope + rest
    return value.view_as(mean), below.view_as(mean), slope.view_as(mean)


class Logit(PointLikelihood):
    """Labels y ∈ {0, 1} with p(y = 1 | f) = σ(f): logistic regression where f is linear."""

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log σ((2y − 1) f)."""
        return torch.nn.functional.logsigmoid((2.0 * targets - 1.0) * function)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`LogisticLabels`: GPyTorch has none."""
        return _float64(LogisticLabels(), self)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−E log(1 + e^{−(2y − 1) f})."""
        return -expected_softplus((1.0 - 2.0 * targets) * mean, variance)[0]

    def slopes(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """In closed form: α = y − E σ(f), β = E σ′(f)."""
        sign = 1.0 - 2.0 * targets
        value, share, density = expected_softplus(sign * mean, variance)
        return -value.sum(), -sign * share, density, torch.zeros_like(hyper)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log E σ((2y − 1) f), summed in logarithms."""
        width, weight = (part.view(-1, *[1] * mean.ndim) for part in logistic_mixture())
        z = (2.0 * targets - 1.0) * mean / (variance + width.square()).sqrt()
        return torch.logsumexp(weight.log() + torch.special.log_ndtr(z), 0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments p = E σ(f) and p (1 − p)."""
        probability = expected_softplus(mean, variance)[1]
        return probability, probability * (1.0 - probability)


def canonical_likelihood(name: str, noise: float = 0.1) -> PointLikelihood:
    """The likelihood of ``model.likelihood`` with its canonical link: for two classes the logit."""
    return Logit() if name == "bernoulli" else build_point_likelihood(name, noise=noise)
