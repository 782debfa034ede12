"""The site's half of PVI over the weights of a generalised linear model."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import cast

from fedgp_flower.clients.baselines import Baseline
from fedgp_flower.clients.counts import count_scores
from fedgp_flower.clients.numpy_client import Prediction
from fedgp_flower.clients.same_model import SameModelClient
from fedgp_flower.methods.pvi.linear import LinearSite
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.weights.glm import UPDATES, glm_site, log_likelihood, optimum
from fedgp_flower.methods.pvi.weights.messages import (
    LogLikelihood,
    RefinedWeights,
    WeightsPredictive,
    WeightsVisit,
    prior_of,
)
from fedgp_flower.methods.pvi.weights.options import GLMOptions
from fedgp_flower.methods.pvi.weights.posterior import LinearPosterior, observed
from fedgp_flower.run.metrics import Scores, bernoulli_scores
from fedgp_flower.typing import Array, NamedArrays


class GLMClient(SameModelClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    @property
    def options(self) -> GLMOptions:
        """The table ``glm.*``."""
        return cast(GLMOptions, self.config.options)

    @cached_property
    def linear(self) -> LinearSite:
        """The site's rows, with a constant."""
        return glm_site(self.config.model, self.rows.x, self.rows.y)

    def train(self, request: WeightsVisit) -> RefinedWeights:
        """One local update (Ashman et al. 2022, Algorithm 1, step 2)."""
        q, context = request.posterior.gaussian, request.context.gaussian
        done = UPDATES[self.options.local_update](self.linear, q, context, steps=self.options.steps)
        factor, objective = NaturalParameters.of(done.factor), done.free_energy / self.num_examples
        return RefinedWeights(factor, objective, done.iterations, done.halvings)

    def log_likelihood(self, request: WeightsPredictive) -> LogLikelihood:
        """This site's term of the global free energy."""
        return LogLikelihood(log_likelihood(self.linear, request.posterior.gaussian).numpy())

    def predict(self, request: WeightsPredictive, inputs: Array) -> Prediction:
        """Mean and variance of an observation."""
        return Prediction(*self._posterior(request).observation(inputs))

    def score(self, request: WeightsPredictive) -> Scores:
        """Scores by the likelihood."""
        return self._scored(Baseline(*self._posterior(request).latent(self.rows.x_test), self.rows.y_test, 0))

    def shown(self, request: WeightsPredictive) -> NamedArrays:
        """Held-out rows with their predictions; for classes the probability of the second one."""
        arrays = super().shown(request)
        if self.config.model.likelihood == "bernoulli":
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
            del arrays["prediction.sd"]
        return arrays

    def _alone(self, data: tuple[Array, Array, Array, Array]) -> Baseline:
        x, y, x_test, y_test = data
        prior = prior_of(self.options, x.shape[1]).gaussian
        done = optimum(glm_site(self.config.model, x, y), prior, prior, steps=self.options.steps)
        latent = LinearPosterior(self.config.model, prior * done.factor).latent(x_test)
        return Baseline(*latent, y_test, done.iterations)

    def _posterior(self, request: WeightsPredictive) -> LinearPosterior:
        return LinearPosterior(self.config.model, request.posterior.gaussian)

    def _scored(self, result: Baseline) -> Scores:
        """Scores from the moments of f."""
        if self.config.model.likelihood == "poisson":
            return count_scores(result.mean, result.variance, result.target)
        mean, variance = observed(self.config.model, result.mean, result.variance)
        if self.config.model.likelihood == "bernoulli":
            return bernoulli_scores(mean, result.target)
        return super()._scored(replace(result, mean=mean, variance=variance))
