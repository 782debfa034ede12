"""The client of a deep-kernel GP: steps on the evidence of its rows, sums, and personal predictions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.clients.numpy_client import SiteClient, confusion
from fedgp_flower.data.sites import SiteData
from fedgp_flower.gp.optimisers import ascend
from fedgp_flower.methods.deep_kernel.model import (
    DeepKernel,
    DeepPosterior,
    HeadPosterior,
    HeadRequest,
    Heads,
    heads_of,
)
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.shared_messages import Step, Stepped
from fedgp_flower.typing import Array


class DeepKernelClient(SiteClient):
    """A stateless client: its personal head follows from the shared one and its rows."""

    options: DeepKernelOptions
    confusion = confusion

    def model(self, values: Mapping[str, ndarray] | None = None) -> DeepKernel:
        """The network at given or initial weights."""
        start = DeepKernel(self.options, self.config.model, self.rows.x.shape[1], self.config.seed)
        return start if values is None else start.load(values)

    def train(self, request: Step) -> Stepped:
        """Local steps on the log evidence of this site's rows, by row."""
        model, steps = self.model(request.values), self.options.local_steps
        value = adam_steps(model, self.rows.x, self.rows.y, steps=steps, learning_rate=request.learning_rate)
        return Stepped.of(request, model.to_arrays(), value)

    def heads(self, request: HeadRequest) -> Heads:
        """Sums of this site's rows for the shared head."""
        with torch.no_grad():
            sums = self.model(request.values).sums(*self.tensors)
            return heads_of([sums.without_personal(float(share)) for share in request.shares])

    def predict(self, request: HeadPosterior, inputs: Array) -> Prediction:
        """Personal prediction."""
        mean, covariance = torch.from_numpy(request.mean), torch.from_numpy(request.covariance)
        shared = DeepPosterior(self.model(request.values), mean, covariance, request.share)
        return Prediction(*shared.personal(*self.tensors).moments(inputs))

    def baseline_scores(self, data: SiteData, pooled: int) -> Scores:
        """Scores of this model fitted to the site's rows."""
        x, y = data.x, data.y
        model, steps = self.model(), self.options.local_steps * self.config.num_server_rounds
        adam_steps(model, x, y, steps=steps, learning_rate=self.options.learning_rate)
        with torch.no_grad():
            head = model.sums(torch.from_numpy(x), torch.from_numpy(y)).posterior(1.0)
        return self.scores_of(Prediction(*DeepPosterior(model, *head, 0.0).moments(data.x_test)), data.y_test)


def adam_steps(model: DeepKernel, x: Array, y: Array, *, steps: int, learning_rate: float) -> float:
    """Take steps of Adam on the evidence per row and return its value; no steps if all targets are equal."""
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

    def objective() -> torch.Tensor:
        return model.sums(inputs, targets).log_evidence(1.0) / len(targets)

    steps = steps if np.ptp(y) else 0
    return ascend(objective, list(model.parameters()), name="adam", steps=steps, learning_rate=learning_rate)
