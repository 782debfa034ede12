"""The server's part of FedMGP's Algorithm 2: θ ← θ − η v, v an average of the sites' pseudo-gradients with momentum.

θ = {S, q(u), W if learned} travels in the coordinates that sites optimise: log S, and mean and Cholesky factor of each
q(u_i). Pure functions between states; nothing here knows of messages.

Reference: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Algorithm 2, Eq. 15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedgp_flower.latent import FACTOR, INDUCING, MEAN, SCALES, Latents, Posterior, product_factors
from fedgp_flower.shapes import Array, NamedArrays
from strategies.aggregators import Signals, aggregate


@dataclass(frozen=True, slots=True)
class Late:
    """The latest pseudo-gradient of a site and the round that it belongs to."""

    update: NamedArrays
    round: int


@dataclass(frozen=True, slots=True)
class PseudoState:
    """θ, the velocity of its momentum, and the latest pseudo-gradient of every site where a rule wants late ones."""

    parameters: NamedArrays
    velocity: NamedArrays
    late: Mapping[str, Late] = field(default_factory=dict)


def start(latents: Latents, posterior: Posterior, *, learn_inducing: bool) -> PseudoState:
    """θ at shared latent functions with unit amplitudes; a joint q(u) becomes the nearest product over functions."""
    count, J = latents.scales.shape[0], latents.inducing.shape[0]
    factors = product_factors(posterior, count)
    parameters = {SCALES: np.log(latents.scales), MEAN: posterior.mean.reshape(count, J), FACTOR: factors}
    if learn_inducing:
        parameters[INDUCING] = latents.inducing
    return PseudoState(parameters, {name: np.zeros_like(array) for name, array in parameters.items()})


def step(state: PseudoState, update: Mapping[str, Array], *, size: float, momentum: float) -> PseudoState:
    """One server step: v ← βv + Δ, θ ← θ − ηv."""
    velocity = {name: momentum * v + update[name] for name, v in state.velocity.items()}
    parameters = {name: p - size * velocity[name] for name, p in state.parameters.items()}
    return replace(state, parameters=parameters, velocity=velocity)


def with_late(
    state: PseudoState, updates: Mapping[str, NamedArrays], server_round: int, patience: int
) -> tuple[PseudoState, dict[str, NamedArrays], dict[str, float]]:
    """This round's pseudo-gradients joined by the latest ones of absent sites, and by how many rounds each is late.

    One that is more than ``patience`` rounds late is forgotten.
    """
    late = {site: own for site, own in state.late.items() if server_round - own.round <= patience}
    late |= {site: Late(update, server_round) for site, update in updates.items()}
    joined = {site: own.update for site, own in sorted(late.items())}
    staleness = {site: float(server_round - late[site].round) for site in joined}
    return replace(state, late=late), joined, staleness


def merge(
    state: PseudoState,
    updates: Mapping[str, NamedArrays],
    rule: str,
    signals: Signals,
    *,
    size: float,
    momentum: float,
) -> tuple[PseudoState, dict[str, float]]:
    """A round of Algorithm 2 with a named aggregation rule; also the weight of every site."""
    merged, weights = aggregate(rule, list(updates.values()), signals)
    moved = step(state, merged, size=size, momentum=momentum)
    return moved, {site: float(weight) for site, weight in zip(updates, weights, strict=True)}
