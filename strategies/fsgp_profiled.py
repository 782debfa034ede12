"""FSGP in about twenty exchanges: the pooled bound, its amplitude and noise at their best, from two starts at once.

On real machines a trip costs seconds whatever it carries, so trips are what is saved. The bound is maximised over the
kernel's amplitude and the noise by the server alone (:mod:`fedgp_flower.gp.profiled`); a line search is one trip, its
candidates being evaluated together; two chains, from the lengthscales that the sites' own fits agree on and from those
of the prior, share every trip. A round is a gradient and a line search: two exchanges. With descriptions, where inputs
lie, the sketch and the first sums, eight rounds are twenty. The first sums are of twice as many points as are kept: the
server sees by itself which ones explain most (:mod:`fedgp_flower.gp.selection`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.gp.ascent import Memory, direction, forgotten, outlook
from fedgp_flower.gp.cells import centres_of, drawn
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.profiled import PENALTY
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.fsgp.mathematics import prior
from fedgp_flower.methods.fsgp.messages import (
    Anchors,
    PooledPosterior,
    Sketch,
    Statistics,
    TrialAdjoints,
    TrialGradients,
    Trials,
    TrialSums,
    apart,
    numbered,
)
from fedgp_flower.methods.fsgp.options import FSGPOptions
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import AnyShape, Array, NamedArrays
from strategies.fsgp import (
    LOG_NOISE,
    ROWS_PER_POINT,
    facts,
    noise_of,
    pooled,
    posterior_at,
    saved,
    told_by_total,
)
from strategies.fsgp_exact import pack, through_inducing_points, unpack
from strategies.profiled_bound import (
    CURVATURE,
    LOCATIONS,
    adjoints_at,
    folded,
    known_lengthscales,
    objective,
    thinned,
)
from strategies.server.finalise import Posterior, lengthscale_facts
from strategies.server.questions import Asking, Figures, Roster, Summed, Total
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


@message()
class Chain:
    """A point on its way up, its totals, and what L-BFGS remembers."""

    values: Mapping[str, AnyShape]
    """Parameters, the kernel at unit amplitude."""
    lengths: Float[ndarray, " D"]
    """Lengthscales at the start, the units of Z in coordinates."""
    totals: Statistics | None
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
        pulled = {n: 2 * PENALTY * (own - 1) for n, own in self.values.items() if n.endswith("log_lengthscale")}
        units = {LOCATIONS: by_name[LOCATIONS] * self.lengths}
        gradient = pack({n: {**by_name, **units}[n] - pulled.get(n, 0.0) for n in self.moving})
        place, memory = self.coordinates, self.memory
        if self.gradient.size:
            memory = memory.after(place - self.place, self.gradient - gradient)
        return replace(self.remembering(memory), gradient=gradient, place=place)

    @property
    def memory(self) -> Memory:
        """What L-BFGS remembers."""
        return Memory(self.steps, self.changes, self.scales)

    def remembering(self, memory: Memory) -> Chain:
        """With another memory."""
        return replace(self, steps=memory.steps, changes=memory.changes, scales=memory.scales)


def chain_at(values: Mapping[str, ndarray]) -> Chain:
    """A chain that starts at parameters of unit amplitude."""
    none = np.empty(0)
    lengths = lengthscales(values)
    empty = Chain(values, lengths, None, 0.0, none, none, np.empty((0, 0)), np.empty((0, 0)), np.zeros(2), 1.0)
    return empty.remembering(forgotten(empty.coordinates.size))


@message()
class ProfiledState:
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
    mixture: tuple[PooledPosterior, ...] = ()
    """Of :mod:`strategies.fsgp_laplace`: the better chain's posterior and those of draws around it."""

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


def lengthscales(values: Mapping[str, ndarray]) -> Array:
    """A lengthscale for each input [D]: the kernel's first, or 1 where it has none."""
    shape = values[LOCATIONS].shape[1]
    found = [np.exp(values[name].ravel()) for name in sorted(values) if name.endswith("log_lengthscale")]
    return np.broadcast_to(found[0], shape).copy() if found else np.ones(shape)


def aim(chain: Chain) -> tuple[Chain, Array]:
    """The direction of the next line search [S], and the chain with the scales that it was found with."""
    sizes = {name: np.full(array.shape, float(name != LOCATIONS)) for name, array in chain.moving.items()}
    blocks = pack(sizes).astype(int)
    relative = lengthscales(chain.values) / chain.lengths  # a lengthscale, in coordinates of Z
    units = pack({**{name: np.ones_like(own) for name, own in sizes.items()}, LOCATIONS: sizes[LOCATIONS] + relative})
    first, cap = (np.asarray(limits)[blocks] * units for limits in (FIRST, CAP))
    way, memory = direction(chain.gradient, chain.memory, blocks, first, cap)
    return chain.remembering(memory), way


def searched(chain: Chain, tried: Sequence[NamedArrays], totals: Sequence[Statistics]) -> Chain:
    """The chain at the best candidate; where none is higher, where it was, without pairs and with shorter steps."""
    heights = [objective(*own) for own in zip(tried, totals, strict=True)]
    best = int(np.argmax(heights))
    if heights[best] > chain.height:
        return replace(chain, values=tried[best], totals=totals[best], height=heights[best], shrunk=1.0)
    return replace(chain.remembering(forgotten(chain.coordinates.size)), shrunk=SHORTER * chain.shrunk)


def wider(values: Mapping[str, ndarray], by: float) -> NamedArrays:
    """Parameters with other lengthscales, in the same proportions."""
    return {name: array + by if name.endswith("log_lengthscale") else array for name, array in values.items()}


def without_totals(state: ProfiledState) -> ProfiledState:
    """The same points, to be evaluated anew: the totals are of other rows than those that answer now."""
    logger.warning("sites changed; the optimiser starts anew from where it is")
    chains = tuple(chain_at(chain.values) for chain in state.chains)
    return replace(state, chains=chains, exchanges=state.exchanges + 1)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals at candidates, by chain, and whose they are."""

    chains: list[list[Statistics]]
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
    lengths = {name: np.clip(own, *START_RANGE) for name, own in found.items() if name.endswith("log_lengthscale")}
    return found | lengths


def expected(like: Mapping[str, ndarray], num_inputs: int) -> NamedArrays:
    """The means of the priors."""
    return {name: np.full_like(array, prior(name, num_inputs)[0]) for name, array in like.items()}


class FSGPProfiled(FederatedStrategy[ProfiledState]):
    """Maximise the bound of all rows in few exchanges, amplitude and noise at the server."""

    method = "fsgp"
    options_class = FSGPOptions
    state_class = ProfiledState
    options: FSGPOptions
    implied: ClassVar[Mapping[str, Any]] = {"objective": "profiled", "hyperparameters": "point"}
    exchanges_a_round = A_ROUND
    usual_exchanges: ClassVar[int] = 20

    # The start.

    def initialise(self, roster: Roster) -> Asking[ProfiledState]:
        """Two starts, from a sketch of all rows around points that lie where inputs do."""
        section, num_inputs = self.config.model, self.preparation.num_inputs
        shapes = yield from shapes_of_inputs(roster)
        anchors = points_like_inputs(shapes, "copula", SLOTS, np.random.default_rng([self.config.seed, *b"anchors"]))
        model = empty_model(section, num_inputs)
        self.sizes |= {"C": SLOTS, "H": sum(array.size for array in model.values())}
        summed: Summed[Sketch] = yield Total(Sketch, Anchors(anchors))
        if summed.total is None:
            raise RunError("no site answered where its inputs lie; see the failures above")
        rng = np.random.default_rng([self.config.seed, *b"inducing"])
        draws = drawn(summed.total.rows, summed.total.first, summed.total.second, rng)
        count = min(self.points(roster), len(np.unique(draws, axis=0)))
        candidates = min(self.candidates(roster, count), len(np.unique(draws, axis=0)))
        chains = []
        for start in (agreed(summed.total, model), expected(model, num_inputs)):
            lengths = lengthscales({**start, LOCATIONS: draws})
            centres = centres_of(draws / lengths, candidates, np.random.default_rng([self.config.seed, *b"centres"]))
            chains.append(chain_at(self._unit({**start, LOCATIONS: centres * lengths})))
        logger.info("%d inducing points; at most %d exchanges for training", count, self.most_exchanges)
        for words in told_by_total(candidates, roster.rows, CANDIDATES):
            logger.warning(words)
        return ProfiledState(tuple(chains), (), BEFORE, count)

    def points(self, roster: Roster) -> int:
        """P: as configured, but no more than there are rows, and by the policy no more than the smallest site bears.

        Raises:
            ConfigError: small sites are to take part under masks alone.
        """
        most = min(self.config.model.num_inducing, sum(roster.rows.values()))
        small = [site for site, rows in roster.rows.items() if rows < ROWS_PER_POINT * most]
        if roster.totals_only or not small or self.options.small_sites == "warn":
            return most
        if self.options.small_sites == "cap":
            return max(1, min(roster.rows.values()) // ROWS_PER_POINT)
        raise ConfigError(
            f"`fsgp.small-sites` = 'masks': site(s) {', '.join(small[:5])} have fewer than {ROWS_PER_POINT} rows for"
            f" each of {most} inducing points; set `privacy.secure-aggregation` to true, or lower `model.num-inducing`"
        )

    def candidates(self, roster: Roster, count: int) -> int:
        """Among how many points P are chosen by the first sums, at most rows, and what the smallest site bears."""
        most = min(CANDIDATES * count, sum(roster.rows.values()))
        if roster.totals_only or self.options.small_sites == "warn":
            return most
        return max(count, min(most, min(roster.rows.values()) // ROWS_PER_POINT))

    def warnings(self) -> list[str]:
        """Which sites' sums, or whether all their total, are nearly rows, or what kept inducing points few."""
        count, rows, found = len(self.current.best.values[LOCATIONS]), self.roster().rows, super().warnings()
        most = self.candidates(self.roster(), count)
        found += told_by_total(most, rows, CANDIDATES)
        small = [site for site, own in rows.items() if own < ROWS_PER_POINT * most]
        if small and self.masking is None:
            found.append(
                f"site(s) {self.called(small)} have fewer than {ROWS_PER_POINT} rows for each of {most} points that"
                f" {count} inducing points were chosen from: their sums, seen in the clear, are nearly their rows;"
                f" `fsgp.small-sites` = {self.options.small_sites!r} allows that, 'cap' takes fewer points, 'masks'"
                " insists on `privacy.secure-aggregation` = true, which hides them"
            )
        if count < min(self.config.model.num_inducing, sum(rows.values())):
            least = min(rows, key=lambda site: rows[site])
            found.append(
                f"{count} inducing points instead of {self.config.model.num_inducing}: `fsgp.small-sites` = 'cap', and"
                f" site {self.called([least])} has {rows[least]} rows; totals under masks need no such limit"
            )
        return found

    def sized(self, count: int) -> None:
        """Answers are about so many inducing points."""
        self.sizes |= {"M": count, "Q": count * (count + 1) // 2}

    def _unit(self, values: Mapping[str, ndarray]) -> NamedArrays:
        """Parameters with amplitudes that add up to 1."""
        total = sum(float(np.exp(values[name]).sum()) for name in self.amplitudes)
        return {**values, **{name: np.asarray(values[name] - math.log(total)) for name in self.amplitudes}}

    @property
    def amplitudes(self) -> list[str]:
        """Names of the amplitudes that scale the whole kernel together."""
        return SparseGP(self.config.model, torch.zeros(1, self.preparation.num_inputs)).amplitude_names

    def resumed(self, state: ProfiledState, roster: Roster) -> Asking[ProfiledState]:
        """The state as it was; its number of inducing points is known again."""
        self.sized(len(state.chains[0].values[LOCATIONS]))
        return (yield from super().resumed(state, roster))

    # A round.

    def one_round(self, state: ProfiledState, roster: Roster) -> Asking[tuple[ProfiledState, Figures]]:
        """A gradient of every chain that has moved, and a line search of every chain."""
        if set(state.sites) != set(roster.sites) or not state.evaluated:
            state = yield from self._evaluated(state, roster.sites)
        if state.evaluated:
            state = yield from self._differentiated(state)
        if state.evaluated:
            state = yield from self._searched(state)
        return state, self._figures(state)

    def _evaluated(self, state: ProfiledState, sites: tuple[str, ...]) -> Asking[ProfiledState]:
        """Totals of these sites at some lengthscales around those of each chain; pairs are of other rows."""
        tried = [[wider(chain.values, by) for by in WIDER] for chain in state.chains]
        totals = yield from self._totals(tried, sites)
        if totals is None:
            return replace(state, exchanges=state.exchanges + 1)
        chains = []
        for values, own in zip(tried, totals.chains, strict=True):
            heights = [objective(*one) for one in zip(values, own, strict=True)]
            best = int(np.argmax(heights))
            chains.append(self._thinned(values[best], own[best], state.points))
        return ProfiledState(tuple(chains), totals.sites, state.exchanges + 1, state.points)

    def _thinned(self, values: Mapping[str, ndarray], totals: Statistics, count: int) -> Chain:
        """A chain at those candidates for inducing points that explain most."""
        kept, totals = thinned(values, totals, count, self.config.model)
        return replace(chain_at(kept), totals=totals, height=objective(kept, totals))

    def _differentiated(self, state: ProfiledState) -> Asking[ProfiledState]:
        """With the gradients of the chains that have moved."""
        asked = {n: self._folded(own) for n, own in enumerate(state.chains) if own.moved}
        if not asked:
            return state
        request = TrialAdjoints.of([adjoints_at(*own) for own in asked.values()])
        summed: Summed[TrialGradients] = yield Total(TrialGradients, request, state.sites)
        if summed.total is None or set(summed.sites) != set(state.sites) or summed.silent:
            return without_totals(state)
        shares = dict(zip(asked, apart(summed.total.values), strict=True))
        section, chains = self.config.model, list(state.chains)
        for n, (values, totals) in asked.items():
            through = through_inducing_points(values, totals, adjoints_at(values, totals), section)
            chains[n] = chains[n].with_gradient({name: shares[n][name] + through[name] for name in through})
        return replace(state, chains=tuple(chains), exchanges=state.exchanges + 1)

    def _folded(self, chain: Chain) -> tuple[NamedArrays, Statistics]:
        """Parameters with the amplitude and noise that its totals are best at, and the totals there."""
        assert chain.totals is not None
        return folded(chain.values, chain.totals, self.config.model)

    def _searched(self, state: ProfiledState) -> Asking[ProfiledState]:
        """Every chain at the best of its candidates, if that is higher than where it is."""
        aimed = [aim(chain) for chain in state.chains]
        tried = [[chain.at(chain.coordinates + by * chain.shrunk * way) for by in STEPS] for chain, way in aimed]
        totals = yield from self._totals(tried, state.sites)
        if totals is None or set(totals.sites) != set(state.sites) or totals.rows != state.rows:
            return without_totals(state)
        chains = [
            searched(chain, values, own) for (chain, _), values, own in zip(aimed, tried, totals.chains, strict=True)
        ]
        moved = replace(state, chains=tuple(chains), exchanges=state.exchanges + 1)
        climbed = [(new.height - old.height) / state.rows for new, old in zip(chains, state.chains, strict=True)]
        flat = max(climbed) < self.options.tolerance * max(1.0, abs(moved.best.height) / state.rows)
        shortening = any(SHORTEST < chain.shrunk < 1 for chain in chains)
        gain = (moved.best.height - state.best.height) / state.rows
        gains = np.append(state.gains, gain)[-SMOOTHED:]
        return replace(moved, gains=gains, converged=flat and not shortening)

    def _totals(self, tried: list[list[NamedArrays]], sites: tuple[str, ...]) -> Asking[_Totals | None]:
        """Totals at the candidates of every chain, in one exchange; None where nobody answers."""
        self.sized(len(tried[0][0][LOCATIONS]))
        request = Trials(numbered([values for own in tried for values in own]))
        summed: Summed[TrialSums] = yield Total(TrialSums, request, sites)
        if summed.total is None:
            return None
        each = iter(summed.total.each())
        return _Totals([[next(each) for _ in own] for own in tried], summed.sites)

    def _figures(self, state: ProfiledState) -> Figures:
        if not state.evaluated:
            return {}
        values, totals = self._folded(state.best)
        bound = facts(posterior_at(values, totals), totals)
        return {"bound": bound["bound"], "objective": bound["bound"] / state.rows, "noise": noise_of(values)}

    # What is kept.

    def finished(self, state: ProfiledState) -> bool:
        """Whether the chains rest, or another round would take more exchanges than there are to be."""
        return state.converged or state.exchanges + A_ROUND + self.afterwards > self.most_exchanges

    @property
    def afterwards(self) -> int:
        """Exchanges that come after the ascent and count with it."""
        return 0

    @property
    def most_exchanges(self) -> int:
        """As configured, or the usual number."""
        return self.options.exchanges or self.usual_exchanges

    def exchanges_to_come(self, state: ProfiledState) -> int:
        """As many as are left, if it does not converge before."""
        return max(0, self.most_exchanges - state.exchanges)

    def predictive(self, state: ProfiledState, roster: Roster) -> Asking[PooledPosterior]:
        """The exact posterior of all rows at the better chain's point."""
        chain = state.best
        if chain.totals is None or set(state.sites) != set(roster.everyone):
            self.sized(len(chain.values[LOCATIONS]))
            chain = self._thinned(chain.values, (yield from pooled(chain.values, roster.everyone)), state.points)
            self.sized(len(chain.values[LOCATIONS]))
        values, totals = self._folded(chain)
        self.last = (posterior_at(values, totals), totals)
        return self.last[0]

    def public(self, state: ProfiledState) -> NamedArrays:
        """The parameters of the better chain."""
        return encode(Parameters(self._public(state)))

    def _public(self, state: ProfiledState) -> NamedArrays:
        return self._folded(state.best)[0] if state.evaluated else dict(state.best.values)

    def adopt(self, state: ProfiledState, arrays: NamedArrays) -> ProfiledState:
        """Other parameters are the one chain's start; the same ones change nothing."""
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        if np.array_equal(pack(given), pack(self._public(state))):
            return state
        return ProfiledState((chain_at(self._unit(given)),), (), state.exchanges)

    def final(self, state: ProfiledState, roster: Roster) -> Asking[dict[str, Any]]:
        """Lengthscales, and how well all rows know them."""
        del state
        if not self.options.intervals:
            return {}
        values = self.last[0].values
        spread = yield from known_lengthscales(values, roster.sites, self.config.model)
        return {"relevance": lengthscale_facts(values, spread, CURVATURE)}

    def posterior_of(self, state: ProfiledState) -> Posterior:
        """Parameters in natural units, q of whitened inducing values."""
        return saved(self.last[0], self.config.model)

    def converged(self, state: ProfiledState) -> bool:
        """Whether the better chain rests."""
        return state.converged

    def details_of(self, state: ProfiledState) -> dict[str, Any]:
        """The bound in nats, the noise, what the latest round of how many exchanges gained, and what more would."""
        more = outlook(state.gains, MORE // A_ROUND)
        progress = {
            "exchanges": state.exchanges,
            "latest_gain_per_row": float(state.gains[-1]) if state.gains.size else None,
            "forecast_exchanges": MORE,
            "forecast_rise": None if more is None else more * state.rows,
        }
        return facts(*self.last) | progress | {"num_inducing": len(state.best.values[LOCATIONS])}
