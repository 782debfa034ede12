"""Sums of rows that weigh as much as inducing points see of them, and what follows: evidence, posterior, gradient.

With W = L⁻¹ K_zx, L Lᵀ = K_zz, each row keeps the variance that the inducing points leave of it as noise of its own
(FITC; Snelson and Ghahramani 2006):

    y_n = w_nᵀ v + e_n,   v ~ N(0, I),   e_n ~ N(0, λ_n),   λ_n = σ² + k(x_n, x_n) − |w_n|².

Any number of sites is seen through A = Σ w wᵀ/λ, b = Σ w y/λ, s = Σ y²/λ, ℓ = Σ log λ and N. Titsias' bound takes
that variance off the evidence instead, Σ (λ_n − σ²)/2σ², and so prefers noise to a rough function. This is no bound;
points are not moved by its gradient, which would put them on rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky, symmetric
from fedgp_flower.gp.models import CHUNK, LOCATIONS, SparseGP, WhitenedPosterior
from fedgp_flower.gp.placement import to_array, to_arrays
from fedgp_flower.gp.sparse import Projected, Whitener, gram
from fedgp_flower.messages import leaves, message
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets

LOG_NOISE = "likelihood.log_noise"


@message()
class WeightedSums:
    """What rows say under fixed hyperparameters and inducing points; ``+`` pools them."""

    gram: Float[ndarray, "Q Q"] = leaves("A = Σ w wᵀ/λ, w = L⁻¹ k(Z, x), λ = σ² + k(x, x) − |w|²", symmetric=True)
    projection: Float[ndarray, " Q"] = leaves("b = Σ w y/λ")
    weighted_squares: Float[ndarray, ""] = leaves("s = Σ y²/λ")
    log_variances: Float[ndarray, ""] = leaves("ℓ = Σ log λ")
    target_squares: Float[ndarray, ""] = leaves("Σ y²")
    count: Float[ndarray, ""] = leaves("number of rows")

    def __add__(self, other: WeightedSums) -> WeightedSums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return WeightedSums(*(np.asarray(a + b) for a, b in pairs))

    def weighted(self, weight: float) -> WeightedSums:
        """The same where every row counts so much."""
        return WeightedSums(*(np.asarray(weight * part) for part in vars(self).values()))

    def leading(self, count: int) -> WeightedSums:
        """At the first inducing points, each row with the variance that all of them leave."""
        return replace(self, gram=self.gram[:count, :count], projection=self.projection[:count])

    def scaled(self, by: float) -> WeightedSums:
        """The sums where k and σ² are ``by`` times as large: w grows as √by, λ as by."""
        logs = np.asarray(self.log_variances + float(self.count) * math.log(by))
        projection, squares = self.projection / math.sqrt(by), np.asarray(self.weighted_squares / by)
        return replace(self, projection=projection, weighted_squares=squares, log_variances=logs)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of rows where kernel and noise are scaled by what suits them best, and that scale."""

    value: float  # nats
    scale: float  # τ²
    curve: Array
    """At the first m inducing points for every m, each at its best scale [M]; the last one is ``value``."""


def evidence(sums: WeightedSums) -> Evidence:
    """Log evidence with B = I + A at the scale τ² = (s − bᵀB⁻¹b)/N of kernel and noise, where it is highest.

        F = −½ [N log 2πτ² + N + ℓ + log|B|]

    The Cholesky factor R of the first m rows of B is the corner of that of all: log|B| and bᵀB⁻¹b = |R⁻¹b|² are running
    sums over the points.
    """
    count = float(sums.count)
    factor, projection = _factor(sums), torch.as_tensor(sums.projection)
    whitened = torch.linalg.solve_triangular(factor, projection[:, None], upper=False)[:, 0]
    scales = (float(sums.weighted_squares) - whitened.square().cumsum(0)) / count
    determinants = 2 * factor.diagonal().log().cumsum(0)
    logs = count * (2 * math.pi * scales).log() + count + float(sums.log_variances)
    curve = (-(logs + determinants) / 2).numpy()
    return Evidence(float(curve[-1]), float(scales[-1]), curve)


def at_unit_scale(sums: WeightedSums) -> float:
    """Log evidence at the kernel and noise that the sums are of: −½ [N log 2π + ℓ + log|B| + s − bᵀB⁻¹b]."""
    found = evidence(sums)
    return found.value - float(sums.count) * (found.scale - 1 - math.log(found.scale)) / 2


def posterior(sums: WeightedSums) -> WhitenedPosterior:
    """q(v) = N(B⁻¹b, B⁻¹) of all rows behind the sums."""
    factor = _factor(sums)
    mean = torch.cholesky_solve(torch.as_tensor(sums.projection)[:, None], factor)[:, 0]
    return WhitenedPosterior(mean, symmetric(torch.cholesky_inverse(factor)))  # the inverse is the answer


def _factor(sums: WeightedSums) -> Tensor:
    b = torch.as_tensor(sums.gram).clone()
    b.diagonal().add_(1)
    return cholesky(b, of="B = I + A", hint="The sums are not those of real rows.")


def variances(rows: Projected, noise: Tensor) -> Tensor:
    """λ = σ² + k(x, x) − |w|² [N]; below σ² by rounding and the jitter of K_zz alone."""
    return noise + (rows.variances - rows.cross.square().sum(0)).clamp(min=0)


@torch.no_grad()
def weighted_sums(model: SparseGP, inputs: Rows, targets: Targets, whitener: Whitener | None = None) -> WeightedSums:
    """The sums of any number of rows, chunk by chunk, without a graph; with the model's whitener where there is one."""
    chunks = (whitener or Whitener(model)).projected(model, inputs, last=whitener is None)
    total: list[Tensor] = []
    for rows, y in zip(chunks, targets.split(CHUNK), strict=True):
        spread = variances(rows, model.noise)
        scaled, part = rows.cross / spread.sqrt(), y / spread
        own = [gram(scaled), rows.cross @ part, part @ y, spread.log().sum(), y @ y]
        total = [before + more for before, more in zip(total, own, strict=True)] if total else own
    return WeightedSums(*to_arrays(*total, total[0].new_tensor(len(targets))))


def log_evidence(model: SparseGP, inputs: Rows, targets: Targets) -> Tensor:
    """Log evidence of any number of rows, in nats, with its gradient by all parameters but the inducing points."""
    whitener = Whitener(model)
    sums = weighted_sums(model, inputs, targets, whitener)
    slopes, _ = weighted_gradient(model, inputs, targets, posterior(sums), whitener)
    value = torch.tensor(at_unit_scale(sums), dtype=torch.float64)
    for name, parameter in model.wire_parameters().items():
        if name in slopes:  # nothing is added but the gradient
            value = value + (torch.as_tensor(slopes[name]).to(parameter) * (parameter - parameter.detach())).sum()
    return value


def weighted_gradient(
    model: SparseGP, inputs: Rows, targets: Targets, q: WhitenedPosterior, whitener: Whitener | None = None
) -> tuple[NamedArrays, Float[ndarray, "2 V"]]:
    """A site's share of the evidence's gradient by the hyperparameters, by wire name, and of a score of the noise.

    At the posterior q(v) = N(m, S) of all rows, ∂F = Σ_n ∂ E_q log N(y_n | w_nᵀ v, λ_n) with q held fixed (Fisher's
    identity), so that shares add up. With r = y − wᵀm, g = ∂/∂λ = ½ (r² + wᵀSw)/λ² − ½/λ:

        W̄ = (m r − S w)/λ − 2 w g,   K̄_zx = L⁻ᵀ W̄,   ∂k(x, x) = g,   ∂σ² = Σ g,   L̄ = −tril L⁻ᵀ Σ W̄ wᵀ,

    and K̄_zz = −sym(L⁻ᵀ Φ(Σ W̄ wᵀ) L⁻¹), where Φ takes the lower triangle and half the diagonal (Murray 2016).

    The score is for λ e^{γz} at γ = 0 with z each input and its square less 1 (Breusch and Pagan 1979): with the excess
    t = 2 λ g of a squared residual, Σ z t, and Σ (z t)², its variance whatever the law of the noise (White 1980).
    """
    whitener = whitener or Whitener(model)
    factor, noise = whitener.factor, model.noise.detach()
    mean, covariance = (part.to(factor) for part in (q.mean, q.covariance))
    inner, by_noise, score = torch.zeros_like(factor), 0.0, factor.new_zeros(2, 2 * inputs.shape[1])
    total: NamedArrays = {}
    for rows, y in zip(whitener.projected(model, inputs, last=True), targets.split(CHUNK), strict=True):
        cross = rows.cross
        spread, left, moved = variances(rows, noise), y - cross.mT @ mean, covariance @ cross
        by_spread = ((left.square() + (cross * moved).sum(0)) / spread - 1) / (2 * spread)
        by_cross = torch.outer(mean, left).sub_(moved).div_(spread).addcmul_(cross, by_spread, value=-2)
        inner.addmm_(by_cross, cross.mT)
        by_noise += float(by_spread.sum())
        along = torch.cat([rows.inputs, rows.inputs.square() - 1], 1) * (2 * spread * by_spread)[:, None]
        score += torch.stack([along.sum(0), along.square().sum(0)])
        incoming = torch.linalg.solve_triangular(factor, by_cross.mT, upper=False, left=False)  # [N, M]
        share = whitener.pulled_back(model, rows, incoming, by_spread)
        total = {name: np.asarray(total[name] + own) for name, own in share.items()} if total else share
    inner = inner.mul_(-0.5).tril_()
    inner.diagonal().mul_(0.5)
    half = torch.linalg.solve_triangular(factor.mT, inner, upper=True)
    half = torch.linalg.solve_triangular(factor, half, upper=False, left=False)
    for name, more in whitener.pulled_back_at_points(model, half + half.mT).items():
        total[name] = np.asarray(total[name] + more)
    total[LOG_NOISE] = np.asarray(total[LOG_NOISE] + by_noise * to_array(noise))
    return {name: share for name, share in total.items() if name != LOCATIONS}, to_array(score)
