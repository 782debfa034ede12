"""What a unit of FedMGP may observe: Gaussian noise, or any likelihood of :mod:`fedgp_flower.models.likelihoods`.

The parameters of a likelihood are part of φ_m: σ² of Gaussian noise, and of the others whatever they learn, as
logarithms. Those of a Student-t are its log scale and log(ν − 2).
"""

from __future__ import annotations

from typing import Literal

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from torch import Tensor

from fedgp_flower.models.exact_q import UnitParameters
from fedgp_flower.models.likelihoods import PointLikelihood, build_point_likelihood
from fedgp_flower.shapes import Array

Kind = Literal["gaussian", "bernoulli", "poisson", "student-t"]


class Pointwise(gpytorch.Module):
    """A likelihood that factorises over rows, with its own parameters learned; called as GPyTorch's likelihoods are."""

    def __init__(self, point: PointLikelihood, own: Tensor) -> None:
        super().__init__()
        self.point = point
        if own.numel():
            self.register_parameter("own", torch.nn.Parameter(own.clone()))
        else:
            self.register_buffer("own", own)

    def expected_log_prob(self, observations: Tensor, function_dist: MultivariateNormal) -> Tensor:
        """E log p(y_n | f_n) of each row, [N]."""
        mean, variance = function_dist.mean[None], function_dist.variance[None]
        return self.point.expected(observations, mean, variance, self.own[None])[0]


def gaussian_likelihood(noise: float) -> GaussianLikelihood:
    """Gaussian noise of this variance, learned in log coordinates without a floor."""
    log = Positive(transform=torch.exp, inv_transform=torch.log)
    likelihood = GaussianLikelihood(noise_constraint=log).double()
    likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    return likelihood


def build_likelihood(kind: Kind, parameters: UnitParameters) -> Likelihood | Pointwise:
    """The likelihood at a unit's own parameters; one that the unit has not trained yet starts from its noise σ²."""
    if kind == "gaussian":
        return gaussian_likelihood(parameters.noise)
    if kind == "bernoulli":
        return BernoulliLikelihood()
    point = build_point_likelihood(kind, noise=parameters.noise)
    return Pointwise(point, _own(point, parameters))


def own_parameters(likelihood: Likelihood | Pointwise) -> tuple[float, tuple[float, ...]]:
    """σ², which is 1 where there is no Gaussian noise, and the other parameters of a likelihood."""
    if isinstance(likelihood, GaussianLikelihood):
        return float(likelihood.noise.detach()), ()
    return 1.0, tuple(likelihood.own.tolist()) if isinstance(likelihood, Pointwise) else ()


def regression_targets(kind: Kind, y: Array) -> Array:
    """Where a regression starts the model: numbers as they are, a class as ±1, a count as log(y + ½)."""
    return np.log(y + 0.5) if kind == "poisson" else 2 * y - 1 if kind == "bernoulli" else y


@torch.no_grad()
def moments(kind: Kind, mean: Array, variance: Array, parameters: UnitParameters) -> tuple[Array, Array]:
    """Mean and variance of an observation where f ~ N(mean, variance), each [N]."""
    point = build_point_likelihood(kind)
    first, second = point.moments(*_rows(mean, variance), _hyper(kind, point, parameters))
    return first[0].numpy(), second[0].numpy()


@torch.no_grad()
def log_density(kind: Kind, y: Array, mean: Array, variance: Array, parameters: UnitParameters) -> Array:
    """Log ∫ p(y_n | f) N(f; mean, variance) df of each row, [N]."""
    point = build_point_likelihood(kind)
    found = point.log_predictive(torch.from_numpy(y), *_rows(mean, variance), _hyper(kind, point, parameters))
    return found[0].numpy()


def _rows(mean: Array, variance: Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(mean)[None], torch.from_numpy(variance)[None]


def _hyper(kind: Kind, point: PointLikelihood, parameters: UnitParameters) -> Tensor:
    """β [1, R] of :class:`PointLikelihood`."""
    if kind == "gaussian":
        return torch.tensor([[0.5 * np.log(parameters.noise)]], dtype=torch.float64)
    return _own(point, parameters)[None]


def _own(point: PointLikelihood, parameters: UnitParameters) -> Tensor:
    own = parameters.likelihood
    return torch.tensor(own, dtype=torch.float64) if own else point.initial
