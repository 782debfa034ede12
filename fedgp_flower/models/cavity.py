"""What a site's own factor meets: prior, the other sites' factors and the site's rows at some draws of (Z, β).

While the draws stay, nothing here depends on the factor that is being optimised, so it is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from fedgp_flower.models.factors import (
    Factor,
    Geometry,
    Natural,
    PseudoObservations,
    Views,
    WhitenedGaussian,
    multiply,
    product,
    view,
)
from fedgp_flower.models.hierarchical import Data, Draws, SparseModel


@dataclass(frozen=True, slots=True)
class Cavity:
    r"""q_\k(v | Z, β) for S samples of (Z, β), and the site's rows as seen from Z."""

    geometry: Geometry
    natural: Natural
    density: WhitenedGaussian
    rows: Float[Tensor, "S M N"]
    """A = L⁻¹ K_ZX."""
    prior_variance: Float[Tensor, "S N"]

    @classmethod
    def at(cls, model: SparseModel, draws: Draws, others: Sequence[Factor], data: Data) -> Cavity:
        """Prior times ``others``, by one triangular solve for all pseudo-inputs and rows."""
        views = view(model.geometry(draws), others, None, data.inputs)
        assert views.rows is not None
        natural = product(views, others)
        variance = views.geometry.prior_variance(data.inputs)
        return cls(views.geometry, natural, natural.density(), views.rows, variance)

    def times(self, own: Factor) -> WhitenedGaussian:
        """q(v | Z, β) with the site's own factor."""
        projection = self.geometry.project(own.inputs) if isinstance(own, PseudoObservations) else None
        return multiply(self.natural, own, Views(self.geometry, (), projection, None)).density()

    def free_energy(
        self, model: SparseModel, draws: Draws, own: Factor, data: Data, *, weight: float = 1.0
    ) -> Float[Tensor, " S"]:
        """See :func:`local_free_energy`; ``draws`` and ``data`` are those of :meth:`at`."""
        posterior = self.times(own)
        moments = posterior.predict(self.rows, self.prior_variance)
        fit = model.likelihood.expected(data.targets, *moments, model.own_hyper(draws)).sum(-1)
        return weight * fit - posterior.kl(self.density)


def local_free_energy(
    model: SparseModel, draws: Draws, others: Sequence[Factor], own: Factor, data: Data, *, weight: float = 1.0
) -> Float[Tensor, " S"]:
    r"""Local fit E_q log p(y_k | f) − KL(q(u | Z, β) ‖ q_\k(u | Z, β)) per sample, in nats.

    Federated learning of sparse Gaussian processes, Eq. 7 less its last KL.

    Args:
        model: Kernel and likelihood.
        draws: S samples of (Z, β).
        others: The other sites' factors; their product with the prior is the cavity.
        own: The site's factor.
        data: The site's rows, or a mini-batch of them.
        weight: N_k over the rows in ``data``, for mini-batches.
    """
    return Cavity.at(model, draws, others, data).free_energy(model, draws, own, data, weight=weight)
