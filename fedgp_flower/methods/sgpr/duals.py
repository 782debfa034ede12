"""Sparse variational GPs in dual form: natural parameters of the likelihood, which add up over rows and sites.

With L Lᵀ = K_zz, W = L⁻¹ K_zx and v = L⁻¹(u − c) ~ N(0, I), the optimal q(v) of a factorising likelihood is
N(S b, S) with S = (I + B)⁻¹, B = W diag(β) Wᵀ and b = B μ + W α. Here μ = S b, f ~ N(m, s) under q, and α = ∂/∂m and
β = −2 ∂/∂s of E log p(y | f). So (B, b) and the bound are sums over rows. A natural-gradient step of length ρ is
(B, b) ← (1 − ρ)(B, b) + ρ (B̄, B̄ μ + W α) with B̄ at the current q (Khan and Lin 2017; Adam et al. 2021).

If p(y | f) has C functions, independent under q, each has its own α, β, B and b. W and L are shared if the functions
share a kernel; derivatives through them are then summed over functions. If only the differences of the functions
matter, as to a softmax, q is a posterior of the differences alone, with a smaller divergence from the prior; see
:func:`fedgp_flower.gp.models.shared_divergence`. With Λ_c = I + B_c the best one satisfies
Λ_c = (1 − 1/C) I + B̄_c + Λ_c (Σ Λ)⁻¹ Λ_c. For two classes it is the posterior of their log odds.
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
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sparse import by_autograd
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.methods.sgpr.messages import Expectations
from fedgp_flower.typing import Array, NamedArrays, Rows, Scalar, Targets

FIXED_POINT_STEPS = 5
"""Iterations of the fixed point for the best q of differences; the next step continues from there."""


@dataclass(frozen=True, slots=True)
class Duals:
    """The likelihood's natural parameters (B, b) of v, ∝ exp(bᵀv − ½ vᵀBv); B need not be invertible."""

    precision: Float[Tensor, "*C M M"]  # B
    shift: Float[Tensor, "*C M"]  # b
    relative: bool = False
    """Whether only the differences of the functions matter."""

    def factor(self) -> Float[Tensor, "*C M M"]:
        """Return R with R Rᵀ = I + B; raise NumericsError if there is none."""
        return cholesky(torch.eye(self.shift.shape[-1]).to(self.precision) + self.precision, of="I + B")

    def posterior(self) -> WhitenedPosterior:
        """Return q(v) = N(S b, S), S = (I + B)⁻¹."""
        covariance = torch.cholesky_inverse(self.factor())
        return WhitenedPosterior(product(covariance, self.shift), symmetric(covariance))

    def divergence(self) -> Scalar:
        """Return KL(q(v) ‖ N(0, I)) in nats, for ``relative`` duals that of the differences."""
        q, log_determinant = self.posterior(), 2 * torch.linalg.diagonal(self.factor()).log().sum()
        trace = torch.linalg.diagonal(q.covariance).sum()
        whole = trace + q.mean.square().sum() - q.mean.numel() + log_determinant
        if self.relative:
            return 0.5 * whole - shared_divergence(q, torch.eye(q.mean.shape[-1]).to(q.mean) + self.precision)
        return 0.5 * whole

    def stepped(self, found: Expectations, rho: float) -> Duals:
        """Return (B, b) after a natural-gradient step of length ρ from the q(v) of the expectations.

        B̄ may be indefinite if log p(y | f) is not concave, as for outliers; see :meth:`positive_part`.
        """
        curvature, slope = torch.from_numpy(found.curvature), torch.from_numpy(found.slope)
        target = self.of_differences(curvature) if self.relative else self.positive_part(curvature)
        shift = product(target, self.posterior().mean) + slope
        precision = torch.lerp(self.precision, target, rho)
        return replace(self, precision=precision, shift=torch.lerp(self.shift, shift, rho))

    def parts(self) -> tuple[Float[Tensor, "*C M M"], Float[Tensor, "*C M M"]]:
        """Return B₊ and B₋ ⪰ 0 with B = B₊ − B₋; B₋ ⪯ I/C is the prior precision that differences do not determine."""
        if not self.relative:
            return self.precision, torch.zeros_like(self.precision)
        roots, vectors = torch.linalg.eigh(self.precision)
        positive = (vectors * roots.clamp(min=0)[..., None, :]) @ vectors.mT
        return positive, positive - self.precision

    def positive_part(self, curvature: Float[Tensor, "*C M M"]) -> Float[Tensor, "*C M M"]:
        """Return B̄ with the negative eigenvalues of R⁻¹ B̄ R⁻ᵀ, R Rᵀ = I + B, set to 0, their value in the prior.

        The bound increases along the other eigenvectors.
        """
        factor = self.factor()
        half = torch.linalg.solve_triangular(factor, curvature, upper=False)
        roots, vectors = torch.linalg.eigh(symmetric(torch.linalg.solve_triangular(factor, half.mT, upper=False)))
        if (roots >= 0).all():
            return curvature
        kept = factor @ vectors * roots.clamp(min=0).sqrt()[..., None, :]
        return kept @ kept.mT

    def of_differences(self, curvature: Float[Tensor, "C M M"]) -> Float[Tensor, "C M M"]:
        """Return B of the best q of differences at these B̄, by fixed-point iteration from the current B."""
        eye = torch.eye(curvature.shape[-1]).to(curvature)
        precision, constant = eye + self.precision, (1 - 1 / len(curvature)) * eye + curvature
        for _ in range(FIXED_POINT_STEPS):
            half = torch.linalg.solve_triangular(cholesky(precision.sum(0), of="Σ Λ"), precision, upper=False)
            precision = symmetric(constant + half.mT @ half)
        return precision - eye


def product(matrix: Float[Tensor, "*A M N"], vector: Float[Tensor, "*B N"]) -> Float[Tensor, "*C M"]:
    """Return the product of matrix and vector for each function."""
    return (matrix @ vector[..., None])[..., 0]


def transferred(duals: Duals, old: LatentGP, new: LatentGP, factor: Float[Tensor, "*K M M"]) -> Duals:
    """Return (B, b) of the same pseudo-observations of f(Z₀) under new parameters, differentiable by these.

    The conditional mean of f(Z₀) is c + k(Z₀, Z) L⁻ᵀ v, so that v₀ = R v + δ with R = L₀⁻¹ k(Z₀, Z) L⁻ᵀ and
    δ = L₀⁻¹ 1 (c − c₀), with 0 for 1 at a step. Hence B = Rᵀ B₀ R and b = Rᵀ (b₀ − B₀ δ). ``factor`` is L of ``new``.
    """
    points = old.inducing_points.detach()
    with torch.no_grad():
        old_factor = old.factor()
    nugget = new.nugget()[..., None] * torch.eye(len(points)).to(points)
    cross = new.kernel(points, new.inducing_points).to_dense() + nugget
    half = torch.linalg.solve_triangular(old_factor, cross, upper=False)
    transfer = torch.linalg.solve_triangular(factor, half.mT, upper=False)  # Rᵀ
    change = (new.constant - old.constant.detach()) * old.ones.expand(duals.shift.shape)
    offset = torch.linalg.solve_triangular(old_factor, change[..., None], upper=False)[..., 0]  # δ
    positive, negative = duals.parts()
    shift = product(transfer, duals.shift - product(positive, offset))
    return replace(duals, precision=symmetric(transfer @ positive @ transfer.mT) - negative, shift=shift)


def expectations(
    model: LatentGP,
    inputs: Rows,
    targets: Targets,
    posterior: WhitenedPosterior,
    factor: Float[Tensor, "*K M M"] | None = None,
) -> Expectations:
    """Return Σ E log p(y | f) over rows under q(v), and its derivatives; those by parameters hold L and q fixed.

    With W̄ = μ αᵀ + (W − S W) diag(β) and K̄_zx = L⁻ᵀ W̄ the derivative by a kernel parameter is
    ⟨K̄_zx, dK_zx⟩ − ½ Σ β dk(x, x). ``factor`` is L, if known.
    """
    with torch.no_grad():
        factor = model.factor() if factor is None else factor
    named = model.wire_parameters()
    with_kernel = {name: parameter for name, parameter in named.items() if name not in (CONSTANT, HYPER)}
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
            fit, slope = fit + value, slope + product(whitened, alpha)
            curvature = curvature + (whitened * weight) @ whitened.mT
        by_nugget = -beta.sum(-1, keepdim=True).sum_to_size(nugget.shape) / 2
        adjoints = incoming, -beta.sum_to_size(prior.shape) / 2, by_nugget
        grads = torch.autograd.grad((cross, prior, nugget), [*with_kernel.values()], adjoints, allow_unused=True)
        for name, grad in zip(with_kernel, grads, strict=True):
            gradient[name] += 0 if grad is None else grad
        gradient[CONSTANT] += alpha.sum(-1, keepdim=True)
        if HYPER in gradient:
            gradient[HYPER] += by_hyper
    values = {name: to_array(grad) for name, grad in gradient.items()}
    found = [*map(to_array, (fit, slope, symmetric(curvature))), np.array(float(len(targets)))]
    return Expectations(values, *found)


def pseudo_sums(found: Expectations, mean: Array) -> list[SparseSums]:
    """Return the sums of pseudo-observations m + α/β with noise 1/β, for each function: A = B̄, b = B̄ μ + W α.

    ``mean`` is μ of q(v). The sum of squares is unknown; it is replaced by the explained part bᵀ(I + A)⁻¹b and noise of
    square 1 per row.
    """
    sums, size = [], mean.shape[-1]
    each = found.curvature.reshape(-1, size, size), found.slope.reshape(-1, size), mean.reshape(-1, size)
    for curvature, slope, centre in zip(*each, strict=True):
        shift = curvature @ centre + slope
        explained = shift @ np.linalg.solve(np.eye(len(shift)) + curvature, shift)
        squares = np.asarray(found.count + explained)
        sums.append(SparseSums(curvature, shift, squares, np.zeros(()), found.count))
    return sums


def gradient_at_server(duals: Duals, old: LatentGP, new: LatentGP, found: Expectations) -> NamedArrays:
    """Return the part of the gradient of F + log p(w) that follows from totals, by wire name.

    It has terms through L, through q(v), which depends on w by :func:`transferred`, and from the prior:
    L̄ = −tril L⁻ᵀ [μ (W α)ᵀ + (I − S) B̄]; the expected log likelihood has the derivatives W α by μ and −½ B̄ by S.
    """
    with torch.enable_grad():
        factor = new.factor()
        moved = transferred(duals, old, new, factor)
        q, known = moved.posterior(), new.log_prior() - moved.divergence()
    with torch.no_grad():
        slope, curvature = torch.from_numpy(found.slope), torch.from_numpy(found.curvature)
        products = q.mean[..., None] * slope[..., None, :] + curvature - q.covariance @ curvature
        products = products.sum_to_size(factor.shape)  # over functions that share a kernel
        by_factor = -torch.linalg.solve_triangular(factor.mT, products, upper=True).tril()
        adjoints = by_factor, slope, -curvature / 2, torch.ones_like(known)
    return by_autograd(new, (factor, q.mean, q.covariance, known), adjoints)
