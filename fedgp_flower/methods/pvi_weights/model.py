"""Models whose weights PVI infers: generalised linear models, and networks with one hidden layer.

Of a generalised linear model Newton's method finds the optimum of the local free energy, without draws. With f = Φθ,
q(θ) Gaussian, and α, β and the factor of the rows as in :mod:`fedgp_flower.methods.pvi.updates`,

    ∇_m F = Φᵀα + η₁ᶜ − Λᶜ m,   −∇²_m F = H = Φᵀ diag(β) Φ + Λᶜ,   Λ = H, or its diagonal, at the optimum,

where (η₁ᶜ, Λᶜ) are the natural parameters of the context. F is concave in the mean and a root of the covariance where
log p is concave in f (Challis & Barber 2013), so that the optimum is the only one.

A network is a classifier with one rectified hidden layer and a mean-field Gaussian over all its weights.
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

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.gp.optimisers import AdamSettings, Trace, adam
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.model import Data
from fedgp_flower.methods.pvi.updates import LinearRows, TrainableLatent, late_mean
from fedgp_flower.methods.pvi_weights.options import WeightsOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior

NEWTON_STEPS = 100
"""Newton steps at most: a handful reach the tolerance."""
TOLERANCE = 1e-10
"""Of the Newton decrement in nats and of the relative change of Λ, at which the optimum is reached."""
SLACK = 1e-9
"""Nats, relative to the free energy, by which rounding may lower it."""
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
class NewtonStep:
    """A local free energy at a q, and the Newton step from there."""

    q: Gaussian
    free_energy: float
    """F(q) = E_q log p(y | θ) − KL(q ‖ context)."""
    factor: Gaussian
    """Of the rows at q."""
    move: Tensor
    """H⁻¹∇_m F."""
    precision: Tensor
    """Where Λ goes: H, or its diagonal."""
    decrement: float

    @classmethod
    def at(cls, rows: LinearRows, q: Gaussian, context: Gaussian) -> NewtonStep:
        """The step from q."""
        fit, factor, curvature = rows.expansion(q)
        target, mean = context * factor, q.mean()
        precision = target.precision
        full = precision.ndim == 2
        gradient = target.eta1 - (precision @ mean if full else precision * mean)
        information = precision if full else curvature.diagonal_scatter(precision)
        L = cholesky(information, of="information of the weights", hint="Are inputs on very different scales?")
        move = torch.cholesky_solve(gradient[:, None], L)[:, 0]
        change = float((precision - q.precision).abs().max() / precision.max())
        decrement = max(float(gradient @ move), change)
        return cls(q, float(fit - q.kl(context)), factor, move, precision, decrement)

    def taken(self, length: float) -> Gaussian:
        """Some way along the step."""
        precision = self.q.precision + length * (self.precision - self.q.precision)
        mean = self.q.mean() + length * self.move
        return type(self.q)(precision @ mean if precision.ndim == 2 else precision * mean, -0.5 * precision)


def glm_rows(section: ModelSection, inputs: Array, targets: Array) -> LinearRows:
    """Rows with a constant, Φ = (1, X) [N, 1 + D], which lie column by column: products ΦᵀΦ are faster so."""
    likelihood = canonical_likelihood(section.likelihood, section.noise)
    design = torch.cat([torch.ones(1, len(inputs), dtype=torch.float64), torch.from_numpy(inputs).mT]).mT
    return LinearRows(design, torch.from_numpy(targets), likelihood, likelihood.initial)


def optimum(rows: LinearRows, q: Gaussian, context: Gaussian) -> tuple[NewtonStep, int]:
    """The maximum of the local free energy, by Newton steps that never lower it, and their number."""
    here, length, steps = NewtonStep.at(rows, q, context), 1.0, 0
    while steps < NEWTON_STEPS and here.decrement > TOLERANCE:
        there = NewtonStep.at(rows, here.taken(length), context)
        if there.free_energy >= here.free_energy - SLACK * abs(here.free_energy):
            here, length, steps = there, min(1.0, 2.0 * length), steps + 1
            continue
        length *= 0.5
        if length < 1e-10:
            raise NumericsError("no Newton step raises the local free energy; are the inputs finite and standardised?")
    return here, steps


def prior_of(options: WeightsOptions, num_inputs: int) -> NaturalParameters:
    """N(0, I) of the weights, the intercept's too, in the form of q: inputs are standardised."""
    return NaturalParameters.standard(options.num_weights(num_inputs), full=options.full)


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
        likelihood = canonical_likelihood(self.section.likelihood, self.section.noise)
        mean, variance = map(torch.from_numpy, self.latent(inputs))
        centre, spread = likelihood.moments(mean, variance, likelihood.initial)
        return centre.numpy(), spread.numpy()

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an observation [N]."""
        mean, variance = self.observation(inputs)
        return mean, np.sqrt(variance)


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


# ---- Networks -------------------------------------------------------------------------------------------------------


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
        parts = []
        for rows, columns in ((self.hidden, self.inputs), (self.classes, self.hidden)):
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
    """The q at which Adam ends on E_q log p(y | θ) − KL(q ‖ context), the late mean of that in nats, and the trace."""
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
