"""Numbers with Gaussian noise, constant or varying, in closed form, and with the heavy tails of Student's t."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, StudentTLikelihood
from torch import Tensor
from torch.distributions import Normal, StudentT

from fedgp_flower.gp.kernels import log_positive
from fedgp_flower.gp.likelihoods.integrals import SPACING, logarithmic_rule
from fedgp_flower.gp.likelihoods.point import PointLikelihood, in_float64, rule
from fedgp_flower.scores import Scores, TargetUnits, mixture_quantiles, mixture_scores
from fedgp_flower.typing import Array


def gaussian_likelihood(noise: float) -> GaussianLikelihood:
    """Gaussian noise of this variance, learned in log coordinates without a floor."""
    likelihood = GaussianLikelihood(noise_constraint=log_positive()).double()
    likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    return likelihood


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


class MixedNoise(PointLikelihood):
    """Numbers whose predictive distribution is a mixture of Gaussians around one mean."""

    @abstractmethod
    def components(
        self, mean: Tensor, variance: Tensor, hyper: Tensor, *, fine: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Their mean [*S, N], variances [Q, *S, N] and shares [Q, 1, …]; ``fine`` is for densities far away."""

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log density of noise and a normal f together."""
        centre, total, shares = self.components(mean, variance, hyper, fine=True)
        parts = shares.log() - 0.5 * (torch.log(2 * math.pi * total) + (targets - centre).square() / total)
        return torch.logsumexp(parts, 0)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Of the true predictive distribution."""
        moments, hyper = (torch.from_numpy(mean), torch.from_numpy(variance)), hyper.detach().double().cpu()
        means, sds, shares = self._mixture(*moments, hyper)
        found = mixture_scores(units.scale * means, units.scale * sds, units.scale * target, shares)
        density = self.log_predictive(torch.from_numpy(target), *moments, hyper)
        return Scores(found.sums | {"nll": len(target) * math.log(units.scale) - float(density.sum())}, found.arrays)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Of the true predictive distribution."""
        means, sds, shares = self._mixture(torch.from_numpy(mean), torch.from_numpy(variance), hyper)
        return mixture_quantiles(means, sds, levels, shares)

    def _mixture(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Array, Array, Array]:
        """Means and sds [Q, N], and shares [Q]."""
        centre, total, shares = self.components(mean, variance, hyper)
        return centre.expand_as(total).numpy(), total.sqrt().numpy(), shares[:, 0].numpy()


LEAST, MOST = 2.5, 20.0
"""Degrees of freedom ν of Student-t noise: so many that it has a variance, and so many that it is nearly normal."""
KAPPA = 1 / (1 / (4.0 - LEAST) - 1 / (MOST - LEAST))
"""Of ν = 4."""


def freedom_of(hyper: Tensor) -> Tensor:
    """ν = 2.5 + κ / (1 + κ / 17.5) [*S, 1] of parameters (log κ, log σ) [*S, 2]; ν = 4 where they are log σ alone."""
    kappa = hyper[..., :-1].exp() if hyper.shape[-1] > 1 else torch.full_like(hyper, KAPPA)
    return LEAST + kappa / (1 + kappa / (MOST - LEAST))


class HeavyTailed(MixedNoise):
    """Student-t noise; the parameters are log κ of its degrees of freedom, and log of its scale σ."""

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__(nodes=200)
        self.initial = torch.tensor([math.log(KAPPA), 0.5 * math.log(noise)], dtype=torch.float64)

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log density of Student-t noise around f."""
        return StudentT(freedom_of(hyper), function, hyper[..., -1:].exp(), validate_args=False).log_prob(targets)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """By an integral of closed forms, as exact where f is wider than the noise.

        With a = νσ², r = y − f ~ N(d, s) and any B > 0 (Frullani's integral),

            E log(a + r²) = log B + ∫ [e^{−t} − E e^{−t (a + r²)/B}] dt/t,
            E e^{−t r²/B} = (1 + 2ts/B)^{−½} exp(−t d²/(B + 2ts)).

        With B = E(a + r²) the integrand vanishes as t² where t is small.
        """
        freedom, apart = freedom_of(hyper), (targets - mean).square()
        scale = freedom * (2.0 * hyper[..., -1:]).exp()
        size = scale + apart + variance
        t = logarithmic_rule(-13.0, 17.0, size.ndim)
        wide = 1.0 + 2.0 * t * variance / size
        inside = (-t * (scale + apart / wide) / size).exp() * wide.rsqrt()
        logarithm = size.log() + SPACING * ((-t).exp() - inside).sum(0)
        half = (freedom + 1.0) / 2.0
        normaliser = torch.lgamma(half) - torch.lgamma(freedom / 2.0) - 0.5 * math.log(math.pi)
        return normaliser + freedom / 2.0 * scale.log() - half * logarithm

    def components(
        self, mean: Tensor, variance: Tensor, hyper: Tensor, *, fine: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Student-t noise is normal with variance σ²/g, g ~ Gamma(ν/2, ν/2)."""
        g, half = logarithmic_rule(-45.0 if fine else -9.0, 3.2, variance.ndim), freedom_of(hyper) / 2.0
        shares = SPACING * (half * (half * g).log() - half * g - torch.lgamma(half)).exp()
        return mean, variance + (2.0 * hyper[..., -1:]).exp() / g, shares

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + σ² ν / (ν − 2)."""
        freedom = freedom_of(hyper)
        return mean, variance + (2.0 * hyper[..., -1:]).exp() * freedom / (freedom - 2.0)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Student-t likelihood."""
        likelihood = StudentTLikelihood(noise_constraint=log_positive()).double()
        likelihood.noise, likelihood.deg_free = (2.0 * hyper[-1]).exp(), freedom_of(hyper)
        return in_float64(likelihood, self)


class Heteroscedastic(MixedNoise):
    """Noise that varies: p(y | f, g) = N(y; f, e^g), g a Gaussian process beside f (Goldberg, Williams & Bishop 1998).

    With f ~ N(m, v) and g ~ N(a, b), independent under q, and w = e^{−a + b/2} = E e^{−g} (Lázaro-Gredilla & Titsias
    2011),

        E log p(y | f, g) = −½ [log 2π + a + ((y − m)² + v) w],

    so that α = (y − m) w and β = w of f, and α = β − ½ and β = ½ ((y − m)² + v) w of g: both are log-concave.
    """

    functions = ("mean", "noise")

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        self.noise = noise

    def start(self, target: Mapping[str, float], beside: float) -> Array:
        """Zero, and the logarithm of the initial noise variance [2, 1]."""
        del target, beside
        return np.array([[0.0], [math.log(self.noise)]])

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log N(y; f, e^g)."""
        return self.expected(targets, function, torch.zeros_like(function), hyper)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """In closed form."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        return -0.5 * (math.log(2 * math.pi) + a + ((targets - m).square() + v) * (b / 2 - a).exp())

    def components(
        self, mean: Tensor, variance: Tensor, hyper: Tensor, *, fine: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Given g the observation is normal with variance v + e^g."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        g, shares = rule(a, b) if fine else self._at_nodes(a, b)
        return m, v + g.exp(), shares

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + e^{a + b/2}."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        return m, v + (a + b / 2).exp()

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`NoiseOfFunction`, which draws functions."""
        return NoiseOfFunction()


class NoiseOfFunction(Likelihood):
    """Numbers around the first of two functions [*S, 2, N] with e^g as variance, as a likelihood of GPyTorch."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Normal:
        """The distribution of y given f and g."""
        return Normal(function_samples[..., 0, :], (function_samples[..., 1, :] / 2).exp())
