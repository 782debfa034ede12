"""A unit's deviation from what it shares, f = Σ_i s_i (g_i smoothed by N(0, R_i)) + d, with uncertain amplitudes.

With φ_m as a point, a unit that is no exact mixture of the latent functions trusts the others too much: the rows it has
seen fix s, R and σ² so well that the band beyond them is far too narrow. Here s ~ N(0, Λ) with Λ_i so wide that latent
function i alone could make the whole signal, and d ~ GP(0, τ² exp(−½ (x − x')ᵀ P⁻¹ (x − x'))) with the τ, P and σ² of
greatest evidence of the unit's own rows. A function that is flat at those rows could make their signal only with an
amplitude that is absurd elsewhere; Λ_i is bounded by its mean square at the pseudo-inputs. All of it is computed at the
unit, and nothing of it is sent.

Reference: Stein, Interpolation of Spatial Data (1999), Section 1.5, for prediction with uncertain coefficients.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.convolved import smoothed_covariance
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.gp.optimisers import LOGARITHM, maximise
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior
from fedgp_flower.methods.fedmgp.unit import UnitParameters, features, squared_gaps
from fedgp_flower.typing import Array

_STARTS = (0.1, 0.33)
"""Lengthscales of d at the start, as shares of the rows' extent."""
_FLATTEST = 0.1
"""Least mean square of a latent function at the rows that Λ counts with, over that at the pseudo-inputs: no function
alone makes more than √10 times the unit's signal there."""


def predict_with_deviation(
    rows: tuple[Array, Array],
    x: Array,
    latents: Latents,
    posterior: Posterior,
    parameters: UnitParameters,
    *,
    max_evaluations: int = 100,
) -> tuple[Array, Array, float]:
    """Mean and variance of f at ``x`` [N', D] given q(g) and the unit's ``rows``; and the variance of the noise.

    A row's covariance is Σ_i Λ_i (k_iᵀm_i)(k_iᵀm_i) from the amplitudes, aᵀVa around them from q(u) = N(m, V) at the
    unit's own amplitudes, and that of d; beyond, at ``x``, what the pseudo-inputs cannot explain is added.
    """
    seen, y = rows
    shapes, spread, _ = _views(seen, latents, posterior, parameters)
    shapes_x, spread_x, unexplained = _views(x, latents, posterior, parameters)
    prior = np.mean(y**2) / _power(shapes, _views(latents.inducing, latents, posterior, parameters)[0])  # Λ [I]
    known = (shapes * prior) @ shapes.T + spread @ posterior.covariance @ spread.T
    across = (shapes_x * prior) @ shapes.T + spread_x @ posterior.covariance @ spread.T
    ahead = np.sum(shapes_x**2 * prior, axis=1) + np.einsum("nj,jk,nk->n", spread_x, posterior.covariance, spread_x)
    own = _Deviation(seen, y, known, parameters.noise)
    own.fit(max_evaluations)
    mean, reduction = own.condition(torch.from_numpy(across), torch.from_numpy(x))
    return mean, ahead + unexplained + own.variance - reduction, own.noise


def _views(x: Array, latents: Latents, posterior: Posterior, parameters: UnitParameters) -> tuple[Array, Array, Array]:
    """k_niᵀm_i [N, I]; rows a_n = (s_i k_ni)_i [N, I·J]; Σ_i s_i² (a_i² − ‖k_ni‖²) [N]."""
    K = features(squared_gaps(x, latents.inducing), latents, latents.whitening(), parameters.smoothing)
    means = posterior.mean.reshape(len(K), -1)
    shapes = np.stack([k @ m for k, m in zip(K, means, strict=True)], axis=1)
    spread = np.hstack([s * k for s, k in zip(parameters.amplitudes, K, strict=True)])
    prior = float(np.sum((parameters.amplitudes * latents.amplitudes) ** 2))
    return shapes, spread, np.maximum(prior - np.sum(spread**2, axis=1), 0.0)


def _power(shapes: Array, everywhere: Array) -> Array:
    """Mean square of each latent function at the rows [N, I], at least a share of that at the pseudo-inputs [J, I]."""
    least = _FLATTEST * np.mean(everywhere**2, axis=0)
    return np.asarray(np.maximum(np.mean(shapes**2, axis=0), np.maximum(least, np.finfo(float).tiny)))


class _Deviation:
    """d and the noise of one unit, given the covariance of all the rest at its rows."""

    def __init__(self, x: Array, y: Array, known: Array, noise: float) -> None:
        self.x, self.y, self.known = (torch.from_numpy(part) for part in (x, y, known))
        self.extent = np.log(np.ptp(x, axis=0))
        self.start = math.log(noise)
        self.leaves = self._leaves(_STARTS[0])

    def _leaves(self, share: float) -> list[Tensor]:
        """Log P [D], log τ², log σ²; half of the unit's residual variance goes to each of d and noise at first."""
        half = torch.tensor(self.start - math.log(2), dtype=torch.float64)
        scales = torch.tensor(2 * (self.extent + math.log(share)), dtype=torch.float64)
        return [leaf.clone().requires_grad_() for leaf in (scales, half, half)]

    def _covariance(self, x: Tensor) -> Tensor:
        """Covariance of d between ``x`` and the rows."""
        none = torch.zeros_like(self.leaves[0])[None]
        return self.leaves[1].exp() * smoothed_covariance(x, self.x, self.leaves[0].exp()[None], none, none)[0]

    def _factor(self) -> Tensor:
        noisy = (
            self.known + self._covariance(self.x) + self.leaves[2].exp() * torch.eye(len(self.y), dtype=self.x.dtype)
        )
        return cholesky(noisy, of="covariance of a unit's targets", hint="Set `fedmgp.own-deviation` to false.")

    def _evidence(self) -> Tensor:
        """Log N(y | 0, C + σ²I) but for the constant."""
        L = self._factor()
        z = torch.linalg.solve_triangular(L, self.y[:, None], upper=False)
        evidence: Tensor = -0.5 * z.square().sum() - L.diagonal().log().sum()
        return evidence

    def fit(self, max_evaluations: int) -> None:
        """τ, P and σ² of greatest evidence, from the best of two starts."""
        fits = []
        for share in _STARTS:
            self.leaves = self._leaves(share)
            bounds = [LOGARITHM] * len(self.leaves)
            trace = maximise(self._evidence, self.leaves, max_evaluations=max_evaluations, bounds=bounds)
            fits.append((trace.value, self.leaves))
        self.leaves = max(fits, key=lambda pair: pair[0])[1]

    @property
    def variance(self) -> float:
        """τ²."""
        return float(self.leaves[1].detach().exp())

    @property
    def noise(self) -> float:
        """σ²."""
        return float(self.leaves[2].detach().exp())

    @torch.no_grad()
    def condition(self, across: Tensor, x: Tensor) -> tuple[Array, Array]:
        """Mean at ``x`` and by how much the rows reduce the variance, with ``across`` the covariance of all but d."""
        L = self._factor()
        z = torch.linalg.solve_triangular(L, self.y[:, None], upper=False)
        half = torch.linalg.solve_triangular(L, (across + self._covariance(x)).mT, upper=False)
        return np.asarray((half.mT @ z)[:, 0]), np.asarray(half.square().sum(0))
