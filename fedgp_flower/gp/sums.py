"""Additive sums of a sparse GP, and what follows from them: the collapsed bound, its gradient, the exact posterior.

With L Lᵀ = K_zz and W = L⁻¹ K_zx, whitened inducing values v = L⁻¹u ~ N(0, I) see the data of any number of sites only
through A = Σ W Wᵀ, b = Σ W y, s = Σ y², c = Σ k(x, x) and N. The whitening needs only parameters that everyone has, so
a server can form bound and posterior without a kernel.

References:
    Titsias, Variational learning of inducing variables in sparse Gaussian processes (AISTATS 2009).
    Gal, van der Wilk, Rasmussen, Distributed variational inference in sparse GP regression (NIPS 2014).
    Guo et al., Federated sparse Gaussian processes (2022), Eqs. 14-15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from fedgp_flower.gp.linalg import cholesky, symmetric
from fedgp_flower.typing import Array, NamedArrays, Scalar, Square, Vector

PREFIX = "sums."
INPUT_EDGES: Array = np.linspace(-6.0, 6.0, 41)
"""Bin edges of :func:`input_shape`, in standardised units: part of the message contract."""


@dataclass(frozen=True, slots=True)
class SparseSums:
    """Sufficient statistics of rows under fixed hyperparameters and inducing points; ``+`` pools them."""

    gram: Square  # A = Σ W Wᵀ  [M, M]
    projection: Vector  # b = Σ W y  [M]
    target_squares: Scalar  # s = Σ y²
    prior_variance: Scalar  # c = Σ k(x, x)
    count: Scalar  # N

    def __add__(self, other: SparseSums) -> SparseSums:
        return self._with(other, self.gram + other.gram)

    def __iadd__(self, other: SparseSums) -> SparseSums:
        return self._with(other, self.gram.add_(other.gram))

    def _with(self, other: SparseSums, gram: Square) -> SparseSums:
        return SparseSums(
            gram,
            self.projection + other.projection,
            self.target_squares + other.target_squares,
            self.prior_variance + other.prior_variance,
            self.count + other.count,
        )

    def to_arrays(self) -> NamedArrays:
        """The sums under their wire names ``sums.gram``, ``sums.projection`` and so on."""
        return {PREFIX + f.name: getattr(self, f.name).detach().cpu().double().numpy() for f in fields(self)}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> SparseSums:
        """The inverse of :meth:`to_arrays`."""
        return SparseSums(*(torch.as_tensor(arrays[PREFIX + f.name]).double() for f in fields(SparseSums)))

    @staticmethod
    def shapes(num_inducing: int) -> dict[str, tuple[int, ...]]:
        """The wire names with the shape each must have."""
        shapes: tuple[tuple[int, ...], ...] = ((num_inducing, num_inducing), (num_inducing,), (), (), ())
        return {PREFIX + f.name: shape for f, shape in zip(fields(SparseSums), shapes, strict=True)}


def collapsed_bound(sums: SparseSums, noise: Scalar) -> Scalar:
    """Titsias' bound on log p(y) of all rows behind the sums, in nats.

    F = -N/2 log 2πσ² - ½ log|B| - s/2σ² + bᵀB⁻¹b/2σ⁴ - (c - tr A)/2σ²,  B = I + A/σ²  (Guo et al. Eq. 9 times N).

    Args:
        sums: Sums at some hyperparameters and inducing points.
        noise: Noise variance σ², in squared units of y.

    Raises:
        NumericsError: if B is not positive definite, which means that ``sums.gram`` is not a Gram matrix.

    >>> one = torch.ones((), dtype=torch.float64)
    >>> sums = SparseSums(one.view(1, 1), one.view(1), one, one, one)  # one row x = z, y = 1, k(x, x) = 1
    >>> float(collapsed_bound(sums, one))  # log N(1 | 0, 2)
    -1.5155121234846454
    """
    factor = _factor(sums, noise)
    residual = torch.linalg.solve_triangular(factor, sums.projection[:, None], upper=False)[:, 0]  # [M]
    log_determinant = 2 * factor.diagonal().log().sum()
    fit = (sums.target_squares - residual.square().sum() / noise) / noise
    unexplained = (sums.prior_variance - sums.gram.diagonal().sum()) / noise
    return -0.5 * (sums.count * (2 * math.pi * noise).log() + log_determinant + fit + unexplained)


def collapsed_bound_value(sums: SparseSums, noise: float) -> float:
    """:func:`collapsed_bound` as a number."""
    return float(collapsed_bound(sums, torch.tensor(noise, dtype=torch.float64)))


def _factor(sums: SparseSums, noise: Scalar) -> Square:
    eye = torch.eye(sums.gram.shape[-1], dtype=sums.gram.dtype, device=sums.gram.device)
    return cholesky(eye + symmetric(sums.gram) / noise, of="B = I + A/σ²", hint="The sums are not those of real rows.")


@dataclass(frozen=True, slots=True)
class BoundGradient:
    """The bound and its derivatives by the sums and the noise: what sites need to finish the gradient by themselves."""

    value: float  # F, nats
    gram: Array  # ∂F/∂A  [M, M]
    projection: Array  # ∂F/∂b  [M]
    prior_variance: Array  # ∂F/∂c  []
    log_noise: float  # ∂F/∂ log σ², the sums held fixed


def bound_gradient(sums: SparseSums, log_noise: float) -> BoundGradient:
    """Value and derivatives of :func:`collapsed_bound`, as numbers a server sends on.

    With n = σ², d = B⁻¹b/n and c = Σ k(x, x): ∂F/∂A = (I − B⁻¹ − d dᵀ)/2n, ∂F/∂b = d/n, ∂F/∂c = −1/2n and
    ∂F/∂log n = −½ [N − M + tr B⁻¹ − (s − bᵀd + c − tr A)/n + dᵀd].

    Sites finish the chain rule, dF/dw = Σ_k [⟨∂F/∂A, dA_k/dw⟩ + ⟨∂F/∂b, db_k/dw⟩ + ∂F/∂c dc_k/dw].
    """
    noise = math.exp(log_noise)
    factor = _factor(sums, torch.tensor(noise, dtype=torch.float64))
    inverse = torch.cholesky_inverse(factor)  # it is part of the answer
    direction = torch.cholesky_solve(sums.projection[:, None], factor)[:, 0] / noise
    explained, trace = sums.projection @ direction, inverse.diagonal().sum()
    left = (sums.target_squares - explained + sums.prior_variance - sums.gram.diagonal().sum()) / noise
    determinant = 2 * factor.diagonal().log().sum()
    value = -0.5 * (sums.count * math.log(2 * math.pi * noise) + determinant + left)
    by_noise = -0.5 * (sums.count - len(factor) + trace - left + direction.square().sum())
    gram = torch.outer(direction, direction).add_(inverse).neg_()
    gram.diagonal().add_(1)
    by_variance = np.array(-0.5 / noise)
    return BoundGradient(
        float(value), (gram / (2 * noise)).numpy(), (direction / noise).numpy(), by_variance, float(by_noise)
    )


@dataclass(frozen=True, slots=True)
class WhitenedPosterior:
    """q(v) = N(mean, covariance) of whitened inducing values v = L⁻¹u."""

    mean: Vector  # [M]
    covariance: Square  # [M, M]

    def to_arrays(self) -> NamedArrays:
        """Under the wire names ``inducing.mean`` and ``inducing.covariance``."""
        return {"inducing.mean": self.mean.numpy(), "inducing.covariance": self.covariance.numpy()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> WhitenedPosterior:
        """The inverse of :meth:`to_arrays`."""
        return WhitenedPosterior(*(torch.as_tensor(arrays[f"inducing.{n}"]).double() for n in ("mean", "covariance")))


def exact_posterior(sums: SparseSums, noise: float) -> WhitenedPosterior:
    """The optimal q(v) = N(B⁻¹b/σ², B⁻¹) of all rows behind the sums (Guo et al. Eqs. 14-15, whitened)."""
    factor = _factor(sums, torch.tensor(noise, dtype=torch.float64))
    covariance = torch.cholesky_inverse(factor)  # the inverse is the answer here
    mean = torch.cholesky_solve(sums.projection[:, None], factor)[:, 0] / noise
    return WhitenedPosterior(mean, symmetric(covariance))


def input_shape(inputs: Array) -> NamedArrays:
    """Where standardised inputs [N, D] lie, additively: counts per column in fixed bins [D, B], and XᵀX [D, D].

    What lies outside the bins counts in the outermost ones.

    >>> int(input_shape(np.array([[0.0], [0.1]]))["input.histogram"].max())
    2
    """
    last = len(INPUT_EDGES) - 2
    bins = np.clip(np.digitize(inputs, INPUT_EDGES) - 1, 0, last)
    counts = [np.bincount(column, minlength=last + 1) for column in bins.T]
    return {"input.histogram": np.stack(counts).astype(np.int64), "input.products": inputs.T @ inputs}
