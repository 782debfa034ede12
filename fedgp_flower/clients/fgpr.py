"""The site's part of FGPR: local steps on the evidence of its rows, and prediction from them."""

from __future__ import annotations

import torch

from fedgp_flower.clients.base import GPClient, Prediction, Reply, Request
from fedgp_flower.models.exact import ExactGP
from fedgp_flower.models.fitting import ascend
from fedgp_flower.models.placement import to_array
from fedgp_flower.shapes import Array


class FGPRClient(GPClient):
    """An exact GP of this site's rows at the server's hyperparameters."""

    def on_train(self, request: Request) -> Reply:
        """P local steps on the log evidence per row."""
        data = self.data(request)
        model = self.model(request, data.x.shape[1])
        inputs, targets = self.placement.tensor(data.x), self.placement.tensor(data.y)
        rate = float(request.settings["learning-rate"])
        value = ascend(
            lambda: model.log_evidence(inputs, targets) / len(targets),
            list(model.parameters()),
            self.config.optimizer,
            learning_rate=rate,
        )
        return Reply(model.to_arrays(), len(targets), {"objective": value})

    def model(self, request: Request, num_inputs: int) -> ExactGP:
        """The model the request describes."""
        model = ExactGP(self.config.model, num_inputs)
        model.load(request.arrays)
        return self.placement.module(model)

    def predict(self, request: Request, inputs: Array) -> Prediction:
        """Prediction from this site's rows."""
        data = self.data(request)
        model = self.model(request, data.x.shape[1])
        with torch.no_grad():
            rows = self.placement.tensor(data.x), self.placement.tensor(data.y)
            mean, variance = model.predict(*rows, self.placement.tensor(inputs))
        return Prediction(to_array(mean), to_array(variance))


class YardstickClient(GPClient):
    """A site of ``local-only`` and ``pooled``: the phases every client has are all it needs."""
