"""One unit with Gaussian noise: its parameters φ_m, sufficient statistics and local steps.

In rounds of Algorithm 2 q(u_i) = N(λ_i⁻¹h_i, λ_i⁻¹). With m = λ⁻¹h, and G and b of a mini-batch times N_m/|B|:

    λ_i ← (1 − ρ) λ_i + ρ (I + G_ii / p_m),    h_i ← (1 − ρ) h_i + ρ (b_i − Σ_{j≠i} G_ij m_j) / p_m,

a natural-gradient step of size ρ on the local risk R_m (Eq. 14; Hoffman et al., JMLR 14, 2013, Section 2). Steps are
linear in λ and h, so their average over units with weights p_m is a step on the pooled bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg.lapack import dposv, dtrtrs
from scipy.optimize import minimize_scalar

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.fedmgp import latents as shared
from fedgp_flower.methods.fedmgp.latents import PRECISION, SCALES, SHIFT, LatentFunctions, LatentPosterior, Move
from fedgp_flower.methods.fedmgp.messages import Known
from fedgp_flower.methods.fedmgp.trust import START_NOISE
from fedgp_flower.typing import Array, Indices, NamedArrays

WINDOW, EVALUATIONS = 1.5, 12
"""Half-width of the search over log R, and its number of evaluations."""
LEAST_NOISE = 1e-6
"""Smallest noise variance, relative to the mean square of y."""
FEW_ROWS = 10
"""With fewer rows the noise stays at or above its starting value, because f could interpolate them."""
SMOOTHING, AMPLITUDES, NOISE = "log R", "s", "log σ²"
DIVERGED = "local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`."
_GRID = np.log([0.003, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
"""Initial grid of log R, relative to S."""


@message()
class UnitParameters:
    """φ_m, which never leaves the unit: f_m = Σ_i s_i · (g_i smoothed by N(0, R_i), scaled to the variance of g_i)."""

    smoothing: Float[ndarray, "I D"] = leaves("diagonals of R_i")
    amplitudes: Float[ndarray, " I"] = leaves("s_i, signed")
    noise: float = leaves("σ²")
    likelihood: tuple[float, ...] = leaves("parameters of a likelihood that is not Gaussian, once trained", default=())


@dataclass(frozen=True, slots=True)
class UnitData:
    """A unit's targets, its squared distances to the pseudo-inputs, and bounds of its smoothing."""

    y: Array  # [N]
    gaps: Array  # [D, N, J]
    lower: Array  # [D]  smallest R, far below the spacing of the pseudo-inputs
    upper: Array  # [D]  largest R, (10 × extent of the pseudo-inputs)²

    @classmethod
    def build(cls, x: Array, y: Array, inducing: Array) -> UnitData:
        """Build from rows ``x`` [N, D], targets ``y`` [N] and pseudo-inputs [J, D]."""
        least, extent = 1e-3 * shared.spacing(inducing) ** 2, np.ptp(inducing, axis=0)
        return cls(y, squared_gaps(x, inducing), least, 100.0 * extent**2)


@message()
class UnitState:
    """Memory of a unit: φ_m before and after its last round, and the lengthscales of that round."""

    before: UnitParameters
    proposed: UnitParameters
    scales: Float[ndarray, "I D"]
    round: int = 0
    """Round of the request that this state answered."""
    based_on: int = 0
    """Round of the report that the server used then."""

    def accepted(self, data: UnitData, known: Known) -> UnitParameters | None:
        """Return φ_m of the report that the server uses; None if the unit must start again."""
        if known.report == self.round:
            return moved(data, self, known.move)[1]
        return self.before if known.report == self.based_on > 0 else None


def squared_gaps(x: Array, inducing: Array) -> Array:
    """Return (x_nd − w_jd)².  [D, N, J]."""
    return np.asarray(np.square(x.T[:, :, None] - inducing.T[:, None, :]))


def feature(gaps: Array, scale: Array, amplitude: float, factor: Array, smoothing: Array) -> Array:
    """Return K_i = C_{f g_i} L_i⁻ᵀ / a_i for s_i = 1, so that E[f_n | u] = Σ_i s_i k_niᵀ u_i.  [N, J].

    With unit-variance f: c_fg = a² (|2R + S| |S|)^¼ |R + S|^(−½) exp(−½ (x − w)ᵀ (R + S)⁻¹ (x − w)) (Eq. 18 rescaled).
    """
    width = smoothing + scale
    height = amplitude * math.sqrt(math.sqrt(float(np.prod((smoothing + width) * scale))) / float(np.prod(width)))
    exponent = gaps[0] * (-0.5 / width[0])
    for gap, w in zip(gaps[1:], width[1:], strict=True):
        exponent -= gap * (0.5 / w)
    cross = np.exp(exponent, out=exponent)
    cross *= height
    solved, _ = dtrtrs(factor.T, cross.T, lower=0, trans=1, overwrite_b=1)  # L⁻¹ C_gf, without copies
    return np.asarray(solved).T


def features(gaps: Array, latents: LatentFunctions, factors: Array, smoothing: Array) -> list[Array]:
    """:func:`feature` of every latent function."""
    parts = zip(latents.scales, latents.amplitudes, factors, smoothing, strict=True)
    return [feature(gaps, *part) for part in parts]


def starting_parameters(data: UnitData, latents: LatentFunctions, *, smooth: bool = True) -> UnitParameters:
    """Return the initial φ_m: f has the power of the targets, and R = S/4, or its minimum if ``smooth`` is false."""
    power = float(np.mean(data.y**2))
    smoothing = latents.scales / 4 if smooth else np.broadcast_to(data.lower, latents.scales.shape).copy()
    amplitudes = np.sqrt(power / len(latents.scales)) / latents.amplitudes
    return UnitParameters(smoothing, amplitudes, max(START_NOISE * power, least_noise(data.y)))


def least_noise(y: Array) -> float:
    """Return the smallest noise variance allowed for targets y."""
    power = float(np.mean(y**2)) or LEAST_NOISE  # targets may all be zero
    return START_NOISE * mean_square(y) if len(y) < FEW_ROWS else LEAST_NOISE * power


def mean_square(y: Array) -> float:
    """Return the mean square of a unit's targets; a value below 1 is shrunk towards 1 by one pseudo-observation."""
    return max(float(np.mean(y**2)), (float(y @ y) + 1) / (len(y) + 1))


# Exact rounds.


def _regression(
    data: UnitData, latents: LatentFunctions, q: LatentPosterior
) -> Callable[[Sequence[Array]], tuple[Array, float]]:
    """Return a solver that maps features K_i to s = H⁻¹c and σ² = (yᵀy − cᵀs)/N, H = E_q FᵀF and c = E_q Fᵀy."""
    count, J = latents.scales.shape[0], latents.inducing.shape[0]
    y, power, means = data.y, float(data.y @ data.y), q.mean.reshape(count, J)
    least = least_noise(y)
    excess = np.ascontiguousarray(q.second_moment().reshape(count, J, count, J).transpose(0, 2, 1, 3))
    excess[range(count), range(count)] -= np.eye(J)
    prior = np.diag(y.size * latents.amplitudes**2)  # Σ_n var f_in for s_i = 1

    def solve(K: Sequence[Array]) -> tuple[Array, float]:
        H, c = prior.copy(), np.array([y @ (k @ m) for k, m in zip(K, means, strict=True)])
        for i in range(count):
            for j in range(i + 1):
                H[i, j] += np.vdot(K[i] @ excess[i, j], K[j])
                H[j, i] = H[i, j]
        _, s, info = dposv(H, c)
        if info:
            raise NumericsError("second moment of a unit's latent functions is singular; use fewer latent functions")
        return s, max((power - float(c @ s)) / y.size, least)

    return solve


def maximise(
    data: UnitData,
    latents: LatentFunctions,
    q: LatentPosterior,
    phi: UnitParameters,
    *,
    smooth: bool = True,
    coarse: bool = False,
) -> UnitParameters:
    """Improve φ_m for fixed q(u): a search per coordinate of log R, ``coarse`` on a grid first, then s and σ²."""
    solve, factors, smoothing = _regression(data, latents, q), latents.whitening(), phi.smoothing.copy()
    K = features(data.gaps, latents, factors, smoothing)
    lower, upper = np.log(data.lower), np.log(data.upper)

    def trial(log_r: float, i: int, d: int) -> list[Array]:
        widths = smoothing[i].copy()
        widths[d] = math.exp(log_r)
        part = feature(data.gaps, latents.scales[i], latents.amplitudes[i], factors[i], widths)
        return [*K[:i], part, *K[i + 1 :]]

    def log_noise(log_r: float, i: int, d: int) -> float:
        return math.log(solve(trial(log_r, i, d))[1])

    for i, d in np.ndindex(*smoothing.shape) if smooth else ():
        current = float(np.clip(math.log(smoothing[i, d]), lower[d], upper[d]))
        if coarse:
            grid = np.clip(np.log(latents.scales[i, d]) + _GRID, lower[d], upper[d])
            widths = [current, *grid.tolist()]
            current = widths[int(np.argmin([log_noise(log_r, i, d) for log_r in widths]))]
        bounds = max(current - WINDOW, float(lower[d])), min(current + WINDOW, float(upper[d]))
        limits = {"maxiter": EVALUATIONS, "xatol": 1e-3}
        best = minimize_scalar(log_noise, args=(i, d), bounds=bounds, method="bounded", options=limits)
        current = float(best.x) if best.fun < log_noise(current, i, d) else current
        K, smoothing[i, d] = trial(current, i, d), math.exp(current)
    amplitudes, noise = solve(K)
    return replace(phi, smoothing=smoothing, amplitudes=amplitudes, noise=noise)


def moved(data: UnitData, state: UnitState, move: Move) -> tuple[Array, UnitParameters]:
    """Return the lengthscales [I, D] and φ_m after a trial move."""
    scales = state.scales * np.exp(move.offset)
    before, after, smoothing, noise = state.before, state.proposed, state.proposed.smoothing, state.proposed.noise
    if move.stretch != 1.0:
        noise = before.noise * math.exp(np.clip(move.stretch * math.log(noise / before.noise), -2.0, 2.0))
        stretched = before.smoothing * (smoothing / before.smoothing) ** move.stretch
        smoothing = np.clip(stretched, data.lower, data.upper)
    if move.hold == "width":
        narrowed = np.clip(smoothing - 0.5 * (scales - state.scales), data.lower, data.upper)
        return scales, replace(after, smoothing=narrowed, noise=noise)
    ratio = scales / (2 * smoothing + scales) * (2 * smoothing + state.scales) / state.scales
    amplitudes = after.amplitudes * np.prod(ratio, axis=1) ** 0.25
    return scales, replace(after, smoothing=smoothing, amplitudes=amplitudes, noise=noise)


def statistics(data: UnitData, latents: LatentFunctions, phi: UnitParameters) -> shared.UnitStatistics:
    """Return the unit's sufficient statistics for q(u) and the bound."""
    s, noise, N = phi.amplitudes, phi.noise, data.y.size
    scaled = [
        si * Ki for si, Ki in zip(s, features(data.gaps, latents, latents.whitening(), phi.smoothing), strict=True)
    ]
    A = np.hstack(scaled)  # [N, I·J]
    evidence = -0.5 * N * math.log(2 * math.pi * noise) - 0.5 * float(data.y @ data.y) / noise
    slack = -0.5 * (N * (s * latents.amplitudes) ** 2 - [np.vdot(part, part) for part in scaled]) / noise
    return shared.UnitStatistics(A.T @ A / noise, A.T @ data.y / noise, evidence, slack)


def respond(
    data: UnitData,
    latents: LatentFunctions,
    q: LatentPosterior,
    moves: Sequence[Move],
    phi: UnitParameters | None,
    *,
    smooth: bool = True,
) -> tuple[UnitState, list[shared.UnitStatistics]]:
    """Improve φ_m, and return the new state and the statistics at every trial move; ``phi`` is None for a new unit."""
    start = starting_parameters(data, latents, smooth=smooth) if phi is None else phi
    coarse = phi is None or bool(np.all(phi.smoothing <= data.lower))  # R was not searched before
    proposed = maximise(data, latents, q, start, smooth=smooth, coarse=coarse)
    state = UnitState(proposed if phi is None else start, proposed, latents.scales)
    trials = [moved(data, state, move) for move in moves]
    return state, [statistics(data, replace(latents, scales=scales), trial) for scales, trial in trials]


def predict(x: Array, latents: LatentFunctions, q: LatentPosterior, phi: UnitParameters) -> tuple[Array, Array]:
    """Mean and variance of f_m at rows ``x`` (Eq. 16); add ``phi.noise`` for an observation.  [N], [N]."""
    K = features(squared_gaps(x, latents.inducing), latents, latents.whitening(), phi.smoothing)
    A = np.hstack([s * k for s, k in zip(phi.amplitudes, K, strict=True)])
    prior = float(np.sum((phi.amplitudes * latents.amplitudes) ** 2))
    variance = prior - np.einsum("nj,nj->n", A, A) + np.einsum("nj,jk,nk->n", A, q.covariance, A)
    return A @ q.mean, variance


def fit_alone(data: UnitData, latents: LatentFunctions, q: LatentPosterior) -> UnitParameters:
    """Fit φ_m of a unit that joins late, in 20 sweeps with g and q(u) fixed."""
    phi = starting_parameters(data, latents)
    for sweep in range(20):
        phi = maximise(data, latents, q, phi, coarse=sweep == 0)
    return phi


# Rounds of Algorithm 2.


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Number of steps, Adam's rate, step size ρ of q(u), the unit's weight p_m, and a sampler of mini-batches."""

    count: int
    rate: float
    natural: float
    weight: float
    draw: Callable[[], Indices | None]


def natural_steps(
    theta: Mapping[str, Array], data: UnitData, latents: LatentFunctions, phi: UnitParameters, steps: LocalSteps
) -> tuple[NamedArrays, UnitParameters]:
    """Return θ = {log S, λ, h} and φ_m after local steps; raise NumericsError if one diverges."""
    precision, shift, rho = theta[PRECISION], theta[SHIFT], steps.natural
    inner = squared_gaps(latents.inducing, latents.inducing)
    free = {SCALES: theta[SCALES], AMPLITUDES: phi.amplitudes, NOISE: np.log([phi.noise])}
    free[SMOOTHING] = np.log(phi.smoothing)
    moments: AdamState[Array] = AdamState()
    least = least_noise(data.y)
    for _ in range(steps.count):
        rows = steps.draw()
        part = data if rows is None else replace(data, y=data.y[rows], gaps=data.gaps[:, rows])
        scale = len(data.y) / (len(part.y) * steps.weight)
        q = shared.from_natural(precision, shift)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # divergence is checked below
            here = replace(latents, scales=np.exp(free[SCALES]))
            slopes, target = risk_slopes(part, inner, here, phi, q, scale)
        precision = (1 - rho) * precision + rho * (np.eye(precision.shape[1]) + target[0])
        shift = (1 - rho) * shift + rho * target[1]
        moves, moments = moments.update(slopes, steps.rate)
        free = {name: value - moves[name] for name, value in free.items()}
        if not all(np.isfinite(value).all() for value in (*free.values(), precision, shift)):
            raise NumericsError(DIVERGED)
        smoothing, noise = np.exp(free[SMOOTHING]), max(float(np.exp(free[NOISE][0])), least)
        phi = replace(phi, smoothing=smoothing, amplitudes=free[AMPLITUDES], noise=noise)
    return {SCALES: free[SCALES], PRECISION: precision, SHIFT: shift}, phi


def risk_slopes(
    data: UnitData, inner: Array, latents: LatentFunctions, phi: UnitParameters, q: tuple[Array, Array], scale: float
) -> tuple[NamedArrays, tuple[Array, Array]]:
    """Return the gradient of R_m in log S, log R, s and log σ², and the target of a full natural step on q(u).

    With K_i = L_i⁻¹ c_{g_i f} [J, N] the mean of f is Σ_i s_i K_iᵀ m_i and its variance Σ_i s_i² (1 − ‖k_in‖² +
    ‖T_iᵀ k_in‖²). The reverse pass through the Cholesky factor is written by hand (Murray 2016); autograd takes ten
    times as long. The target is G_ii [I, J, J] and b_i − Σ_{j≠i} G_ij m_j [I, J], times ``scale``.

    ``data`` is a mini-batch, ``inner`` holds squared distances of pseudo-inputs [D, J, J], ``q`` means m [I, J] and
    factors T [I, J, J], and ``scale`` = N_m / (|B| p_m). Latent functions have amplitude 1.
    """
    (m, T), s, noise, L = q, phi.amplitudes, phi.noise, latents.whitening()
    K = np.stack([part.T for part in features(data.gaps, latents, L, phi.smoothing)])  # [I, J, N]
    TK, parts = T.transpose(0, 2, 1) @ K, s[:, None] * np.einsum("ij,ijn->in", m, K)
    residual = data.y - parts.sum(axis=0)
    spread = 1 - np.einsum("ijn,ijn->in", K, K) + np.einsum("ijn,ijn->in", TK, TK)  # [I, N]
    misfit = (residual**2 + (s**2) @ spread) / noise
    pull, push = scale * residual / noise, scale / noise  # −∂R/∂mean and 2 ∂R/∂variance
    target = push * s[:, None] * np.einsum("ijn,in->ij", K, residual + parts)
    precision = push * s[:, None, None] ** 2 * (K @ K.transpose(0, 2, 1))
    K_bar = push * s[:, None, None] ** 2 * (T @ TK - K) - s[:, None, None] * m[:, :, None] * pull
    log_scales, log_smoothing = np.empty_like(latents.scales), np.empty_like(latents.scales)
    for i, (S, R) in enumerate(zip(latents.scales, phi.smoothing, strict=True)):
        cross_bar = _solve(L[i], K_bar[i])
        weighted = cross_bar * (L[i] @ K[i])
        total, width, doubled = weighted.sum(), R + S, 2 * R + S
        stretch = 0.5 * np.tensordot(data.gaps, weighted.T, 2) / width**2  # of the exponent, [D]
        log_smoothing[i] = R * (total * (0.5 / doubled - 0.5 / width) + stretch)
        log_scales[i] = S * (total * (0.25 / doubled + 0.25 / S - 0.5 / width) + stretch)
        latent = np.exp(-0.5 * np.tensordot(1 / S, inner, 1))
        inner_bar = _through_cholesky(L[i], -cross_bar @ K[i].T)
        log_scales[i] += 0.5 * np.tensordot(inner, inner_bar * latent, 2) / S
    amplitudes = push * s * spread.sum(axis=1) - np.einsum("ij,ijn,n->i", m, K, pull)
    log_noise = np.array([0.5 * scale * (len(data.y) - misfit.sum())])
    slopes = {SCALES: log_scales, SMOOTHING: log_smoothing, AMPLITUDES: amplitudes, NOISE: log_noise}
    return slopes, (precision, target)


def _solve(factor: Array, right: Array) -> Array:
    """Return L⁻ᵀB; a row-major L is passed as the upper factor Lᵀ without a copy."""
    return np.asarray(dtrtrs(factor.T, right, lower=0, trans=0)[0])


def _through_cholesky(L: Array, L_bar: Array) -> Array:
    """Gradient in a matrix from that in its factor: sym(L⁻ᵀ Φ(Lᵀ L̄) L⁻¹), Φ = lower triangle, half the diagonal."""
    inner = np.tril(L.T @ L_bar)
    inner[np.diag_indices_from(inner)] *= 0.5
    full = _solve(L, _solve(L, inner).T)  # (L⁻ᵀ Φ L⁻¹)ᵀ
    return np.asarray(0.5 * (full + full.T))
