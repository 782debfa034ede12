"""PVI where the model is its weights: generalised linear models and Bayesian neural networks.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1 and Sections 5.1 and 5.3: q(θ) ∝ p(θ) ∏ₖ tₖ(θ),
one Gaussian block, full or diagonal. Rounds, schedules and special cases are those of :mod:`strategies.pvi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.messages import encode
from fedgp_flower.methods.pvi.messages import LogLikelihood, NaturalParameters, WeightsPredictive
from fedgp_flower.methods.pvi.state import posterior
from fedgp_flower.methods.pvi_weights.glm import prior_of
from fedgp_flower.methods.pvi_weights.network import PREDICTION_DRAWS
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, BNNOptions, GLMOptions
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import NamedArrays
from strategies.pvi import PVI, factor_strengths
from strategies.pvi_updates import LocalOptimum, PVIState, Update
from strategies.server.questions import Asking, Predicted, Roster, Total

FROM_WEIGHTS = "θ ~ N(weights.mean, weights.covariance)"


def start(prior: NaturalParameters, roster: Roster) -> Asking[PVIState]:
    """The prior. One number of each site shows before training who has other rows than it described."""
    yield Total(LogLikelihood, WeightsPredictive(prior))
    return PVIState({WEIGHTS: prior}, rows=roster.rows)


def q_of(state: PVIState) -> WeightsPredictive:
    """The posterior q(θ)."""
    return WeightsPredictive(NaturalParameters.of(posterior(state)[WEIGHTS]))


def predicted(state: PVIState, equation: str, model: Mapping[str, Any]) -> Predicted:
    """The posterior q(θ), which predicts without any site."""
    q = posterior(state)[WEIGHTS]
    mean, covariance = (part.numpy() for part in q.moments())
    arrays: NamedArrays = {"weights.mean": mean, "weights.covariance": covariance}
    words = "covariance of q(θ)" if isinstance(q, NaturalGaussian) else "variances of q(θ)"
    meanings = {"weights.mean": "mean of q(θ)", "weights.covariance": words}
    saved = Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), equation, model)
    facts = asdict(state.record) | {"version": state.version, "factors": factor_strengths(state)}
    return Predicted(q_of(state), saved, facts)


def free_energy(state: PVIState) -> Asking[dict[str, Any]]:
    """F = E_q log p(y | θ) − KL(q ‖ p) in nats, where every site with a factor still answers."""
    summed = yield Total(LogLikelihood, q_of(state), tuple(state.sites))
    if summed.total is None or len(summed.sites) < len(state.sites):
        return {}
    fit = float(summed.total.value)
    divergence = float(posterior(state)[WEIGHTS].kl(state.prior[WEIGHTS].gaussian))
    return {"free_energy": {"total": fit - divergence, "fit": fit, "kl_weights": divergence}}


class PVIGLM(PVI):
    """PVI of generalised linear models: Bayesian linear, logistic and Poisson regression."""

    method = "pvi-glm"
    options_class = GLMOptions
    options: GLMOptions
    equation = (
        f"{FROM_WEIGHTS}, f(x) = θ₀ + Σ_d θ_d x_d with x standardised by input.mean and input.scale: f ~ N(m, v)."
        " Bernoulli: P(y = 1) = E 1/(1 + e^(−f)). Poisson: y with rate e^f. Gaussian: y ~ N(m, v + noise), standardised"
        " by target.mean and target.scale."
    )

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """The prior."""
        return (yield from start(prior_of(self.options, self.preparation.num_inputs), roster))

    def update(self, state: PVIState, roster: Roster) -> Asking[Update]:
        """The site maximises its local free energy over its factor of the weights."""
        del state, roster
        yield from ()
        return LocalOptimum(WEIGHTS)

    def predictive(self, state: PVIState, roster: Roster) -> Asking[Predicted]:
        """The posterior q(θ)."""
        del roster
        yield from ()
        model = self.config.model
        facts = {"family": self.method, "likelihood": model.likelihood, "noise": model.noise}
        return predicted(state, self.equation, facts)

    def public(self, state: PVIState) -> NamedArrays:
        """All that predicts."""
        return encode(q_of(state).posterior)

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """The free energy."""
        del roster
        return (yield from free_energy(state))


class PVIBNN(PVI):
    """PVI of mean-field Bayesian neural networks for classes."""

    method = "pvi-bnn"
    options_class = BNNOptions
    options: BNNOptions
    equation = (
        f"θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, {FROM_WEIGHTS}, its variances."
        " P(y = c | x) = E softmax(W₂ (relu(W₁ (x, 1)), 1))_c, the mean over draws."
    )

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """The prior."""
        return (yield from start(prior_of(self.options, self.preparation.num_inputs), roster))

    def update(self, state: PVIState, roster: Roster) -> Asking[Update]:
        """The site maximises its local free energy over its factor of the weights."""
        del state, roster
        yield from ()
        return LocalOptimum(WEIGHTS)

    def predictive(self, state: PVIState, roster: Roster) -> Asking[Predicted]:
        """The posterior q(θ), and the lengths of the layers."""
        del roster
        yield from ()
        facts = {"family": self.method, "likelihood": self.config.model.likelihood, "noise": self.config.model.noise}
        facts |= {"hidden": self.options.hidden, "classes": self.options.classes, "draws": PREDICTION_DRAWS}
        return predicted(state, self.equation, facts)

    def public(self, state: PVIState) -> NamedArrays:
        """All that predicts."""
        return encode(q_of(state).posterior)

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """The free energy."""
        del roster
        return (yield from free_energy(state))
