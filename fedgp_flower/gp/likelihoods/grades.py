"""Grades in an order, by how many cut points f lies above: the cumulative probit (McCullagh 1980)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Categorical

from fedgp_flower.gp.likelihoods.point import PointLikelihood, in_float64, rule
from fedgp_flower.lazy import special
from fedgp_flower.scores import Scores, TargetUnits, class_scores, shares_of
from fedgp_flower.typing import Array

BEYOND = 1e4
"""Where the first grade begins and the last one ends, in standard deviations of the noise."""


class Grades(PointLikelihood):
    """Grades y ∈ {0, …, K − 1} with P(y ≤ k | f) = Φ(b_k − f); the parameters are logarithms of b_{k+1} − b_k [K − 2].

    The constant of f moves all cut points at once, so that b_0 = 0. With two grades this is the probit of two classes.
    """

    def start(self, target: Mapping[str, float], beside: float) -> float:
        """−Φ⁻¹ of the share of the first grade."""
        del beside
        return float(-_cuts(target)[0])

    def start_parameters(self, target: Mapping[str, float]) -> Tensor:
        """Gaps between Φ⁻¹ of the shares of lower grades."""
        return torch.from_numpy(np.log(np.diff(_cuts(target))))

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log [Φ(b_y − f) − Φ(b_{y−1} − f)]."""
        return self._log_mass(targets, function, torch.ones_like(function), hyper)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """By the trapezoidal rule over f: it bends no faster than the noise allows."""
        function, shares = rule(mean, variance)
        return (shares * self.log_density(targets, function, hyper)).sum(0)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """The same as given f with noise of variance 1 + v."""
        return self._log_mass(targets, mean, (1.0 + variance).sqrt(), hyper)

    def _log_mass(self, targets: Tensor, mean: Tensor, sd: Tensor, hyper: Tensor) -> Tensor:
        edges, grade = edges_of(hyper), targets.long()
        lower, upper = ((edges[..., grade + above] - mean) / sd for above in (0, 1))
        low, high = lower.where(lower + upper < 0, -upper), upper.where(lower + upper < 0, -lower)  # the smaller tails
        least, most = torch.special.log_ndtr(low), torch.special.log_ndtr(high)
        return most + (-torch.expm1(least - most)).log()

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities p of each grade [*S, N, K], and p (1 − p)."""
        shares = masses(edges_of(hyper), mean, (1.0 + variance).sqrt())
        return shares, shares * (1 - shares)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Of the probabilities of grades."""
        centre, spread = torch.from_numpy(mean), torch.from_numpy(variance)
        return class_scores(self.moments(centre, spread, hyper.detach().double().cpu())[0].numpy(), target)

    def to_gpytorch(self, hyper: Tensor) -> Likelihood:
        """:class:`OrderedGrades`: GPyTorch has none."""
        return in_float64(OrderedGrades(edges_of(hyper.detach())), self)


def edges_of(hyper: Tensor) -> Tensor:
    """Cut points b_{−1}, b_0 = 0, …, b_{K−1} [*S, K + 1] of parameters [*S, K − 2]; the outer ones are far away."""
    zero = torch.zeros_like(hyper[..., :1].sum(-1, keepdim=True))
    return torch.cat([zero - BEYOND, zero, hyper.exp().cumsum(-1), zero + BEYOND], -1)


def masses(edges: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """Probabilities [*S, N, K] between edges of a normal variable."""
    return torch.special.ndtr((edges.unsqueeze(-2) - mean[..., None]) / sd[..., None]).diff(dim=-1)


def _cuts(target: Mapping[str, float]) -> Array:
    """Φ⁻¹ of the shares of the first grade, of the first two, …, [K − 1]."""
    return np.asarray(special.ndtri(np.cumsum(shares_of(target)[:-1])))


def values_of(levels: Sequence[str]) -> Array:
    """The numbers of grades [K], and 1, 2, … of those that are words."""
    try:
        return np.array([float(level) for level in levels])
    except ValueError:
        return np.arange(1.0, len(levels) + 1)


class OrderedGrades(_OneDimensionalLikelihood):
    """Grades between cut points, as a likelihood of GPyTorch."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.edges = edges

    def forward(self, function_samples: Tensor, *_: object, **__: object) -> Categorical:
        """The distribution of y given f."""
        shares = masses(self.edges, function_samples, torch.ones_like(function_samples))
        return Categorical(shares, validate_args=False)
