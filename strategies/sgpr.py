"""SGPR in few exchanges: the bound of all rows (Titsias 2009) from sums, from two starts at once.

On real machines a trip costs seconds whatever it carries, so this method saves trips. The server alone maximises the
bound over the kernel's amplitude and the noise (:mod:`fedgp_flower.gp.sums`). A line search is one trip, because
its candidates are evaluated together. Two chains share every trip: one starts from the lengthscales that the sites'
fits agree on, the other from those of the prior. A round is a gradient and a line search, two exchanges. With
descriptions, where inputs lie, the sketch and the first sums, eight rounds are twenty. The first sums are of twice as
many points as are kept, and the server keeps those that explain most (:func:`fedgp_flower.gp.cells.explaining`).

Rounds go on while five more exchanges promise a gain. The last ones are of more inducing points at the parameters
found (:mod:`strategies.enlarging`): three exchanges for two thousand points, at three common factors of the
lengthscales, and three more for each doubling that pays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp.cells import centres_of, drawn, weight_of
from fedgp_flower.gp.kernels import with_kernel_of
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.optimisers import StepMemory, direction, outlook, pack, rounds_to_come, unpack
from fedgp_flower.gp.sums import PENALTY, SparseSums, leading, prior, profiled
from fedgp_flower.messages import encode, leaves, message
from fedgp_flower.methods.sgpr.messages import Anchors, PooledPosterior, Sketch
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.options import KERNEL_CHOICES, USUAL_KERNEL, ModelSection
from fedgp_flower.shared_messages import Parameters, Shape
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies import enlarging, pooled_bound
from strategies.pooled_bound import LOCATIONS, LOG_NOISE, Problem, folded, lengthscales, log_lengthscales, objective
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import points_like_inputs, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

SLOTS = 2048
"""Anchors of the sketch."""
START_RANGE = (-1.0, 3.5)
"""Of log ℓ at the start."""
CHAINS, TRIED = 2, 4
"""Chains that go on to the end, and rounds after which a third one is given up: the lower of two with one kernel."""
HOPELESS = 0.5
"""Nats a row that a kernel may be behind after training and still be tried with more points."""
WIDER = (-0.5, 0.0, 0.5)
"""What is added to log ℓ in the candidates for a start."""
STEPS = (0.3, 1.0, 2.5)
"""Candidates of a line search, in units of the step that L-BFGS proposes."""
FIRST, CAP = (0.25, 0.4), (0.5, 0.7)
"""Largest entries of a first and of a later step: of Z in lengthscales, and of logarithms."""
SHORTER, SHORTEST = 0.1, 1e-3
"""Factor of the steps after a line search without success, and where shorter ones are given up."""
BEFORE, A_ROUND = 3, 2
"""Exchanges before training (descriptions, where inputs lie, the sketch) and in a round."""
USUAL = 60
"""Exchanges where the configuration leaves them to the method, those of the larger posterior among them."""
FEW, TOO_LITTLE = 5, 0.002
"""Training ends where so many more exchanges promise less than this, in nats a row, unless their number is set."""
FACTORS = (1.0, 0.7, 1.4)
"""Of the lengthscales, tried with more inducing points."""
FIRST_SIZE, A_SIZE = 2000, 3
"""Inducing points at which the factors are tried, and exchanges for each number of them."""
TOLERANCE = 1e-6
"""The ascent ends where a line search gains less than this per row, relative to the size of the bound."""


@message()
class Chain(StepMemory):
    """A point on its way up, its totals, and the steps that L-BFGS remembers."""

    values: Mapping[str, AnyShape]
    """Parameters, the kernel at unit amplitude."""
    lengths: Float[ndarray, " D"]
    """Lengthscales at the start, the units of Z in coordinates."""
    totals: SparseSums | None = None
    """At ``values``; None before they are asked for."""
    height: float = 0.0
    """J, in nats."""
    gradient: Float[ndarray, " _"] = field(default_factory=lambda: np.empty(0))
    """Of J by the coordinates at ``place`` [S]; empty before it is asked for."""
    place: Float[ndarray, " _"] = field(default_factory=lambda: np.empty(0))
    shrunk: float = 1.0
    """Factor of the next line search's steps."""

    @property
    def coordinates(self) -> Array:
        """What L-BFGS moves [S]: inducing points in units of ``lengths``, and logarithms."""
        return pack(moving(self.values)) / units(self.values, self.lengths)

    @property
    def moved(self) -> bool:
        """Whether the gradient is that of another point."""
        return not np.array_equal(self.place, self.coordinates)

    def at(self, coordinates: Array) -> NamedArrays:
        """Parameters at other coordinates, logarithms within their range."""
        found = unpack(coordinates * units(self.values, self.lengths), moving(self.values))
        logs = {n: np.asarray(np.clip(a, -LOG_RANGE, LOG_RANGE)) for n, a in found.items() if n != LOCATIONS}
        return {**self.values, **found, **logs}


@message()
class LargeSums(SparseSums):
    """Sums at another number of inducing points than the chains'."""

    gram: Float[ndarray, "Q Q"] = leaves("A", symmetric=True)
    projection: Float[ndarray, " Q"] = leaves("b")


@message()
class Enlarged:
    """More inducing points at the hyperparameters of the better chain: what predicts."""

    values: Mapping[str, AnyShape]
    """Parameters, at the best amplitude and noise."""
    totals: LargeSums
    """At ``values``."""
    sites: tuple[str, ...]
    """Whose rows the totals are of."""
    asked: int
    """Points that sums were asked at; the first of them are kept."""
    factor: float
    """Of the chain's lengthscales."""
    promise: float
    """Nats a row that twice as many points would bring."""
    curve: Float[ndarray, "V 2"]
    """Numbers of points, and the bound there in nats a row."""


@message()
class SGPRState:
    """Two chains that share every exchange, and whose rows their totals are of."""

    chains: tuple[Chain, ...]
    sites: tuple[str, ...]
    exchanges: int
    """With every site, those before training among them."""
    points: int = 0
    """P: candidates beyond them are dropped at the first totals; 0: all are inducing points."""
    gains: Float[ndarray, " R"] = field(default_factory=lambda: np.empty(0))
    """Of J in the latest rounds, nats per row, the last one last."""
    converged: bool = False
    weight: float = 1.0
    """Of a row where rows are copies: sums of all sites count so much."""
    shape: Shape | None = None
    """Where inputs lie."""
    most: int = 0
    """Inducing points that the posterior may have; where they are no more than the chains', it has these."""
    large: Enlarged | None = None

    @property
    def rows(self) -> float:
        """N, of the totals; 0 where they are not known."""
        totals = self.best.totals
        return 0.0 if totals is None else float(totals.count)

    @property
    def best(self) -> Chain:
        """The chain with the higher J; the first of them before it is known."""
        return max(self.chains, key=lambda chain: chain.height)

    @property
    def next_size(self) -> int:
        """How many inducing points are asked for next after training; 0 where no more of them pay."""
        trained = len(self.best.values[LOCATIONS])
        if self.large is None:
            return min(FIRST_SIZE, self.most) if self.most > trained else 0
        room = self.most > self.large.asked and self.large.promise >= enlarging.PAYS
        return min(2 * self.large.asked, self.most) if room else 0

    def known(self, section: ModelSection) -> tuple[NamedArrays, SparseSums] | None:
        """Parameters at the best amplitude and noise, and the totals there; None before there are any."""
        if self.large is not None:
            return dict(self.large.values), self.large.totals
        totals = self.best.totals
        return None if totals is None else folded(self.best.values, totals, section)


def moving(values: Mapping[str, ndarray]) -> NamedArrays:
    """The parameters that an exchange is needed for: all but the noise."""
    return {name: array for name, array in values.items() if name != LOG_NOISE}


def units(values: Mapping[str, ndarray], lengths: Array) -> Array:
    """Lengthscales for the entries of Z, and 1 for every other coordinate [S]."""
    sizes = {name: np.ones_like(array) for name, array in moving(values).items()}
    return pack(sizes | {LOCATIONS: sizes[LOCATIONS] * lengths})


def chain_at(values: Mapping[str, ndarray], totals: SparseSums | None = None) -> Chain:
    """A chain that starts at parameters of unit amplitude."""
    none, height = np.empty((0, pack(moving(values)).size)), 0.0 if totals is None else objective(values, totals)
    return Chain(none, none, np.zeros(2), values, lengthscales(values), totals, height)


def start(problem: Problem, roster: Roster) -> Asking[SGPRState]:
    """Two chains from a sketch of all rows around points where inputs lie, and one more of another kernel to choose."""
    section, seed = problem.model, problem.seed
    shape = yield from shape_of_inputs(roster)
    anchors = points_like_inputs(shape, SLOTS, np.random.default_rng([seed, *b"anchors"]))
    num_inputs = anchors.shape[1]
    model = pooled_bound.empty_model(section, num_inputs)
    sizes = {"C": SLOTS, "H": pack(model).size}
    summed: Summed[Sketch] = yield Total(Sketch, Anchors(anchors), sizes=sizes)
    if summed.total is None:
        raise RunError("no site answered where its inputs lie; see the failures above")
    sketch, rng = summed.total, np.random.default_rng([seed, *b"inducing"])
    draws = drawn(sketch.rows, sketch.first, sketch.second, rng)
    distinct = len(np.unique(draws, axis=0))
    count = min(pooled_bound.inducing_points(section.num_inducing, roster, problem.small_sites), distinct)
    most = min(pooled_bound.candidates(count, roster, problem.small_sites), distinct)
    sections = [section] * 2
    if section.kernel == USUAL_KERNEL:
        sections.append(section.model_copy(update={"kernel": KERNEL_CHOICES[1]}))
    starts = [agreed(sketch, model)]
    for other in sections[1:]:
        like = pooled_bound.empty_model(other, num_inputs)
        starts.append({name: np.full_like(array, prior(name, num_inputs)[0]) for name, array in like.items()})
    chains = []
    for first in starts:
        lengths = lengthscales({**first, LOCATIONS: draws})
        centres = centres_of(draws / lengths, most, np.random.default_rng([seed, *b"centres"]))
        chains.append(chain_at(pooled_bound.of_unit_amplitude({**first, LOCATIONS: centres * lengths}, section)))
    most = largest(problem, roster)
    logger.info("%d inducing points in training, %d after it at most", count, max(count, most))
    weight = weight_of(sketch.repeats, float(sketch.rows.sum()))
    return SGPRState(tuple(chains), (), BEFORE, count, weight=weight, shape=shape, most=most)


def largest(problem: Problem, roster: Roster) -> int:
    """Inducing points that a message has room for, at most the number of rows and what the smallest site bears."""
    most = min(enlarging.most_points(problem.megabytes), sum(roster.rows.values()))
    capped = problem.small_sites != "warn" and not roster.totals_only
    return min(most, min(roster.rows.values()) // pooled_bound.ROWS_PER_POINT) if capped else most


def agreed(sketch: Sketch, like: Mapping[str, ndarray]) -> NamedArrays:
    """The mode (Σ H)⁻¹ Σ Hθ of all sites' fits together, lengthscales within :data:`START_RANGE`."""
    mode = np.linalg.solve(sketch.precision, sketch.shift)
    pieces = np.split(mode, np.cumsum([array.size for array in like.values()])[:-1])
    found = {name: piece.reshape(like[name].shape) for name, piece in zip(like, pieces, strict=True)}
    return found | {name: np.clip(array, *START_RANGE) for name, array in log_lengthscales(found).items()}


def one_round(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
    """A gradient of every chain that has moved, and a line search of every chain; after training more points."""
    if trained(problem, state):
        state = yield from enlarge(problem, state, roster.sites)
    else:
        if set(state.sites) != set(roster.sites) or not state.rows:
            state = yield from evaluate(problem, state, roster.sites)
        if state.rows:
            state = yield from differentiate(problem, state)
        if state.rows:
            state = yield from search(problem, state)
    known = state.known(problem.model)
    if known is None:
        return state, {}
    values, totals = known
    bound, points = pooled_bound.facts(values, totals)["bound"], len(values[LOCATIONS])
    figures = {"bound": bound, "objective": bound / float(totals.count), "noise": pooled_bound.noise_of(values)}
    return state, figures | {"points": float(points)}


def enlarge(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """With a posterior at more points, of the kernel that explains most there; with no more where none is better."""
    size, chains, best = state.next_size, contenders(state), state.best
    assert state.shape is not None
    assert best.totals is not None
    factors: tuple[float, ...] = (1.0,) if state.large is None else (state.large.factor,)
    if state.large is None and size <= enlarging.most_points(problem.megabytes, len(FACTORS)):
        factors = FACTORS
    count = size - len(best.values[LOCATIONS])
    more = yield from enlarging.placed(state.shape, lengthscales(best.values), count, sites, problem.seed)
    before = profiled(best.totals).value / state.rows if state.large is None else float(state.large.curve[-1, 1])
    highest_bound, large = before - enlarging.NEGLIGIBLE, None
    for chain in chains:
        bound, found = yield from larger(problem, chain, more, factors, sites, state.weight)
        if found is not None and bound > highest_bound:
            highest_bound, large = bound, found
    state = replace(state, exchanges=state.exchanges + A_SIZE + len(chains) - 1)
    if large is None:
        logger.warning("%d inducing points are no better; the posterior has those of before", size)
        return replace(state, most=0)
    return replace(state, large=large)


def contenders(state: SGPRState) -> list[Chain]:
    """The highest chain of each kernel that more points may bring to the front; later that of the larger posterior."""
    kernels = {frozenset(chain.values): chain for chain in sorted(state.chains, key=lambda chain: chain.height)}
    if state.large is not None:
        return [kernels[frozenset(state.large.values)]]
    least = state.best.height - HOPELESS * state.rows
    return [chain for chain in kernels.values() if chain.height >= least]


def larger(
    problem: Problem, chain: Chain, more: Array, factors: tuple[float, ...], sites: tuple[str, ...], weight: float
) -> Asking[tuple[float, Enlarged | None]]:
    """The highest bound a row of a chain with more points, at several factors of its lengthscales, and the fewest."""
    section, places, usual = problem.model, chain.values[LOCATIONS], chain.totals
    assert usual is not None
    values = enlarging.ordered({**chain.values, LOCATIONS: np.concatenate([places, more])}, section)
    tried = [wider(values, math.log(factor)) for factor in factors]
    totals, summed = yield from pooled_bound.sums_at(tried, sites, weight)
    if not totals or set(summed.sites) != set(sites):
        logger.warning("not every site sent sums at %d inducing points", len(values[LOCATIONS]))
        return -math.inf, None
    log_ratio = profiled(usual).log_ratio
    curves = [enlarging.by_size(sums, log_ratio) for sums in totals]
    best = max(range(len(curves)), key=lambda number: float(curves[number][0].max()))
    curve, ratio = curves[best]
    count = enlarging.fewest(curve)
    few, sums = {**tried[best], LOCATIONS: values[LOCATIONS][:count]}, leading(totals[best], count)
    few, sums = folded(few, sums, section, enlarging.profiled_near(sums, ratio))
    marks = np.unique(np.geomspace(1, len(curve), 24).astype(int))
    shown, size = np.column_stack([marks, curve[marks - 1]]), len(places) + len(more)
    logger.info("%d of %d inducing points are kept: %.3f nats a row", count, size, curve[count - 1])
    promise = enlarging.promised(curve)
    return float(curve.max()), Enlarged(few, LargeSums(**vars(sums)), summed.sites, size, factors[best], promise, shown)


def evaluate(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """Totals of these sites at some lengthscales around those of each chain; steps so far were of other rows."""
    tried = [wider(chain.values, by) for chain in state.chains for by in WIDER]
    totals, summed = yield from pooled_bound.sums_at(tried, sites, state.weight)
    if not totals:
        return replace(state, exchanges=state.exchanges + 1)
    found = highest(tried, totals, len(WIDER))
    yield from pooled_bound.doubts_at_best(found, totals, summed.parts, problem.model)
    chains = [chain_at(*pooled_bound.thinned(values, sums, state.points, problem.model)) for values, sums, _ in found]
    anew = SGPRState(tuple(chains), summed.sites, state.exchanges + 1, state.points)
    return replace(anew, weight=state.weight, shape=state.shape, most=state.most)


def differentiate(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """With the gradients of the chains that have moved; a step that came before is a pair now."""
    moved = [(chain.values, chain.totals) for chain in state.chains if chain.moved and chain.totals]
    if not moved:
        return state
    points = [folded(values, totals, problem.model) for values, totals in moved]
    gradients = yield from pooled_bound.gradients_at(points, state.sites, problem.model, state.weight)
    if gradients is None:
        return without_totals(state)
    each = iter(gradients)
    chains = tuple(with_gradient(chain, next(each)) if chain.moved else chain for chain in state.chains)
    return replace(state, chains=chains, exchanges=state.exchanges + 1)


def with_gradient(chain: Chain, slopes: Mapping[str, ndarray]) -> Chain:
    """The chain with the gradient of J at its point, from that of the bound."""
    pulled = {name: slopes[name] - 2 * PENALTY * (a - 1) for name, a in log_lengthscales(chain.values).items()}
    gradient = pack(moving({**slopes, **pulled})) * units(chain.values, chain.lengths)
    place = chain.coordinates
    if chain.gradient.size:
        chain = chain.after(place - chain.place, chain.gradient - gradient)
    return replace(chain, gradient=gradient, place=place)


def search(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """Every chain at the highest of its candidates; where none is higher, where it was, with shorter steps."""
    aimed = [aim(chain) for chain in state.chains]
    tried = [chain.at(chain.coordinates + by * chain.shrunk * way) for chain, way in aimed for by in STEPS]
    totals, summed = yield from pooled_bound.sums_at(tried, state.sites, state.weight)
    if not totals or set(summed.sites) != set(state.sites) or float(totals[0].count) != state.rows:
        return without_totals(state)
    chains, found = [], highest(tried, totals, len(STEPS))
    yield from pooled_bound.doubts_at_best(found, totals, summed.parts, problem.model)
    for (chain, _), (values, sums, height) in zip(aimed, found, strict=True):
        if height > chain.height:
            chains.append(replace(chain, values=values, totals=sums, height=height, shrunk=1.0))
        else:
            chains.append(replace(chain.forgotten(), shrunk=SHORTER * chain.shrunk))
    after = replace(state, chains=tuple(chains), exchanges=state.exchanges + 1)
    climbed = max(new.height - old.height for new, old in zip(chains, state.chains, strict=True)) / state.rows
    flat = climbed < TOLERANCE * max(1.0, abs(after.best.height) / state.rows)
    shortening = any(SHORTEST < chain.shrunk < 1 for chain in chains)
    gains = np.append(state.gains, (after.best.height - state.best.height) / state.rows)[-pooled_bound.SMOOTHED :]
    more = outlook(gains, math.ceil(FEW / A_ROUND)) if len(gains) == pooled_bound.SMOOTHED else None
    little = more is not None and more < problem.worth
    if len(chains) > CHAINS and len(gains) >= TRIED:
        kernels = {frozenset(chain.values): chain for chain in sorted(chains, key=lambda chain: chain.height)}
        after = replace(after, chains=tuple(kernels.values()))
    return replace(after, gains=gains, converged=(flat or little) and not shortening)


def aim(chain: Chain) -> tuple[Chain, Array]:
    """The chain with new scales of L-BFGS, and where its next line search goes [S]."""
    blocks = pack({name: np.full(array.shape, name != LOCATIONS) for name, array in moving(chain.values).items()})
    sizes = units(chain.values, lengthscales(chain.values)) / units(chain.values, chain.lengths)
    first, cap = (np.where(blocks, limits[1], limits[0]) * sizes for limits in (FIRST, CAP))
    way, chain = direction(chain.gradient, chain, blocks.astype(int), first, cap)
    return chain, way


def wider(values: Mapping[str, ndarray], by: float) -> NamedArrays:
    """Parameters with other lengthscales, in the same proportions."""
    return {**values, **{name: array + by for name, array in log_lengthscales(values).items()}}


def highest(
    tried: Sequence[NamedArrays], totals: Sequence[SparseSums], size: int
) -> list[tuple[NamedArrays, SparseSums, float]]:
    """Of every ``size`` candidates, those of a chain, the one with the highest J, its totals and J."""
    found = [(*at, objective(*at)) for at in zip(tried, totals, strict=True)]
    return [max(found[n : n + size], key=lambda at: at[2]) for n in range(0, len(found), size)]


def without_totals(state: SGPRState) -> SGPRState:
    """The same points, to be evaluated anew: the totals are of other rows than those that answer now."""
    logger.warning("sites changed; the optimiser starts anew from where it is")
    chains = tuple(chain_at(chain.values) for chain in state.chains)
    return replace(state, chains=chains, exchanges=state.exchanges + 1)


def sizes_of(most: int) -> int:
    """How many numbers of points are asked for at most: the first one, and doublings up to ``most``."""
    return math.ceil(math.log2(max(most, FIRST_SIZE) / FIRST_SIZE)) + 1 if most else 0


def trained(problem: Problem, state: SGPRState) -> bool:
    """Whether the chains rest, or another round would take more exchanges than are allowed."""
    return state.converged or state.exchanges + A_ROUND > problem.exchanges


def finished(problem: Problem, state: SGPRState) -> bool:
    """Whether training has ended, and no more inducing points pay."""
    return trained(problem, state) and (not state.rows or not state.next_size)


def posterior(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[PooledPosterior, SparseSums]]:
    """The exact posterior of all rows at the points that predict, and the totals it comes from."""
    known, sites = state.known(problem.model), state.sites if state.large is None else state.large.sites
    if known is None or set(sites) != set(roster.everyone):
        values = state.best.values if known is None else known[0]
        totals = (yield from pooled_bound.pooled(values, problem.model, roster.everyone)).weighted(state.weight)
        count = state.points if state.large is None else 0
        known = folded(*pooled_bound.thinned(values, totals, count, problem.model), problem.model)
    return pooled_bound.posterior_at(*known), known[1]


class SGPR(FederatedStrategy[SGPRState]):
    """Maximise the bound of all rows in few exchanges, amplitude and noise at the server."""

    method = "sgpr"
    options_class = SGPROptions
    state_class = SGPRState
    options: SGPROptions
    exchanges_a_round = A_ROUND

    @property
    def problem(self) -> Problem:
        """What stays the same during a run."""
        section = self.config.model
        after = A_SIZE * sizes_of(enlarging.most_points(section.max_megabytes))
        problem = Problem(section, self.config.seed, self.options.exchanges or USUAL - after)
        worth = 0.0 if self.options.exchanges else TOO_LITTLE
        small_sites = self.options.small_sites
        return replace(problem, small_sites=small_sites, megabytes=section.max_megabytes, worth=worth)

    def initialise(self, roster: Roster) -> Asking[SGPRState]:
        """Two chains."""
        return (yield from start(self.problem, roster))

    def one_round(self, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
        """A gradient and a line search."""
        return (yield from one_round(self.problem, state, roster))

    def finished(self, state: SGPRState) -> bool:
        """Whether the chains rest or the exchanges are used up."""
        return finished(self.problem, state)

    def converged(self, state: SGPRState) -> bool:
        """Whether the chains rest."""
        return state.converged

    def exchanges_to_come(self, state: SGPRState) -> int:
        """As many as are left, or fewer where the gains tell when training rests, and those for more points."""
        left = 0 if trained(self.problem, state) else self.problem.exchanges - state.exchanges
        rounds = rounds_to_come(state.gains, math.ceil(FEW / A_ROUND), self.problem.worth)
        if rounds is not None:
            left = min(left, A_ROUND * max(rounds, pooled_bound.SMOOTHED - len(state.gains)))
        return left + (A_SIZE * sizes_of(state.most) if state.next_size and state.large is None else 0)

    def work_to_come(self, state: SGPRState) -> float:
        """By the squares of numbers of inducing points that sums are asked at; a gradient is as much as two sums."""
        points, chains = len(state.best.values[LOCATIONS]), len(state.chains)
        a_round, roster = chains * (len(STEPS) + 2) * points**2, self.roster()
        most = pooled_bound.candidates(points, roster, self.options.small_sites)
        first = chains * len(WIDER) * most**2 + a_round
        rounds = (self.problem.exchanges - state.exchanges) // A_ROUND
        size, after = min(FIRST_SIZE, state.most), 0
        if state.most > points:
            doubled = [min(size * 2**k, state.most) for k in range(1, sizes_of(state.most))]
            after = len(FACTORS) * size**2 + sum(number**2 for number in doubled)
        return (max(rounds, 0) * a_round + after) / first

    def predictive(self, state: SGPRState, roster: Roster) -> Asking[Predicted]:
        """The exact posterior of all rows at the better chain's point."""
        found, totals = yield from posterior(self.problem, state, roster)
        details: dict[str, Any] = pooled_bound.progress(state.exchanges, state.gains, A_ROUND, state.rows)
        details |= pooled_bound.facts(found.values, totals) | {"num_inducing": len(found.values[LOCATIONS])}
        details["kernel"] = with_kernel_of(self.config.model, found.values).kernel
        if state.large is not None:
            details |= {
                "doubling_promises": state.large.promise,
                "lengthscale_factor": state.large.factor,
                "bound_by_points": state.large.curve.tolist(),
            }
        return Predicted(found, pooled_bound.saved(found, self.config.model), details)

    def public(self, state: SGPRState) -> NamedArrays:
        """The parameters of the better chain."""
        known = state.known(self.config.model)
        return encode(Parameters(state.best.values if known is None else known[0]))

    def adopt(self, state: SGPRState, arrays: NamedArrays) -> SGPRState:
        """Start one chain from other parameters; the same ones change nothing."""
        if np.array_equal(pack(arrays), pack(self.public(state))):
            return state
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        return SGPRState((chain_at(pooled_bound.of_unit_amplitude(given, self.config.model)),), (), state.exchanges)

    def final(self, state: SGPRState, roster: Roster) -> Asking[dict[str, object]]:
        """Lengthscales, and how well all rows know them."""
        values = self.scoring.predicted.request.values
        few = values[LOCATIONS][: self.config.model.num_inducing]
        few = {**values, LOCATIONS: few}
        spread = yield from pooled_bound.known_lengthscales(few, roster.sites, self.config.model, state.weight)
        return {"relevance": lengthscale_facts(values, spread, pooled_bound.CURVATURE)}

    def warnings(self) -> list[str]:
        """Also which sites' sums, or whether the total, nearly reveal rows, and what limited the inducing points."""
        count, roster, policy = len(self.current.best.values[LOCATIONS]), self.roster(), self.options.small_sites
        most, large = pooled_bound.candidates(count, roster, policy), self.current.large
        most = most if large is None else max(most, large.asked)
        told = pooled_bound.told_by_total(most, roster.rows, pooled_bound.CANDIDATES)
        if not told and not roster.totals_only:  # what a total tells, the sums of a site tell all the more
            told = pooled_bound.told_by_sites(most, roster.rows, self.called)
        found = super().warnings() + told
        if self.current.weight < 1:
            found.append(
                f"rows are copies of each other, about {1 / self.current.weight:.1f} of each: all sums count"
                f" {self.current.weight:.2f} times, since a copy says nothing new, not even of the noise"
            )
        wanted, least = self.config.model.num_inducing, min(roster.rows, key=roster.rows.__getitem__)
        if count < min(wanted, sum(roster.rows.values())):
            found.append(
                f"{count} inducing points instead of {wanted}: `sgpr.small-sites` = 'cap', and"
                f" site {self.called([least])} has {roster.rows[least]} rows; totals under masks need no such limit"
            )
        return found
