"""A classifier with one rectified hidden layer and a mean-field Gaussian over all its weights.

θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, and

    P(y = c | x, θ) ∝ exp(W₂ (relu(W₁ (x, 1)), 1))_c.

Given a row, sums of independent Gaussian weights are Gaussian: what is drawn are the H + C sums of each row, not the
weights (Kingma, Salimans & Welling 2015). That is exact for one row, and its gradient has far less noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import DataError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.optimisers import AdamSettings, Trace, adam
from fedgp_flower.methods.pvi.updates import TrainableLatent, late_mean

STEPS, LEARNING_RATE = 300, 0.01
"""Of Adam in a visit, where ``pvi.steps`` and ``pvi.learning-rate`` are 0; most visits stop earlier."""
BATCH_SIZE = 128
"""Rows of a step."""
START_SCALE = 0.05
"""Standard deviation of a weight that a visit starts from, at most: a tight start lets it stop early."""
PREDICTION_DRAWS = 30


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

    def log_likelihood(self, rows: ClassRows, q: Gaussian, generator: Generator) -> Tensor:
        """Σ log P(y_n), with one draw for each row."""
        logits = self.logits(rows.x, q, generator)
        return logits.log_softmax(-1).gather(1, rows.y.long()[:, None]).sum()

    def probabilities(
        self, x: Float[Tensor, "N D"], q: Gaussian, draws: int, generator: Generator
    ) -> Float[Tensor, "N C"]:
        """The mean over draws of P(y = c | x, θ)."""
        return torch.stack([self.logits(x, q, generator).softmax(-1) for _ in range(draws)]).mean(0)


def _sums(x: Tensor, mean: Tensor, variance: Tensor, generator: Generator) -> Tensor:
    """A draw of W (x, 1) for each row, W ~ N(mean, variance)."""
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    centre, spread = x @ mean.mT, (x.square() @ variance.mT).sqrt()
    return centre + spread * torch.randn(centre.shape, generator=generator, dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class ClassRows:
    """A site's rows."""

    x: Float[Tensor, "N D"]
    y: Float[Tensor, " N"]

    def checked(self, classes: int) -> ClassRows:
        """These rows.

        Raises:
            DataError: a target is not the number of a class.
        """
        if not torch.isin(self.y, torch.arange(classes)).all():
            raise DataError(f"targets must be whole numbers below `bnn.classes` = {classes}")
        return self


@dataclass(frozen=True, slots=True)
class VisitSettings(AdamSettings):
    """A visit ends where windows of the expected log likelihood, not of the free energy, rise no more."""

    fits: list[float] = field(default_factory=list)

    def flat(self, values: Sequence[float], num_rows: int) -> bool:
        """As in the base, of what was recorded."""
        return AdamSettings.flat(self, self.fits, num_rows)


def refined(
    network: WeightSpaceNetwork,
    rows: ClassRows,
    context: Gaussian,
    start: Gaussian,
    settings: VisitSettings,
    generator: Generator,
) -> tuple[Gaussian, float, Trace]:
    """Maximise E_q log p(y | θ) − KL(q ‖ context) by Adam over means and precisions that exceed the context's.

    Returns q, the mean objective over the last tenth of the steps in nats, and what Adam did.
    """
    latent, count = TrainableLatent(context, *start.moments()), len(rows.y)
    size = min(BATCH_SIZE, count)

    def objective() -> Tensor:
        q, batch = latent.density(), rows
        if size < count:
            chosen = torch.randperm(count, generator=generator)[:size]
            batch = ClassRows(rows.x[chosen], rows.y[chosen])
        fit = network.log_likelihood(batch, q, generator) * (count / size)
        settings.fits.append(float(fit.detach()))
        return fit - q.kl(context)

    trace = adam(objective, latent.parameters, settings, count)
    with torch.no_grad():
        return latent.density(), late_mean(trace), trace
