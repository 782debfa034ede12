"""What the Strategies of FedMGP share: where a run starts, what a unit is sent, and what a run leaves.

Chung and Al Kontar, *Federated multi-output Gaussian processes*, Technometrics 66 (2024). Units are smoothed, scaled
views of shared latent functions g; what a unit alone knows, φ_m = {R_m, s_m, σ_m}, never leaves it.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fedmgp.exact_q import posterior
from fedgp_flower.methods.fedmgp.latents import Latents, Move, Posterior, grid_side, spacing
from fedgp_flower.methods.fedmgp.messages import (
    PSEUDO_INPUTS,
    AlignedStatistics,
    Curve,
    CurveRequest,
    Directions,
    FirstStatistics,
    Known,
    Towards,
    View,
)
from fedgp_flower.methods.fedmgp.options import AGREEMENT, FedMGPOptions
from fedgp_flower.methods.fedmgp.trust import best_lead
from fedgp_flower.methods.messages import Shape
from fedgp_flower.outcome import Observer, Snapshot
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import Array, NamedArrays
from strategies.server import finalise
from strategies.server.aggregators import RULES
from strategies.server.enrolment import Preparation
from strategies.server.questions import Asking, Each, Refuse, Roster, Summed, Total
from strategies.server.shapes import initial_locations, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

EVERYONE = ""
"""Stands for the units of a sum; no site has this id."""
LEADS = 20
"""Units that are asked for a first look at g, those with most rows: pairs of them are compared."""
LEAST_SIDE = 3
"""Fewest points of a grid along an input."""
MOST_CURVES, CURVE_POINTS = 12, 161
"""Units whose curves are drawn, and points of a curve."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a round goes."""

    config: RunConfig
    rows: Mapping[str, int]
    """Training rows of every unit that was ever known."""
    shortened: int = 0
    """Rounds of pseudo-gradients, where fewer than planned are enough; 0: as planned."""

    @property
    def pseudo_rounds(self) -> int:
        """Rounds of pseudo-gradients, over which their learning rate falls."""
        return self.shortened or self.config.num_server_rounds - self.options.final_rounds

    @property
    def options(self) -> FedMGPOptions:
        """The table ``fedmgp.*``."""
        return cast(FedMGPOptions, self.config.options)

    @property
    def agreement(self) -> bool:
        """Whether exact rounds count only units that share g with most others."""
        return self.options.aggregation not in ("mean", "sum", "staleness-weighted")


@message()
class Record:
    """What the report shows of the rounds so far."""

    weights: tuple[Mapping[str, float], ...]
    """By round, the weight of every unit in it."""
    flat: Mapping[str, float]
    """1 for a unit whose signal noise explains nearly all of, as it last said."""

    def after(self, weights: Mapping[str, float], flat: Mapping[str, float]) -> Record:
        """With one more round."""
        return Record((*self.weights, weights), {**self.flat, **flat})


@message()
class Shared:
    """All that units share: latent functions and q(u)."""

    latents: Latents
    posterior: Posterior


class Phase(Protocol):
    """What every kind of round leaves."""

    @property
    def shared(self) -> Shared:
        """Latent functions and q(u) now."""

    @property
    def record(self) -> Record:
        """What the report shows."""

    @property
    def bounds(self) -> tuple[float | None, list[float | None]]:
        """The pooled bound, and that of every start; None where a round has none."""

    def known(self, site: str) -> Known:
        """What the server knows of a unit's memory."""


S = TypeVar("S")


# Where a run starts.


def scaled(preparation: Preparation, config: RunConfig, options: FedMGPOptions) -> Preparation:
    """Targets divided by their root mean square, and not centred: units scale g, and would scale a common offset."""
    arrays = preparation.arrays
    if options.center_target or config.model.likelihood not in ("gaussian", "student-t") or not config.standardise:
        return preparation
    power = math.hypot(float(arrays["target.mean"]), float(arrays["target.scale"]))
    return replace(preparation, arrays={**arrays, "target.mean": np.array(0.0), "target.scale": np.array(power)})


def pseudo_inputs(plan: Plan, answers: Mapping[str, Shape]) -> Array:
    """Pseudo-inputs W [J, D] from the pooled histograms of the standardised inputs; no site sends a row.

    Raises:
        RunError: a grid was asked for and would have fewer than three points along an input.
    """
    options, count = plan.options, plan.config.model.num_inducing
    histogram = np.sum([own.histogram for own in answers.values()], axis=0)
    if histogram[:, [0, -1]].any():
        logger.warning(
            "some inputs are more than %g standard deviations from their mean; pseudo-inputs end there. Transform them",
            INPUT_EDGES[-1],
        )
    side = grid_side(count, len(histogram))
    if options.pseudo_inputs == "grid":
        require_grid(count, len(histogram), "or set `fedmgp.pseudo-inputs` to 'scattered'")
    if options.pseudo_inputs == "auto" and side < LEAST_SIDE:
        logger.info("%d pseudo-inputs make no grid over %d inputs; they are scattered", count, len(histogram))
    elif options.pseudo_inputs != "scattered":
        axes = [_axis(counts, side, options.margin) for counts in histogram]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(histogram))
    return initial_locations(answers, plan.config.model, plan.config.seed)


def require_grid(count: int, dims: int, otherwise: str) -> None:
    """A grid needs three points along every input.

    Raises:
        RunError: there are too few; ``otherwise`` says what to do but to raise their number.
    """
    side = grid_side(count, dims)
    if side < LEAST_SIDE:
        raise RunError(
            f"`model.num-inducing` = {count} makes a grid of {side} point(s) along each of {dims} inputs, {LEAST_SIDE} "
            f"are needed; raise it to {LEAST_SIDE**dims}, {otherwise}"
        )


def _axis(counts: Array, side: int, margin: float) -> Array:
    """Evenly spaced points from the first to the last bin that holds a row, and beyond by the margin."""
    filled = np.flatnonzero(counts)
    low, high = INPUT_EDGES[filled[0]], INPUT_EDGES[filled[-1] + 1]
    beyond = margin * (high - low)
    return np.linspace(low - beyond, high + beyond, side)


def first_inducing(plan: Plan, roster: Roster) -> Asking[Array]:
    """Pseudo-inputs from where inputs lie, with noise where the configuration wants to know how much they matter."""
    inducing = pseudo_inputs(plan, (yield from shapes_of_inputs(roster)))
    if plan.options.perturbation:
        rng = np.random.default_rng([plan.config.seed, roster.round, *b"pseudo-inputs"])
        inducing = inducing + plan.options.perturbation * rng.standard_normal(inducing.shape)
    return inducing


def latents_at(inducing: Array, multiples: list[float], jitter: float) -> Latents:
    """Lengthscales = spacing of the pseudo-inputs times one multiple per latent function; no data needed.

    A start that is too long is what makes the model collapse to a flat g.
    """
    scales = np.outer(np.square(multiples), spacing(inducing) ** 2)
    return Latents(inducing, scales, np.ones(len(multiples)), jitter)


def first_posterior(latents: Latents, roster: Roster) -> Asking[Posterior]:
    """q(u) of the unit that shares g with most others; these then find their signs by regression on it.

    Units are compared in pairs, so that this needs their individual statistics; where there are totals only, it is
    :func:`aligned_posterior`.

    Raises:
        RunError: no unit sent statistics that rows can produce.
    """
    if roster.totals_only:
        return (yield from aligned_posterior(latents))
    asked = sorted(roster.sites, key=lambda site: -roster.rows[site])[:LEADS]
    answers = yield Each(FirstStatistics, dict.fromkeys(asked, latents), retries=1)
    starts = {site: own.statistics for site, own in answers.items()}
    for site, own in answers.items():
        if own.statistics.shift.size != latents.size or own.statistics.slack.shape != latents.amplitudes.shape:
            yield Refuse(site, f"statistics of {own.statistics.shift.size} whitened values, expected {latents.size}")
            del starts[site]
    if not starts:
        raise RunError("no unit sent statistics to start from; see the failures above")
    return posterior(starts[best_lead(starts)])


def aligned_posterior(latents: Latents) -> Asking[Posterior]:
    """q(u) of a typical unit, from two totals: first the direction d that most units share, then sums along it.

    A unit knows g up to a sign, which Σ m mᵀ does not see: d is its first eigenvector. Each unit then answers for y or
    −y, as its m points along d or away from it, and q(u) is that of the mean of these statistics.

    Raises:
        RunError: no unit answered.
    """
    pointed: Summed[Directions] = yield Total(Directions, latents)
    if pointed.total is None:
        raise RunError("no unit sent statistics to start from; see the failures above")
    direction = np.linalg.eigh(pointed.total.outer)[1][:, -1]
    direction = direction * math.copysign(1.0, direction[np.abs(direction).argmax()])
    summed: Summed[AlignedStatistics] = yield Total(AlignedStatistics, Towards(latents, direction))
    if summed.total is None:
        raise RunError("no unit sent statistics to start from; see the failures above")
    own, units = summed.total.statistics, len(summed.sites) - summed.silent
    return posterior(replace(own, precision=own.precision / units, shift=own.shift / units))


# What a unit is sent.


def still(shape: tuple[int, ...]) -> Move:
    """The move after which parameters are as they were, before a unit has a report."""
    return Move(np.zeros(shape), 1.0, "gain")


def view(phase: Phase, site: str) -> View:
    """What a unit sees: with what it alone knows, all that predicts."""
    return View(phase.shared.latents, phase.shared.posterior, phase.known(site))


def notice_fresh(fresh: Iterable[str], reports: Mapping[str, int]) -> None:
    """Say which sites go on without the memory that the server knows of."""
    for site in fresh:
        if reports.get(site):
            logger.warning("site %s lost its memory and starts afresh; its earlier report is replaced", site)


# What a run leaves.

EQUATION = (
    "g_i ~ GP(0, a_i² exp(−½ (w − w')ᵀ S_i⁻¹ (w − w'))) with values a_i L_i u_i at the pseudo-inputs W, where "
    "L_i L_iᵀ = exp(−½ (W − W')ᵀ S_i⁻¹ (W − W')) + jitter · I, and u = (u_1, …, u_I) ~ N(posterior.mean, "
    "posterior.covariance). latents.mean and latents.covariance are those of the values. A unit's output is "
    "Σ_i s_i (g_i smoothed by N(0, R_i)) + noise; s, R and the noise stay at the unit. Inputs and targets are "
    "standardised by input.mean, input.scale, target.mean, target.scale."
)
MEANINGS = {
    "latents.inducing": "W, pseudo-inputs",
    "latents.scales": "S, squared lengthscales of each latent function",
    "latents.amplitudes": "a, amplitude of each latent function",
    "latents.mean": "mean of g at the pseudo-inputs, function by function",
    "latents.covariance": "covariance of g at the pseudo-inputs",
    "posterior.mean": "m, mean of the whitened values u",
    "posterior.covariance": "V, covariance of the whitened values u",
}


def is_flat(flat: Mapping[str, float]) -> bool:
    """Whether the model collapsed: in most units noise explains nearly all of the signal."""
    return bool(flat) and float(np.median(list(flat.values()))) > 0.5


class SharedLatents(FederatedStrategy[S]):
    """The base of the Strategies of FedMGP, which differ in their rounds."""

    method = "fedmgp"
    options_class = FedMGPOptions
    watched = "objective"
    options: FedMGPOptions

    def _set(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None) -> None:
        super()._set(config, observer, snapshot)
        rules = (*RULES, AGREEMENT)
        if not self.options.exact(config) and self.options.aggregation not in rules:
            raise ConfigError(f"`fedmgp.aggregation` = {self.options.aggregation!r}; allowed: {', '.join(rules)}")

    @property
    def plan(self) -> Plan:
        """How a round goes."""
        return Plan(self.config, self.preparation.rows)

    @abstractmethod
    def phase(self, state: S) -> Phase:
        """The part of the state that holds latent functions and q(u) now."""

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Targets are divided by their root mean square, and not centred."""
        return scaled(preparation, self.config, self.options)

    def constants(self, state: S) -> NamedArrays:
        """Pseudo-inputs as they are, for the pooled baseline; a run whose sites are real has none."""
        wanted = self.preparation.simulated and self.config.baselines.pooled
        return {PSEUDO_INPUTS: self.phase(state).shared.latents.inducing} if wanted else {}

    def predictive(self, state: S, roster: Roster) -> Asking[Any]:
        """Each unit has its own view, but for totals."""
        yield from ()
        phase = self.phase(state)
        return view(phase, EVERYONE) if roster.totals_only else {site: view(phase, site) for site in roster.everyone}

    def public(self, state: S) -> NamedArrays:
        """Latent functions and q(u)."""
        return encode(self.phase(state).shared)

    def posterior_of(self, state: S) -> finalise.Posterior:
        """The saved posterior of g. It predicts no unit: that takes what the unit alone knows."""
        phase = self.phase(state)
        latents, q = phase.shared.latents, phase.shared.posterior
        mean, covariance = q.of_latents(latents)
        arrays = {name: array for name, array in encode(phase.shared).items() if name in MEANINGS}
        arrays |= {"latents.mean": mean, "latents.covariance": covariance}
        whitened = {name: "whitened" for name in arrays if name.startswith("posterior.")}
        known = {site: phase.known(site).written() for site in self.preparation.rows}  # which φ_m a unit predicts with
        model = {"family": "shared-latents", "kernel": "rbf", "jitter": latents.jitter, "known": known}
        return finalise.Posterior(arrays, MEANINGS, dict.fromkeys(arrays, "standardised") | whitened, EQUATION, model)

    def details_of(self, state: S) -> dict[str, Any]:
        """Bound, lengthscales, collapse, weights by round, and latent functions of one input."""
        phase, arrays = self.phase(state), self.preparation.arrays
        latents, record = phase.shared.latents, phase.record
        if is_flat(record.flat):
            logger.warning(
                "the model collapsed: in most units the noise explains the signal; lower `fedmgp.start-multiple`"
            )
        elif self.worse_than_alone:
            logger.warning(
                "the model collapsed: held-out errors are larger than those of units that fit a GP of their own; try"
                " more `fedmgp.starts`, `fedmgp.latents` or `model.num-inducing`"
            )
        bound, bounds = phase.bounds
        functions: list[dict[str, list[float]]] = []
        if latents.inducing.shape[1] == 1:
            mean, covariance = phase.shared.posterior.of_latents(latents)
            shape = len(latents.scales), len(latents.inducing)
            w = (latents.inducing[:, 0] * arrays["input.scale"][0] + arrays["input.mean"][0]).tolist()
            parts = zip(mean.reshape(shape), np.sqrt(np.diag(covariance)).reshape(shape), strict=True)
            functions = [{"w": w, "mean": part.tolist(), "sd": sd.tolist()} for part, sd in parts]
        return {
            "update": "exact" if self.options.exact(self.config) else "pseudo-gradient",
            "bound": bound,
            "bounds_of_starts": bounds,
            "collapsed": is_flat(record.flat) or self.worse_than_alone,
            "flat_units": [site for site, share in record.flat.items() if share > 0.5],
            "lengthscales": (np.sqrt(latents.scales) * arrays["input.scale"]).tolist(),
            "weights": [dict(weights) for weights in record.weights],
            "latents": functions,
            "units": {},
        }

    @property
    def worse_than_alone(self) -> bool:
        """Whether the held-out error exceeds that of local-only, where both are known."""
        if self.evaluation is None or self.local_only is None or "rmse" not in self.evaluation["test"]:
            return False
        return bool(self.evaluation["test"]["rmse"] > self.local_only["rmse"])

    def final(self, state: S, roster: Roster) -> Asking[dict[str, Any]]:
        """Prediction along the one input, with and without the others, and rows, of the first simulated units."""
        phase = self.phase(state)
        inducing = phase.shared.latents.inducing
        return (yield from unit_curves(self, inducing, roster, lambda site, at: CurveRequest(view(phase, site), at)))


def unit_curves(
    strategy: FederatedStrategy[Any], inducing: Array, roster: Roster, request: Callable[[str, Array], object]
) -> Asking[dict[str, Any]]:
    """Curves of the first units of a simulation, as the report reads them; none where there are several inputs."""
    agreed, config = strategy.preparation, strategy.config
    shown = agreed.simulated and config.keep_predictions and config.model.likelihood == "gaussian"
    if not shown or roster.totals_only or inducing.shape[1] > 1:
        return {}
    grid = np.linspace(inducing.min(), inducing.max(), CURVE_POINTS)[:, None]
    requests = {site: request(site, grid) for site in roster.everyone[:MOST_CURVES]}
    answers: Mapping[str, Curve] = yield Each(Curve, requests)
    at = (grid[:, 0] * agreed.arrays["input.scale"][0] + agreed.arrays["input.mean"][0]).tolist()
    return {"units": {agreed.labels[site]: {"grid": at, **_lists(own)} for site, own in answers.items()}}


def _lists(curve: Curve) -> dict[str, list[float]]:
    """As the report reads it."""
    return {name.replace("alone_", "alone."): array.tolist() for name, array in vars(curve).items()}
