"""PVI of generalised linear models: a local free energy whose optimum Newton's method finds, without draws.

With f = Φθ, q(θ) Gaussian, and α, β and the factor of the rows as in :mod:`fedgp_flower.methods.pvi.updates`,

    ∇_m F = Φᵀα + η₁ᶜ − Λᶜ m,   −∇²_m F = H = Φᵀ diag(β) Φ + Λᶜ,   Λ = H, or its diagonal, at the optimum,

where (η₁ᶜ, Λᶜ) are the natural parameters of the context. F is concave in the mean and a root of the covariance where
log p is concave in f (Challis & Barber 2013), so that the optimum is the only one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi.updates import LinearRows
from fedgp_flower.methods.pvi_weights.options import WeightsOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior

STEPS = 100
"""Newton steps at most: a handful reach the tolerance."""
TOLERANCE = 1e-10
"""Of the Newton decrement in nats and of the relative change of Λ, at which the optimum is reached."""
SLACK = 1e-9
"""Nats, relative to the free energy, by which rounding may lower it."""


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
    while steps < STEPS and here.decrement > TOLERANCE:
        there = NewtonStep.at(rows, here.taken(length), context)
        if there.free_energy >= here.free_energy - SLACK * abs(here.free_energy):
            here, length, steps = there, min(1.0, 2.0 * length), steps + 1
            continue
        length *= 0.5
        if length < 1e-10:
            raise NumericsError("no Newton step raises the local free energy; are the inputs finite and standardised?")
    return here, steps


def prior_of(options: WeightsOptions, num_inputs: int) -> NaturalParameters:
    """N(0, s² I) over the weights, in the form of q."""
    size = options.num_weights(num_inputs)
    precision = options.prior_scale**-2
    return NaturalParameters(np.zeros(size), -0.5 * precision * (np.eye(size) if options.full else np.ones(size)))


# ---- Prediction -----------------------------------------------------------------------------------------------------


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
