"""A sparse posterior as GPyTorch's own: ``ApproximateGP`` with ``VariationalStrategy``, and a likelihood.

Both are in evaluation mode and in standardised coordinates, so that ``likelihood(model(x))`` is our prediction;
:class:`Transforms` leads to original units. A posterior over inducing points and hyperparameters is one such pair for
each draw of them, and :func:`together` a single one with the same mean and covariance.

    >>> from gpytorch.kernels import RBFKernel
    >>> eye, points = torch.eye(3, dtype=torch.float64), torch.arange(3.0, dtype=torch.float64)[:, None]
    >>> model = SparsePosterior(RBFKernel().double(), points, WhitenedPosterior(torch.zeros_like(eye[0]), eye), 1e-8)
    >>> model(points).variance.round(decimals=6).tolist()  # q(v) = N(0, I) is the prior
    [1.0, 1.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from gpytorch import Module
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ZeroMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from jaxtyping import Float
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import MatmulLinearOperator
from torch import Tensor

from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods import gaussian_likelihood
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.gp.projections import whitened_projection
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.gp.sums import WhitenedPosterior
from fedgp_flower.typing import Array, NamedArrays, Rows


class SparsePosterior(ApproximateGP):
    """A zero-mean sparse GP with q(v) = N(m, S) of whitened inducing values v, in evaluation mode.

    Args:
        kernel: At the posterior's hyperparameters.
        inducing_points: Z [M, D].
        posterior: q(v), of the values at Z and whatever else :meth:`project` whitens.
        jitter: Relative jitter of K_zz.
    """

    def __init__(self, kernel: Kernel, inducing_points: Rows, posterior: WhitenedPosterior, jitter: float) -> None:
        q = CholeskyVariationalDistribution(len(posterior.mean), mean_init_std=0).double()
        q.variational_mean.data.copy_(posterior.mean)
        q.chol_variational_covar.data.copy_(cholesky(posterior.covariance, of="covariance of q(v)"))
        super().__init__(_OurWhitening(self, inducing_points, q, learn_inducing_locations=False))
        self.variational_strategy.variational_params_initialized.fill_(1)
        self.mean_module, self.covar_module, self.jitter = ZeroMean(), kernel, jitter
        self.requires_grad_(False)
        self.eval()

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    def project(self, inducing_points: Tensor, inputs: Tensor) -> Tensor:
        """The weights W [*B, M, N] of f(x) on v."""
        return whitened_projection(self.covar_module, inducing_points, inputs, jitter=self.jitter)


class _OurWhitening(VariationalStrategy):
    """Whitening by L of K_zz + jitter · variance · I; GPyTorch adds an absolute jitter, also to what it predicts."""

    model: SparsePosterior

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


@dataclass(frozen=True, slots=True)
class Transforms:
    """Between original units and the standardised ones of a model."""

    input_mean: Array  # [D]
    input_scale: Array  # [D]
    target_mean: float
    target_scale: float

    @staticmethod
    def of(arrays: NamedArrays) -> Transforms:
        """From ``input.mean``, ``input.scale``, ``target.mean`` and ``target.scale`` of a saved posterior."""
        mean, scale = (np.array(arrays[f"input.{part}"], dtype=np.float64) for part in ("mean", "scale"))
        return Transforms(mean, scale, float(arrays["target.mean"]), float(arrays["target.scale"]))

    def inputs(self, original: Float[Tensor, "*B N D"]) -> Float[Tensor, "*B N D"]:
        """Standardised inputs, differentiable."""
        mean, scale = (torch.from_numpy(part).to(original) for part in (self.input_mean, self.input_scale))
        return (original - mean) / scale

    def original(self, standardised: MultivariateNormal) -> MultivariateNormal:
        """A distribution of the target in original units."""
        covariance = standardised.lazy_covariance_matrix * self.target_scale**2
        return MultivariateNormal(standardised.mean * self.target_scale + self.target_mean, covariance)


@dataclass(frozen=True, slots=True)
class Exported:
    """``model, likelihood = exported``; both take inputs in standardised coordinates."""

    model: ApproximateGP
    likelihood: Likelihood
    transforms: Transforms

    def __iter__(self) -> Iterator[ApproximateGP | Likelihood]:
        yield from (self.model, self.likelihood)


class MixturePosterior(ApproximateGP):
    """The Gaussian process that has the mean and covariance functions of an even mixture of others."""

    def __init__(self, components: Sequence[SparsePosterior]) -> None:
        super().__init__(_EvenMixture(components))
        self.eval()

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """The prior."""
        return self(inputs, prior=True)


class _EvenMixture(VariationalStrategy):
    """Strategies of all components; what a single one has is batched over them."""

    def __init__(self, components: Sequence[SparsePosterior]) -> None:
        Module.__init__(self)  # as strategies do that stand on others; inducing points and q(v) are the components'
        self.components = torch.nn.ModuleList(components)

    @property
    def parts(self) -> list[SparsePosterior]:
        """The components, S of them."""
        return cast(list[SparsePosterior], list(self.components))

    @property
    def inducing_points(self) -> Tensor:
        """Z [S, M, D]."""
        return torch.stack([part.variational_strategy.inducing_points for part in self.parts])

    @property
    def prior_distribution(self) -> MultivariateNormal:
        """p(v) [S, M]."""
        mean = self.variational_distribution.mean
        return MultivariateNormal(torch.zeros_like(mean), torch.eye(mean.shape[-1]).to(mean).expand(len(mean), -1, -1))

    @property
    def variational_distribution(self) -> MultivariateNormal:
        """q(v) [S, M]."""
        each = [part.variational_strategy.variational_distribution for part in self.parts]
        covariance = torch.stack([q.covariance_matrix for q in each])
        return MultivariateNormal(torch.stack([q.mean for q in each]), covariance)

    def __call__(self, x: Tensor, prior: bool = False, diag: bool = True, **kwargs: Any) -> MultivariateNormal:
        """Mean of means; mean of covariances plus covariance of means."""
        del diag
        first, *others = (part(x, prior=prior, **kwargs) for part in self.parts)
        means, within = [first.mean], first.covariance_matrix
        for part in others:  # one covariance at a time, because there may be a hundred
            means.append(part.mean)
            within = within + part.covariance_matrix
        mean = torch.stack(means).mean(0)
        apart = torch.stack(means, -1) - mean[..., None]
        covariance = (within + apart @ apart.mT) / len(means)
        return MultivariateNormal(mean, to_linear_operator(covariance))  # may be singular: not to be factorised yet


def mixture(draws: Sequence[tuple[SparsePosterior, Likelihood]]) -> SparsePosterior | MixturePosterior:
    """The model of f over all draws; that of a single draw itself."""
    return draws[0][0] if len(draws) == 1 else MixturePosterior([model for model, _ in draws])


def together(draws: Sequence[tuple[SparsePosterior, Likelihood]]) -> tuple[ApproximateGP, Likelihood]:
    """One model and likelihood whose observations have the mean and variance of the mixture over draws.

    Raises:
        RunError: of several draws with other than Gaussian noise, there are none.
    """
    if len(draws) == 1:
        return draws[0]
    noises = [likelihood.noise for _, likelihood in draws if isinstance(likelihood, GaussianLikelihood)]
    if len(noises) < len(draws):
        raise RunError(
            f"no single model of GPyTorch predicts what {len(draws)} draws with"
            f" {type(draws[0][1]).__name__} predict; expected Gaussian noise, or one draw. Use `to_gpytorch_draws()`"
        )
    return mixture(draws), gaussian_likelihood(float(torch.stack(noises).mean())).requires_grad_(False).eval()


def export(sparse: SparseGP, posterior: WhitenedPosterior) -> tuple[SparsePosterior, Likelihood]:
    """The model and likelihood of a sparse GP with Gaussian noise and its q(v)."""
    kernel, points = deepcopy(sparse.kernel), sparse.inducing_points.detach()
    model = SparsePosterior(kernel, points, posterior, sparse.jitter)
    return model, deepcopy(sparse.likelihood).requires_grad_(False).eval()
