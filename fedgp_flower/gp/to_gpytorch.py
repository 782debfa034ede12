"""Posteriors as models of GPyTorch: the transforms to original units, and several draws as one model.

Models are in evaluation mode and in standardised coordinates, so that ``likelihood(model(x))`` is the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from gpytorch import Module
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import VariationalStrategy
from jaxtyping import Float
from linear_operator import to_linear_operator
from torch import Tensor

from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods import gaussian_likelihood
from fedgp_flower.gp.whitened import WhitenedGP
from fedgp_flower.typing import Array, NamedArrays


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

    def __init__(self, components: Sequence[WhitenedGP]) -> None:
        super().__init__(_EvenMixture(components))
        self.eval()

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """The prior."""
        return self(inputs, prior=True)


class _EvenMixture(VariationalStrategy):
    """Strategies of all components; what a single one has is batched over them."""

    def __init__(self, components: Sequence[WhitenedGP]) -> None:
        Module.__init__(self)  # as strategies do that stand on others; inducing points and q(v) are the components'
        self.components = torch.nn.ModuleList(components)

    @property
    def parts(self) -> list[WhitenedGP]:
        """The components, S of them."""
        return cast(list[WhitenedGP], list(self.components))

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


def mixture(draws: Sequence[tuple[WhitenedGP, Likelihood]]) -> WhitenedGP | MixturePosterior:
    """The model of f over all draws; that of a single draw itself."""
    return draws[0][0] if len(draws) == 1 else MixturePosterior([model for model, _ in draws])


def together(draws: Sequence[tuple[WhitenedGP, Likelihood]]) -> tuple[ApproximateGP, Likelihood]:
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
