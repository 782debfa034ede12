"""PVI where the model is its weights: generalised linear models and Bayesian neural networks.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1 and Sections 5.1 and 5.3: q(θ) ∝ p(θ) ∏ₖ tₖ(θ),
one Gaussian block, full or diagonal. Cavities, merges, schedules and the special cases (Bayesian committee machines,
VCL, streaming VB, global VI) are those of :mod:`strategies.pvi`; what a local update is, the sites know.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.messages import encode
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.network.options import NetworkOptions
from fedgp_flower.methods.pvi.options import Plan
from fedgp_flower.methods.pvi.weights.messages import (
    LogLikelihood,
    RefinedWeights,
    WeightsPredictive,
    WeightsVisit,
    prior_of,
)
from fedgp_flower.methods.pvi.weights.options import GLMOptions, WeightsOptions
from fedgp_flower.typing import NamedArrays
from strategies.pvi import (
    Contribution,
    PVIState,
    begun,
    context,
    damping_of,
    due,
    merge,
    next_sites,
    order_of,
    posterior,
)
from strategies.server.finalise import Posterior
from strategies.server.questions import Asking, Each, Figures, First, Refuse, Roster, Total
from strategies.server.strategy import FederatedStrategy

WEIGHTS = "weights"
"""The one block of the product."""


def visit(state: PVIState, site: str, plan: Plan) -> WeightsVisit:
    """What the others know, and q to start from."""
    around = context(state, site, plan)[WEIGHTS]
    return WeightsVisit(NaturalParameters.of(posterior(state)[WEIGHTS]), NaturalParameters.of(around))


def fold(
    state: PVIState, answers: Mapping[str, RefinedWeights], damping: float, plan: Plan
) -> Asking[tuple[PVIState, Figures]]:
    """Merge the answers that can be used; the others are their sites' failures. No figures where there is none."""
    usable, expected = dict(answers), state.prior[WEIGHTS].eta2.shape
    for site, own in answers.items():
        if own.factor.eta2.shape != expected:
            yield Refuse(site, f"`factor.eta2`: shape {own.factor.eta2.shape}, expected {expected}")
            del usable[site]
    proposed = {site: Contribution({WEIGHTS: own.factor}, rows=state.rows[site]) for site, own in usable.items()}
    state, merged = merge(state, proposed, damping=damping, deletion=plan.deletion)
    for site in merged.refused:
        yield Refuse(site, "no damping makes its update proper")
        del usable[site]
    record, visits, local = state.record, Counter(state.record.visits), Counter(state.record.local)
    visits.update(list(usable))
    local["halvings"] += sum(own.halvings for own in usable.values())
    record = replace(
        record,
        visits=dict(visits),
        sizes={**record.sizes, **{site: merged.size[site] for site in usable if np.isfinite(merged.size[site])}},
        local=dict(local),
        halvings=record.halvings + merged.halvings,
        refused=record.refused + len(merged.refused),
    )
    state = replace(state, record=record)
    if not usable:
        return state, {}
    weights = [state.rows[site] for site in usable]
    figures = {"objective": float(np.average([own.objective for own in usable.values()], weights=weights))}
    figures |= {"visits": record.communications, "damping": merged.damping, "halvings": merged.halvings}
    return state, figures | {
        "moved": max(merged.size.values()),
        "iterations": sum(o.iterations for o in usable.values()),
    }


def one_round(state: PVIState, roster: Roster, plan: Plan) -> Asking[tuple[PVIState, Figures]]:
    """One iteration of Algorithm 1, sequential or synchronous."""
    state = replace(state, rows={**state.rows, **roster.rows})
    waiting = due(plan, roster.sites, state.record.visits)
    chosen = next_sites(plan, waiting, state.record.attempts, state.record.sizes, order_of(plan, roster.round))
    state = begun(state, chosen)
    answers = yield Each(RefinedWeights, {site: visit(state, site, plan) for site in chosen})
    return (yield from fold(state, answers, damping_of(plan, max(len(answers), 1)), plan))


def one_answer(state: PVIState, roster: Roster, plan: Plan) -> Asking[tuple[PVIState, Figures]]:
    """Asynchronous: idle sites get the newest posterior, and the first answer of all under way is merged."""
    state = replace(state, rows={**state.rows, **roster.rows})
    sent = {site: state.sent.get(site, state.version) for site in roster.busy}
    least = sorted(set(roster.sites) - set(sent), key=lambda site: (state.record.attempts.get(site, 0), site))
    idle = least[: max(0, (plan.concurrency or len(roster.sites)) - len(sent))]
    state = begun(state, idle)
    requests = {site: visit(state, site, plan) for site in idle}
    sent |= dict.fromkeys(idle, state.version)
    site, answer = yield First(RefinedWeights, requests)
    stale = state.version - sent.pop(site)
    answers = {} if answer is None else {site: answer}
    state, figures = yield from fold(replace(state, sent=sent), answers, damping_of(plan, len(sent) + 1), plan)
    return state, figures and {**figures, "staleness": stale}


ROUNDS = {"sequential": one_round, "synchronous": one_round, "asynchronous": one_answer}
"""By ``schedule``."""


def free_energy(state: PVIState, fit: float) -> dict[str, float]:
    """F = E_q log p(y | θ) − KL(q ‖ p), in nats."""
    divergence = float(posterior(state)[WEIGHTS].kl(state.prior[WEIGHTS].gaussian))
    return {"total": fit - divergence, "fit": fit, "kl_weights": divergence}


class WeightsPVI(FederatedStrategy[PVIState]):
    """What every model of this kind shares: one block of weights."""

    state_class = PVIState
    options_class = WeightsOptions
    options: WeightsOptions

    @property
    @abstractmethod
    def equation(self) -> str:
        """How the saved arrays predict."""

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """The prior. One number of each site shows before training who has other rows than it described."""
        prior = prior_of(self.options, self.preparation.num_inputs)
        yield Total(LogLikelihood, WeightsPredictive(prior))
        return PVIState({WEIGHTS: prior}, rows=roster.rows)

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """Algorithm 1 of Ashman et al. (2022)."""
        plan = self.options.plan(self.config.seed)
        return (yield from ROUNDS[plan.schedule](state, roster, plan))

    def finished(self, state: PVIState) -> bool:
        """Whether a one-pass special case has visited every site."""
        return not due(self.options.plan(), self.roster().sites, state.record.visits)

    def predictive(self, state: PVIState, roster: Roster) -> Asking[WeightsPredictive]:
        """The posterior q(θ)."""
        del roster
        yield from ()
        return WeightsPredictive(NaturalParameters.of(posterior(state)[WEIGHTS]))

    def public(self, state: PVIState) -> NamedArrays:
        """All that predicts."""
        return encode(NaturalParameters.of(posterior(state)[WEIGHTS]))

    def posterior_of(self, state: PVIState) -> Posterior:
        """The saved posterior: it predicts without any site."""
        q = posterior(state)[WEIGHTS]
        mean, covariance = (part.numpy() for part in q.moments())
        arrays: NamedArrays = {"weights.mean": mean, "weights.covariance": covariance}
        words = "covariance of q(θ)" if isinstance(q, NaturalGaussian) else "variances of q(θ)"
        meanings = {"weights.mean": "mean of q(θ)", "weights.covariance": words}
        return Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), self.equation, self.model_of())

    def model_of(self) -> dict[str, Any]:
        """What else defines the model."""
        return {"family": self.method, "likelihood": self.config.model.likelihood, "noise": self.config.model.noise}

    def details_of(self, state: PVIState) -> dict[str, Any]:
        """Counts, and how much each factor says: its mean precision, where the prior has 1/s²."""
        factors = {
            site: {"rows": float(own.rows), "mean": float(_diagonal(-2.0 * own.factors[WEIGHTS].eta2).mean())}
            for site, own in state.sites.items()
        }
        return asdict(state.record) | {"version": state.version, "factors": factors}

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """The free energy, where every site with a factor still answers."""
        request = yield from self.predictive(state, roster)
        summed = yield Total(LogLikelihood, request, tuple(state.sites))
        if summed.total is None or len(summed.sites) < len(state.sites):
            return {}
        return {"free_energy": free_energy(state, float(summed.total.value))}


def _diagonal(precision: np.ndarray) -> np.ndarray:
    return precision.diagonal() if precision.ndim == 2 else precision


class PVIGLM(WeightsPVI):
    """Generalised linear models: Bayesian linear, logistic and Poisson regression."""

    method = "pvi-glm"
    options_class = GLMOptions
    options: GLMOptions
    equation = (
        "θ ~ N(weights.mean, weights.covariance), f(x) = θ₀ + Σ_d θ_d x_d with x standardised by input.mean and"
        " input.scale: f ~ N(m, v). Bernoulli: P(y = 1) = E 1/(1 + e^(−f)). Poisson: y with rate e^f. Gaussian:"
        " y ~ N(m, v + noise), standardised by target.mean and target.scale."
    )


class PVIBNN(WeightsPVI):
    """Mean-field Bayesian neural networks for classes."""

    method = "pvi-bnn"
    options_class = NetworkOptions
    options: NetworkOptions
    equation = (
        "θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, θ ~ N(weights.mean,"
        " weights.covariance), its variances. P(y = c | x) = E softmax(W₂ (relu(W₁ (x, 1)), 1))_c, the mean over draws."
    )

    def model_of(self) -> dict[str, Any]:
        """The lengths of the layers."""
        own = self.options
        sizes = {"hidden": own.hidden, "classes": own.classes, "draws": own.prediction_draws}
        return super().model_of() | sizes
