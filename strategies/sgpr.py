"""SGPR in about twenty exchanges: the bound of all rows (Titsias 2009) from sums, from two starts at once.

On real machines a trip costs seconds whatever it carries, so this method saves trips. The server alone maximises the
bound over the kernel's amplitude and the noise (:mod:`fedgp_flower.gp.sums`). A line search is one trip, because
its candidates are evaluated together. Two chains share every trip: one starts from the lengthscales that the sites'
fits agree on, the other from those of the prior. A round is a gradient and a line search, two exchanges. With
descriptions, where inputs lie, the sketch and the first sums, eight rounds are twenty. The first sums are of twice as
many points as are kept, and the server keeps those that explain most (:func:`fedgp_flower.gp.cells.explaining`).

The algorithm is a set of functions over :class:`Problem` and :class:`SGPRState`; :class:`SGPR` runs them under Flower.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.gp.cells import centres_of, drawn
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.optimisers import StepMemory, direction, forgotten, outlook, pack, unpack
from fedgp_flower.gp.sums import PENALTY, SparseSums, prior
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.sgpr.messages import (
    Anchors,
    PooledPosterior,
    Sketch,
    TrialAdjoints,
    TrialGradients,
    Trials,
    TrialSums,
    apart,
    numbered,
)
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.pooled_bound import (
    CURVATURE,
    LOCATIONS,
    LOG_NOISE,
    ROWS_PER_POINT,
    adjoints_at,
    detail_of_progress,
    facts,
    folded,
    known_lengthscales,
    lengthscales,
    noise_of,
    objective,
    pooled,
    posterior_at,
    saved,
    sizes_at,
    thinned,
    through_inducing_points,
    told_by_total,
)
from strategies.server.questions import Asking, Figures, Predicted, Roster, Summed, Total, lengthscale_facts
from strategies.server.shapes import points_like_inputs, shapes_of_inputs
from strategies.server.strategy import FederatedStrategy

logger = logging.getLogger("fedgp")

SLOTS = 2048
"""Anchors of the sketch."""
CANDIDATES = 2
"""For each inducing point: of so many, those are taken that explain most at the first sums."""
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
SMOOTHED, MORE = 5, 20
"""Rounds whose gains say what so many more exchanges would bring."""
USUAL = 20
"""Exchanges where the configuration leaves them to the method."""
TOLERANCE = 1e-6
"""The ascent ends where a line search gains less than this per row, relative to the size of the bound."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What stays the same during a run."""

    model: ModelSection
    num_inputs: int
    seed: int = 0
    exchanges: int = USUAL
    """Most exchanges with every site, those before training among them."""
    small_sites: str = "warn"
    """The policy for sites with few rows: ``warn``, ``cap`` or ``masks``."""

    @staticmethod
    def of(config: RunConfig, num_inputs: int, options: SGPROptions) -> Problem:
        """From the configuration."""
        return Problem(config.model, num_inputs, config.seed, options.exchanges or USUAL, options.small_sites)

    @property
    def amplitudes(self) -> list[str]:
        """Names of the amplitudes that scale the whole kernel together."""
        return SparseGP(self.model, torch.zeros(1, self.num_inputs)).amplitude_names

    def unit(self, values: Mapping[str, ndarray]) -> NamedArrays:
        """Parameters with amplitudes that add up to 1."""
        total = sum(float(np.exp(values[name]).sum()) for name in self.amplitudes)
        return {**values, **{name: np.asarray(values[name] - math.log(total)) for name in self.amplitudes}}

    def folded(self, chain: Chain) -> tuple[NamedArrays, SparseSums]:
        """Parameters with the best amplitude and noise for a chain's totals, and the totals there."""
        assert chain.totals is not None
        return folded(chain.values, chain.totals, self.model)


@message()
class Chain:
    """A point on its way up, its totals, and what L-BFGS remembers."""

    values: Mapping[str, AnyShape]
    """Parameters, the kernel at unit amplitude."""
    lengths: Float[ndarray, " D"]
    """Lengthscales at the start, the units of Z in coordinates."""
    totals: SparseSums | None
    """At ``values``; None before they are asked for."""
    height: float
    """J, in nats; 0 before the totals are known."""
    gradient: Float[ndarray, " G"]
    """Of J by the coordinates at ``place``; G = S, or 0 before it is asked for."""
    place: Float[ndarray, " G"]
    steps: Float[ndarray, "_ S"]
    changes: Float[ndarray, "_ S"]
    scales: Float[ndarray, " 2"]
    shrunk: float
    """Factor of the next line search's steps."""

    @property
    def moving(self) -> NamedArrays:
        """The parameters that an exchange is needed for, Z in units of ``lengths``."""
        moving = {name: array for name, array in self.values.items() if name != LOG_NOISE}
        return moving | {LOCATIONS: self.values[LOCATIONS] / self.lengths}

    @property
    def coordinates(self) -> Array:
        """:attr:`moving` as a vector [S]."""
        return pack(self.moving)

    def at(self, coordinates: Array) -> NamedArrays:
        """Parameters at other coordinates, logarithms within their range."""
        found = unpack(coordinates, self.moving)
        logs = {name: np.asarray(np.clip(array, -LOG_RANGE, LOG_RANGE)) for name, array in found.items()}
        return {**self.values, **logs, LOCATIONS: found[LOCATIONS] * self.lengths}

    @property
    def moved(self) -> bool:
        """Whether the gradient is that of another point."""
        return not np.array_equal(self.place, self.coordinates)

    def with_gradient(self, by_name: Mapping[str, ndarray]) -> Chain:
        """With the gradient of F at the point; a step that came before is a pair now."""
        pulled = {n: 2 * PENALTY * (array - 1) for n, array in self.values.items() if n.endswith("log_lengthscale")}
        units = {LOCATIONS: by_name[LOCATIONS] * self.lengths}
        gradient = pack({n: np.asarray({**by_name, **units}[n] - pulled.get(n, 0.0)) for n in self.moving})
        place, memory = self.coordinates, self.memory
        if self.gradient.size:
            memory = memory.after(place - self.place, self.gradient - gradient)
        return replace(self.remembering(memory), gradient=gradient, place=place)

    @property
    def memory(self) -> StepMemory:
        """What L-BFGS remembers."""
        return StepMemory(self.steps, self.changes, self.scales)

    def remembering(self, memory: StepMemory) -> Chain:
        """With another memory."""
        return replace(self, steps=memory.steps, changes=memory.changes, scales=memory.scales)


def chain_at(values: Mapping[str, ndarray]) -> Chain:
    """A chain that starts at parameters of unit amplitude."""
    none = np.empty(0)
    lengths = lengthscales(values)
    empty = Chain(values, lengths, None, 0.0, none, none, np.empty((0, 0)), np.empty((0, 0)), np.zeros(2), 1.0)
    return empty.remembering(forgotten(empty.coordinates.size))


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

    @property
    def evaluated(self) -> bool:
        """Whether the totals of every chain are known."""
        return all(chain.totals is not None for chain in self.chains)

    @property
    def rows(self) -> float:
        """N, of the totals."""
        totals = self.chains[0].totals
        return 0.0 if totals is None else float(totals.count)

    @property
    def best(self) -> Chain:
        """The chain with the higher J; the first of them before it is known."""
        return max(self.chains, key=lambda chain: chain.height if self.evaluated else 0.0)


def aim(chain: Chain) -> tuple[Chain, Array]:
    """The direction of the next line search [S], and the chain with the scales that it was found with."""
    sizes = {name: np.full(array.shape, float(name != LOCATIONS)) for name, array in chain.moving.items()}
    blocks = pack(sizes).astype(int)
    relative = lengthscales(chain.values) / chain.lengths  # a lengthscale, in coordinates of Z
    units = pack(
        {**{name: np.ones_like(array) for name, array in sizes.items()}, LOCATIONS: sizes[LOCATIONS] + relative}
    )
    first, cap = (np.asarray(limits)[blocks] * units for limits in (FIRST, CAP))
    way, memory = direction(chain.gradient, chain.memory, blocks, first, cap)
    return chain.remembering(memory), way


def searched(chain: Chain, tried: Sequence[NamedArrays], totals: Sequence[SparseSums]) -> Chain:
    """The chain at the best candidate; where none is higher, where it was, without pairs and with shorter steps."""
    heights = [objective(*pair) for pair in zip(tried, totals, strict=True)]
    best = int(np.argmax(heights))
    if heights[best] > chain.height:
        return replace(chain, values=tried[best], totals=totals[best], height=heights[best], shrunk=1.0)
    return replace(chain.remembering(forgotten(chain.coordinates.size)), shrunk=SHORTER * chain.shrunk)


def wider(values: Mapping[str, ndarray], by: float) -> NamedArrays:
    """Parameters with other lengthscales, in the same proportions."""
    return {name: array + by if name.endswith("log_lengthscale") else array for name, array in values.items()}


def without_totals(state: SGPRState) -> SGPRState:
    """The same points, to be evaluated anew: the totals are of other rows than those that answer now."""
    logger.warning("sites changed; the optimiser starts anew from where it is")
    chains = tuple(chain_at(chain.values) for chain in state.chains)
    return replace(state, chains=chains, exchanges=state.exchanges + 1)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals at candidates, by chain, and whose they are."""

    chains: list[list[SparseSums]]
    sites: tuple[str, ...]

    @property
    def rows(self) -> float:
        return float(self.chains[0][0].count)


def empty_model(section: ModelSection, num_inputs: int) -> dict[str, Array]:
    """The model's hyperparameters as configured, by name in the order of the sketch."""
    arrays = SparseGP(section, torch.zeros(1, num_inputs)).to_arrays()
    return {name: array for name, array in arrays.items() if name != LOCATIONS}


def agreed(sketch: Sketch, like: Mapping[str, ndarray]) -> NamedArrays:
    """The mode (Σ H)⁻¹ Σ Hθ of all sites' fits together, lengthscales within :data:`START_RANGE`."""
    mode = np.linalg.solve(sketch.precision, sketch.shift)
    pieces = np.split(mode, np.cumsum([array.size for array in like.values()])[:-1])
    found = {name: piece.reshape(like[name].shape) for name, piece in zip(like, pieces, strict=True)}
    lengths = {name: np.clip(array, *START_RANGE) for name, array in found.items() if name.endswith("log_lengthscale")}
    return found | lengths


# The start.


def start(problem: Problem, roster: Roster) -> Asking[SGPRState]:
    """Two chains, from a sketch of all rows around points that lie where inputs do."""
    section, num_inputs, seed = problem.model, problem.num_inputs, problem.seed
    shapes = yield from shapes_of_inputs(roster)
    anchors = points_like_inputs(shapes, SLOTS, np.random.default_rng([seed, *b"anchors"]))
    model = empty_model(section, num_inputs)
    sizes = {"C": SLOTS, "H": sum(array.size for array in model.values())}
    summed: Summed[Sketch] = yield Total(Sketch, Anchors(anchors), sizes=sizes)
    if summed.total is None:
        raise RunError("no site answered where its inputs lie; see the failures above")
    rng = np.random.default_rng([seed, *b"inducing"])
    draws = drawn(summed.total.rows, summed.total.first, summed.total.second, rng)
    count = min(_points(problem, roster), len(np.unique(draws, axis=0)))
    most = min(candidates(problem, roster, count), len(np.unique(draws, axis=0)))
    expected = {name: np.full_like(array, prior(name, num_inputs)[0]) for name, array in model.items()}
    chains = []
    for first in (agreed(summed.total, model), expected):
        lengths = lengthscales({**first, LOCATIONS: draws})
        centres = centres_of(draws / lengths, most, np.random.default_rng([seed, *b"centres"]))
        chains.append(chain_at(problem.unit({**first, LOCATIONS: centres * lengths})))
    logger.info("%d inducing points; at most %d exchanges for training", count, problem.exchanges)
    for words in told_by_total(most, roster.rows, CANDIDATES):
        logger.warning(words)
    return SGPRState(tuple(chains), (), BEFORE, count)


def _points(problem: Problem, roster: Roster) -> int:
    """P: as configured, at most the number of rows, and by the policy at most what the smallest site bears.

    Raises:
        ConfigError: small sites may take part under masks alone.
    """
    most = min(problem.model.num_inducing, sum(roster.rows.values()))
    small = [site for site, rows in roster.rows.items() if rows < ROWS_PER_POINT * most]
    if roster.totals_only or not small or problem.small_sites == "warn":
        return most
    if problem.small_sites == "cap":
        return max(1, min(roster.rows.values()) // ROWS_PER_POINT)
    raise ConfigError(
        f"`sgpr.small-sites` = 'masks': site(s) {', '.join(small[:5])} have fewer than {ROWS_PER_POINT} rows for"
        f" each of {most} inducing points; set `privacy.secure-aggregation` to true, or lower `model.num-inducing`"
    )


def candidates(problem: Problem, roster: Roster, count: int) -> int:
    """How many points ``count`` are chosen from by the first sums: at most rows, and what the smallest site bears."""
    most = min(CANDIDATES * count, sum(roster.rows.values()))
    if roster.totals_only or problem.small_sites == "warn":
        return most
    return max(count, min(most, min(roster.rows.values()) // ROWS_PER_POINT))


# A round.


def one_round(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[SGPRState, Figures]]:
    """A gradient of every chain that has moved, and a line search of every chain."""
    if set(state.sites) != set(roster.sites) or not state.evaluated:
        state = yield from _evaluated(problem, state, roster.sites)
    if state.evaluated:
        state = yield from _differentiated(problem, state)
    if state.evaluated:
        state = yield from _searched(state)
    return state, _figures(problem, state)


def _figures(problem: Problem, state: SGPRState) -> Figures:
    if not state.evaluated:
        return {}
    values, totals = problem.folded(state.best)
    bound = facts(values, totals)["bound"]
    return {"bound": bound, "objective": bound / state.rows, "noise": noise_of(values)}


def _evaluated(problem: Problem, state: SGPRState, sites: tuple[str, ...]) -> Asking[SGPRState]:
    """Totals of these sites at some lengthscales around those of each chain; pairs are of other rows."""
    tried = [[wider(chain.values, by) for by in WIDER] for chain in state.chains]
    totals = yield from _totals(tried, sites)
    if totals is None:
        return replace(state, exchanges=state.exchanges + 1)
    chains = []
    for values, found in zip(tried, totals.chains, strict=True):
        best = int(np.argmax([objective(*at) for at in zip(values, found, strict=True)]))
        chains.append(_thinned(problem, values[best], found[best], state.points))
    return SGPRState(tuple(chains), totals.sites, state.exchanges + 1, state.points)


def _thinned(problem: Problem, values: Mapping[str, ndarray], totals: SparseSums, count: int) -> Chain:
    """A chain at those candidates for inducing points that explain most."""
    kept, totals = thinned(values, totals, count, problem.model)
    return replace(chain_at(kept), totals=totals, height=objective(kept, totals))


def _differentiated(problem: Problem, state: SGPRState) -> Asking[SGPRState]:
    """With the gradients of the chains that have moved."""
    asked = {n: problem.folded(chain) for n, chain in enumerate(state.chains) if chain.moved}
    if not asked:
        return state
    request = TrialAdjoints.of([at for at, _ in asked.values()], [adjoints_at(*at) for at in asked.values()])
    sizes = sizes_at(request.projections.shape[1])
    summed: Summed[TrialGradients] = yield Total(TrialGradients, request, state.sites, sizes=sizes)
    if summed.total is None or set(summed.sites) != set(state.sites) or summed.silent:
        return without_totals(state)
    shares = dict(zip(asked, apart(summed.total.values), strict=True))
    chains = list(state.chains)
    for n, (values, totals) in asked.items():
        through = through_inducing_points(values, totals, adjoints_at(values, totals), problem.model)
        chains[n] = chains[n].with_gradient({name: shares[n][name] + through[name] for name in through})
    return replace(state, chains=tuple(chains), exchanges=state.exchanges + 1)


def _searched(state: SGPRState) -> Asking[SGPRState]:
    """Every chain at the best of its candidates, if that is higher than where it is."""
    aimed = [aim(chain) for chain in state.chains]
    tried = [[chain.at(chain.coordinates + by * chain.shrunk * way) for by in STEPS] for chain, way in aimed]
    totals = yield from _totals(tried, state.sites)
    if totals is None or set(totals.sites) != set(state.sites) or totals.rows != state.rows:
        return without_totals(state)
    chains = [
        searched(chain, values, found) for (chain, _), values, found in zip(aimed, tried, totals.chains, strict=True)
    ]
    moved = replace(state, chains=tuple(chains), exchanges=state.exchanges + 1)
    climbed = [(new.height - old.height) / state.rows for new, old in zip(chains, state.chains, strict=True)]
    flat = max(climbed) < TOLERANCE * max(1.0, abs(moved.best.height) / state.rows)
    shortening = any(SHORTEST < chain.shrunk < 1 for chain in chains)
    gain = (moved.best.height - state.best.height) / state.rows
    gains = np.append(state.gains, gain)[-SMOOTHED:]
    return replace(moved, gains=gains, converged=flat and not shortening)


def _totals(tried: list[list[NamedArrays]], sites: tuple[str, ...]) -> Asking[_Totals | None]:
    """Totals at the candidates of every chain, in one exchange; None where nobody answers."""
    request, sizes = Trials(numbered([at for chain in tried for at in chain])), sizes_at(len(tried[0][0][LOCATIONS]))
    summed: Summed[TrialSums] = yield Total(TrialSums, request, sites, sizes=sizes)
    if summed.total is None:
        return None
    each = iter(summed.total.each())
    return _Totals([[next(each) for _ in chain] for chain in tried], summed.sites)


# The end.


def finished(problem: Problem, state: SGPRState) -> bool:
    """Whether the chains rest, or another round would take more exchanges than are allowed."""
    return state.converged or state.exchanges + A_ROUND > problem.exchanges


def posterior(problem: Problem, state: SGPRState, roster: Roster) -> Asking[tuple[PooledPosterior, SparseSums]]:
    """The exact posterior of all rows at the better chain's point, and the totals it comes from."""
    chain = state.best
    if chain.totals is None or set(state.sites) != set(roster.everyone):
        totals: SparseSums = yield from pooled(chain.values, roster.everyone)
        chain = _thinned(problem, chain.values, totals, state.points)
    values, totals = problem.folded(chain)
    return posterior_at(values, totals), totals


def parameters(problem: Problem, state: SGPRState) -> NamedArrays:
    """The parameters of the better chain."""
    return problem.folded(state.best)[0] if state.evaluated else dict(state.best.values)


def warnings(problem: Problem, state: SGPRState, roster: Roster, called: Callable[[Sequence[str]], str]) -> list[str]:
    """Which sites' sums, or whether the total, nearly reveal rows, and what limited the inducing points.

    Args:
        problem: What stays the same.
        state: The state at the end.
        roster: The sites.
        called: Names of sites for people.
    """
    count, rows = len(state.best.values[LOCATIONS]), roster.rows
    most = candidates(problem, roster, count)
    found = told_by_total(most, rows, CANDIDATES)
    small = [site for site, number in rows.items() if number < ROWS_PER_POINT * most]
    if small and not roster.totals_only:
        found.append(
            f"site(s) {called(small)} have fewer than {ROWS_PER_POINT} rows for each of {most} points that"
            f" {count} inducing points were chosen from: their sums, seen in the clear, are nearly their rows;"
            f" `sgpr.small-sites` = {problem.small_sites!r} allows that, 'cap' takes fewer points, 'masks'"
            " insists on `privacy.secure-aggregation` = true, which hides them"
        )
    if count < min(problem.model.num_inducing, sum(rows.values())):
        least = min(rows, key=lambda site: rows[site])
        found.append(
            f"{count} inducing points instead of {problem.model.num_inducing}: `sgpr.small-sites` = 'cap', and"
            f" site {called([least])} has {rows[least]} rows; totals under masks need no such limit"
        )
    return found


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
        return Problem.of(self.config, self.preparation.num_inputs, self.options)

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
        more = outlook(state.gains, MORE // A_ROUND)
        progress = detail_of_progress(state.exchanges, state.gains, more, MORE, state.rows)
        details = facts(found.values, totals) | progress | {"num_inducing": len(state.best.values[LOCATIONS])}
        return Predicted(found, saved(found, self.config.model), details)

    def public(self, state: SGPRState) -> NamedArrays:
        """The parameters of the better chain."""
        return encode(Parameters(parameters(self.problem, state)))

    def adopt(self, state: SGPRState, arrays: NamedArrays) -> SGPRState:
        """Start one chain from other parameters; the same ones change nothing."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        if np.array_equal(pack(given), pack(parameters(self.problem, state))):
            return state
        return SGPRState((chain_at(self.problem.unit(given)),), (), state.exchanges)

    def final(self, state: SGPRState, roster: Roster) -> Asking[dict[str, Any]]:
        """Lengthscales, and how well all rows know them."""
        del state
        values = self.scoring.predicted.request.values
        spread = yield from known_lengthscales(values, roster.sites, self.config.model)
        return {"relevance": lengthscale_facts(values, spread, CURVATURE)}

    def warnings(self) -> list[str]:
        """Also what is nearly revealed."""
        return super().warnings() + warnings(self.problem, self.current, self.roster(), self.called)
