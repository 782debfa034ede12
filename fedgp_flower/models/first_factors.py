"""Where a site's factor starts on its first visit: averages of rows (DPO) or the optimum at one (Z, β) (CPO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fedgp_flower.gaussian import NaturalGaussian
from fedgp_flower.models.factors import Factor, InducingFactor, PseudoObservations
from fedgp_flower.models.hierarchical import Data, Draws, Latents, SparseModel, location_scale
from fedgp_flower.models.likelihoods import GaussianNoise
from fedgp_flower.models.pseudo_points import microaggregate

Form = Literal["tied", "free", "full", "cpo"]


def first_factor(
    model: SparseModel, data: Data, start: Latents, form: Form, *, num_points: int, min_rows: int
) -> Factor:
    """A factor that is close to the site's likelihood when q(Z) and q(β) are at the means of ``start``.

    Args:
        model: Kernel and likelihood.
        data: The site's rows.
        start: Where q(Z) and q(β) start.
        form: Noise of the pseudo-observations (``tied`` to σ², ``free`` diagonal, ``full``), or ``cpo``.
        num_points: M_k, at most; not used by ``cpo``.
        min_rows: Rows each pseudo-observation averages at least; not used by ``cpo``.
    """
    if form == "cpo":
        return _at_the_optimum(model, data, start)
    gaussian = isinstance(model.likelihood, GaussianNoise)
    tied = microaggregate(data, num_points, min_rows)
    if not gaussian:
        values, precision = model.likelihood.as_function(tied.targets)
        tied = replace(
            tied, targets=values, root=precision.sqrt() * tied.root, residual=torch.zeros_like(tied.residual)
        )
    if form == "tied":
        return tied
    deviation = location_scale(start.hyper)[0][-1].exp() if gaussian else 1.0
    root = tied.root / deviation
    return PseudoObservations(tied.inputs, tied.targets, root.diag() if form == "full" else root, False, tied.count)


def _at_the_optimum(model: SparseModel, data: Data, start: Latents) -> InducingFactor:
    """Λ = L⁻ᵀAWAᵀL⁻¹ and η = L⁻ᵀAWy with W = 1/σ², Titsias' optimum at the means.

    Without a Gaussian likelihood y and W are what :meth:`PointLikelihood.as_function` makes of the targets.
    """
    inducing, hyper = (location_scale(latent)[0] for latent in (start.inducing, start.hyper))
    with torch.no_grad():
        geometry = model.geometry(Draws(inducing.reshape(1, -1, model.num_inputs), hyper[None]))
        values, precision = model.likelihood.as_function(data.targets)
        root = precision.sqrt() * geometry.noise.rsqrt()
        projection = geometry.project(data.inputs)[0] * root
        columns = torch.linalg.solve_triangular(geometry.chol[0].mT, projection, upper=True)  # L⁻ᵀAW^½
        eta1 = columns @ (precision.sqrt() * values) * geometry.noise.rsqrt()
        return InducingFactor(NaturalGaussian(eta1, -0.5 * columns @ columns.mT))
