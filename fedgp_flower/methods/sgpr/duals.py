"""Sparse variational GPs in dual form: what rows say of whitened inducing values, and how it moves with the parameters.

With L Lᵀ = K_zz, W = L⁻¹ K_zx and v = L⁻¹(u − c) ~ N(0, I), the optimal q(v) = N(μ, S) of any factorising likelihood is
that of pseudo-observations: S = (I + B)⁻¹, μ = S b with B = W diag(β) Wᵀ and b = B μ + W α. Here α = ∂/∂m and
β = −2 ∂/∂s of E log p(y | f), f ~ N(m, s), so that (B, b) and the bound are sums over rows, and a step of the natural
gradient is (B, b) ← (1 − ρ)(B, b) + ρ (B̄, B̄ μ + W α), after Khan and Lin (2017) and Adam et al. (2021).

Where p(y | f) is of C functions, independent under q, there are α, β, B and b of each; W and L are of each too unless
they share a kernel, and what comes through a shared one is added over functions. If
only the differences of the functions matter, as to a softmax, q is one of the differences alone, whose divergence from
their prior is less, see :func:`fedgp_flower.gp.models.shared_divergence`. The best one has, with Λ_c = I + B_c,
Λ_c = (1 − 1/C) I + B̄_c + Λ_c (Σ Λ)⁻¹ Λ_c. Of two classes it is that of their log odds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky, symmetric
from fedgp_flower.gp.models import CHUNK, CONSTANT, HYPER, LatentGP, WhitenedPosterior, shared_divergence
from fedgp_flower.gp.placement import to_array, to_arrays
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.methods.sgpr.messages import Expectations
from fedgp_flower.typing import Array, NamedArrays, Rows, Scalar, Targets

SETTLING = 5
"""Iterations to the best q of differences, which goes on from there in the next step."""


@dataclass(frozen=True, slots=True)
class Duals:
    """What all rows say of v: N(v; B⁻¹b, B⁻¹) up to a constant, where B need not be invertible."""

    precision: Float[Tensor, "*C M M"]  # B
    shift: Float[Tensor, "*C M"]  # b
    relative: bool = False
    """Whether only the differences of the functions matter."""

    def factor(self) -> Float[Tensor, "*C M M"]:
        """R with R Rᵀ = I + B."""
        return cholesky(torch.eye(self.shift.shape[-1]).to(self.precision) + self.precision, of="I + B")

    def posterior(self) -> WhitenedPosterior:
        """The posterior q(v) = N(S b, S), S = (I + B)⁻¹."""
        covariance = torch.cholesky_inverse(self.factor())
        return WhitenedPosterior(applied(covariance, self.shift), symmetric(covariance))

    def divergence(self) -> Scalar:
        """KL(q(v) ‖ N(0, I)) in nats."""
        q, log_determinant = self.posterior(), 2 * diagonals(self.factor()).log().sum()
        whole = diagonals(q.covariance).sum() + q.mean.square().sum() - q.mean.numel() + log_determinant
        if self.relative:
            return 0.5 * whole - shared_divergence(q, torch.eye(q.mean.shape[-1]).to(q.mean) + self.precision)
        return 0.5 * whole

    def stepped(self, found: Expectations, rho: float) -> Duals:
        """A natural-gradient step of length ρ from the q(v) at which the expectations were taken.

        Where log p(y | f) is not concave, as around outliers, B̄ may be indefinite. Of R⁻¹ B̄ R⁻ᵀ, R Rᵀ = I + B, the
        directions with negative eigenvalues are then left as they are in the prior: the bound rises along the others.
        """
        curvature, slope = torch.from_numpy(found.curvature), torch.from_numpy(found.slope)
        wanted = self.of_differences(curvature) if self.relative else self.concave(curvature)
        shift = applied(wanted, self.posterior().mean) + slope
        return replace(
            self, precision=torch.lerp(self.precision, wanted, rho), shift=torch.lerp(self.shift, shift, rho)
        )

    def parts(self) -> tuple[Float[Tensor, "*C M M"], Float[Tensor, "*C M M"]]:
        """B as what rows say, less what differences of functions do not know of their prior, at most I / C."""
        if not self.relative:
            return self.precision, torch.zeros_like(self.precision)
        roots, vectors = torch.linalg.eigh(self.precision)
        told = (vectors * roots.clamp(min=0)[..., None, :]) @ vectors.mT
        return told, told - self.precision

    def concave(self, curvature: Float[Tensor, "*C M M"]) -> Float[Tensor, "*C M M"]:
        """B̄ without its negative part."""
        factor = self.factor()
        half = torch.linalg.solve_triangular(factor, curvature, upper=False)
        roots, vectors = torch.linalg.eigh(symmetric(torch.linalg.solve_triangular(factor, half.mT, upper=False)))
        if (roots >= 0).all():
            return curvature
        kept = factor @ vectors * roots.clamp(min=0).sqrt()[..., None, :]
        return kept @ kept.mT

    def of_differences(self, curvature: Float[Tensor, "C M M"]) -> Float[Tensor, "C M M"]:
        """B of the best q of differences at these curvatures, by iteration from here."""
        eye = torch.eye(curvature.shape[-1]).to(curvature)
        precision, own = eye + self.precision, (1 - 1 / len(curvature)) * eye + curvature
        for _ in range(SETTLING):
            half = torch.linalg.solve_triangular(cholesky(precision.sum(0), of="Σ Λ"), precision, upper=False)
            precision = symmetric(own + half.mT @ half)
        return precision - eye


def applied(matrix: Float[Tensor, "*A M N"], vector: Float[Tensor, "*B N"]) -> Float[Tensor, "*C M"]:
    """The product of the matrix and vector of each function."""
    return (matrix @ vector[..., None])[..., 0]


def diagonals(matrix: Float[Tensor, "*C M M"]) -> Float[Tensor, "*C M"]:
    """The diagonal of each function's matrix."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def carried(duals: Duals, old: LatentGP, new: LatentGP, factor: Float[Tensor, "*K M M"]) -> Duals:
    """The same pseudo-observations of f at the old Z, under new parameters; differentiable by these.

    f(Z₀) = c + k(Z₀, Z) L⁻ᵀ v at its conditional mean, so that v₀ = R v + δ with R = L₀⁻¹ k(Z₀, Z) L⁻ᵀ and
    δ = L₀⁻¹ 1 (c − c₀): B = Rᵀ B₀ R, b = Rᵀ (b₀ − B₀ δ). ``factor`` is L of ``new``.
    """
    points = old.inducing_points.detach()
    with torch.no_grad():
        before = old.factor()
    cross = new.kernel(points, new.inducing_points).to_dense() + new.nugget()[..., None] * torch.eye(len(points)).to(
        points
    )
    half = torch.linalg.solve_triangular(before, cross, upper=False)
    move = torch.linalg.solve_triangular(factor, half.mT, upper=False)  # Rᵀ
    offset = (new.constant - old.constant.detach()).expand(duals.shift.shape)
    apart = torch.linalg.solve_triangular(before, offset[..., None], upper=False)[..., 0]
    told, less = duals.parts()
    shift = duals.shift - applied(told, apart)
    return replace(duals, precision=symmetric(move @ told @ move.mT) - less, shift=applied(move, shift))


def expectations(
    model: LatentGP,
    inputs: Rows,
    targets: Targets,
    posterior: WhitenedPosterior,
    factor: Float[Tensor, "*K M M"] | None = None,
) -> Expectations:
    """What rows say at q(v): Σ E log p(y | f) with its derivatives, L and q held fixed in those by parameters.

    With W̄ = μ αᵀ + (W − S W) diag(β) and K̄_zx = L⁻ᵀ W̄ the derivative by a parameter of the kernel is
    ⟨K̄_zx, dK_zx⟩ − ½ Σ β dk(x, x). ``factor`` is L where it is known.
    """
    with torch.no_grad():
        factor = model.factor() if factor is None else factor
    named = model.wire_parameters()
    moving = {name: parameter for name, parameter in named.items() if name not in (CONSTANT, HYPER)}
    gradient = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    fit, size = factor.new_zeros(()), posterior.covariance.shape
    slope, curvature = factor.new_zeros(size[:-1]), factor.new_zeros(size)
    chunk = math.ceil(CHUNK / model.constant.numel())
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        with torch.enable_grad():
            cross, prior = model.kernel(model.inducing_points, x).to_dense(), model.kernel(x, diag=True)
            nugget = model.nugget()
        with torch.no_grad():
            whitened = torch.linalg.solve_triangular(factor, cross, upper=False)
            mean, variance, spread = model.moments(whitened, prior, posterior)
        value, alpha, beta, by_hyper = model.observed.slopes(y, mean, variance, model.hyper.detach())
        with torch.no_grad():
            alpha, beta = alpha.to(whitened), beta.to(whitened)
            weight = beta[..., None, :]
            incoming = posterior.mean.to(whitened)[..., None] * alpha[..., None, :] + (whitened - spread) * weight
            incoming = torch.linalg.solve_triangular(factor.mT, incoming.sum_to_size(cross.shape), upper=True)
            fit, slope = fit + value, slope + applied(whitened, alpha)
            curvature = curvature + (whitened * weight) @ whitened.mT
        by_nugget = -beta.sum(-1, keepdim=True).sum_to_size(nugget.shape) / 2
        adjoints = incoming, -beta.sum_to_size(prior.shape) / 2, by_nugget
        grads = torch.autograd.grad((cross, prior, nugget), [*moving.values()], adjoints, allow_unused=True)
        for name, grad in zip(moving, grads, strict=True):
            gradient[name] += 0 if grad is None else grad
        gradient[CONSTANT] += alpha.sum(-1, keepdim=True)
        if HYPER in gradient:
            gradient[HYPER] += by_hyper
    values = {name: to_array(grad) for name, grad in gradient.items()}
    return Expectations(values, *to_arrays(fit, slope, symmetric(curvature)))


def pseudo_sums(found: Expectations, mean: Array, rows: int) -> list[SparseSums]:
    """Rows as pseudo-observations m + α/β of each f with noise 1/β: A = B̄ and b = B̄ μ + W α, where q(v) has the mean μ.

    Their squares are not known; in their place stand 1 a row, of the noise, and what A and b explain.
    """
    sums, size = [], mean.shape[-1]
    each = found.curvature.reshape(-1, size, size), found.slope.reshape(-1, size), mean.reshape(-1, size)
    for curvature, slope, centre in zip(*each, strict=True):
        shift = curvature @ centre + slope
        explained = shift @ np.linalg.solve(np.eye(len(shift)) + curvature, shift)
        sums.append(SparseSums(curvature, shift, np.asarray(rows + explained), np.zeros(()), np.array(float(rows))))
    return sums


def gradient_at_server(duals: Duals, old: LatentGP, new: LatentGP, found: Expectations) -> NamedArrays:
    """The part of the gradient of F + log p(w) that totals determine.

    It comes through L, through q(v), which :func:`carried` moves with w, and from the prior.
    L̄ = −tril L⁻ᵀ [μ (W α)ᵀ + (I − S) B̄], and expected log likelihoods have the slopes W α by μ and −½ B̄ by S.
    """
    named = new.wire_parameters()
    with torch.enable_grad():
        factor = new.factor()
        moved = carried(duals, old, new, factor)
        q, known = moved.posterior(), new.log_prior() - moved.divergence()
    with torch.no_grad():
        slope, curvature = torch.from_numpy(found.slope), torch.from_numpy(found.curvature)
        products = q.mean[..., None] * slope[..., None, :] + curvature - q.covariance @ curvature
        products = products.sum_to_size(factor.shape)  # over functions that share a kernel
        by_factor = -torch.linalg.solve_triangular(factor.mT, products, upper=True).tril()
        adjoints = by_factor, slope, -curvature / 2, torch.ones_like(known)
    outputs = factor, q.mean, q.covariance, known
    grads = torch.autograd.grad(outputs, [*named.values()], adjoints, allow_unused=True, materialize_grads=True)
    return dict(zip(named, to_arrays(*grads), strict=True))
