"""A sparse GP with q(v) of whitened inducing values v = L⁻¹u, L Lᵀ = K_zz + jitter, as a model of GPyTorch.

>>> from gpytorch.kernels import RBFKernel
>>> model = WhitenedGP(RBFKernel().double(), torch.arange(3.0, dtype=torch.float64)[:, None], 1e-8)
>>> model(model.inducing_points).variance.round(decimals=6).tolist()  # q(v) = N(0, I) is the prior
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from jaxtyping import Float
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import MatmulLinearOperator
from torch import Tensor

from fedgp_flower.gp.kernels import prior_variance
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.typing import Rows, Square, Vector

G = TypeVar("G", bound="WhitenedGP")


@dataclass(frozen=True, slots=True)
class WhitenedPosterior:
    """q(v) = N(mean, covariance) of whitened inducing values v = L⁻¹u."""

    mean: Vector  # [M]
    covariance: Square  # [M, M]


def whitened(
    kzz: Float[Tensor, "*S M M"], kzx: Float[Tensor, "*S M N"], *, variance: Tensor, jitter: float, of: str = "K_zz"
) -> Float[Tensor, "*S M N"]:
    """W = L⁻¹ K_zx, L Lᵀ = K_zz + jitter · variance · I: the weights f(x) has on v ~ N(0, I)."""
    factor = kernel_cholesky(kzz, variance=variance, jitter=jitter, of=of)
    return torch.linalg.solve_triangular(factor, kzx, upper=False)


def whitened_projection(
    kernel: Kernel, inducing: Float[Tensor, "*S M D"], inputs: Float[Tensor, "*S N D"], *, jitter: float
) -> Float[Tensor, "*S M N"]:
    """:func:`whitened` of a kernel, its jitter relative to the mean prior variance at Z."""
    kzz, kzx = kernel(inducing).to_dense(), kernel(inducing, inputs).to_dense()
    return whitened(kzz, kzx, variance=prior_variance(kernel, inducing), jitter=jitter)


class WhitenedGP(ApproximateGP):
    """A zero-mean GP with inducing points; ``model(x)`` is f under the q(v) it holds, at first N(0, I).

    Args:
        kernel: At the model's hyperparameters.
        inducing_points: Z [M, D].
        jitter: Relative jitter of K_zz.
    """

    def __init__(self, kernel: Kernel, inducing_points: Rows, jitter: float) -> None:
        super(ApproximateGP, self).__init__()  # the strategy is built where it is asked for: it takes time
        self.covar_module = kernel
        self.inducing_points = torch.nn.Parameter(inducing_points.double().clone())
        self.requested_jitter = jitter
        self.posterior: WhitenedPosterior | None = None

    @property
    def jitter(self) -> float:
        """Relative jitter of K_zz."""
        return self.requested_jitter

    def hold(self: G, posterior: WhitenedPosterior) -> G:
        """Predict by this q(v)."""
        self.posterior = posterior
        self._modules.pop("strategy", None)
        return self.eval()

    @property
    def variational_strategy(self) -> VariationalStrategy:
        """The strategy with the q(v) that the model holds."""
        if "strategy" not in self._modules:
            self.add_module("strategy", _RelativeJitter(self, self.posterior))
        return self.get_submodule("strategy")

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(inputs.new_zeros(inputs.shape[:-1]), self.covar_module(inputs))

    def project(self, inducing_points: Tensor, inputs: Tensor) -> Tensor:
        """The weights W [*B, M, N] of f(x) on v."""
        return whitened_projection(self.covar_module, inducing_points, inputs, jitter=self.jitter)


class _RelativeJitter(VariationalStrategy):
    """Whitening by L of K_zz + jitter · variance · I; GPyTorch adds an absolute jitter, also to what it predicts."""

    model: WhitenedGP

    def __init__(self, model: WhitenedGP, posterior: WhitenedPosterior | None) -> None:
        points = model.inducing_points
        size = points.shape[0] if posterior is None else len(posterior.mean)
        q = CholeskyVariationalDistribution(size, mean_init_std=0).to(points)
        if posterior is not None:
            q.variational_mean.data.copy_(posterior.mean)
            q.chol_variational_covar.data.copy_(cholesky(posterior.covariance, of="covariance of q(v)"))
        super().__init__(model, points.detach(), q)
        self.inducing_points = points  # the same parameter
        self.variational_params_initialized.fill_(1)
        self.requires_grad_(points.requires_grad)
        self.train(model.training)

    def forward(
        self,
        x: Tensor,
        inducing_points: Tensor,
        inducing_values: Tensor,
        variational_inducing_covar: LinearOperator | None = None,
        diag: bool = True,
        **kwargs: Any,
    ) -> MultivariateNormal:
        """Moments Wᵀm and K_xx + Wᵀ(S − I)W."""
        del diag
        prior = self.model.forward(x, **kwargs)
        cross = self.model.project(inducing_points, x)
        covariance = prior.lazy_covariance_matrix
        if variational_inducing_covar is not None:
            excess = variational_inducing_covar.to_dense() - torch.eye(cross.shape[-2]).to(cross)
            covariance = covariance + to_linear_operator(MatmulLinearOperator(cross.mT, excess @ cross))
        return MultivariateNormal(prior.mean + cross.mT @ inducing_values, covariance)
