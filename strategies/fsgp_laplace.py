"""FSGP in about twenty exchanges whose predictions mix over the hyperparameters that the rows leave open.

After the ascent of :mod:`strategies.fsgp_profiled` three more exchanges: the sums at a small step along each logarithm
of the kernel; the gradients there, whose differences are the Hessian of J at this Z; and the sums at draws of the
Gaussian that it makes, which give each draw's exact posterior, with an amplitude and a noise drawn at the server. Where
J is far below what the Gaussian says of a draw, it is left out. The best point and the draws predict together, evenly;
see :mod:`fedgp_flower.gp.laplace`. Nothing but totals is needed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from fedgp_flower.gp.laplace import amplitude_and_noise, bounded, drawn, plausible
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.profiled import LEAST_NOISE, PENALTY, scaled
from fedgp_flower.methods.fsgp.messages import MixedPosterior, PooledPosterior, Statistics
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, NamedArrays
from strategies.fsgp import LOG_NOISE, posterior_at, saved
from strategies.fsgp_exact import pack, unpack
from strategies.fsgp_profiled import Chain, FSGPProfiled, ProfiledState, chain_at, without_totals
from strategies.profiled_bound import LOCATIONS, bends, objective
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Figures, Roster

logger = logging.getLogger("fedgp")

FEW_ROWS = 2000
"""Below, there are draws by default: on splits 0 and 1 they lowered NLL of 277 to 1439 rows, not of 7373 or more."""
DRAWS = 10
EXCHANGES = 3
"""After the ascent."""


class FSGPLaplace(FSGPProfiled):
    """Maximise the bound of all rows, then mix over what is nearly as good."""

    implied: ClassVar[Mapping[str, Any]] = {"objective": "profiled", "hyperparameters": "laplace"}
    mixed: tuple[PooledPosterior, ...]
    """What sites predicted with in the latest evaluation."""

    @property
    def mixes(self) -> bool:
        """Whether there are to be draws: always, or of few rows, whose hyperparameters are known less well.

        Where fewer exchanges than usual are allowed, all of them are for the ascent.
        """
        if self.config.model.hyperparameters == "laplace":
            return True
        enough = self.most_exchanges >= self.usual_exchanges - 1  # rounds take two: one less makes no difference
        return enough and sum(self.preparation.rows.values()) < FEW_ROWS

    @property
    def afterwards(self) -> int:
        """Those of the draws."""
        return EXCHANGES if self.mixes else 0

    def initialise(self, roster: Roster) -> Asking[ProfiledState]:
        """As without draws; says whether there will be any."""
        how = "a mixture over hyperparameters" if self.mixes else "at the best hyperparameters"
        logger.info("predictions: %s (`model.hyperparameters`)", how)
        return (yield from super().initialise(roster))

    def one_round(self, state: ProfiledState, roster: Roster) -> Asking[tuple[ProfiledState, Figures]]:
        """A round of the ascent, or, when that has ended, the draws."""
        resting = self.mixes and super().finished(state) and state.evaluated
        if not resting or set(state.sites) != set(roster.sites):
            return (yield from super().one_round(replace(state, mixture=()), roster))
        state = yield from self._drawn(state)
        return state, self._figures(state)

    def _drawn(self, state: ProfiledState) -> Asking[ProfiledState]:
        """The draws around the better chain's point; without them, to be evaluated anew, where a site is lost."""
        best, rng = state.best, np.random.default_rng([self.config.seed, *b"hyperparameters"])
        if kernel := self.kernel_of(best.values):
            precision = yield from self._precision(state, kernel)
            state = replace(state, exchanges=state.exchanges + 2)
            if precision is None:
                return without_totals(state)
            places, expected = drawn(pack(kernel), precision, DRAWS, rng)
            found = yield from self._at(state, best, np.clip(places, -LOG_RANGE, LOG_RANGE))
            if found is None:
                return without_totals(state)
            state = replace(state, exchanges=state.exchanges + 1)
        else:  # a kernel that is an amplitude and no more, such as the linear one
            found, expected = [best] * DRAWS, np.zeros(DRAWS)
        kept = plausible(np.array([own.height for own in found]) - best.height, expected)
        draws = [self._settled(own, rng) for own, good in zip(found, kept, strict=True) if good]
        return replace(state, mixture=(posterior_at(*self._folded(best)), *draws))

    def _precision(self, state: ProfiledState, kernel: NamedArrays) -> Asking[Array | None]:
        """H of J at the best chain's point [H, H], in two exchanges; None where a site is lost."""
        found = yield from bends(state.best.values, kernel, state.sites, self.config.model)
        if found is None:
            return None
        pulled = {n: np.full_like(own, 2 * PENALTY * n.endswith("log_lengthscale")) for n, own in kernel.items()}
        return bounded(found + np.diag(pack(pulled)))

    def kernel_of(self, arrays: Mapping[str, ndarray]) -> NamedArrays:
        """Of named arrays those of the kernel but for its (first) amplitude, which the server finds by itself."""
        rest = (LOCATIONS, LOG_NOISE, self.amplitudes[0])
        return {name: array for name, array in arrays.items() if name not in rest}

    def _at(self, state: ProfiledState, best: Chain, places: Array) -> Asking[list[Chain] | None]:
        """Chains at the best one's Z and other hyperparameters [S, H], with their totals; None where a site is lost."""
        like = self.kernel_of(best.values)
        tried: list[list[NamedArrays]] = [[{**best.values, **unpack(place, like)}] for place in places]
        totals = yield from self._totals(tried, state.sites)
        if totals is None or set(totals.sites) != set(state.sites) or totals.rows != state.rows:
            return None
        return [
            replace(chain_at(values), totals=own, height=objective(values, own))
            for (values,), (own,) in zip(tried, totals.chains, strict=True)
        ]

    def _settled(self, chain: Chain, rng: np.random.Generator) -> PooledPosterior:
        """The exact posterior at a draw, with an amplitude and noise drawn for its totals."""
        assert chain.totals is not None
        (logs,), _ = drawn(*amplitude_and_noise(chain.totals.sums()), 1, rng)
        amplitude, noise = math.exp(logs[0]), max(math.exp(logs[1]), LEAST_NOISE)
        louder = {name: np.asarray(chain.values[name] + math.log(amplitude)) for name in self.amplitudes}
        values = {**chain.values, **louder, LOG_NOISE: np.full_like(chain.values[LOG_NOISE], math.log(noise))}
        return posterior_at(values, Statistics.of(scaled(chain.totals.sums(), amplitude)))

    def finished(self, state: ProfiledState) -> bool:
        """Whether there are draws around where the ascent ended, if there are to be any."""
        return super().finished(state) and (bool(state.mixture) or not self.mixes)

    def predictive(self, state: ProfiledState, roster: Roster) -> Asking[MixedPosterior]:  # type: ignore[override]
        """The best point and the draws, each with the exact posterior of all rows."""
        self.mixed = ((yield from super().predictive(state, roster)), *(yield from self.draws(state, roster.everyone)))
        return MixedPosterior.of(self.mixed)

    def draws(self, state: ProfiledState, sites: tuple[str, ...]) -> Asking[tuple[PooledPosterior, ...]]:
        """The draws of a state, each with the exact posterior of these sites' rows."""
        draws = state.mixture[1:]
        if not draws or set(state.sites) == set(sites):
            return draws
        totals = yield from self._totals([[dict(own.values)] for own in draws], sites)
        each = [] if totals is None else totals.chains  # none where nobody answers
        return tuple(posterior_at(own.values, one) for own, (one,) in zip(draws, each, strict=False))

    def posterior_of(self, state: ProfiledState) -> Posterior:
        """Hyperparameters and q of each component, one after another, and Z, which they share; or those of the one."""
        del state
        return saved_mixture(self.mixed, self.config.model)

    def details_of(self, state: ProfiledState) -> dict[str, Any]:
        """Also how many hyperparameters predict together."""
        return super().details_of(state) | {"components": len(self.mixed)}


def saved_mixture(components: Sequence[PooledPosterior], model: ModelSection) -> Posterior:
    """Arrays of each component, one after another, and Z, which they share; or those of the one."""
    first, *others = [saved(own, model) for own in components]
    if not others:
        return first
    arrays = {name: np.stack([array, *(own.arrays[name] for own in others)]) for name, array in first.arrays.items()}
    return replace(
        first,
        arrays={**arrays, LOCATIONS: first.arrays[LOCATIONS]},
        equation=f"An even mixture of {len(components)}; in each: {first.equation}",
        model={**first.model, "components": len(components)},
    )
