"""Sums over rows of a sparse GP, and the analytical gradients of functions of these sums."""

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

from fedgp_flower.gp.kernels import L1, Warped, warped
from fedgp_flower.gp.linalg import kernel_cholesky, symmetric
from fedgp_flower.gp.models import CHUNK, LOCATIONS, LOG_NOISE, SparseGP
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sums import BoundGradient, SparseSums, bound_gradient
from fedgp_flower.typing import NamedArrays, Rows, Targets

ROWS = "rows"
"""Name of the derivative by the rows X."""
CACHED_CHUNKS = 8
"""Number of chunks of projected rows that a whitener caches between the sums and the gradient."""


class _RBFTerm:
    """The kernel a² exp(−½ |(x − z)/ℓ|²) at fixed parameters, and its derivatives.

    log k(z, x) = [x, x², 1]·c(z) with c(z) = [z/ℓ², −1/2ℓ², log a² − ½ |z/ℓ|²], so that the covariance and each
    derivative take one matrix product with the rows.
    """

    def __init__(self, kernel: ScaleKernel, inducing: Tensor) -> None:
        self.points = inducing.numpy().T.copy()  # Zᵀ  [D, M]; a copy, since the model may change
        self.log_scale = float(kernel.raw_outputscale.detach())  # log a²
        self.inverse = np.exp(-2 * kernel.base_kernel.raw_lengthscale.detach().numpy().T)  # 1/ℓ²  [D, 1] or [1, 1]
        linear = self.points * self.inverse
        constant = self.log_scale - (self.points * linear).sum(0, keepdims=True) / 2
        self.exponents = np.concatenate((linear, np.broadcast_to(-self.inverse / 2, linear.shape), constant))  # c(Z)

    def covariance(self, rows: ndarray) -> tuple[ndarray, ndarray]:
        """Return K_xz [N, M], transposed for the triangular solves, and [x, x², 1] [N, 2D + 1] for the derivatives."""
        moments = np.concatenate((rows, rows * rows, np.ones((len(rows), 1), rows.dtype)), 1)
        logarithms = moments @ self.exponents
        np.minimum(logarithms, self.log_scale, out=logarithms)
        return np.exp(logarithms, out=logarithms), moments

    def pulled_back(self, moments: ndarray, adjoint: ndarray, *, at_points: bool) -> NamedArrays:
        """Return the derivatives through k(Z, X) from Hᵀ = (K̄ ⊙ K)ᵀ [N, M] and [X, X², 1].

        With r = H 1, q = Hᵀ 1 and G = H X − r ⊙ Z: ∂F/∂log a² = Σ H, ∂F/∂Z = G/ℓ², doubled for X = Z (``at_points``),
        and ∂F/∂log ℓ_d = [Σ_n q x² − Σ_m z ⊙ (H X + G)]/ℓ². For X ≠ Z also ∂F/∂X = (Hᵀ Z − q ⊙ X)/ℓ².
        """
        count, products = len(self.points), (moments.T @ adjoint).astype(np.float64, copy=False)  # [2D + 1, M]
        first, second = products[:count], products[count:-1]  # H X, Σ_n q x²
        centred = first - products[-1] * self.points  # G
        by_input = (second - self.points * (first + centred)).sum(1) * self.inverse[:, 0]
        by_points = (centred * self.inverse).T
        by_length = by_input[None] if len(self.inverse) > 1 else by_input.sum().reshape(1, 1)
        named = {LOCATIONS: by_points, "log_outputscale": products[-1].sum(), "log_lengthscale": by_length}
        if at_points:
            return {**named, LOCATIONS: 2 * by_points}
        by_rows = (adjoint @ self.points.T - adjoint.sum(1, keepdims=True) * moments[:, :count]) * self.inverse.T
        return {**named, ROWS: by_rows}


class _L1Term:
    """The kernel ``l1``, a² e^(−d) with d = Σ |x − z|/ℓ, at fixed parameters, and its derivatives."""

    def __init__(self, kernel: ScaleKernel, inducing: Tensor) -> None:
        self.lengths = kernel.base_kernel.lengthscale.detach().clone()  # ℓ  [1, D] or [1, 1]
        self.points = inducing / self.lengths  # Z/ℓ  [M, D]
        self.log_scale = float(kernel.raw_outputscale.detach())  # log a²

    def covariance(self, rows: ndarray) -> tuple[ndarray, tuple[Tensor, ...]]:
        """Return K_xz [N, M], and X/ℓ, Z/ℓ and d for the derivatives."""
        with torch.enable_grad():
            left = (torch.from_numpy(rows) / self.lengths).requires_grad_()
            right = self.points.detach().requires_grad_()
            distances = torch.cdist(left, right, p=1)
        return np.exp(self.log_scale - distances.detach().numpy()), (left, right, distances)

    def pulled_back(self, cache: tuple[Tensor, ...], adjoint: ndarray, *, at_points: bool) -> NamedArrays:
        """Return the derivatives through k(Z, X) from Hᵀ = (K̄ ⊙ K)ᵀ [N, M], with ∂F/∂d = −H."""
        rows, points, distances = cache
        by_rows, by_points = torch.autograd.grad(distances, cache[:2], -torch.from_numpy(adjoint), retain_graph=True)
        by_length = -(rows * by_rows).sum(0).detach() - (points * by_points).sum(0).detach()
        by_length = (by_length if self.lengths.numel() > 1 else by_length.sum()).reshape(self.lengths.shape)
        by_points = (by_points + by_rows if at_points else by_points) / self.lengths
        named = {LOCATIONS: by_points, "log_outputscale": adjoint.sum(), "log_lengthscale": by_length}
        named |= {} if at_points else {ROWS: by_rows / self.lengths}
        return {name: np.asarray(share, dtype=np.float64) for name, share in named.items()}


CLOSED_FORMS: Mapping[type, type[_RBFTerm] | type[_L1Term]] = {RBFKernel: _RBFTerm, L1: _L1Term}


@dataclass(frozen=True, slots=True)
class _ClosedForm:
    """A sum of kernels with analytical derivatives, at fixed parameters, with or without a warp of the inputs."""

    terms: Mapping[str, _RBFTerm | _L1Term]
    """Terms by the prefix of their parameters in messages."""
    inducing: Tensor  # Z before the warp  [M, D]
    log_slopes: Tensor | None
    """ω of the warp [1, D]; None without a warp."""

    @staticmethod
    def of(model: SparseGP) -> _ClosedForm | None:
        """Return the closed form of a model's kernel; None on a GPU or if a term has no closed form."""
        kernel, inducing, log_slopes = model.kernel, model.inducing_points.detach().clone(), None
        points = inducing
        if isinstance(kernel, Warped):
            log_slopes, kernel = kernel.raw_warp.detach().clone(), kernel.inner
            points = warped(inducing, log_slopes)
        named = {"kernel": kernel}
        if isinstance(kernel, AdditiveKernel):
            named = {f"kernel.kernels.{number}": term for number, term in enumerate(kernel.kernels)}
        terms = {}
        for name, term in named.items():
            kind = CLOSED_FORMS.get(type(term.base_kernel)) if isinstance(term, ScaleKernel) else None
            if kind is None or inducing.is_cuda:
                return None
            terms[name] = kind(term, points)
        return _ClosedForm(terms, inducing, log_slopes)

    @property
    def variance(self) -> float:
        """k(x, x), the same for every x."""
        return sum(math.exp(term.log_scale) for term in self.terms.values())

    def covariances(self, rows: Tensor) -> list[tuple[ndarray, Any]]:
        """Return K_xz [N, M] of every term, with a cache for its derivatives."""
        rows = rows if self.log_slopes is None else warped(rows, self.log_slopes)
        return [term.covariance(rows.numpy()) for term in self.terms.values()]

    def pulled_back(
        self, terms: Sequence[tuple[ndarray, Any]], incoming: ndarray, by_variance: float, rows: Tensor | None = None
    ) -> NamedArrays:
        """Return the derivatives by wire name, from the adjoints of K_xz [N, M] and k(x, x).

        ``terms`` are the :meth:`covariances` of ``rows`` [N, D]; None means the inducing points.
        """
        by_points, by_rows, shares = np.zeros(()), np.zeros(()), {LOG_NOISE: np.zeros(1)}
        for (name, term), (covariance, cache) in zip(self.terms.items(), terms, strict=True):
            by_term = term.pulled_back(cache, incoming * covariance, at_points=rows is None)
            by_points = by_points + by_term.pop(LOCATIONS)
            by_rows = np.asarray(by_rows + by_term.pop(ROWS, 0.0))
            by_term["log_outputscale"] = by_term["log_outputscale"] + by_variance * math.exp(term.log_scale)
            shares |= {f"{name}.{leaf}": np.asarray(share) for leaf, share in by_term.items()}
        if self.log_slopes is not None:
            by_points, shares["kernel.log_warp"] = self._through_warp(by_points, rows, by_rows)
        return {LOCATIONS: np.asarray(by_points), **shares}

    @torch.enable_grad()
    def _through_warp(self, by_points: ndarray, rows: Tensor | None, by_rows: ndarray) -> tuple[ndarray, ndarray]:
        """Return the derivatives by Z [M, D] and ω [1, D] from those by g(Z) [M, D] and, with rows, g(X) [N, D]."""
        assert self.log_slopes is not None
        points, log_slopes = self.inducing.detach().requires_grad_(), self.log_slopes.detach().requires_grad_()
        outputs, adjoints = [warped(points, log_slopes)], [torch.as_tensor(by_points).to(points)]
        if rows is not None:
            outputs, adjoints = [*outputs, warped(rows, log_slopes)], [*adjoints, torch.as_tensor(by_rows).to(points)]
        found = torch.autograd.grad(outputs, (points, log_slopes), adjoints)
        return found[0].double().numpy(), found[1].double().numpy()


def _sum_of(terms: Sequence[tuple[ndarray, Any]]) -> ndarray:
    """Return the sum of the terms' K_xz [N, M]."""
    return terms[0][0] if len(terms) == 1 else np.add.reduce([covariance for covariance, _ in terms])


@dataclass(frozen=True, slots=True)
class Projected:
    """Rows projected onto the inducing points, without their targets."""

    inputs: Tensor  # [N, D]
    cross: Tensor  # W = L⁻¹ K_zx  [M, N]
    variances: Tensor  # k(x, x)  [N]
    closed: list[tuple[ndarray, Any]] | None = None
    """K_xz of each term and its cache, if the kernel has a closed form."""


def gram(cross: Tensor) -> Tensor:
    """Return W Wᵀ [M, M] of W [M, N]; NumPy computes only half of it, as both factors are one array."""
    if cross.is_cuda:
        return torch.mm(cross, cross.mT)
    return torch.from_numpy(cross.numpy() @ cross.numpy().T)


class Whitener:
    """Project rows to W = L⁻¹ K_zx, L Lᵀ = K_zz + jitter, at fixed parameters of a model.

    Raise NumericsError if K_zz is not positive definite.
    """

    @torch.no_grad()
    def __init__(self, model: SparseGP, cached: int = CACHED_CHUNKS) -> None:
        self.closed = _ClosedForm.of(model)
        if self.closed is None:
            covariance, self.variance = model.inducing_covariance()
        else:
            self.terms = self.closed.covariances(model.inducing_points)
            covariance = torch.from_numpy(_sum_of(self.terms))
            self.variance = covariance.new_tensor(self.closed.variance)
        self.factor = kernel_cholesky(covariance, variance=self.variance, jitter=model.jitter).contiguous()
        self.max_cached = cached
        self._cache: dict[tuple[int, int], Projected] = {}

    def projected(self, model: SparseGP, inputs: Rows, *, last: bool = False) -> Iterator[Projected]:
        """Yield projected rows chunk by chunk; they are cached unless this is the ``last`` pass."""
        for chunk in inputs.split(CHUNK):
            key = chunk.data_ptr(), chunk.shape[0]  # unique while these rows are cached
            rows = self._cache.pop(key, None) or self._project(model, chunk)
            if not last and len(self._cache) < self.max_cached:
                self._cache[key] = rows
            yield rows

    def _project(self, model: SparseGP, inputs: Tensor) -> Projected:
        if self.closed is None:
            with torch.no_grad():
                cross, variances = model.covariances(inputs)
            cross = torch.linalg.solve_triangular(self.factor, cross, upper=False)
            return Projected(inputs, cross, variances)
        terms = self.closed.covariances(inputs)
        cross = torch.linalg.solve_triangular(self.factor, torch.from_numpy(_sum_of(terms)).mT, upper=False)
        return Projected(inputs, cross, inputs.new_full((len(inputs),), self.closed.variance), terms)

    def pulled_back(self, model: SparseGP, rows: Projected, incoming: Tensor, by_variances: Tensor) -> NamedArrays:
        """Return the derivatives through K_xz and k(x, x) by wire name, from their adjoints [N, M] and [N]."""
        if self.closed is not None and rows.closed is not None:
            return self.closed.pulled_back(rows.closed, incoming.numpy(), float(by_variances.sum()), rows.inputs)
        return by_autograd(model, model.covariances(rows.inputs), (incoming.mT, by_variances))

    def pulled_back_factor(self, model: SparseGP, product: Tensor) -> NamedArrays:
        """Return the derivatives through K_zz = L Lᵀ and its jitter by wire name, from Q [M, M] with L̄ = −tril L⁻ᵀ Q.

        K̄_zz = −sym(L⁻ᵀ Φ(Q) L⁻¹), where Φ takes the lower triangle and half the diagonal (Murray 2016). Q is changed.
        """
        inner = product.neg_().tril_()
        inner.diagonal().mul_(0.5)
        half = torch.linalg.solve_triangular(self.factor.mT, inner, upper=True)
        half = torch.linalg.solve_triangular(self.factor, half, upper=False, left=False)
        return self.pulled_back_points(model, half)

    def pulled_back_points(self, model: SparseGP, adjoint: Tensor) -> NamedArrays:
        """Return the derivatives through K_zz and its jitter by wire name, from an adjoint of K_zz [M, M]."""
        incoming = symmetric(adjoint)
        by_variance = model.jitter * incoming.diagonal().sum()
        if self.closed is None:
            return by_autograd(model, model.inducing_covariance(), (incoming, by_variance))
        return self.closed.pulled_back(self.terms, incoming.numpy(), float(by_variance))


def accumulated(total: NamedArrays, share: NamedArrays) -> NamedArrays:
    """Return the sum of two sets of arrays by name; an empty total stands for zero."""
    return {name: np.asarray(total[name] + array) for name, array in share.items()} if total else share


def pooled_sums(model: SparseGP, inputs: Rows, targets: Targets, whitener: Whitener | None = None) -> SparseSums:
    """Return the sums over rows, chunk by chunk and without a graph; a given ``whitener`` caches the rows."""
    chunks = (whitener or Whitener(model)).projected(model, inputs, last=whitener is None)
    total: list[Tensor] = []
    variance, count = 0.0, float(len(targets))
    for rows, y in zip(chunks, targets.split(CHUNK), strict=True):
        part = [gram(rows.cross), torch.mv(rows.cross, y), torch.dot(y, y)]  # A, b, s
        total = [before + more for before, more in zip(total, part, strict=True)] if total else part
        variance += float(rows.variances.sum())
    return SparseSums(*map(to_array, total), *map(np.asarray, (variance, count)))


def rows_gradient(
    model: SparseGP, inputs: Rows, targets: Targets, adjoints: BoundGradient, whitener: Whitener | None = None
) -> NamedArrays:
    """Return the part of dF/dw that depends on rows, by wire name: ⟨K̄_zx, dK_zx/dw⟩ + ∂F/∂c dc/dw.

    K̄_zx = L⁻ᵀ (2 ∂F/∂A W + ∂F/∂b yᵀ). The Cholesky factor is held fixed; see :func:`inducing_gradient`.
    """
    whitener = whitener or Whitener(model)
    factor = whitener.factor
    gram, projection = (factor.new_tensor(part) for part in (adjoints.gram, adjoints.projection))
    gram = torch.linalg.solve_triangular(factor, 2 * gram, upper=False, left=False)
    projection = torch.linalg.solve_triangular(factor.mT, projection[:, None], upper=True)[:, 0]
    total: NamedArrays = {}
    for rows, y in zip(whitener.projected(model, inputs, last=True), targets.split(CHUNK), strict=True):
        incoming = torch.outer(y, projection).addmm_(rows.cross.mT, gram)  # [N, M]
        by_variances = torch.full_like(y, float(adjoints.prior_variance))
        total = accumulated(total, whitener.pulled_back(model, rows, incoming, by_variances))
    return total


def inducing_gradient(
    model: SparseGP, sums: SparseSums, adjoints: BoundGradient, whitener: Whitener | None = None
) -> NamedArrays:
    """Return the part of dF/dw through K_zz = L Lᵀ, from totals, by wire name.

    Q = 2 ∂F/∂A A + ∂F/∂b bᵀ = Lᵀ K̄_zx Wᵀ summed over all rows; see :meth:`Whitener.pulled_back_factor`.
    """
    whitener = whitener or Whitener(model)
    parts = sums.gram, sums.projection, adjoints.gram, adjoints.projection
    gram, projection, by_gram, by_projection = (whitener.factor.new_tensor(part) for part in parts)
    product = torch.mm(by_gram, gram).mul_(2).addr_(by_projection, projection)
    return whitener.pulled_back_factor(model, product)


def by_autograd(model: SparseGP, outputs: Sequence[Tensor], incoming: Sequence[Tensor]) -> NamedArrays:
    """Return the gradients of the parameters by wire name, from adjoints of the outputs."""
    named = model.wire_parameters()
    grads = torch.autograd.grad(outputs, [*named.values()], incoming, allow_unused=True, materialize_grads=True)
    return dict(zip(named, map(to_array, grads), strict=True))


def with_gradient(value: float, model: SparseGP, gradient: NamedArrays) -> Tensor:
    """Return a scalar with this value and this gradient by the model's parameters; other parameters have none."""
    total = torch.tensor(value, dtype=torch.float64)
    for name, parameter in model.wire_parameters().items():
        if name in gradient:
            slope = torch.as_tensor(gradient[name]).to(parameter)
            total = total + (slope * (parameter - parameter.detach())).sum()
    return total


def pooled_bound(model: SparseGP, inputs: Rows, targets: Targets) -> Tensor:
    """Return Titsias' bound of all rows, in nats, with its gradient in O(M² + M·CHUNK) memory."""
    whitener = Whitener(model)
    sums = pooled_sums(model, inputs, targets, whitener)
    bound = bound_gradient(sums, model.log_noise)
    through_rows = rows_gradient(model, inputs, targets, bound, whitener)
    gradient = accumulated(through_rows, inducing_gradient(model, sums, bound, whitener))
    return with_gradient(bound.value, model, gradient | {LOG_NOISE: gradient[LOG_NOISE] + bound.log_noise})
