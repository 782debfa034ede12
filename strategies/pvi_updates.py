"""The local updates of PVI: what a site is asked on a visit, and how its answer is read; and how Z and β are agreed on.

In :func:`local_optimum` the site optimises. The other two need a Z and β that all sites share, which rounds of
:mod:`strategies.sgpr` (Gaussian noise) or :mod:`strategies.svgp` (other likelihoods) find before the first visit. At
them a site's factor of v = L⁻¹u follows from sums of its rows: exactly with Gaussian noise, so that one visit each
gives the posterior of all rows whatever the partition (Ashman et al. 2022, Section 2), and as a natural gradient
otherwise (Property 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.fitc import at_unit_scale
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.messages import LATENTS, LatentFactor, Marginals, NaturalParameters, Refined, Visit
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.sgpr.messages import Expectations, PooledPosterior, TrialSums, numbered
from fedgp_flower.shared_messages import Parameters
from strategies import sgpr, svgp
from strategies.pooled_bound import LOCATIONS, Problem, progress
from strategies.pvi_state import Contribution, PVIState, cavity, of_function, posterior
from strategies.server.questions import Asking, Figures, Roster

FIRST_SCALE = 0.1
"""Standard deviation of q(Z) and q(β) that the first visits start from: wide draws of Z would hide their means."""
HEAVY = 4.0
"""Weight of pseudo-observations for each row beyond which an answer is refused; honest ones have about 1."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An answer as it is merged."""

    contribution: Contribution
    objective: float
    """Nats per row."""
    shared: Mapping[str, LatentFactor] = field(default_factory=dict)
    """New values of latents outside the product."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a site is asked on a visit, and how its answer is read."""

    answer: type[Any]
    request: Callable[[PVIState, str, Plan], Any]
    """The message to a site."""
    read: Callable[[PVIState, str, Any], Proposal]
    """The proposal in a site's answer, or a ProtocolError where it cannot be used."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the answer's dimensions."""


# ---- The site optimises ---------------------------------------------------------------------------------------------


def local_optimum(function: str, averaged: Sequence[str] = (), *, tied: bool = False) -> Update:
    """The site maximises its local free energy; ``function`` names the part of its answer that is the factor."""
    return Update(Refined, partial(visit, function), partial(proposed, {function, *averaged}, tied))


def visit(function: str, state: PVIState, site: str, plan: Plan) -> Visit:
    """What the others know, and the site's factor to start from."""
    around = context(state, site, plan)
    known = {name: NaturalParameters.of(around[name]) for name in state.prior}
    q = NaturalParameters.of(posterior(state)[function]) if function in state.prior else None
    others = of_function(each for name, each in state.sites.items() if name != site or not plan.deletion)
    before = of_function([state.sites[site]]) if plan.deletion and site in state.sites else None
    return Visit(known, q, marginals(state) if state.first else None, others, before)


def context(state: PVIState, site: str, plan: Plan) -> dict[str, Gaussian]:
    """What a site multiplies its likelihood with: the cavity, without deletion q, or p^(N_k/N) of a split prior."""
    if plan.split_prior:
        share = state.rows[site] / sum(state.rows.values())
        return {name: block.gaussian**share for name, block in state.prior.items()}
    return cavity(state, site) if plan.deletion else posterior(state)


def marginals(state: PVIState) -> Marginals:
    """q(Z) and q(β); before the first merge they are narrow around where they begin."""
    known = {name: LatentFactor.of(q) for name, q in posterior(state).items() if state.version and name in LATENTS}
    known |= state.shared
    for name in set(LATENTS) - known.keys():
        mean = state.first[name].ravel()
        known[name] = LatentFactor(mean / FIRST_SCALE**2, np.full(len(mean), -0.5 / FIRST_SCALE**2))
    return Marginals(**known)


def proposed(asked: set[str], tied: bool, state: PVIState, site: str, answer: Refined) -> Proposal:
    """The factors t̂ₖ of an answer, and the latents that are outside the product."""
    expected = asked | set(state.prior)
    if answer.parts.keys() != expected:
        held, wanted = (", ".join(f"`{name}`" for name in sorted(names)) for names in (answer.parts, expected))
        raise ProtocolError(f"the answer holds {held}, expected {wanted}")
    latents = {"inducing": answer.inducing, "hyper": answer.hyper}
    shared = {name: part for name, part in latents.items() if part and part.value is not None}
    factors = {name: part.natural() for name, part in latents.items() if part and part.value is None}
    gaussians = {"values": answer.values, "whitened": answer.whitened, "weights": answer.weights}
    factors |= {name: part for name, part in gaussians.items() if part}
    if odd := shared.keys() & state.prior.keys() or factors.keys() & state.shared.keys():
        raise ProtocolError(f"`{odd.pop()}`: a value where a distribution is expected, or the other way round")
    for name, part in (factors | shared).items():
        known = state.prior.get(name) or state.shared.get(name)
        size = known.size if known else len(state.first["inducing"])
        if part.size != size:
            raise ProtocolError(f"`{name}`: {part.size} entries, expected {size}")
        if name in state.prior and factors[name].eta2.shape != state.prior[name].eta2.shape:
            raise ProtocolError(f"`{name}.eta2`: shape {factors[name].eta2.shape}, unlike the prior")
    if answer.points is not None and tied:
        weight, rows = float(np.square(answer.points.root).sum()), state.rows[site]
        if weight > HEAVY * rows:
            what = f"pseudo-observations weigh as much as {weight:.3g} rows, and the site has {rows}"
            raise ProtocolError(f"`points.root`: {what}")
    return Proposal(Contribution(factors, answer.points), answer.objective, shared)


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


def exact_factor(values: Mapping[str, ndarray]) -> Update:
    """A site's sums at w = {Z, β}, whose factor of v has Λ = A and η = b; the objective is its rows' evidence."""

    def read(state: PVIState, site: str, answer: TrialSums) -> Proposal:
        [sums] = answer.each()
        factor = NaturalParameters(sums.projection, -0.5 * sums.gram)
        return Proposal(Contribution({"whitened": factor}), at_unit_scale(sums) / state.rows[site])

    sizes = {"T": 1, "M": len(values[LOCATIONS])}
    return Update(TrialSums, lambda *_: Parameters(numbered([values])), read, sizes)


def natural_gradient(q: PooledPosterior) -> Update:
    """The natural gradient of E_q log p(y_k | f): the factor at which this q would stay, Λ = B̄ and η = Wα + B̄m."""

    def read(state: PVIState, site: str, answer: Expectations) -> Proposal:
        factor = NaturalParameters(answer.slope + answer.curvature @ q.mean, -0.5 * answer.curvature)
        return Proposal(Contribution({"whitened": factor}), float(answer.fit) / state.rows[site])

    return Update(Expectations, lambda *_: q, read, {"M": len(q.mean)})


def agreed(state: PVIState, values: Mapping[str, ndarray]) -> PVIState:
    """The state at a Z [M, D] and β that all sites share: N(0, I) of v, and no factor yet."""
    locations = values[LOCATIONS]
    prior = {"whitened": NaturalParameters.standard(len(locations), full=True)}
    return replace(state, values=values, prior=prior, first={"inducing": locations})


def product(state: PVIState) -> PooledPosterior:
    """q(v) = p ∏ tₖ at the agreed parameters."""
    mean, covariance = posterior(state)["whitened"].moments()
    return PooledPosterior(state.values, mean.numpy(), covariance.numpy())


@dataclass(frozen=True)
class AgreedParameters:
    """Rounds that agree on Z and β: of :mod:`strategies.sgpr` with Gaussian noise, else of :mod:`strategies.svgp`."""

    problem: Problem
    exact: bool
    """Whether noise is Gaussian."""

    def start(self, roster: Roster) -> Asking[PVIState]:
        """Z from sketches of all rows, or where inputs lie."""
        if self.exact:
            return PVIState(sgpr=(yield from sgpr.start(self.problem, roster)))
        return PVIState(svgp=(yield from svgp.start(self.problem, roster)))

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """A round that improves Z and β."""
        if state.sgpr:
            point, figures = yield from sgpr.one_round(self.problem, state.sgpr, roster)
            return replace(state, sgpr=point), figures
        assert state.svgp is not None
        estimate, figures = yield from svgp.one_round(self.problem, state.svgp, roster)
        return replace(state, svgp=estimate), figures

    def finished(self, state: PVIState) -> bool:
        """Whether exchanges are used up, or gain nothing."""
        if state.sgpr:
            return sgpr.finished(self.problem, state.sgpr)
        return state.svgp is not None and svgp.finished(self.problem, state.svgp)

    def converged(self, state: PVIState) -> bool:
        """Whether more exchanges would have gained nothing."""
        if state.sgpr:
            return state.sgpr.converged
        return state.svgp is not None and svgp.converged(state.svgp)

    def progress(self, state: PVIState) -> dict[str, float | None]:
        """How far the exchanges came, and what more of them would add."""
        point = state.sgpr
        return {} if point is None else progress(point.exchanges, point.gains, sgpr.A_ROUND, point.rows)

    def pooled(self, state: PVIState, roster: Roster) -> Asking[PooledPosterior]:
        """The posterior of all rows, from totals."""
        if state.sgpr:
            return (yield from sgpr.posterior(self.problem, state.sgpr, roster))[0]
        assert state.svgp is not None
        return svgp.posterior(state.svgp)

    def update(self, state: PVIState, roster: Roster) -> Asking[Update]:
        """Sums at the agreed parameters; or expectations at the product, once every site has a factor in it."""
        if self.exact:
            return exact_factor(state.values)
        whole = all(site in state.sites for site in roster.sites)
        return natural_gradient(product(state) if whole else (yield from self.pooled(state, roster)))
