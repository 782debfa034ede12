"""What a unit and the server of FedMGP share: latent functions at pseudo-inputs, their posterior, a unit's sums.

Latent functions are whitened, g_i = L_i u_i with u_i ~ N(0, I), so the sums of all units add up to a precision
I + Σ_m G_m that is never smaller than the identity. Arrays are numpy; nothing here sees data.

Reference: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.linalg import solve_triangular

from fedgp_flower.linalg import kernel_cholesky
from fedgp_flower.shapes import Array, NamedArrays

Hold = Literal["gain", "width"]
HOLDS: tuple[Hold, ...] = ("gain", "width")
SCALES, MEAN, FACTOR, INDUCING = (
    "kernel.raw_scales",
    "variational.variational_mean",
    "variational.chol_variational_covar",
    "inducing",
)
"""Names of the shared parameters θ of Algorithm 2: log S, mean and lower factor of each q(u_i), and W if learned."""


@dataclass(frozen=True, slots=True)
class Latents:
    """I independent functions g_i ~ GP(0, a_i² exp(−½ (w − w')ᵀ S_i⁻¹ (w − w'))) seen at J pseudo-inputs W (Eq. 17).

    The amplitudes a_i are redundant with the units' own; they let the server rescale every unit at once.
    """

    inducing: Array  # [J, D]
    scales: Array  # [I, D]  diagonal of S_i: squared lengthscales
    amplitudes: Array  # [I]  a_i
    jitter: float = 1e-8
    """Added to the diagonal of the correlation of g_i at W."""

    @property
    def size(self) -> int:
        """Length I·J of the stacked u."""
        return int(self.scales.shape[0] * self.inducing.shape[0])

    def whitening(self) -> Array:
        """Lower factors L_i of the correlation of g_i at W; C_gg = a_i² L_i L_iᵀ.  [I, J, J]."""
        gaps = np.square(self.inducing[:, None, :] - self.inducing[None, :, :])  # [J, J, D]
        correlation = np.exp(np.moveaxis(gaps @ (-0.5 / self.scales.T), 2, 0))
        variance = torch.ones(len(correlation), dtype=torch.float64)
        factors = kernel_cholesky(torch.from_numpy(correlation), variance=variance, jitter=self.jitter, of="C_gg")
        return np.asarray(factors)


def spacing(inducing: Array) -> Array:
    """Typical distance of neighbouring pseudo-inputs along each dimension, extent / (J^(1/D) − 1).  [D]."""
    count, dims = inducing.shape
    distance: Array = np.ptp(inducing, axis=0) / (count ** (1.0 / dims) - 1.0)
    return distance


@dataclass(frozen=True, slots=True)
class Posterior:
    """q(u) = N(m, V) of the stacked whitened latents."""

    mean: Array  # [I·J]
    covariance: Array  # [I·J, I·J]

    def second_moment(self) -> Array:
        """E uuᵀ = V + m mᵀ."""
        moment: Array = self.covariance + np.outer(self.mean, self.mean)
        return moment

    def of_latents(self, latents: Latents) -> tuple[Array, Array]:
        """Mean [I·J] and covariance [I·J, I·J] of the values g(W), unwhitened."""
        J = latents.inducing.shape[0]
        scale = np.zeros((latents.size, latents.size))
        for i, (factor, amplitude) in enumerate(zip(latents.whitening(), latents.amplitudes, strict=True)):
            scale[i * J : (i + 1) * J, i * J : (i + 1) * J] = amplitude * factor
        return scale @ self.mean, scale @ self.covariance @ scale.T


@dataclass(frozen=True, slots=True)
class Move:
    """A trial change of the shared lengthscales together with the units' own parameters.

    ``stretch`` 1 takes the unit's improved parameters, more extrapolates beyond them. When S_i changes a unit keeps
    either the ``gain`` of its convolution, v = s (|2R + S| / |S|)^¼, or the ``width`` of its output, 2R + S.
    """

    offset: Array  # [I, D]  change of log S
    stretch: float
    hold: Hold


@dataclass(frozen=True, slots=True)
class Statistics:
    """All a unit tells about its data: log of ∏ p(y_m | u), averaged over f_m given u, is quadratic in u.

    evidence + Σ_i slack_i + bᵀu − ½ uᵀGu. The slack is −½ tr(Ω_m)/σ²: what the pseudo-inputs cannot explain.
    """

    precision: Array  # [I·J, I·J]  G = Σ_n k_n k_nᵀ / σ²
    shift: Array  # [I·J]  b = Σ_n k_n y_n / σ²
    evidence: float
    slack: Array  # [I]

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.precision + other.precision,
            self.shift + other.shift,
            self.evidence + other.evidence,
            self.slack + other.slack,
        )

    def rescaled(self, factors: Array) -> Statistics:
        """The same unit when every latent function i is multiplied by ``factors[i]``."""
        wide = np.repeat(factors, self.shift.size // factors.size)
        return Statistics(
            wide[:, None] * self.precision * wide, wide * self.shift, self.evidence, factors**2 * self.slack
        )

    def rotated(self, old: Array, new: Array) -> Statistics:
        """The same knowledge of g in other whitened coordinates: u_old = T u_new with T = L_old⁻¹ L_new for each i."""
        count, J = old.shape[0], old.shape[1]
        turn = np.zeros_like(self.precision)
        for i in range(count):
            block = slice(i * J, (i + 1) * J)
            turn[block, block] = solve_triangular(old[i], new[i], lower=True)
        return Statistics(turn.T @ self.precision @ turn, turn.T @ self.shift, self.evidence, self.slack)


def product_factors(posterior: Posterior, count: int) -> Array:
    """Cholesky factors [I, J, J] of the product over latent functions that is closest to a joint q in KL(product ‖ q).

    That product keeps each function's covariance given the others. With function i ordered last, the last block of the
    Cholesky factor of the joint covariance is the factor of exactly that, so nothing is inverted.
    """
    blocks = np.arange(len(posterior.mean)).reshape(count, -1)
    orders = [np.concatenate([*np.delete(blocks, i, axis=0), blocks[i]]) for i in range(count)]
    size = blocks.shape[1]
    return np.stack([np.linalg.cholesky(posterior.covariance[np.ix_(o, o)])[-size:, -size:] for o in orders])


def pack(statistics: Sequence[Statistics]) -> NamedArrays:
    """Statistics at C trial moves as named arrays; of the symmetric G only one triangle travels."""
    rows, columns = np.tril_indices(statistics[0].shift.size)
    return {
        "statistics.precision": np.stack([s.precision[rows, columns] for s in statistics]),  # [C, T]
        "statistics.shift": np.stack([s.shift for s in statistics]),  # [C, I·J]
        "statistics.evidence": np.array([s.evidence for s in statistics]),  # [C]
        "statistics.slack": np.stack([s.slack for s in statistics]),  # [C, I]
    }


def unpack(arrays: NamedArrays) -> tuple[Statistics, ...]:
    """The inverse of :func:`pack`."""
    shift = np.asarray(arrays["statistics.shift"], dtype=np.float64)
    size = shift.shape[1]
    rows, columns = np.tril_indices(size)
    precision = np.zeros((shift.shape[0], size, size))
    precision[:, rows, columns] = arrays["statistics.precision"]
    precision[:, columns, rows] = arrays["statistics.precision"]
    evidence = np.asarray(arrays["statistics.evidence"], dtype=np.float64)
    slack = np.asarray(arrays["statistics.slack"], dtype=np.float64)
    return tuple(Statistics(*parts) for parts in zip(precision, shift, map(float, evidence), slack, strict=True))


def to_wire(latents: Latents, posterior: Posterior) -> NamedArrays:
    """Latent functions and q(u) as named arrays; the jitter is part of the configuration."""
    return {
        "latents.inducing": latents.inducing,
        "latents.scales": latents.scales,
        "latents.amplitudes": latents.amplitudes,
        "posterior.mean": posterior.mean,
        "posterior.covariance": posterior.covariance,
    }


def from_wire(arrays: NamedArrays, jitter: float) -> tuple[Latents, Posterior]:
    """The inverse of :func:`to_wire`."""
    inducing, scales, amplitudes = (_own(arrays[f"latents.{name}"]) for name in ("inducing", "scales", "amplitudes"))
    mean, covariance = (_own(arrays[f"posterior.{name}"]) for name in ("mean", "covariance"))
    return Latents(inducing, scales, amplitudes, jitter), Posterior(mean, covariance)


def _own(array: Array) -> Array:
    """A copy that may be written to: what a message carries is read-only memory."""
    return np.array(array, dtype=np.float64)


def moves_to_wire(moves: Sequence[Move], prefix: str) -> NamedArrays:
    """C moves as named arrays."""
    return {
        f"{prefix}.offset": np.stack([move.offset for move in moves]),  # [C, I, D]
        f"{prefix}.stretch": np.array([move.stretch for move in moves]),  # [C]
        f"{prefix}.hold": np.array([HOLDS.index(move.hold) for move in moves]),  # [C]
    }


def moves_from_wire(arrays: NamedArrays, prefix: str) -> tuple[Move, ...]:
    """The inverse of :func:`moves_to_wire`."""
    parts = (arrays[f"{prefix}.{name}"] for name in ("offset", "stretch", "hold"))
    return tuple(Move(_own(o), float(stretch), HOLDS[int(hold)]) for o, stretch, hold in zip(*parts, strict=True))


def from_parameters(parameters: Mapping[str, Array], inducing: Array, jitter: float) -> tuple[Latents, Posterior]:
    """Latent functions and q(u) at θ; ``inducing`` [J, D] is used where W is not learned."""
    scales = np.exp(parameters[SCALES])
    latents = Latents(_own(parameters.get(INDUCING, inducing)), scales, np.ones(len(scales)), jitter)
    count, J = parameters[MEAN].shape
    covariance = np.zeros((count * J, count * J))
    for i, factor in enumerate(np.tril(parameters[FACTOR])):
        covariance[i * J : (i + 1) * J, i * J : (i + 1) * J] = factor @ factor.T
    return latents, Posterior(parameters[MEAN].ravel(), covariance)
