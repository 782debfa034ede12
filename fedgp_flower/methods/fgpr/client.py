"""The site's half of FGPR: local steps on the evidence of its rows, and prediction from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from numpy import ndarray

from fedgp_flower.clients.numpy_client import AveragingClient
from fedgp_flower.gp.exact import ExactGP
from fedgp_flower.gp.placement import to_array
from fedgp_flower.scores import Prediction
from fedgp_flower.shared_messages import Parameters, Step, Stepped
from fedgp_flower.typing import Array


class FGPRClient(AveragingClient):
    """An exact GP of this site's rows at the server's hyperparameters."""

    def model(self, values: Mapping[str, ndarray]) -> ExactGP:
        """The model of this site's rows at given hyperparameters."""
        model = ExactGP(self.config.model, torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y))
        model.load(values)
        return self.placement.module(model)

    def train(self, request: Step) -> Stepped:
        """P local steps on the log evidence per row."""
        model = self.model(request.values)
        return self.stepped(model, model.log_evidence, request)

    def predict(self, request: Parameters, inputs: Array) -> Prediction:
        """Prediction from this site's rows."""
        mean, variance = self.model(request.values).predict(self.placement.tensor(inputs))
        return Prediction(to_array(mean), to_array(variance))
