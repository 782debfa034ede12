"""SFVI and SFVI-Avg on the server: pure updates of (θ, η_G), without Flower and without a model.

Parameters are arrays under names: ``theta.*`` for θ, and ``q.mean``, ``q.log_scale`` and, unless q(Z_G) is diagonal,
``q.lower`` for η_G, with Z_G = μ + σ ⊙ (L ε) and L's strictly lower entries row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedgp_flower.barycentre import barycentre, wasserstein_distance
from fedgp_flower.shapes import Array

Parameters = Mapping[str, Array]
LEARNED_PRIOR = "theta.prior_log_scales"
DECAYS = (0.9, 0.999)
"""Of Adam's moments."""


@dataclass(frozen=True, slots=True)
class Prior:
    """p_θ(Z_G) = N(0, diag s²), log s = ``fixed`` + θ.prior_log_scales[``block``]; an empty ``block`` is none."""

    fixed: Array  # [M]
    block: np.ndarray[tuple[int], np.dtype[np.int64]]  # [M] or [0]

    def log_scale(self, parameters: Parameters) -> Array:
        """The vector log s [M]."""
        return self.fixed + parameters[LEARNED_PRIOR][self.block] if len(self.block) else self.fixed


@dataclass(frozen=True, slots=True)
class Adam:
    """Moments of Adam (Kingma & Ba 2015) for every parameter."""

    step: int
    first: Parameters
    second: Parameters


@dataclass(frozen=True, slots=True)
class SFVIState:
    """What the server keeps between rounds."""

    parameters: Parameters
    adam: Adam


def start(parameters: Parameters) -> SFVIState:
    """A state before the first round."""
    zero = {name: np.zeros_like(value) for name, value in parameters.items()}
    return SFVIState(parameters, Adam(0, zero, zero))


def global_noise(seed: int, step: int, draws: int, size: int) -> Array:
    """ε_G [S, M] of a round, standard normal."""
    return np.random.default_rng((seed, step)).standard_normal((draws, size))


def factor(parameters: Parameters) -> Array:
    """diag(σ) L [M, M], a factor of the covariance of q(Z_G); σ [M] itself when q is diagonal."""
    scale, lower = np.exp(parameters["q.log_scale"]), _unit_lower(parameters)
    return scale if lower is None else scale[:, None] * lower


def sampled_server_gradient(parameters: Parameters, prior: Prior, noise: Array) -> tuple[float, dict[str, Array]]:
    """Value and gradient of log p_θ(Z_G) − log q(Z_G), averaged over draws, by sticking the landing.

    With log q's own parameters held constant, ∇_Z = −Z / s² + diag(σ)⁻¹ L⁻ᵀ ε, and Z = μ + σ ⊙ Lε carries it to
    μ, log σ and L.
    """
    scale, lower = np.exp(parameters["q.log_scale"]), _unit_lower(parameters)
    mixed = noise if lower is None else noise @ lower.T  # [S, M]
    z = parameters["q.mean"] + scale * mixed
    log_scale = prior.log_scale(parameters)
    white = z * np.exp(-log_scale)
    pull = noise if lower is None else np.linalg.solve(lower.T, noise.T).T
    slope = -white * np.exp(-log_scale) + pull / scale
    gradient = {"q.mean": slope.mean(0), "q.log_scale": (slope * scale * mixed).mean(0)}
    if "q.lower" in parameters:
        gradient["q.lower"] = _packed((slope * scale).T @ noise / len(noise))
    constants = (parameters["q.log_scale"] - log_scale).sum()
    value = 0.5 * (np.sum(noise**2) - np.sum(white**2)) / len(noise) + constants
    return float(value), gradient | _prior_gradient(parameters, prior, (white**2).mean(0) - 1)


def expected_server_gradient(parameters: Parameters, prior: Prior) -> tuple[float, dict[str, Array]]:
    """Value and gradient of −KL(q(Z_G) ‖ p_θ(Z_G)) = Σ log σ/s + ½ M − ½ Σ (Σ_ii + μ_i²) / s_i²."""
    mean, scale, lower = parameters["q.mean"], np.exp(parameters["q.log_scale"]), _unit_lower(parameters)
    log_scale = prior.log_scale(parameters)
    precision = np.exp(-2 * log_scale)
    variance = scale**2 if lower is None else scale**2 * np.sum(lower**2, -1)
    second = (variance + mean**2) * precision
    gradient = {"q.mean": -mean * precision, "q.log_scale": 1 - variance * precision}
    if lower is not None:
        gradient["q.lower"] = _packed(-(scale**2 * precision)[:, None] * lower)
    value = np.sum(parameters["q.log_scale"] - log_scale) + 0.5 * np.sum(1 - second)
    return float(value), gradient | _prior_gradient(parameters, prior, second - 1)


def total(server: Parameters, sites: Sequence[Parameters], *, scale: float = 1.0) -> dict[str, Array]:
    """The server's gradient plus ``scale`` times the sum of the sites' messages; a name may be missing in either.

    ``scale`` is N over the rows of the sites that replied: 1 when all did.
    """
    result = {name: np.array(value) for name, value in server.items()}
    for message in sites:
        for name, value in message.items():
            result[name] = np.asarray(result.get(name, np.zeros_like(value)) + scale * value)
    return result


def learning_rate(step: int, *, steps: int, initial: float, constant: float = 0.5, final: float = 0.01) -> float:
    """Constant for the first part of ``steps``, then falling geometrically to ``final`` · ``initial``."""
    progress = (step / steps - constant) / (1 - constant)
    return float(initial * final ** np.clip(progress, 0.0, 1.0))


def ascend(state: SFVIState, gradient: Parameters, *, rate: float, decays: tuple[float, float] = DECAYS) -> SFVIState:
    """One step of Adam uphill."""
    one, two = decays
    step = state.adam.step + 1
    first, second, parameters = {}, {}, {}
    for name, value in state.parameters.items():  # asarray: a sum of arrays without dimensions is not an array
        first[name] = np.asarray(one * state.adam.first[name] + (1 - one) * gradient[name])
        second[name] = np.asarray(two * state.adam.second[name] + (1 - two) * gradient[name] ** 2)
        move = (first[name] / (1 - one**step)) / (np.sqrt(second[name] / (1 - two**step)) + 1e-8)
        parameters[name] = np.asarray(value + rate * move)
    return SFVIState(parameters, Adam(step, first, second))


@dataclass(frozen=True, slots=True)
class Average:
    """The parameters after a round of SFVI-Avg, and how the barycentre was found."""

    parameters: Parameters
    iterations: int
    residual: float
    spread: Array
    """W₂ from each site's q(Z_G) to the barycentre, [K]."""


def average(sites: Sequence[Parameters], weights: Array, *, tolerance: float = 1e-12) -> Average:
    """θ ← Σ wₖ θₖ and q(Z_G) ← Wasserstein barycentre of the sites' q(Z_G).

    Args:
        sites: Parameters as each site left them.
        weights: N_k / N, or equal; divided by their sum.
        tolerance: Relative change at which the barycentre stops.
    """
    shares = weights / weights.sum()
    means = np.stack([site["q.mean"] for site in sites])
    factors = np.stack([factor(site) for site in sites])
    found = barycentre(means, factors, weights, tolerance=tolerance)
    merged: dict[str, Array] = {
        name: np.tensordot(shares, np.stack([site[name] for site in sites]), 1)
        for name in sites[0]
        if name.startswith("theta.")
    }
    scale = found.factor if found.factor.ndim == 1 else np.diagonal(found.factor)
    merged |= {"q.mean": found.mean, "q.log_scale": np.log(scale)}
    if found.factor.ndim == 2:
        merged["q.lower"] = _packed(found.factor / scale[:, None])
    spread = [wasserstein_distance(found.mean, found.factor, m, f) for m, f in zip(means, factors, strict=True)]
    return Average(merged, found.iterations, found.residual, np.array(spread))


def _unit_lower(parameters: Parameters) -> Array | None:
    """L [M, M]; None when q(Z_G) is diagonal."""
    if "q.lower" not in parameters:
        return None
    size = len(parameters["q.mean"])
    lower: Array = np.eye(size)
    lower[np.tril_indices(size, -1)] = parameters["q.lower"]
    return lower


def _packed(matrix: Array) -> Array:
    return matrix[np.tril_indices(len(matrix), -1)]


def _prior_gradient(parameters: Parameters, prior: Prior, slope: Array) -> dict[str, Array]:
    """∂ / ∂ log s summed over the entries that share a learned scale."""
    if len(prior.block) == 0:
        return {}
    summed: Array = np.zeros_like(parameters[LEARNED_PRIOR])
    np.add.at(summed, prior.block, slope)
    return {LEARNED_PRIOR: summed}
