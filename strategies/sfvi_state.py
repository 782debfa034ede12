"""What forms of SFVI share on the server: the state, how it starts, what sites predict with and what is saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.classes import Confusion
from fedgp_flower.methods.messages import Nothing, Parameters, Shape
from fedgp_flower.methods.sfvi.messages import Beginning, GradientShare, LocalEndSum, ModelStart
from fedgp_flower.methods.sfvi.options import LEARNED, SHARED, SFVIOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.server.finalise import Posterior, lengthscale_facts
from strategies.server.inducing import box_points
from strategies.server.questions import Asking, Each, Roster, Summed, Total
from strategies.server.shapes import initial_locations, shapes_of_inputs, usual_answers
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
    """Shared inducing inputs of ``gp``, unless they are part of θ."""
    steps: int = 0
    first: Mapping[str, AnyShape] = field(default_factory=dict)
    second: Mapping[str, AnyShape] = field(default_factory=dict)
    bound: float | None = None
    """The latest ELBO of all rows, in nats; none before the first sum of gradients."""
    averaged: Averaged | None = None
    trained: tuple[str, ...] = ()
    """Sites that have taken part."""
    fresh: Mapping[str, int] = field(default_factory=dict)
    """How often a site that had taken part began anew: it lost its state, or came back with other rows."""

    @property
    def adam(self) -> AdamState[Array]:
        """The moments as the optimiser wants them."""
        return AdamState(self.steps, self.first, self.second)

    def with_moments(self, adam: AdamState[Array]) -> SFVIState:
        """The same with other moments."""
        first, second = ({n: np.asarray(value) for n, value in own.items()} for own in (adam.first, adam.second))
        return replace(self, steps=adam.step, first=first, second=second)

    def joined(self, sites: Iterable[str], fresh: Iterable[str]) -> SFVIState:
        """After a round in which these sites took part, and some of those that had before began anew."""
        counts = dict(self.fresh)
        for site in fresh:
            logger.warning("site %s has lost its state: it began anew and caught up", site)
            counts[site] = counts.get(site, 0) + 1
        return replace(self, trained=tuple(sorted({*self.trained, *sites})), fresh=counts)


def initialise(roster: Roster, options: SFVIOptions, model: ModelSection, seed: int) -> Asking[SFVIState]:
    """θ as the sites' model starts, shared inputs from federated statistics, q(Z_G) = N(0, scale² I)."""
    start = yield from agreed_model(roster)
    parameters = {f"theta.{name}": array for name, array in start.theta.items()}
    shared: NamedArrays = {}
    if options.row.inducing:
        answers = yield from shapes_of_inputs(roster)
        points = shared_inputs(answers, options, model, seed)
        (parameters if LEARNED in parameters else shared)[LEARNED if LEARNED in parameters else SHARED] = points
    size = len(start.fixed)
    parameters["q.mean"] = np.zeros(size)
    parameters["q.log_scale"] = np.full(size, math.log(options.initial_scale))
    if options.structure == "full":
        parameters["q.lower"] = np.zeros(size * (size - 1) // 2)
    return SFVIState(parameters, Prior(start.fixed, start.block), shared)


def agreed_model(roster: Roster) -> Asking[ModelStart]:
    """Initial θ and prior: honest sites send the same, so the median over those of the usual layout is theirs.

    Raises:
        RunError: if no site answers.
    """
    answers: dict[str, ModelStart] = yield Each(ModelStart, {site: Nothing() for site in roster.sites}, retries=1)
    answers = yield from usual_answers(answers, "its model is not the one that most sites have")
    if not answers:
        raise RunError("no site described its model; see the failures above")
    parts = list(answers.values())

    def median(arrays: list[ndarray]) -> Any:
        return np.asarray(np.median(arrays, axis=0)).astype(arrays[0].dtype)

    theta = {name: median([own.theta[name] for own in parts]) for name in parts[0].theta}
    return ModelStart(theta, median([own.fixed for own in parts]), median([own.block for own in parts]))


def shared_inputs(answers: Mapping[str, Shape], options: SFVIOptions, model: ModelSection, seed: int) -> Array:
    """Inducing inputs [M, D] in standardised units; no site sends a row."""
    if options.shared_inputs == "box":
        histogram = np.sum([own.histogram for own in answers.values()], axis=0)
        return box_points(model.num_inducing, histogram, np.random.default_rng([seed, *b"inducing"]))
    return initial_locations(answers, model, seed)


def began_anew(state: SFVIState, summed: Summed[GradientShare] | Summed[LocalEndSum]) -> Asking[tuple[str, ...]]:
    """Which of the sites that had taken part have lost their state; nobody is asked where nobody has."""
    assert summed.total is not None
    known = [site for site in summed.sites if site in state.trained]
    newcomers = len(summed.sites) - len(known)
    if summed.total.fresh <= newcomers:
        return ()
    answers: Mapping[str, Beginning] = yield Each(Beginning, {site: Nothing() for site in known}, retries=1)
    return tuple(site for site, own in answers.items() if own.fresh)


class Reached(Protocol):
    """A state that holds what predicts."""

    @property
    def parameters(self) -> Mapping[str, AnyShape]:
        """θ and η_G."""

    @property
    def shared(self) -> Mapping[str, AnyShape]:
        """Shared inducing inputs, unless they are part of θ."""


S = TypeVar("S", bound=Reached)


class StructuredVI(FederatedStrategy[S]):
    """What every Strategy of the family has in common: how its posterior predicts and is saved."""

    options_class = SFVIOptions
    row_arrays = ("prediction.trend", "prediction.deviation")
    options: SFVIOptions

    def _set(self, config: RunConfig, *kept: Any) -> None:
        super()._set(config, *kept)
        self.predicts = not self.options.numbers_classes(self.config.model)

    def predictive(self, state: S, roster: Roster) -> Asking[Parameters]:
        """θ and q(Z_G); a site adds the shared inputs, which it was sent once, and its local posterior."""
        yield from ()
        return Parameters(state.parameters)

    def constants(self, state: S) -> NamedArrays:
        """The shared inducing inputs."""
        return dict(state.shared)

    def public(self, state: S) -> NamedArrays:
        """θ and η_G."""
        return encode(Parameters(state.parameters))

    def posterior_of(self, state: S) -> Posterior:
        """What predicts for a new site: θ, q(Z_G) and the shared inputs."""
        arrays = {**state.parameters, **state.shared}
        meanings = {
            "q.mean": "μ_G, mean of the shared latents Z_G",
            "q.log_scale": "log σ_G, by entry of Z_G",
            "q.lower": "strictly lower entries of L_G, row by row",
            SHARED: "Z, shared inducing inputs",
        }
        coordinates = {name: "standardised" if name in (SHARED, LEARNED) else "unconstrained" for name in arrays}
        equation = (
            "q(Z_G) = N(μ_G, diag(σ_G) L_G L_Gᵀ diag(σ_G)); without q.lower, L_G = I. The model of `sfvi.model` with "
            "parameters θ (theta.*) gives p(y | x, Z_G, Z_L), and a new site has Z_L from its prior. For `gp`: "
            "f(x) = a(x)ᵀ Z_G[:M] + [1, x]ᵀ Z_G[M:] + h(x) with L Lᵀ = k_G(Z, Z) + jitter · k_G(z, z) · I, "
            "a(x) = L⁻¹ k_G(Z, x), h(x) ~ N(0, k_L(x, x) + [1, x²]ᵀ exp(2 theta.log_site_slope)), or h = 0 where "
            "`sfvi.site-inducing` is 0; x and y standardised. With theta.log_width, log w of noise, amplitude and "
            "lengthscale of a site, k_L of a new site is exp(2 w₂²) times as large, and its noise a log-normal mixture."
        )
        section = self.config.model.model_dump(by_alias=True)
        closed = self.options.in_closed_form(self.config.model)
        structure = {**self.options.model_dump(by_alias=True), "objective": "closed-form" if closed else "stochastic"}
        model = {"family": "structured", "model": section, "structure": structure}
        return Posterior(arrays, {n: meanings.get(n, "hyperparameter") for n in arrays}, coordinates, equation, model)


class SteppedVI(StructuredVI[SFVIState]):
    """What SFVI and SFVI-Avg share besides: they take steps on θ and η_G."""

    state_class = SFVIState
    watched = "objective"

    def initialise(self, roster: Roster) -> Asking[SFVIState]:
        """The model that sites describe, before any of them has learned."""
        return (yield from initialise(roster, self.options, self.config.model, self.config.seed))

    def horizon(self) -> int:
        """The round in which the learning rate ends: as planned, or soon after the bound was flat."""
        flat = self.course.flat_from
        return self.planned_rounds if flat is None else min(self.planned_rounds, math.ceil(flat / FLAT_SHARE))

    def rate(self, server_round: int) -> float:
        """The learning rate of a round."""
        share = self.options.constant_share if self.course.flat_from is None else FLAT_SHARE
        return self.options.rate(server_round - 1, self.horizon(), share)

    def watching(self) -> bool:
        """As long as the learning rate is constant."""
        return self.round <= self.options.constant_share * self.planned_rounds

    def finished(self, state: SFVIState) -> bool:
        """Whether the bound was flat and the learning rate has come down since."""
        return self.course.flat_from is not None and self.round >= self.horizon()

    def final(self, state: SFVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """Which class was taken for which, where the target holds classes."""
        if not self.options.numbers_classes(self.config.model):
            return {}
        summed = yield Total(Confusion, (yield from self.predictive(state, roster)))
        return {} if summed.total is None else {"confusion": summed.total.counts.tolist()}

    def converged(self, state: SFVIState) -> bool:
        """Whether the bound was flat while the learning rate was constant."""
        del state
        return self.course.flat_from is not None

    def adopt(self, state: SFVIState, arrays: NamedArrays) -> SFVIState:
        """Other parameters, the same moments."""
        return replace(state, parameters={name.removeprefix("values."): array for name, array in arrays.items()})

    def details_of(self, state: SFVIState) -> dict[str, Any]:
        """The bound at the end, and how the latest average was reached."""
        facts: dict[str, Any] = {"shared_latents": len(state.prior.fixed)}
        facts["relevance"] = lengthscale_facts(state.parameters, None)
        if state.bound is not None:
            facts["bound"] = state.bound
        if state.fresh:
            facts["fresh_starts"] = dict(state.fresh)
        if state.averaged is not None:
            last = state.averaged
            facts["barycentre"] = {"iterations": last.iterations, "residual": last.residual}
            facts |= {"site_estimate": last.estimate, "spread": dict(last.spread)}
        return facts
