"""Models whose weights PVI infers: generalised linear models, and networks with one hidden layer.

For a generalised linear model Newton's method maximises the local free energy, without draws. With f = Φθ, q(θ)
Gaussian, and α = ∂/∂m and β = −2 ∂/∂v of E log p(y_n | f_n), f_n ~ N(m_n, v_n),

    ∇_m F = Φᵀα + η₁ᶜ − Λᶜ m,   −∇²_m F = H = Φᵀ diag(β) Φ + Λᶜ,   Λ = H, or its diagonal, at the optimum,

where (η₁ᶜ, Λᶜ) are the natural parameters of the *context* (cavity, or prior). The factor of the rows at a stationary
q is ∇_μ E_q log p(y | θ), μ the mean parameters of q: precision Φᵀ diag(β) Φ, and η = Φᵀα plus precision times E θ
(Khan & Lin 2017; Ashman et al. 2022, Properties 2.2, 3.1-3.3, Eq. 4). If log p is concave in f, F is
concave in the mean and a root of the covariance, and the optimum is unique (Challis & Barber 2013).

A network is a classifier with one rectified hidden layer and a mean-field Gaussian over all its weights.
θ = (W₁ [H, D + 1], W₂ [C, H + 1]) row by row, the last column of each a bias, and

    P(y = c | x, θ) ∝ exp(W₂ (relu(W₁ (x, 1)), 1))_c.

Given a row, sums of independent Gaussian weights are Gaussian, so the H + C sums of each row are drawn instead of the
weights (Kingma, Salimans & Welling 2015). This is exact for one row, and its gradient has far less noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.likelihoods import PointLikelihood, canonical_likelihood
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.gp.optimisers import adam
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.model import Data
from fedgp_flower.methods.pvi.updates import TrainableLatent
from fedgp_flower.methods.pvi_weights.options import WeightsOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior
    from fedgp_flower.run.predict import Standardised

NEWTON_STEPS = 100
"""Most Newton steps; a few usually reach the tolerance."""
TOLERANCE = 1e-10
"""Tolerance of the Newton decrement in nats and of the relative change of Λ."""
SLACK = 1e-9
"""Allowed decrease of the free energy by rounding, relative to its size."""
NOISE_STEPS, NOISE_TOLERANCE, LEAST_NOISE = 100, 1e-6, 1e-6
"""Most steps of EM for the noise variance of one site, the change of its logarithm that ends them, and its minimum."""
STEPS, LEARNING_RATE = 300, 0.01
"""Defaults of ``pvi.steps`` and ``pvi.learning-rate``; most visits stop earlier."""
BATCH_SIZE = 128
"""Rows of a step."""
START_SCALE = 0.05
"""Largest initial standard deviation of a weight in a visit; a small one lets Adam stop early."""
PREDICTION_DRAWS = 30
PREDICTION_SEED = 22
"""Draws are fixed, so that a prediction is a function of the posterior."""


@dataclass(frozen=True, slots=True)
class LinearRows:
    """A site's rows with f = Φθ."""

    design: Float[Tensor, "N M"]
    """Φ, one row per observation."""
    targets: Float[Tensor, " N"]
    likelihood: PointLikelihood
    hyper: Float[Tensor, " R"]
    """Parameters of the likelihood."""

    def marginals(self, q: Gaussian) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Means and variances of f."""
        mean, covariance = q.moments()
        phi = self.design
        return phi @ mean, (phi @ covariance * phi).sum(-1) if q.full else phi.square() @ covariance

    def fit(self, q: Gaussian) -> Tensor:
        """E_q log p(y | f), in nats."""
        return self.likelihood.expected(self.targets, *self.marginals(q), self.hyper).sum()

    def expansion(self, q: Gaussian) -> tuple[Tensor, Gaussian, Float[Tensor, "M M"]]:
        """E_q log p(y | f); ∇_μ of it, the factor at a fixed point (Eq. 4); and Φᵀ diag(β) Φ."""
        fit, alpha, beta, _ = self.likelihood.slopes(self.targets, *self.marginals(q), self.hyper)
        curvature, mean = self.design.mT @ (beta[:, None] * self.design), q.mean()
        factor = Gaussian.around(mean, curvature if q.full else curvature.diagonal())
        return fit, replace(factor, eta1=self.design.mT @ alpha + factor.eta1), curvature


@dataclass(frozen=True, slots=True)
class NewtonStep:
    """The local free energy at q, and the Newton step from q."""

    q: Gaussian
    free_energy: float
    """F(q) = E_q log p(y | θ) − KL(q ‖ context)."""
    factor: Gaussian
    """Factor of the rows at q."""
    move: Tensor
    """H⁻¹∇_m F."""
    precision: Tensor
    """Target of Λ: H, or its diagonal."""
    decrement: float

    @classmethod
    def at(cls, rows: LinearRows, q: Gaussian, context: Gaussian) -> NewtonStep:
        """The step from q."""
        fit, factor, curvature = rows.expansion(q)
        target, mean = context * factor, q.mean()
        precision, gradient = target.precision, target.eta1 - target.times(mean)
        information = precision if target.full else curvature.diagonal_scatter(precision)
        L = cholesky(information, of="information of the weights", hint="Are inputs on very different scales?")
        move = torch.cholesky_solve(gradient[:, None], L)[:, 0]
        change = float((precision - q.precision).abs().max() / precision.max())
        decrement = max(float(gradient @ move), change)
        return cls(q, float(fit - q.kl(context)), factor, move, precision, decrement)

    def taken(self, length: float) -> Gaussian:
        """Return q after a step of this length."""
        precision = self.q.precision + length * (self.precision - self.q.precision)
        return Gaussian.around(self.q.mean() + length * self.move, precision)


def glm_rows(section: ModelSection, inputs: Array, targets: Array, noise: float | None = None) -> LinearRows:
    """Rows with Φ = (1, X) [N, 1 + D], stored column by column for faster products ΦᵀΦ."""
    likelihood = canonical_likelihood(section.likelihood, section.noise if noise is None else noise)
    design = torch.cat([torch.ones(1, len(inputs), dtype=torch.float64), torch.from_numpy(inputs).mT]).mT
    return LinearRows(design, torch.from_numpy(targets), likelihood, likelihood.initial)


def optimum(rows: LinearRows, q: Gaussian, context: Gaussian) -> tuple[NewtonStep, int]:
    """Maximise the local free energy by Newton steps with step halving; return the last step and their number."""
    current, length, steps = NewtonStep.at(rows, q, context), 1.0, 0
    while steps < NEWTON_STEPS and current.decrement > TOLERANCE:
        trial = NewtonStep.at(rows, current.taken(length), context)
        if trial.free_energy >= current.free_energy - SLACK * abs(current.free_energy):
            current, length, steps = trial, min(1.0, 2.0 * length), steps + 1
            continue
        length *= 0.5
        if length < 1e-10:
            raise NumericsError("no Newton step raises the local free energy; are the inputs finite and standardised?")
    return current, steps


def alone(section: ModelSection, inputs: Array, targets: Array, prior: Gaussian) -> tuple[Gaussian, float]:
    """Return q(θ) of these rows alone and, for numbers, the noise variance of highest evidence, by EM."""
    noise, change = section.noise, math.inf
    for _ in range(NOISE_STEPS):
        rows = glm_rows(section, inputs, targets, noise)
        q = prior * optimum(rows, prior, prior)[0].factor
        if section.likelihood != "gaussian" or change < NOISE_TOLERANCE:
            break
        mean, variance = rows.marginals(q)
        found = max(float(((rows.targets - mean).square() + variance).mean()), LEAST_NOISE)
        noise, change = found, abs(math.log(found / noise))
    return q, noise


def prior_of(options: WeightsOptions, num_inputs: int) -> NaturalParameters:
    """The prior N(0, I) of weights and intercept, in the form of q, for standardised inputs."""
    return NaturalParameters.of(Gaussian.standard(options.num_weights(num_inputs), full=options.full))


def predicted(section: ModelSection, q: Gaussian, inputs: Array, noise: float | None = None) -> tuple[Array, Array]:
    """Mean and variance of an observation [N] at standardised inputs [N, D]."""
    rows = glm_rows(section, inputs, np.zeros(len(inputs)), noise)
    mean, variance = rows.likelihood.moments(*rows.marginals(q), rows.hyper)
    return mean.numpy(), variance.numpy()


def saved_model(saved: Posterior, names: tuple[str, ...]) -> Standardised:
    """The posterior of a finished run: mean and standard deviation of an observation."""
    section = ModelSection.model_validate({key: saved.model[key] for key in ("likelihood", "noise")})
    q = q_of(saved)

    def standardised(inputs: Array) -> tuple[Array, Array]:
        mean, variance = predicted(section, q, inputs)
        return mean, np.sqrt(variance)

    return standardised


def q_of(saved: Posterior) -> Gaussian:
    """q(θ) of a saved posterior."""
    mean = torch.from_numpy(np.array(saved.arrays["weights.mean"]))
    spread = torch.from_numpy(np.array(saved.arrays["weights.covariance"]))
    return Gaussian.from_moments(mean, spread)


# ---- Networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightSpaceNetwork:
    """A network with D inputs, H hidden units and C classes."""

    inputs: int
    hidden: int
    classes: int

    def layers(self, theta: Float[Tensor, " P"]) -> tuple[Float[Tensor, "H D1"], Float[Tensor, "C H1"]]:
        """W₁ and W₂."""
        first = self.hidden * (self.inputs + 1)
        return theta[:first].view(self.hidden, -1), theta[first:].view(self.classes, -1)

    def initial(self, generator: Generator) -> Float[Tensor, " P"]:
        """Random means, the same at all sites, which break the symmetry of hidden units."""
        parts = []
        for rows, columns in ((self.hidden, self.inputs), (self.classes, self.hidden)):
            weights = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * (2 / columns) ** 0.5
            parts.append(torch.cat([weights, weights.new_zeros(rows, 1)], 1).flatten())
        return torch.cat(parts)

    def logits(self, x: Float[Tensor, "N D"], q: Gaussian, generator: Generator) -> Float[Tensor, "N C"]:
        """One draw of the logits for each row."""
        (m1, m2), (v1, v2) = map(self.layers, q.moments())
        hidden = torch.relu(_sums(x, m1, v1, generator))
        return _sums(hidden, m2, v2, generator)

    def indicators(self, inputs: Array, q: Gaussian, draws: int, *, binary: bool) -> tuple[Array, Array]:
        """Mean over draws of P(y = c | x, θ) [N, C], or if ``binary`` of the second class [N]; and p (1 − p)."""
        generator, x = torch.Generator().manual_seed(PREDICTION_SEED), torch.from_numpy(inputs)
        each = torch.stack([self.logits(x, q, generator).softmax(-1) for _ in range(draws)]).mean(0).numpy()
        mean = each[:, 1] if binary else each
        return mean, mean * (1 - mean)

    def log_likelihood(self, rows: Data, q: Gaussian, generator: Generator) -> Tensor:
        """Σ log P(y_n), with one draw for each row."""
        logits = self.logits(rows.inputs, q, generator)
        return logits.log_softmax(-1).gather(1, rows.targets.long()[:, None]).sum()


def _sums(x: Tensor, mean: Tensor, variance: Tensor, generator: Generator) -> Tensor:
    """A draw of W (x, 1) for each row, W ~ N(mean, variance)."""
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    centre, spread = x @ mean.mT, (x.square() @ variance.mT).sqrt()
    return centre + spread * torch.randn(centre.shape, generator=generator, dtype=x.dtype)


def refined(
    network: WeightSpaceNetwork,
    rows: Data,
    context: Gaussian,
    start: Gaussian,
    steps: int,
    learning_rate: float,
    generator: Generator,
) -> tuple[Gaussian, list[float]]:
    """Maximise E_q log p(y | θ) − KL(q ‖ context) by Adam; return q and the values of the objective.

    Adam stops when windows of the expected log likelihood, not of the free energy, stop rising.
    """
    latent, count = TrainableLatent(context, *start.moments()), len(rows)
    size, fits = min(BATCH_SIZE, count), list[float]()

    def objective() -> Tensor:
        q, batch = latent.density(), rows
        if size < count:
            chosen = torch.randperm(count, generator=generator)[:size]
            batch = Data(rows.inputs[chosen], rows.targets[chosen])
        fit = network.log_likelihood(batch, q, generator) * (count / size)
        fits.append(float(fit.detach()))
        return fit - q.kl(context)

    values = adam(objective, latent.parameters, count, steps, learning_rate, fits)
    with torch.no_grad():
        return latent.density(), values


def saved_network(saved: Posterior, names: tuple[str, ...]) -> Standardised:
    """The posterior of a finished run: mean and standard deviation of the indicators of classes."""
    network = WeightSpaceNetwork(len(names), int(saved.model["hidden"]), int(saved.model["classes"]))
    q, draws, binary = q_of(saved), int(saved.model["draws"]), saved.likelihood == "bernoulli"

    def standardised(inputs: Array) -> tuple[Array, Array]:
        mean, variance = network.indicators(inputs, q, draws, binary=binary)
        return mean, np.sqrt(variance)

    return standardised
