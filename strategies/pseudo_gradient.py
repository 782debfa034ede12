"""The server's part of FedMGP's Algorithm 2: θ ← θ − η v, v a merged pseudo-gradient with momentum, or Flower's Adam.

θ = {S, q(u), W if learned} travels in the coordinates that sites optimise: log S, and mean and Cholesky factor of each
q(u_i). Pure functions between states; nothing here knows of messages.

References: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Algorithm 2,
Eq. 15; Reddi et al., Adaptive federated optimization, ICLR 2021, for Adam on pseudo-gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

from fedgp_flower.errors import NumericsError
from fedgp_flower.latent import FACTOR, INDUCING, MEAN, SCALES, Latents, Posterior, product_factors
from fedgp_flower.shapes import Array, NamedArrays
from strategies.aggregators import Signals, aggregate
from strategies.wire import array_record, numpy_arrays

ServerOptimizer = Literal["fedavg", "fedadam"]


@dataclass(frozen=True, slots=True)
class Late:
    """The latest pseudo-gradient of a site and the round that it belongs to."""

    update: NamedArrays
    round: int


@dataclass(frozen=True, slots=True)
class PseudoState:
    """θ, what the server's optimiser remembers, and the latest pseudo-gradient of every site where a rule wants it."""

    parameters: NamedArrays
    velocity: NamedArrays
    """v of the momentum; with Adam the running mean of −Δ, in Flower's sign."""
    squares: NamedArrays = field(default_factory=dict)
    """Adam's running mean of Δ²."""
    steps: int = 0
    """Adam's steps so far."""
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


def adam(state: PseudoState, update: Mapping[str, Array], *, size: float) -> PseudoState:
    """One step of Flower's FedAdam on the merged Δ, at β = (0.9, 0.99), τ = 10⁻³ and rate ``size``.

    Flower counts rounds from 0, so that with the number of steps before this one its bias correction is that of Adam.
    """
    flower = FedAdam(eta=size)
    flower.current_arrays = dict(state.parameters)
    flower.m_t, flower.v_t = dict(state.velocity), dict(state.squares)
    target = array_record({name: p - update[name] for name, p in state.parameters.items()})
    content = RecordDict({"arrays": target, "metrics": MetricRecord({"num-examples": 1})})
    moved, _ = flower.aggregate_train(state.steps, [Message(content, dst_node_id=0, message_type="train")])
    parameters = numpy_arrays(cast(ArrayRecord, moved))  # there is one reply, so there is a step
    return replace(state, parameters=parameters, velocity=flower.m_t, squares=flower.v_t, steps=state.steps + 1)


def with_late(
    state: PseudoState, updates: Mapping[str, NamedArrays], server_round: int, patience: int
) -> tuple[PseudoState, dict[str, NamedArrays], dict[str, float]]:
    """This round's pseudo-gradients joined by the last ones of absent sites, and by how many rounds old each is.

    An absent site, or one whose reply came after the timeout, is stood in for by what it sent last, again in every
    round, as in MIFA (Gu et al., NeurIPS 2021). A stand-in more than ``patience`` rounds old is forgotten.
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
    optimizer: ServerOptimizer = "fedavg",
) -> tuple[PseudoState, dict[str, float]]:
    """A round of Algorithm 2 with a named aggregation rule; also the weight of every site.

    Raises:
        ConfigError: the rule cannot work with these updates.
        NumericsError: the step would leave the numbers that a model can have.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        merged, weights = aggregate(rule, list(updates.values()), signals)
        fedadam = optimizer == "fedadam"
        moved = adam(state, merged, size=size) if fedadam else step(state, merged, size=size, momentum=momentum)
        _require_usable(moved)
    return moved, {site: float(weight) for site, weight in zip(updates, weights, strict=True)}


def _require_usable(state: PseudoState) -> None:
    """θ, q(u), lengthscales and what the optimiser remembers are finite; a squared lengthscale is not 0."""
    scales, factors = np.exp(state.parameters[SCALES]), state.parameters[FACTOR]
    held = [*state.parameters.values(), *state.velocity.values(), *state.squares.values()]
    finite = all(np.isfinite(array).all() for array in [*held, scales, factors @ np.swapaxes(factors, 1, 2)])
    if not (finite and np.all(scales > 0)):
        raise NumericsError(
            "the merged pseudo-gradient leads to parameters that are not finite: a unit sent far too much. Lower "
            "`fedmgp.server-step`, or set `fedmgp.aggregation` to a rule that bounds every unit, as 'norm-clipped'"
        )
