"""The local updates of PVI: what a site is asked on a visit, and how its answer is read; and how Z and β are agreed on.

With :class:`LocalOptimum` the site optimises. The other two need a Z and β that all sites share, which rounds of
:mod:`strategies.sgpr` (Gaussian noise) or :mod:`strategies.svgp` (other likelihoods) find before the first visit. At
them a site's factor of v = L⁻¹u follows from sums of its rows: exactly with Gaussian noise, so that one visit each
gives the posterior of all rows whatever the partition (Ashman et al. 2022, Section 2), and as a natural gradient
otherwise (Property 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian
from fedgp_flower.gp.sums import collapsed_bound
from fedgp_flower.messages import message
from fedgp_flower.methods.pvi.messages import (
    LATENTS,
    LIMIT,
    Factors,
    Marginal,
    Marginals,
    NaturalParameters,
    Refined,
    Visit,
)
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.pvi.state import Contribution, Product, Record, cavity, posterior
from fedgp_flower.methods.sgpr.messages import Expectations, PooledPosterior, SparseStatistics
from fedgp_flower.outcome import Posterior
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape
from strategies import sgpr, svgp
from strategies.pooled_bound import CANDIDATES, LOCATIONS, ROWS_PER_POINT, Problem, noise_of, saved, told_by_total
from strategies.server.questions import Asking, Figures, Roster

FIRST_SCALE = 0.1
"""Standard deviation of q(Z) and q(β) that the first visits start from: wide draws of Z would hide their means."""
SETTLED_EXACT, SETTLED = 1e-6, 1e-3
"""Nats by which every site's latest update moved q, at most, where more visits change nothing; with natural gradients
:data:`SETTLED`."""
HEAVY = 4.0
"""Weight of pseudo-observations for each row beyond which an answer is refused; honest ones have about 1."""


@message()
class PVIState(Product):
    """The product, and where the rounds that agree on Z and β are."""

    values: Mapping[str, AnyShape] = field(default_factory=dict)
    """Z and β that all sites share; empty while they are looked for, or where each site refines them."""
    sgpr: sgpr.SGPRState | None = None
    svgp: svgp.SVGPState | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """An answer as it is merged."""

    contribution: Contribution
    objective: float
    """Nats per row."""
    shared: Mapping[str, Marginal] = field(default_factory=dict)
    """New values of latents outside the product."""


class Update(Protocol):
    """What a site is asked on a visit, and how its answer is read."""

    @property
    def answer(self) -> type[Any]:
        """The class of an answer."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the answer's dimensions."""

    def request(self, state: PVIState, site: str, plan: Plan) -> Any:
        """The message to a site."""

    def read(self, state: PVIState, site: str, answer: Any) -> Proposal:
        """The proposal in an answer.

        Raises:
            ProtocolError: the answer cannot be used.
        """


# ---- The site optimises ---------------------------------------------------------------------------------------------


def context(state: Product, site: str, plan: Plan) -> dict[str, Gaussian]:
    """What a site multiplies its likelihood with in a local update.

    With deletion it is the cavity; without, the posterior itself (streaming). The Bayesian committee machine that
    splits the prior uses p^(N_k/N) alone.
    """
    if plan.split_prior:
        share = state.rows[site] / sum(state.rows.values())
        return {name: block.gaussian**share for name, block in state.prior.items()}
    return cavity(state, site) if plan.deletion else posterior(state)


def marginals(state: Product) -> Marginals:
    """q(Z) and q(β); before the first merge they are narrow around where they begin."""
    known = dict(state.shared)
    if state.version:
        for name, block in posterior(state).items():
            if isinstance(block, DiagonalGaussian) and name in LATENTS:
                known[name] = Marginal.of(block)
    narrow = {n: Marginal.narrow(state.first[n].ravel(), FIRST_SCALE) for n in LATENTS if n not in known}
    return Marginals(**(known | narrow))


@dataclass(frozen=True)
class LocalOptimum:
    """The site maximises its local free energy, by the update of the configuration."""

    function: str
    """The part of an answer that is its factor: ``points``, ``values``, ``whitened`` or ``weights``."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """For each latent ``distribution``, ``average`` or ``fixed``; empty where weights are the model."""
    tied: bool = False
    answer: type[Any] = Refined
    sizes: Mapping[str, int] = field(default_factory=dict)

    def request(self, state: PVIState, site: str, plan: Plan) -> Visit:
        """What the others know, and the site's factor to start from."""
        around = {name: NaturalParameters.of(block) for name, block in context(state, site, plan).items()}
        if not self.kinds:
            return Visit(around, NaturalParameters.of(posterior(state)[self.function]))
        others = [each.function for name, each in state.sites.items() if name != site or not plan.deletion]
        before = state.sites[site].function if plan.deletion and site in state.sites else None
        known = {name: around[name] for name in state.prior}
        q = NaturalParameters.of(posterior(state)["whitened"]) if "whitened" in known else None
        return Visit(known, q, marginals(state), Factors.product(others), before)

    def read(self, state: PVIState, site: str, answer: Refined) -> Proposal:
        """The factors t̂ₖ of an answer, and the latents that are outside the product."""
        reasons = [self._latent_misfit(state, name, getattr(answer, name)) for name in LATENTS]
        if reason := next(filter(None, [self._function_misfit(state, site, answer), *reasons]), None):
            raise ProtocolError(reason)
        latents = {name: part for name in LATENTS if (part := getattr(answer, name)) is not None}
        factors = {name: part.natural() for name, part in latents.items() if name in state.prior}
        if self.function != "points":
            factors[self.function] = getattr(answer, self.function)
        shared = {name: part for name, part in latents.items() if name not in state.prior}
        return Proposal(Contribution(factors, answer.points), answer.objective, shared)

    def _function_misfit(self, state: PVIState, site: str, answer: Refined) -> str | None:
        for name in ("points", "values", "whitened", "weights"):
            if (getattr(answer, name) is not None) != (name == self.function):
                return f"`{name}` is {'absent' if name == self.function else 'present, expected none'}"
        if answer.points is not None:
            weight, rows = float(np.square(answer.points.root).sum()), state.rows[site]
            heavy = f"`points.root`: pseudo-observations weigh as much as {weight:.3g} rows, and the site has {rows}"
            return heavy if self.tied and weight > HEAVY * rows else None
        factor: NaturalParameters = getattr(answer, self.function)
        size = len(state.first["inducing"]) if self.kinds else len(state.prior[self.function].eta1)
        if len(factor.eta1) != size:
            return f"`{self.function}`: {len(factor.eta1)} entries, expected {size}"
        if self.function in state.prior and factor.eta2.ndim != state.prior[self.function].eta2.ndim:
            return f"`{self.function}.eta2`: {factor.eta2.ndim} dimensions, as the prior has not"
        return factor.refusal(self.function, diagonal=self.function == "weights", negative=self.function == "whitened")

    def _latent_misfit(self, state: PVIState, name: str, latent: Marginal | None) -> str | None:
        kind = "absent" if latent is None else "a distribution" if latent.value is None else "a value"
        expected = {"distribution": "a distribution", "average": "a value"}.get(self.kinds.get(name, ""), "absent")
        if kind != expected:
            return f"`{name}` is {kind}, expected {expected}"
        if latent is None:
            return None
        if latent.size != state.first[name].size:
            return f"`{name}`: {latent.size} entries, expected {state.first[name].size}"
        large = latent.value is not None and np.abs(latent.value).max() > LIMIT
        return f"`{name}`: numbers above {LIMIT:g}" if large else None


def averaged(state: PVIState, shared: Mapping[str, Marginal], share: float) -> PVIState:
    """φ ← (1 − N_k/N) φ + (N_k/N) φ_k for a point outside the product (federated sparse GPs, Algorithm 1)."""
    new = {}
    for name, latent in shared.items():
        before = state.shared[name].value
        assert before is not None
        assert latent.value is not None
        new[name] = Marginal(value=(1.0 - share) * before + share * latent.value)
    return replace(state, shared={**state.shared, **new})


# ---- Factors from sums at an agreed Z and β -------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactFactor:
    """A site's sums at w = {Z, β}, whose factor of v has Λ = A/σ² and η = b/σ²."""

    values: Mapping[str, ndarray]
    answer: type[Any] = SparseStatistics

    @property
    def sizes(self) -> Mapping[str, int]:
        """M."""
        return {"M": len(self.values[LOCATIONS])}

    def request(self, state: PVIState, site: str, plan: Plan) -> Parameters:
        """The parameters: the factor depends on nothing else."""
        del state, site, plan
        return Parameters(self.values)

    def read(self, state: PVIState, site: str, answer: SparseStatistics) -> Proposal:
        """The factor; the objective is the bound on the evidence of these rows alone."""
        noise, rows = noise_of(self.values), state.rows[site]
        factor = NaturalParameters(answer.projection / noise, -0.5 * answer.gram / noise)
        return Proposal(Contribution({"whitened": factor}), collapsed_bound(answer, noise) / rows)


@dataclass(frozen=True)
class NaturalGradient:
    """The natural gradient of E_q log p(y_k | f): the factor at which this q would stay, Λ = B̄ and η = Wα + B̄m."""

    q: PooledPosterior
    answer: type[Any] = Expectations

    @property
    def sizes(self) -> Mapping[str, int]:
        """M."""
        return {"M": len(self.q.mean)}

    def request(self, state: PVIState, site: str, plan: Plan) -> PooledPosterior:
        """Parameters and q: the same for all sites of a round."""
        del state, site, plan
        return self.q

    def read(self, state: PVIState, site: str, answer: Expectations) -> Proposal:
        """The factor; the objective is the expected log likelihood."""
        factor = NaturalParameters(answer.slope + answer.curvature @ self.q.mean, -0.5 * answer.curvature)
        return Proposal(Contribution({"whitened": factor}), float(answer.fit) / state.rows[site])


def agreed(state: PVIState, values: Mapping[str, ndarray]) -> PVIState:
    """The state at a Z [M, D] and β that all sites share: N(0, I) of v [M], and no factor yet."""
    locations = values[LOCATIONS]
    prior = NaturalParameters(np.zeros(len(locations)), -0.5 * np.eye(len(locations)))
    return replace(state, values=values, prior={"whitened": prior}, first={"inducing": locations})


def product(state: PVIState) -> PooledPosterior:
    """q(v) = p ∏ tₖ at the agreed parameters."""
    mean, covariance = posterior(state)["whitened"].moments()
    return PooledPosterior(state.values, mean.numpy(), covariance.numpy())


@dataclass(frozen=True)
class Agreement:
    """Rounds that agree on Z and β: of :mod:`strategies.sgpr` with Gaussian noise, else of :mod:`strategies.svgp`."""

    exact: Problem | None
    latent: Problem

    @staticmethod
    def of(config: RunConfig, target: Mapping[str, float], exchanges: int) -> Agreement:
        """At most so many exchanges, each site's first visit among them; 0 is as many as those methods have."""
        exact = None
        if config.model.likelihood == "gaussian":
            exact = Problem(config.model, config.seed, max((exchanges or sgpr.USUAL) - 1, 1))
        latent = Problem(config.model, config.seed, max((exchanges or svgp.USUAL) - 1, 1), target)
        return Agreement(exact, latent)

    def start(self, roster: Roster) -> Asking[PVIState]:
        """Z from sketches of all rows, or where inputs lie."""
        if self.exact:
            return PVIState(sgpr=(yield from sgpr.start(self.exact, roster)))
        return PVIState(svgp=(yield from svgp.start(self.latent, roster)))

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """A round that improves Z and β."""
        if self.exact and state.sgpr:
            point, figures = yield from sgpr.one_round(self.exact, state.sgpr, roster)
            return replace(state, sgpr=point), figures
        assert state.svgp is not None
        estimate, figures = yield from svgp.one_round(self.latent, state.svgp, roster)
        return replace(state, svgp=estimate), figures

    def finished(self, state: PVIState) -> bool:
        """Whether exchanges are used up, or gain nothing."""
        if self.exact and state.sgpr:
            return sgpr.finished(self.exact, state.sgpr)
        assert state.svgp is not None
        return svgp.finished(self.latent, state.svgp)

    def pooled(self, state: PVIState, roster: Roster) -> Asking[PooledPosterior]:
        """The posterior of all rows, from totals."""
        if self.exact and state.sgpr:
            return (yield from sgpr.posterior(self.exact, state.sgpr, roster))[0]
        assert state.svgp is not None
        return svgp.posterior(state.svgp)

    def update(self, state: PVIState, roster: Roster) -> Asking[Update]:
        """Sums at the agreed parameters; or expectations at the product, once every site has a factor in it."""
        if self.exact:
            return ExactFactor(state.values)
        whole = all(site in state.sites for site in roster.sites)
        return NaturalGradient(product(state) if whole else (yield from self.pooled(state, roster)))

    def settled(self, record: Record, sites: Sequence[str], damping: float) -> bool:
        """Whether every site was visited and more visits change nothing."""
        if not all(record.visits.get(site) for site in sites):
            return False
        if self.exact and damping == 1:
            return True
        return max(record.sizes.values()) < (SETTLED_EXACT if self.exact else SETTLED)

    def saved(self, q: PooledPosterior) -> Posterior:
        """Parameters in natural units, q of whitened inducing values."""
        return saved(q, self.exact.model) if self.exact else svgp.saved(q, self.latent.model)

    def warnings(self, count: int, rows: Mapping[str, int], called: Callable[[Sequence[str]], str]) -> list[str]:
        """Sites whose factors, or sums whose totals, nearly reveal rows; ``called`` names sites."""
        found, chosen_from = [], CANDIDATES if self.exact else 1
        if small := [site for site, number in rows.items() if number < ROWS_PER_POINT * count]:
            found.append(
                f"site(s) {called(small)} have fewer than {ROWS_PER_POINT} rows for each of {count} inducing points:"
                " their factors, which the server keeps, nearly reveal their rows; `model.num-inducing` ="
                f" {max(1, min(rows.values()) // ROWS_PER_POINT)} avoids that"
            )
        return found + told_by_total(min(chosen_from * count, sum(rows.values())), rows, chosen_from)
