"""Clients of PVI over weights: of a generalised linear model and of a network."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np
import torch

from fedgp_flower.clients.numpy_client import SiteClient, confusion
from fedgp_flower.data.sites import SiteData
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.messages import LogLikelihood, NaturalParameters, Refined, Visit, WeightsPosterior
from fedgp_flower.methods.pvi.model import Data, random_source
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.updates import late_mean
from fedgp_flower.methods.pvi_weights import model
from fedgp_flower.methods.pvi_weights.model import NewtonStep, WeightSpaceNetwork
from fedgp_flower.methods.pvi_weights.options import WEIGHTS, BNNOptions, GLMOptions
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.typing import Array


class GLMClient(SiteClient):
    """Client of a generalised linear model; it is stateless."""

    options: GLMOptions

    def linear(self, noise: float | None) -> model.LinearRows:
        """The site's rows with an intercept."""
        return model.glm_rows(self.config.model, self.rows.x, self.rows.y, noise)

    def train(self, request: Visit) -> Refined:
        """One local update (Ashman et al. 2022, Algorithm 1, step 2)."""
        assert request.posterior is not None
        rows, q = self.linear(request.posterior.noise), request.posterior.gaussian
        context, steps = request.context[WEIGHTS].gaussian, 1
        if cast(PVIOptions, self.config.shared).plan().gradient:
            done = NewtonStep.at(rows, q, context)  # merged with ρ it is a step of global VI of length ρ
        else:
            done, steps = model.optimum(rows, q, context)
        return Refined(done.free_energy / self.num_examples, steps, weights=NaturalParameters.of(done.factor))

    def log_likelihood(self, request: WeightsPosterior) -> LogLikelihood:
        """This site's term of the global free energy."""
        return LogLikelihood(self.linear(request.noise).fit(request.gaussian).numpy())

    def predict(self, request: WeightsPosterior, inputs: Array) -> Prediction:
        """Mean and variance of an observation."""
        return Prediction(*model.predicted(self.config.model, request.gaussian, inputs, request.noise))

    def score(self, request: WeightsPosterior) -> Scores:
        """Scores by the likelihood."""
        return self.scored_by(request.gaussian, self.rows, request.noise)

    def baseline_scores(self, data: SiteData, pooled: int) -> Scores:
        """Scores of the same model fitted to these rows."""
        prior = model.prior_of(self.options, data.x.shape[1]).gaussian
        q, noise = model.alone(self.config.model, data.x, data.y, prior)
        return self.scored_by(q, data, noise)

    def scored_by(self, q: Gaussian, data: SiteData, noise: float | None) -> Scores:
        """Scores of held-out rows."""
        rows = model.glm_rows(self.config.model, data.x_test, data.y_test, noise)
        mean, variance = (part.numpy() for part in rows.marginals(q))
        return rows.likelihood.scores(mean, variance, data.y_test, rows.hyper, self.units)


class BNNClient(SiteClient):
    """Client of a Bayesian neural network; it is stateless."""

    options: BNNOptions
    confusion = confusion

    @cached_property
    def network(self) -> WeightSpaceNetwork:
        """The network of the configuration."""
        return WeightSpaceNetwork(self.rows.x.shape[1], self.options.hidden, self.options.classes)

    def train(self, request: Visit) -> Refined:
        """One local update, from the current means and small variances (Ashman et al. 2022, Section 5.3)."""
        assert request.posterior is not None
        context = request.context[WEIGHTS].gaussian
        q, values = self._update(self.rows, context, request.posterior.gaussian)
        factor = NaturalParameters.of(q / context)
        return Refined(late_mean(values) / self.num_examples, len(values), weights=factor)

    def log_likelihood(self, request: NaturalParameters) -> LogLikelihood:
        """This site's term of the global free energy, a Monte Carlo estimate."""
        rows, source = data_of(self.rows), random_source(self.config.seed, "fit", self.site.site)
        values = [self.network.log_likelihood(rows, request.gaussian, source) for _ in range(model.PREDICTION_DRAWS)]
        return LogLikelihood(np.array(np.mean(values)))

    def predict(self, request: NaturalParameters, inputs: Array) -> Prediction:
        """Mean and variance of the indicators of classes."""
        return self._indicators(request.gaussian, inputs)

    def baseline_scores(self, data: SiteData, pooled: int) -> Scores:
        """Scores of the same network fitted to these rows."""
        prior = model.prior_of(self.options, data.x.shape[1]).gaussian
        q, *_ = self._update(data, prior, prior, self.config.num_server_rounds)
        return self.scores_of(self._indicators(q, data.x_test), data.y_test)

    def _update(self, data: SiteData, context: Gaussian, q: Gaussian, visits: int = 1) -> tuple[Gaussian, list[float]]:
        shared = cast(PVIOptions, self.config.shared)
        steps, rate = visits * (shared.steps or model.STEPS), shared.learning_rate or model.LEARNING_RATE
        mean, variance = q.moments()
        if not mean.any():  # the prior, before any training
            mean = self.network.initial(random_source(self.config.seed, "weights"))
        start = Gaussian.from_moments(mean, variance.clamp(max=model.START_SCALE**2))
        source = random_source(self.config.seed, "train", self.site.site, self.setting.round)
        return model.refined(self.network, data_of(data), context, start, steps, rate, source)

    def _indicators(self, q: Gaussian, inputs: Array) -> Prediction:
        binary = self.config.model.likelihood == "bernoulli"
        return Prediction(*self.network.indicators(inputs, q, model.PREDICTION_DRAWS, binary=binary))


def data_of(rows: SiteData) -> Data:
    """Training rows as tensors; the target is the index of a class."""
    return Data(torch.from_numpy(rows.x), torch.from_numpy(rows.y))
