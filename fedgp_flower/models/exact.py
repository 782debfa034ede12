"""An exact GP with GPyTorch: evidence and prediction from a site's own rows."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.config import ModelSection
from fedgp_flower.linalg import cholesky
from fedgp_flower.models.kernels import WiredModel, build_kernel, build_likelihood
from fedgp_flower.shapes import Rows, Targets


class ExactGP(WiredModel):
    """Kernel and Gaussian noise, conditioned on rows when asked; parameters in log coordinates."""

    def __init__(self, model: ModelSection, num_inputs: int) -> None:
        super().__init__()
        self.kernel = build_kernel(model, num_inputs)
        self.likelihood = build_likelihood(model)

    def _factor(self, inputs: Rows) -> Tensor:
        noise = self.likelihood.noise.squeeze(-1) * torch.eye(len(inputs), dtype=inputs.dtype, device=inputs.device)
        return cholesky(self.kernel(inputs).to_dense() + noise, of="K_xx + σ²I", hint="Raise `model.noise`.")

    def log_evidence(self, inputs: Rows, targets: Targets) -> Tensor:
        """Log N(y | 0, K_xx + σ²I), in nats (Guo et al. Eq. 3 times N); O(N³)."""
        factor = self._factor(inputs)
        residual = torch.linalg.solve_triangular(factor, targets[:, None], upper=False)
        return -0.5 * (residual.square().sum() + len(targets) * math.log(2 * math.pi)) - factor.diagonal().log().sum()

    def predict(self, inputs: Rows, targets: Targets, new: Float[Tensor, "K D"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of noisy observations at new inputs, both [K] (Guo et al. Eq. 5)."""
        factor = self._factor(inputs)
        cross = torch.linalg.solve_triangular(factor, self.kernel(inputs, new).to_dense(), upper=False)
        residual = torch.linalg.solve_triangular(factor, targets[:, None], upper=False)[:, 0]
        variance = self.kernel(new, diag=True) - cross.square().sum(0) + self.likelihood.noise
        return cross.mT @ residual, variance
