"""The ordinal likelihood: the cumulative probit, which cuts f plus normal noise into grades (McCullagh 1980)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from fedgp_flower.gp.likelihoods.point import PointLikelihood, trapezoidal_rule
from fedgp_flower.lazy import special
from fedgp_flower.scores import Scores, TargetUnits, class_scores, shares_of
from fedgp_flower.typing import Array

BEYOND = 1e4
"""Absolute value of the two outer cut points, in standard deviations of the noise."""


class Grades(PointLikelihood):
    """Grades y ∈ {0, …, K − 1} with P(y ≤ k | f) = Φ(b_k − f); the parameters are log(b_{k+1} − b_k) [K − 2].

    The constant of f shifts all cut points, so b_0 = 0. Two grades give the probit likelihood.
    """

    def start(self, target: Mapping[str, float], second_mean: float) -> float:
        """−Φ⁻¹ of the frequency of the first grade."""
        return float(-_cuts(target)[0])

    def start_parameters(self, target: Mapping[str, float]) -> Tensor:
        """Logarithms of the gaps between Φ⁻¹ of the cumulative frequencies."""
        return torch.from_numpy(np.log(np.diff(_cuts(target))))

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log [Φ(b_y − f) − Φ(b_{y−1} − f)]."""
        return self._log_mass(targets, function, torch.ones_like(function), hyper)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E log p(y | f) by :func:`trapezoidal_rule`."""
        function, weights = trapezoidal_rule(mean, variance)
        return (weights * self.log_density(targets, function, hyper)).sum(0)

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """The log density at f = m with noise variance 1 + v instead of 1."""
        return self._log_mass(targets, mean, (1.0 + variance).sqrt(), hyper)

    def _log_mass(self, targets: Tensor, mean: Tensor, sd: Tensor, hyper: Tensor) -> Tensor:
        edges, grade = edges_of(hyper), targets.long()
        lower, upper = ((edges[..., grade + above] - mean) / sd for above in (0, 1))
        low, high = lower.where(lower + upper < 0, -upper), upper.where(lower + upper < 0, -lower)  # the smaller tails
        least, most = torch.special.log_ndtr(low), torch.special.log_ndtr(high)
        return most + (-torch.expm1(least - most)).log()

    def moments(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities p of the grades [*S, N, K], and p (1 − p)."""
        probability = masses(edges_of(hyper), mean, (1.0 + variance).sqrt())
        return probability, probability * (1 - probability)

    def scores(self, mean: Array, variance: Array, target: Array, hyper: Tensor, units: TargetUnits) -> Scores:
        """Scores of the probabilities of the grades."""
        centre, spread = torch.from_numpy(mean), torch.from_numpy(variance)
        return class_scores(self.moments(centre, spread, hyper.detach().double().cpu())[0].numpy(), target)

    def conditional(self, function: Tensor, hyper: Tensor) -> Categorical:
        """The grade given f."""
        return Categorical(masses(edges_of(hyper), function, torch.ones_like(function)), validate_args=False)


def edges_of(hyper: Tensor) -> Tensor:
    """Cut points b_{−1}, b_0 = 0, …, b_{K−1} [*S, K + 1] from parameters [*S, K − 2]; the outer two are ∓1e4."""
    zero = torch.zeros_like(hyper[..., :1].sum(-1, keepdim=True))
    return torch.cat([zero - BEYOND, zero, hyper.exp().cumsum(-1), zero + BEYOND], -1)


def masses(edges: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """Probabilities [*S, N, K] that a normal variable falls between consecutive edges."""
    return torch.special.ndtr((edges.unsqueeze(-2) - mean[..., None]) / sd[..., None]).diff(dim=-1)


def _cuts(target: Mapping[str, float]) -> Array:
    """Φ⁻¹ of the cumulative frequencies of the grades [K − 1]."""
    return np.asarray(special.ndtri(np.cumsum(shares_of(target)[:-1])))


def values_of(levels: Sequence[str]) -> Array:
    """Grades as numbers [K]: their values, or 1, 2, … unless all levels are numbers."""
    try:
        return np.array([float(level) for level in levels])
    except ValueError:
        return np.arange(1.0, len(levels) + 1)
