"""The site's half of SFVI in closed form for labels and counts: scores and rows shown; sums are those of the base."""

from __future__ import annotations

from typing import cast

import torch

from fedgp_flower.clients.counts import count_scores
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.methods.sfvi.client import StructuredClient
from fedgp_flower.methods.sfvi.closed_client import ClosedFormClient
from fedgp_flower.methods.sfvi.pseudo_observed import PseudoObserved
from fedgp_flower.run.metrics import Scores, bernoulli_scores
from fedgp_flower.typing import Array, NamedArrays


class DualSFVIClient(ClosedFormClient):
    """Sums of pseudo-observations of this site's rows, which never leave."""

    def link(self, request: Parameters, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of f at encoded inputs."""
        site, q_global = self.rows_at(request)
        mean, variance = cast(PseudoObserved, site).link(torch.from_numpy(inputs), q_global)
        return mean.numpy(), variance.numpy()

    def score(self, request: Parameters) -> Scores:
        """Scores of counts, or of class probabilities."""
        rows = self.rows
        if self.config.model.likelihood == "poisson":
            return count_scores(*self.link(request, rows.x_test), rows.y_test)
        return bernoulli_scores(self.predict(request, rows.x_test).mean, rows.y_test)

    def shown(self, request: Parameters) -> NamedArrays:
        """Held-out rows with their predictions, and how these add up on the scale of f."""
        arrays = StructuredClient.shown(self, request)
        site, q_global = self.rows_at(request)
        trend = site.model.trend_moments(torch.from_numpy(self.rows.x_test), q_global)[0].numpy()
        arrays |= self.parts(trend, self.link(request, self.rows.x_test)[0])
        if self.config.model.likelihood == "bernoulli":
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
            del arrays["prediction.sd"]
        return arrays
