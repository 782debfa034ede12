"""What a sparse posterior asks of a likelihood: E_q log p(y | f), and the predictive density, for samples of β at once.

The Gaussian case is closed form; Bernoulli, Poisson and Student-t are GPyTorch's, by Gauss–Hermite quadrature.
Likelihood parameters are the last entries of β, as logarithms of standard deviations (or of what they are).
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import gpytorch
import numpy as np
import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, StudentTLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal, Poisson, StudentT

from fedgp_flower.errors import ConfigError

WEAK = 0.01
"""Precision of a label as a value of f: small enough for an update to move it anywhere."""


@runtime_checkable
class PointLikelihood(Protocol):
    """A likelihood that factorises over rows. Samples S, rows N, own hyperparameters R."""

    @property
    def initial(self) -> Float[Tensor, " R"]:
        """Own hyperparameters at the start, in logarithms."""

    def as_function(self, targets: Float[Tensor, " N"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Values of f that targets, or averages of them, suggest, and the precision of each: where factors start."""

    def expected(
        self, targets: Float[Tensor, " N"], mean: Tensor, variance: Tensor, hyper: Float[Tensor, "S R"]
    ) -> Float[Tensor, "S N"]:
        """E log p(y | f) with f ~ N(mean, variance), both [S, N]."""

    def log_predictive(
        self, targets: Float[Tensor, " N"], mean: Tensor, variance: Tensor, hyper: Float[Tensor, "S R"]
    ) -> Float[Tensor, "S N"]:
        """Log predictive density log ∫ p(y | f) N(f; mean, variance) df."""

    def moments(self, mean: Tensor, variance: Tensor, hyper: Float[Tensor, "S R"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a noisy observation, both [S, N]."""


class GaussianNoise:
    """p(y | f) = N(y; f, σ²) with σ = exp(β_last): everything in closed form."""

    def __init__(self, noise: float = 0.1) -> None:
        """``noise``: initial variance σ², in squared units of y."""
        self.initial = torch.tensor([0.5 * math.log(noise)], dtype=torch.float64)

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets themselves, with precision 1 in units of 1/σ²."""
        return targets, torch.ones_like(targets)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """−½ log 2πσ² − ((y − m)² + v) / 2σ²."""
        noise = (2.0 * hyper[:, -1:]).exp()  # [S, 1]
        return -0.5 * (torch.log(2 * math.pi * noise) + ((targets - mean).square() + variance) / noise)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log density log N(y; m, v + σ²)."""
        total = variance + (2.0 * hyper[:, -1:]).exp()
        return -0.5 * (torch.log(2 * math.pi * total) + (targets - mean).square() / total)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v + σ²."""
        return mean, variance + (2.0 * hyper[:, -1:]).exp()


class Quadrature:
    """Bernoulli (probit), Poisson (log link) and Student-t likelihoods, by 20-point Gauss–Hermite quadrature."""

    def __init__(self, likelihood: Likelihood, initial: Tensor) -> None:
        self._likelihood = likelihood
        self.initial = initial

    def as_function(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Counts y suggest f = log(y + ½) with precision y + ½, the inverse variance of that logarithm.

        Labels and real values with outliers are no values of f; taken as such, but weak, they only break the symmetry.
        """
        if isinstance(self._likelihood, _LogPoisson):
            return (targets + 0.5).log(), targets + 0.5
        return targets, torch.full_like(targets, WEAK)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Σ_j w_j log p(y | m + √(2v) x_j)."""
        return self._at(hyper, "expected_log_prob", targets, mean, variance)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log predictive density log Σ_j w_j p(y | m + √(2v) x_j), of labels log Φ(±m/√(1 + v)).

        Summed in logarithms: far from every node the density is small, but not zero.
        """
        if isinstance(self._likelihood, BernoulliLikelihood):
            return self._at(hyper, "log_marginal", targets, mean, variance)
        nodes, weights = _nodes()
        log_density = self._conditional(mean + torch.sqrt(2.0 * variance) * nodes, hyper).log_prob(targets)
        return torch.logsumexp(log_density + weights.log(), 0)

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Moments of y by the laws of total expectation and variance over the quadrature nodes."""
        nodes, weights = _nodes()
        y = self._conditional(mean + torch.sqrt(2.0 * variance) * nodes, hyper)
        first = (weights * y.mean).sum(0)
        second = (weights * (y.variance + y.mean.square())).sum(0)
        return first, second - first.square()

    def _at(self, hyper: Tensor, name: str, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        function = Normal(mean, variance.sqrt(), validate_args=False)
        values: Tensor = getattr(self._with(hyper), name)(targets.expand_as(mean), function)
        return values

    def _conditional(self, function: Tensor, hyper: Tensor) -> torch.distributions.Distribution:
        distribution: torch.distributions.Distribution = self._with(hyper)(function)
        return distribution

    def _with(self, hyper: Tensor) -> Likelihood:
        if self.initial.numel():
            self._likelihood.log_scale, self._likelihood.log_excess = hyper[:, -2:-1], hyper[:, -1:]
        return self._likelihood


def _nodes() -> tuple[Tensor, Tensor]:
    """Nodes x_j and weights w_j, which sum to one, of the quadrature over N(0, ½): both [20, 1, 1]."""
    nodes, weights = (torch.as_tensor(part)[:, None, None] for part in np.polynomial.hermite.hermgauss(20))
    return nodes, weights / math.sqrt(math.pi)


class _LogPoisson(gpytorch.likelihoods.likelihood._OneDimensionalLikelihood):
    """Counts with rate exp(f)."""

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Poisson:
        return Poisson(function_samples.exp(), validate_args=False)


class _BatchedStudentT(StudentTLikelihood):
    """GPyTorch's Student-t likelihood with scale and degrees of freedom [S, 1] given, not learned inside."""

    log_scale: Tensor
    log_excess: Tensor

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> StudentT:
        freedom = 2.0 + self.log_excess.exp()  # ν > 2: the variance exists
        return StudentT(df=freedom, loc=function_samples, scale=self.log_scale.exp(), validate_args=False)


def build_point_likelihood(name: str, *, noise: float = 0.1) -> PointLikelihood:
    """The likelihood ``model.likelihood`` names.

    Args:
        name: ``gaussian``, ``bernoulli``, ``poisson`` or ``student-t``.
        noise: Initial noise variance σ² (``gaussian``) or squared scale (``student-t``).

    Raises:
        ConfigError: for another name.
    """
    if name == "gaussian":
        return GaussianNoise(noise)
    none = torch.zeros(0, dtype=torch.float64)
    scale = torch.tensor([0.5 * math.log(noise), math.log(2.0)], dtype=torch.float64)
    kinds: dict[str, tuple[type[Likelihood], Tensor]] = {
        "bernoulli": (BernoulliLikelihood, none),
        "poisson": (_LogPoisson, none),
        "student-t": (_BatchedStudentT, scale),
    }
    if name not in kinds:
        raise ConfigError(f"`model.likelihood` = {name!r} is unknown; allowed: gaussian, {', '.join(kinds)}")
    kind, initial = kinds[name]
    likelihood = kind().double()
    if hasattr(likelihood, "quadrature"):
        nodes, weights = np.polynomial.hermite.hermgauss(20)  # GPyTorch rounds its own to float32
        likelihood.quadrature.locations = torch.as_tensor(nodes)
        likelihood.quadrature.weights = torch.as_tensor(weights)
    return Quadrature(likelihood, initial)
