"""PVI of weights: generalised linear models and Bayesian neural networks.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1 and Sections 5.1 and 5.3: q(θ) ∝ p(θ) ∏ₖ tₖ(θ) in
one Gaussian block, full or diagonal. Rounds and schedules are those of :mod:`strategies.pvi`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, cast

from fedgp_flower.messages import encode
from fedgp_flower.methods.pvi.messages import LogLikelihood, NaturalParameters
from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from fedgp_flower.methods.pvi_weights.model import PREDICTION_DRAWS, prior_of
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, BNNOptions, GLMOptions, WeightsOptions
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import Facts, NamedArrays
from strategies import pvi
from strategies.pvi_state import PVIState, factor_strengths, posterior
from strategies.pvi_updates import local_optimum
from strategies.server.questions import Asking, Figures, Predicted, Roster, Total
from strategies.server.strategy import FederatedStrategy

FROM_WEIGHTS = "θ ~ N(weights.mean, weights.covariance)"


class PVIGLM(FederatedStrategy[PVIState]):
    """PVI of generalised linear models: Bayesian linear, logistic and Poisson regression."""

    method = "pvi-glm"
    options_class: ClassVar[type[WeightsOptions]] = GLMOptions
    state_class = PVIState
    options: WeightsOptions
    equation = (
        f"{FROM_WEIGHTS}, f(x) = θ₀ + Σ_d θ_d x_d with x standardised by input.mean and input.scale: f ~ N(m, v)."
        " Bernoulli: P(y = 1) = E 1/(1 + e^(−f)). Poisson: y with rate e^f. Gaussian: y ~ N(m, v + noise), standardised"
        " by target.mean and target.scale."
    )

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """Return the prior; a total of log likelihoods checks that sites have the rows that they described."""
        prior = prior_of(self.options, self.preparation.num_inputs)
        yield Total(LogLikelihood, prior)
        return PVIState({WEIGHTS: prior}, rows=roster.rows)

    @property
    def plan(self) -> Plan:
        """Return the plan of visits."""
        return cast(PVIOptions, self.config.shared).plan(self.config.seed)

    def one_round(self, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
        """A round of visits; each site maximises its local free energy over its factor of the weights."""
        return (yield from pvi.one_round(state, roster, self.plan, local_optimum(WEIGHTS)))

    def finished(self, state: PVIState) -> bool:
        """Whether the plan has no more visits, or the latest visit to each site changed nothing."""
        sites, record = self.roster().sites, state.record
        if not pvi.due(self.plan, sites, record.visits):
            return True
        return all(record.visits.get(site) for site in sites) and max(record.sizes.values()) < pvi.SETTLED_EXACT

    converged = finished

    def predictive(self, state: PVIState, roster: Roster) -> Asking[Predicted]:
        """Return the posterior q(θ), which predicts without any site."""
        yield from ()
        q, likelihood = posterior(state)[WEIGHTS], self.config.model
        mean, covariance = (part.numpy() for part in q.moments())
        arrays: NamedArrays = {"weights.mean": mean, "weights.covariance": covariance}
        words = "covariance of q(θ)" if q.full else "variances of q(θ)"
        meanings = {"weights.mean": "mean of q(θ)", "weights.covariance": words}
        model = {"family": self.method, "likelihood": likelihood.likelihood, "noise": likelihood.noise, **self.facts()}
        saved = Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), self.equation, model)
        facts = asdict(state.record) | {"version": state.version, "factors": factor_strengths(state)}
        return Predicted(NaturalParameters.of(q), saved, facts)

    def public(self, state: PVIState) -> NamedArrays:
        """Return q(θ)."""
        return encode(NaturalParameters.of(posterior(state)[WEIGHTS]))

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """Return the free energy and, for several classes, the confusion matrix."""
        facts = yield from super().final(state, roster)
        q = posterior(state)[WEIGHTS]
        kl = {"kl_weights": float(q.kl(state.prior[WEIGHTS].gaussian))}
        return facts | (yield from pvi.free_energy(state, NaturalParameters.of(q), kl))

    def facts(self) -> Facts:
        """Return no facts besides the likelihood."""
        return {}


class PVIBNN(PVIGLM):
    """PVI of mean-field Bayesian neural networks for classes."""

    method = "pvi-bnn"
    options_class = BNNOptions
    options: BNNOptions
    equation = (
        f"θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, {FROM_WEIGHTS}, its variances."
        " P(y = c | x) = E softmax(W₂ (relu(W₁ (x, 1)), 1))_c, the mean over draws."
    )

    def facts(self) -> Facts:
        """Return the sizes of the layers and the number of draws."""
        return {"hidden": self.options.hidden, "classes": self.options.classes, "draws": PREDICTION_DRAWS}
