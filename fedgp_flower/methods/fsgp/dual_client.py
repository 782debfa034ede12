"""The site's half of FSGP where the likelihood is not Gaussian: expectations, scores, rows shown."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from numpy import ndarray
from torch import Tensor

from fedgp_flower.clients.averaging import AveragingClient
from fedgp_flower.clients.latent_scores import latent_scores
from fedgp_flower.gp.latent import LatentGP
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.methods.fsgp.dual_messages import Expectations
from fedgp_flower.methods.fsgp.duals import expectations
from fedgp_flower.methods.fsgp.messages import PooledPosterior
from fedgp_flower.run.metrics import Scores
from fedgp_flower.typing import NamedArrays


class DualClient(AveragingClient):
    """What follows from a posterior q(v) that a message carries."""

    @abstractmethod
    def factorised(self, values: Mapping[str, ndarray]) -> tuple[SparseGP, Tensor]:
        """The model at given parameters and its factor L."""

    def latent(self, values: Mapping[str, ndarray]) -> tuple[LatentGP, Tensor]:
        """The same, of a likelihood that is not Gaussian."""
        model, factor = self.factorised(values)
        assert isinstance(model, LatentGP)
        return model, factor

    def expectations(self, request: PooledPosterior) -> Expectations:
        """The expected log likelihood of this site's rows, and its derivatives."""
        model, factor = self.latent(request.values)
        return expectations(model, *self.tensors, request.whitened(), factor)

    def score(self, request: PooledPosterior) -> Scores:
        """Scores of the held-out rows: by the configured likelihood."""
        if self.config.model.likelihood == "gaussian":
            return super().score(request)
        (model, _), rows = self.latent(request.values), self.rows
        mean, variance = map(to_array, model.latent(self.placement.tensor(rows.x_test), request.whitened()))
        return latent_scores(model, mean, variance, rows.y_test, self.preparation.target_scale)

    def shown(self, request: PooledPosterior) -> NamedArrays:
        """Held-out rows with their predictions; for classes the probability of the second one."""
        arrays = super().shown(request)
        if self.config.model.likelihood == "bernoulli":
            arrays["prediction.probability"] = arrays.pop("prediction.mean")
            del arrays["prediction.sd"]
        return arrays
