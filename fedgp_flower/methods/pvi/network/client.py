"""The site's half of PVI over the weights of a network."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np
import torch

from fedgp_flower.clients.baselines import Baseline
from fedgp_flower.clients.numpy_client import Prediction
from fedgp_flower.clients.same_model import SameModelClient
from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.network.mathematics import Network, NetworkUpdate, Rows, VisitSettings, refined
from fedgp_flower.methods.pvi.network.options import NetworkOptions
from fedgp_flower.methods.pvi.network.posterior import NetworkPosterior
from fedgp_flower.methods.pvi.posterior import random_source
from fedgp_flower.methods.pvi.weights.messages import (
    LogLikelihood,
    RefinedWeights,
    WeightsPredictive,
    WeightsVisit,
    prior_of,
)
from fedgp_flower.run.metrics import Scores, bernoulli_scores, class_scores
from fedgp_flower.typing import Array, NamedArrays


class NetworkClient(SameModelClient):
    """Everything the site needs comes with the message; it keeps nothing."""

    @property
    def options(self) -> NetworkOptions:
        """The table ``bnn.*``."""
        return cast(NetworkOptions, self.config.options)

    @cached_property
    def network(self) -> Network:
        """The lengths of the layers."""
        return Network(self.rows.x.shape[1], self.options.hidden, self.options.classes)

    def train(self, request: WeightsVisit) -> RefinedWeights:
        """One local update, from the means that were sent and a tight start (Ashman et al. 2022, Section 5.3)."""
        context = request.context.diagonal()
        rows = Rows(torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y))
        done = self._update(rows, context, request.posterior.diagonal(), self.options.steps)
        factor, objective = NaturalParameters.of(done.q / context), done.free_energy / self.num_examples
        return RefinedWeights(factor, objective, done.trace.evaluations, 0)

    def log_likelihood(self, request: WeightsPredictive) -> LogLikelihood:
        """This site's term of the global free energy, estimated from the draws of a prediction."""
        mean, variance = request.posterior.diagonal().moments()
        rows = Rows(torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y)).checked(self.options.classes)
        source, draws = random_source(self.config.seed, "fit", self.site.site), self.options.prediction_draws
        values = [
            float(rows.log_likelihood(self.network.logits(rows.x, mean, variance, source), slice(None)))
            for _ in range(draws)
        ]
        return LogLikelihood(np.array(np.mean(values)))

    def predict(self, request: WeightsPredictive, inputs: Array) -> Prediction:
        """Mean and variance of the indicators of classes."""
        mean = self._posterior(request.posterior.diagonal()).probabilities(inputs)
        return Prediction(mean, mean * (1 - mean))

    def score(self, request: WeightsPredictive) -> Scores:
        """Scores of the classes' probabilities."""
        return scores_of(self.predict(request, self.rows.x_test).mean, self.rows.y_test)

    def shown(self, request: WeightsPredictive) -> NamedArrays:
        """Held-out rows with the probability of the second of two classes; nothing row by row where there are more."""
        arrays = super().shown(request)
        mean, _ = arrays.pop("prediction.mean"), arrays.pop("prediction.sd")
        return {"prediction.probability": mean, **arrays} if mean.ndim == 1 else {}

    def _alone(self, data: tuple[Array, Array, Array, Array]) -> Baseline:
        x, y, x_test, y_test = data
        prior = prior_of(self.options, x.shape[1]).diagonal()
        rows, steps = Rows(torch.from_numpy(x), torch.from_numpy(y)), self.options.steps * self.config.num_server_rounds
        done = self._update(rows, prior, prior, steps)
        mean = self._posterior(done.q).probabilities(x_test)
        return Baseline(mean, mean * (1 - mean), y_test, done.trace.evaluations)

    def _update(self, rows: Rows, context: DiagonalGaussian, q: DiagonalGaussian, steps: int) -> NetworkUpdate:
        own, mean = self.options, q.mean()
        if not mean.any():  # the prior: nobody has trained yet
            mean = self.network.initial(random_source(self.config.seed, "weights"))
        start = DiagonalGaussian.from_moments(mean, q.moments()[1].clamp(max=own.start_scale**2))
        early, batch = own.early_stopping, own.batch_size
        settings = VisitSettings(steps, own.learning_rate, enabled=early, batch_size=batch)
        source = random_source(self.config.seed, "train", self.site.site, self.setting.round)
        return refined(self.network, rows.checked(own.classes), context, start, settings, source)

    def _posterior(self, q: DiagonalGaussian) -> NetworkPosterior:
        binary = self.config.model.likelihood == "bernoulli"
        return NetworkPosterior(self.network, q, self.options.prediction_draws, binary)

    def _scored(self, result: Baseline) -> Scores:
        return scores_of(result.mean, result.target)


def scores_of(probability: Array, label: Array) -> Scores:
    """Scores of two classes by the second one's probability [N], or of all [N, C]."""
    return bernoulli_scores(probability, label) if probability.ndim == 1 else class_scores(probability, label)
