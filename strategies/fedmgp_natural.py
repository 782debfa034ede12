"""FedMGP by pseudo-gradients in natural parameters; for Gaussian noise.

Algorithm 2 of Chung and Al Kontar, Technometrics 66 (2024), but what units step on and the server averages of q(u) are
its precision λ and shift h (:mod:`fedgp_flower.methods.fedmgp.natural`). Their average with weights p_m is a step on
the pooled bound, whereas averages of means and Cholesky factors drift away from its optimum. Rules, server's step,
sampling and stand-ins are those of :mod:`strategies.fedmgp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from numpy import ndarray

from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fedmgp.latents import FACTOR, MEAN, PRECISION, SCALES, SHIFT, from_natural, to_natural
from fedgp_flower.methods.fedmgp.messages import NaturalGradient, PseudoGradient
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.typing import NamedArrays
from strategies import fedmgp
from strategies.fedmgp import PseudoState
from strategies.fedmgp_shared import SharedLatents
from strategies.server.questions import Asking, Figures, Roster


@message()
class NaturalState(PseudoState):
    """θ = {log S, λ, h} instead of {log S, mean, factor}; all else is the same."""

    answer: ClassVar[type[PseudoGradient]] = NaturalGradient

    def as_factors(self) -> Mapping[str, ndarray]:
        """Mean and Cholesky factor of each q(u_i)."""
        mean, factors = from_natural(self.parameters[PRECISION], self.parameters[SHIFT])
        return {SCALES: self.parameters[SCALES], MEAN: mean, FACTOR: factors}


def natural(state: PseudoState) -> NaturalState:
    """The start of Algorithm 2 in natural parameters."""
    given = state.parameters
    precision, shift = to_natural(given[FACTOR], given[MEAN])
    parameters = {SCALES: given[SCALES], PRECISION: precision, SHIFT: shift}
    velocity = {name: 0 * own for name, own in parameters.items()}
    return NaturalState(**{**vars(state), "parameters": parameters, "velocity": velocity})


class FedMGPNatural(SharedLatents[NaturalState]):
    """Algorithm 2 in natural parameters, for Gaussian noise and mini-batches."""

    state_class = NaturalState
    implied: ClassVar[Mapping[str, Any]] = {"update": "pseudo-gradient", "parametrisation": "natural"}

    def phase(self, state: NaturalState) -> NaturalState:
        """All of it."""
        return state

    def initialise(self, roster: Roster) -> Asking[NaturalState]:
        """Pseudo-inputs from where inputs lie, lengthscales from their spacing, q(u) from one unit."""
        return natural((yield from fedmgp.initialise(roster, self.plan)))

    def one_round(self, state: NaturalState, roster: Roster) -> Asking[tuple[NaturalState, Figures]]:
        """Algorithm 2."""
        after, figures = yield from fedmgp.one_round(state, roster, self.plan)
        assert isinstance(after, NaturalState)
        return after, figures

    def public(self, state: NaturalState) -> NamedArrays:
        """θ."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: NaturalState, arrays: NamedArrays) -> NaturalState:
        """Another θ, the same memory."""
        return replace(state, parameters={name.removeprefix("values."): array for name, array in arrays.items()})
