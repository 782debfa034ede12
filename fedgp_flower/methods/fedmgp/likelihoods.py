"""What a unit of FedMGP may observe: Gaussian noise, or any likelihood of :mod:`fedgp_flower.gp.likelihoods`.

The parameters of a likelihood are part of φ_m: σ² of Gaussian noise, and of the others whatever they learn, as
logarithms. Those of a Student-t are its log scale and log(ν − 2).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from fedgp_flower.gp.likelihoods import (
    GaussianNoise,
    LearnedLikelihood,
    PointLikelihood,
    build_point_likelihood,
    gaussian_likelihood,
)
from fedgp_flower.methods.fedmgp.unit import UnitParameters
from fedgp_flower.typing import Array

Kind = Literal["gaussian", "bernoulli", "poisson", "student-t"]


Learned: TypeAlias = GaussianLikelihood | LearnedLikelihood
"""Gaussian noise is GPyTorch's."""


def build_likelihood(kind: Kind, parameters: UnitParameters) -> Learned:
    """The likelihood at a unit's own parameters; one that the unit has not trained yet starts from its noise σ²."""
    if kind == "gaussian":
        return gaussian_likelihood(parameters.noise)
    point = build_point_likelihood(kind, noise=parameters.noise)
    return LearnedLikelihood(point, _own(point, parameters))


def own_parameters(likelihood: Learned) -> tuple[float, tuple[float, ...]]:
    """σ², which is 1 where there is no Gaussian noise, and the other parameters of a likelihood."""
    if isinstance(likelihood, GaussianLikelihood):
        return float(likelihood.noise.detach()), ()
    return 1.0, tuple(likelihood.own.tolist())


def regression_targets(kind: Kind, y: Array) -> Array:
    """Where a regression starts the model: numbers as they are, a class as ±1, a count as log(y + ½)."""
    return np.log(y + 0.5) if kind == "poisson" else 2 * y - 1 if kind == "bernoulli" else y


@torch.no_grad()
def moments(kind: Kind, mean: Array, variance: Array, parameters: UnitParameters) -> tuple[Array, Array]:
    """Mean and variance of an observation where f ~ N(mean, variance), each [N]."""
    point = build_point_likelihood(kind)
    first, second = point.moments(torch.from_numpy(mean), torch.from_numpy(variance), _own(point, parameters))
    return first.numpy(), second.numpy()


@torch.no_grad()
def log_density(kind: Kind, y: Array, mean: Array, variance: Array, parameters: UnitParameters) -> Array:
    """Log ∫ p(y_n | f) N(f; mean, variance) df of each row, [N]."""
    point = build_point_likelihood(kind)
    function = torch.from_numpy(mean), torch.from_numpy(variance)
    return point.log_predictive(torch.from_numpy(y), *function, _own(point, parameters)).numpy()


def _own(point: PointLikelihood, parameters: UnitParameters) -> Tensor:
    """Parameters [R] of the likelihood; those of Gaussian noise are kept as σ²."""
    if isinstance(point, GaussianNoise):
        return torch.tensor([0.5 * math.log(parameters.noise)], dtype=torch.float64)
    return torch.tensor(parameters.likelihood, dtype=torch.float64) if parameters.likelihood else point.initial
