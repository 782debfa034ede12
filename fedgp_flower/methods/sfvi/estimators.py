"""The terms of the structured bound, and the gradient messages a site makes of its own.

    ELBO = E[log p_θ(Z_G) − log q(Z_G)] + Σₖ E[log p_θ(y_k, Z_Lk | Z_G) − log q(Z_Lk | Z_G)]

The first bracket is the server's, the k-th term is site k's. Hassan et al. 2023, Equations S5–S8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from fedgp_flower.methods.family import (
    GlobalPosterior,
    LocalFamily,
    held,
    named,
    with_named,
)
from fedgp_flower.methods.sfvi.structured import ClosedFormModel, SampledModel, SiteData, StructuredModel
from fedgp_flower.typing import Scalar


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a site alone stands in for all: the bound's local term is outer · E[inner · log p − log q]."""

    inner: float = 1.0
    outer: float = 1.0


UNSCALED = Scaling()


def whole_term(ratio: float) -> Scaling:
    """N/N_k on the whole local term, log p and −log q alike: every site's term estimates the sum over sites."""
    return Scaling(outer=ratio)


def likelihood_only(ratio: float) -> Scaling:
    """N/N_k on log p alone, as the paper prints it: q(Z_Lk | Z_G) then fits p to the power N/N_k, far too sharp."""
    return Scaling(inner=ratio)


def sampled_site_term(
    model: SampledModel,
    site: SiteData,
    q_global: GlobalPosterior,
    q_local: LocalFamily,
    *,
    noise: tuple[Float[Tensor, "S M"], Float[Tensor, "R S U W"]],
    sticking: bool = True,
    scaling: Scaling = UNSCALED,
) -> Scalar:
    """The site's term, averaged over S draws of Z_G, with R draws of every unit's latents for each.

    R = 1: log p(y_u, Z_Lu | Z_G) − log q(Z_Lu | Z_G) with the parameters inside log q held constant (sticking the
    landing, Roeder et al. 2017) unless ``sticking`` is off. R > 1: Σ_u log 1/R Σ_r p/q, which needs the units to be
    independent given Z_G and is nearer to Σ_u log p(y_u | Z_G); its gradient is the plain reparametrised one. ``noise``
    holds the standard normal draws of Z_G and of the units.
    """
    noise_global, noise_local = noise
    draws = len(noise_local)
    z_global = q_global.transform(noise_global)
    own = q_local.unfold()
    z_local = own.transform(z_global, q_global.mean, noise_local)
    inside = held(own) if sticking and draws == 1 else own
    centre = q_global.mean.detach() if sticking and draws == 1 else q_global.mean
    log_p = model.log_local(site, z_global.expand(draws, *z_global.shape), z_local)
    log_weight = scaling.inner * log_p - inside.log_density(z_local, z_global, centre)  # [R, S, U]
    per_unit = log_weight.logsumexp(0) - math.log(draws)
    return scaling.outer * per_unit.sum(-1).mean()


def expected_site_term(
    model: ClosedFormModel,
    site: SiteData,
    q_global: GlobalPosterior,
    q_local: LocalFamily,
    *,
    scaling: Scaling = UNSCALED,
) -> Scalar:
    """The site's term without draws."""
    own = q_local.unfold()
    expected = model.expected_log_local(site, q_global, own)
    return scaling.outer * (scaling.inner * expected + own.entropy())


LocalT = TypeVar("LocalT", bound=LocalFamily)


@dataclass(frozen=True, slots=True)
class SiteGradient:
    """Value and gradient of a term. ``theta`` and ``eta`` may be sent; ``local`` and what it belongs to stay."""

    value: float
    theta: dict[str, Tensor]
    eta: dict[str, Tensor]
    local: dict[str, Tensor]


def gradients(
    model: StructuredModel,
    q_global: GlobalPosterior,
    q_local: LocalT,
    term: Callable[[GlobalPosterior, LocalT], Scalar],
) -> SiteGradient:
    """∇ of ``term`` with respect to θ, η_G (through Z_G and through Z_Lk) and η_Lk."""
    theta: Mapping[str, Tensor] = model.theta()
    eta: dict[str, Tensor] = _leaves(named(q_global))
    local: dict[str, Tensor] = _leaves(named(q_local))
    value = term(with_named(q_global, eta), with_named(q_local, local))
    leaves: list[Tensor] = [*theta.values(), *eta.values(), *local.values()]
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    first, second = len(theta), len(theta) + len(eta)
    return SiteGradient(
        float(value.detach()),
        dict(zip(theta, found[:first], strict=True)),
        dict(zip(eta, found[first:second], strict=True)),
        dict(zip(local, found[second:], strict=True)),
    )


def _leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in values.items()}


def unit_noise(
    seed: int, step: int, keys: Int64[Tensor, " U"], shape: tuple[int, ...], width: int
) -> Float[Tensor, "*S U W"]:
    """Standard normal draws that depend on (seed, step, key of the unit) and on nothing else.

    A unit gets the same draws whichever site it is in, so the sum of the gradient messages does not depend on the
    partition. Every number is a counter put through the splitmix64 finaliser, then Φ⁻¹.
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
    """Mix a word into the state; arithmetic is modulo 2⁶⁴."""
    mixed = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
