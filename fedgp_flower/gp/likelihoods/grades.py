"""The ordinal likelihood: the cumulative probit, which cuts f plus normal noise into grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from fedgp_flower.gp.likelihoods.point import ClassLikelihood, Slopes, trapezoidal_rule
from fedgp_flower.lazy import special
from fedgp_flower.scores import shares_of
from fedgp_flower.typing import Array

BEYOND = 1e4
"""Absolute value of the two outer cut points, in units of the noise."""
PER_UNIT, MOST = 16, 7
"""Steps of quadrature over f for each unit of its standard deviation in that of the noise, and most such units."""
NODES, LIKE = 25, 128
"""Number of nodes of quadrature over g, and most rows of a batch."""


class Grades(ClassLikelihood):
    """Grades y ∈ {0, …, K − 1}, P(y ≤ k | f, g) = Φ((b_k − f) / σ(g)); the parameters are log(b_{k+1} − b_k) [K − 2].

    The noise σ of :func:`sd_of` varies with the inputs (McCullagh 1980). The constant
    of f shifts all cut points, so b_0 = 0. Two grades at g = 0 give the probit likelihood.
    """

    functions = ("grade", "noise")

    def start(self, target: Mapping[str, float], second_mean: float) -> Array:
        """−Φ⁻¹ of the frequency of the first grade, and 0 [2, 1]."""
        return np.array([[-_cuts(target)[0]], [0.0]])

    def start_parameters(self, target: Mapping[str, float]) -> Tensor:
        """Logarithms of the gaps between Φ⁻¹ of the cumulative frequencies."""
        return torch.from_numpy(np.log(np.diff(_cuts(target))))

    def log_density(self, targets: Tensor, function: Tensor, hyper: Tensor) -> Tensor:
        """Log [Φ((b_y − f) / σ) − Φ((b_{y−1} − f) / σ)]."""
        f, g = function.unbind(-2)
        return self._log_mass(targets, f, sd_of(g), hyper)

    def expected(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """E log p(y | f, g), with more nodes for rows whose f is uncertain in units of the least noise.

        Derivatives are found batch by batch, to save memory; those by parameters are right in sums over rows.
        """
        (_, a), (v, b) = mean.detach().unbind(-2), variance.detach().unbind(-2)
        units = (v.sqrt() / sd_of(a - 2 * b.sqrt())).ceil().clamp(1, MOST).nan_to_num(MOST)
        size = units.reshape(-1, len(targets)).amax(0).long()
        batches = [(n, rows) for n in size.unique().tolist() for rows in torch.nonzero(size == n)[:, 0].split(LIKE)]
        parts = [self._at(PER_UNIT * n + 1, targets[r], mean[..., r], variance[..., r], hyper) for n, r in batches]
        *of_rows, by_hyper = zip(*parts, strict=True)
        back = torch.cat([rows for _, rows in batches]).argsort()
        value, alpha, slope = (torch.cat(each, -1)[..., back] for each in of_rows)
        zero = (alpha * (mean - mean.detach()) + slope * (variance - variance.detach())).sum(-2)  # has gradients
        shared = (torch.stack(by_hyper).sum(0) * (hyper - hyper.detach())).sum(-1, keepdim=True)
        return value + zero + shared / len(targets)

    def _at(self, count: int, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Slopes:
        """:meth:`expected` of rows at ``count`` nodes of f, and its derivatives by mean, variance and parameters."""
        leaves = [values.detach().double().requires_grad_() for values in (mean, variance, hyper)]
        with torch.enable_grad():
            (m, a), (v, b) = (moments.unbind(-2) for moments in leaves[:2])
            (f, over_f), (g, over_g) = trapezoidal_rule(m, v, count), trapezoidal_rule(a, b, NODES)
            mass = self._log_mass(targets, f[:, None], sd_of(g), leaves[2])  # nodes of f, of g, *S, N
            value = (over_g * (over_f[:, None] * mass).sum(0)).sum(0)
        alpha, slope, by_hyper = torch.autograd.grad(value.sum(), leaves)
        return value.detach(), alpha, slope, by_hyper

    def _components(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [*S, N], sds [Q, *S, N] and weights [Q, 1, …] of f plus noise at nodes of g."""
        (m, a), (v, b) = mean.unbind(-2), variance.unbind(-2)
        g, weights = trapezoidal_rule(a, b, NODES)
        return m, (sd_of(g).square() + v).sqrt(), weights

    def log_predictive(self, targets: Tensor, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Log of the mean mass over g."""
        m, sd, weights = self._components(mean, variance)
        return torch.logsumexp(weights.log() + self._log_mass(targets, m, sd, hyper), 0)

    def _log_mass(self, targets: Tensor, mean: Tensor, sd: Tensor, hyper: Tensor) -> Tensor:
        edges, grade = edges_of(hyper), targets.long()
        lower, upper = ((edges[..., grade + above] - mean) / sd for above in (0, 1))
        low, high = lower.where(lower + upper < 0, -upper), upper.where(lower + upper < 0, -lower)  # the smaller tails
        least, most = torch.special.log_ndtr(low), torch.special.log_ndtr(high)
        return most + (-torch.expm1(least - most)).log()

    def probability(self, mean: Tensor, variance: Tensor, hyper: Tensor) -> Tensor:
        """Probabilities of the grades [*S, N, K]."""
        m, sd, weights = self._components(mean, variance)
        return (weights[..., None] * masses(edges_of(hyper), m, sd)).sum(0)

    def conditional(self, function: Tensor, hyper: Tensor) -> Categorical:
        """The grade given functions [*S, 2, N]."""
        f, g = function.unbind(-2)
        return Categorical(masses(edges_of(hyper), f, sd_of(g)), validate_args=False)


def sd_of(g: Tensor) -> Tensor:
    """σ(g) = e^{asinh(g/3)} = g/3 + √(1 + g²/9): σ(0) = 1, and σ and 1/σ grow only as |g|."""
    return (g / 3).asinh().exp()


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
