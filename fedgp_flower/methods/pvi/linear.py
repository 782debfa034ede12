"""A site's update of its factor of v = L⁻¹u while Z and β stay fixed: f = Φv + noise with Φ = Aᵀ = (L⁻¹K_ZX)ᵀ.

A site multiplies its *context* (cavity, or prior) by a factor; every update returns that factor.

References:
    Ashman et al., Partitioned variational inference (2022), Algorithm 1, Properties 2.2, 3.1-3.3, Eq. 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import NaturalGaussian
from fedgp_flower.gp.likelihoods import PointLikelihood
from fedgp_flower.methods.pvi.model import Data, Draws, Latents, SparseModel, location_scale

TOLERANCE, MOST_ITERATIONS = 1e-10, 500
"""Relative change of the factor at which fixed-point iterations stop, and their number at most."""


@dataclass(frozen=True, slots=True)
class WhitenedRows:
    """A site's rows seen through linear functions of v."""

    design: Float[Tensor, "N M"]
    """Φ, one row per observation."""
    targets: Float[Tensor, " N"]
    likelihood: PointLikelihood
    hyper: Float[Tensor, " R"]
    """Parameters of the likelihood."""
    extra: Float[Tensor, " N"]
    """k_xx − aᵀa, the variance of f that v does not explain."""

    def marginals(self, q: NaturalGaussian) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Means and variances of f."""
        mean, covariance = q.moments()
        return self.design @ mean, (self.design @ covariance * self.design).sum(-1) + self.extra

    def fit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E log p(y_k | f) with f_n ~ N(m_n, v_n), in nats."""
        return self.likelihood.expected(self.targets, mean[None], variance[None], self.hyper[None]).sum()

    def free_energy(self, q: NaturalGaussian, context: NaturalGaussian) -> Tensor:
        """F_k(q) = E_q log p(y_k | f) − KL(q ‖ context), in nats (Eq. 2 with a normalised cavity)."""
        return self.fit(*self.marginals(q)) - q.kl(context)


def whitened_rows(model: SparseModel, data: Data, latents: Latents) -> WhitenedRows:
    """The site's rows at the means of Z and β."""
    inducing, hyper = (location_scale(latent)[0] for latent in (latents.inducing, latents.hyper))
    draws = Draws(inducing.reshape(1, -1, model.num_inputs), hyper[None])
    with torch.no_grad():
        geometry = model.geometry(draws)
        projection = geometry.project(data.inputs)[0]
        extra = geometry.prior_variance(data.inputs)[0] - projection.square().sum(0)
        return WhitenedRows(projection.mT, data.targets, model.likelihood, model.noise_hyper(draws)[0], extra)


def analytic_factor(rows: WhitenedRows) -> NaturalGaussian:
    """The exact factor of rows with Gaussian noise σ²: Λ = ΦᵀΦ/σ², η = Φᵀy/σ²."""
    noise, phi = (2.0 * rows.hyper[-1]).exp(), rows.design
    return NaturalGaussian(phi.mT @ rows.targets / noise, -0.5 * (phi.mT @ phi) / noise)


def natural_gradient(rows: WhitenedRows, q: NaturalGaussian) -> NaturalGaussian:
    """∇_μ E_q log p(y_k | v) with μ the mean parameters of q: what the factor is at a fixed point (Eq. 4).

    η₂ = Φᵀ diag(∂E/∂v) Φ and η₁ = Φᵀ ∂E/∂m − 2 η₂ m.
    """
    with torch.enable_grad():
        mean, variance = (part.detach().requires_grad_() for part in rows.marginals(q))
        first, second = torch.autograd.grad(rows.fit(mean, variance), (mean, variance))
    eta2 = rows.design.mT @ (second[:, None] * rows.design)
    return NaturalGaussian(rows.design.mT @ first - 2.0 * (eta2 @ q.mean()), eta2)


def fixed_point(
    rows: WhitenedRows, context: NaturalGaussian, start: NaturalGaussian, *, step: float = 1.0
) -> tuple[NaturalGaussian, int]:
    """Natural-gradient ascent t ← t^(1−ρ) (∇_μ E_q log p(y_k | v))^ρ with q = context · t; and the number of steps.

    A step that would make q improper is halved until it does not.

    Raises:
        NumericsError: the context times the start is improper.
    """
    factor, iterations, change, size = start, 0, float("inf"), 1.0
    while change >= TOLERANCE * size and iterations < MOST_ITERATIONS:
        iterations += 1
        target, rho = natural_gradient(rows, context * factor), step
        while not (context * (new := factor ** (1.0 - rho) * target**rho)).is_proper():
            rho *= 0.5
            if rho < 1e-10:
                raise NumericsError("the fixed-point iteration cannot leave an improper posterior. Lower its step.")
        change = max(float((new.eta1 - factor.eta1).abs().max()), float((new.eta2 - factor.eta2).abs().max()))
        size, factor = max(float(new.eta1.abs().max()), float(new.eta2.abs().max())), new
    return factor, iterations


def gradient_step(
    rows: WhitenedRows, q: NaturalGaussian, context: NaturalGaussian, start: NaturalGaussian, *, step: float
) -> NaturalGaussian:
    """η_k ← η_k + ρ dF_k/dη at q (Property 3.1); the derivative with respect to a symmetric η₂ is symmetric.

    Of all sites at once this is one pooled step, whatever the partition.
    """
    with torch.enable_grad():
        eta1, eta2 = (part.detach().requires_grad_() for part in (q.eta1, q.eta2))
        energy = rows.free_energy(NaturalGaussian(eta1, eta2), context)
        slope1, slope2 = torch.autograd.grad(energy, (eta1, eta2))
    return start * NaturalGaussian(step * slope1, 0.5 * step * (slope2 + slope2.mT))
