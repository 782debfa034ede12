"""SFVI-Avg: local steps at the sites; the server averages θ and takes the Wasserstein barycentre of their q(Z_G).

Hassan, Salomone and Mengersen, *Federated variational inference methods for structured latent variable models* (2023),
Algorithm 2. A site takes many steps on a bound that stands in for all sites, and moves its q(Z_Lk | Z_G) to the new
μ_G when it next reads it. The state, its start and its end are those of SFVI too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.barycentre import barycentre, wasserstein_distance
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import message
from fedgp_flower.methods.classes import Confusion
from fedgp_flower.methods.family import GlobalPosterior, initial_global, named, on_the_wire
from fedgp_flower.methods.sfvi.messages import LocalEnd, LocalEndSum, LocalStepsRequest
from fedgp_flower.methods.sfvi.options import CONSTANT_SHARE, SHARED, SFVIAvgOptions, SFVIOptions
from fedgp_flower.methods.sfvi.structured import configured
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import MOVE, Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.server.questions import (
    Asking,
    Each,
    Figures,
    Predicted,
    Roster,
    Summed,
    Total,
    lengthscale_facts,
)
from strategies.server.shapes import initial_locations, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

DECAYS = (0.9, 0.999)
"""Of Adam's moments."""
FLAT_SHARE = 0.8
"""Share of the rounds at the full rate where the bound was found flat: averaging out the noise takes fewer."""


@message()
class Prior:
    """p_θ(Z_G) = N(0, diag s²), log s = ``fixed`` + θ.prior_log_scales[``block``]; an empty ``block`` is none."""

    fixed: Float[ndarray, " G"]
    block: Int[ndarray, " B"]


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
    spread: Mapping[str, float] = field(default_factory=dict)
    """W₂ from each site's q(Z_G) to their barycentre, after the latest average."""
    trained: tuple[str, ...] = ()
    """Sites that have taken part."""
    fresh: int = 0
    """How often a site that had taken part began anew: it lost its state, or came back with other rows."""

    @property
    def adam(self) -> AdamState[Array]:
        """The moments as the optimiser wants them."""
        return AdamState(self.steps, self.first, self.second)

    def joined(self, sites: Iterable[str], fresh: int) -> SFVIState:
        """After a round of these sites, so many of which had no memory of earlier rounds, newcomers among them."""
        together = {*self.trained, *sites}
        again = max(fresh - (len(together) - len(self.trained)), 0)
        if again:
            logger.warning("%d site(s) lost their state: they began anew and caught up", again)
        return replace(self, trained=tuple(sorted(together)), fresh=self.fresh + again)


@dataclass(frozen=True, slots=True)
class SFVIPlan:
    """How a round goes."""

    options: SFVIOptions
    seed: int
    rate: float
    """Of the steps in this round."""


def one_round(state: SFVIState, roster: Roster, plan: SFVIPlan) -> Asking[tuple[SFVIState, Figures]]:
    """Algorithm 2 of the paper. The server asks :class:`Each` site: a barycentre is not made of a sum.

    That of diagonal Gaussians is, so that where there are totals only, it asks for Σ w, Σ w θ, Σ w μ and Σ w σ; how far
    sites are from one another is not known then.
    """
    rows, reach = sum(roster.rows.values()), min(MOVE, move_limit(plan.rate, plan.options.local_steps))
    request = LocalStepsRequest(state.parameters, plan.rate, float(rows), reach)  # 1. sites take m steps from {θ, η_G}
    if roster.totals_only:
        summed: Summed[LocalEndSum] = yield Total(LocalEndSum, request, retries=0)
        if summed.total is None or summed.silent:
            return state, {}
        state = replace(state.joined(summed.sites, summed.total.fresh), parameters=summed.total.mean())
        return state, {"site_estimate": float(summed.total.objective / summed.total.weight) / rows}
    answers: dict[str, LocalEnd] = yield Each(LocalEnd, dict.fromkeys(roster.sites, request))
    if not answers:
        return state, {}
    state = state.joined(answers, sum(end.fresh for end in answers.values()))
    weights = np.array([float(roster.rows[site]) for site in answers])
    try:  # 2. mean of θ, barycentre of q(Z_G)
        parameters, spread = average([end.values for end in answers.values()], weights)
    except NumericsError as error:
        logger.warning("round %d: parameters stay as they were: %s", roster.round, error)
        return state, {}
    estimate = float(np.average([end.objective for end in answers.values()], weights=weights))
    state = replace(state, parameters=parameters, spread=dict(zip(answers, spread, strict=True)))
    return state, {"site_estimate": estimate / rows, "spread": float(np.mean(spread))}


def average(sites: Sequence[Mapping[str, np.ndarray]], weights: Array) -> tuple[NamedArrays, list[float]]:
    """θ ← Σ wₖ θₖ and q(Z_G) ← Wasserstein barycentre of the sites' q(Z_G), weights divided by their sum.

    Returns:
        Both, and W₂ from each site's q(Z_G) to the barycentre.

    Raises:
        NumericsError: there is no barycentre, or the iteration does not converge.
    """
    shares = weights / weights.sum()
    means = np.stack([site["q.mean"] for site in sites])
    factors = np.stack([factor(site) for site in sites])
    centre = barycentre(means, factors, weights)
    merged: NamedArrays = {
        name: np.asarray(np.tensordot(shares, np.stack([site[name] for site in sites]), 1))
        for name in sites[0]
        if name.startswith("theta.")
    }
    scale = centre.factor if centre.factor.ndim == 1 else np.diagonal(centre.factor)
    merged |= {"q.mean": centre.mean, "q.log_scale": np.log(scale)}
    if centre.factor.ndim == 2:
        lower = centre.factor / scale[:, None]
        merged["q.lower"] = lower[np.tril_indices(len(lower), -1)]
    spread = [wasserstein_distance(centre.mean, centre.factor, m, f) for m, f in zip(means, factors, strict=True)]
    return merged, spread


def factor(parameters: Mapping[str, np.ndarray]) -> Array:
    """diag(σ) L [M, M], a factor of the covariance of q(Z_G); σ [M] itself when q is diagonal."""
    q_global = GlobalPosterior.of(parameters)
    return (q_global.log_scale.exp() if q_global.lower is None else q_global.factor()).numpy()


def move_limit(rate: float, steps: int) -> float:
    """The farthest that ``steps`` steps of Adam can carry any parameter.

    By Cauchy-Schwarz |m| ≤ (1 − β₁) / √((1 − β₂) (1 − β₁²/β₂)) √v, whatever the gradients; the corrections for the
    start of the moments only make a step smaller.
    """
    one, two = DECAYS
    return rate * steps * (1 - one) / math.sqrt((1 - two) * (1 - one**2 / two))


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
    options: SFVIOptions

    def _set(self, config: RunConfig, *kept: Any) -> None:
        super()._set(config, *kept)
        self.predicts = not self.options.numbers_classes(self.config.model)

    def initialise(self, roster: Roster) -> Asking[SFVIState]:
        """θ as configured, shared inputs from federated statistics, q(Z_G) = N(0, scale² I)."""
        options, section, shared = self.options, self.config.model, dict[str, ndarray]()
        if options.row.inducing:
            shared[SHARED] = initial_locations((yield from shapes_of_inputs(roster)), section, self.config.seed)
        points = torch.from_numpy(shared[SHARED]) if shared else None
        model = configured(options, section, len(options.columns(self.preparation.names)), points)
        full = options.structure == "full"
        q_global = initial_global(model.global_size, scale=options.initial_scale, triangular=full)
        prior = Prior(model.fixed_log_scale.numpy(), model.block.numpy())
        return SFVIState(on_the_wire(model.theta() | named(q_global)), prior, shared)

    def predictive(self, state: SFVIState, roster: Roster) -> Asking[Predicted]:
        """θ and q(Z_G); a site adds the shared inputs, which it was sent once, and its local posterior."""
        yield from ()
        section = self.config.model.model_dump(by_alias=True)
        model = {"family": "structured", "model": section, "structure": self.options.model_dump(by_alias=True)}
        posterior = saved({**state.parameters, **state.shared}, EQUATION, model)
        facts = {"bound": state.bound, "fresh_starts": state.fresh or None, "spread": dict(state.spread) or None}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        shared = {"shared_latents": len(state.prior.fixed), "relevance": lengthscale_facts(state.parameters, None)}
        return Predicted(Parameters(state.parameters), posterior, shared | known)

    def constants(self, state: SFVIState) -> NamedArrays:
        """The shared inducing inputs."""
        return dict(state.shared)

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
        return self.course.flat_from is not None

    def final(self, state: SFVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """Which class was taken for which, where the target holds classes."""
        if not self.options.numbers_classes(self.config.model):
            return {}
        predicted = yield from self.predictive(state, roster)
        summed = yield Total(Confusion, predicted.request)
        return {} if summed.total is None else {"confusion": summed.total.counts.tolist()}


def saved(arrays: NamedArrays, equation: str, model: Mapping[str, Any], **meanings: str) -> Posterior:
    """What predicts, from parameters and shared inputs."""
    coordinates = {name: "standardised" if name == SHARED else "unconstrained" for name in arrays}
    known = {name: {**MEANINGS, **meanings}.get(name, "hyperparameter") for name in arrays}
    return Posterior(arrays, known, coordinates, equation, model)


class SFVIAvg(StructuredVI):
    """Rounds of local steps and averages."""

    method = "sfvi-avg"
    watched = "site_estimate"
    options_class = SFVIAvgOptions

    def one_round(self, state: SFVIState, roster: Roster) -> Asking[tuple[SFVIState, Figures]]:
        """Algorithm 2 of the paper."""
        return (yield from one_round(state, roster, SFVIPlan(self.options, self.config.seed, self.rate(roster.round))))
