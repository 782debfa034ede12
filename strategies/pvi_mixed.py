"""PVI at an agreed (Z, β), beside which draws of β predict that the rows leave open.

The product of exact factors of :mod:`strategies.pvi_sums` is the posterior of v at the best β. Beside it predict,
evenly, the draws of :mod:`strategies.fsgp_laplace`, each with the exact posterior of all rows, by totals alone. Where a
site is forgotten, its factor is divided out, and the draws have the posteriors of the rows that are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedgp_flower.methods.fsgp.messages import MixedPosterior, PooledPosterior
from strategies.fsgp_laplace import FSGPLaplace, saved_mixture
from strategies.fsgp_profiled import FSGPProfiled
from strategies.pvi_sums import AsynchronousSummedPVI, SummedPVI, SummedState
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Roster


class MixedPVI(SummedPVI):
    """Exchanges of sums, draws, then visits."""

    implied: ClassVar[Mapping[str, Any]] = {**SummedPVI.implied, "hyperparameters": "laplace"}
    mixed: tuple[PooledPosterior, ...]
    """What sites predicted with in the latest evaluation."""

    @property
    def ascent(self) -> FSGPLaplace:
        """The profiled one, with draws at its end."""
        found: FSGPLaplace = self.as_fsgp(FSGPLaplace)
        return found

    def pooled(self, state: SummedState, roster: Roster) -> Asking[PooledPosterior]:
        """At the better chain's point, without the draws."""
        return (yield from FSGPProfiled.predictive(self.ascent, self.agreement(state), roster))

    def predictive(self, state: SummedState, roster: Roster) -> Asking[MixedPosterior]:  # type: ignore[override]
        """The product of the factors, or what totals say, and the draws, of the same rows."""
        point = yield from super().predictive(state, roster)
        self.mixed = (point, *(yield from self._draws(state, roster)))
        return MixedPosterior.of(self.mixed)

    def _draws(self, state: SummedState, roster: Roster) -> Asking[tuple[PooledPosterior, ...]]:
        """None while factors are missing: they would know more rows than the product."""
        sites = roster.everyone if state.visits is None else tuple(state.visits.sites)
        if not set(roster.sites) <= set(sites):
            return ()
        return (yield from self.ascent.draws(self.agreement(state), sites))

    def posterior_of(self, state: SummedState) -> Posterior:
        """Hyperparameters and q of each component, one after another, and Z, which they share; or those of the one."""
        del state
        return saved_mixture(self.mixed, self.config.model)

    def details_of(self, state: SummedState) -> dict[str, Any]:
        """Also how many hyperparameters predict together."""
        return super().details_of(state) | {"components": len(self.mixed)}


class AsynchronousMixedPVI(MixedPVI, AsynchronousSummedPVI):
    """Several sites work at once; the factors are the same."""

    implied: ClassVar[Mapping[str, Any]] = {**MixedPVI.implied, "schedule": "asynchronous"}
