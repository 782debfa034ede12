"""PVI where the model is its weights: generalised linear models and Bayesian neural networks.

Ashman et al., *Partitioned variational inference* (2022), Algorithm 1 and Sections 5.1 and 5.3: q(θ) ∝ p(θ) ∏ₖ tₖ(θ),
one Gaussian block, full or diagonal. Rounds, schedules and special cases are those of :mod:`strategies.pvi`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import Any

from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.messages import encode
from fedgp_flower.methods.pvi.messages import LogLikelihood, NaturalParameters
from fedgp_flower.methods.pvi.state import factor_strengths, posterior
from fedgp_flower.methods.pvi_weights.glm import prior_of
from fedgp_flower.methods.pvi_weights.network import PREDICTION_DRAWS
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, BNNOptions, GLMOptions
from fedgp_flower.outcome import Posterior
from fedgp_flower.typing import NamedArrays
from strategies.pvi import PVI, free_energy
from strategies.pvi_updates import LocalOptimum, PVIState, Update
from strategies.server.questions import Asking, Predicted, Roster, Total

FROM_WEIGHTS = "θ ~ N(weights.mean, weights.covariance)"


class PVIWeights(PVI):
    """PVI of a model with one block of weights."""

    options: GLMOptions | BNNOptions
    equation = ""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a reader of the saved posterior needs to know of the model."""

    def initialise(self, roster: Roster) -> Asking[PVIState]:
        """The prior. One number of each site shows before training who has other rows than it described."""
        prior = prior_of(self.options, self.preparation.num_inputs)
        yield Total(LogLikelihood, prior)
        return PVIState({WEIGHTS: prior}, rows=roster.rows)

    def update(self, state: PVIState, roster: Roster) -> Asking[Update]:
        """The site maximises its local free energy over its factor of the weights."""
        del state, roster
        yield from ()
        return LocalOptimum(WEIGHTS)

    def predictive(self, state: PVIState, roster: Roster) -> Asking[Predicted]:
        """The posterior q(θ), which predicts without any site."""
        del roster
        yield from ()
        q, likelihood = posterior(state)[WEIGHTS], self.config.model
        mean, covariance = (part.numpy() for part in q.moments())
        arrays: NamedArrays = {"weights.mean": mean, "weights.covariance": covariance}
        words = "covariance of q(θ)" if isinstance(q, NaturalGaussian) else "variances of q(θ)"
        meanings = {"weights.mean": "mean of q(θ)", "weights.covariance": words}
        model = {"family": self.method, "likelihood": likelihood.likelihood, "noise": likelihood.noise, **self.facts()}
        saved = Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), self.equation, model)
        facts = asdict(state.record) | {"version": state.version, "factors": factor_strengths(state)}
        return Predicted(NaturalParameters.of(q), saved, facts)

    def public(self, state: PVIState) -> NamedArrays:
        """All that predicts."""
        return encode(NaturalParameters.of(posterior(state)[WEIGHTS]))

    def final(self, state: PVIState, roster: Roster) -> Asking[dict[str, Any]]:
        """The free energy."""
        del roster
        q = posterior(state)[WEIGHTS]
        kl = {"kl_weights": float(q.kl(state.prior[WEIGHTS].gaussian))}
        return (yield from free_energy(state, NaturalParameters.of(q), kl))


class PVIGLM(PVIWeights):
    """PVI of generalised linear models: Bayesian linear, logistic and Poisson regression."""

    method = "pvi-glm"
    options_class = GLMOptions
    options: GLMOptions
    equation = (
        f"{FROM_WEIGHTS}, f(x) = θ₀ + Σ_d θ_d x_d with x standardised by input.mean and input.scale: f ~ N(m, v)."
        " Bernoulli: P(y = 1) = E 1/(1 + e^(−f)). Poisson: y with rate e^f. Gaussian: y ~ N(m, v + noise), standardised"
        " by target.mean and target.scale."
    )

    def facts(self) -> dict[str, Any]:
        """None besides the likelihood."""
        return {}


class PVIBNN(PVIWeights):
    """PVI of mean-field Bayesian neural networks for classes."""

    method = "pvi-bnn"
    options_class = BNNOptions
    options: BNNOptions
    equation = (
        f"θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, {FROM_WEIGHTS}, its variances."
        " P(y = c | x) = E softmax(W₂ (relu(W₁ (x, 1)), 1))_c, the mean over draws."
    )

    def facts(self) -> dict[str, Any]:
        """The lengths of the layers, and how many draws predict."""
        return {"hidden": self.options.hidden, "classes": self.options.classes, "draws": PREDICTION_DRAWS}
