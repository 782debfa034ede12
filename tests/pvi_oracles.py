"""Closed forms that only tests need: what partitioned variational inference is compared with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.model import Data, Draws, Factor


def collapsed_local_bound(draws: Draws, others: Sequence[Factor], data: Data) -> Tensor:
    r"""The local free energy maximised over the site's own factor, for a Gaussian likelihood.  [S].

    log ∫ N(y; Aᵀv, σ²I) q_\k(v) dv − Σ (k_xx − aᵀa)/2σ²: Titsias' bound with the cavity in place of the prior.
    """
    cavity, A, noise = draws.product(others), draws.project(data.inputs), draws.noise[:, None]
    spread = torch.linalg.solve_triangular(cavity.chol, A, upper=False)
    covariance = spread.mT @ spread + torch.diag_embed(noise.expand(-1, len(data)))
    mean = (A * cavity.mean[..., None]).sum(-2)
    missing = (draws.prior_variance(data.inputs) - A.square().sum(-2)) / noise
    return MultivariateNormal(mean, covariance).log_prob(data.targets) - 0.5 * missing.sum(-1)


def log_normaliser(q: Gaussian) -> Tensor:
    """A(η) = log ∫ exp(η₁ᵀx + xᵀη₂x) dx = ½η₁ᵀSη₁ − ½log|Λ| + M/2 log 2π, a scalar."""
    return 0.5 * (q.eta1 @ q.mean() + q.size * math.log(2 * math.pi) - q.described()[2])
