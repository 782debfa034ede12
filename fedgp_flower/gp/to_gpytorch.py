"""Posteriors as GPyTorch models: transforms to original units, and moments of mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from jaxtyping import Float
from linear_operator import to_linear_operator
from torch import Tensor

from fedgp_flower.typing import Array, NamedArrays


@dataclass(frozen=True, slots=True)
class Transforms:
    """Transforms between original and standardised units."""

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

    model: GP
    likelihood: Likelihood
    transforms: Transforms

    def __iter__(self) -> Iterator[GP | Likelihood]:
        yield from (self.model, self.likelihood)


def evenly(parts: Sequence[MultivariateNormal]) -> MultivariateNormal:
    """The Gaussian with the mean and covariance of an equally weighted mixture."""
    if len(parts) == 1:
        return parts[0]
    means, within = torch.stack([part.mean for part in parts]), parts[0].covariance_matrix
    for part in parts[1:]:  # one covariance at a time, to save memory
        within = within + part.covariance_matrix
    centred = means - means.mean(0)
    covariance = (within + centred.mT @ centred) / len(parts)
    return MultivariateNormal(means.mean(0), to_linear_operator(covariance))  # lazy, as it may be singular
