"""The site's part of FSGP: local steps, sums, shares of the exact gradient, prediction."""

from __future__ import annotations

import torch

from fedgp_flower.clients.base import GPClient, Prediction, Reply, Request
from fedgp_flower.models.fitting import ascend
from fedgp_flower.models.placement import to_array
from fedgp_flower.models.sparse import SparseGP, pooled_sums, sums_gradient
from fedgp_flower.shapes import Array
from fedgp_flower.statistics import WhitenedPosterior, collapsed_bound


class FSGPClient(GPClient):
    """A sparse GP at the server's parameters w = {β, Z}, seeing only this site's rows."""

    def model(self, request: Request) -> SparseGP:
        """The model the request describes."""
        return self.placement.module(SparseGP.from_arrays(self.config.model, request.arrays))

    def rows(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Standardised training rows as tensors."""
        data = self.data(request)
        return self.placement.tensor(data.x), self.placement.tensor(data.y)

    def on_train(self, request: Request) -> Reply:
        """P local steps on the collapsed bound per row F_k (Guo et al. Eq. 9 and Algorithm 1)."""
        model, (inputs, targets) = self.model(request), self.rows(request)

        def objective() -> torch.Tensor:
            return collapsed_bound(model.sums(inputs, targets), model.noise) / len(targets)

        rate = float(request.settings["learning-rate"])
        value = ascend(objective, list(model.parameters()), self.config.optimizer, learning_rate=rate)
        return Reply(model.to_arrays(), len(targets), {"objective": value})

    def on_query_statistics(self, request: Request) -> Reply:
        """The additive sums of this site's rows (Guo et al. Eqs. 14-15)."""
        inputs, targets = self.rows(request)
        return Reply(pooled_sums(self.model(request), inputs, targets).to_arrays(), len(targets))

    def on_train_gradient(self, request: Request) -> Reply:
        """This site's share of the gradient of the pooled bound, from the derivatives the server sent."""
        inputs, targets = self.rows(request)
        return Reply(sums_gradient(self.model(request), inputs, targets, request.arrays), len(targets))

    def predict(self, request: Request, inputs: Array) -> Prediction:
        """Prediction from the exact pooled posterior."""
        posterior = WhitenedPosterior.from_arrays(request.arrays)
        with torch.no_grad():
            mean, variance = self.model(request).predict(self.placement.tensor(inputs), posterior)
        return Prediction(to_array(mean), to_array(variance))
