"""An exact GP of one site's rows: GPyTorch's ``ExactGP`` and ``ExactMarginalLogLikelihood``, by Cholesky throughout."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from jaxtyping import Float
from linear_operator import settings
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from fedgp_flower.gp.kernels import WiredModel, build_kernel
from fedgp_flower.gp.likelihoods import gaussian_likelihood
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Targets


class ExactGP(WiredModel, gpytorch.models.ExactGP):
    """Zero mean, kernel and Gaussian noise, conditioned on rows; parameters in log coordinates."""

    def __init__(self, model: ModelSection, inputs: Rows, targets: Targets) -> None:
        gpytorch.models.ExactGP.__init__(self, inputs, targets, gaussian_likelihood(model.noise))
        self.covar_module = build_kernel(model, inputs.shape[-1])

    def forward(self, inputs: Rows) -> MultivariateNormal:
        """The prior at some inputs."""
        return MultivariateNormal(inputs.new_zeros(len(inputs)), self.covar_module(inputs))

    def log_evidence(self) -> Tensor:
        """Log N(y | 0, K_xx + σ²I) per row, in nats (Guo et al. Eq. 3); O(N³)."""
        self.train()
        with self._by_cholesky():
            value: Tensor = ExactMarginalLogLikelihood(self.likelihood, self)(
                self(*self.train_inputs), self.train_targets
            )
        return value

    @torch.no_grad()
    def predict(self, new: Float[Tensor, "K D"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of noisy observations at new inputs, both [K] (Guo et al. Eq. 5)."""
        self.eval()
        with self._by_cholesky():
            observation = self.likelihood(self(new))
            return observation.mean, observation.variance

    @contextmanager
    def _by_cholesky(self) -> Iterator[None]:
        """No conjugate gradients, and no jitter: a covariance that is not positive definite is an error."""
        with ExitStack() as stack:
            stack.enter_context(settings.max_cholesky_size(sys.maxsize))
            stack.enter_context(settings.fast_computations(False, False, False))
            stack.enter_context(settings.cholesky_max_tries(1))
            stack.enter_context(settings.cholesky_jitter(0.0, 0.0, 0.0))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", NumericalWarning)  # of a jitter of 0, before the error
            try:
                yield
            except (NotPSDError, NanError):
                inputs = self.train_inputs[0]
                noise = self.likelihood.noise * torch.eye(len(inputs)).to(inputs)
                matrix = self.covar_module(inputs).to_dense() + noise
                cholesky(matrix.detach(), of="K_xx + σ²I", hint="Raise `model.noise`.")
                raise
