"""PVI at agreed Z and β for classes, counts and outliers: (Z, β) from sums, factors of v by natural gradients.

As :mod:`strategies.pvi_sums`, with the exchanges of :mod:`strategies.svgp`. On a visit a site answers with the
natural gradient of E_q log p(y_k | f) at the q it is sent, which is its factor where q no longer moves (Ashman et al.
2022, Property 3.2): Λ = B̄ and η = Wα + B̄m. Until every site has a factor that q is the agreed one of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedgp_flower.messages import message
from fedgp_flower.methods.pvi.messages import NaturalParameters, Refined
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.sgpr.messages import Expectations, PooledPosterior
from strategies import svgp
from strategies.pooled_bound import told_by_total
from strategies.pvi import PVIState, Refinement
from strategies.pvi_sums import AgreedPVI, AgreedState
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Figures, Roster

SETTLED = 1e-3
"""Nats by which the latest update of every site moved q, at most, where the fixed point is reached."""


@message()
class DualAgreedState(AgreedState):
    """With where the exchanges of expectations are."""

    agreement: svgp.SVGPState | None = None


class NaturalGradient(Refinement):
    """A site's expectations at a given q."""

    answer = Expectations

    def __init__(self, q: PooledPosterior) -> None:
        self.q = q

    def request(self, state: PVIState, site: str, plan: Plan) -> PooledPosterior:
        """Parameters and q: the same for all sites of a round."""
        del state, site, plan
        return self.q

    def read(self, answer: Expectations, rows: int) -> Refined:
        """The factor at which this q would stay; the objective is the expected log likelihood."""
        factor = NaturalParameters(answer.slope + answer.curvature @ self.q.mean, -0.5 * answer.curvature)
        return Refined(float(answer.fit) / rows, 1, 0, 0, whitened=factor)


class DualPVI(AgreedPVI[DualAgreedState]):
    """Any likelihood: factors by natural gradients."""

    state_class = DualAgreedState
    implied: ClassVar[Mapping[str, Any]] = {"local_update": "sums"}

    @property
    def problem(self) -> svgp.LatentProblem:
        """What the exchanges of expectations are about."""
        return svgp.LatentProblem.of(self.config, self.preparation.training_target, self.given(svgp.USUAL))

    def initialise(self, roster: Roster) -> Asking[DualAgreedState]:
        """Inducing points where inputs lie."""
        return DualAgreedState(agreement=(yield from svgp.start(self.problem, roster)))

    def agreeing(self, state: DualAgreedState, roster: Roster) -> Asking[tuple[DualAgreedState, Figures]]:
        """One evaluation."""
        agreement, figures = yield from svgp.one_round(self.problem, self.agreement(state), roster)
        return replace(state, agreement=agreement), figures

    def agreed(self, state: DualAgreedState) -> bool:
        """Whether nothing is gained any more."""
        return svgp.finished(self.problem, self.agreement(state))

    def agreement(self, state: DualAgreedState) -> svgp.SVGPState:
        """Where the exchanges of expectations are."""
        assert state.agreement is not None
        return state.agreement

    def pooled(self, state: DualAgreedState, roster: Roster) -> Asking[PooledPosterior]:
        """At the accepted parameters."""
        del roster
        yield from ()
        return svgp.posterior(self.agreement(state))

    def refinement(self, state: DualAgreedState, roster: Roster) -> Asking[Refinement]:
        """At the product of the factors, once every site has one; before that at the agreed q."""
        assert state.visits is not None
        whole = all(site in state.visits.sites for site in roster.sites)
        return NaturalGradient(self.product(state) if whole else (yield from self.pooled(state, roster)))

    def settled(self, visits: PVIState) -> bool:
        """Whether every site's latest update moved q by next to nothing."""
        return max(visits.record.sizes.values()) < SETTLED

    def warnings(self) -> list[str]:
        """Also whether the total of sums nearly tells rows."""
        return super().warnings() + told_by_total(self.sizes["M"], self.roster().rows)

    def posterior_of(self, state: DualAgreedState) -> Posterior:
        """With the mean of f and the likelihood."""
        return svgp.saved(self.last, self.problem.model)
