"""Prediction from a Gaussian over the weights of a generalised linear model or a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.methods.pvi_weights.glm import glm_rows
from fedgp_flower.methods.pvi_weights.network import WeightSpaceNetwork
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior


@dataclass(frozen=True, slots=True)
class LinearPosterior:
    """q(θ) of a generalised linear model."""

    section: ModelSection
    q: Gaussian

    def latent(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of f = θ₀ + θᵀx [N] at standardised inputs [N, D]."""
        mean, variance = glm_rows(self.section, inputs, np.zeros(len(inputs))).marginals(self.q)
        return mean.numpy(), variance.numpy()

    def observation(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of an observation [N]."""
        return observed(self.section, *self.latent(inputs))

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an observation [N]."""
        mean, variance = self.observation(inputs)
        return mean, np.sqrt(variance)


def observed(section: ModelSection, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Mean and variance of observations where f ~ N(mean, variance), each [N]."""
    likelihood = canonical_likelihood(section.likelihood, section.noise)
    centre, spread = likelihood.moments(torch.from_numpy(mean), torch.from_numpy(variance), likelihood.initial)
    return centre.numpy(), spread.numpy()


def saved_model(saved: Posterior, names: tuple[str, ...]) -> LinearPosterior:
    """The posterior of a finished run."""
    del names
    section = ModelSection.model_validate({key: saved.model[key] for key in ("likelihood", "noise")})
    return LinearPosterior(section, q_of(saved))


def q_of(saved: Posterior) -> Gaussian:
    """q(θ) of a saved posterior."""
    mean = torch.from_numpy(np.array(saved.arrays["weights.mean"]))
    spread = torch.from_numpy(np.array(saved.arrays["weights.covariance"]))
    return (NaturalGaussian if spread.ndim == 2 else DiagonalGaussian).from_moments(mean, spread)


def deviations(q: Gaussian) -> Array:
    """Standard deviation of every weight."""
    spread = q.moments()[1]
    return (spread.diagonal() if spread.ndim == 2 else spread).sqrt().numpy()


# ---- Networks ------------------------------------------------------------------------------------------------------

PREDICTION_SEED = 22
"""Draws of a prediction are always the same: it is a function of the posterior alone."""


@dataclass(frozen=True, slots=True)
class NetworkPosterior:
    """q(θ) of a network."""

    network: WeightSpaceNetwork
    q: Gaussian
    draws: int
    binary: bool

    def probabilities(self, inputs: Array) -> Array:
        """Of the classes [N, C]; of two classes the second's, [N]."""
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        found = self.network.probabilities(torch.from_numpy(inputs), self.q, self.draws, generator).numpy()
        return found[:, 1] if self.binary else found

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the indicators of classes."""
        mean = self.probabilities(inputs)
        return mean, np.sqrt(mean * (1 - mean))


def saved_network(saved: Posterior, names: tuple[str, ...]) -> NetworkPosterior:
    """The posterior of a finished run."""
    network = WeightSpaceNetwork(len(names), int(saved.model["hidden"]), int(saved.model["classes"]))
    return NetworkPosterior(network, q_of(saved), int(saved.model["draws"]), saved.likelihood == "bernoulli")
