"""Likelihoods of real targets: Gaussian noise with constant or input-dependent variance, and Student-t noise."""

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
from fedgp_flower.gp.likelihoods.point import NODES, PointLikelihood, in_float64, trapezoidal_rule
from fedgp_flower.scores import Prediction, Scores, TargetUnits, mixture_quantiles
from fedgp_flower.typing import Array


def gaussian_likelihood(noise: float) -> GaussianLikelihood:
    """GPyTorch's Gaussian likelihood with noise variance ``noise``, trained in log σ² without a lower bound."""
    likelihood = GaussianLikelihood(noise_constraint=log_positive()).double()
    likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    return likelihood


class GaussianNoise(PointLikelihood):
    """p(y | f) = N(y; f, σ²); the parameter is log σ. Every expectation is in closed form."""

    def __init__(self, noise: float = 0.1) -> None:
        self.initial = torch.tensor([0.5 * math.log(noise)], dtype=torch.float64)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Gaussian likelihood."""
        return gaussian_likelihood(float((2.0 * hyper[-1]).exp()))

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets, with precision 1 in units of 1/σ²."""
        return targets, torch.ones_like(targets)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−½ log 2πσ² − ((y − m)² + v) / 2σ²."""
        noise = (2.0 * hyper[..., -1:]).exp()
        return -0.5 * (torch.log(2 * math.pi * noise) + ((targets - mean).square() + variance) / noise)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log N(y; m, v + σ²)."""
        total = variance + (2.0 * hyper[..., -1:]).exp()
        return -0.5 * (torch.log(2 * math.pi * total) + (targets - mean).square() / total)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + σ²."""
        return mean, variance + (2.0 * hyper[..., -1:]).exp()

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores in original units, also of a transformed target."""
        moments = self.moments(torch.from_numpy(mean), torch.from_numpy(variance), hyper.detach().double().cpu())
        return units.gaussian_scores(Prediction(*(part.numpy() for part in moments)), target)


class MixedNoise(PointLikelihood):
    """A real target whose predictive distribution is a mixture of Gaussians with a common mean."""

    @abstractmethod
    def components(self, mean: Tensor, variance: Tensor, hyper: Tensor, *, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [*S, N], variances [Q, *S, N] and weights [Q, 1, …] of the components; more components if ``fine``."""

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Logarithm of the mixture density at y."""
        centre, total, weights = self.components(mean, variance, hyper, fine=True)
        parts = weights.log() - 0.5 * (torch.log(2 * math.pi * total) + (targets - centre).square() / total)
        return torch.logsumexp(parts, 0)

    def quantiles(self, mean: Array, variance: Array, hyper: Tensor, levels: Sequence[float]) -> Array:
        """Quantiles of the mixture [levels, N]."""
        means, sds, weights = self.mixture(torch.from_numpy(mean), torch.from_numpy(variance), hyper)
        return mixture_quantiles(means, sds, levels, weights)

    def mixture(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Array, Array, Array]:
        """Means and standard deviations [Q, N], and weights [Q]."""
        centre, total, weights = self.components(mean, variance, hyper, fine=False)
        return centre.expand_as(total).numpy(), total.sqrt().numpy(), weights[:, 0].numpy()


LEAST, MOST = 2.5, 20.0
"""Bounds of the degrees of freedom ν of Student-t noise: the variance is finite, and the noise nearly Gaussian."""
KAPPA = 1 / (1 / (4.0 - LEAST) - 1 / (MOST - LEAST))
"""The κ that gives ν = 4."""


def freedom_of(hyper: Tensor) -> Tensor:
    """ν = 2.5 + κ / (1 + κ / 17.5) [*S, 1] from parameters (log κ, log σ) [*S, 2]; ν = 4 from log σ alone [*S, 1]."""
    kappa = hyper[..., :-1].exp() if hyper.shape[-1] > 1 else torch.full_like(hyper, KAPPA)
    return LEAST + kappa / (1 + kappa / (MOST - LEAST))


class HeavyTailed(MixedNoise):
    """Student-t noise; the parameters are log κ (see :func:`freedom_of`) and the log scale log σ."""

    def __init__(self, noise: float = 0.1) -> None:
        self.initial = torch.tensor([math.log(KAPPA), 0.5 * math.log(noise)], dtype=torch.float64)

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log Student-t density of y − f."""
        return StudentT(freedom_of(hyper), function, hyper[..., -1:].exp(), validate_args=False).log_prob(targets)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E log p(y | f), by Frullani's integral, which is as accurate for large as for small variances of f.

        With a = νσ², r = y − f ~ N(d, s) and any B > 0,

            E log(a + r²) = log B + ∫ [e^{−t} − E e^{−t (a + r²)/B}] dt/t,
            E e^{−t r²/B} = (1 + 2ts/B)^{−½} exp(−t d²/(B + 2ts)).

        With B = E(a + r²) the integrand is O(t²) as t → 0.
        """
        freedom, distance = freedom_of(hyper), (targets - mean).square()
        scale = freedom * (2.0 * hyper[..., -1:]).exp()
        size = scale + distance + variance
        t = logarithmic_rule(-13.0, 17.0, size)
        widened = 1.0 + 2.0 * t * variance / size
        transform = (-t * (scale + distance / widened) / size).exp() * widened.rsqrt()
        logarithm = size.log() + SPACING * ((-t).exp() - transform).sum(0)
        half = (freedom + 1.0) / 2.0
        normaliser = torch.lgamma(half) - torch.lgamma(freedom / 2.0) - 0.5 * math.log(math.pi)
        return normaliser + freedom / 2.0 * scale.log() - half * logarithm

    def components(self, mean: Tensor, variance: Tensor, hyper: Tensor, *, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Student-t noise is Gaussian with variance σ²/g, g ~ Gamma(ν/2, ν/2)."""
        g, half = logarithmic_rule(-45.0 if fine else -9.0, 3.2, variance), freedom_of(hyper) / 2.0
        weights = SPACING * (half * (half * g).log() - half * g - torch.lgamma(half)).exp()
        return mean, variance + (2.0 * hyper[..., -1:]).exp() / g, weights

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + σ² ν / (ν − 2)."""
        freedom = freedom_of(hyper)
        return mean, variance + (2.0 * hyper[..., -1:]).exp() * freedom / (freedom - 2.0)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """GPyTorch's Student-t likelihood."""
        likelihood = StudentTLikelihood(noise_constraint=log_positive()).double()
        likelihood.noise, likelihood.deg_free = (2.0 * hyper[-1]).exp(), freedom_of(hyper)
        return in_float64(likelihood, nodes=200)


class Heteroscedastic(MixedNoise):
    """Input-dependent noise: p(y | f, g) = N(y; f, e^g) with Gaussian processes f and g (Goldberg et al. 1998).

    With f ~ N(m, v) and g ~ N(a, b), independent under q, and w = e^{−a + b/2} = E e^{−g} (Lázaro-Gredilla & Titsias
    2011),

        E log p(y | f, g) = −½ [log 2π + a + ((y − m)² + v) w],

    so that f has α = (y − m) w and β = w, and g has β = ½ ((y − m)² + v) w and α = β − ½. It is concave in m and in a.
    """

    functions = ("mean", "noise")

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise

    def start(self, target: Mapping[str, float], second_mean: float) -> Array:
        """Constants of f and g [2, 1]: zero and the logarithm of the initial noise variance."""
        return np.array([[0.0], [math.log(self.noise)]])

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−½ [log 2π + a + ((y − m)² + v) w]."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        return -0.5 * (math.log(2 * math.pi) + a + ((targets - m).square() + v) * (b / 2 - a).exp())

    def components(self, mean: Tensor, variance: Tensor, hyper: Tensor, *, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Given g, y is Gaussian with variance v + e^g."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        g, weights = trapezoidal_rule(a, b, NODES if fine else 25)
        return m, v + g.exp(), weights

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + e^{a + b/2}."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        return m, v + (a + b / 2).exp()

    def conditional(self, function: Tensor, hyper: Tensor) -> Normal:
        """N(y; f, e^g) given functions [*S, 2, N]."""
        return Normal(function[..., 0, :], (function[..., 1, :] / 2).exp())
