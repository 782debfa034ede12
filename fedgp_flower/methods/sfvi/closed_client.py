"""The site's half of SFVI in closed form: it keeps nothing, because its latents follow from its rows and q(Z_G)."""

from __future__ import annotations

import numpy as np
import torch

from fedgp_flower.clients.numpy_client import Prediction
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.methods.sfvi.client import StructuredClient
from fedgp_flower.methods.sfvi.exact_deviation import ExactDeviation
from fedgp_flower.methods.sfvi.posterior import exact_site
from fedgp_flower.typing import Array, NamedArrays


class ClosedFormClient(StructuredClient):
    """Sums of this site's rows, its deviation integrated out."""

    def expansion(self, request: ExpansionRequest) -> ExpansionShare:
        """P, p and c at the site's best noise offset, and their derivatives by θ."""
        site, q_global = self.rows_at(request)
        found = site.derivatives(q_global)
        precision, shift, constant = (own.numpy() for own in found.sums.parts())
        slopes, curvature, count = found.slopes.numpy(), found.curvature.numpy(), np.array(float(self.num_examples))
        width = found.width.squares.numpy(), found.width.known.numpy()
        return ExpansionShare(precision, shift, constant, slopes, curvature, count, *width)

    def predict(self, request: Parameters, inputs: Array) -> Prediction:
        """Personal prediction with the exact deviation, the mixture over noise offsets."""
        site, q_global = self.rows_at(request)
        return Prediction(*(own.numpy() for own in site.predict(torch.from_numpy(inputs), q_global)))

    def shown(self, request: Parameters) -> NamedArrays:
        """Held-out rows with their predictions, and how they add up."""
        arrays = super().shown(request)
        site, q_global = self.rows_at(request)
        trend = site.model.trend_moments(torch.from_numpy(self.rows.x_test), q_global)[0].numpy()
        return arrays | self.parts(trend, self.predict(request, self.rows.x_test).mean)

    def rows_at(self, request: ExpansionRequest | Parameters) -> tuple[ExactDeviation, GlobalPosterior]:
        """This site's rows at a θ, and q(Z_G)."""
        values = {**request.values, **self.setting.constants}
        return exact_site(self.config, self.preparation, self.site, values), GlobalPosterior.of(values)
