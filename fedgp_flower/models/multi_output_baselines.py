"""Gaussian processes that FedMGP is compared with: the pooled multi-output GP, and ModularGP.

References:
    Moreno-Muñoz, Artés, Álvarez, Modular Gaussian processes for transfer learning (NeurIPS 2021).
    Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.latent import Latents, Posterior, spacing
from fedgp_flower.linalg import cholesky, kernel_cholesky
from fedgp_flower.models.convolved import smoothed_covariance
from fedgp_flower.models.exact_q import (
    SearchOptions,
    UnitData,
    UnitParameters,
    maximise,
    starting_parameters,
    statistics,
)
from fedgp_flower.models.fitting import maximise as ascend
from fedgp_flower.shapes import Array

Unit = tuple[Array, Array]
"""Rows [N, D] and targets [N] of one unit."""


@dataclass(frozen=True, slots=True)
class MultiOutputFit:
    """A multi-output GP fitted in one place; predict with :func:`fedgp_flower.models.exact_q.predict`."""

    latents: Latents
    posterior: Posterior
    units: tuple[UnitParameters, ...]
    bound: float


@dataclass(frozen=True, slots=True)
class _Site:
    """Log p(y_m | f_m) as a quadratic in f at some points: constant + ηᵀf − ½ fᵀΛf."""

    points: Tensor  # [n, D]
    precision: Tensor  # Λ [n, n], or its diagonal [n]
    shift: Tensor  # η [n]
    constant: Tensor


SiteMaker = Callable[[int, Tensor], _Site]
"""The site term of unit m given the logarithm of its noise."""


def fit_pooled(
    units: Sequence[Unit], starts: Sequence[tuple[Latents, Sequence[UnitParameters]]], *, max_evaluations: int = 600
) -> MultiOutputFit:
    """Pooled optimum: L-BFGS on the collapsed bound of the same model, all rows in one place, best of the starts."""
    rows = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in units]

    def site(m: int, log_noise: Tensor) -> _Site:
        x, y = rows[m]
        weight = (-log_noise).exp()
        constant = -0.5 * len(y) * (math.log(2 * math.pi) + log_noise) - 0.5 * weight * (y @ y)
        return _Site(x, weight.expand(len(y)), weight * y, constant)

    fits = [_fit(site, latents, phi, max_evaluations) for latents, phi in starts]
    return max(fits, key=lambda fit: fit.bound)


def fit_modular(
    units: Sequence[Unit],
    inducing: Array,
    start: tuple[Latents, Sequence[UnitParameters]],
    *,
    max_evaluations: int = 300,
) -> MultiOutputFit:
    """ModularGP: every unit fits its own sparse GP at ``inducing``, the server fits the multi-output GP to those.

    A module is q_m(f_Z) / p_m(f_Z), a quadratic in f at Z; rows are not used again. Noise is what each module found.
    """
    modules = [_module(unit, torch.from_numpy(inducing), max_evaluations) for unit in units]
    latents, phi = start
    noises = [UnitParameters(p.smoothing, p.amplitudes, noise) for p, (_, noise) in zip(phi, modules, strict=True)]
    return _fit(lambda m, _: modules[m][0], latents, noises, max_evaluations, learn_noise=False)


def _module(unit: Unit, Z: Tensor, max_evaluations: int) -> tuple[_Site, float]:
    """q(f_Z)/p(f_Z) of the best sparse GP of one unit: Λ = L⁻ᵀAAᵀL⁻¹/σ², η = L⁻ᵀAy/σ² with A = L⁻¹K_Zx; and σ²."""
    x, y = (torch.from_numpy(part) for part in unit)
    latents = Latents(Z.numpy(), spacing(Z.numpy())[None] ** 2 * 4, np.ones(1))
    start = starting_parameters(UnitData.build(*unit, Z.numpy()), latents, SearchOptions(convolved=False))
    fit = fit_pooled([unit], [(latents, [start])], max_evaluations=max_evaluations)
    scales, s, noise = torch.from_numpy(fit.latents.scales), float(fit.units[0].amplitudes[0]), fit.units[0].noise
    none = torch.zeros_like(scales)
    K = s**2 * smoothed_covariance(Z, Z, scales, none, none)[0]
    L = kernel_cholesky(K, variance=torch.tensor(s**2, dtype=K.dtype), jitter=latents.jitter, of="module K_zz")
    A = torch.linalg.solve_triangular(L, s**2 * smoothed_covariance(Z, x, scales, none, none)[0], upper=False)
    B = torch.linalg.solve_triangular(L.mT, A, upper=True)
    return _Site(Z, B @ B.mT / noise, B @ y / noise, torch.zeros((), dtype=K.dtype)), noise


def starting_point(
    units: Sequence[Unit], inducing: Array, *, multiples: Sequence[float] = (1.0,), options: SearchOptions | None = None
) -> tuple[Latents, list[UnitParameters]]:
    """Spacing start: q from the unit with most rows, the others regress on it, so that signs come out consistent."""
    options = options or SearchOptions()
    latents = Latents(inducing, np.outer(np.square(multiples), spacing(inducing) ** 2), np.ones(len(multiples)))
    data = [UnitData.build(x, y, inducing) for x, y in units]
    first = max(range(len(data)), key=lambda m: data[m].y.size)
    own = starting_parameters(data[first], latents, options)
    told = statistics(data[first], latents, own)
    factor = cholesky(torch.from_numpy(np.eye(latents.size) + told.precision), of="precision of q(u)")
    covariance = torch.cholesky_inverse(factor).numpy()  # the inverse is the answer here
    q = Posterior(covariance @ told.shift, covariance)
    phi = [
        own if m == first else maximise(d, latents, q, starting_parameters(d, latents, options), options, coarse=True)
        for m, d in enumerate(data)
    ]
    return latents, phi


def _fit(
    site: SiteMaker, latents: Latents, phi: Sequence[UnitParameters], max_evaluations: int, *, learn_noise: bool = True
) -> MultiOutputFit:
    """Maximise the collapsed bound over log S, log R, s, log σ²."""
    convolved = bool(np.any(phi[0].smoothing > 0))
    log_s = torch.tensor(np.log(latents.scales), requires_grad=True)
    log_r = torch.tensor(np.stack([np.log(np.maximum(p.smoothing, 1e-300)) for p in phi]), requires_grad=convolved)
    amplitudes = torch.tensor(np.stack([p.amplitudes * latents.amplitudes for p in phi]), requires_grad=True)
    log_noise = torch.tensor([math.log(p.noise) for p in phi], dtype=torch.float64, requires_grad=learn_noise)
    leaves, W = [log_s, log_r, amplitudes, log_noise], torch.from_numpy(latents.inducing)

    def sums() -> tuple[Tensor, Tensor, Tensor]:
        smoothing = log_r.exp() if convolved else torch.zeros_like(log_r)
        return _sums(
            [site(m, log_noise[m]) for m in range(len(phi))], W, log_s.exp(), smoothing, amplitudes, latents.jitter
        )

    def bound() -> Tensor:
        P, b, local = sums()
        L = cholesky(P, of="precision of q(u)")
        z = torch.linalg.solve_triangular(L, b[:, None], upper=False)
        value: Tensor = local + 0.5 * z.square().sum() - L.diagonal().log().sum()
        return value

    learned = [leaf for leaf in leaves if leaf.requires_grad]
    logarithms = [leaf is not amplitudes for leaf in learned]
    value, _ = ascend(bound, learned, max_evaluations=max_evaluations, bounded=logarithms)
    with torch.no_grad():
        P, b, _ = sums()
        smoothing = (log_r.exp() if convolved else torch.zeros_like(log_r)).numpy()
        fitted = Latents(latents.inducing, log_s.exp().numpy(), np.ones(len(log_s)), latents.jitter)
        parts = zip(smoothing, amplitudes.detach().numpy(), log_noise.exp().tolist(), strict=True)
        return MultiOutputFit(fitted, _posterior(P, b), tuple(UnitParameters(r, s, n) for r, s, n in parts), value)


def _posterior(P: Tensor, b: Tensor) -> Posterior:
    """N(P⁻¹b, P⁻¹)."""
    V = torch.cholesky_inverse(cholesky(P, of="precision of q(u)"))  # the inverse is the answer here
    return Posterior(np.asarray((V @ b).numpy(), dtype=np.float64), np.asarray(V.numpy(), dtype=np.float64))


def _sums(
    sites: Sequence[_Site], W: Tensor, scales: Tensor, smoothing: Tensor, amplitudes: Tensor, jitter: float
) -> tuple[Tensor, Tensor, Tensor]:
    """I + Σ AᵀΛA, Σ Aᵀη, and Σ constant − ½ tr(ΛΩ), with rows A = [s_i L_i⁻¹c_i]ᵀ."""
    none = torch.zeros_like(scales)
    latent = smoothed_covariance(W, W, scales, none, none)
    L = kernel_cholesky(latent, variance=latent.new_ones(len(latent)), jitter=jitter, of="C_gg")
    size = W.shape[0] * scales.shape[0]
    P, b, local = torch.eye(size, dtype=W.dtype), W.new_zeros(size), W.new_zeros(())
    for part, R, s in zip(sites, smoothing, amplitudes, strict=True):
        cross = s[:, None, None] * smoothed_covariance(W, part.points, scales, none, R)
        A = torch.linalg.solve_triangular(L, cross, upper=False).reshape(size, -1)  # [I·J, n]
        if part.precision.ndim == 1:
            weighted = A * part.precision
            unexplained = (part.precision * (s.square().sum() - A.square().sum(0))).sum()
        else:
            weighted = A @ part.precision
            C_ff = (s.square()[:, None, None] * smoothed_covariance(part.points, part.points, scales, R, R)).sum(0)
            unexplained = (part.precision * (C_ff - A.mT @ A)).sum()
        P, b, local = P + weighted @ A.mT, b + A @ part.shift, local + part.constant - 0.5 * unexplained
    return P, b, local
