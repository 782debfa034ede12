"""A partitioned posterior as models of GPyTorch: one for each draw of (Z, β), of equal weight.

The prediction is a mixture over draws; no single Gaussian process has its distribution. The draws are those of
:func:`~fedgp_flower.methods.pvi.posterior.prediction_draws`; where Z and β are points there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.gp.sums import WhitenedPosterior
from fedgp_flower.gp.to_gpytorch import SparsePosterior
from fedgp_flower.methods.pvi.factors import Factor, product, view
from fedgp_flower.methods.pvi.hierarchical import Draws, SparseModel


@torch.no_grad()
def export(model: SparseModel, draws: Draws, factors: Sequence[Factor]) -> list[tuple[SparsePosterior, Likelihood]]:
    """Model and likelihood at every draw, in evaluation mode and standardised coordinates."""
    density = product(view(model.geometry(draws), factors, None, None), factors).density()
    exported = []
    for s, own in enumerate(model.own_hyper(draws)):
        kernel = model.kernel.at(draws.hyper[s, : model.kernel.num_hyper])
        covariance = torch.cholesky_inverse(density.chol[s])  # the inverse is the answer here
        q = WhitenedPosterior(density.mean[s], covariance)
        likelihood = model.likelihood.to_gpytorch(own).requires_grad_(False).eval()
        exported.append((SparsePosterior(kernel, draws.inducing[s], q, model.jitter), likelihood))
    return exported
