"""The site's half of FSGP where predictions mix over several hyperparameters."""

from __future__ import annotations

import numpy as np

from fedgp_flower.clients.numpy_client import Prediction, SiteClient
from fedgp_flower.methods.fsgp.client import FSGPClient
from fedgp_flower.methods.fsgp.messages import MixedPosterior
from fedgp_flower.run.metrics import Scores
from fedgp_flower.typing import Array, NamedArrays


class MixtureClient(FSGPClient):
    """Trains as any site of FSGP; scores are those of the mixture itself."""

    def components(self, request: MixedPosterior, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of every component's prediction, both [S, N]."""
        each = [FSGPClient.predict(self, own, inputs) for own in request.each()]
        return np.stack([own.mean for own in each]), np.stack([own.variance for own in each])

    def predict(self, request: MixedPosterior, inputs: Array) -> Prediction:  # type: ignore[override]
        """Mean and variance of the mixture."""
        means, variances = self.components(request, inputs)
        return Prediction(means.mean(0), variances.mean(0) + means.var(0))

    def score(self, request: MixedPosterior) -> Scores:  # type: ignore[override]
        """Scores of the mixture."""
        return self.mixture_scores(*self.components(request, self.rows.x_test), self.rows.y_test)

    def shown(self, request: MixedPosterior) -> NamedArrays:  # type: ignore[override]
        """Held-out rows with the mixture's mean and sd."""
        return SiteClient.shown(self, request)
