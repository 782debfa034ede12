"""A site's update of a factor of θ where f = Φθ and θ is Gaussian: weights, or v = L⁻¹u while Z and β stay fixed.

A site multiplies its *context* (cavity, or prior) by a factor; every update returns that factor. With α = ∂/∂m and
β = −2 ∂/∂v of E log p(y_n | f_n), f_n ~ N(m_n, v_n), the factor at which q would stay is ∇_μ E_q log p(y | θ), μ the
mean parameters of q: Λ = Φᵀ diag(β) Φ and η = Φᵀα + Λ E θ (Khan & Lin 2017).

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
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.likelihoods import PointLikelihood
from fedgp_flower.methods.pvi.messages import Marginals
from fedgp_flower.methods.pvi.model import Data, SparseModel

TOLERANCE, MOST_ITERATIONS = 1e-10, 500
"""Relative change of the factor at which fixed-point iterations stop, and their number at most."""
G = TypeVar("G", bound=Gaussian)


@dataclass(frozen=True, slots=True)
class LinearRows:
    """A site's rows seen through linear functions of θ."""

    design: Float[Tensor, "N M"]
    """Φ, one row per observation."""
    targets: Float[Tensor, " N"]
    likelihood: PointLikelihood
    hyper: Float[Tensor, " R"]
    """Parameters of the likelihood."""
    extra: Float[Tensor, " N"] | float = 0.0
    """The variance of f that θ does not explain."""

    def marginals(self, q: Gaussian) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Means and variances of f."""
        mean, covariance = q.moments()
        full, phi = covariance.ndim == 2, self.design
        spread = (phi @ covariance * phi).sum(-1) if full else phi.square() @ covariance
        return phi @ mean, spread + self.extra

    def fit(self, q: Gaussian) -> Tensor:
        """E_q log p(y | f), in nats."""
        return self.likelihood.expected(self.targets, *self.marginals(q), self.hyper).sum()

    def free_energy(self, q: Gaussian, context: Gaussian) -> Tensor:
        """F_k(q) = E_q log p(y_k | f) − KL(q ‖ context), in nats (Eq. 2 with a normalised cavity)."""
        return self.fit(q) - q.kl(context)

    def expansion(self, q: G) -> tuple[Tensor, G, Float[Tensor, "M M"]]:
        """E_q log p(y | f), ∇_μ of it, which is the factor at a fixed point (Eq. 4), and Φᵀ diag(β) Φ."""
        fit, alpha, beta, _ = self.likelihood.slopes(self.targets, *self.marginals(q), self.hyper)
        curvature, mean = self.design.mT @ (beta[:, None] * self.design), q.mean()
        kept = curvature if q.eta2.ndim == 2 else curvature.diagonal()
        pull = kept @ mean if kept.ndim == 2 else kept * mean
        return fit, type(q)(self.design.mT @ alpha + pull, -0.5 * kept), curvature


def whitened_rows(model: SparseModel, data: Data, q: Marginals) -> LinearRows:
    """The site's rows as functions of v, at the means of Z and β."""
    draws = model.at_means(q)
    with torch.no_grad():
        projection = draws.project(data.inputs)[0]
        extra = draws.prior_variance(data.inputs)[0] - projection.square().sum(0)
        return LinearRows(projection.mT, data.targets, model.likelihood, draws.likelihood_hyper[0], extra)


def fixed_point(rows: LinearRows, context: G, start: G, *, step: float = 1.0) -> tuple[G, int]:
    """Natural-gradient ascent t ← t^(1−ρ) (∇_μ E_q log p(y_k | v))^ρ with q = context · t; and the number of steps.

    A step that would make q improper is halved until it does not.

    Raises:
        NumericsError: the context times the start is improper.
    """
    factor, iterations, change, size = start, 0, float("inf"), 1.0
    while change >= TOLERANCE * size and iterations < MOST_ITERATIONS:
        iterations += 1
        target, rho = rows.expansion(context * factor)[1], step
        while not (context * (new := factor ** (1.0 - rho) * target**rho)).is_proper():
            rho *= 0.5
            if rho < 1e-10:
                raise NumericsError("the fixed-point iteration cannot leave an improper posterior. Lower its step.")
        change = max(float((new.eta1 - factor.eta1).abs().max()), float((new.eta2 - factor.eta2).abs().max()))
        size, factor = max(float(new.eta1.abs().max()), float(new.eta2.abs().max())), new
    return factor, iterations


def gradient_step(rows: LinearRows, q: G, context: G, start: G, *, step: float) -> G:
    """η_k ← η_k + ρ dF_k/dη at q (Property 3.1); the derivative with respect to a symmetric η₂ is symmetric.

    Of all sites at once this is one pooled step, whatever the partition.
    """
    with torch.enable_grad():
        eta1, eta2 = (part.detach().requires_grad_() for part in (q.eta1, q.eta2))
        energy = rows.free_energy(type(q)(eta1, eta2), context)
        slope1, slope2 = torch.autograd.grad(energy, (eta1, eta2))
    return start * type(q)(step * slope1, 0.5 * step * (slope2 + slope2.mT))
