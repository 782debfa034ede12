"""The client of partitioned variational inference: update a site's factor given the others, and predict."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import TypeVar

import numpy as np
import torch

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.count_scores import log_rate_of
from fedgp_flower.gp.likelihoods.counts import Counts
from fedgp_flower.gp.likelihoods.point import NONE
from fedgp_flower.methods.pvi import updates
from fedgp_flower.methods.pvi.messages import LogLikelihood, Predictive, Refined, Visit
from fedgp_flower.methods.pvi.model import (
    Data,
    Draws,
    Factor,
    SparseModel,
    expected_fit,
    factors_of,
    predict,
    prediction_draws,
    random_source,
)
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.sgpr.client import SGPRClient, SVGPClient
from fedgp_flower.scores import Prediction, Scores, bernoulli_scores, gaussian_scores
from fedgp_flower.typing import Array

C = TypeVar("C", SGPRClient, SVGPClient)
Q = TypeVar("Q")
A = TypeVar("A")


def shared_handler(client: type[C], handler: Callable[[C, Q], A]) -> Callable[[SiteClient, Q], A]:
    """A handler of another client, for sums at Z and β that all sites share."""

    @wraps(handler)
    def answer(site: SiteClient, request: Q) -> A:
        return handler(client(site.setting), request)

    return answer


class PVIClient(SiteClient):
    """A stateless client: every request has all that it needs."""

    options: PVIOptions

    @cached_property
    def model(self) -> SparseModel:
        """Kernel and likelihood of the configuration."""
        return SparseModel(self.config.model, self.rows.x.shape[1])

    @cached_property
    def data(self) -> Data:
        """The site's standardised training rows."""
        return Data(*self.tensors)

    @property
    def at_agreed(self) -> SGPRClient | SVGPClient:
        """The client that predicts from a posterior at agreed Z and β."""
        return (SGPRClient if self.config.model.likelihood == "gaussian" else SVGPClient)(self.setting)

    # Visits.

    def train(self, request: Visit) -> Refined:
        """One local update (Ashman et al. 2022, Algorithm 1, step 2); Adam takes twice as many steps in the first."""
        assert request.q is not None
        options, data, tied = self.options, self.data, self.options.factor == "tied"
        if request.before is None:
            before = updates.first_factor(self.model, data, request.q, options.factor)
        else:
            [before] = factors_of(request.before, tied=tied)
        problem = updates.LocalProblem(
            self.model,
            data,
            factors_of(request.others, tied=tied),
            {name: block.gaussian for name, block in request.context.items()},
            batch_size=self.config.optimizer.batch_size,
            learn_inducing=options.inducing == "average",
        )
        source = random_source(self.config.seed, "train", self.site.site, self.setting.round)
        steps = (options.steps or updates.ADAM_STEPS) * (2 if request.before is None else 1)
        rate = options.learning_rate or updates.ADAM_RATE
        done = updates.adam_update(problem, before, request.q, steps, source, rate)
        parts = vars(done.factor.message()) | {name: latent.answer() for name, latent in done.latents.items()}
        return Refined(done.free_energy / len(data), len(done.values), **parts)

    sketch, trials = shared_handler(SGPRClient, SGPRClient.sketch), shared_handler(SGPRClient, SGPRClient.trials)
    gradients, pairs = shared_handler(SGPRClient, SGPRClient.gradients), shared_handler(SGPRClient, SGPRClient.pairs)
    errors, expectations = (
        shared_handler(SGPRClient, SGPRClient.errors),
        shared_handler(SVGPClient, SVGPClient.expectations),
    )

    # Requests at the global posterior.

    def log_likelihood(self, request: Predictive) -> LogLikelihood:
        """This site's term of the global free energy."""
        draws, factors = self._product(request)
        with torch.no_grad():
            return LogLikelihood(expected_fit(draws, draws.product(factors), self.data).mean().numpy())

    def _product(self, request: Predictive) -> tuple[Draws, list[Factor]]:
        assert request.q is not None
        draws = prediction_draws(request.q, self.model, self.config.seed)
        return draws, factors_of(request.factors, tied=self.options.factor == "tied")

    def predict(self, request: Predictive, inputs: Array) -> Prediction:
        """Mean and variance of the mixture; for classes, of the label."""
        if request.agreed is not None:
            return self.at_agreed.predict(request.agreed, inputs)
        mixture = predict(*self._product(request), torch.from_numpy(inputs))
        return Prediction(mixture.mean().numpy(), mixture.variance().numpy())

    def score(self, request: Predictive) -> Scores:
        """Scores of the predictive mixture."""
        if request.agreed is not None:
            return self.at_agreed.score(request.agreed)
        target, name = self.rows.y_test, self.config.model.likelihood
        mixture = predict(*self._product(request), torch.from_numpy(self.rows.x_test), torch.from_numpy(target))
        if name == "bernoulli":
            return bernoulli_scores(mixture.mean().clamp(0.0, 1.0).numpy(), target)
        if name == "gaussian":
            return self.units.mixture_scores(mixture.means.numpy(), mixture.variances.numpy(), target)
        moments = Prediction(mixture.mean().numpy(), mixture.variance().numpy())
        if name == "poisson":
            rough = Counts().scores(*log_rate_of(moments.mean, moments.variance**0.5), target, NONE, self.units)
        else:
            rough = gaussian_scores(*self.units.original(moments, target))
        nll = -float(mixture.log_density().sum()) + len(target) * float(np.log(self.preparation.target_scale))
        return Scores(rough.sums | {"nll": nll}, rough.arrays)
