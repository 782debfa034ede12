"""What server and sites of FSGP say to each other. Training and prediction need sums over sites and no more."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.gp.sums import SparseSums, WhitenedPosterior
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.messages import count_parameters
from fedgp_flower.typing import AnyShape


@message("query.statistics", summand=True)
class Statistics:
    """What follows from a site's rows at given kernel and inducing points (Guo et al. 2022, Eqs. 14-15, whitened)."""

    gram: Float[ndarray, "M M"] = leaves("A = W Wᵀ, W = L⁻¹ k(Z, X)", symmetric=True)
    projection: Float[ndarray, " M"] = leaves("b = W y")
    target_squares: Float[ndarray, ""] = leaves("s = yᵀ y")
    prior_variance: Float[ndarray, ""] = leaves("c = Σ k(x, x)")
    count: Float[ndarray, ""] = leaves("number of rows")

    def num_parameters(self) -> int:
        """M."""
        return len(self.projection)

    @staticmethod
    def of(sums: SparseSums) -> Statistics:
        """From sums as tensors."""
        arrays = sums.to_arrays()
        return Statistics(**{name.removeprefix("sums."): array for name, array in arrays.items()})

    def sums(self) -> SparseSums:
        """As tensors."""
        return SparseSums.from_arrays({f"sums.{name}": array for name, array in vars(self).items()})

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, rows: int) -> str | None:
        """Why sums cannot come from so many rows, or None: necessary conditions that every honest site meets.

        A = W Wᵀ is positive semi-definite, tr A ≤ Σ k(x, x) because the whitened projection cannot explain more than
        the prior variance, and b = W y gives bᵀ A⁻¹ b ≤ yᵀ y.
        """
        slack, size = 1e-6, max(float(np.abs(self.gram).max()), 1e-300)
        if float(self.count) != rows:
            return f"sums of {float(self.count):g} rows, introduced itself with {rows}"
        if np.trace(self.gram / size) > float(self.prior_variance) / size * (1 + slack):
            return "`gram` explains more than the prior variance of the rows"
        scaled = self.gram / size + slack * np.eye(len(self.gram))  # units first: a liar's numbers may be huge
        try:
            factor = np.linalg.cholesky(scaled)
        except np.linalg.LinAlgError:
            return "`gram` is not a Gram matrix"
        scaled_projection = torch.from_numpy(self.projection / math.sqrt(size))[:, None]
        explained = torch.linalg.solve_triangular(torch.from_numpy(factor), scaled_projection, upper=False)
        if not float(explained.norm()) <= math.sqrt(max(float(self.target_squares), 0.0)) * (1 + slack):
            return "`projection` is larger than the targets allow"
        return None


@message()
class Adjoints:
    """The parameters, and the derivatives of the pooled bound by the sums: what a site needs for its share of dF/dw."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")
    gram: Float[ndarray, "M M"] = leaves("∂F/∂A", symmetric=True)
    projection: Float[ndarray, " M"] = leaves("∂F/∂b")
    prior_variance: Float[ndarray, ""] = leaves("∂F/∂c")


@message("train.gradient", summand=True)
class GradientShare:
    """⟨K̄_zx, dK_zx/dw⟩ + ∂F/∂c dc/dw of a site's rows; what comes through K_zz follows from the totals."""

    values: Mapping[str, AnyShape] = leaves("a site's share of dF/dw, under each parameter's name", as_sent=True)

    def num_parameters(self) -> int:
        """M and hyperparameters."""
        return count_parameters(self.values)


@message()
class PooledPosterior:
    """Parameters, and q(v) = N(m, S) of the whitened inducing values v = L⁻¹ f(Z): all that predicts."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")
    mean: Float[ndarray, " M"] = leaves("m")
    covariance: Float[ndarray, "M M"] = leaves("S", symmetric=True)

    def whitened(self) -> WhitenedPosterior:
        """As tensors."""
        return WhitenedPosterior.from_arrays({"inducing.mean": self.mean, "inducing.covariance": self.covariance})
