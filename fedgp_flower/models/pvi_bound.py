"""The parts of the global free energy, and of its prediction, that a site computes at the current posterior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.models.factors import Factor, Natural, product, view
from fedgp_flower.models.hierarchical import Data, Draws, SparseModel


@dataclass(frozen=True, slots=True)
class FreeEnergyParts:
    """Averages over draws of (Z, β) ~ q, in nats."""

    fit: float
    """E_q log p(y_k | f): adds over sites."""
    divergence: float
    """E KL(q(u | Z, β) ‖ p(u | Z, β)): the same at every site that uses the same draws."""


def free_energy_parts(model: SparseModel, draws: Draws, factors: Sequence[Factor], data: Data) -> FreeEnergyParts:
    """What this site knows of F = Σ_k E_q log p(y_k | f) − E KL(q(u) ‖ p(u)) − KL(q(Z) ‖ p) − KL(q(β) ‖ p).

    This equals Σ_k F_k + log Z_q at any q = p ∏ t_k (Ashman et al. 2022, Property 2.2a).

    Args:
        model: Kernel and likelihood.
        draws: S samples, the same at every site.
        factors: Those of all sites.
        data: The site's rows.
    """
    with torch.no_grad():
        views = view(model.geometry(draws), factors, None, data.inputs)
        posterior = product(views, factors).density()
        assert views.rows is not None
        moments = posterior.predict(views.rows, views.geometry.prior_variance(data.inputs))
        fit: Float[Tensor, " S"] = model.likelihood.expected(data.targets, *moments, model.own_hyper(draws)).sum(-1)
        divergence = posterior.kl(Natural.prior(views.geometry).density())
    return FreeEnergyParts(float(fit.mean()), float(divergence.mean()))
