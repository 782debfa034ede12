"""Prediction from a mean-field Gaussian over the weights of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.methods.pvi.network.mathematics import Network
from fedgp_flower.methods.pvi.weights.posterior import q_of
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.run.artefacts import Posterior

PREDICTION_SEED = 22
"""Draws of a prediction are always the same: it is a function of the posterior alone."""


@dataclass(frozen=True, slots=True)
class NetworkPosterior:
    """q(θ) of a network."""

    network: Network
    q: DiagonalGaussian
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


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NetworkPosterior:
    """The posterior of a finished run."""
    network = Network(len(names), int(saved.model["hidden"]), int(saved.model["classes"]))
    q, draws = cast(DiagonalGaussian, q_of(saved)), int(saved.model["draws"])
    return NetworkPosterior(network, q, draws, saved.likelihood == "bernoulli")
