"""FedMGP by pseudo-gradients: Algorithm 2 of Chung and Al Kontar, Technometrics 66 (2024).

θ = {S, q(u), W if learned} is shared, in the coordinates that units optimise: log S, mean and Cholesky factor of each
q(u_i). In a round sampled units take local steps on (θ, φ_m) and send Δ_m = θ − θ_m; the server merges these by a rule
of :mod:`strategies.server.aggregators`, which needs each of them unless it is the mean, and steps: θ ← θ − η v with
v ← β v + Δ, or by Flower's Adam (Reddi et al., *Adaptive federated optimization*, ICLR 2021). φ_m stays at its unit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from flwr.serverapp.strategy import FedAdam
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import ConfigError, NumericsError, RunError
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fedmgp.latents import (
    FACTOR,
    INDUCING,
    MEAN,
    SCALES,
    Latents,
    Posterior,
    from_parameters,
    product_factors,
)
from fedgp_flower.methods.fedmgp.messages import Broadcast, Known, PseudoGradient, PseudoGradientSum
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.fedmgp_shared import (
    EVERYONE,
    Plan,
    Record,
    Shared,
    SharedLatents,
    first_inducing,
    first_posterior,
    latents_at,
    notice_fresh,
    still,
)
from strategies.server.aggregators import Signals, aggregate, least_sites
from strategies.server.fedavg import applied, sampled
from strategies.server.questions import Asking, Each, Figures, Roster, Summed, Total

logger = logging.getLogger("fedgp")

WATCHED = 0.1
"""Share of the first learning rate below which a flat objective says nothing: short steps raise it little."""


@message()
class Late:
    """The latest pseudo-gradient of a unit, and the round that it belongs to."""

    update: Mapping[str, AnyShape]
    round: int


@message()
class PseudoState:
    """θ, what the server's optimiser remembers, and the latest pseudo-gradient of units where a rule wants it."""

    parameters: Mapping[str, AnyShape]
    velocity: Mapping[str, AnyShape]
    """v of the momentum; with Adam the running mean of −Δ, in Flower's sign."""
    squares: Mapping[str, AnyShape]
    """Adam's running mean of Δ²."""
    steps: int
    """Adam's steps so far."""
    late: Mapping[str, Late]
    inducing: Float[ndarray, "J D"]
    """W at the start."""
    jitter: float
    reports: Mapping[str, int]
    """Round in which a unit last answered."""
    record: Record

    answer: ClassVar[type[PseudoGradient]] = PseudoGradient

    @property
    def shared(self) -> Shared:
        """Latent functions and q(u) at θ."""
        return Shared(*from_parameters(self.as_factors(), self.inducing, self.jitter))

    def as_factors(self) -> Mapping[str, ndarray]:
        """θ with each q(u_i) as mean and Cholesky factor.

        Raises:
            NumericsError: there is none.
        """
        return self.parameters

    @property
    def bounds(self) -> tuple[float | None, list[float | None]]:
        """None: pseudo-gradients have no pooled bound."""
        return None, []

    def merged(
        self, updates: Mapping[str, NamedArrays], signals: Signals, options: FedMGPOptions
    ) -> tuple[NamedArrays, Array]:
        """Δ and the weight of every unit, by the rule of the configuration."""
        return aggregate(options.aggregation, list(updates.values()), signals)

    def known(self, site: str) -> Known:
        """When the unit last answered; its parameters stay as they are. The units of a sum are all sent the same."""
        key = EVERYONE if EVERYONE in self.reports else site
        return Known(0, self.reports.get(key, 0), still(self.parameters[SCALES].shape))


def begin(latents: Latents, q: Posterior, *, learn_inducing: bool) -> PseudoState:
    """θ at shared latent functions with unit amplitudes; a joint q(u) becomes the nearest product over functions."""
    shape = len(latents.scales), len(latents.inducing)
    factors = product_factors(q, shape[0])
    parameters = {SCALES: np.log(latents.scales), MEAN: q.mean.reshape(shape), FACTOR: factors}
    if learn_inducing:
        parameters[INDUCING] = latents.inducing
    zeros = {name: np.zeros_like(array) for name, array in parameters.items()}
    return PseudoState(parameters, zeros, {}, 0, {}, latents.inducing, latents.jitter, {}, Record((), {}))


def initialise(roster: Roster, plan: Plan) -> Asking[PseudoState]:
    """θ at pseudo-inputs from where inputs lie, lengthscales from their spacing, and q(u) of one unit."""
    inducing = yield from first_inducing(plan, roster)
    latents = latents_at(inducing, plan.options.multiples, plan.config.model.jitter)
    q = yield from first_posterior(latents, roster)
    return begin(latents, q, learn_inducing=plan.options.learn_inducing)


def one_round(state: PseudoState, roster: Roster, plan: Plan) -> Asking[tuple[PseudoState, Figures]]:
    """A round of Algorithm 2."""
    options = plan.options
    chosen = sampled(roster, options.fraction, plan.config.seed)  # units that take part, max(⌈ρM⌉, 1)
    require_enough(plan, len(chosen))
    answers, rows, p = yield from (of_all if roster.totals_only else of_each)(state, chosen, roster.round, plan)
    state, updates, staleness = with_late(state, answers, roster.round, plan)
    fits = {site: own.fit for site, own in answers.items()}
    weights: dict[str, float] = {}
    if updates:
        signals = signals_of(plan, [p[site] for site in updates], [fits.get(s, 0.0) for s in updates], staleness)
        try:
            state, weights = merge(state, updates, signals, plan)  # Δ, then θ ← θ − ηv
        except (ConfigError, NumericsError) as error:
            logger.warning("the round changes nothing: %s", error)
    state = noted(state, answers, weights, roster.round)
    if not answers:
        return state, {}
    return state, {"objective": sum(rows[s] * fit for s, fit in fits.items()) / max(sum(rows[s] for s in fits), 1)}


Answered: TypeAlias = tuple[Mapping[str, PseudoGradient], Mapping[str, int], Mapping[str, float]]
"""Pseudo-gradients, the rows behind them, and their weights."""


def of_each(state: PseudoState, chosen: Sequence[str], server_round: int, plan: Plan) -> Asking[Answered]:
    """Δ_m = θ − θ_m of every unit that answers."""
    rate, whole = local_rate(plan, server_round), whole_of(plan)
    requests = {site: Broadcast(state.parameters, state.inducing, state.known(site), rate, whole) for site in chosen}
    answers: Mapping[str, PseudoGradient] = yield Each(state.answer, requests)
    return answers, plan.rows, shares(plan)


def of_all(state: PseudoState, chosen: Sequence[str], server_round: int, plan: Plan) -> Asking[Answered]:
    """Σ p_m Δ_m / Σ p_m, as if it came from one unit."""
    rate = local_rate(plan, server_round)
    request = Broadcast(state.parameters, state.inducing, state.known(EVERYONE), rate, whole_of(plan))
    summed: Summed[PseudoGradientSum] = yield Total(PseudoGradientSum, request, tuple(chosen))
    if summed.total is None:
        return {}, {}, {}
    mean = summed.total.mean(len(summed.sites) - summed.silent)
    if plan.config.model.likelihood != "gaussian":
        mean = replace(mean, flat=None)
    return {EVERYONE: mean}, {EVERYONE: int(summed.total.rows)}, {EVERYONE: 1.0}


def require_enough(plan: Plan, asked: int) -> None:
    """With fewer units than a rule needs no round could ever change anything.

    Raises:
        RunError: fewer units are asked.
    """
    options = plan.options
    least = least_sites(options.aggregation, options.malicious)
    if asked < least:
        raise RunError(
            f"`fedmgp.aggregation` = {options.aggregation!r} with `fedmgp.malicious` = {options.malicious} needs "
            f"{least} units in a round (2f + 3), {asked} can be asked. Lower `fedmgp.malicious`, raise "
            "`fedmgp.fraction`, or take another rule"
        )


def local_rate(plan: Plan, server_round: int) -> float:
    """Learning rate of the local steps, from ``optimizer.learning-rate`` down to ``final-rate`` of it."""
    options, optimizer = plan.options, plan.config.optimizer
    part = (server_round - 1) / max(plan.pseudo_rounds - 1, 1)
    rate = optimizer.learning_rate * optimizer.decay ** (server_round - 1)
    return float(rate * options.final_rate ** min(part, 1.0))


def whole_of(plan: Plan) -> float:
    """M, or Σ N_m, over all units that are known."""
    return float(len(plan.rows) if plan.options.weights == "equal" else sum(plan.rows.values()))


def shares(plan: Plan) -> dict[str, float]:
    """Weights p_m, over all units that are known."""
    equal, whole = plan.options.weights == "equal", whole_of(plan)
    return {site: (1 if equal else count) / whole for site, count in plan.rows.items()}


def with_late(
    state: PseudoState, answers: Mapping[str, PseudoGradient], server_round: int, plan: Plan
) -> tuple[PseudoState, dict[str, NamedArrays], list[float]]:
    """This round's pseudo-gradients, joined by the last ones of absent units where the rule counts these; their ages.

    A unit that is absent, or whose reply came after the timeout, is stood in for by what it sent last, again in every
    round, as in MIFA (Gu et al., NeurIPS 2021). A stand-in more than ``patience`` rounds old is forgotten.
    """
    updates = {site: dict(own.parameters) for site, own in answers.items()}
    if plan.options.aggregation != "staleness-weighted":
        return state, updates, [0.0] * len(updates)
    late = {site: own for site, own in state.late.items() if server_round - own.round <= plan.options.patience}
    late |= {site: Late(update, server_round) for site, update in updates.items()}
    updates = {site: dict(own.update) for site, own in sorted(late.items())}
    return replace(state, late=late), updates, [float(server_round - late[site].round) for site in updates]


def signals_of(plan: Plan, weights: list[float], fits: list[float], staleness: list[float]) -> Signals:
    """What a rule may know beside the pseudo-gradients."""
    options, p = plan.options, np.array(weights)
    return Signals(
        shares=p / p.sum(),
        log_likelihoods=np.array(fits),
        staleness=np.array(staleness),
        threshold=options.clip_norm,
        quantile=options.clip_quantile,
        trim=options.trim,
        malicious=options.malicious,
        select=options.select,
        decay=options.staleness_decay,
    )


def merge(
    state: PseudoState, updates: Mapping[str, NamedArrays], signals: Signals, plan: Plan
) -> tuple[PseudoState, dict[str, float]]:
    """θ after a step along the merged pseudo-gradient; also the weight of every unit.

    Raises:
        ConfigError: the rule cannot work with these updates.
        NumericsError: the step would leave the numbers that a model can have.
    """
    options = plan.options
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        merged, weights = state.merged(updates, signals, options)
        if options.server_optimizer == "fedadam":
            moved = adam(state, merged, size=options.server_step)
        else:
            moved = step(state, merged, size=options.server_step, momentum=options.server_momentum)
        _require_usable(moved)
    return moved, {site: float(weight) for site, weight in zip(updates, weights, strict=True)}


def step(state: PseudoState, update: Mapping[str, Array], *, size: float, momentum: float) -> PseudoState:
    """V ← βv + Δ, θ ← θ − ηv."""
    velocity = {name: momentum * v + update[name] for name, v in state.velocity.items()}
    parameters = {name: p - size * velocity[name] for name, p in state.parameters.items()}
    return replace(state, parameters=parameters, velocity=velocity)


def adam(state: PseudoState, update: Mapping[str, Array], *, size: float) -> PseudoState:
    """One step of Flower's FedAdam on the merged Δ, at β = (0.9, 0.99), τ = 10⁻³ and rate ``size``.

    Flower counts rounds from 0, so that with the number of steps before this one its bias correction is that of Adam.
    """
    target = {name: p - update[name] for name, p in state.parameters.items()}
    start = state.parameters, {"m_t": state.velocity, "v_t": state.squares}
    parameters, moments = applied(FedAdam(eta=size), start, [(target, 1)], state.steps)
    velocity, squares = moments["m_t"], moments["v_t"]
    return replace(state, parameters=parameters, velocity=velocity, squares=squares, steps=state.steps + 1)


def _require_usable(state: PseudoState) -> None:
    """θ, q(u), lengthscales and what the optimiser remembers are finite; a squared lengthscale is not 0."""
    scales, factors = np.exp(state.parameters[SCALES]), state.as_factors()[FACTOR]
    held = [*state.parameters.values(), *state.velocity.values(), *state.squares.values()]
    finite = all(np.isfinite(array).all() for array in [*held, scales, factors @ np.swapaxes(factors, 1, 2)])
    if not (finite and np.all(scales > 0)):
        raise NumericsError(
            "the merged pseudo-gradient leads to parameters that are not finite: a unit sent far too much. Lower "
            "`fedmgp.server-step`, or set `fedmgp.aggregation` to a rule that bounds every unit, as 'norm-clipped'"
        )


def noted(
    state: PseudoState, answers: Mapping[str, PseudoGradient], weights: Mapping[str, float], server_round: int
) -> PseudoState:
    """Who answered, and what the report shows."""
    notice_fresh((site for site, own in answers.items() if float(own.fresh)), state.reports)
    flat = {site: float(own.flat) for site, own in answers.items() if own.flat is not None}
    reports = {**state.reports, **dict.fromkeys(answers, server_round)}
    return replace(state, reports=reports, record=state.record.after(weights, flat))


S = TypeVar("S")


class PseudoGradients(SharedLatents[S]):
    """The base of runs of pseudo-gradients: once the objective is flat, their learning rate soon comes to its end."""

    @property
    def watched_share(self) -> float:
        """Share of the rounds after which the learning rate has fallen to :data:`WATCHED` of the first."""
        return min(1.0, math.log(WATCHED) / min(math.log(self.options.final_rate), -1e-9))

    @property
    def plan(self) -> Plan:
        """The same, shortened where the objective was flat early."""
        plan, flat = super().plan, self.course.flat_from
        if flat is None:
            return plan
        return replace(plan, shortened=min(plan.pseudo_rounds, math.ceil(flat / self.watched_share)))

    def watching(self) -> bool:
        """As long as steps are long enough to raise the objective."""
        return self.round <= self.watched_share * super().plan.pseudo_rounds

    def converged(self, state: S) -> bool:
        """Whether the objective was flat before the learning rate had fallen."""
        del state
        return self.course.flat_from is not None


class FedMGP(PseudoGradients[PseudoState]):
    """Algorithm 2 of the paper, for any likelihood and mini-batches."""

    state_class = PseudoState
    implied: ClassVar[Mapping[str, Any]] = {"update": "pseudo-gradient", "final_rounds": 0}

    def phase(self, state: PseudoState) -> PseudoState:
        """All of it."""
        return state

    def initialise(self, roster: Roster) -> Asking[PseudoState]:
        """Pseudo-inputs from where inputs lie, lengthscales from their spacing, q(u) from one unit."""
        return (yield from initialise(roster, self.plan))

    def one_round(self, state: PseudoState, roster: Roster) -> Asking[tuple[PseudoState, Figures]]:
        """Algorithm 2."""
        return (yield from one_round(state, roster, self.plan))

    def finished(self, state: PseudoState) -> bool:
        """Whether the objective was flat and the learning rate has come down since."""
        return self.converged(state) and self.round >= self.plan.pseudo_rounds

    def public(self, state: PseudoState) -> NamedArrays:
        """θ."""
        return encode(Parameters(state.parameters))

    def adopt(self, state: PseudoState, arrays: NamedArrays) -> PseudoState:
        """Another θ, the same memory."""
        return replace(state, parameters={name.removeprefix("values."): array for name, array in arrays.items()})
