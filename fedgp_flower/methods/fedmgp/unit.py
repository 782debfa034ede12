"""A unit's part of FedMGP with exact q(g): improve its parameters φ_m with q fixed, answer with statistics.

For a Gaussian likelihood the best q(u) given all kernels is Gaussian and needs only sums over units, so a unit never
takes a gradient step: amplitudes and noise have a closed form, each smoothing width is a one-dimensional search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg.lapack import dposv, dtrtrs
from scipy.optimize import minimize_scalar

from fedgp_flower.errors import NumericsError
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.fedmgp.latents import Latents, Move, Posterior, Statistics, spacing
from fedgp_flower.methods.fedmgp.messages import Known
from fedgp_flower.typing import Array


@message()
class UnitParameters:
    """φ_m, which never leaves the unit: f_m = Σ_i s_i · (g_i smoothed by N(0, R_i), scaled to the variance of g_i)."""

    smoothing: Float[ndarray, "I D"] = leaves("diagonals of R_i")
    amplitudes: Float[ndarray, " I"] = leaves("s_i, signed")
    noise: float = leaves("σ²")
    likelihood: tuple[float, ...] = leaves("parameters of a likelihood that is not Gaussian, once trained", default=())


@dataclass(frozen=True, slots=True)
class UnitData:
    """A unit's targets, squared distances of its rows to the pseudo-inputs, and the bounds of its smoothing."""

    y: Array  # [N]
    gaps: Array  # [D, N, J]
    lower: Array  # [D]  a width R nobody can see between pseudo-inputs
    upper: Array  # [D]  ten times the extent of the pseudo-inputs, squared

    @classmethod
    def build(cls, x: Array, y: Array, inducing: Array) -> UnitData:
        """Rows ``x`` [N, D], targets ``y`` [N] and pseudo-inputs [J, D]."""
        extent = np.ptp(inducing, axis=0)
        return cls(y, squared_gaps(x, inducing), 1e-3 * spacing(inducing) ** 2, 100.0 * extent**2)


@message()
class UnitState:
    """What a unit remembers: where its last round started and ended, and the lengthscales of that round."""

    before: UnitParameters
    proposed: UnitParameters
    scales: Float[ndarray, "I D"]
    round: int = 0
    """Round of the request that it answered with this."""
    based_on: int = 0
    """Round of the report that counted then."""

    def agreed(self, data: UnitData, known: Known) -> UnitParameters | None:
        """The parameters behind the report that counts; None where the unit must start afresh."""
        if known.report == self.round:
            return moved(data, self, known.move)[1]
        return self.before if known.report == self.based_on > 0 else None

    def start(self, server_round: int) -> UnitParameters:
        """Where the local steps of a round start; a round that is asked for again starts where it started before."""
        return self.before if self.round == server_round else self.proposed


WINDOW, EVALUATIONS = 1.5, 12
"""Half-width of the search in log R, and its evaluations."""
LEAST_NOISE = 1e-6
"""Smallest noise variance, relative to the mean square of y."""
ALONE_SWEEPS = 20
"""Sweeps of a unit that fits φ_m to a g it took no part in."""
_GRID = np.log([0.003, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
"""First search of log R, relative to S."""
_MAX_NOISE_STEP = 2.0
"""Largest extrapolated change of log σ²."""


def squared_gaps(x: Array, inducing: Array) -> Array:
    """(x_nd − w_jd)² by dimension.  [D, N, J]."""
    gaps: Array = np.square(x.T[:, :, None] - inducing.T[:, None, :])
    return gaps


def feature(gaps: Array, scale: Array, amplitude: float, factor: Array, smoothing: Array) -> Array:
    """K_i = C_{f g_i} L_i⁻ᵀ / a_i for s_i = 1, so that E[f_n | u] = Σ_i s_i k_niᵀ u_i.  [N, J].

    With unit-variance f: c_fg = a² (|2R + S| |S|)^¼ |R + S|^(−½) exp(−½ (x − w)ᵀ (R + S)⁻¹ (x − w)) (Eq. 18 rescaled).
    """
    width = smoothing + scale
    height = amplitude * math.sqrt(math.sqrt(float(np.prod((smoothing + width) * scale))) / float(np.prod(width)))
    exponent = gaps[0] * (-0.5 / width[0])
    for gap, w in zip(gaps[1:], width[1:], strict=True):
        exponent -= gap * (0.5 / w)
    cross = np.exp(exponent, out=exponent)
    cross *= height
    solved, _ = dtrtrs(factor.T, cross.T, lower=0, trans=1, overwrite_b=1)  # L⁻¹ C_gf, both passed without a copy
    return np.asarray(solved).T


def features(gaps: Array, latents: Latents, factors: Array, smoothing: Array) -> list[Array]:
    """:func:`feature` of every latent function."""
    parts = zip(latents.scales, latents.amplitudes, factors, smoothing, strict=True)
    return [feature(gaps, scale, float(amplitude), factor, r) for scale, amplitude, factor, r in parts]


def starting_parameters(data: UnitData, latents: Latents, *, smooth: bool = True) -> UnitParameters:
    """F as large as the data, noise a tenth of their variance, R = S/4 or, where units do not smooth yet, the least."""
    count = latents.scales.shape[0]
    power = float(np.mean(data.y**2))
    smoothing = latents.scales / 4 if smooth else np.broadcast_to(data.lower, latents.scales.shape).copy()
    return UnitParameters(smoothing, np.sqrt(power / count) / latents.amplitudes, 0.09 * power)


class _Regression:
    """E_q‖y − Σ_i s_i f_i‖² as a quadratic in s: with its best s, σ² is the mean squared residual (an EM step)."""

    def __init__(self, data: UnitData, latents: Latents, posterior: Posterior) -> None:
        J = latents.inducing.shape[0]
        count = latents.scales.shape[0]
        second = posterior.second_moment()
        self.y, self.power = data.y, float(data.y @ data.y)
        self.means = posterior.mean.reshape(count, J)
        self.blocks = second.reshape(count, J, count, J).transpose(0, 2, 1, 3)  # [I, I, J, J]
        self.excess = [np.ascontiguousarray(self.blocks[i, i]) - np.eye(J) for i in range(count)]
        self.prior = data.y.size * latents.amplitudes**2  # Σ_n var f_in for s_i = 1
        self.floor = LEAST_NOISE * self.power / data.y.size

    def solve(self, K: Sequence[Array]) -> tuple[Array, float]:
        """The best amplitudes [I] and noise variance: s = H⁻¹c, σ² = (yᵀy − cᵀs)/N with H = E_q FᵀF, c = E_q Fᵀy."""
        if len(K) == 1:
            moment = float(self.y @ (K[0] @ self.means[0]))
            s = np.array([moment / (self.prior[0] + np.vdot(K[0] @ self.excess[0], K[0]))])
            return s, max((self.power - moment * float(s[0])) / self.y.size, self.floor)
        H = np.diag(self.prior)
        c = np.array([self.y @ (k @ m) for k, m in zip(K, self.means, strict=True)])
        for i, Ki in enumerate(K):
            for j, Kj in enumerate(K[: i + 1]):
                inner = self.excess[i] if i == j else self.blocks[i, j]
                H[i, j] += np.vdot(Ki @ inner, Kj)
                H[j, i] = H[i, j]
        _, s, info = dposv(H, c)
        if info:
            raise NumericsError("second moment of a unit's latent functions is singular; use fewer latent functions")
        return s, max((self.power - float(c @ s)) / self.y.size, self.floor)


def maximise(
    data: UnitData,
    latents: Latents,
    posterior: Posterior,
    parameters: UnitParameters,
    *,
    smooth: bool = True,
    coarse: bool = False,
) -> UnitParameters:
    """Improve φ_m with q(u) fixed: R one coordinate at a time, then s and σ² in closed form; the bound cannot fall.

    Args:
        data: the unit's rows.
        latents: the latent functions.
        posterior: q(u).
        parameters: where to start.
        smooth: whether R is searched.
        coarse: whether a grid of R comes first, for a unit that has seen no posterior yet.
    """
    factors = latents.whitening()
    regression = _Regression(data, latents, posterior)
    smoothing = parameters.smoothing.copy()
    K = features(data.gaps, latents, factors, smoothing)
    lower, upper = np.log(data.lower), np.log(data.upper)
    for i, d in np.ndindex(*smoothing.shape) if smooth else ():

        def part(log_r: float, i: int = i, d: int = d) -> Array:
            trial = smoothing[i].copy()
            trial[d] = math.exp(log_r)
            return feature(data.gaps, latents.scales[i], float(latents.amplitudes[i]), factors[i], trial)

        def log_noise(log_r: float, i: int = i, part: Callable[[float], Array] = part) -> float:
            return math.log(regression.solve([*K[:i], part(log_r), *K[i + 1 :]])[1])

        here = float(np.clip(math.log(smoothing[i, d]), lower[d], upper[d]))
        if coarse:
            grid = np.clip(np.log(latents.scales[i, d]) + _GRID, lower[d], upper[d])
            here = min((here, *(float(g) for g in grid)), key=log_noise)
        bounds = max(here - WINDOW, float(lower[d])), min(here + WINDOW, float(upper[d]))
        limits = {"maxiter": EVALUATIONS, "xatol": 1e-3}
        best = minimize_scalar(log_noise, bounds=bounds, method="bounded", options=limits)
        here = float(best.x) if best.fun < log_noise(here) else here
        K[i], smoothing[i, d] = part(here), math.exp(here)
    amplitudes, noise = regression.solve(K)
    return replace(parameters, smoothing=smoothing, amplitudes=amplitudes, noise=noise)


def moved(data: UnitData, state: UnitState, move: Move) -> tuple[Array, UnitParameters]:
    """Lengthscales [I, D] and the unit's parameters after a trial move; a unit needs only the move to follow."""
    scales = state.scales * np.exp(move.offset)
    before, after = state.before, state.proposed
    smoothing, noise = after.smoothing, after.noise
    if move.stretch != 1.0:
        step = np.clip(move.stretch * math.log(noise / before.noise), -_MAX_NOISE_STEP, _MAX_NOISE_STEP)
        noise = before.noise * math.exp(step)
        stretched = before.smoothing * (smoothing / before.smoothing) ** move.stretch
        smoothing = np.clip(stretched, data.lower, data.upper)
    if move.hold == "width":
        narrowed = np.clip(smoothing - 0.5 * (scales - state.scales), data.lower, data.upper)
        return scales, replace(after, smoothing=narrowed, noise=noise)
    ratio = scales / (2 * smoothing + scales) * (2 * smoothing + state.scales) / state.scales
    amplitudes = after.amplitudes * np.prod(ratio, axis=1) ** 0.25
    return scales, replace(after, smoothing=smoothing, amplitudes=amplitudes, noise=noise)


def statistics(
    data: UnitData, latents: Latents, parameters: UnitParameters, factors: Array | None = None
) -> Statistics:
    """The unit's sums for q(u) and the bound; ``factors`` are the latents' whitening, where it is at hand."""
    K = features(data.gaps, latents, latents.whitening() if factors is None else factors, parameters.smoothing)
    s, noise, N = parameters.amplitudes, parameters.noise, data.y.size
    A = np.hstack([si * Ki for si, Ki in zip(s, K, strict=True)])  # [N, I·J]
    explained = np.array([si**2 * np.vdot(Ki, Ki) for si, Ki in zip(s, K, strict=True)])
    evidence = -0.5 * N * math.log(2 * math.pi * noise) - 0.5 * float(data.y @ data.y) / noise
    slack = -0.5 * (N * (s * latents.amplitudes) ** 2 - explained) / noise
    return Statistics(A.T @ A / noise, A.T @ data.y / noise, evidence, slack)


def respond(
    data: UnitData,
    latents: Latents,
    posterior: Posterior,
    moves: Sequence[Move],
    parameters: UnitParameters | None,
    *,
    smooth: bool = True,
) -> tuple[UnitState, list[Statistics]]:
    """One round at a unit: improve φ_m, then statistics at every trial move; a newcomer has no parameters yet."""
    start = starting_parameters(data, latents, smooth=smooth) if parameters is None else parameters
    unsearched = parameters is None or bool(np.all(parameters.smoothing <= data.lower))  # new, or just released
    proposed = maximise(data, latents, posterior, start, smooth=smooth, coarse=unsearched)
    state = UnitState(proposed if parameters is None else start, proposed, latents.scales)
    factors: dict[bytes, Array] = {}
    answers = []
    for move in moves:
        scales, trial = moved(data, state, move)
        shifted = replace(latents, scales=scales)
        key = scales.tobytes()
        if key not in factors:
            factors[key] = shifted.whitening()
        answers.append(statistics(data, shifted, trial, factors[key]))
    return state, answers


def predict(x: Array, latents: Latents, posterior: Posterior, parameters: UnitParameters) -> tuple[Array, Array]:
    """Mean and variance of f_m at rows ``x`` (Eq. 16); add ``parameters.noise`` for an observation.  [N], [N]."""
    K = features(squared_gaps(x, latents.inducing), latents, latents.whitening(), parameters.smoothing)
    A = np.hstack([s * k for s, k in zip(parameters.amplitudes, K, strict=True)])
    prior = float(np.sum((parameters.amplitudes * latents.amplitudes) ** 2))
    variance: Array = prior - np.einsum("nj,nj->n", A, A) + np.einsum("nj,jk,nk->n", A, posterior.covariance, A)
    return A @ posterior.mean, variance


def fit_alone(data: UnitData, latents: Latents, q: Posterior) -> UnitParameters:
    """φ_m fitted with g as it is: what a unit that joins late does, and nothing of it goes back."""
    phi = starting_parameters(data, latents)
    for sweep in range(ALONE_SWEEPS):
        phi = maximise(data, latents, q, phi, coarse=sweep == 0)
    return phi
