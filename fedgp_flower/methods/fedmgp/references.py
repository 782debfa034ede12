"""What FedMGP is compared with, fitted where all rows are: the pooled multi-output GP, ModularGP, and FedPoly.

FedPoly is a federated polynomial that every unit then bends towards its rows.

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
from numpy.polynomial import legendre
from torch import Tensor

from fedgp_flower.gp.convolved import smoothed_covariance
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.gp.optimisers import FREE, LOGARITHM
from fedgp_flower.gp.optimisers import maximise as ascend
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior, spacing
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    UnitParameters,
    maximise,
    starting_parameters,
    statistics,
)
from fedgp_flower.typing import Array

Unit = tuple[Array, Array]
"""Rows [N, D] and targets [N] of one unit."""


@dataclass(frozen=True, slots=True)
class MultiOutputFit:
    """A multi-output GP fitted in one place; predict with :func:`fedgp_flower.methods.fedmgp.unit.predict`."""

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

    A module is q_m(f_Z) / p_m(f_Z), a quadratic in f at Z; rows are not used again. Noise is each module's.
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
    sums = statistics(data[first], latents, own)
    factor = cholesky(torch.from_numpy(np.eye(latents.size) + sums.precision), of="precision of q(u)")
    covariance = torch.cholesky_inverse(factor).numpy()  # the inverse is the answer here
    q = Posterior(covariance @ sums.shift, covariance)
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
    bounds = [FREE if leaf is amplitudes else LOGARITHM for leaf in learned]
    value = ascend(bound, learned, max_evaluations=max_evaluations, bounds=bounds).value
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


def legendre_features(x: Array, degree: int, lower: Array, upper: Array) -> Array:
    """1 and P_1 … P_degree of every input scaled to [−1, 1], without interactions.  [N, 1 + D·degree]."""
    scaled = 2 * (x - lower) / (upper - lower) - 1
    columns = [legendre.legvander(scaled[:, d], degree)[:, 1:] for d in range(x.shape[1])]
    return np.hstack([np.ones((len(x), 1)), *columns])


@dataclass(frozen=True, slots=True)
class PolynomialFit:
    """FedPoly: a federated polynomial and every unit's own coefficients near it."""

    degree: int
    coefficients: Array  # [P]
    personal: Array  # [M, P]
    lower: Array  # [D]
    upper: Array  # [D]

    def predict(self, m: int, x: Array) -> Array:
        """Prediction of unit ``m`` at ``x`` [N, D]; the method has no uncertainty."""
        values: Array = legendre_features(x, self.degree, self.lower, self.upper) @ self.personal[m]
        return values


def fit_polynomial(
    units: Sequence[Unit],
    lower: Array,
    upper: Array,
    *,
    degrees: Sequence[int] = tuple(range(1, 13)),
    penalty: float = 0.1,
    folds: int = 5,
) -> PolynomialFit:
    """FedPoly with the degree chosen by cross-validation; every quantity of the server is a sum over units.

    θ* minimises Σ_m ‖y_m − Φ_m θ‖²; unit m then minimises ‖y_m − Φ_m θ‖²/N_m + penalty ‖θ − θ*‖². (The paper prints
    a minus before the penalty, which would push a unit away from θ*.)
    """
    fold = [np.arange(len(y)) % folds for _, y in units]

    def error(degree: int) -> float:
        total = 0.0
        for k in range(folds):
            train = [
                _moments(x[f != k], y[f != k], degree, lower, upper) for (x, y), f in zip(units, fold, strict=True)
            ]
            theta = _solve(train)
            for (x, y), f, (A, b, _) in zip(units, fold, train, strict=True):
                own = _personal(A, b, int(np.sum(f != k)), theta, penalty)
                total += float(np.sum((y[f == k] - legendre_features(x[f == k], degree, lower, upper) @ own) ** 2))
        return total

    degree = min(degrees, key=error)
    moments = [_moments(x, y, degree, lower, upper) for x, y in units]
    theta = _solve(moments)
    personal = np.stack([_personal(A, b, n, theta, penalty) for A, b, n in moments])
    return PolynomialFit(degree, theta, personal, lower, upper)


def _moments(x: Array, y: Array, degree: int, lower: Array, upper: Array) -> tuple[Array, Array, int]:
    """ΦᵀΦ, Φᵀy and the number of rows: what a unit sends."""
    features = legendre_features(x, degree, lower, upper)
    return features.T @ features, features.T @ y, len(y)


def _solve(moments: Sequence[tuple[Array, Array, int]]) -> Array:
    A, b = sum((m[0] for m in moments), np.zeros(())), sum((m[1] for m in moments), np.zeros(()))
    return np.asarray(np.linalg.lstsq(A, b, rcond=None)[0])


def _personal(A: Array, b: Array, count: int, theta: Array, penalty: float) -> Array:
    return np.asarray(np.linalg.solve(A / count + penalty * np.eye(len(b)), b / count + penalty * theta))
