"""SGPR in few exchanges: a sparse GP of all rows from sums, first at few inducing points, then at as many as pay.

Each row keeps the variance that the inducing points leave of it as noise of its own (:mod:`fedgp_flower.gp.fitc`), so
that few points are enough to learn hyperparameters, rough ones too. The points stay where they were drawn: from the
sums of small cells of rows, with the values of each input, and the pairs of values of two inputs, that many rows have.

A round is a gradient and a step, two exchanges. The steps are those of BFGS. Its first curvature is the sum of what
sites know of their own rows, and the server alone scales kernel and noise. Rounds go on while a step promises a gain.
Then sums at a thousand points are asked for. Training goes on there where twice as many may follow, since few points
see little of a rough function. The number doubles while that pays, with a step where that pays as well. The server
keeps the fewest points that explain as much.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp.cells import VALUES, common_values, drawn, weight_of, with_pairs, with_values
from fedgp_flower.gp.fitc import WeightedSums, at_unit_scale, evidence
from fedgp_flower.gp.fitc import posterior as exact_posterior
from fedgp_flower.gp.kernels import amplitude_names, build_kernel
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.optimisers import pack, rounds_to_come, unpack
from fedgp_flower.gp.priors import hyperpriors, log_prior
from fedgp_flower.gp.sums import SparseSums, at_unit_noise
from fedgp_flower.lazy import special
from fedgp_flower.messages import encode, leaves, message
from fedgp_flower.methods.sgpr.messages import (
    Anchors,
    CommonValues,
    EvidenceGradient,
    PairCounts,
    PooledPosterior,
    Sketch,
    TrialSums,
    numbered,
)
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies import enlarging, pooled_bound
from strategies.pooled_bound import LOCATIONS, LOG_NOISE, Problem
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import points_like_inputs, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

SLOTS, DRAWS = 2048, 4
"""Anchors of the sketch, and points drawn from it for each that may be needed: some of them are equal."""
START_RANGE = (-1.0, 3.5)
"""Of log ℓ at the start."""
CAP = 1.0
"""Largest entry of a step; all are logarithms."""
NEWTON = 8
"""Steps towards the best scale, which begin close to it."""
SHORTER, SHORTEST = (0.1, 0.5), 1e-2
"""Limits of the factor of a step that did not raise the objective, and where shorter ones are given up."""
BEFORE, A_ROUND = 4, 2
"""Exchanges before training (descriptions, where inputs lie, the sketch, pairs of common values) and in a round."""
USUAL = 60
"""Exchanges where the configuration leaves them to the method, those at more inducing points among them."""
TOO_LITTLE = 0.001
"""Training ends where a step promises less than this, in nats a row, unless the number of exchanges is set."""
FIRST_SIZE = 1024
"""Inducing points that are asked for after training at few; doubled twice they fill the usual message."""
A_SIZE, ROUNDS = 3, 1
"""Exchanges for each number of inducing points after that, and rounds among them."""
WORK = 3
"""Work of a round: sums, and a gradient that takes as long as two sums."""
CHANCE, TELLING = 1e-3, 0.02
"""Noise varies by chance with this probability; nats a row from which on it is told."""
TOLERANCE = 1e-7
"""The ascent ends where a step promises less than this per row, relative to the size of the objective."""
CURVATURE = "the curvature that the ascent met, with that of each site's rows before (BFGS)"


@message()
class TotalSums(WeightedSums):
    """Totals at any number of inducing points."""

    gram: Float[ndarray, "Q Q"] = leaves("A", symmetric=True)
    projection: Float[ndarray, " Q"] = leaves("b")


@message()
class SGPRState:
    """A point on its way up, its totals, and whose rows these are of."""

    values: Mapping[str, AnyShape]
    """Parameters; with totals, at the best scale of kernel and noise."""
    places: Float[ndarray, "_ _"]
    """Where inputs lie [C, D]: inducing points are the first of them."""
    curvature: Float[ndarray, "_ _"]
    """About −∇²J by the logarithms [H, H]; positive definite."""
    totals: TotalSums | None = None
    """At ``values``, weighted; None before they are asked for."""
    height: float = 0.0
    """J, the log evidence and the log prior of the logarithms, in nats."""
    gradient: Float[ndarray, " _"] = field(default_factory=lambda: np.empty(0))
    """Of J at ``place`` [H]; empty before it is asked for."""
    place: Float[ndarray, " _"] = field(default_factory=lambda: np.empty(0))
    shrunk: float = 1.0
    """Factor of the next step."""
    sites: tuple[str, ...] = ()
    exchanges: int = BEFORE
    """With every site, those before training among them."""
    noise: Float[ndarray, "2 _"] = field(default_factory=lambda: np.empty((2, 0)))
    """Totals of Σ z t and Σ (z t)² at the latest gradient."""
    gains: Float[ndarray, " R"] = field(default_factory=lambda: np.empty(0))
    """Of J in the latest rounds, nats per row, the last one last."""
    converged: bool = False
    weight: float = 1.0
    """Of a row where rows are copies: sums of all sites count so much."""
    most: int = 0
    """Inducing points that the posterior may have; where they are no more than in training, it has these."""
    asked: int = 0
    """Points that sums were asked at after training."""
    rounds: int = 0
    """At this number of points after training."""

    @property
    def rows(self) -> float:
        """N, of the totals; 0 where they are not known."""
        return 0.0 if self.totals is None else float(self.totals.count)

    @property
    def point(self) -> Array:
        """The logarithms that are learned [H]."""
        return pack(logarithms(self.values))

    @property
    def curve(self) -> Array:
        """The evidence in nats a row at the first m inducing points for every m [M]."""
        assert self.totals is not None
        return evidence(self.totals).curve / self.rows

    @property
    def training(self) -> bool:
        """Whether training goes on: at few inducing points, and at the first size where twice as many may follow."""
        return not self.asked or self.asked == FIRST_SIZE <= self.most // 2

    @property
    def next_size(self) -> int:
        """How many inducing points are asked for next after training; 0 where no more of them pay."""
        if not self.asked:
            return min(FIRST_SIZE, self.most) if self.most > len(self.values[LOCATIONS]) else 0
        room = self.most > self.asked and enlarging.promised(self.curve) >= enlarging.PAYS
        return min(2 * self.asked, self.most) if room else 0

    def step(self) -> Array:
        """The next step [H], by BFGS."""
        step = np.linalg.solve(self.curvature, self.gradient)
        return self.shrunk * step / max(1.0, float(np.abs(step).max()) / CAP)

    def promise(self) -> float:
        """Nats a row that a step would bring where J is as curved as it was."""
        return float(self.gradient @ np.linalg.solve(self.curvature, self.gradient)) / 2 / self.rows


def logarithms(values: Mapping[str, ndarray]) -> NamedArrays:
    """All parameters but the inducing points."""
    return {name: np.asarray(array) for name, array in values.items() if name != LOCATIONS}


def moved(values: Mapping[str, ndarray], step: Array) -> NamedArrays:
    """Parameters after a step, within their range."""
    found = unpack(pack(logarithms(values)) + step, logarithms(values))
    return {**values, **{name: np.asarray(np.clip(a, -LOG_RANGE, LOG_RANGE)) for name, a in found.items()}}


def at_best_scale(
    values: Mapping[str, ndarray], totals: WeightedSums, section: ModelSection
) -> tuple[NamedArrays, TotalSums, float]:
    """Parameters with kernel and noise at the scale where J is highest, the totals there, and J.

    J(τ²) = F(τ²) + log p, concave in t = log τ²: dJ/dt = ½ N (τ̂²/τ² − 1) − Σ (log θ + t − m)/sd², F highest at τ̂².
    """
    num_inputs = values[LOCATIONS].shape[1]
    names, priors = (*amplitude_names(section, num_inputs), LOG_NOISE), priors_of(section, num_inputs)
    pull = sum(float(np.sum((values[name] - priors[name][0]) / priors[name][1] ** 2)) for name in names)
    bend = sum(values[name].size / priors[name][1] ** 2 for name in names)
    best, half = math.log(evidence(totals).scale), float(totals.count) / 2
    log_scale = best
    for _ in range(NEWTON):
        left = half * math.exp(best - log_scale)
        log_scale += (left - half - pull - bend * log_scale) / (left + bend)
    scaled = {name: np.asarray(values[name] + log_scale) for name in names}
    values, sums = {**values, **scaled}, TotalSums(**vars(totals.scaled(math.exp(log_scale))))
    return values, sums, at_unit_scale(sums) + prior_of(values, section)[0]


def prior_of(values: Mapping[str, ndarray], section: ModelSection) -> tuple[float, NamedArrays]:
    """The log prior of the logarithms, and its slopes."""
    priors = priors_of(section, values[LOCATIONS].shape[1])
    slopes = {name: np.asarray((m - values[name]) / sd**2) for name, (m, sd) in priors.items()}
    return float(log_prior({name: torch.as_tensor(values[name]) for name in priors}, priors)), slopes


def priors_of(section: ModelSection, num_inputs: int) -> Mapping[str, tuple[float, float]]:
    """Mean and standard deviation of each logarithm."""
    return hyperpriors(build_kernel(section, num_inputs), num_inputs)


def start(problem: Problem, roster: Roster) -> Asking[SGPRState]:
    """Inducing points and hyperparameters from a sketch of all rows around points where inputs lie."""
    section, seed = problem.model, problem.seed
    shape = yield from shape_of_inputs(roster)
    anchors = points_like_inputs(shape, SLOTS, np.random.default_rng([seed, *b"anchors"]))
    num_inputs = anchors.shape[1]
    model = pooled_bound.empty_model(section, num_inputs)
    sizes = {"C": SLOTS, "H": pack(model).size, "B": VALUES}
    summed: Summed[Sketch] = yield Total(Sketch, Anchors(anchors), sizes=sizes)
    if summed.total is None:
        raise RunError("no site answered where its inputs lie; see the failures above")
    sketch, rng = summed.total, np.random.default_rng([seed, *b"inducing"])
    wanted = pooled_bound.inducing_points(section.num_inducing, roster, problem.small_sites)
    most = largest(problem, roster)
    draws = drawn(sketch.rows, sketch.first, sketch.second, DRAWS * max(wanted, most), rng)
    moved = with_values(draws, sketch.value_rows, sketch.value_sums)
    common = common_values(sketch.value_rows, sketch.value_sums)
    sizes = {"P": num_inputs * (num_inputs - 1) // 2, "V": common.shape[1]}
    pairs: Summed[PairCounts] = yield Total(PairCounts, CommonValues(common), sizes=sizes)
    if pairs.total is not None:
        moved = with_pairs(draws, moved, common, pairs.total.counts, float(sketch.rows.sum()))
    _, first = np.unique(moved, axis=0, return_index=True)
    places = moved[np.sort(first)][: max(wanted, most)]
    values, curvature = agreed(sketch, model, priors_of(section, num_inputs), len(summed.sites))
    values = {**values, LOCATIONS: places[:wanted]}
    logger.info("%d inducing points in training, %d after it at most", len(values[LOCATIONS]), len(places))
    weight = weight_of(sketch.repeats, float(sketch.rows.sum()))
    return SGPRState(values, places, curvature, weight=weight, most=min(most, len(places)))


def largest(problem: Problem, roster: Roster) -> int:
    """Inducing points that a message has room for, at most the number of rows and what the smallest site bears."""
    most = min(enlarging.most_points(problem.megabytes), sum(roster.rows.values()))
    capped = problem.small_sites != "warn" and not roster.totals_only
    return min(most, min(roster.rows.values()) // pooled_bound.ROWS_PER_POINT) if capped else most


def agreed(
    sketch: Sketch, like: Mapping[str, ndarray], priors: Mapping[str, tuple[float, float]], sites: int
) -> tuple[NamedArrays, Array]:
    """The mode (Σ H)⁻¹ Σ Hθ of all sites' fits together, and the curvature Σ H less all but one of their priors.

    Lengthscales are within :data:`START_RANGE`. No direction is less curved than the prior.
    """
    pieces = unpack(np.linalg.solve(sketch.precision, sketch.shift), like)
    found = {name: np.clip(a, *START_RANGE) if "lengthscale" in name else a for name, a in pieces.items()}
    sds = pack({name: np.full(array.shape, priors[name][1]) for name, array in like.items()})
    bends, axes = np.linalg.eigh(sketch.precision * np.outer(sds, sds) - (sites - 1) * np.eye(len(sds)))
    curvature = (axes * np.maximum(bends, 1.0)) @ axes.T / np.outer(sds, sds)
    return found, curvature


def one_round(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
    """A gradient where the point has moved, and a step; where steps promise too little, sums at more points."""
    if settled(problem, state) and state.rows:
        state = yield from enlarge(problem, state, roster.sites)
    else:
        if set(state.sites) != set(roster.sites) or not state.rows:
            state = yield from evaluate(problem, state, roster.sites)
        if state.rows and not np.array_equal(state.place, state.point):
            state = yield from differentiate(problem, state)
        if state.rows and not state.converged:
            state = yield from search(problem, state)
    if state.totals is None:
        return state, {}
    height = at_unit_scale(state.totals)
    figures = {"evidence": height, "objective": height / state.rows, "noise": pooled_bound.noise_of(state.values)}
    return state, figures | {"points": float(len(state.values[LOCATIONS]))}


def sums_at(
    problem: Problem, tried: list[NamedArrays], sites: tuple[str, ...], weight: float
) -> Asking[tuple[tuple[NamedArrays, TotalSums, float] | None, tuple[str, ...]]]:
    """The best of several parameters at its best scale, its weighted totals and J, and the sites that answered."""
    sizes = {"T": len(tried), "M": len(tried[0][LOCATIONS])}
    summed: Summed[TrialSums] = yield Total(TrialSums, Parameters(numbered(tried)), sites, sizes=sizes)
    if summed.total is None:
        return None, ()
    totals = [sums.weighted(weight) for sums in summed.total.each()]
    found = [at_best_scale(*at, problem.model) for at in zip(tried, totals, strict=True)]
    best = max(range(len(found)), key=lambda number: found[number][2])
    yield from doubts(problem.model, tried[best], {site: part.each()[best] for site, part in summed.parts.items()})
    return found[best], summed.sites


def doubts(section: ModelSection, values: Mapping[str, ndarray], parts: Mapping[str, WeightedSums]) -> Asking[None]:
    """Name the sites whose sums contradict the others': rows of noise 1 are y/√λ."""
    each = {
        site: SparseSums(sums.gram, sums.projection, sums.weighted_squares, np.zeros(()), sums.count)
        for site, sums in parts.items()
    }
    yield from pooled_bound.doubts(each, pooled_bound.level_of(SparseGP.from_arrays(section, values)), at_unit_noise)


def evaluate(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """Totals of these sites; before any also at the means of the prior, from where the ascent may start as well."""
    tried: list[NamedArrays] = [dict(state.values)]
    if state.exchanges == BEFORE:
        priors = priors_of(problem.model, state.places.shape[1])
        tried.append({n: np.full_like(a, priors[n][0]) if n in priors else a for n, a in state.values.items()})
    found, answered = yield from sums_at(problem, tried, sites, state.weight)
    state = replace(state, exchanges=state.exchanges + 1, converged=False)
    return state if found is None else arrived(state, found, answered)


def arrived(state: SGPRState, found: tuple[NamedArrays, TotalSums, float], sites: tuple[str, ...]) -> SGPRState:
    """At other parameters, where no gradient is known."""
    values, totals, height = found
    none = np.empty(0)
    return replace(
        state, values=values, totals=totals, height=height, gradient=none, place=none, sites=sites, shrunk=1.0
    )


def differentiate(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """With the gradient of J, and the curvature that it tells of along the latest step."""
    assert state.totals is not None
    request = request_of(state.values, state.totals)
    sizes = {"H": state.point.size, "V": 2 * state.places.shape[1]}
    summed: Summed[EvidenceGradient] = yield Total(EvidenceGradient, request, state.sites, sizes=sizes)
    if summed.total is None or set(summed.sites) != set(state.sites) or summed.silent:
        return without_totals(state)
    gradient = state.weight * summed.total.gradient + pack(prior_of(state.values, problem.model)[1])
    place = state.point
    state = replace(state, exchanges=state.exchanges + 1)
    if state.gradient.size:
        state = replace(state, curvature=bfgs(state.curvature, place - state.place, state.gradient - gradient))
    state = replace(state, gradient=gradient, place=place, noise=state.weight * summed.total.noise)
    flat = TOLERANCE * max(1.0, abs(state.height) / state.rows)
    worth = problem.worth if state.training else enlarging.PAYS
    return replace(state, converged=state.promise() < max(worth, flat))


def bfgs(curvature: Array, step: Array, change: Array) -> Array:
    """C − C s sᵀ C/sᵀCs + y yᵀ/sᵀy, where y is the change of −∇J along s; C where J is not concave there."""
    along = float(step @ change)
    if along <= 1e-10 * float(np.linalg.norm(step) * np.linalg.norm(change)):
        return curvature
    turned = curvature @ step
    return curvature - np.outer(turned, turned) / float(step @ turned) + np.outer(change, change) / along


def search(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """After a step, where J is higher; else where it was, with a shorter one to come."""
    tried = moved(state.values, state.step())
    found, sites = yield from sums_at(problem, [tried], state.sites, state.weight)
    if found is None or set(sites) != set(state.sites):
        return without_totals(state)
    values, totals, height = found
    state, gain = replace(state, exchanges=state.exchanges + 1), (height - state.height) / state.rows
    state = replace(state, gains=np.append(state.gains, max(gain, 0.0))[-pooled_bound.SMOOTHED :])
    state = replace(state, rounds=state.rounds + bool(state.asked))
    if gain > 0:
        return replace(state, values=values, totals=totals, height=height, shrunk=1.0)
    slope = float(state.gradient @ state.step()) / state.rows  # the top of the parabola through both ends
    shrunk = state.shrunk * float(np.clip(slope / (2 * (slope - gain)), *SHORTER))
    return replace(state, shrunk=shrunk, converged=shrunk < SHORTEST)


def enlarge(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """At more inducing points and the same hyperparameters."""
    size = state.next_size
    values = enlarging.ordered({**state.values, LOCATIONS: state.places[:size]}, problem.model)
    found, answered = yield from sums_at(problem, [values], sites, state.weight)
    state = replace(state, exchanges=state.exchanges + 1)
    if found is None or set(answered) != set(sites):
        logger.warning("not every site sent sums at %d inducing points; the posterior has those of before", size)
        return replace(state, most=0)
    return replace(arrived(state, found, answered), asked=size, rounds=0, converged=False)


def without_totals(state: SGPRState) -> SGPRState:
    """The same point, to be evaluated anew: the totals are of other rows than those that answer now."""
    logger.warning("sites changed; the optimiser starts anew from where it is")
    return replace(state, totals=None, exchanges=state.exchanges + 1)


def sizes_from(first: int, most: int) -> list[int]:
    """Numbers of points that are asked for at most: the first one, and doublings up to ``most``."""
    found = [first] if first else []
    while found and found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def exchanges_left(problem: Problem, state: SGPRState) -> int:
    """Return how many exchanges remain at the current number of inducing points."""
    if state.training:
        return problem.exchanges + A_SIZE * bool(state.asked) - state.exchanges
    return A_ROUND * (ROUNDS - state.rounds)


def settled(problem: Problem, state: SGPRState) -> bool:
    """Whether the ascent rests at this number of points, or another round would take more than is allowed."""
    return state.converged or exchanges_left(problem, state) < A_ROUND


def finished(problem: Problem, state: SGPRState) -> bool:
    """Whether training has ended, and no more inducing points pay."""
    return settled(problem, state) and (not state.rows or not state.next_size)


def request_of(values: Mapping[str, ndarray], totals: WeightedSums) -> PooledPosterior:
    """q(v) of all rows behind the totals."""
    whitened = exact_posterior(totals)
    return PooledPosterior(values, whitened.mean.numpy(), whitened.covariance.numpy())


def posterior(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[PooledPosterior, WeightedSums]]:
    """The exact posterior of all rows at the fewest points that explain as much, and the totals it comes from."""
    values, totals = state.values, state.totals
    if totals is None or set(state.sites) != set(roster.all_sites):
        found, _ = yield from sums_at(problem, [dict(values)], roster.all_sites, state.weight)
        if found is None:
            raise RunError("no site sent usable sums; see the failures above")
        values, totals, _ = found
    if state.asked:
        rows = float(totals.count)
        wider = enlarging.widening(values, problem.model, math.exp(float(totals.log_variances) / rows))
        count = enlarging.fewest(evidence(totals).curve / rows, wider)
        values, few = {**values, LOCATIONS: values[LOCATIONS][:count]}, totals.leading(count)
        values, totals, _ = at_best_scale(values, few, problem.model)
    return request_of(values, totals), totals


def varying(noise: Array, rows: float) -> int | None:
    """The input along which the noise clearly varies most, or None.

    Of constant noise (Σ z t)²/Σ (z t)² is χ² of one degree; of noise that varies its half is about the nats to gain.
    """
    found = noise[0] ** 2 / np.maximum(noise[1], np.finfo(float).tiny)
    chance = special.ndtri(CHANCE / (2 * found.size)) ** 2
    return int(found.argmax()) % (found.size // 2) if found.max() > max(chance, 2 * TELLING * rows) else None


class SGPR(FederatedStrategy[SGPRState]):
    """Maximise the evidence of all rows in few exchanges, the scale of kernel and noise at the server."""

    method = "sgpr"
    options_class = SGPROptions
    state_class = SGPRState
    options: SGPROptions
    exchanges_a_round = A_ROUND

    @property
    def problem(self) -> Problem:
        """What stays the same during a run."""
        section = self.config.model
        most = enlarging.most_points(section.max_megabytes)
        after = A_SIZE * len(sizes_from(min(FIRST_SIZE, most), most))
        problem = Problem(section, self.config.seed, self.options.exchanges or USUAL - after)
        worth = 0.0 if self.options.exchanges else TOO_LITTLE
        small_sites = self.options.small_sites
        return replace(problem, small_sites=small_sites, megabytes=section.max_megabytes, worth=worth)

    def initialise(self, roster: Roster) -> Asking[SGPRState]:
        """Where to start."""
        return (yield from start(self.problem, roster))

    def one_round(self, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
        """A gradient and a step."""
        return (yield from one_round(self.problem, state, roster))

    def finished(self, state: SGPRState) -> bool:
        """Whether the ascent rests or the exchanges are used up."""
        return finished(self.problem, state)

    def converged(self, state: SGPRState) -> bool:
        """Whether the ascent rests."""
        return state.converged or bool(state.asked)

    def exchanges_to_come(self, state: SGPRState) -> list[tuple[int, float]]:
        """As many as are left, or fewer where the gains tell when the ascent rests, and those for more points."""
        most = left = exchanges_left(self.problem, state)
        rounds = None if state.asked else rounds_to_come(state.gains, 1, self.problem.worth)
        if settled(self.problem, state):
            left = 0
        elif rounds is not None:
            left = min(left, A_ROUND * max(rounds, pooled_bound.SMOOTHED - len(state.gains)))
        sizes = sizes_from(state.next_size, state.most) if state.rows else []
        rounds_at = [(A_SIZE, (1 + ROUNDS * WORK) / A_SIZE * size**2) for size in sizes]
        if sizes and sizes[0] == FIRST_SIZE <= state.most // 2:
            rounds_at[0] = (A_SIZE + most - left, rounds_at[0][1])
        return [(left, self.work(state, state)), *rounds_at]

    def work(self, before: SGPRState, after: SGPRState) -> float:
        """In sums at one point, which take the square of the number of points."""
        return (1.0 if after.asked > before.asked else WORK / A_ROUND) * len(after.values[LOCATIONS]) ** 2

    def predictive(self, state: SGPRState, roster: Roster) -> Asking[Predicted]:
        """The exact posterior of all rows."""
        found, totals = yield from posterior(self.problem, state, roster)
        details: dict[str, Any] = pooled_bound.progress(state.exchanges, state.gains, A_ROUND, state.rows)
        details |= {"evidence": at_unit_scale(totals), "num_inducing": len(found.mean)}
        details["noise_sd_standardised"] = math.sqrt(pooled_bound.noise_of(found.values))
        if state.asked and state.totals is not None:
            details["doubling_promises"] = enlarging.promised(state.curve)
        return Predicted(found, pooled_bound.saved(found, self.config.model), details)

    def public(self, state: SGPRState) -> NamedArrays:
        """The parameters."""
        return encode(Parameters(state.values))

    def adopt(self, state: SGPRState, arrays: NamedArrays) -> SGPRState:
        """Start from other parameters; the same ones change nothing."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        if np.array_equal(pack(given), pack(state.values)):
            return state
        return SGPRState(given, given[LOCATIONS], state.curvature, exchanges=state.exchanges + 1)

    def final(self, state: SGPRState, roster: Roster) -> Asking[dict[str, object]]:
        """Lengthscales, and how well all rows know them."""
        yield from ()
        logs = logarithms(state.values)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.from_numpy(state.curvature)))  # it is the answer
        variances = unpack(inverse.diagonal().numpy(), logs)
        spread = {name: np.sqrt(array) for name, array in variances.items()}
        return {"relevance": lengthscale_facts(logs, spread, CURVATURE)}

    def warnings(self) -> list[str]:
        """Also which sites' sums, or whether the total, nearly reveal rows, and what limited the inducing points."""
        state, roster = self.current, self.roster()
        count = len(state.values[LOCATIONS])
        most = max(count, state.asked)
        told = pooled_bound.told_by_total(most, roster.rows)
        if not told and not roster.totals_only:  # what a total tells, the sums of a site tell all the more
            told = pooled_bound.told_by_sites(most, roster.rows, self.called)
        found = super().warnings() + told
        plain = self.config.standardise and self.config.transform.target == "none"
        place = varying(state.noise, state.rows) if plain and state.noise.size else None
        if place is not None:
            found.append(
                f"the noise varies with `{self.preparation.names[place]}`: intervals are too wide where there is little"
                " and too narrow where there is much; `model.likelihood` = 'heteroscedastic' learns both"
            )
        if state.weight < 1:
            found.append(
                f"rows are copies of each other, about {1 / state.weight:.1f} of each: all sums count"
                f" {state.weight:.2f} times, since a copy says nothing new, not even of the noise"
            )
        wanted, least = self.config.model.num_inducing, min(roster.rows, key=roster.rows.__getitem__)
        if count < min(wanted, roster.rows[least]):
            found.append(
                f"{count} inducing points instead of {wanted}: `sgpr.small-sites` = 'cap', and"
                f" site {self.called([least])} has {roster.rows[least]} rows; totals under masks need no such limit"
            )
        return found
