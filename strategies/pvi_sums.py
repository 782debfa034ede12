"""PVI at a Z and β that sums of all rows agree on, where u's factors are exact and q is the pooled posterior.

First the exchanges of :mod:`strategies.sgpr` find (Z, β) from totals; then sites are visited as in
:mod:`strategies.pvi`, by any schedule. With Gaussian noise a site's factor of v = L⁻¹u follows from its sums alone,
tₖ(v) ∝ exp(bₖᵀv/σ² − vᵀAₖv/2σ²), so that one visit each gives the posterior of all rows at this (Z, β), whatever the
partition (Ashman et al. 2022, Section 2: a conjugate model), and q/tₖ is the posterior without site k.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.gp.sums import collapsed_bound_value
from fedgp_flower.messages import encode, message
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.methods.pvi.messages import NaturalParameters, Refined
from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from fedgp_flower.methods.sgpr.messages import PooledPosterior, Statistics
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.typing import AnyShape, NamedArrays
from strategies import async_pvi, pvi, sgpr
from strategies.pooled_bound import LOCATIONS, ROWS_PER_POINT, noise_of, saved, told_by_total
from strategies.pvi import PVIState, Refinement, due, factor_strengths, posterior
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Figures, Roster
from strategies.server.strategy import FederatedStrategy

LINEAR = {"local_update": "analytic", "inducing": "fixed", "hyper": "fixed"}
"""What visits are at a given (Z, β): updates of q(v) alone."""
SETTLED = 1e-6
"""Nats by which the latest update of every site moved q, at most, where nothing moves any more."""


@message()
class AgreedState:
    """(Z, β) once they are agreed on, and the posterior of v at them."""

    values: Mapping[str, AnyShape] = field(default_factory=dict)
    visits: PVIState | None = None
    """None while sums still look for (Z, β)."""


@message()
class SummedState(AgreedState):
    """With where the exchanges of sums are."""

    agreement: sgpr.SGPRState | None = None


S = TypeVar("S", bound=AgreedState)


def begin(locations: ndarray, rows: Mapping[str, int]) -> PVIState:
    """Before the first visit: N(0, I) of v [M], for inducing inputs [M, D]."""
    prior = NaturalParameters(np.zeros(len(locations)), -0.5 * np.eye(len(locations)))
    return PVIState({"whitened": prior}, first={"inducing": locations}, rows=rows)


def whitened(state: PVIState) -> NaturalGaussian:
    """The q(v) of the sites visited so far."""
    q = posterior(state)["whitened"]
    assert isinstance(q, NaturalGaussian)
    return q


class ExactFactor(Refinement):
    """A site's sums at w = {Z, β}, whose factor of v has Λ = A/σ² and η = b/σ²."""

    answer = Statistics

    def __init__(self, values: Mapping[str, ndarray]) -> None:
        self.values, self.noise = values, noise_of(values)

    def request(self, state: PVIState, site: str, plan: Plan) -> Parameters:
        """The parameters: the factor depends on nothing else."""
        del state, site, plan
        return Parameters(self.values)

    def read(self, answer: Statistics, rows: int) -> Refined:
        """The factor; the objective is the bound on the evidence of these rows alone."""
        factor = NaturalParameters(answer.projection / self.noise, -0.5 * answer.gram / self.noise)
        return Refined(collapsed_bound_value(answer.sums(), self.noise) / rows, 1, 0, 0, whitened=factor)


class AgreedPVI(FederatedStrategy[S]):
    """Exchanges of sums, then visits."""

    method = "pvi"
    options_class = PVIOptions
    options: PVIOptions
    last: PooledPosterior
    """What sites predicted with in the latest evaluation."""

    @abstractmethod
    def agreeing(self, state: S, roster: Roster) -> Asking[tuple[S, Figures]]:
        """A round of exchanges of sums."""

    @abstractmethod
    def agreed(self, state: S) -> bool:
        """Whether (Z, β) need no more rounds."""

    @abstractmethod
    def pooled(self, state: S, roster: Roster) -> Asking[PooledPosterior]:
        """The posterior of all rows, from totals."""

    @abstractmethod
    def refinement(self, state: S, roster: Roster) -> Asking[Refinement]:
        """What a site is asked on a visit."""

    @abstractmethod
    def settled(self, visits: PVIState) -> bool:
        """Whether visits to sites that were all visited change nothing any more."""

    @property
    def plan(self) -> Plan:
        """How sites are visited; what is exact whatever the others know is damped only if that is wanted."""
        plan = self.options.plan(self.config.seed)
        return replace(plan, damping=plan.damping or 1.0)

    def given(self, usual: int) -> SGPROptions:
        """The table of :mod:`strategies.sgpr` for its rounds."""
        most = self.options.exchanges or usual
        given = {"exchanges": max(most - 1, 1), "small-sites": self.options.small_sites}
        return SGPROptions.model_validate(given)

    def one_round(self, state: S, roster: Roster) -> Asking[tuple[S, Figures]]:
        """Exchanges of sums; when they are done, or only rounds for one visit each are left, a visit."""
        left = self.planned_rounds - roster.round + 1
        if state.visits is None and not self.agreed(state) and left > self.pass_of(roster):
            return (yield from self.agreeing(state, roster))
        if state.visits is None:
            found = yield from self.pooled(state, roster)
            state = replace(state, values=found.values, visits=begin(found.values[LOCATIONS], roster.rows))
        assert state.visits is not None
        asked = yield from self.refinement(state, roster)
        visits, figures = yield from self.visiting(state.visits, roster, asked)
        return replace(state, visits=visits), figures

    def pass_of(self, roster: Roster) -> int:
        """Rounds in which every site is visited once."""
        together = self.plan.schedule == "synchronous"
        return math.ceil(1 / self.plan.fraction) if together else len(roster.sites)

    def visiting(self, visits: PVIState, roster: Roster, asked: Refinement) -> Asking[tuple[PVIState, Figures]]:
        """One iteration of Algorithm 1 of Ashman et al. (2022)."""
        return (yield from pvi.one_round(visits, roster, self.plan, self.linear, asked))

    @property
    def linear(self) -> PVIOptions:
        """The table as visits read it."""
        return self.options.model_copy(update=LINEAR)

    def finished(self, state: S) -> bool:
        """Whether every site was visited, and more visits change nothing."""
        if state.visits is None:
            return False
        sites, record = self.roster().sites, state.visits.record
        everyone = all(record.visits.get(site) for site in sites)
        return not due(self.plan, sites, record.visits) or (everyone and self.settled(state.visits))

    def converged(self, state: S) -> bool:
        """Whether nothing changes any more."""
        return self.finished(state)

    def predictive(self, state: S, roster: Roster) -> Asking[PooledPosterior]:
        """The product of the factors; before the first visit what totals say."""
        self.last = (yield from self.pooled(state, roster)) if state.visits is None else self.product(state)
        return self.last

    def product(self, state: S) -> PooledPosterior:
        """q(v) = p ∏ tₖ at the agreed parameters."""
        assert state.visits is not None
        mean, covariance = whitened(state.visits).moments()
        return PooledPosterior(state.values, mean.numpy(), covariance.numpy())

    def public(self, state: S) -> NamedArrays:
        """All that predicts, once there is a factor."""
        return {} if state.visits is None else encode(self.product(state))

    def posterior_of(self, state: S) -> Posterior:
        """Parameters in natural units, q of whitened inducing values."""
        del state
        return saved(self.last, self.config.model)

    def details_of(self, state: S) -> dict[str, Any]:
        """Counts of visits, and how much each factor says."""
        facts = {"damping": self.plan.damping, "num_inducing": self.sizes["M"]}
        if state.visits is None:
            return facts
        return asdict(state.visits.record) | facts | {"factors": factor_strengths(state.visits)}

    def require_training(self) -> None:
        """Without a factor the posterior would be the prior.

        Raises:
            RunError: nobody was visited.
        """
        super().require_training()
        if self.current.visits is not None and not self.current.visits.sites:
            raise RunError(f"no site could be visited, so nothing was learned. {self.network.latest_failures()}")

    def warnings(self) -> list[str]:
        """Which sites' sums are nearly their rows."""
        count, rows = self.sizes["M"], self.roster().rows
        small = [site for site, own in rows.items() if own < ROWS_PER_POINT * count]
        words = (
            f"site(s) {self.called(small)} have fewer than {ROWS_PER_POINT} rows for each of {count} inducing points:"
            " their factors, which the server keeps, are nearly their rows; `pvi.small-sites` = 'cap' takes fewer"
        )
        return super().warnings() + ([words] if small else [])


class SummedPVI(AgreedPVI[SummedState]):
    """Gaussian noise: exact factors, from sums."""

    state_class = SummedState
    implied: ClassVar[Mapping[str, Any]] = {"local_update": "sums"}

    @property
    def problem(self) -> sgpr.Problem:
        """What the exchanges of sums are about."""
        return sgpr.Problem.of(self.config, self.preparation.num_inputs, self.given(sgpr.USUAL))

    def initialise(self, roster: Roster) -> Asking[SummedState]:
        """Two starts, from sketches of all rows."""
        return SummedState(agreement=(yield from sgpr.start(self.problem, roster)))

    def agreeing(self, state: SummedState, roster: Roster) -> Asking[tuple[SummedState, Figures]]:
        """A gradient and a line search."""
        agreement, figures = yield from sgpr.one_round(self.problem, self.agreement(state), roster)
        return replace(state, agreement=agreement), figures

    def agreed(self, state: SummedState) -> bool:
        """Whether exchanges are used up, or gain nothing."""
        return sgpr.finished(self.problem, self.agreement(state))

    def pooled(self, state: SummedState, roster: Roster) -> Asking[PooledPosterior]:
        """At the better chain's point."""
        found, _ = yield from sgpr.posterior(self.problem, self.agreement(state), roster)
        self.sizes["M"] = len(found.mean)
        return found

    def agreement(self, state: SummedState) -> sgpr.SGPRState:
        """Where the exchanges of sums are."""
        assert state.agreement is not None
        return state.agreement

    def resumed(self, state: SummedState, roster: Roster) -> Asking[SummedState]:
        """The state as it was; its number of inducing points is known again."""
        del roster
        yield from ()
        self.sizes["M"] = len((self.agreement(state).best if state.visits is None else state).values[LOCATIONS])
        return state

    def refinement(self, state: SummedState, roster: Roster) -> Asking[Refinement]:
        """Sums at the agreed parameters."""
        yield from ()
        return ExactFactor(state.values)

    def settled(self, visits: PVIState) -> bool:
        """An undamped factor is what it is at the first visit."""
        return self.plan.damping == 1 or max(visits.record.sizes.values()) < SETTLED

    def warnings(self) -> list[str]:
        """Also whether the total of sums nearly tells rows."""
        most = sgpr.candidates(self.problem, self.roster(), self.sizes["M"])
        return super().warnings() + told_by_total(most, self.roster().rows, sgpr.CANDIDATES)

    def details_of(self, state: SummedState) -> dict[str, Any]:
        """Also how many exchanges with every site looked for (Z, β)."""
        return super().details_of(state) | {"exchanges": self.agreement(state).exchanges}


class AsynchronousSummedPVI(SummedPVI):
    """Several sites work at once; the factors are the same."""

    implied: ClassVar[Mapping[str, Any]] = {**SummedPVI.implied, "schedule": "asynchronous"}

    def visiting(self, visits: PVIState, roster: Roster, asked: Refinement) -> Asking[tuple[PVIState, Figures]]:
        """One answer, or one site given up."""
        return (yield from async_pvi.one_round(visits, roster, self.plan, self.linear, asked))
