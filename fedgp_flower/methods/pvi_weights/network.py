"""A classifier with one rectified hidden layer and a mean-field Gaussian over all its weights.

θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, and

    P(y = c | x, θ) ∝ exp(W₂ (relu(W₁ (x, 1)), 1))_c.

Given a row, sums of independent Gaussian weights are Gaussian: what is drawn are the H + C sums of each row, not the
weights (Kingma, Salimans & Welling 2015). That is exact for one row, and its gradient has far less noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import DataError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.optimisers import AdamSettings, Trace, adam
from fedgp_flower.methods.pvi.model import Data
from fedgp_flower.methods.pvi.updates import TrainableLatent, late_mean
from fedgp_flower.methods.pvi_weights.glm import q_of
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior

STEPS, LEARNING_RATE = 300, 0.01
"""Of Adam in a visit, where ``pvi.steps`` and ``pvi.learning-rate`` are 0; most visits stop earlier."""
BATCH_SIZE = 128
"""Rows of a step."""
START_SCALE = 0.05
"""Standard deviation of a weight that a visit starts from, at most: a tight start lets it stop early."""
PREDICTION_DRAWS = 30
PREDICTION_SEED = 22
"""Draws of a prediction are always the same: it is a function of the posterior alone."""


@dataclass(frozen=True, slots=True)
class WeightSpaceNetwork:
    """The lengths D, H and C."""

    inputs: int
    hidden: int
    classes: int

    def layers(self, theta: Float[Tensor, " P"]) -> tuple[Float[Tensor, "H D1"], Float[Tensor, "C H1"]]:
        """W₁ and W₂."""
        first = self.hidden * (self.inputs + 1)
        return theta[:first].view(self.hidden, -1), theta[first:].view(self.classes, -1)

    def initial(self, generator: Generator) -> Float[Tensor, " P"]:
        """A random mean, which breaks the symmetry of hidden units: all sites draw the same."""
        sizes = ((self.hidden, self.inputs), (self.classes, self.hidden))
        parts = []
        for rows, columns in sizes:
            weights = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * (2 / columns) ** 0.5
            parts.append(torch.cat([weights, weights.new_zeros(rows, 1)], 1).flatten())
        return torch.cat(parts)

    def logits(self, x: Float[Tensor, "N D"], q: Gaussian, generator: Generator) -> Float[Tensor, "N C"]:
        """One draw for each row."""
        (m1, m2), (v1, v2) = map(self.layers, q.moments())
        hidden = torch.relu(_sums(x, m1, v1, generator))
        return _sums(hidden, m2, v2, generator)

    def log_likelihood(self, rows: Data, q: Gaussian, generator: Generator) -> Tensor:
        """Σ log P(y_n), with one draw for each row."""
        logits = self.logits(rows.inputs, q, generator)
        return logits.log_softmax(-1).gather(1, rows.targets.long()[:, None]).sum()


def _sums(x: Tensor, mean: Tensor, variance: Tensor, generator: Generator) -> Tensor:
    """A draw of W (x, 1) for each row, W ~ N(mean, variance)."""
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    centre, spread = x @ mean.mT, (x.square() @ variance.mT).sqrt()
    return centre + spread * torch.randn(centre.shape, generator=generator, dtype=x.dtype)


def class_rows(inputs: Array, targets: Array, classes: int) -> Data:
    """A site's rows, the target the number of a class."""
    if not np.isin(targets, np.arange(classes)).all():
        raise DataError(f"targets must be whole numbers below `bnn.classes` = {classes}")
    return Data(torch.from_numpy(inputs), torch.from_numpy(targets))


@dataclass(frozen=True, slots=True)
class VisitSettings(AdamSettings):
    """A visit ends where windows of the expected log likelihood, not of the free energy, rise no more."""

    fits: list[float] = field(default_factory=list)

    def flat(self, values: Sequence[float], num_rows: int) -> bool:
        """As in the base, of what was recorded."""
        return AdamSettings.flat(self, self.fits, num_rows)


def refined(
    network: WeightSpaceNetwork,
    rows: Data,
    context: Gaussian,
    start: Gaussian,
    settings: VisitSettings,
    generator: Generator,
) -> tuple[Gaussian, float, Trace]:
    """Maximise E_q log p(y | θ) − KL(q ‖ context) by Adam over means and precisions that exceed the context's.

    Returns q, the mean objective over the last tenth of the steps in nats, and what Adam did.
    """
    latent, count = TrainableLatent(context, *start.moments()), len(rows)
    size = min(BATCH_SIZE, count)

    def objective() -> Tensor:
        q, batch = latent.density(), rows
        if size < count:
            chosen = torch.randperm(count, generator=generator)[:size]
            batch = Data(rows.inputs[chosen], rows.targets[chosen])
        fit = network.log_likelihood(batch, q, generator) * (count / size)
        settings.fits.append(float(fit.detach()))
        return fit - q.kl(context)

    trace = adam(objective, latent.parameters, settings, count)
    with torch.no_grad():
        return latent.density(), late_mean(trace), trace


# ---- Prediction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NetworkPosterior:
    """q(θ) of a network."""

    network: WeightSpaceNetwork
    q: Gaussian
    draws: int
    binary: bool

    def probabilities(self, inputs: Array) -> Array:
        """The mean over draws of P(y = c | x, θ) [N, C]; of two classes the second's, [N]."""
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        x = torch.from_numpy(inputs)
        each = [self.network.logits(x, self.q, generator).softmax(-1) for _ in range(self.draws)]
        found = torch.stack(each).mean(0).numpy()
        return found[:, 1] if self.binary else found

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the indicators of classes."""
        mean = self.probabilities(inputs)
        return mean, np.sqrt(mean * (1 - mean))


def saved_network(saved: Posterior, names: tuple[str, ...]) -> NetworkPosterior:
    """The posterior of a finished run."""
    network = WeightSpaceNetwork(len(names), int(saved.model["hidden"]), int(saved.model["classes"]))
    return NetworkPosterior(network, q_of(saved), int(saved.model["draws"]), saved.likelihood == "bernoulli")
