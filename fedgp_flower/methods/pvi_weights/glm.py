"""PVI of generalised linear models: a local free energy whose optimum Newton's method finds, without draws.

f = Φθ with q(θ) Gaussian makes every f_n ~ N(m_n, v_n), and with α = ∂/∂m and β = −2 ∂/∂v of E log p(y_n | f_n)

    ∇_m F = Φᵀα + η₁ᶜ − Λᶜ m,   −∇²_m F = H = Φᵀ diag(β) Φ + Λᶜ,   Λ = H, or its diagonal, at the optimum,

where (η₁ᶜ, Λᶜ) are the natural parameters of the context. F is concave in the mean and a root of the covariance where
log p is concave in f (Challis & Barber 2013), so that the optimum is the only one. The factor of the rows is
∇_μ E_q log p(y | θ) with μ the mean parameters of q: conjugate-computation VI (Khan & Lin 2017), and Ashman et al.
(2022), Eq. 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.likelihoods import PointLikelihood, canonical_likelihood
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.methods.pvi.messages import NaturalParameters
from fedgp_flower.methods.pvi_weights.options import WeightsOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

STEPS = 100
"""Newton steps at most: a handful reach the tolerance."""
TOLERANCE = 1e-10
"""Of the Newton decrement in nats and of the relative change of Λ, at which the optimum is reached."""
SLACK = 1e-9
"""Nats, relative to the free energy, by which rounding may lower it."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """A local free energy at a q, and the Newton step from there."""

    q: Gaussian
    mean: Tensor
    """Of q."""
    free_energy: float
    factor: Gaussian
    move: Tensor
    """H⁻¹∇_m F."""
    precision: Tensor
    """Where Λ goes: H, or its diagonal."""
    decrement: float

    def step(self, length: float) -> Gaussian:
        """Some way along the step."""
        precision = self.q.precision + length * (self.precision - self.q.precision)
        mean = self.mean + length * self.move
        return type(self.q)(precision @ mean if precision.ndim == 2 else precision * mean, -0.5 * precision)


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A site's rows seen through linear functions of θ."""

    design: Float[Tensor, "N P"]
    """Φ, one row per observation."""
    targets: Float[Tensor, " N"]
    likelihood: PointLikelihood
    hyper: Float[Tensor, " R"]
    """Parameters of the likelihood."""


def glm_site(section: ModelSection, inputs: Array, targets: Array) -> LinearSite:
    """Rows with a constant, Φ = (1, X) [N, 1 + D], which lie column by column: products ΦᵀΦ are faster so."""
    likelihood = canonical_likelihood(section.likelihood, section.noise)
    design = torch.cat([torch.ones(1, len(inputs), dtype=torch.float64), torch.from_numpy(inputs).mT]).mT
    return LinearSite(design, torch.from_numpy(targets), likelihood, likelihood.initial)


def marginals(design: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of f = Φθ, each [N], by those of θ."""
    spread = (design @ covariance * design).sum(1) if covariance.ndim == 2 else design.square() @ covariance
    return design @ mean, spread


def log_likelihood(site: LinearSite, q: Gaussian) -> Tensor:
    """E_q log p(y | θ), in nats."""
    return site.likelihood.slopes(site.targets, *marginals(site.design, *q.moments()), site.hyper)[0]


@dataclass(frozen=True, slots=True)
class Context:
    """What a local update multiplies its rows' factor with, and what KL from it takes."""

    eta1: Tensor
    precision: Tensor
    mean: Tensor
    log_determinant: Tensor

    @classmethod
    def of(cls, context: Gaussian) -> Context:
        """The same Gaussian."""
        mean, _, log_determinant = context.described()
        return cls(context.eta1, context.precision, mean, log_determinant)


def expansion(site: LinearSite, q: Gaussian, context: Context) -> Expansion:
    """F(q) = E_q log p(y | θ) − KL(q ‖ context), its Newton step, and the rows' factor at q."""
    phi, (mean, covariance, log_determinant), around = site.design, q.described(), context.precision
    fit, alpha, beta, _ = site.likelihood.slopes(site.targets, *marginals(phi, mean, covariance), site.hyper)
    curvature, slope = phi.mT @ (beta[:, None] * phi), phi.mT @ alpha
    full = around.ndim == 2
    kept = curvature if full else curvature.diagonal()
    precision = kept + around
    away = mean - context.mean
    pull = around @ away if full else around * away
    gradient = slope - pull
    information = precision if full else curvature.diagonal_scatter(precision)
    L = cholesky(information, of="information of the weights", hint="Are inputs on very different scales?")
    move = torch.cholesky_solve(gradient[:, None], L)[:, 0]
    change = float((precision - q.precision).abs().max() / precision.max())
    factor = type(q)(slope + (kept @ mean if full else kept * mean), -0.5 * kept)
    decrement = max(float(gradient @ move), change)
    wider = (around * covariance).sum() + log_determinant - context.log_determinant
    divergence = 0.5 * (wider - len(mean) + away @ pull)
    return Expansion(q, mean, float(fit - divergence), factor, move, precision, decrement)


@dataclass(frozen=True, slots=True)
class LocalMaximum:
    """The end of a local update."""

    factor: Gaussian
    free_energy: float
    iterations: int


def optimum(site: LinearSite, q: Gaussian, context: Gaussian) -> LocalMaximum:
    """The rows' factor at the maximum of the local free energy, by Newton steps that never lower it.

    Raises:
        NumericsError: the step had to be shortened to nothing, which no log-concave likelihood does.
    """
    around = Context.of(context)
    here, length, iterations = expansion(site, q, around), 1.0, 0
    while iterations < STEPS and here.decrement > TOLERANCE:
        there = expansion(site, here.step(length), around)
        if there.free_energy >= here.free_energy - SLACK * abs(here.free_energy):
            here, length, iterations = there, min(1.0, 2.0 * length), iterations + 1
            continue
        length *= 0.5
        if length < 1e-10:
            raise NumericsError("no Newton step raises the local free energy; are the inputs finite and standardised?")
    return LocalMaximum(here.factor, here.free_energy, iterations)


def gradient(site: LinearSite, q: Gaussian, context: Gaussian) -> LocalMaximum:
    """The rows' factor at the q that was sent: merged with ρ it is a natural-gradient step of global VI of length ρ."""
    here = expansion(site, q, Context.of(context))
    return LocalMaximum(here.factor, here.free_energy, 1)


def prior_of(options: WeightsOptions, num_inputs: int) -> NaturalParameters:
    """N(0, s² I) over the weights, in the form of q."""
    size = options.num_weights(num_inputs)
    precision = options.prior_scale**-2
    return NaturalParameters(np.zeros(size), -0.5 * precision * (np.eye(size) if options.full else np.ones(size)))
