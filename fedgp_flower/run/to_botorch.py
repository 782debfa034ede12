"""A federated posterior as a model of BoTorch, whose acquisition functions are optimised on it (extra ``botorch``)."""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.to_gpytorch import Exported


class FederatedModel(Model):
    """f at encoded inputs in original units, [*B, Q, D] → a posterior over [*B, Q, 1] in units of the target.

    A transformed target is modelled as an increasing g(y), so its best is the best y. The model does not learn.
    """

    num_outputs = 1

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        self.exported = exported
        self.gp = exported.model

    @property
    def batch_shape(self) -> torch.Size:
        """One model."""
        return torch.Size([])

    def posterior(
        self,
        X: Float[Tensor, "*B Q D"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint posterior of f at Q points, differentiable; with ``observation_noise`` of observations there."""
        del output_indices
        found = self.gp(self.exported.transforms.inputs(X.double()))
        if observation_noise is not False and isinstance(self.exported.likelihood, GaussianLikelihood):
            found = self.exported.likelihood(found)
        posterior = GPyTorchPosterior(self.exported.transforms.original(found))
        return posterior if posterior_transform is None else posterior_transform(posterior)
