"""Partitioned variational inference where f = Φθ (+ independent Gaussian noise) and q(θ) is Gaussian, full or diagonal.

Two uses: generalised linear models (Φ the design matrix), and a sparse GP at fixed Z and β, where θ = v = L⁻¹u is
whitened, Φ = Aᵀ = (L⁻¹K_ZX)ᵀ and ``extra`` = k_xx − aᵀa. A site's update multiplies its *context* (cavity, or prior)
by a factor; every function returns that factor.

References:
    Ashman et al., Partitioned variational inference (2022), Algorithm 1, Properties 2.2, 3.1-3.3, Eq. 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.gp.likelihoods import PointLikelihood
from fedgp_flower.methods.pvi.model import Data, Draws, Latents, SparseModel, location_scale

G = TypeVar("G", NaturalGaussian, DiagonalGaussian)


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A site's rows seen through linear functions of θ."""

    design: Float[Tensor, "N M"]
    """Φ, one row per observation."""
    targets: Float[Tensor, " N"]
    likelihood: PointLikelihood
    hyper: Float[Tensor, " R"]
    """Parameters of the likelihood."""
    extra: Float[Tensor, " N"] | None = None
    """Variance of f that θ does not explain."""

    def expected_log_likelihood(self, q: G) -> Tensor:
        """E_q log p(y_k | θ), in nats."""
        return self._expected(*self._marginals(q))

    def log_density_slopes(self, q: G) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """∂/∂m_n and ∂/∂v_n of E log p(y_n | f_n) with f_n ~ N(m_n, v_n), by automatic differentiation."""
        with torch.enable_grad():
            mean, variance = (part.detach().requires_grad_() for part in self._marginals(q))
            first, second = torch.autograd.grad(self._expected(mean, variance), (mean, variance))
        return first, second

    def _marginals(self, q: G) -> tuple[Tensor, Tensor]:
        mean, covariance = q.moments()
        if covariance.ndim == 2:
            variance = (self.design @ covariance * self.design).sum(-1)
        else:
            variance = self.design.square() @ covariance
        return self.design @ mean, variance if self.extra is None else variance + self.extra

    def _expected(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self.likelihood.expected(self.targets, mean[None], variance[None], self.hyper[None]).sum()


def linear_site(model: SparseModel, data: Data, latents: Latents) -> LinearSite:
    """The site's rows as linear functions of v = L⁻¹u at the means of Z and β."""
    inducing, hyper = (location_scale(latent)[0] for latent in (latents.inducing, latents.hyper))
    draws = Draws(inducing.reshape(1, -1, model.num_inputs), hyper[None])
    with torch.no_grad():
        geometry = model.geometry(draws)
        projection = geometry.project(data.inputs)[0]
        extra = geometry.prior_variance(data.inputs)[0] - projection.square().sum(0)
        return LinearSite(projection.mT, data.targets, model.likelihood, model.own_hyper(draws)[0], extra)


def local_free_energy(site: LinearSite, q: G, context: G) -> Tensor:
    """F_k(q) = E_q log p(y_k | θ) − KL(q ‖ context), in nats (Eq. 2 with a normalised cavity)."""
    return site.expected_log_likelihood(q) - q.kl(context)


def analytic_factor(site: LinearSite, noise: Tensor) -> NaturalGaussian:
    """The exact factor of rows with Gaussian noise σ²: Λ = ΦᵀΦ/σ², η = Φᵀy/σ². The update of a conjugate model."""
    return NaturalGaussian(site.design.mT @ site.targets / noise, -0.5 * (site.design.mT @ site.design) / noise)


def natural_gradient(site: LinearSite, q: G) -> G:
    """∇_μ E_q[log p(y_k | θ)] with μ the mean parameters of q: what the site's factor is at a fixed point (Eq. 4).

    η₂ = Φᵀ diag(∂E/∂v) Φ and η₁ = Φᵀ ∂E/∂m − 2 η₂ m, for a diagonal q the diagonal of η₂ alone.
    """
    first, second = site.log_density_slopes(q)
    mean = q.mean()
    if isinstance(q, NaturalGaussian):
        eta2 = site.design.mT @ (second[:, None] * site.design)
        curvature = eta2 @ mean
    else:
        eta2 = second @ site.design.square()
        curvature = eta2 * mean
    return type(q)(site.design.mT @ first - 2.0 * curvature, eta2)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Result of an iteration."""

    factor: NaturalGaussian | DiagonalGaussian
    iterations: int
    change: float
    """Largest change of a natural parameter in the last iteration, relative to the largest parameter."""
    halvings: int
    """Steps shortened because the posterior would have been improper."""


def fixed_point_update(
    site: LinearSite, context: G, start: G, *, step: float = 1.0, tolerance: float = 1e-10, max_iterations: int = 500
) -> FixedPoint:
    """Damped fixed-point iteration t ← (1 − ρ) t + ρ ∇_μ E_q log p(y_k | θ), q = context · t: natural-gradient ascent.

    A step that would make q improper is halved until it does not, and counted. ``step`` is ρ in (0, 1], ``tolerance``
    the relative change at which it stops.

    Raises:
        NumericsError: the context times the start is improper.
    """
    factor, halvings, change = start, 0, float("inf")
    for iteration in range(1, max_iterations + 1):
        target = natural_gradient(site, context * factor)
        rho = step
        while not (context * factor ** (1.0 - rho) * target**rho).is_proper():
            rho, halvings = 0.5 * rho, halvings + 1
            if rho < 1e-10:
                raise NumericsError("the fixed-point iteration cannot leave an improper posterior. Lower its step.")
        new = factor ** (1.0 - rho) * target**rho
        change = float(_distance(new, factor))
        factor = new
        if change < tolerance:
            return FixedPoint(factor, iteration, change, halvings)
    return FixedPoint(factor, max_iterations, change, halvings)


def gradient_update(site: LinearSite, q: G, context: G, start: G, *, step: float) -> G:
    """One gradient step on F_k in the natural parameters of q, as a change of the site's factor (Property 3.1).

    η_k ← η_k + ρ dF_k/dη at q. Synchronously over all sites this is one pooled step, however the rows are dealt.
    The derivative with respect to a symmetric η₂ is itself symmetric.
    """
    with torch.enable_grad():
        eta1, eta2 = (part.detach().requires_grad_() for part in (q.eta1, q.eta2))
        slope1, slope2 = torch.autograd.grad(local_free_energy(site, type(q)(eta1, eta2), context), (eta1, eta2))
    if slope2.ndim == 2:
        slope2 = 0.5 * (slope2 + slope2.mT)
    return start * type(q)(step * slope1, step * slope2)


def _distance(left: G, right: G) -> Tensor:
    top = torch.maximum((left.eta1 - right.eta1).abs().max(), (left.eta2 - right.eta2).abs().max())
    return top / torch.maximum(left.eta1.abs().max(), left.eta2.abs().max()).clamp_min(1e-300)
