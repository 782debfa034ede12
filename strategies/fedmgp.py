"""FedMGP by pseudo-gradients: Algorithm 2 of Chung and Al Kontar, Technometrics 66 (2024), for any likelihood.

θ = {S, q(u)} is shared. In a round sampled units take local steps on (θ, φ_m) and send Δ_m = θ − θ_m; the server merges
these by a rule of :mod:`strategies.fedmgp_rules` and steps: θ ← θ − Δ. φ_m stays at its unit.

Where the noise is Gaussian q(u) is a precision λ and a shift h, whose average with weights p_m is a step on the pooled
bound (:mod:`fedgp_flower.methods.fedmgp.local_steps`). Averages of means and Cholesky factors, which the paper takes
and which other likelihoods need, drift away from its optimum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import ConfigError, NumericsError, RunError
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fedmgp.latents import (
    FACTOR,
    MEAN,
    PRECISION,
    SCALES,
    SHIFT,
    Latents,
    Posterior,
    from_parameters,
    product_factors,
    still,
    to_natural,
)
from fedgp_flower.methods.fedmgp.messages import Broadcast, Known, PseudoGradient, PseudoGradientSum
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.outcome import Observer, Snapshot
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, NamedArrays
from strategies.fedmgp_rules import AGREEMENT, RULES, Signals, aggregate, least_sites, merge_natural
from strategies.fedmgp_shared import (
    EVERYONE,
    Record,
    SharedLatents,
    first_inducing,
    first_posterior,
    latents_at,
    notice_fresh,
)
from strategies.server.fedavg import sampled
from strategies.server.questions import Asking, Each, Figures, Roster, Summed, Total

logger = logging.getLogger("fedgp")

FINAL_RATE = 0.005
"""Learning rate of the last local steps over that of the first; it falls by the same factor every round."""
WATCHED = math.log(0.1) / math.log(FINAL_RATE)
"""Share of the rounds after which the learning rate is a tenth of the first: short steps raise the objective little."""
PATIENCE = 5
"""``staleness-weighted``: rounds after which a stand-in is forgotten."""


@message()
class Late:
    """The latest pseudo-gradient of a unit, and the round that it belongs to."""

    update: Mapping[str, AnyShape]
    round: int


@message()
class PseudoState:
    """θ, and the latest pseudo-gradient of units where a rule wants it."""

    parameters: Mapping[str, AnyShape]
    late: Mapping[str, Late]
    inducing: Float[ndarray, "J D"]
    jitter: float
    reports: Mapping[str, int]
    """Round in which a unit last answered."""
    record: Record

    @property
    def latents(self) -> Latents:
        """Latent functions at θ."""
        return from_parameters(self.parameters, self.inducing, self.jitter)[0]

    @property
    def posterior(self) -> Posterior:
        """The joint q(u) at θ."""
        return from_parameters(self.parameters, self.inducing, self.jitter)[1]

    @property
    def bounds(self) -> dict[str, Any]:
        """None: pseudo-gradients have no pooled bound."""
        return {"bound": None}

    def known(self, site: str) -> Known:
        """When the unit last answered; its parameters stay as they are. The units of a sum are all sent the same."""
        key = EVERYONE if EVERYONE in self.reports else site
        return Known(0, self.reports.get(key, 0), still(self.parameters[SCALES].shape))


def begin(latents: Latents, q: Posterior, *, gaussian: bool) -> PseudoState:
    """θ at shared latent functions with unit amplitudes; a joint q(u) becomes the nearest product over functions."""
    shape = len(latents.scales), len(latents.inducing)
    factors, mean = product_factors(q, shape[0]), q.mean.reshape(shape)
    parameters = {SCALES: np.log(latents.scales)}
    parameters |= dict(zip((PRECISION, SHIFT), to_natural(factors, mean), strict=True)) if gaussian else {}
    parameters |= {} if gaussian else {MEAN: mean, FACTOR: factors}
    return PseudoState(parameters, {}, latents.inducing, latents.jitter, {}, Record())


@dataclass(frozen=True, slots=True)
class PseudoPlan:
    """How a round goes."""

    options: FedMGPOptions
    config: RunConfig
    units: int
    """Number M of units that were ever known."""
    rows: Mapping[str, int]
    rounds: int
    """Over which the learning rate falls."""

    def broadcast(self, state: PseudoState, site: str, server_round: int) -> Broadcast:
        """What a unit is asked; the learning rate falls from ``optimizer.learning-rate`` to ``FINAL_RATE`` of it."""
        part = min((server_round - 1) / max(self.rounds - 1, 1), 1.0)
        optimizer = self.config.optimizer
        rate = float(optimizer.learning_rate * optimizer.decay ** (server_round - 1) * FINAL_RATE**part)
        return Broadcast(state.parameters, state.inducing, state.known(site), rate, 1 / self.units)


def one_round(state: PseudoState, roster: Roster, plan: PseudoPlan) -> Asking[tuple[PseudoState, Figures]]:
    """A round of Algorithm 2."""
    chosen = sampled(roster, plan.options.fraction, plan.config.seed)  # units that take part, max(⌈ρM⌉, 1)
    require_enough(plan.options, len(chosen))
    answers, rows = yield from (of_all if roster.totals_only else of_each)(state, chosen, roster.round, plan)
    state, updates, staleness = with_late(state, answers, roster.round, plan.options.aggregation)
    weights: dict[str, float] = {}
    if updates:
        fits = [answers[site].fit if site in answers else 0.0 for site in updates]
        try:
            state, weights = step(state, updates, signals_of(plan.options, fits, staleness), plan.options)
        except (ConfigError, NumericsError) as error:
            logger.warning("the round changes nothing: %s", error)
    state = noted(state, answers, weights, roster.round)
    if not answers:
        return state, {}
    total = sum(rows[site] for site in answers)
    return state, {"objective": sum(rows[site] * answer.fit for site, answer in answers.items()) / max(total, 1)}


Answered: TypeAlias = tuple[Mapping[str, PseudoGradient], Mapping[str, int]]
"""Pseudo-gradients, and the rows behind them."""


def of_each(state: PseudoState, chosen: Sequence[str], server_round: int, plan: PseudoPlan) -> Asking[Answered]:
    """Δ_m = θ − θ_m of every unit that answers."""
    requests = {site: plan.broadcast(state, site, server_round) for site in chosen}
    answers: Mapping[str, PseudoGradient] = yield Each(PseudoGradient, requests)
    return answers, plan.rows


def of_all(state: PseudoState, chosen: Sequence[str], server_round: int, plan: PseudoPlan) -> Asking[Answered]:
    """The mean of Δ_m, as if it came from one unit."""
    request = plan.broadcast(state, EVERYONE, server_round)
    summed: Summed[PseudoGradientSum] = yield Total(PseudoGradientSum, request, tuple(chosen))
    if summed.total is None:
        return {}, {}
    mean = summed.total.mean(len(summed.sites) - summed.silent)
    if plan.config.model.likelihood != "gaussian":
        mean = replace(mean, flat=None)
    return {EVERYONE: mean}, {EVERYONE: int(summed.total.rows)}


def require_enough(options: FedMGPOptions, asked: int) -> None:
    """With fewer units than a rule needs no round could ever change anything.

    Raises:
        RunError: fewer units are asked.
    """
    least = least_sites(options.aggregation, options.malicious)
    if asked < least:
        raise RunError(
            f"`fedmgp.aggregation` = {options.aggregation!r} with `fedmgp.malicious` = {options.malicious} needs "
            f"{least} units in a round (2f + 3), {asked} can be asked. Lower `fedmgp.malicious`, raise "
            "`fedmgp.fraction`, or take another rule"
        )


def with_late(
    state: PseudoState, answers: Mapping[str, PseudoGradient], server_round: int, rule: str
) -> tuple[PseudoState, dict[str, NamedArrays], list[float]]:
    """This round's pseudo-gradients, joined by the last ones of absent units where the rule counts these; their ages.

    Under ``staleness-weighted`` the last Δ of a unit that is absent, or whose reply came too late, stands in for it, as
    in MIFA (Gu et al., NeurIPS 2021), for :data:`PATIENCE` rounds.
    """
    updates = {site: dict(answer.parameters) for site, answer in answers.items()}
    if rule != "staleness-weighted":
        return state, updates, [0.0] * len(updates)
    late = {site: kept for site, kept in state.late.items() if server_round - kept.round <= PATIENCE}
    late |= {site: Late(update, server_round) for site, update in updates.items()}
    updates = {site: dict(kept.update) for site, kept in sorted(late.items())}
    return replace(state, late=late), updates, [float(server_round - late[site].round) for site in updates]


def signals_of(options: FedMGPOptions, fits: Sequence[float], staleness: Sequence[float]) -> Signals:
    """What a rule may know beside the pseudo-gradients."""
    shares = np.full(len(fits), 1 / len(fits))
    numbers = options.trim, options.malicious, options.select
    return Signals(shares, np.array(fits), np.array(staleness), *numbers)


def step(
    state: PseudoState, updates: Mapping[str, NamedArrays], signals: Signals, options: FedMGPOptions
) -> tuple[PseudoState, dict[str, float]]:
    """θ ← θ − Δ with the merged pseudo-gradient; also the weight of every unit.

    Raises:
        ConfigError: the rule cannot work with these updates.
        NumericsError: the step would leave the numbers that a model can have.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if PRECISION in state.parameters:
            moved = 1 - (1 - options.natural_step) ** options.local_steps
            merged, weights = merge_natural(options.aggregation, state.parameters, updates, signals, moved)
        else:
            merged, weights = aggregate(options.aggregation, list(updates.values()), signals)
        after = replace(state, parameters={name: p - merged[name] for name, p in state.parameters.items()})
        latents, q = from_parameters(after.parameters, state.inducing, state.jitter)
        usable = [*after.parameters.values(), latents.scales, q.covariance]
        if not (all(np.isfinite(array).all() for array in usable) and np.all(latents.scales > 0)):
            raise NumericsError(
                "the merged pseudo-gradient leads to parameters that are not finite: a unit sent far too much. Set "
                "`fedmgp.aggregation` to a rule that bounds every unit, as 'norm-clipped'"
            )
    return after, {site: float(weight) for site, weight in zip(updates, weights, strict=True)}


def noted(
    state: PseudoState, answers: Mapping[str, PseudoGradient], weights: Mapping[str, float], server_round: int
) -> PseudoState:
    """Who answered, and what the report shows."""
    notice_fresh((site for site, answer in answers.items() if float(answer.fresh)), state.reports)
    flat = {site: float(answer.flat) for site, answer in answers.items() if answer.flat is not None}
    reports = {**state.reports, **dict.fromkeys(answers, server_round)}
    return replace(state, reports=reports, record=state.record.after(weights, flat))


class FedMGP(SharedLatents[PseudoState]):
    """Algorithm 2 of the paper, for any likelihood and mini-batches."""

    method = "fedmgp"
    state_class = PseudoState

    def _set(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None) -> None:
        super()._set(config, observer, snapshot)
        rules = (*RULES, AGREEMENT)
        if self.options.aggregation not in rules:
            raise ConfigError(f"`fedmgp.aggregation` = {self.options.aggregation!r}; allowed: {', '.join(rules)}")

    @property
    def rounds(self) -> int:
        """Rounds over which the learning rate falls: fewer than planned where the objective was flat early."""
        planned, flat = self.config.num_server_rounds, self.course.flat_from
        return planned if flat is None else min(planned, math.ceil(flat / WATCHED))

    def watching(self) -> bool:
        """As long as steps are long enough to raise the objective."""
        return self.round <= WATCHED * self.config.num_server_rounds

    def converged(self, state: PseudoState) -> bool:
        """Whether the objective was flat before the learning rate had fallen."""
        del state
        return self.course.flat_from is not None

    def finished(self, state: PseudoState) -> bool:
        """Whether the objective was flat and the learning rate has come down since."""
        return self.converged(state) and self.round >= self.rounds

    def initialise(self, roster: Roster) -> Asking[PseudoState]:
        """Pseudo-inputs from where inputs lie, lengthscales from their spacing, q(u) from one unit."""
        inducing = yield from first_inducing(self.config, roster)
        latents = latents_at(inducing, self.options.multiples, self.config.model.jitter)
        q = yield from first_posterior(latents, roster)
        return begin(latents, q, gaussian=self.config.model.likelihood == "gaussian")

    def one_round(self, state: PseudoState, roster: Roster) -> Asking[tuple[PseudoState, Figures]]:
        """Algorithm 2."""
        rows = self.preparation.rows
        return (
            yield from one_round(
                state, roster, PseudoPlan(self.options, self.config, len(rows), rows, max(self.rounds, 1))
            )
        )

    def public(self, state: PseudoState) -> NamedArrays:
        """θ."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: PseudoState, arrays: NamedArrays) -> PseudoState:
        """Another θ, the same memory."""
        return replace(state, parameters={name.removeprefix("values."): array for name, array in arrays.items()})
