"""PVI of weights: generalised linear models and Bayesian neural networks.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1 and Sections 5.1 and 5.3: q(θ) ∝ p(θ) ∏ₖ tₖ(θ) in
one Gaussian block, full or diagonal. Rounds and schedules are those of :mod:`strategies.pvi`.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from fedgp_flower.messages import encode
from fedgp_flower.methods.pvi.messages import LogLikelihood, NaturalParameters
from fedgp_flower.methods.pvi.options import Plan, PVIOptions
from fedgp_flower.methods.pvi_weights.model import LEAST_NOISE, PREDICTION_DRAWS, prior_of
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, BNNOptions, GLMOptions
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import Facts, NamedArrays
from strategies import pvi
from strategies.pvi_state import PVIState, facts_of, posterior
from strategies.pvi_updates import local_optimum, weights
from strategies.server.questions import Asking, Figures, Predicted, Roster, Total
from strategies.server.scoring import linear_fit
from strategies.server.strategy import FederatedStrategy

FROM_WEIGHTS = "θ ~ N(weights.mean, weights.covariance)"


def initialise(run: Weights, roster: Roster) -> Asking[PVIState]:
    """Return the prior, and for numbers the noise of their linear regression, from sums.

    A total of log likelihoods checks that sites have the rows that they described.
    """
    prior, model, noise = prior_of(run.options, run.preparation.num_inputs), run.config.model, None
    if model.likelihood == "gaussian":
        line = yield from linear_fit(tuple(roster.rows), model.likelihood, run.preparation.num_inputs)
        rows = sum(roster.rows.values())
        noise = model.noise if line is None else max(line.variance / (1 + 1 / rows), LEAST_NOISE)
    state = PVIState({WEIGHTS: prior}, rows=roster.rows, noise=noise)
    yield Total(LogLikelihood, weights(state, prior))
    return state


def plan_of(run: Weights) -> Plan:
    """Return the plan of visits."""
    return cast(PVIOptions, run.config.shared).plan(run.config.seed)


def one_round(run: Weights, state: PVIState, roster: Roster) -> Asking[tuple[PVIState, Figures]]:
    """A round of visits; each site maximises its local free energy over its factor of the weights."""
    return (yield from pvi.one_round(state, roster, plan_of(run), local_optimum(WEIGHTS)))


def finished(run: Weights, state: PVIState) -> bool:
    """Whether the plan has no more visits, or the latest visit to each site changed nothing."""
    sites, record = run.roster().sites, state.record
    if not pvi.due(plan_of(run), sites, record.visits):
        return True
    return all(record.visits.get(site) for site in sites) and max(record.sizes.values()) < pvi.SETTLED_EXACT


def predictive(run: Weights, state: PVIState, roster: Roster) -> Asking[Predicted]:
    """Return the posterior q(θ), which predicts without any site."""
    yield from ()
    q, likelihood = posterior(state)[WEIGHTS], run.config.model
    mean, covariance = (part.numpy() for part in q.moments())
    arrays: NamedArrays = {"weights.mean": mean, "weights.covariance": covariance}
    words = "covariance of q(θ)" if q.full else "variances of q(θ)"
    meanings = {"weights.mean": "mean of q(θ)", "weights.covariance": words}
    noise = likelihood.noise if state.noise is None else state.noise
    model = {"family": run.method, "likelihood": likelihood.likelihood, "noise": noise, **run.facts()}
    saved = Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), run.equation, model)
    facts = {**facts_of(state, plan_of(run)), "version": state.version}
    return Predicted(weights(state, NaturalParameters.of(q)), saved, facts)


def public(run: Weights, state: PVIState) -> NamedArrays:
    """Return q(θ)."""
    return encode(NaturalParameters.of(posterior(state)[WEIGHTS]))


def final(run: Weights, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
    """Return the free energy and, for several classes, the confusion matrix."""
    facts = yield from FederatedStrategy.final(run, state, roster)
    q = posterior(state)[WEIGHTS]
    kl = {"kl_weights": float(q.kl(state.prior[WEIGHTS].gaussian))}
    return facts | (yield from pvi.free_energy(state, weights(state, NaturalParameters.of(q)), kl))


class PVIGLM(FederatedStrategy[PVIState]):
    """PVI of generalised linear models: Bayesian linear, logistic and Poisson regression."""

    method = "pvi-glm"
    options_class = GLMOptions
    state_class = PVIState
    options: GLMOptions
    equation = (
        f"{FROM_WEIGHTS}, f(x) = θ₀ + Σ_d θ_d x_d with x standardised by input.mean and input.scale: f ~ N(m, v)."
        " Bernoulli: P(y = 1) = E 1/(1 + e^(−f)). Poisson: y with rate e^f. Gaussian: y ~ N(m, v + noise), standardised"
        " by target.mean and target.scale."
    )
    initialise, one_round, finished, converged = initialise, one_round, finished, finished
    predictive, public, final = predictive, public, final

    def facts(self) -> Facts:
        """Return no facts besides the likelihood."""
        return {}


class PVIBNN(FederatedStrategy[PVIState]):
    """PVI of mean-field Bayesian neural networks for classes."""

    method = "pvi-bnn"
    options_class = BNNOptions
    state_class = PVIState
    options: BNNOptions
    equation = (
        f"θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, {FROM_WEIGHTS}, its variances."
        " P(y = c | x) = E softmax(W₂ (relu(W₁ (x, 1)), 1))_c, the mean over draws."
    )
    initialise, one_round, finished, converged = initialise, one_round, finished, finished
    predictive, public, final = predictive, public, final

    def facts(self) -> Facts:
        """Return the sizes of the layers and the number of draws."""
        return {"hidden": self.options.hidden, "classes": self.options.classes, "draws": PREDICTION_DRAWS}


Weights: TypeAlias = PVIGLM | PVIBNN
