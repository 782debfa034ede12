"""Sums over rows of a sparse GP, and their gradients by formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from numpy import ndarray
from torch import Tensor

from fedgp_flower.gp.kernels import L1
from fedgp_flower.gp.linalg import kernel_cholesky
from fedgp_flower.gp.models import CHUNK, LOCATIONS, SparseGP
from fedgp_flower.gp.placement import to_arrays
from fedgp_flower.gp.sums import Adjoints, SparseSums, bound_gradient
from fedgp_flower.typing import NamedArrays, Rows, Targets

KEPT = 8
"""Chunks of projected rows that are kept from the sums to the gradient, which is mostly asked for next."""


@dataclass(frozen=True, slots=True)
class _Smooth:
    """The squared exponential at fixed parameters, log k(z, x) = [x, x², 1]·c(z), and its derivatives, by NumPy.

    c(z) = [z/ℓ², −1/2ℓ², log a² − ½ |z/ℓ|²], so that rows are multiplied once, both on the way in and back.
    """

    exponents: ndarray  # c(Z)  [2D + 1, M]
    most: float  # log a²
    points: ndarray  # Zᵀ  [D, M]
    inverse: ndarray  # 1/ℓ²  [D, 1] or [1, 1]

    @staticmethod
    def of(kernel: ScaleKernel, places: Tensor) -> _Smooth:
        """At the parameters of a kernel."""
        points, most = places.numpy().T.copy(), float(kernel.raw_outputscale.detach())  # the model moves on
        inverse = np.exp(-2 * kernel.base_kernel.raw_lengthscale.detach().numpy().T)
        slopes = points * inverse
        heights = most - (points * slopes).sum(0, keepdims=True) / 2
        exponents = np.concatenate((slopes, np.broadcast_to(-inverse / 2, slopes.shape), heights))
        return _Smooth(exponents, most, points, inverse)

    def covariance(self, rows: ndarray) -> tuple[ndarray, ndarray]:
        """K_zx of rows as [N, M], since triangular solves take its transpose as it stands, and [x, x², 1] for later."""
        moments = _moments(rows)
        logarithms = moments @ self.exponents
        np.minimum(logarithms, self.most, out=logarithms)
        return np.exp(logarithms, out=logarithms), moments

    def pulled_back(self, moments: ndarray, adjoint: ndarray, *, both: bool) -> NamedArrays:
        """Derivatives of what comes through k(Z, X), from Hᵀ = (K̄ ⊙ K)ᵀ [N, M] and [X, X², 1].

        With r = H 1, q = Hᵀ 1 and G = H X − r ⊙ Z: ∂F/∂log a² = Σ H, ∂F/∂Z = G/ℓ², twice that where X is Z (``both``),
        and ∂F/∂log ℓ_d = [Σ_n q x² − Σ_m z ⊙ (H X + G)]/ℓ².
        """
        count, products = len(self.points), (moments.T @ adjoint).astype(np.float64, copy=False)  # [2D + 1, M]
        moved, squares = products[:count], products[count:-1]
        towards = moved - products[-1] * self.points
        by_input = (squares - self.points * (moved + towards)).sum(1) * self.inverse[:, 0]
        by_points = (towards * self.inverse).T
        by_length = by_input[None] if len(self.inverse) > 1 else by_input.sum().reshape(1, 1)
        by_points = 2 * by_points if both else by_points
        return {LOCATIONS: by_points, "log_outputscale": products[-1].sum(), "log_lengthscale": by_length}


@dataclass(frozen=True, slots=True)
class _Rough:
    """The kernel ``l1`` at fixed parameters, log k(z, x) = log a² − d, d = Σ |x − z|/ℓ, and its derivatives."""

    points: Tensor  # Z/ℓ  [M, D]
    most: float  # log a²
    lengths: Tensor  # ℓ  [1, D] or [1, 1]

    @staticmethod
    def of(kernel: ScaleKernel, places: Tensor) -> _Rough:
        """At the parameters of a kernel."""
        lengths = kernel.base_kernel.lengthscale.detach().clone()
        return _Rough(places / lengths, float(kernel.raw_outputscale.detach()), lengths)

    def covariance(self, rows: ndarray) -> tuple[ndarray, tuple[Tensor, ...]]:
        """K_zx of rows as [N, M], and X/ℓ, Z/ℓ and d for later."""
        with torch.enable_grad():
            left = (torch.from_numpy(rows) / self.lengths).requires_grad_()
            right = self.points.detach().requires_grad_()
            distances = torch.cdist(left, right, p=1)
        return np.exp(self.most - distances.detach().numpy()), (left, right, distances)

    def pulled_back(self, kept: tuple[Tensor, ...], adjoint: ndarray, *, both: bool) -> NamedArrays:
        """Derivatives of what comes through k(Z, X), from Hᵀ = (K̄ ⊙ K)ᵀ [N, M] and ∂F/∂d = −H."""
        rows, points, distances = kept
        by_rows, by_points = torch.autograd.grad(distances, kept[:2], -torch.from_numpy(adjoint), retain_graph=True)
        by_length = -(rows * by_rows).sum(0).detach() - (points * by_points).sum(0).detach()
        by_length = (by_length if self.lengths.numel() > 1 else by_length.sum()).reshape(self.lengths.shape)
        by_points = (by_points + by_rows if both else by_points) / self.lengths
        named = {LOCATIONS: by_points, "log_outputscale": adjoint.sum(), "log_lengthscale": by_length}
        return {name: np.asarray(share, dtype=np.float64) for name, share in named.items()}


@dataclass(frozen=True, slots=True)
class _Closed:
    """A kernel that is a sum of terms with derivatives by formula."""

    terms: Mapping[str, _Smooth | _Rough]
    """By the front of the wire names of its parameters."""

    @staticmethod
    def of(model: SparseGP) -> _Closed | None:
        """At the parameters of a model on the CPU; None where its kernel has another term."""
        kernel, places = model.kernel, model.inducing_points.detach()
        named = {"kernel": kernel}
        if isinstance(kernel, AdditiveKernel):
            named = {f"kernel.kernels.{number}": term for number, term in enumerate(kernel.kernels)}
        terms = {}
        for name, term in named.items():
            kind = FORMULAS.get(type(term.base_kernel)) if isinstance(term, ScaleKernel) else None
            if kind is None or places.is_cuda:
                return None
            terms[name] = kind.of(term, places)
        return _Closed(terms)

    @property
    def variance(self) -> float:
        """The same k(x, x) for every x."""
        return sum(math.exp(term.most) for term in self.terms.values())

    def covariances(self, rows: ndarray) -> list[tuple[ndarray, Any]]:
        """K_zx [N, M] of every term, and what its derivatives need."""
        return [term.covariance(rows) for term in self.terms.values()]

    def pulled_back(
        self, found: Sequence[tuple[ndarray, Any]], incoming: ndarray, by_variance: float, *, both: bool = False
    ) -> NamedArrays:
        """Derivatives by wire name from the adjoint of k(Z, X), as [N, M], and of k(x, x)."""
        places, shares = np.zeros(()), {"likelihood.log_noise": np.zeros(1)}
        for (name, term), (covariance, kept) in zip(self.terms.items(), found, strict=True):
            by_term = term.pulled_back(kept, incoming * covariance, both=both)
            places = places + by_term.pop(LOCATIONS)
            by_term["log_outputscale"] = by_term["log_outputscale"] + by_variance * math.exp(term.most)
            shares |= {f"{name}.{leaf}": np.asarray(share) for leaf, share in by_term.items()}
        return {LOCATIONS: np.asarray(places), **shares}


FORMULAS: Mapping[type, type[_Smooth] | type[_Rough]] = {RBFKernel: _Smooth, L1: _Rough}


def _moments(rows: ndarray) -> ndarray:
    """[x, x², 1]  [N, 2D + 1]."""
    return np.concatenate((rows, rows * rows, np.ones((len(rows), 1), rows.dtype)), 1)


def _added(found: Sequence[tuple[ndarray, Any]]) -> ndarray:
    """K_zx of all terms [N, M]."""
    return found[0][0] if len(found) == 1 else np.add.reduce([covariance for covariance, _ in found])


@dataclass(frozen=True, slots=True)
class Projected:
    """Some rows as they stand to the inducing points, without their targets."""

    inputs: Tensor  # [N, D]
    cross: Tensor  # W = L⁻¹ K_zx  [M, N]
    variances: Tensor  # k(x, x)  [N]
    closed: list[tuple[ndarray, Any]] | None = None
    """What :class:`_Closed` found."""


def gram(cross: Tensor) -> Tensor:
    """W Wᵀ [M, M]; NumPy multiplies half of it, since both factors are one array."""
    if cross.is_cuda:
        return torch.mm(cross, cross.mT)
    return torch.from_numpy(cross.numpy() @ cross.numpy().T)


class Whitener:
    """L Lᵀ = K_zz + jitter at a model's parameters, with which rows of any sites are projected: W = L⁻¹ K_zx."""

    @torch.no_grad()
    def __init__(self, model: SparseGP, kept: int = KEPT) -> None:
        self.closed = _Closed.of(model)
        if self.closed is None:
            self.covariance, self.variance = model.inducing_covariance()
        else:
            self.found = self.closed.covariances(model.inducing_points.numpy())
            self.covariance = torch.from_numpy(_added(self.found))
            self.variance = self.covariance.new_tensor(self.closed.variance)
        self.factor = kernel_cholesky(self.covariance, variance=self.variance, jitter=model.jitter).contiguous()
        self.most = kept
        self._kept: dict[tuple[int, int], Projected] = {}

    def projected(self, model: SparseGP, inputs: Rows, *, last: bool = False) -> Iterator[Projected]:
        """Rows chunk by chunk; the last time that they are asked for nothing of them is kept."""
        for chunk in inputs.split(CHUNK):
            key = chunk.data_ptr(), chunk.shape[0]  # no other rows stand there for as long as these are kept
            found = self._kept.pop(key, None) or self._project(model, chunk)
            if not last and len(self._kept) < self.most:
                self._kept[key] = found
            yield found

    def _project(self, model: SparseGP, inputs: Tensor) -> Projected:
        if self.closed is None:
            with torch.no_grad():
                cross, variances = model.covariances(inputs)
            cross = torch.linalg.solve_triangular(self.factor, cross, upper=False)
            return Projected(inputs, cross, variances)
        found = self.closed.covariances(inputs.numpy())
        cross = torch.linalg.solve_triangular(self.factor, torch.from_numpy(_added(found)).mT, upper=False)
        return Projected(inputs, cross, inputs.new_full((len(inputs),), self.closed.variance), found)

    def pulled_back(self, model: SparseGP, rows: Projected, incoming: Tensor, by_variances: Tensor) -> NamedArrays:
        """Derivatives of what comes through k(Z, X), from its adjoint [N, M], and k(x, x), from its own [N]."""
        if self.closed is not None and rows.closed is not None:
            return self.closed.pulled_back(rows.closed, incoming.numpy(), float(by_variances.sum()))
        return _by_autograd(model, model.covariances(rows.inputs), (incoming.mT, by_variances))

    def pulled_back_at_points(self, model: SparseGP, incoming: Tensor) -> NamedArrays:
        """Derivatives of what comes through K_zz and its jitter, from its adjoint [M, M]."""
        by_variance = model.jitter * incoming.diagonal().sum()
        if self.closed is None:
            return _by_autograd(model, model.inducing_covariance(), (incoming, by_variance))
        return self.closed.pulled_back(self.found, incoming.numpy(), float(by_variance), both=True)


def pooled_sums(model: SparseGP, inputs: Rows, targets: Targets, whitener: Whitener | None = None) -> SparseSums:
    """The sums of any number of rows, chunk by chunk, without a graph; with the model's whitener where there is one."""
    chunks = (whitener or Whitener(model)).projected(model, inputs, last=whitener is None)
    total: list[Tensor] = []
    variance, count = 0.0, float(len(targets))
    for rows, y in zip(chunks, targets.split(CHUNK), strict=True):
        part = [gram(rows.cross), torch.mv(rows.cross, y), torch.dot(y, y)]  # A, b, s
        total = [before + more for before, more in zip(total, part, strict=True)] if total else part
        variance += float(rows.variances.sum())
    return SparseSums(*to_arrays(*total), *map(np.asarray, (variance, count)))


def rows_gradient(
    model: SparseGP, inputs: Rows, targets: Targets, adjoints: Adjoints, whitener: Whitener | None = None
) -> NamedArrays:
    """The part of dF/dw that needs rows, by wire name: ⟨K̄_zx, dK_zx/dw⟩ + ∂F/∂c dc/dw.

    K̄_zx = L⁻ᵀ (2 ∂F/∂A W + ∂F/∂b yᵀ). No row touches the Cholesky factor: see :func:`inducing_gradient`.
    """
    whitener = whitener or Whitener(model)
    factor = whitener.factor
    gram, projection = (factor.new_tensor(part) for part in (adjoints.gram, adjoints.projection))
    gram = torch.linalg.solve_triangular(factor, 2 * gram, upper=False, left=False)
    projection = torch.linalg.solve_triangular(factor.mT, projection[:, None], upper=True)[:, 0]
    total: NamedArrays = {}
    for rows, y in zip(whitener.projected(model, inputs, last=True), targets.split(CHUNK), strict=True):
        incoming = torch.outer(y, projection).addmm_(rows.cross.mT, gram)  # [N, M]
        share = whitener.pulled_back(model, rows, incoming, torch.full_like(y, float(adjoints.prior_variance)))
        total = {name: np.asarray(total[name] + more) for name, more in share.items()} if total else share
    return total


def inducing_gradient(
    model: SparseGP, sums: SparseSums, adjoints: Adjoints, whitener: Whitener | None = None
) -> NamedArrays:
    """The part of dF/dw that comes through K_zz = L Lᵀ, from totals alone.

    With Q = 2 ∂F/∂A A + ∂F/∂b bᵀ = Lᵀ K̄_zx Wᵀ summed over all rows, L̄ = −tril L⁻ᵀ Q and K̄_zz = −sym(L⁻ᵀ Φ(Q) L⁻¹),
    where Φ takes the lower triangle and half the diagonal (Murray 2016).
    """
    whitener = whitener or Whitener(model)
    factor = whitener.factor
    parts = sums.gram, sums.projection, adjoints.gram, adjoints.projection
    gram, projection, by_gram, by_projection = (factor.new_tensor(part) for part in parts)
    inner = torch.mm(by_gram, gram).neg_().addr_(by_projection, projection, alpha=-0.5).tril_()
    inner.diagonal().mul_(0.5)
    left = torch.linalg.solve_triangular(factor.mT, inner, upper=True)
    half = torch.linalg.solve_triangular(factor, left, upper=False, left=False)
    return whitener.pulled_back_at_points(model, half + half.mT)


def _by_autograd(model: SparseGP, outputs: Sequence[Tensor], incoming: Sequence[Tensor]) -> NamedArrays:
    """Outputs' adjoints pulled back to the parameters, by wire name."""
    named = model.wire_parameters()
    grads = torch.autograd.grad(outputs, [*named.values()], incoming, allow_unused=True, materialize_grads=True)
    return dict(zip(named, to_arrays(*grads), strict=True))


def pooled_bound(model: SparseGP, inputs: Rows, targets: Targets) -> Tensor:
    """Titsias' bound of any number of rows, in nats, with its gradient in O(M² + M·CHUNK) memory."""
    named, whitener = model.wire_parameters(), Whitener(model)
    sums = pooled_sums(model, inputs, targets, whitener)
    bound = bound_gradient(sums, model.log_noise)
    shares = rows_gradient(model, inputs, targets, bound, whitener)
    through = inducing_gradient(model, sums, bound, whitener)
    shares["likelihood.log_noise"] += bound.log_noise
    value = torch.tensor(bound.value, dtype=torch.float64)
    for name, parameter in named.items():
        slope = torch.as_tensor(shares[name] + through[name]).to(parameter.device)
        value = value + (slope * (parameter - parameter.detach())).sum()  # nothing is added but the gradient
    return value
