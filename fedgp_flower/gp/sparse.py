"""Sums over rows of a sparse GP, and their gradients by formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.linalg import kernel_cholesky, symmetric
from fedgp_flower.gp.models import CHUNK, LOCATIONS, SparseGP
from fedgp_flower.gp.placement import to_array, to_arrays
from fedgp_flower.gp.sums import Adjoints, SparseSums, bound_gradient
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets

KEPT = 2**23
"""Numbers that a :class:`Whitener` keeps of projected rows, for the gradient that is mostly asked for next."""
BLOCK = 128
"""Rows of W Wᵀ formed at once, as far as the diagonal: above it they are those below."""


def _gram(cross: Tensor) -> Tensor:
    """W Wᵀ [M, M] of W [M, N]."""
    size = cross.shape[0]
    if size <= BLOCK:
        return torch.mm(cross, cross.mT)
    gram = cross.new_empty(size, size)
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        torch.mm(cross[start:end], cross[:end].mT, out=gram[start:end, :end])
        gram[:start, start:end] = gram[start:end, :start].mT
    return gram


@dataclass(frozen=True, slots=True)
class _Closed:
    """The squared exponential at fixed parameters, log k(z, x) = [x, x², 1]·c(z), and its derivatives.

    c(z) = [z/ℓ², −1/2ℓ², log a² − ½ |z/ℓ|²], so that rows are multiplied once, both on the way in and back.
    """

    exponents: Tensor  # c(Z)  [2D + 1, M]
    variance: Tensor  # a²  []
    most: float  # log a²
    points: Array  # Z  [M, D]
    inverse: Array  # 1/ℓ²  [D] or [1]

    @staticmethod
    def of(model: SparseGP) -> _Closed | None:
        """At the parameters of a model; None where its kernel is another one."""
        known = model.closed_form()
        if known is None:
            return None
        (scale, variance), points = known, model.inducing_points
        most, inverse = variance.log(), scale.square().reciprocal()
        slopes = points * inverse
        heights = most - (points * slopes).sum(1, keepdim=True) / 2
        exponents = torch.cat((slopes, (-inverse / 2).expand_as(slopes), heights), 1).mT
        return _Closed(exponents, variance, float(most), *to_arrays(points.clone(), inverse[0]))  # the model moves on

    def covariance(self, moments: Tensor) -> Tensor:
        """K_zx of rows [x, x², 1], as [N, M]: triangular solves take its transpose as it stands."""
        return torch.mm(moments, self.exponents).clamp_(max=self.most).exp_()

    def pulled_back(self, products: Array, by_variance: Array, *, both: bool = False) -> NamedArrays:
        """Derivatives by wire name of what comes through k(Z, X), from H = K̄ ⊙ K [M, N].

        With r = H 1, q = Hᵀ 1 and G = H X − r ⊙ Z: ∂F/∂log a² = Σ H + ``by_variance``, ∂F/∂Z = G/ℓ², twice that where
        X is Z, and ∂F/∂log ℓ_d = [Σ_n q x² − Σ_m z ⊙ (H X + G)]/ℓ².
        ``products`` are H [X, X², 1]  [M, 2D + 1]; with ``both`` X is Z; ``by_variance`` comes through Σ k(x, x).
        """
        count = self.points.shape[1]
        moved, totals = products[:, :count], products[:, count:].sum(0)
        towards = moved - products[:, -1:] * self.points
        by_input = (totals[:-1] - (self.points * (moved + towards)).sum(0)) * self.inverse
        by_points = towards * self.inverse
        return {
            LOCATIONS: 2 * by_points if both else by_points,
            "kernel.log_lengthscale": by_input if len(self.inverse) > 1 else by_input.sum(keepdims=True),
            "kernel.log_outputscale": totals[-1:] + by_variance,
        }


def _moments(rows: Tensor) -> Tensor:
    """[x, x², 1]  [N, 2D + 1]."""
    return torch.cat((rows, rows.square(), rows.new_ones(rows.shape[0], 1)), 1)


@dataclass(frozen=True, slots=True)
class _Projected:
    """Some rows as they stand to the inducing points, without their targets."""

    inputs: Tensor  # [N, D]
    cross: Tensor  # W = L⁻¹ K_zx  [M, N]
    variance: Tensor  # Σ k(x, x)  []
    closed: tuple[Tensor, Tensor] | None = None
    """Of the squared exponential [x, x², 1] [N, 2D + 1] and K_zx [M, N]."""


class Whitener:
    """L Lᵀ = K_zz + jitter at a model's parameters, with which rows of any number of sites are projected: W = L⁻¹ K_zx.

    What rows became is kept from the sums to the gradient, as far as there is ``room`` for: two numbers for each of W.
    """

    def __init__(self, model: SparseGP, room: int = KEPT) -> None:
        with torch.no_grad():
            self.factor = model.factor().contiguous()
            self.closed = _Closed.of(model)
        self.room = room
        self._adjoints: tuple[Adjoints, _Pulled] | None = None
        self._kept: dict[tuple[int, int], _Projected] = {}

    def pulled(self, adjoints: Adjoints) -> _Pulled:
        """Derivatives through L⁻ᵀ; kept, since in one process the next site mostly comes with the same ones."""
        if self._adjoints is None or not self._adjoints[0].same(adjoints):
            self._adjoints = adjoints, _Pulled.through(self.factor, adjoints)
        return self._adjoints[1]

    def projected(self, model: SparseGP, inputs: Rows, *, last: bool = False) -> Iterator[_Projected]:
        """Rows chunk by chunk; the last time that they are asked for nothing of them is kept."""
        for chunk in inputs.split(CHUNK):
            key = chunk.data_ptr(), chunk.shape[0]  # no other rows stand there for as long as these are kept
            found = self._kept.pop(key, None)
            self.room += 2 * found.cross.numel() if found else 0
            found = found or self._project(model, chunk)
            if not last and 2 * found.cross.numel() <= self.room:
                self._kept[key] = found
                self.room -= 2 * found.cross.numel()
            yield found

    def _project(self, model: SparseGP, inputs: Tensor) -> _Projected:
        if self.closed is None:
            with torch.no_grad():
                covariance, variances = model.covariances(inputs)
            return _Projected(inputs, self._whitened(covariance), variances.sum())
        moments = _moments(inputs)
        covariance = self.closed.covariance(moments).mT
        variance = self.closed.variance * inputs.shape[0]
        return _Projected(inputs, self._whitened(covariance), variance, (moments, covariance))

    def _whitened(self, covariance: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, covariance, upper=False)


def pooled_sums(model: SparseGP, inputs: Rows, targets: Targets, whitener: Whitener | None = None) -> SparseSums:
    """The sums of any number of rows, chunk by chunk, without a graph; with the model's whitener where there is one."""
    chunks = (whitener or Whitener(model)).projected(model, inputs, last=whitener is None)
    total: list[Tensor] = []
    for rows, y in zip(chunks, targets.split(CHUNK), strict=True):
        part = [_gram(rows.cross), torch.mv(rows.cross, y), torch.dot(y, y), rows.variance]  # A, b, s, c
        total = [before + more for before, more in zip(total, part, strict=True)] if total else part
    return SparseSums(*to_arrays(*total, targets.new_tensor(float(len(targets)))))


@dataclass(frozen=True, slots=True)
class _Pulled:
    """Adjoints behind the triangular solve that rows go through: formed once for all rows."""

    gram: Tensor  # 2 ∂F/∂A L⁻¹  [M, M]
    projection: Tensor  # L⁻ᵀ ∂F/∂b  [M]

    @staticmethod
    def through(factor: Tensor, adjoints: Adjoints) -> _Pulled:
        """Through L."""
        by_gram, by_projection = (torch.as_tensor(part).to(factor) for part in (adjoints.gram, adjoints.projection))
        gram = torch.linalg.solve_triangular(factor, 2 * by_gram, upper=False, left=False)
        return _Pulled(gram, torch.linalg.solve_triangular(factor.mT, by_projection[:, None], upper=True)[:, 0])

    def of_rows(self, cross: Tensor, products: Tensor) -> Tensor:
        """L⁻ᵀ (2 ∂F/∂A C + ∂F/∂b dᵀ) transposed  [N, M], of C [M, N] and d [N].

        With C = W, d = y it is the adjoint of K_zx, with C = A, d = b that of K_zx times Wᵀ.
        """
        return torch.outer(products, self.projection).addmm_(cross.mT, self.gram)


def rows_gradient(
    model: SparseGP, inputs: Rows, targets: Targets, adjoints: Adjoints, whitener: Whitener | None = None
) -> NamedArrays:
    """The part of dF/dw that needs rows, by wire name: ⟨K̄_zx, dK_zx/dw⟩ + ∂F/∂c dc/dw.

    K̄_zx = L⁻ᵀ (2 ∂F/∂A W + ∂F/∂b yᵀ). No row touches the Cholesky factor: see :func:`inducing_gradient`.
    """
    whitener = whitener or Whitener(model)
    total, pulled = _Gradient(model), whitener.pulled(adjoints)
    by_variance = torch.as_tensor(adjoints.prior_variance).to(inputs)
    for rows, y in zip(whitener.projected(model, inputs, last=True), targets.split(CHUNK), strict=True):
        incoming = pulled.of_rows(rows.cross, y)  # [N, M]
        if rows.closed is not None and whitener.closed is not None:
            moments, covariance = rows.closed
            products = torch.mm(incoming.mul_(covariance.mT).mT, moments)
            total.take(whitener.closed.pulled_back(*to_arrays(products, by_variance * rows.variance)))
            continue
        cross, variances = model.covariances(rows.inputs)
        total.add([cross, variances], [incoming.mT, by_variance.expand_as(variances)])
    return total.arrays


def inducing_gradient(model: SparseGP, sums: SparseSums, adjoints: Adjoints) -> NamedArrays:
    """The part of dF/dw that comes through K_zz = L Lᵀ, from totals alone.

    With P = K̄_zx Wᵀ = L⁻ᵀ (2 ∂F/∂A A + ∂F/∂b bᵀ) summed over all rows, L̄ = −tril P and
    K̄_zz = sym(L⁻ᵀ Φ(Lᵀ L̄) L⁻¹), where Φ takes the lower triangle and half the diagonal (Murray 2016).
    """
    with torch.no_grad():
        total, closed = _Gradient(model), _Closed.of(model)
    with torch.set_grad_enabled(closed is None):
        covariance, variance = model.inducing_covariance()
    with torch.no_grad():
        factor = kernel_cholesky(covariance, variance=variance, jitter=model.jitter)
        gram, projection = (torch.as_tensor(part).to(factor) for part in (sums.gram, sums.projection))
        products = _Pulled.through(factor, adjoints).of_rows(gram, projection).mT
        inner = -(factor.mT @ products.tril()).tril()
        inner.diagonal().mul_(0.5)
        left = torch.linalg.solve_triangular(factor.mT, inner, upper=True)
        incoming = symmetric(torch.linalg.solve_triangular(factor, left, upper=False, left=False))
        by_variance = model.jitter * incoming.diagonal().sum()
        if closed is not None:
            moments = torch.mm(incoming.mul_(covariance), _moments(model.inducing_points))
            total.take(closed.pulled_back(*to_arrays(moments, by_variance * variance), both=True))
    if closed is None:
        total.add([covariance, variance], [incoming, by_variance])
    return total.arrays


class _Gradient:
    """A sum of pull-backs, by wire name; what does not move, as the noise, has zeros."""

    def __init__(self, model: SparseGP) -> None:
        self.parameters = model.wire_parameters()
        self.arrays: NamedArrays = {name: np.zeros(value.shape) for name, value in self.parameters.items()}

    def add(self, outputs: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Pull some outputs' adjoints back to the parameters."""
        grads = torch.autograd.grad(outputs, list(self.parameters.values()), incoming, allow_unused=True)
        named = zip(self.parameters, grads, strict=True)
        self.take({name: to_array(grad) for name, grad in named if grad is not None})

    def take(self, grads: Mapping[str, Array]) -> None:
        """Add derivatives that are known."""
        for name, grad in grads.items():
            self.arrays[name] += np.reshape(grad, self.arrays[name].shape)


class _ChunkedBound(torch.autograd.Function):
    """Value and gradient of the collapsed bound in two passes over chunks, so that memory does not grow with N."""

    @staticmethod
    def forward(ctx: Any, model: SparseGP, inputs: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        """Sums of all chunks, then the bound."""
        del parameters
        ctx.whitener = Whitener(model)
        sums = pooled_sums(model, inputs, targets, ctx.whitener)
        bound = bound_gradient(sums, float(model.noise.detach().log()))
        ctx.model, ctx.inputs, ctx.targets, ctx.sums, ctx.bound = model, inputs, targets, sums, bound
        return torch.tensor(bound.value, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """The derivatives by the sums, pulled back through each chunk and through K_zz."""
        model, sums, bound = ctx.model, ctx.sums, ctx.bound
        with torch.enable_grad():
            shares = rows_gradient(model, ctx.inputs, ctx.targets, bound, ctx.whitener)
            through = inducing_gradient(model, sums, bound)
        shares["likelihood.log_noise"] += bound.log_noise
        scale = grad_outputs[0].item()
        whole = (scale * torch.as_tensor(shares[name] + through[name]).to(ctx.inputs) for name in shares)
        return None, None, None, *whole


def pooled_bound(model: SparseGP, inputs: Rows, targets: Targets) -> Tensor:
    """Titsias' bound of any number of rows, in nats, with its gradient in O(M² + M·CHUNK) memory."""
    value: Tensor = _ChunkedBound.apply(model, inputs, targets, *model.wire_parameters().values())
    return value
