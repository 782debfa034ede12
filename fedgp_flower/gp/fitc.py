"""The FITC approximation of a sparse GP from sums over rows: log evidence, posterior and gradient.

With W = L⁻¹ K_zx and L Lᵀ = K_zz, FITC (Snelson and Ghahramani 2006) gives each row its own noise variance λ_n: σ² plus
the prior variance of f(x_n) that the inducing points do not explain,

    y_n = w_nᵀ v + e_n,   v ~ N(0, I),   e_n ~ N(0, λ_n),   λ_n = σ² + k(x_n, x_n) − |w_n|².

The totals A = Σ w wᵀ/λ, b = Σ w y/λ, s = Σ y²/λ, ℓ = Σ log λ and N over all sites determine evidence and posterior.
Titsias' bound (2009) instead subtracts Σ (λ_n − σ²)/2σ², and so explains a rough function as noise. The FITC evidence
is no bound, and its gradient by Z would move the inducing points onto rows; so Z stays fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from fedgp_flower.gp.models import CHUNK, LOCATIONS, LOG_NOISE, SparseGP, WhitenedPosterior
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sparse import Projected, Whitener, accumulated, gram, with_gradient
from fedgp_flower.gp.sums import RowSums
from fedgp_flower.messages import leaves, message
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets


@message()
class WeightedSums(RowSums):
    """Sums over rows at fixed hyperparameters and inducing points, each row weighted by 1/λ at all points."""

    gram: Float[ndarray, "Q Q"] = leaves("A = Σ w wᵀ/λ, w = L⁻¹ k(Z, x), λ = σ² + k(x, x) − |w|²", symmetric=True)
    projection: Float[ndarray, " Q"] = leaves("b = Σ w y/λ")
    weighted_squares: Float[ndarray, ""] = leaves("s = Σ y²/λ")
    log_variances: Float[ndarray, ""] = leaves("ℓ = Σ log λ")
    target_squares: Float[ndarray, ""] = leaves("Σ y²")
    count: Float[ndarray, ""] = leaves("number of rows")

    def scaled(self, by: float) -> WeightedSums:
        """Return the sums for ``by`` times k and σ²: w is multiplied by √by and λ by ``by``."""
        logs = np.asarray(self.log_variances + float(self.count) * math.log(by))
        projection, squares = self.projection / math.sqrt(by), np.asarray(self.weighted_squares / by)
        return replace(self, projection=projection, weighted_squares=squares, log_variances=logs)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The log evidence at the best common scale τ² of kernel and noise."""

    value: float  # nats
    scale: float  # τ²
    curve: Array
    """Log evidence at the first m inducing points and the best scale there, for every m [M]; ends with ``value``."""

    def at(self, scale: float, count: float) -> float:
        """Return the log evidence of ``count`` rows at another scale, F − ½ N (r − 1 − log r), r = τ²/``scale``."""
        ratio = self.scale / scale
        return self.value - count * (ratio - 1 - math.log(ratio)) / 2


def evidence(sums: WeightedSums) -> Evidence:
    """Return the log evidence F = −½ [N log 2πτ² + N + ℓ + log|B|], B = I + A, at the best scale of kernel and noise.

    The best scale is τ² = (s − bᵀB⁻¹b)/N. The Cholesky factor R of B contains that of the first m points, so that
    log|B| and bᵀB⁻¹b = |R⁻¹b|² are cumulative sums over points. Raise NumericsError if B is not positive definite.
    """
    count = float(sums.count)
    factor, projection = sums.factor(), torch.as_tensor(sums.projection)
    whitened = torch.linalg.solve_triangular(factor, projection[:, None], upper=False)[:, 0]
    scales = (float(sums.weighted_squares) - whitened.square().cumsum(0)) / count
    determinants = 2 * factor.diagonal().log().cumsum(0)
    logs = count * (2 * math.pi * scales).log() + count + float(sums.log_variances)
    curve = (-(logs + determinants) / 2).numpy()
    return Evidence(float(curve[-1]), float(scales[-1]), curve)


def at_unit_scale(sums: WeightedSums) -> float:
    """Return the log evidence at the scale of the sums, τ² = 1: −½ [N log 2π + ℓ + log|B| + s − bᵀB⁻¹b] in nats."""
    return evidence(sums).at(1.0, float(sums.count))


def variances(rows: Projected, noise: Tensor) -> Tensor:
    """Return λ = σ² + k(x, x) − |w|² [N]; rounding and jitter, which would make λ < σ², are cut off."""
    return noise + (rows.variances - rows.cross.square().sum(0)).clamp(min=0)


@torch.no_grad()
def weighted_sums(model: SparseGP, inputs: Rows, targets: Targets, whitener: Whitener | None = None) -> WeightedSums:
    """Return the sums over rows, chunk by chunk and without a graph; a given ``whitener`` caches the rows."""
    chunks = (whitener or Whitener(model)).projected(model, inputs, last=whitener is None)
    total: list[Tensor] = []
    for rows, y in zip(chunks, targets.split(CHUNK), strict=True):
        spread = variances(rows, model.noise)
        scaled, part = rows.cross / spread.sqrt(), y / spread
        sums = [gram(scaled), rows.cross @ part, part @ y, spread.log().sum(), y @ y]
        total = [before + more for before, more in zip(total, sums, strict=True)] if total else sums
    return WeightedSums(*map(to_array, [*total, total[0].new_tensor(len(targets))]))


def log_evidence(model: SparseGP, inputs: Rows, targets: Targets) -> Tensor:
    """Return the log evidence of all rows, in nats, with its gradient by all parameters but the inducing points."""
    whitener = Whitener(model)
    sums = weighted_sums(model, inputs, targets, whitener)
    gradient = weighted_gradient(model, inputs, targets, sums.posterior(), whitener)
    return with_gradient(at_unit_scale(sums), model, gradient)


def weighted_gradient(
    model: SparseGP, inputs: Rows, targets: Targets, q: WhitenedPosterior, whitener: Whitener | None = None
) -> NamedArrays:
    """Return a site's share of the gradient of the log evidence, by wire name.

    At the posterior q(v) = N(m, S) of all rows, ∂F = Σ_n ∂ E_q log N(y_n | w_nᵀ v, λ_n) with q held fixed (Fisher's
    identity), so that the shares of sites add up. With r = y − wᵀm and g = ∂/∂λ = ½ (r² + wᵀSw)/λ² − ½/λ:

        W̄ = (m r − S w)/λ − 2 w g,   K̄_zx = L⁻ᵀ W̄,   K̄_zz = −½ K̄_zx (L⁻ᵀ W)ᵀ,   ∂k(x, x) = g,   ∂σ² = Σ g.

    F does not depend on the choice of the root of K_zz. This K̄_zz is that of L (L⁻¹ K_zz L⁻ᵀ)^½, which is L here; that
    of a triangular root takes two more solves of size M.
    """
    whitener = whitener or Whitener(model)
    factor, noise = whitener.factor, model.noise.detach()
    mean, covariance = (part.to(factor) for part in (q.mean, q.covariance))
    by_points, by_noise = torch.zeros_like(factor), 0.0
    total: NamedArrays = {}
    for rows, y in zip(whitener.projected(model, inputs, last=True), targets.split(CHUNK), strict=True):
        cross = rows.cross
        spread, residual, explained = variances(rows, noise), y - cross.mT @ mean, covariance @ cross
        by_spread = ((residual.square() + (cross * explained).sum(0)) / spread - 1) / (2 * spread)
        by_cross = torch.outer(mean, residual).sub_(explained).div_(spread).addcmul_(cross, by_spread, value=-2)
        by_noise += float(by_spread.sum())
        incoming, weights = (  # K̄_xz and K_xz K_zz⁻¹, both [N, M]
            torch.linalg.solve_triangular(factor, part.mT, upper=False, left=False) for part in (by_cross, cross)
        )
        by_points.addmm_(incoming.mT, weights, alpha=-0.5)
        total = accumulated(total, whitener.pulled_back(model, rows, incoming, by_spread))
    total = accumulated(total, whitener.pulled_back_points(model, by_points))
    total[LOG_NOISE] = np.asarray(total[LOG_NOISE] + by_noise * to_array(noise))
    return {name: share for name, share in total.items() if name != LOCATIONS}


@torch.no_grad()
def left_out(
    model: SparseGP, inputs: Rows, targets: Targets, q: WhitenedPosterior, whitener: Whitener | None = None
) -> Tensor:
    """Return z, the error of the prediction of each row from all others in standard deviations, and its mean μ [2, N].

    Without row n, at the same parameters, y_n ~ N(μ, s²) with y − μ = (y − wᵀm)/(1 − h) and s² = λ/(1 − h), where
    h = wᵀSw/λ < 1 is the weight of the row in its own prediction, so that z = (y − wᵀm)/√(λ (1 − h)) (Sundararajan and
    Keerthi 2001).
    """
    whitener, found = whitener or Whitener(model), list[Tensor]()
    mean, covariance = (part.to(whitener.factor) for part in (q.mean, q.covariance))
    for rows, y in zip(whitener.projected(model, inputs, last=True), targets.split(CHUNK), strict=True):
        spread = variances(rows, model.noise)
        remaining = spread - (rows.cross * (covariance @ rows.cross)).sum(0)  # λ (1 − h)
        error = y - rows.cross.mT @ mean
        found.append(torch.stack([error / remaining.sqrt(), y - error * spread / remaining]))
    return torch.cat(found, dim=1)
