"""Additive sums of a sparse GP, with the collapsed bound, its gradient and the exact posterior.

With L Lᵀ = K_zz, W = L⁻¹ K_zx and v = L⁻¹u ~ N(0, I), the sufficient statistics for v of rows at any number of sites
are A = Σ W Wᵀ, b = Σ W y, s = Σ y², c = Σ k(x, x) and N. From them a server computes bound and posterior without a
kernel (Titsias 2009; Gal et al. 2014; Guo et al. 2022, Eqs. 14-15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky, symmetric
from fedgp_flower.gp.models import WhitenedPosterior
from fedgp_flower.messages import add, leaves, message
from fedgp_flower.typing import Array, Square

S = TypeVar("S", bound="RowSums")

INPUT_EDGES: Array = np.linspace(-6.0, 6.0, 41)
"""Bin edges of :func:`input_shape`, in standardised units, the same at all sites."""
LOG_RATIO = (-8.0, 18.0)
"""Range of the search for log a/σ²."""
SIGNIFICANCE = 1e-4
"""Level of the test that a site's rows explain themselves worse than noise would."""
ROUNDING = 1e-9
"""Share of a sum of squares below which what remains after centring is rounding."""
LEAST_NOISE = 1e-6
"""Smallest noise variance of the standardised target."""


@dataclass(frozen=True)
class RowSums:
    """A and b of rows with noise σ², or of rows weighted by their precision with σ² = 1."""

    gram: Float[ndarray, "M M"]
    projection: Float[ndarray, " M"]

    def leading(self: S, count: int) -> S:
        """The sums at the first ``count`` inducing points: L is lower triangular, so W there is part of W."""
        return replace(self, gram=self.gram[:count, :count].copy(), projection=self.projection[:count])

    def factor(self, noise: float = 1.0) -> Square:
        """The Cholesky factor of B = I + A/σ²."""
        b = torch.as_tensor(self.gram) / noise
        b.diagonal().add_(1)
        return cholesky(b, of="B = I + A/σ²", hint="The sums cannot come from real rows.")

    def posterior(self, noise: float = 1.0) -> WhitenedPosterior:
        """The optimal q(v) = N(B⁻¹b/σ², B⁻¹) of all rows in the sums (Guo et al. Eqs. 14-15, whitened)."""
        factor = self.factor(noise)
        covariance = torch.cholesky_inverse(factor)  # the inverse is the answer here
        mean = torch.cholesky_solve(torch.as_tensor(self.projection)[:, None], factor)[:, 0] / noise
        return WhitenedPosterior(mean, symmetric(covariance))


@message()
class SparseSums(RowSums):
    """Sufficient statistics of rows under fixed hyperparameters and inducing points."""

    gram: Float[ndarray, "M M"] = leaves("A = W Wᵀ, W = L⁻¹ k(Z, X)", symmetric=True, rank="count")
    projection: Float[ndarray, " M"] = leaves("b = W y")
    target_squares: Float[ndarray, ""] = leaves("s = yᵀ y")
    prior_variance: Float[ndarray, ""] = leaves("c = Σ k(x, x)")
    count: Float[ndarray, ""] = leaves("number of rows")


def collapsed_bound(sums: SparseSums, noise: float) -> float:
    """Titsias' bound on log p(y) of all rows in the sums, in nats, at noise variance σ².

    F = -N/2 log 2πσ² - ½ log|B| - s/2σ² + bᵀB⁻¹b/2σ⁴ - (c - tr A)/2σ²,  B = I + A/σ²  (Guo et al. Eq. 9 times N).
    """
    return bound_gradient(sums, math.log(noise)).value


@dataclass(frozen=True)
class BoundGradient:
    """The bound and all its derivatives; sites need those by the pooled sums for the chain rule."""

    gram: Array  # ∂F/∂A  [M, M], symmetric
    projection: Array  # ∂F/∂b  [M]
    prior_variance: Array  # ∂F/∂c  []
    value: float  # F, nats
    log_noise: float  # ∂F/∂ log σ², the sums held fixed


def bound_gradient(sums: SparseSums, log_noise: float) -> BoundGradient:
    """Value and derivatives of :func:`collapsed_bound`.

    With n = σ², d = B⁻¹b/n and c = Σ k(x, x): ∂F/∂A = (I − B⁻¹ − d dᵀ)/2n, ∂F/∂b = d/n, ∂F/∂c = −1/2n and
    ∂F/∂log n = −½ [N − M + tr B⁻¹ − (s − bᵀd + c − tr A)/n + dᵀd].
    Sites apply the chain rule, dF/dw = Σ_k [⟨∂F/∂A, dA_k/dw⟩ + ⟨∂F/∂b, db_k/dw⟩ + ∂F/∂c dc_k/dw].
    """
    noise = math.exp(log_noise)
    factor, projection = sums.factor(noise), torch.as_tensor(sums.projection)
    inverse = torch.cholesky_inverse(factor)  # part of the answer
    direction = torch.cholesky_solve(projection[:, None], factor)[:, 0].numpy() / noise
    unexplained = sums.target_squares - sums.projection @ direction + sums.prior_variance - np.trace(sums.gram)
    left, trace = float(unexplained) / noise, float(inverse.diagonal().sum())
    determinant = 2 * factor.diagonal().log().sum()
    value = -0.5 * (float(sums.count) * math.log(2 * math.pi * noise) + float(determinant) + left)
    by_noise = -0.5 * (float(sums.count) - len(factor) + trace - left + float(direction @ direction))
    by_gram = inverse.addr_(*[torch.from_numpy(direction)] * 2).neg_()
    by_gram.diagonal().add_(1)
    return BoundGradient((by_gram / (2 * noise)).numpy(), direction / noise, np.array(-0.5 / noise), value, by_noise)


def input_shape(inputs: Array) -> tuple[ndarray, Array]:
    """Additive description of standardised inputs [N, D]: counts in fixed bins [D, B] and XᵀX [D, D]."""
    last = len(INPUT_EDGES) - 2
    bins = np.clip(np.digitize(inputs, INPUT_EDGES) - 1, 0, last)
    counts = [np.bincount(column, minlength=last + 1) for column in bins.T]
    return np.stack(counts).astype(np.int64), inputs.T @ inputs


def covering(counts: ndarray, count: int) -> Array:
    """Even points [count] over the bins of :data:`INPUT_EDGES` with rows, and 2.5 % of their range at each end."""
    filled = np.flatnonzero(counts)
    low, high = INPUT_EDGES[filled[0]], INPUT_EDGES[filled[-1] + 1]
    margin = 0.025 * (high - low)
    return np.linspace(low - margin, high + margin, count)


@dataclass(frozen=True, slots=True)
class Profile:
    """The maximum of the bound over amplitude and noise."""

    value: float  # F, nats
    amplitude: float  # a, factor of the kernel
    noise: float  # σ²


def profiled(sums: SparseSums) -> Profile:
    """Maximise the bound of the kernel a·k over a and the noise σ², from the sums of k.

    With A = UΛUᵀ, β = (Uᵀb)² and r = a/σ², F = −½ [N log 2πσ² + Σ log(1 + rλ) + (s − Σ rβ/(1 + rλ))/σ² + r (c − Σ λ)],
    so σ²(r) = (s − Σ rβ/(1 + rλ))/N, and the search is over r. By the envelope theorem the gradient of the maximum in
    other parameters is that of F at this a and σ².
    """
    gram = torch.as_tensor(sums.gram)
    spectrum, vectors = torch.linalg.eigh(symmetric(gram))
    spectrum = spectrum.clamp(min=0)  # negative eigenvalues are rounding
    weights = (vectors.mT @ torch.as_tensor(sums.projection)).square()
    unexplained = float(sums.prior_variance) - float(gram.diagonal().sum())
    count, squares = float(sums.count), float(sums.target_squares)

    def at(log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The noise, F and ∂F/∂log r."""
        ratio = log_ratio.exp()
        grown = 1 + ratio[:, None] * spectrum  # 1 + rλ  [G, M]
        residual = squares - (ratio[:, None] * weights / grown).sum(1)
        noise = (residual / count).clamp(min=LEAST_NOISE)
        fit = count * (2 * math.pi * noise).log() + residual / noise
        trace = (spectrum / grown).sum(1) - (weights / grown.square()).sum(1) / noise + unexplained
        return noise, -0.5 * (fit + grown.log().sum(1) + ratio * unexplained), -0.5 * ratio * trace

    grid = torch.linspace(*LOG_RATIO, 261, dtype=torch.float64)
    best = int(at(grid)[1].argmax())
    low, high = grid[max(best - 1, 0)][None], grid[min(best + 1, len(grid) - 1)][None]
    top = grid[best][None]  # at an end of the search, or where the noise reaches its floor
    if bool(at(low)[2] > 0) and bool(at(high)[2] < 0):
        for _ in range(60):
            top = (low + high) / 2
            low, high = (top, high) if bool(at(top)[2] > 0) else (low, top)
        top = (low + high) / 2
    noise, value, _ = at(top)
    return Profile(float(value), float(noise * top.exp()), float(noise))


def scaled(sums: SparseSums, amplitude: float) -> SparseSums:
    """The sums of the kernel a·k from those of k: A and c times a, b times √a."""
    gram, projection = sums.gram * amplitude, sums.projection * math.sqrt(amplitude)
    return replace(sums, gram=gram, projection=projection, prior_variance=np.asarray(sums.prior_variance * amplitude))


Evidence: TypeAlias = Callable[[SparseSums], tuple[float, float]]
"""Returns the evidence of rows in nats, and λ = σ²/a."""


def at_best(sums: SparseSums) -> tuple[float, float]:
    """The maximal bound, and λ = σ²/a there."""
    best = profiled(sums)
    return best.value, best.noise / best.amplitude


def at_unit_noise(sums: SparseSums) -> tuple[float, float]:
    """Log evidence of pseudo-observations of v ~ N(0, I) with noise 1, ½ bᵀ(I + A)⁻¹b − ½ log|I + A|, and λ = 1."""
    precision = np.eye(len(sums.gram)) + sums.gram
    explained = float(sums.projection @ np.linalg.solve(precision, sums.projection))
    return (explained - float(np.linalg.slogdet(precision)[1])) / 2, 1.0


def contradicting(parts: Mapping[str, SparseSums], level: Array, evidence: Evidence = at_best) -> list[str]:
    """Sites, fewer than half, whose sums contradict those of all others.

    They are removed one at a time, first the site whose removal most increases the evidence of two separate models.
    """
    rest, removed = dict(parts), list[str]()
    while len(removed) < (len(parts) - 1) // 2:
        total = add(rest.values())
        ridge = evidence(total)[1]
        candidates = [site for site, part in rest.items() if contradicts(part, total, ridge, level)]
        others = {site: add(part for name, part in rest.items() if name != site) for site in candidates}
        if not others:
            break
        removed.append(max(others, key=lambda name: evidence(others[name])[0] + evidence(rest[name])[0]))
        del rest[removed[-1]]
    return removed


def contradicts(part: SparseSums, total: SparseSums, ridge: float, level: Array) -> bool:
    """Whether the rows of ``part`` contradict the prediction from the other rows.

    The others predict f = Wᵀm, m = (A₋ + λI)⁻¹b₋, with λ = σ²/a. The ``level`` u has Wᵀu ≈ 1 and allows for a
    different mean at each site: the slope of y on f, both centred, is β = (bᵀm − n ȳ f̄)/(mᵀAm − n f̄²). It is 1 for
    the function of the other rows and 0 for an unrelated one; if β < ½ the site's mean predicts better. A contradiction
    is β < −½ and four standard errors below 0, or β < ½ with rows that explain themselves worse than noise would, for
    which bᵀ(A + λI)⁻¹b n/s is χ² with tr A(A + λI)⁻¹ degrees of freedom.
    """
    gram, projection, identity = part.gram, part.projection, ridge * np.eye(len(level))
    mean = np.linalg.solve(total.gram - gram + identity, total.projection - projection)
    gram_level = gram @ level
    rows = max(float(level @ gram_level), np.finfo(float).tiny)
    target, predicted = float(level @ projection) / rows, float(gram_level @ mean) / rows
    size = float(mean @ gram @ mean)
    power = size - rows * predicted**2
    along = float(projection @ mean) - rows * target * predicted
    if power <= ROUNDING * size or along >= power / 2:  # one row, or equal predictions, have no slope
        return False
    if not part.target_squares:  # targets that are all 0 are explained by a mean
        return False
    variance = max(float(part.target_squares) - rows * target**2, 0.0) / float(part.count)
    if along < -power / 2 and along < -4 * math.sqrt(variance * power):
        return True
    solved = np.linalg.solve(gram + identity, np.column_stack([projection, gram]))
    explained = float(projection @ solved[:, 0]) * float(part.count) / float(part.target_squares)
    degrees = float(np.trace(solved[:, 1:]))
    return float(torch.special.gammainc(torch.tensor(degrees / 2), torch.tensor(explained / 2))) < SIGNIFICANCE
