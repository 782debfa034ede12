"""SGPR in about twenty exchanges: the bound of all rows (Titsias 2009) from sums, from two starts at once.

On real machines a trip costs seconds whatever it carries, so this method saves trips. The server alone maximises the
bound over the kernel's amplitude and the noise (:mod:`fedgp_flower.gp.sums`). A line search is one trip, because
its candidates are evaluated together. Two chains share every trip: one starts from the lengthscales that the sites'
fits agree on, the other from those of the prior. A round is a gradient and a line search, two exchanges. With
descriptions, where inputs lie, the sketch and the first sums, eight rounds are twenty. The first sums are of twice as
many points as are kept, and the server keeps those that explain most (:func:`fedgp_flower.gp.cells.explaining`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp.cells import centres_of, drawn
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.optimisers import StepMemory, direction, pack, unpack
from fedgp_flower.gp.sums import PENALTY, SparseSums, prior
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.sgpr.messages import Anchors, PooledPosterior, Sketch
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies import pooled_bound
from strategies.pooled_bound import LOCATIONS, LOG_NOISE, Problem, folded, lengthscales, log_lengthscales, objective
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import points_like_inputs, shape_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

SLOTS = 2048
"""Anchors of the sketch."""
START_RANGE = (-1.0, 3.5)
"""Of log ℓ at the start."""
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
USUAL = 20
"""Exchanges where the configuration leaves them to the method."""
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
    gradient: Float[ndarray, " G"] = field(default_factory=lambda: np.empty(0))
    """Of J by the coordinates at ``place``; G = S, or 0 before it is asked for."""
    place: Float[ndarray, " G"] = field(default_factory=lambda: np.empty(0))
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
    contrary: Mapping[str, AnyShape] = field(default_factory=dict)
    """Sites whose sums contradicted the others' once, and the bound per row with and without them [2]."""

    @property
    def rows(self) -> float:
        """N, of the totals; 0 where they are not known."""
        totals = self.best.totals
        return 0.0 if totals is None else float(totals.count)

    @property
    def best(self) -> Chain:
        """The chain with the higher J; the first of them before it is known."""
        return max(self.chains, key=lambda chain: chain.height)


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
    """Two chains, from a sketch of all rows around points that lie where inputs do."""
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
    expected = {name: np.full_like(array, prior(name, num_inputs)[0]) for name, array in model.items()}
    chains = []
    for first in (agreed(sketch, model), expected):
        lengths = lengthscales({**first, LOCATIONS: draws})
        centres = centres_of(draws / lengths, most, np.random.default_rng([seed, *b"centres"]))
        chains.append(chain_at(pooled_bound.of_unit_amplitude({**first, LOCATIONS: centres * lengths}, section)))
    logger.info("%d inducing points; at most %d exchanges for training", count, problem.exchanges)
    return SGPRState(tuple(chains), (), BEFORE, count)


def agreed(sketch: Sketch, like: Mapping[str, ndarray]) -> NamedArrays:
    """The mode (Σ H)⁻¹ Σ Hθ of all sites' fits together, lengthscales within :data:`START_RANGE`."""
    mode = np.linalg.solve(sketch.precision, sketch.shift)
    pieces = np.split(mode, np.cumsum([array.size for array in like.values()])[:-1])
    found = {name: piece.reshape(like[name].shape) for name, piece in zip(like, pieces, strict=True)}
    return found | {name: np.clip(array, *START_RANGE) for name, array in log_lengthscales(found).items()}


def one_round(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
    """A gradient of every chain that has moved, and a line search of every chain."""
    if set(state.sites) != set(roster.sites) or not state.rows:
        state = yield from evaluate(problem, state, roster.sites)
    if state.rows:
        state = yield from differentiate(problem, state)
    if state.rows:
        state = yield from search(problem, state)
    if state.best.totals is None:
        return state, {}
    values, totals = folded(state.best.values, state.best.totals, problem.model)
    bound = pooled_bound.facts(values, totals)["bound"]
    return state, {"bound": bound, "objective": bound / state.rows, "noise": pooled_bound.noise_of(values)}


def evaluate(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """Totals of these sites at some lengthscales around those of each chain; steps so far were of other rows."""
    tried = [wider(chain.values, by) for chain in state.chains for by in WIDER]
    totals, summed = yield from pooled_bound.sums_at(tried, sites)
    if not totals:
        return replace(state, exchanges=state.exchanges + 1)
    found = highest(tried, totals, len(WIDER))
    contrary = {**state.contrary, **pooled_bound.contradictions(found, totals, summed.parts, problem.model)}
    chains = [chain_at(*pooled_bound.thinned(values, sums, state.points, problem.model)) for values, sums, _ in found]
    return SGPRState(tuple(chains), summed.sites, state.exchanges + 1, state.points, contrary=contrary)


def differentiate(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """With the gradients of the chains that have moved; a step that came before is a pair now."""
    moved = [(chain.values, chain.totals) for chain in state.chains if chain.moved and chain.totals]
    if not moved:
        return state
    points = [folded(values, totals, problem.model) for values, totals in moved]
    gradients = yield from pooled_bound.gradients_at(points, state.sites, problem.model)
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
    totals, summed = yield from pooled_bound.sums_at(tried, state.sites)
    if not totals or set(summed.sites) != set(state.sites) or float(totals[0].count) != state.rows:
        return without_totals(state)
    chains, found = [], highest(tried, totals, len(STEPS))
    contrary = {**state.contrary, **pooled_bound.contradictions(found, totals, summed.parts, problem.model)}
    for (chain, _), (values, sums, height) in zip(aimed, found, strict=True):
        if height > chain.height:
            chains.append(replace(chain, values=values, totals=sums, height=height, shrunk=1.0))
        else:
            chains.append(replace(chain.forgotten(), shrunk=SHORTER * chain.shrunk))
    after = replace(state, chains=tuple(chains), exchanges=state.exchanges + 1, contrary=contrary)
    climbed = max(new.height - old.height for new, old in zip(chains, state.chains, strict=True)) / state.rows
    flat = climbed < TOLERANCE * max(1.0, abs(after.best.height) / state.rows)
    shortening = any(SHORTEST < chain.shrunk < 1 for chain in chains)
    gains = np.append(state.gains, (after.best.height - state.best.height) / state.rows)[-pooled_bound.SMOOTHED :]
    return replace(after, gains=gains, converged=flat and not shortening)


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


def finished(problem: Problem, state: SGPRState) -> bool:
    """Whether the chains rest, or another round would take more exchanges than are allowed."""
    return state.converged or state.exchanges + A_ROUND > problem.exchanges


def posterior(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[PooledPosterior, SparseSums]]:
    """The exact posterior of all rows at the better chain's point, and the totals it comes from."""
    values, totals = state.best.values, state.best.totals
    if totals is None or set(state.sites) != set(roster.everyone):
        totals = yield from pooled_bound.pooled(values, roster.everyone)
        values, totals = pooled_bound.thinned(values, totals, state.points, problem.model)
    values, totals = folded(values, totals, problem.model)
    return pooled_bound.posterior_at(values, totals), totals


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
        exchanges = self.options.exchanges or USUAL
        return Problem(self.config.model, self.config.seed, exchanges, small_sites=self.options.small_sites)

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
        """As many as are left, if it does not converge before."""
        return max(0, self.problem.exchanges - state.exchanges)

    def predictive(self, state: SGPRState, roster: Roster) -> Asking[Predicted]:
        """The exact posterior of all rows at the better chain's point."""
        found, totals = yield from posterior(self.problem, state, roster)
        details = pooled_bound.progress(state.exchanges, state.gains, A_ROUND, state.rows)
        details |= pooled_bound.facts(found.values, totals) | {"num_inducing": len(state.best.values[LOCATIONS])}
        return Predicted(found, pooled_bound.saved(found, self.config.model), details)

    def public(self, state: SGPRState) -> NamedArrays:
        """The parameters of the better chain."""
        values, totals = state.best.values, state.best.totals
        return encode(Parameters(values if totals is None else folded(values, totals, self.config.model)[0]))

    def adopt(self, state: SGPRState, arrays: NamedArrays) -> SGPRState:
        """Start one chain from other parameters; the same ones change nothing."""
        if np.array_equal(pack(arrays), pack(self.public(state))):
            return state
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        return SGPRState((chain_at(pooled_bound.of_unit_amplitude(given, self.config.model)),), (), state.exchanges)

    def final(self, state: SGPRState, roster: Roster) -> Asking[dict[str, object]]:
        """Lengthscales, and how well all rows know them."""
        del state
        values = self.scoring.predicted.request.values
        spread = yield from pooled_bound.known_lengthscales(values, roster.sites, self.config.model)
        return {"relevance": lengthscale_facts(values, spread, pooled_bound.CURVATURE)}

    def warnings(self) -> list[str]:
        """Also which sites' sums, or whether the total, nearly reveal rows, and what limited the inducing points."""
        count, roster, policy = len(self.current.best.values[LOCATIONS]), self.roster(), self.options.small_sites
        most = pooled_bound.candidates(count, roster, policy)
        told = pooled_bound.told_by_total(most, roster.rows, pooled_bound.CANDIDATES)
        if not told and not roster.totals_only:  # what a total tells, the sums of a site tell all the more
            told = pooled_bound.told_by_sites(most, roster.rows, self.called)
        found = super().warnings() + told
        for site, (every, others) in self.current.contrary.items():
            found.append(
                f"site {self.called([site])} contradicts the others: what their rows predict for it runs against its"
                " sums. These may be false, or another relation holds there. The bound is"
                f" {every:.3g} nats per row with it and {others:.3g} without it"
            )
        wanted, least = self.config.model.num_inducing, min(roster.rows, key=roster.rows.__getitem__)
        if count < min(wanted, sum(roster.rows.values())):
            found.append(
                f"{count} inducing points instead of {wanted}: `sgpr.small-sites` = 'cap', and"
                f" site {self.called([least])} has {roster.rows[least]} rows; totals under masks need no such limit"
            )
        return found
