"""The network that makes features, and how a target is observed: all that federated averaging averages."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedgp_flower.errors import DataError, ProtocolError
from fedgp_flower.methods.deep_kernel.mathematics import SiteSums
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import NamedArrays, Rows, Targets

PREDICTION_SEED, PREDICTION_DRAWS = 24, 200
"""Draws of a prediction are always the same: it is a function of the posterior alone."""
HIDDEN = 50
"""Units of the first dense layer."""
CONCENTRATION = 0.01
"""α of a class that a row is not of: a small value trusts labels (Milios et al. 2018)."""


def dense(inputs: int, options: DeepKernelOptions) -> nn.Sequential:
    """Two rectified layers."""
    first, second = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, options.features)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


def convolutional(inputs: int, options: DeepKernelOptions) -> nn.Sequential:
    """For square images row by row: twice 3 × 3 filters at every second pixel, then a layer, all rectified.

    Raises:
        DataError: the inputs are no square.
    """
    side, channels = math.isqrt(inputs), (8, 16)
    if side**2 != inputs or not inputs:
        raise DataError(f"`deep.network` = 'convolutional' needs square images; a row has {inputs} inputs")
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for before, after in zip((1, *channels[:-1]), channels, strict=True):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        side = (side + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side**2, options.features), nn.ReLU())


NETWORKS: Mapping[str, Callable[[int, DeepKernelOptions], nn.Sequential]] = {
    "dense": dense,
    "convolutional": convolutional,
}
"""By ``deep.network``."""


class Observed(nn.Module):
    """How a target is observed."""

    @abstractmethod
    def values(self, targets: Targets) -> tuple[Float[Tensor, "C N"], Float[Tensor, "C N"]]:
        """Values of f and the variances of their noise."""

    @abstractmethod
    def predict(self, mean: Float[Tensor, "C N"], variance: Float[Tensor, "C N"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation [N], or of indicators of classes [N, C], where f has these."""


class Numbers(Observed):
    """The standardised target with Gaussian noise, whose variance is learned."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.log_noise = nn.Parameter(torch.tensor([math.log(noise)]))

    def values(self, targets: Targets) -> tuple[Tensor, Tensor]:
        """As they are."""
        return targets[None], self.log_noise.exp().expand(1, len(targets))

    def predict(self, mean: Float[Tensor, "1 N"], variance: Float[Tensor, "1 N"]) -> tuple[Tensor, Tensor]:
        """With noise."""
        return mean[0], variance[0] + self.log_noise.exp()


class Classes(Observed):
    """Classes 0 … C−1 as values of C functions (Milios et al., Dirichlet-based Gaussian processes, 2018).

    With α_nc = α + 1[y_n = c], s²_nc = log(1/α_nc + 1) is the variance of the noise of a value log α_nc − s²_nc/2, and
    P(y = c) = E softmax(f)_c; of two classes by name that of the second one.
    """

    noise: Tensor

    def __init__(self, classes: int, *, binary: bool, draws: int = PREDICTION_DRAWS) -> None:
        super().__init__()
        self.classes, self.binary = classes, binary
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        drawn = torch.randn(draws, classes, 1, generator=generator, dtype=torch.float64)
        self.register_buffer("noise", drawn, persistent=False)

    def values(self, targets: Targets) -> tuple[Tensor, Tensor]:
        """Of all classes.

        Raises:
            DataError: a target is not the number of a class.
        """
        if not torch.isin(targets, torch.arange(self.classes)).all():
            raise DataError(f"targets must be whole numbers below `deep.classes` = {self.classes}")
        alpha = CONCENTRATION + nn.functional.one_hot(targets.long(), self.classes).double().mT
        variance = torch.log1p(1 / alpha)
        return alpha.log() - variance / 2, variance

    def predict(self, mean: Float[Tensor, "C N"], variance: Float[Tensor, "C N"]) -> tuple[Tensor, Tensor]:
        """The mean over draws."""
        every = (mean + variance.sqrt() * self.noise).softmax(1).mean(0).mT
        probability = every[:, 1] if self.binary else every
        return probability, probability * (1 - probability)


class DeepKernel(nn.Module):
    """φ(x) = (1, network(x)), and how targets are observed."""

    def __init__(self, options: DeepKernelOptions, section: ModelSection, inputs: int, seed: int = 0) -> None:
        super().__init__()
        binary = section.likelihood == "bernoulli"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = NETWORKS[options.network](inputs, options)
        classes = 2 if binary else options.classes
        self.observed: Observed = Classes(classes, binary=binary) if classes else Numbers(section.noise)
        self.double()

    def features(self, inputs: Rows) -> Float[Tensor, "N F"]:
        """The vectors φ(x)."""
        return torch.cat([inputs.new_ones(len(inputs), 1), self.network(inputs)], 1)

    def sums(self, inputs: Rows, targets: Targets) -> SiteSums:
        """What heads need to know of rows."""
        return SiteSums.of(self.features(inputs), *self.observed.values(targets))

    def to_arrays(self) -> NamedArrays:
        """Weights under their names."""
        return {name: own.detach().numpy().copy() for name, own in self.named_parameters()}

    def load(self, values: Mapping[str, np.ndarray]) -> DeepKernel:
        """This model with other weights.

        Raises:
            ProtocolError: names or shapes are not those of this model.
        """
        own = dict(self.named_parameters())
        expected, got = ({n: tuple(v.shape) for n, v in these.items()} for these in (own, values))
        if expected != got:
            raise ProtocolError(f"weights: expected {expected}, got {got}. Is `deep.*` the same everywhere?")
        for name, parameter in own.items():
            parameter.data.copy_(torch.from_numpy(values[name]))
        return self
