"""The local risk of Algorithm 2 and its gradient in closed form, for Gaussian noise and fixed pseudo-inputs.

With K_i = L_i⁻¹ c_{g_i f} for unit amplitude [J, B], the mean is Σ_i s_i K_iᵀ m_i and the variance
Σ_i s_i² (1 − ‖k_in‖² + ‖T_iᵀ k_in‖²). The reverse pass through the Cholesky factor is written out, so a step takes a
few dozen array operations; autograd of the model in :mod:`fedgp_flower.methods.fedmgp.multi_output` gives the same.

References:
    Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Eq. 14.
    Murray, Differentiation of the Cholesky decomposition (2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtrs

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.linalg import kernel_cholesky
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.methods.fedmgp.latents import FACTOR, MEAN, SCALES
from fedgp_flower.methods.fedmgp.unit import squared_gaps
from fedgp_flower.typing import Array, NamedArrays

SMOOTHING, AMPLITUDES, NOISE = "kernel.raw_smoothing", "kernel.amplitudes", "likelihood.noise_covar.raw_noise"
"""Names of φ_m in the model: log R, s, log σ²."""


Pair: TypeAlias = tuple[Array, Array]


class GaussianRisk:
    """R_m of one unit as a function of named parameters; rows and pseudo-inputs are fixed."""

    def __init__(self, x: Array, y: Array, inducing: Array, *, weight: float, jitter: float) -> None:
        self.y, self.weight, self.jitter = y, weight, jitter
        self.gaps = squared_gaps(inducing, x)  # [D, J, N]
        self.inner = squared_gaps(inducing, inducing)  # [D, J, J]

    def gradient(
        self, parameters: Mapping[str, Array], rows: NDArray[np.int64] | None = None
    ) -> tuple[float, NamedArrays]:
        """The risk on a mini-batch (all rows for None) and its gradient under the parameters' names."""
        y = self.y if rows is None else self.y[rows]
        gaps = self.gaps if rows is None else self.gaps[:, :, rows]
        S, T = np.exp(parameters[SCALES]), np.tril(parameters[FACTOR])
        R = np.exp(parameters[SMOOTHING]) if SMOOTHING in parameters else np.zeros_like(S)
        m, s, noise = parameters[MEAN], parameters[AMPLITUDES], float(np.exp(parameters[NOISE]).item())
        latent = np.exp(-0.5 * np.tensordot(1 / S, self.inner, 1))  # [I, J, J]
        L = self._factors(latent)
        cross = _cross(gaps, S, R)  # [I, J, B]
        K = np.stack([_solve(factor, part) for factor, part in zip(L, cross, strict=True)])
        TK = T.transpose(0, 2, 1) @ K
        mean = np.einsum("i,ij,ijn->n", s, m, K)
        spread = 1 - np.einsum("ijn,ijn->in", K, K) + np.einsum("ijn,ijn->in", TK, TK)  # [I, B]
        scale = len(self.y) / (len(y) * self.weight)
        residual, variance = y - mean, (s**2) @ spread
        misfit = (residual**2 + variance) / noise
        diagonal = np.diagonal(T, axis1=1, axis2=2)
        divergence = 0.5 * (np.sum(T**2) + np.sum(m**2) - m.size) - np.log(np.abs(diagonal)).sum()
        risk = 0.5 * scale * (len(y) * math.log(2 * math.pi * noise) + misfit.sum()) + divergence
        pull, push = scale * residual / noise, scale / noise  # −∂R/∂mean and 2 ∂R/∂variance
        grown = push * s[:, None, None] ** 2 * TK
        K_bar = T @ grown - push * s[:, None, None] ** 2 * K - s[:, None, None] * m[:, :, None] * pull
        log_scales, log_smoothing = self._widths(gaps, (S, R), (latent, L), cross, K, K_bar)
        gradient: NamedArrays = {
            MEAN: m - s[:, None] * (K @ pull),
            FACTOR: np.tril(K @ grown.transpose(0, 2, 1) + T) - _diagonal(1 / diagonal),
            AMPLITUDES: push * s * spread.sum(axis=1) - np.einsum("ij,ijn,n->i", m, K, pull),
            NOISE: np.full_like(parameters[NOISE], 0.5 * scale * (len(y) - misfit.sum())),
            SCALES: log_scales,
        }
        return float(risk), gradient | ({SMOOTHING: log_smoothing} if SMOOTHING in parameters else {})

    def _factors(self, latent: Array) -> Array:
        variance = torch.ones(len(latent), dtype=torch.float64)
        return np.asarray(kernel_cholesky(torch.from_numpy(latent), variance=variance, jitter=self.jitter, of="C_gg"))

    def _widths(
        self, gaps: Array, widths: Pair, shared: Pair, cross: Array, K: Array, K_bar: Array
    ) -> tuple[Array, Array]:
        """∂R/∂log S and ∂R/∂log R [I, D], through L and through c_gf, from (S, R) and (correlation at W, L)."""
        (S, R), (latent, L) = widths, shared
        log_scales, log_smoothing = np.empty_like(S), np.empty_like(R)
        for i in range(len(S)):
            cross_bar = _solve(L[i], K_bar[i], transposed=True)
            weighted = cross_bar * cross[i]
            total, width, own = weighted.sum(), R[i] + S[i], 2 * R[i] + S[i]
            stretch = 0.5 * np.tensordot(gaps, weighted, 2) / width**2  # of the exponent, [D]
            log_smoothing[i] = R[i] * (total * (0.5 / own - 0.5 / width) + stretch)
            log_scales[i] = S[i] * (total * (0.25 / own + 0.25 / S[i] - 0.5 / width) + stretch)
            inner_bar = _through_cholesky(L[i], -cross_bar @ K[i].T)
            log_scales[i] += 0.5 * np.tensordot(self.inner, inner_bar * latent[i], 2) / S[i]
        return log_scales, log_smoothing


def _cross(gaps: Array, S: Array, R: Array) -> Array:
    """c_{g_i f} for unit amplitude, [I, J, B]."""
    width = R + S
    height = ((width + R) * S).prod(axis=1) ** 0.25 / np.sqrt(width.prod(axis=1))
    cross = np.exp(-0.5 * np.tensordot(1 / width, gaps, 1))
    cross *= height[:, None, None]
    return np.asarray(cross)


def _solve(factor: Array, right: Array, *, transposed: bool = False) -> Array:
    """L⁻¹B, or L⁻ᵀB.  Row-major L is passed as the upper factor Lᵀ without a copy."""
    solved, _ = dtrtrs(factor.T, right, lower=0, trans=0 if transposed else 1)
    return np.asarray(solved)


def _diagonal(values: Array) -> Array:
    """Diagonal matrices [I, J, J] of [I, J]."""
    return np.asarray(values[:, :, None] * np.eye(values.shape[1]))


def _through_cholesky(L: Array, L_bar: Array) -> Array:
    """Gradient in the matrix from that in its factor: sym(L⁻ᵀ Φ(Lᵀ L̄) L⁻¹), Φ = lower triangle, half the diagonal."""
    inner = np.tril(L.T @ L_bar)
    inner[np.diag_indices_from(inner)] *= 0.5
    left = _solve(L, inner, transposed=True)
    full = _solve(L, left.T, transposed=True)  # (L⁻ᵀ Φ L⁻¹)ᵀ
    return np.asarray(0.5 * (full + full.T))


def descend(
    risk: Callable[[NamedArrays], NamedArrays], parameters: NamedArrays, *, steps: int, rate: float, adam: bool
) -> NamedArrays:
    """Steps of Adam or plain descent from ``parameters``.

    Raises:
        NumericsError: a parameter is not finite, so that a diverged step is never sent.
    """
    names, shapes = list(parameters), [parameters[name].shape for name in parameters]
    ends = np.cumsum([parameters[name].size for name in names])[:-1]
    flat = np.concatenate([parameters[name].ravel() for name in names])

    def named(vector: Array) -> NamedArrays:
        parts = zip(names, np.split(vector, ends), shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in parts}

    moments: AdamState[Array] = AdamState()
    for _ in range(steps):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the check below speaks for all of them
            slopes = risk(named(flat))
        slope = np.concatenate([slopes[name].ravel() for name in names])
        if adam:
            moves, moments = moments.update({"flat": slope}, rate)
        flat = flat - (moves["flat"] if adam else rate * slope)
        if not np.isfinite(flat).all():
            raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")
    return named(flat)
