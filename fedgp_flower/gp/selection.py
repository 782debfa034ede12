"""Which of many candidate inducing points to keep, from totals at all of them: no row and no exchange is needed.

With K = k(Z, Z) and G = Σ k(Z, x) k(x, Z), the rows' variance that a candidate j explains beyond those taken before is
G̃_jj/K̃_jj, where K̃ and G̃ are what those left of K and G; taking j leaves, with u = K̃_:j/K̃_jj,

    K̃ ← K̃ − K̃_jj u uᵀ,   G̃ ← G̃ − u G̃_j: − G̃_:j uᵀ + G̃_jj u uᵀ.

The sums of the points taken are those of the candidates with the others' rows left out of K_zx.

References:
    Farahat et al., Greedy column subset selection for large-scale data sets (2015).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.linalg import symmetric
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.typing import Array, Indices

LEFT = 1e-4
"""Share of its prior variance that must be left of a candidate to be taken before others."""


def explaining(covariance: Array, products: Array, count: int) -> Indices:
    """Candidates that explain most of the rows' variance, taken one by one, in the order of the candidates [P].

    Args:
        covariance: K of the candidates [C, C].
        products: G, of all rows [C, C].
        count: P, how many to take.
    """
    left, explained = covariance.copy(), products.copy()
    least = LEFT * left.diagonal()
    taken: list[int] = []
    for _ in range(count):
        variances = left.diagonal()
        gains = np.where(variances > least, explained.diagonal() / np.maximum(variances, least), -1.0)
        gains[taken] = -2.0
        best = int(gains.argmax())
        taken.append(best)
        column, moved = left[:, best].copy(), explained[:, best].copy()
        share = column / max(column[best], least[best])
        explained -= np.outer(share, moved) + np.outer(moved, share) - moved[best] * np.outer(share, share)
        left -= np.outer(column, share)
    return np.sort(taken)


def products_of(sums: SparseSums, factor: Tensor) -> Tensor:
    """G = L A Lᵀ [C, C]."""
    return symmetric(factor @ sums.gram @ factor.mT)


def restricted(sums: SparseSums, factor: Tensor, kept: Indices, new_factor: Tensor) -> SparseSums:
    """The sums of some of the inducing points from those of all: A₁ = T A Tᵀ and b₁ = T b with T = L₁⁻¹ L₁:.

    L₁: are the rows of L that stay, so that L₁: L₁:ᵀ = L₁ L₁ᵀ: the rows of T are orthonormal, and rounding stays small
    however near K is to being singular.

    Args:
        sums: At all candidates.
        factor: L, of all candidates [C, C].
        kept: Which ones stay [P].
        new_factor: L₁, of those alone [P, P].
    """
    turned = torch.linalg.solve_triangular(new_factor, factor[torch.from_numpy(kept)], upper=False)
    gram, projection = symmetric(turned @ sums.gram @ turned.mT), turned @ sums.projection
    return SparseSums(gram, projection, sums.target_squares, sums.prior_variance, sums.count)
