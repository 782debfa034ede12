"""Closed form of a hierarchical GP with Gaussian noise: sums of a site, the bound of all rows, and a Newton step.

With a site's deviation integrated out, y_k = Φ_kᵀ Z_G + e_k with e_k ~ N(0, R_k). Sufficient statistics of its rows
for Z_G ~ N(0, I) are

    P_k = Φ_k R_k⁻¹ Φ_kᵀ,   p_k = Φ_k R_k⁻¹ y_k,   c_k = log N(y_k | 0, R_k) − r_k / 2s_k² − ½z_k²,

where r_k is the summed variance given the inducing values, s_k the noise and z_k its whitened offset. With the sums,
q(Z_G) = N(m, S), S = (I + P)⁻¹, m = Sp, and F = c − ½ log|I + P| + ½ pᵀm, the bound of Titsias (2009) for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky, symmetric
from fedgp_flower.messages import unpacked
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.messages import ExpansionShare
from fedgp_flower.typing import Scalar, Square, Vector

BLOCK = 2**16
"""Entries of a matrix that are differentiated at once."""


class Expanded:
    """Σ⁻¹ and log|Σ| of a covariance Σ(θ) [N, N] to second order, without a pass through its factor.

    With S = Σ⁻¹ here, δ the change of θ and E = Σ_i δ_i ∂_iΣ

        Σ⁻¹ = S − S E S + S E S E S,    log|Σ| = −log|S| + tr(S E) − ½ Σ_ij δ_i δ_j tr(S ∂_iΣ S ∂_jΣ),

    without the curvature of Σ itself, which :meth:`bend` adds to a value. ``block`` computes Σ for some rows and
    columns; blocks of ``height`` rows and their derivatives fit into the cache of a processor.
    """

    def __init__(
        self, block: Callable[[slice, slice], Tensor], size: int, leaves: Iterable[Tensor], *, of: str, height: int = 0
    ) -> None:
        height = height or max(BLOCK // size, 1)
        ends = [(start, min(start + height, size)) for start in range(0, size, height)]
        self.lower = [(slice(start, end), slice(end)) for start, end in ends]
        self.block = block
        if len(ends) == 1:  # many blocks would fill the memory
            whole = block(*self.lower[0])
            self.block = lambda *_: whole
        self.leaves = [leaf for leaf in leaves if leaf.requires_grad and torch.is_grad_enabled()]
        count = sum(leaf.numel() for leaf in self.leaves)
        both = torch.empty(1 + count, size, size, dtype=torch.float64)  # Σ and ∂_iΣ
        for rows, columns in self.lower:
            here = self.block(rows, columns)
            both[0, rows, columns] = here.detach()
            if self.leaves:
                both[1:, rows, columns] = jacobian(here.flatten(), self.leaves).unflatten(1, here.shape)
            both[:, columns, rows] = both[:, rows, columns].mT.clone()
        matrix, self.parts = both[0], both[1:]
        self.factor = cholesky(matrix, of=of)
        self.log_det = 2 * self.factor.diagonal().log().sum()
        if self.leaves:
            self.step = flattened([leaf - leaf.detach() for leaf in self.leaves])
            self.inverse = torch.cholesky_inverse(self.factor)  # only for traces
            scaled = self.inverse @ self.parts
            curvature = torch.stack([scaled.flatten(1) @ part.mT.flatten() for part in scaled])
            traces = scaled.diagonal(dim1=1, dim2=2).sum(1)
            self.log_det = self.log_det + traces @ self.step - 0.5 * (curvature @ self.step) @ self.step

    @classmethod
    def whole(cls, matrix: Square, leaves: Iterable[Tensor], *, of: str) -> Expanded:
        """The expansion of a Σ that is computed at once."""
        return cls(lambda *at: matrix[at], len(matrix), leaves, of=of, height=len(matrix))

    def solve(self, rows: Float[Tensor, "A N"]) -> Float[Tensor, "N A"]:
        """Σ⁻¹ rowsᵀ at this θ."""
        return torch.cholesky_solve(rows.mT, self.factor)

    def inverse_diagonal(self) -> Float[Tensor, " N"]:
        """Diagonal of Σ⁻¹ at this θ."""
        eye = torch.eye(len(self.factor)).to(self.factor)
        return torch.linalg.solve_triangular(self.factor, eye, upper=False).square().sum(0)

    def products(self, rows: Float[Tensor, "A N"]) -> Float[Tensor, "A A"]:
        """Rows Σ⁻¹ rowsᵀ."""
        solved = self.solve(rows)
        self.within = rows @ solved
        if self.leaves:
            self.solved = solved.detach()
            first = self.parts @ self.solved  # ∂_iΣ S rowsᵀ
            second = torch.cholesky_solve(first.transpose(0, 1).flatten(1), self.factor)
            second = second.unflatten(1, first.shape[::2]).transpose(0, 1)
            moved, again = (torch.einsum("t,tna->na", self.step, part) for part in (first, second))
            cross = rows @ again
            self.within = self.within - cross - cross.mT + rows.detach() @ again + moved.mT @ again
        return self.within

    def bend(self, value: Scalar) -> Scalar:
        """½ Σ_ij δ_i δ_j ⟨∂value/∂Σ, ∂_i∂_jΣ⟩, by which the curvature of Σ changes a value."""
        of_log_det, of_products = torch.autograd.grad(value, [self.log_det, self.within], retain_graph=True)
        slope = symmetric(of_log_det * self.inverse - self.solved @ of_products @ self.solved.mT)
        slope, curvature = 2 * slope.tril(-1) + slope.diagonal().diag(), slope.new_zeros(len(self.step), len(self.step))
        for rows, columns in self.lower:
            part = (slope[rows, columns] * self.block(rows, columns)).sum()
            gradient = torch.autograd.grad(part, self.leaves, create_graph=True, materialize_grads=True)
            curvature += rows_of_jacobian(flattened(gradient), self.leaves).detach()
        return 0.5 * (curvature @ self.step) @ self.step


@dataclass(frozen=True, slots=True)
class Sums:
    """P, p and c of one site or of all sites."""

    precision: Square
    shift: Vector
    constant: Scalar
    bend: Callable[[Scalar], Scalar] | None = None
    """:meth:`Expanded.bend` of the covariance of the rows."""

    def expected(self, q_global: GlobalPosterior) -> Scalar:
        """J = E log p(y, z | Z_G) under q(Z_G) = N(m, S): c − ½ tr[(S + mmᵀ)P] + mᵀp."""
        value = self.constant - 0.5 * (second_moment(q_global) * self.precision).sum() + q_global.mean @ self.shift
        return value + self.bend(value) if self.bend is not None and value.requires_grad else value

    def flat(self) -> Float[Tensor, " Q"]:
        """Lower entries of P row by row, then p, then c."""
        rows, columns = torch.tril_indices(len(self.shift), len(self.shift))
        return torch.cat([self.precision[rows, columns], self.shift, self.constant[None]])


@dataclass(frozen=True, slots=True)
class BoundExpansion:
    """F to second order at θ, and q(Z_G)."""

    value: float
    gradient: Float[Tensor, " T"]
    hessian: Float[Tensor, "T T"]
    q_global: GlobalPosterior


def second_moment(q_global: GlobalPosterior) -> Square:
    """S + mmᵀ."""
    factor = q_global.factor()
    return factor @ factor.mT + torch.outer(q_global.mean, q_global.mean)


def posterior(precision: Square, shift: Vector) -> tuple[GlobalPosterior, Square]:
    """q(Z_G) = N(m, S) from P and p, and the Cholesky factor of I + P."""
    factor = cholesky(torch.eye(len(shift)).to(shift) + precision, of="precision of q(Z_G)")
    mean = torch.cholesky_solve(shift[:, None], factor)[:, 0]
    covariance = symmetric(torch.cholesky_inverse(factor))  # the inverse is the answer here
    return GlobalPosterior.normal(mean, covariance), factor


def transported(
    precision: Square, shift: Vector, before: Float[Tensor, "Z Z"], after: Float[Tensor, "Z Z"]
) -> tuple[Square, Vector]:
    """Predict P and p at another θ, with the information on the inducing values unchanged.

    With L Lᵀ = K_zz before and after, P becomes RᵀPR and p becomes Rᵀp, R = L_before⁻¹ L_after; linear terms stay.
    """
    size = len(before)
    rotation = torch.eye(len(shift)).to(shift)
    rotation[:size, :size] = torch.linalg.solve_triangular(before, after, upper=False)
    return symmetric(rotation.mT @ precision @ rotation), rotation.mT @ shift


def bound_of(share: ExpansionShare) -> float:
    """F of these rows alone: c − ½ log|I + P| + ½ pᵀ(I + P)⁻¹p."""
    precision, shift = torch.tensor(share.precision), torch.tensor(share.shift)
    q_global, factor = posterior(precision, shift)
    return float(share.constant) + float(0.5 * shift @ q_global.mean - factor.diagonal().log().sum())


def expansion(total: ExpansionShare) -> BoundExpansion:
    """Value, gradient and Hessian of F from sums over sites.

    With u_i = ∂_i p − ∂_i P m,

        ∂_i F = ∂_i c − ½ tr[(S + mmᵀ) ∂_i P] + mᵀ ∂_i p,   ∂²F = ΣJ″ + ½ tr(S ∂_i P S ∂_j P) + u_iᵀ S u_j.

    ``slopes`` has a row like :meth:`Sums.flat` for each entry of θ, with dz_k/dθ included. ``curvature`` is ΣJ″ at the
    q(Z_G) of the request, so that the Hessian is exact once q(Z_G) has converged.
    """
    parts = (total.precision, total.shift, total.constant, total.slopes, total.curvature)
    precision, shift, constant, slopes, curvature = (torch.tensor(part) for part in parts)
    sums = Sums(precision, shift, constant)
    q_global, factor = posterior(sums.precision, sums.shift)
    mean, size = q_global.mean, len(sums.shift)
    triangle = size * (size + 1) // 2
    precision = torch.tensor(unpacked(total.slopes[:, :triangle], size))
    shift, constant = slopes[:, triangle:-1], slopes[:, -1]
    value = sums.constant - factor.diagonal().log().sum() + 0.5 * sums.shift @ mean
    second = torch.einsum("tij,ij->t", precision, second_moment(q_global))
    gradient = constant - 0.5 * second + shift @ mean
    residual = shift - precision @ mean  # u [T, M]
    moved = torch.linalg.solve_triangular(factor, residual.mT, upper=False)
    left = torch.linalg.solve_triangular(factor, precision, upper=False)
    whole = torch.linalg.solve_triangular(factor, left.mT, upper=False).flatten(1)  # C⁻¹ ∂P C⁻ᵀ
    hessian = symmetric(curvature + 0.5 * whole @ whole.mT + moved.mT @ moved)
    return BoundExpansion(float(value), gradient, hessian, q_global)


def newton_step(
    gradient: Float[Tensor, " T"], hessian: Float[Tensor, "T T"], radius: float, units: Tensor | float = 1.0
) -> tuple[Float[Tensor, " T"], float]:
    """A Newton step in units of prior standard deviations, and the increase that it predicts to second order.

    Eigenvalues of −H have size at least 1, the curvature of the prior, and the step is shortened to entries of at most
    ``radius``, each counted in ``units``.
    """
    curvatures, directions = torch.linalg.eigh(-hessian)
    step = directions @ ((directions.mT @ gradient) / curvatures.abs().clamp(min=1.0))
    step = step * min(1.0, radius / max(float((units * step).abs().max()), 1e-300))
    return step, float(gradient @ step + 0.5 * step @ hessian @ step)


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """The tensors as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def rows_of_jacobian(values: Float[Tensor, " V"], leaves: list[Tensor]) -> Float[Tensor, "V T"]:
    """Derivatives of a few values, in one batched backward pass."""
    unit = torch.eye(len(values)).to(values)
    slopes = torch.autograd.grad(values, leaves, unit, retain_graph=True, is_grads_batched=True, allow_unused=True)
    pairs = zip(slopes, leaves, strict=True)
    zero = unit.new_zeros(len(unit), 1)
    return torch.cat([zero.expand(-1, at.numel()) if s is None else s.reshape(len(unit), -1) for s, at in pairs], 1)


def jacobian(values: Float[Tensor, " Q"], leaves: list[Tensor]) -> Float[Tensor, "T Q"]:
    """Derivatives of many values by a few numbers, from the Jacobian Jᵀ of Jᵀw in w."""
    probe = torch.zeros_like(values, requires_grad=True)
    pulled = flattened(torch.autograd.grad(values, leaves, probe, create_graph=True, materialize_grads=True))
    return rows_of_jacobian(pulled, [probe])


def second_order(sums: Sums, value: Scalar, leaves: list[Tensor]) -> tuple[Float[Tensor, "T Q"], Float[Tensor, "T T"]]:
    """Derivatives of sums, flat as in :meth:`Sums.flat`, and second derivatives of a value."""
    slopes = jacobian(sums.flat(), leaves)
    gradient = flattened(torch.autograd.grad(value, leaves, create_graph=True))
    return slopes.detach(), rows_of_jacobian(gradient, leaves).detach()


def share_of(
    sums: Sums, slopes: Float[Tensor, "T Q"], curvature: Float[Tensor, "T T"], offset: Vector, known: Vector, rows: int
) -> ExpansionShare:
    """The message with sums at the mode ``offset`` of z_k, total derivatives by θ, and J″; ``known`` is 1 − var z_k."""
    count = slopes.new_tensor(float(rows))
    parts = (sums.precision, sums.shift, sums.constant, slopes, curvature, count, offset.square(), known)
    return ExpansionShare(*(part.detach().numpy() for part in parts))


def mixture(weights: Vector, means: Float[Tensor, "J n"], variances: Float[Tensor, "J n"]) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture."""
    centre = weights @ means
    return centre, weights @ (variances + (means - centre).square())
