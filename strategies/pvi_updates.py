"""The local updates of PVI: the request and the answer of a visit, and the agreement on Z and β.

In :func:`local_optimum` the site optimises. The other two updates need a Z and β that all sites share; rounds of
:mod:`strategies.sgpr` (Gaussian noise) or :mod:`strategies.svgp` (other likelihoods) find them before the first visit.
A site's factor of v = L⁻¹u then follows from sums of its rows. With Gaussian noise it is exact, and one visit to each
site gives the posterior of all rows for any partition (Ashman et al. 2022, Section 2). Otherwise it is a natural
gradient (Property 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy import ndarray

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.fitc import WeightedSums, at_unit_scale
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.models import LOCATIONS, WhitenedPosterior
from fedgp_flower.methods.pvi.messages import (
    LATENTS,
    LatentFactor,
    Marginals,
    NaturalParameters,
    Refined,
    Visit,
    WeightsPosterior,
)
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.sgpr.messages import Candidates, Expectations, PooledPosterior, TrialSums
from fedgp_flower.shared_messages import OUTLIER, Parameters
from strategies import sgpr, svgp
from strategies.pooled_bound import Problem, progress
from strategies.pvi_state import Contribution, PVIState, cavity, of_function, posterior
from strategies.server.questions import Asking, Figures, Roster

FIRST_SCALE = 0.1
"""Initial standard deviation of q(Z) and q(β); wide draws of Z would hide their means."""
MAX_WEIGHT = 4.0
"""Maximum weight of pseudo-observations per row; that of honest answers is about 1."""


Proposal: TypeAlias = tuple[Contribution, float, Mapping[str, LatentFactor]]
"""A site's proposal, its objective in nats per row, and new values of latents outside the product."""


@dataclass(frozen=True, slots=True)
class Update:
    """The request of a visit, and the proposal in its answer."""

    answer: type[Any]
    request: Callable[[PVIState, str, Plan], Any]
    """Return the message to a site."""
    read: Callable[[PVIState, str, Any], Proposal]
    """Return the proposal in a site's answer, or raise ProtocolError."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the answer's dimensions."""


# ---- The site optimises ---------------------------------------------------------------------------------------------


def local_optimum(function: str, averaged: Sequence[str] = (), *, tied: bool = False) -> Update:
    """The site maximises its local free energy; ``function`` names the factor in its answer."""
    return Update(Refined, partial(visit, function), partial(proposed, {function, *averaged}, tied))


def visit(function: str, state: PVIState, site: str, plan: Plan) -> Visit:
    """Return the context of the other sites and the site's own factor to start from."""
    around = context(state, site, plan)
    known = {name: NaturalParameters.of(around[name]) for name in state.prior}
    q = weights(state, NaturalParameters.of(posterior(state)[function])) if function in state.prior else None
    others = of_function(each for name, each in state.sites.items() if name != site or not plan.deletion)
    before = of_function([state.sites[site]]) if plan.deletion and site in state.sites else None
    return Visit(known, q, marginals(state) if state.first else None, others, before)


def weights(state: PVIState, q: NaturalParameters) -> WeightsPosterior:
    """Return the request with this q of the weights."""
    return WeightsPosterior(q.eta1, q.eta2, state.noise)


def context(state: PVIState, site: str, plan: Plan) -> dict[str, Gaussian]:
    """Return the factor of a site's likelihood: the cavity, q without deletion, or p^(N_k/N) for a split prior."""
    if plan.split_prior:
        share = state.rows[site] / sum(state.rows.values())
        return {name: block.gaussian**share for name, block in state.prior.items()}
    return cavity(state, site) if plan.deletion else posterior(state)


def marginals(state: PVIState) -> Marginals:
    """Return q(Z) and q(β); before the first merge they are narrow around the start values."""
    known = {name: LatentFactor.of(q) for name, q in posterior(state).items() if state.version and name in LATENTS}
    known |= state.shared
    for name in set(LATENTS) - known.keys():
        mean = state.first[name].ravel()
        known[name] = LatentFactor(mean / FIRST_SCALE**2, np.full(len(mean), -0.5 / FIRST_SCALE**2))
    return Marginals(**known)


def proposed(asked: set[str], tied: bool, state: PVIState, site: str, answer: Refined) -> Proposal:
    """Return the factors t̂ₖ of an answer and the latents outside the product, or raise ProtocolError."""
    expected = asked | set(state.prior)
    if answer.parts.keys() != expected:
        found, wanted = (", ".join(f"`{name}`" for name in sorted(names)) for names in (answer.parts, expected))
        raise ProtocolError(f"the answer holds {found}, expected {wanted}")
    latents = {"inducing": answer.inducing, "hyper": answer.hyper}
    shared = {name: part for name, part in latents.items() if part and part.value is not None}
    factors = {name: part.natural() for name, part in latents.items() if part and part.value is None}
    gaussians = {"values": answer.values, "weights": answer.weights}
    factors |= {name: part for name, part in gaussians.items() if part}
    if wrong := shared.keys() & state.prior.keys() or factors.keys() & state.shared.keys():
        raise ProtocolError(f"`{wrong.pop()}`: a value instead of a distribution, or the reverse")
    for name, part in (factors | shared).items():
        known = state.prior.get(name) or state.shared.get(name)
        size = known.size if known else len(state.first["inducing"])
        if part.size != size:
            raise ProtocolError(f"`{name}`: {part.size} entries, expected {size}")
        if name in state.prior and factors[name].eta2.shape != state.prior[name].eta2.shape:
            raise ProtocolError(f"`{name}.eta2`: shape {factors[name].eta2.shape}, unlike the prior")
    if answer.points is not None and tied:
        weight, rows = float(np.square(answer.points.root).sum()), state.rows[site]
        if weight > MAX_WEIGHT * rows:
            raise ProtocolError(f"`points.root`: pseudo-observations weigh {weight:.3g} rows, but the site has {rows}")
    return Contribution(factors, answer.points), answer.objective, shared


def averaged(state: PVIState, shared: Mapping[str, LatentFactor], share: float) -> PVIState:
    """φ ← (1 − N_k/N) φ + (N_k/N) φ_k for a point outside the product (federated sparse GPs, Algorithm 1)."""
    new = {}
    for name, latent in shared.items():
        before = state.shared[name].value
        assert before is not None
        assert latent.value is not None
        new[name] = LatentFactor(value=(1.0 - share) * before + share * latent.value)
    return replace(state, shared={**state.shared, **new})


# ---- Factors from sums at an agreed Z and β -------------------------------------------------------------------------


def exact_factor(values: Mapping[str, ndarray], totals: WeightedSums | None = None) -> Update:
    """The factor of v from a site's sums at w = {Z, β}: Λ = A, η = b; the objective is the evidence of its rows.

    A site whose squares are out of proportion to the totals that agreed on {Z, β} is refused, as it was there.
    """

    def read(state: PVIState, site: str, answer: TrialSums) -> Proposal:
        [sums] = answer.each()
        if totals is not None:
            size = sums.weighted_squares / sums.count / (totals.weighted_squares / totals.count)
            if size > OUTLIER:
                raise ProtocolError(f"its `weighted_squares` per row is {size:.1e} times the mean of the other sites")
        factor = NaturalParameters(sums.projection, -0.5 * sums.gram)
        return Contribution({"whitened": factor}), at_unit_scale(sums) / state.rows[site], {}

    sizes = {"T": 1, "M": len(values[LOCATIONS])}
    return Update(TrialSums, lambda *_: Candidates((Parameters(values),)), read, sizes)


def natural_gradient(q: PooledPosterior) -> Update:
    """The natural gradient of E_q log p(y_k | f), the factor that leaves this q unchanged: Λ = B̄, η = Wα + B̄m."""

    def read(state: PVIState, site: str, answer: Expectations) -> Proposal:
        factor = NaturalParameters(answer.slope + answer.curvature @ q.mean, -0.5 * answer.curvature)
        return Contribution({"whitened": factor}), float(answer.fit) / state.rows[site], {}

    return Update(Expectations, lambda *_: q, read, {"M": len(q.mean)})


def agreed(state: PVIState, values: Mapping[str, ndarray]) -> PVIState:
    """Return the state at an agreed Z [M, D] and β: N(0, I) for v, and no factors."""
    locations = values[LOCATIONS]
    prior = {"whitened": NaturalParameters.of(Gaussian.standard(len(locations), full=True))}
    return replace(state, values=values, prior=prior, first={"inducing": locations})


def product(state: PVIState) -> PooledPosterior:
    """Return q(v) = p ∏ tₖ at the agreed parameters."""
    return PooledPosterior.of(state.values, WhitenedPosterior(*posterior(state)["whitened"].moments()))


@dataclass(frozen=True)
class AgreedParameters:
    """Rounds that agree on Z and β, of :mod:`strategies.sgpr` for Gaussian noise, else of :mod:`strategies.svgp`."""

    problem: Problem
    exact: bool
    """Whether noise is Gaussian."""

    def start(self, roster: Roster) -> Asking[PVIState]:
        """Return the first Z, from sketches of all rows or from histograms of inputs."""
        if self.exact:
            return PVIState(sgpr=(yield from sgpr.start(self.problem, roster)))
        return PVIState(svgp=(yield from svgp.start(self.problem, roster)))

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """Improve Z and β by a round."""
        if state.sgpr:
            point, figures = yield from sgpr.one_round(self.problem, state.sgpr, roster)
            return replace(state, sgpr=point), figures
        assert state.svgp is not None
        estimate, figures = yield from svgp.one_round(self.problem, state.svgp, roster)
        return replace(state, svgp=estimate), figures

    def finished(self, state: PVIState) -> bool:
        """Whether all exchanges are used, or more of them gain nothing."""
        if state.sgpr:
            return sgpr.finished(self.problem, state.sgpr)
        return state.svgp is not None and svgp.finished(self.problem, state.svgp)

    def converged(self, state: PVIState) -> bool:
        """Whether more exchanges would gain nothing."""
        if state.sgpr:
            return state.sgpr.converged
        return state.svgp is not None and svgp.converged(self.problem, state.svgp)

    def progress(self, state: PVIState) -> dict[str, float | None]:
        """Return facts on the gain of the exchanges so far and of more exchanges."""
        point = state.sgpr
        return {} if point is None else progress(point.exchanges, point.gains, sgpr.EXCHANGES_PER_ROUND, point.rows)

    def pooled(self, state: PVIState, roster: Roster) -> Asking[PooledPosterior]:
        """Return the posterior of all rows, from totals."""
        if state.sgpr:
            return (yield from sgpr.posterior(self.problem, state.sgpr, roster))[0]
        assert state.svgp is not None
        return svgp.posterior(state.svgp)

    def update(self, state: PVIState, roster: Roster) -> Asking[Update]:
        """Return the exact update at the agreed parameters, or the natural gradient at the current posterior."""
        if self.exact:
            return exact_factor(state.values, state.sgpr.totals if state.sgpr else None)
        whole = all(site in state.sites for site in roster.sites)
        return natural_gradient(product(state) if whole else (yield from self.pooled(state, roster)))
