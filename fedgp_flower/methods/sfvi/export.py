"""The posterior of SFVI as a model of GPyTorch: f of a site that nobody has seen, or the shared trend alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from fedgp_flower.gp.likelihoods import NONE, gaussian_likelihood
from fedgp_flower.gp.projections import whitened_projection
from fedgp_flower.gp.sums import WhitenedPosterior
from fedgp_flower.gp.to_gpytorch import SparsePosterior
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.sfvi.gp import HierarchicalGP, linear_terms
from fedgp_flower.typing import Rows


class LinearTerms(Kernel):
    """Covariance Σ_i s_i² φ_i(x) φ_i(x') of a linear function with φ(x) = (1, x) and independent weights N(0, s_i²)."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("scales", scales)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        """The covariance."""
        left, right = (self.scales * torch.cat([torch.ones_like(x[..., :1]), x], -1) for x in (x1, x2))
        return (left * right).sum(-1) if diag else left @ right.mT


class SharedTrend(SparsePosterior):
    """The trend g with q(Z_G) of its whitened inducing values and linear terms, plus a deviation from its prior."""

    def __init__(
        self, trend: Kernel, kernel: Kernel, inputs: Rows, posterior: WhitenedPosterior, jitter: float
    ) -> None:
        super().__init__(kernel, inputs, posterior, jitter)
        self.trend = trend.requires_grad_(False).eval()

    def project(self, inducing_points: Tensor, inputs: Tensor) -> Tensor:
        """The weights of g(x) on Z_G."""
        values = whitened_projection(self.trend, inducing_points, inputs, jitter=self.jitter)
        return torch.cat([values, linear_terms(inputs)], -2)


@torch.no_grad()
def export(
    model: HierarchicalGP, q_global: GlobalPosterior, *, deviation: bool = True
) -> tuple[SparsePosterior, Likelihood]:
    """Model and likelihood of a new site, in evaluation mode and standardised coordinates.

    f includes h_k from its prior; without ``deviation`` it is the trend g.
    """
    trend, width = deepcopy(model.trend), model.inputs.shape[1] + 1
    kernel = trend + LinearTerms(torch.ones(width, dtype=torch.float64))
    if deviation and model.options.deviates:
        own = ScaleKernel(deepcopy(model.deviation)).to(q_global.mean)
        own.outputscale = q_global.mean.new_tensor(model.deviation_factor)  # a float would pass through float32
        kernel = kernel + own + LinearTerms(model.log_site_slope.exp())
    factor = q_global.factor()
    posterior = WhitenedPosterior(q_global.mean, factor @ factor.mT)
    exported = SharedTrend(trend, kernel, model.inputs.detach(), posterior, model.options.jitter)
    if model.options.likelihood != "gaussian":
        return exported, model.likelihood.to_gpytorch(NONE).eval()
    noise = float((model.log_noise + 2 * model.noise_spread**2).exp())  # E σ² e^{2ζ}
    return exported, gaussian_likelihood(noise).requires_grad_(False).eval()
