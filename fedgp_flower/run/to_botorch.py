"""A federated posterior as a model of BoTorch, for acquisition functions (extra ``botorch``)."""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.to_gpytorch import Exported

NO_LEARNING = "a federated posterior cannot be updated with single rows, because it has no training rows"
NO_FANTASIES = (
    "Knowledge gradients and integrated variances (qKG, qNIPV) need `fantasize`; take an acquisition function of the"
    " posterior alone, such as qUpperConfidenceBound, qSimpleRegret or qExpectedImprovement with `best_f`"
)


class FederatedModel(Model):
    """Posterior of f [*B, Q, 1] in units of the target at encoded inputs [*B, Q, D] in original units.

    A transformed target is an increasing g(y), so its optimum is that of y. The model cannot be updated.
    """

    num_outputs = 1

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        self.exported = exported
        self.gp = exported.model

    def subset_output(self, idcs: list[int]) -> FederatedModel:
        """Return the model; it has one output."""
        if list(idcs) not in ([0], [-1]):
            raise ValueError(f"a federated posterior has one output, number 0; got {idcs}")
        return self

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Model:
        """Raise NotImplementedError: new rows need a new run."""
        raise NotImplementedError(f"{NO_LEARNING}. Conditioning on {X.shape[-2]} rows needs a new run")

    def fantasize(self, X: Tensor, *args: Any, **kwargs: Any) -> Model:
        """Raise NotImplementedError, like :meth:`condition_on_observations`."""
        raise NotImplementedError(f"{NO_LEARNING}. {NO_FANTASIES}")

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
        """Return the differentiable posterior of f at Q points; with ``observation_noise``, of observations."""
        found = self.gp(self.exported.transforms.inputs(X.double()))
        if observation_noise is not False:
            if not isinstance(self.exported.likelihood, GaussianLikelihood):
                kind = type(self.exported.likelihood).__name__
                raise NotImplementedError(f"observations of {kind} are not normal: leave `observation_noise` out")
            found = self.exported.likelihood(found)
        posterior = GPyTorchPosterior(self.exported.transforms.original(found))
        return posterior if posterior_transform is None else posterior_transform(posterior)
