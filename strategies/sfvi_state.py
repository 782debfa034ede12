"""What SFVI and SFVI-Avg share on the server: the state, how it starts, what sites predict with and what is saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.classes import Confusion
from fedgp_flower.methods.family import initial_global, named, on_the_wire
from fedgp_flower.methods.sfvi.learner import configured
from fedgp_flower.methods.sfvi.options import CONSTANT_SHARE, SHARED, SFVIOptions
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.server.finalise import Posterior, Predicted, lengthscale_facts
from strategies.server.questions import Asking, Roster, Total
from strategies.server.shapes import initial_locations, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

FLAT_SHARE = 0.8
"""Share of the rounds at the full rate where the bound was found flat: averaging out the noise takes fewer."""


@message()
class Prior:
    """p_θ(Z_G) = N(0, diag s²), log s = ``fixed`` + θ.prior_log_scales[``block``]; an empty ``block`` is none."""

    fixed: Float[ndarray, " G"]
    block: Int[ndarray, " B"]


@message()
class Averaged:
    """How the latest average was reached."""

    iterations: int
    """Of the barycentre."""
    residual: float
    spread: Mapping[str, float]
    """W₂ from each site's q(Z_G) to their barycentre."""
    estimate: float
    """Mean over sites and local steps of what each site takes for the bound; the ELBO of no posterior."""


@message()
class SFVIState:
    """θ and η_G, the moments of the server's Adam, and what is known of the sites."""

    parameters: Mapping[str, AnyShape]
    """θ as ``theta.*``; η_G as ``q.mean``, ``q.log_scale`` and, unless q(Z_G) is diagonal, ``q.lower``."""
    prior: Prior
    shared: Mapping[str, AnyShape]
    """Shared inducing inputs of ``gp``."""
    steps: int = 0
    first: Mapping[str, AnyShape] = field(default_factory=dict)
    second: Mapping[str, AnyShape] = field(default_factory=dict)
    bound: float | None = None
    """The latest ELBO of all rows, in nats; none before the first sum of gradients."""
    averaged: Averaged | None = None
    trained: tuple[str, ...] = ()
    """Sites that have taken part."""
    fresh: int = 0
    """How often a site that had taken part began anew: it lost its state, or came back with other rows."""

    @property
    def adam(self) -> AdamState[Array]:
        """The moments as the optimiser wants them."""
        return AdamState(self.steps, self.first, self.second)

    def with_moments(self, adam: AdamState[Array]) -> SFVIState:
        """The same with other moments."""
        first, second = (
            {name: np.asarray(value) for name, value in moment.items()} for moment in (adam.first, adam.second)
        )
        return replace(self, steps=adam.step, first=first, second=second)

    def joined(self, sites: Iterable[str], fresh: int) -> SFVIState:
        """After a round of these sites, so many of which had no memory of earlier rounds, newcomers among them."""
        together = {*self.trained, *sites}
        again = max(fresh - (len(together) - len(self.trained)), 0)
        if again:
            logger.warning("%d site(s) lost their state: they began anew and caught up", again)
        return replace(self, trained=tuple(sorted(together)), fresh=self.fresh + again)


def initialise(roster: Roster, config: RunConfig, names: Sequence[str]) -> Asking[SFVIState]:
    """θ as configured, shared inputs from federated statistics, q(Z_G) = N(0, scale² I)."""
    options = config.options
    assert isinstance(options, SFVIOptions)
    shared: NamedArrays = {}
    if options.row.inducing:
        shared[SHARED] = initial_locations((yield from shapes_of_inputs(roster)), config.model, config.seed)
    points = torch.from_numpy(shared[SHARED]) if shared else None
    model = configured(options, config.model, len(options.columns(names)), points)
    q_global = initial_global(model.global_size, scale=options.initial_scale, triangular=options.structure == "full")
    prior = Prior(model.fixed_log_scale.numpy(), model.block.numpy())
    return SFVIState(on_the_wire(model.theta(), named(q_global)), prior, shared)


EQUATION = (
    "q(Z_G) = N(μ_G, diag(σ_G) L_G L_Gᵀ diag(σ_G)); without q.lower, L_G = I. The model of `sfvi.model` with "
    "parameters θ (theta.*) gives p(y | x, Z_G, Z_L), and a new site has Z_L from its prior. For `gp`: "
    "f(x) = a(x)ᵀ Z_G[:M] + [1, x]ᵀ Z_G[M:] + h(x) with L Lᵀ = k_G(Z, Z) + jitter · k_G(z, z) · I, "
    "a(x) = L⁻¹ k_G(Z, x), h(x) ~ N(0, k_L(x, x) + [1, x²]ᵀ exp(2 theta.log_site_slope)); x and y standardised."
)
MEANINGS = {
    "q.mean": "μ_G, mean of the shared latents Z_G",
    "q.log_scale": "log σ_G, by entry of Z_G",
    "q.lower": "strictly lower entries of L_G, row by row",
    SHARED: "Z, shared inducing inputs",
}


class StructuredVI(FederatedStrategy[SFVIState]):
    """What SFVI and SFVI-Avg share: steps on θ and η_G, how the posterior predicts and is saved."""

    options_class = SFVIOptions
    state_class = SFVIState
    watched = "objective"
    row_arrays = ("prediction.trend", "prediction.deviation")
    options: SFVIOptions

    def _set(self, config: RunConfig, *kept: Any) -> None:
        super()._set(config, *kept)
        self.predicts = not self.options.numbers_classes(self.config.model)

    def initialise(self, roster: Roster) -> Asking[SFVIState]:
        """The configured model, before any site has learned."""
        return (yield from initialise(roster, self.config, self.preparation.names))

    def predictive(self, state: SFVIState, roster: Roster) -> Asking[Predicted]:
        """θ and q(Z_G); a site adds the shared inputs, which it was sent once, and its local posterior."""
        yield from ()
        return Predicted(Parameters(state.parameters), self._saved(state), self._facts(state))

    def constants(self, state: SFVIState) -> NamedArrays:
        """The shared inducing inputs."""
        return dict(state.shared)

    def public(self, state: SFVIState) -> NamedArrays:
        """θ and η_G."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: SFVIState, arrays: NamedArrays) -> SFVIState:
        """Other parameters, the same moments."""
        return replace(state, parameters={name.removeprefix("values."): array for name, array in arrays.items()})

    def horizon(self) -> int:
        """The round in which the learning rate ends: as planned, or soon after the bound was flat."""
        flat = self.course.flat_from
        return self.planned_rounds if flat is None else min(self.planned_rounds, math.ceil(flat / FLAT_SHARE))

    def rate(self, server_round: int) -> float:
        """The learning rate of a round."""
        share = CONSTANT_SHARE if self.course.flat_from is None else FLAT_SHARE
        return self.options.rate(server_round - 1, self.horizon(), share)

    def watching(self) -> bool:
        """As long as the learning rate is constant."""
        return self.round <= CONSTANT_SHARE * self.planned_rounds

    def finished(self, state: SFVIState) -> bool:
        """Whether the bound was flat and the learning rate has come down since."""
        return self.course.flat_from is not None and self.round >= self.horizon()

    def converged(self, state: SFVIState) -> bool:
        """Whether the bound was flat while the learning rate was constant."""
        del state
        return self.course.flat_from is not None

    def final(self, state: SFVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """Which class was taken for which, where the target holds classes."""
        if not self.options.numbers_classes(self.config.model):
            return {}
        predicted = yield from self.predictive(state, roster)
        summed = yield Total(Confusion, predicted.request)
        return {} if summed.total is None else {"confusion": summed.total.counts.tolist()}

    def _saved(self, state: SFVIState) -> Posterior:
        """What predicts for a new site: θ, q(Z_G) and the shared inputs."""
        arrays = {**state.parameters, **state.shared}
        coordinates = {name: "standardised" if name == SHARED else "unconstrained" for name in arrays}
        section = self.config.model.model_dump(by_alias=True)
        model = {"family": "structured", "model": section, "structure": self.options.model_dump(by_alias=True)}
        meanings = {name: MEANINGS.get(name, "hyperparameter") for name in arrays}
        return Posterior(arrays, meanings, coordinates, EQUATION, model)

    def _facts(self, state: SFVIState) -> dict[str, Any]:
        """The bound at the end, and how the latest average was reached."""
        facts: dict[str, Any] = {"shared_latents": len(state.prior.fixed)}
        facts["relevance"] = lengthscale_facts(state.parameters, None)
        if state.bound is not None:
            facts["bound"] = state.bound
        if state.fresh:
            facts["fresh_starts"] = state.fresh
        if state.averaged is not None:
            last = state.averaged
            facts["barycentre"] = {"iterations": last.iterations, "residual": last.residual}
            facts |= {"site_estimate": last.estimate, "spread": dict(last.spread)}
        return facts
