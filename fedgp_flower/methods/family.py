"""The structured Gaussian family of SFVI (Hassan et al. 2023): q(Z_G) ∏ₖ q(Z_Lk | Z_G).

    Z_G  = μ_G + σ_G ⊙ (L_G ε_G),
    Z_Lk = μ̄_k + C_k (Z_G − μ_G) + σ_k ⊙ (L_k ε_k),

with ε standard normal, σ = exp(log σ) and L lower triangular with a unit diagonal; strictly lower entries are stored
row by row. Local latents come in units that are independent given Z_G: Z_Lk is [U, W] and L_k has one block per unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.typing import NamedArrays, Scalar

LOCAL = "local."
"""Prefix of the names of η_Lk."""


@dataclass(frozen=True, slots=True)
class GlobalPosterior:
    """q(Z_G) = N(μ, Σ) with the factor diag(σ) L of Σ; without ``lower``, L is the identity."""

    mean: Float[Tensor, " M"]
    log_scale: Float[Tensor, " M"]
    lower: Float[Tensor, " T"] | None
    coupling: ClassVar[None] = None
    fixed: ClassVar[bool] = False
    prefix: ClassVar[str] = "q."

    @staticmethod
    def of(values: Mapping[str, np.ndarray | Tensor]) -> GlobalPosterior:
        """From ``q.mean``, ``q.log_scale`` and, unless L is the identity, ``q.lower``."""
        lower = values.get("q.lower")
        mean, log_scale = torch.as_tensor(values["q.mean"]), torch.as_tensor(values["q.log_scale"])
        return GlobalPosterior(mean, log_scale, None if lower is None else torch.as_tensor(lower))

    @staticmethod
    def normal(mean: Float[Tensor, " M"], covariance: Float[Tensor, "M M"]) -> GlobalPosterior:
        """N(mean, covariance), with a full L."""
        factor = cholesky(covariance, of="covariance of q(Z_G)")
        rows, columns = torch.tril_indices(len(mean), len(mean), offset=-1)
        scale = factor.diagonal()
        return GlobalPosterior(mean, scale.log(), (factor / scale[:, None])[rows, columns])

    def transform(self, noise: Float[Tensor, "*S M"]) -> Float[Tensor, "*S M"]:
        """Z_G for standard normal ``noise``."""
        mixed = noise if self.lower is None else noise @ unit_lower(self.lower, len(self.mean)).mT
        return self.mean + self.log_scale.exp() * mixed

    def factor(self) -> Float[Tensor, "M M"]:
        """diag(σ) L, lower triangular, with Σ = factor factorᵀ."""
        return _factor(self.log_scale, self.lower)

    def mixed(self, weights: Float[Tensor, "*S M"]) -> Float[Tensor, "*S M"]:
        """Weights on ε for given weights on Z_G, rows times :meth:`factor`."""
        return weights * self.log_scale.exp() if self.lower is None else weights @ self.factor()

    def log_density(self, z: Float[Tensor, "*S M"]) -> Float[Tensor, "*S"]:
        """The log density log q(z)."""
        return normal_log_density(z - self.mean, self.log_scale, self.lower)

    def entropy(self) -> Scalar:
        """−E log q = Σ log σ + ½ M log 2πe."""
        return self.log_scale.sum() + 0.5 * len(self.mean) * math.log(2 * math.pi * math.e)


@dataclass(frozen=True, slots=True)
class LocalPosterior:
    """q(Z_Lk | Z_G) of one site; without ``coupling`` it does not depend on Z_G, without ``lower`` L_k = I."""

    mean: Float[Tensor, "U W"]
    log_scale: Float[Tensor, "U W"]
    coupling: Float[Tensor, "U W M"] | None
    lower: Float[Tensor, "U T"] | None
    fixed: bool = False
    """Whether it has no learned parameters."""
    prefix: ClassVar[str] = LOCAL

    def transform(
        self, z_global: Float[Tensor, "*S M"], global_mean: Float[Tensor, " M"], noise: Float[Tensor, "*R U W"]
    ) -> Float[Tensor, "*R U W"]:
        """Z_Lk for standard normal ``noise``, whose leading dimensions end in those of ``z_global``."""
        mixed = noise
        if self.lower is not None:
            mixed = torch.einsum("uij,...uj->...ui", unit_lower(self.lower, self.mean.shape[-1]), noise)
        return self.location(z_global, global_mean) + self.log_scale.exp() * mixed

    def location(
        self, z_global: Float[Tensor, "*S M"], global_mean: Float[Tensor, " M"]
    ) -> Float[Tensor, "*S U W"] | Float[Tensor, "U W"]:
        """μ̄ + C (Z_G − μ_G)."""
        if self.coupling is None:
            return self.mean
        return self.mean + torch.einsum("uwm,...m->...uw", self.coupling, z_global - global_mean)

    def factor(self) -> Float[Tensor, "U W W"]:
        """diag(σ) L of every unit."""
        return _factor(self.log_scale, self.lower)

    def log_density(
        self, z_local: Float[Tensor, "*R U W"], z_global: Float[Tensor, "*S M"], global_mean: Float[Tensor, " M"]
    ) -> Float[Tensor, "*R U"]:
        """The log density log q(Z_Lu | Z_G) of every unit."""
        return normal_log_density(z_local - self.location(z_global, global_mean), self.log_scale, self.lower)

    def entropy(self) -> Scalar:
        """−E log q(Z_Lk | Z_G) = Σ log σ + ½ U W log 2πe for any Z_G."""
        return self.log_scale.sum() + 0.5 * self.mean.numel() * math.log(2 * math.pi * math.e)

    def shifted(self, old_mean: Float[Tensor, " M"], new_mean: Float[Tensor, " M"]) -> LocalPosterior:
        """The same q(Z_Lk | Z_G) in terms of a new μ_G: μ̄ ← μ̄ + C (μ_G,new − μ_G,old).

        Sites need this after every averaging of q(Z_G).
        """
        if self.coupling is None:
            return self
        return replace(self, mean=self.mean + self.coupling @ (new_mean - old_mean))


def global_term(
    log_scale: Float[Tensor, " M"], q_global: GlobalPosterior, noise: Float[Tensor, "S M"] | None
) -> Scalar:
    """The server's bracket E[log p_θ(Z_G) − log q(Z_G)], p_θ = N(0, diag s²), in closed form or averaged over draws.

    It is H(q) − ½ Σ [(Σ_ii + μ_i²) / s_i² + 2 log s_i + log 2π]. With draws the parameters inside log q are held
    constant (sticking the landing, Roeder et al. 2017).
    """
    if noise is not None:
        z_global = q_global.transform(noise)
        return (normal_log_density(z_global, log_scale, None) - held(q_global).log_density(z_global)).mean()
    second = q_global.factor().square().sum(-1) + q_global.mean.square()
    cross = 0.5 * (second * (-2 * log_scale).exp() + 2 * log_scale + math.log(2 * math.pi)).sum()
    return q_global.entropy() - cross


Family = TypeVar("Family", bound=GlobalPosterior | LocalPosterior)


def initial_global(size: int, *, scale: float, triangular: bool) -> GlobalPosterior:
    """N(0, scale² I) in M = ``size`` dimensions."""
    zero = torch.zeros(size, dtype=torch.float64)
    lower = torch.zeros(size * (size - 1) // 2, dtype=torch.float64) if triangular else None
    return GlobalPosterior(zero, zero + math.log(scale), lower)


def named(posterior: GlobalPosterior | LocalPosterior) -> dict[str, Tensor]:
    """The learned parameters by name, such as ``q.mean`` or ``local.mean``."""
    parts = {"mean": posterior.mean, "log_scale": posterior.log_scale}
    optional = {"coupling": posterior.coupling, "lower": posterior.lower}
    parts |= {name: part for name, part in optional.items() if part is not None}
    return {} if posterior.fixed else {posterior.prefix + name: part for name, part in parts.items()}


def on_the_wire(tensors: Mapping[str, Tensor]) -> NamedArrays:
    """Parameters or gradients as arrays."""
    return {name: value.detach().numpy().copy() for name, value in tensors.items()}


def with_named(posterior: Family, values: Mapping[str, Tensor]) -> Family:
    """The posterior with its parameters replaced by those in ``values``."""
    prefix = posterior.prefix
    new = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return cast(Family, replace(cast(Any, posterior), **new))


def held(posterior: Family) -> Family:
    """The posterior with its parameters held constant, for the density inside the sticking-the-landing estimator."""
    return with_named(posterior, {name: value.detach() for name, value in named(posterior).items()})


def unit_noise(
    seed: int, step: int, keys: Int64[Tensor, " U"], shape: tuple[int, ...], width: int
) -> Float[Tensor, "*S U W"]:
    """Standard normal draws that depend only on (seed, step, key of the unit).

    A unit gets the same draws at any site, so the sum of gradients does not depend on the partition. Each draw is Φ⁻¹
    of a counter hashed by the splitmix64 finaliser.
    """
    if width == 0:
        return torch.zeros(*shape, len(keys), 0, dtype=torch.float64)
    count = math.prod(shape) * width
    state = _absorb(np.zeros(1, dtype=np.uint64), np.array([seed % 2**64], dtype=np.uint64))
    state = _absorb(state, np.array([step % 2**64], dtype=np.uint64))
    state = _absorb(state, keys.numpy().astype(np.uint64))  # [U]
    bits = _absorb(state[None, :], np.arange(count, dtype=np.uint64)[:, None])  # [count, U]
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    normal = torch.from_numpy(ndtri(uniform)).reshape(*shape, width, len(keys))
    return normal.mT


def _absorb(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash a word into the state, modulo 2⁶⁴."""
    mixed = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def unit_lower(packed: Float[Tensor, "*B T"], size: int) -> Float[Tensor, "*B M M"]:
    """Unit lower triangular L from its strictly lower entries, row by row."""
    rows, columns = torch.tril_indices(size, size, offset=-1, device=packed.device)
    eye = torch.eye(size, dtype=packed.dtype, device=packed.device).flatten().expand(*packed.shape[:-1], size * size)
    return eye.index_add(-1, rows * size + columns, packed).unflatten(-1, (size, size))


def _factor(log_scale: Tensor, lower: Tensor | None) -> Tensor:
    scale = log_scale.exp()
    return torch.diag_embed(scale) if lower is None else scale[..., None] * unit_lower(lower, scale.shape[-1])


def normal_log_density(residual: Tensor, log_scale: Tensor, lower: Tensor | None) -> Tensor:
    """Over the last dimension, log N(r | 0, diag(σ) L Lᵀ diag(σ)) = −½ ‖L⁻¹ (r / σ)‖² − Σ log σ − ½ M log 2π."""
    size = log_scale.shape[-1]
    white = residual / log_scale.exp()
    if lower is not None:
        white = torch.linalg.solve_triangular(unit_lower(lower, size), white[..., None], upper=False)[..., 0]
    return -0.5 * white.square().sum(-1) - log_scale.sum(-1) - 0.5 * size * math.log(2 * math.pi)
