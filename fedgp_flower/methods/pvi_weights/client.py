"""The sites' halves of PVI over weights: of a generalised linear model and of a network."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np
import torch

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.data.sites import SiteData
from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.methods.pvi.messages import LogLikelihood, NaturalParameters, Refined, Visit
from fedgp_flower.methods.pvi.model import random_source
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi_weights.glm import LinearSite, glm_site, gradient, log_likelihood, optimum, prior_of
from fedgp_flower.methods.pvi_weights.network import (
    LEARNING_RATE,
    PREDICTION_DRAWS,
    START_SCALE,
    STEPS,
    ClassRows,
    Network,
    NetworkUpdate,
    VisitSettings,
    refined,
)
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, BNNOptions, GLMOptions
from fedgp_flower.methods.pvi_weights.posterior import LinearPosterior, NetworkPosterior, observed
from fedgp_flower.scores import Prediction, Scores, bernoulli_scores, class_scores, count_scores
from fedgp_flower.typing import Array


class GLMClient(SiteClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    @property
    def options(self) -> GLMOptions:
        """The table ``glm.*``."""
        return cast(GLMOptions, self.config.options)

    @cached_property
    def linear(self) -> LinearSite:
        """The site's rows, with a constant."""
        return glm_site(self.config.model, self.rows.x, self.rows.y)

    def train(self, request: Visit) -> Refined:
        """One local update (Ashman et al. 2022, Algorithm 1, step 2)."""
        assert request.posterior is not None
        update = gradient if cast(PVIOptions, self.config.shared).plan().gradient else optimum
        done = update(self.linear, request.posterior.gaussian, request.context[WEIGHTS].gaussian)
        factor, objective = NaturalParameters.of(done.factor), done.free_energy / self.num_examples
        return Refined(objective, done.iterations, weights=factor)

    def log_likelihood(self, request: NaturalParameters) -> LogLikelihood:
        """This site's term of the global free energy."""
        return LogLikelihood(log_likelihood(self.linear, request.gaussian).numpy())

    def predict(self, request: NaturalParameters, inputs: Array) -> Prediction:
        """Mean and variance of an observation."""
        return Prediction(*self._posterior(request).observation(inputs))

    def score(self, request: NaturalParameters) -> Scores:
        """Scores by the likelihood."""
        return self._scored(self._posterior(request), self.rows)

    def alone(self, data: SiteData, pooled: bool) -> Scores:
        """Scores of the same model of these rows alone."""
        del pooled
        prior = prior_of(self.options, data.x.shape[1]).gaussian
        done = optimum(glm_site(self.config.model, data.x, data.y), prior, prior)
        return self._scored(LinearPosterior(self.config.model, prior * done.factor), data)

    def _posterior(self, request: NaturalParameters) -> LinearPosterior:
        return LinearPosterior(self.config.model, request.gaussian)

    def _scored(self, posterior: LinearPosterior, data: SiteData) -> Scores:
        """Scores of held-out rows from the moments of f."""
        mean, variance = posterior.latent(data.x_test)
        if self.config.model.likelihood == "poisson":
            return count_scores(mean, variance, data.y_test)
        mean, variance = observed(self.config.model, mean, variance)
        if self.config.model.likelihood == "bernoulli":
            return bernoulli_scores(mean, data.y_test)
        return self.units.gaussian_scores(Prediction(mean, variance), data.y_test)


class BNNClient(SiteClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    @property
    def options(self) -> BNNOptions:
        """The table ``bnn.*``."""
        return cast(BNNOptions, self.config.options)

    @cached_property
    def network(self) -> Network:
        """The lengths of the layers."""
        return Network(self.rows.x.shape[1], self.options.hidden, self.options.classes)

    @property
    def steps(self) -> int:
        """Most steps of a visit."""
        return cast(PVIOptions, self.config.shared).steps or STEPS

    def train(self, request: Visit) -> Refined:
        """One local update, from the means that were sent and a tight start (Ashman et al. 2022, Section 5.3)."""
        assert request.posterior is not None
        context = request.context[WEIGHTS].diagonal()
        done = self._update(self.class_rows, context, request.posterior.diagonal(), self.steps)
        factor = NaturalParameters.of(done.q / context)
        return Refined(done.free_energy / self.num_examples, done.trace.evaluations, weights=factor)

    @property
    def class_rows(self) -> ClassRows:
        """The site's training rows."""
        return ClassRows(torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y)).checked(self.options.classes)

    def log_likelihood(self, request: NaturalParameters) -> LogLikelihood:
        """This site's term of the global free energy, estimated from the draws of a prediction."""
        mean, variance = request.diagonal().moments()
        rows, source = self.class_rows, random_source(self.config.seed, "fit", self.site.site)
        values = [
            float(rows.log_likelihood(self.network.logits(rows.x, mean, variance, source), slice(None)))
            for _ in range(PREDICTION_DRAWS)
        ]
        return LogLikelihood(np.array(np.mean(values)))

    def predict(self, request: NaturalParameters, inputs: Array) -> Prediction:
        """Mean and variance of the indicators of classes."""
        mean = self._posterior(request.diagonal()).probabilities(inputs)
        return Prediction(mean, mean * (1 - mean))

    def score(self, request: NaturalParameters) -> Scores:
        """Scores of the classes' probabilities."""
        return scores_of(self.predict(request, self.rows.x_test).mean, self.rows.y_test)

    def alone(self, data: SiteData, pooled: bool) -> Scores:
        """Scores of the same network of these rows alone."""
        del pooled
        prior = prior_of(self.options, data.x.shape[1]).diagonal()
        rows = ClassRows(torch.from_numpy(data.x), torch.from_numpy(data.y)).checked(self.options.classes)
        steps = self.steps * self.config.num_server_rounds
        done = self._update(rows, prior, prior, steps)
        return scores_of(self._posterior(done.q).probabilities(data.x_test), data.y_test)

    def _update(self, rows: ClassRows, context: DiagonalGaussian, q: DiagonalGaussian, steps: int) -> NetworkUpdate:
        mean = q.mean()
        if not mean.any():  # the prior: nobody has trained yet
            mean = self.network.initial(random_source(self.config.seed, "weights"))
        start = DiagonalGaussian.from_moments(mean, q.moments()[1].clamp(max=START_SCALE**2))
        rate = cast(PVIOptions, self.config.shared).learning_rate or LEARNING_RATE
        source = random_source(self.config.seed, "train", self.site.site, self.setting.round)
        return refined(self.network, rows, context, start, VisitSettings(steps, rate), source)

    def _posterior(self, q: DiagonalGaussian) -> NetworkPosterior:
        binary = self.config.model.likelihood == "bernoulli"
        return NetworkPosterior(self.network, q, PREDICTION_DRAWS, binary)


def scores_of(probability: Array, label: Array) -> Scores:
    """Scores of two classes by the second one's probability [N], or of all [N, C]."""
    return bernoulli_scores(probability, label) if probability.ndim == 1 else class_scores(probability, label)
