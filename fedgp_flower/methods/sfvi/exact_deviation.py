"""A site of SFVI in closed form: its deviation stays exact, its noise offset is at the mode or drawn around it.

R_k = s_k² I + K_L(X_k, X_k) + X̃ᵀ diag(τ²) X̃ with s_k = σ exp(s_ζ z_k), z_k ~ N(0, 1). Beyond :data:`DENSE_ROWS` rows
the deviation rests on as many of the site's own rows, far apart, by the bound of Titsias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from gpytorch import settings
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.methods.sfvi.closed_form import Sums, newton_step
from fedgp_flower.methods.sfvi.family import GlobalPosterior
from fedgp_flower.methods.sfvi.gp import HierarchicalGP, farthest_points, linear_terms
from fedgp_flower.methods.sfvi.structured import Prediction
from fedgp_flower.typing import Rows, Scalar, Targets

DENSE_ROWS = 400
SETTLED, MODE_STEPS = 1e-20, 100
"""The mode of z_k is found where a step promises less than so many nats; and the most steps to it."""
ROUNDING = 1e-9
"""Nats by which equal sums may differ."""
NODES = 7
"""Of the Gauss–Hermite rule over z_k."""


class Dense:
    """R = s² I + K."""

    def __init__(self, noise: Scalar, own: Float[Tensor, "N N"]) -> None:
        self.factor = cholesky(own + noise * torch.eye(len(own)).to(own), of="covariance of a site's rows")
        self.log_det = 2 * self.factor.diagonal().log().sum()

    def inner(self, left: Float[Tensor, "A N"], right: Float[Tensor, "B N"]) -> Float[Tensor, "A B"]:
        """Left R⁻¹ rightᵀ."""
        a, b = (torch.linalg.solve_triangular(self.factor, rows.mT, upper=False) for rows in (left, right))
        return a.mT @ b


class LowRank:
    """R = s² I + UᵀU, by D = I + UUᵀ / s²."""

    def __init__(self, noise: Scalar, own: Float[Tensor, "W N"]) -> None:
        self.own, self.noise = own, noise
        self.factor = cholesky(torch.eye(len(own)).to(own) + own @ own.mT / noise, of="I + UUᵀ/s² of a site's rows")
        self.log_det = own.shape[1] * noise.log() + 2 * self.factor.diagonal().log().sum()

    def inner(self, left: Float[Tensor, "A N"], right: Float[Tensor, "B N"]) -> Float[Tensor, "A B"]:
        """Left R⁻¹ rightᵀ."""
        a, b = (
            torch.linalg.solve_triangular(self.factor, self.own @ rows.mT / self.noise, upper=False)
            for rows in (left, right)
        )
        return left @ right.mT / self.noise - a.mT @ b


@dataclass(frozen=True, slots=True)
class Parts:
    """What the model makes of a site's rows at a θ."""

    shared: Float[Tensor, "M N"]
    own: Tensor
    """The covariance [N, N] of the deviation, or U [W, N] with UᵀU instead of it."""
    left_over: Scalar
    """Variance that inducing values leave open, summed over rows."""


@dataclass(frozen=True, slots=True)
class Derivatives:
    """Sums at the mode of z_k, their derivatives by θ, flat as in :meth:`Sums.flat`, and J″."""

    sums: Sums
    slopes: Float[Tensor, "T Q"]
    curvature: Float[Tensor, "T T"]


class ExactDeviation:
    """The rows of a site under a model that holds θ.

    Args:
        model: With Gaussian noise.
        features: [N, D].
        targets: [N].
    """

    def __init__(self, model: HierarchicalGP, features: Rows, targets: Targets) -> None:
        self.model, self.features, self.targets = model, features, targets
        self.dense = model.options.deviates and len(features) <= DENSE_ROWS
        self.width = int(model.own_noise)

    @cached_property
    def anchors(self) -> Rows:
        """Inputs that the deviation of a large site rests on."""
        return farthest_points(self.features, DENSE_ROWS)

    def parts(self) -> Parts:
        """At the model's θ; traced, because GPyTorch's faster kernels of one lengthscale have no second derivative."""
        with settings.trace_mode():
            shared, left_over = self._shared(self.features)
            if self.dense:
                return Parts(shared, self._covariance(self.features), left_over.sum())
            own, open_deviation = self._weights(self.features)
            return Parts(shared, own, left_over.sum() + open_deviation.sum())

    def sums(self, parts: Parts, offset: Float[Tensor, " W"]) -> Sums:
        """P_k, p_k and c_k at a z_k."""
        noise = self._noise(offset)
        covariance = self._noisy(parts, noise)
        rows = torch.cat([parts.shared, self.targets[None]])
        products = covariance.inner(rows, rows)
        fit = covariance.log_det + products[-1, -1] + len(self.targets) * math.log(2 * math.pi)
        constant = -0.5 * (fit + parts.left_over / noise + offset.square().sum())
        return Sums(products[:-1, :-1], products[:-1, -1], constant)

    def mode(self, q_global: GlobalPosterior) -> tuple[Float[Tensor, " W"], Float[Tensor, "W W"]]:
        """The z_k that maximises J_k at a q(Z_G), and −J_k″ there; found anew each time, so that nothing is kept."""
        with torch.no_grad():
            expected = self._along_offsets(self.parts(), q_global)

        def expanded(offset: Tensor) -> tuple[float, Tensor, Tensor]:
            offset = offset.detach().requires_grad_()
            value = expected(offset)
            [slope] = torch.autograd.grad(value, offset, create_graph=True)
            return float(value.detach()), slope.detach(), rows_of_jacobian(slope, [offset])

        offset, radius = self.targets.new_zeros(self.width), 1.0
        if not self.width:
            return offset, offset.new_zeros(0, 0)
        value, slope, curvature = expanded(offset)
        for _ in range(MODE_STEPS):
            step, rise = newton_step(slope, curvature, radius)
            if rise < SETTLED:
                break
            tried = expanded(offset + step)
            if tried[0] < value - ROUNDING:
                radius = 0.25 * float(step.abs().max())
            else:
                offset, (value, slope, curvature) = offset + step, tried
        return offset, -curvature

    def derivatives(self, q_global: GlobalPosterior) -> Derivatives:
        """Sums at the mode, and *total* derivatives by θ: z_k follows θ by T = −J_zz⁻¹ J_zθ."""
        offset, precision = self.mode(q_global)
        offset.requires_grad_()
        leaves = [*(own for _, own in sorted(self.model.theta().items())), offset]
        sums = self.sums(self.parts(), offset)
        slopes = jacobian(sums.flat(), leaves)
        gradient = flattened(torch.autograd.grad(sums.expected(q_global), leaves, create_graph=True))
        hessian = rows_of_jacobian(gradient, leaves)
        size = len(slopes) - self.width
        follow = torch.linalg.solve(precision, hessian[size:, :size])
        total = slopes[:size] + follow.mT @ slopes[size:]
        curvature = hessian[:size, :size] + hessian[:size, size:] @ follow
        return Derivatives(Sums(*(own.detach() for own in sums.parts())), total, curvature)

    @torch.no_grad()
    def predict(self, features: Rows, q_global: GlobalPosterior) -> Prediction:
        """Mean and variance of a noisy observation: the mixture over z_k, normal around its mode.

        With A = R⁻¹ k_* and w = φ_* − ΦA: mean Aᵀy + wᵀm, variance k_** − k_*ᵀA + wᵀSw + (k_G − |φ_GP|²) + s².
        """
        with torch.enable_grad():
            mode, precision = self.mode(q_global)
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES if self.width else 1)
        parts, (shared, left_over) = self.parts(), self._shared(features)
        cross, prior = self._cross(features)
        factor, means, variances = q_global.factor(), [], []
        for node in nodes:
            offset = mode + node * precision.diagonal().rsqrt()
            noise = self._noise(offset)
            noisy = self._noisy(parts, noise)
            weight = shared - noisy.inner(parts.shared, cross)
            own = prior - noisy.inner(cross, cross).diagonal()
            means.append(noisy.inner(cross, self.targets[None])[:, 0] + q_global.mean @ weight)
            variances.append(own + (factor.mT @ weight).square().sum(0) + left_over + noise)
        share = torch.from_numpy(weights / weights.sum())
        centre = share @ torch.stack(means)
        apart = share @ (torch.stack(means) - centre).square()
        return Prediction(centre, share @ torch.stack(variances) + apart)

    def _along_offsets(self, parts: Parts, q_global: GlobalPosterior) -> Callable[[Tensor], Scalar]:
        """J_k as a function of z_k, up to a constant: along the eigenvectors of K it is a sum over single numbers.

        With eigenvalues λ_n, and a_n = E(v_nᵀ(y − ΦᵀZ_G))² under q(Z_G), −½ Σ [log(λ_n + s²) + a_n / (λ_n + s²)].
        """
        if self.dense:
            values, vectors = torch.linalg.eigh(parts.own)
        else:
            _, singular, right = torch.linalg.svd(parts.own, full_matrices=False)
            values, vectors = singular.square(), right.mT
        error = torch.cat([(self.targets - q_global.mean @ parts.shared)[None], q_global.factor().mT @ parts.shared])
        squares = (error @ vectors).square().sum(0)
        others, rest = len(self.targets) - len(values), error.square().sum() - squares.sum()  # where K is zero

        def expected(offset: Tensor) -> Scalar:
            noise = self._noise(offset)
            whole = values + noise
            fit = whole.log().sum() + (squares / whole).sum() + others * noise.log() + (rest + parts.left_over) / noise
            return -0.5 * (fit + offset.square().sum())

        return expected

    def _noise(self, offset: Tensor) -> Scalar:
        return (self.model.log_noise + 2 * self.model.options.noise_spread * offset.sum()).exp()

    def _noisy(self, parts: Parts, noise: Scalar) -> Dense | LowRank:
        return Dense(noise, parts.own) if self.dense else LowRank(noise, parts.own)

    def _shared(self, features: Rows) -> tuple[Tensor, Tensor]:
        """Φ [M, N], and what the shared inducing values leave open [N]."""
        values, left_over = self.model.project(self.model.trend, self.model.inputs, features)
        return torch.cat([values, linear_terms(features)]), left_over

    def _slopes(self, features: Rows) -> Tensor:
        """τ ∘ X̃ [D + 1, N]."""
        return self.model.log_site_slope.exp()[:, None] * linear_terms(features)

    def _covariance(self, left: Rows, right: Float[Tensor, "K D"] | None = None) -> Tensor:
        """Of d_k between rows."""
        other = left if right is None else right
        own: Tensor = self.model.deviation(left, other).to_dense()
        return own + self._slopes(left).mT @ self._slopes(other)

    def _weights(self, features: Rows) -> tuple[Tensor, Tensor]:
        """U [W, N], and what it leaves open of the deviation [N]; nothing where sites do not deviate."""
        if not self.model.options.deviates:
            return features.new_zeros(0, len(features)), features.new_zeros(len(features))
        values, left_over = self.model.project(self.model.deviation, self.anchors, features)
        return torch.cat([values, self._slopes(features)]), left_over

    def _cross(self, features: Rows) -> tuple[Tensor, Tensor]:
        """Covariance of d_k at new rows with that at the site's [n, N], and its prior variance [n]."""
        if self.dense:
            prior = self.model.deviation(features, diag=True) + self._slopes(features).square().sum(0)
            return self._covariance(features, self.features), prior
        (here, left_over), (there, _) = self._weights(features), self._weights(self.features)
        return here.mT @ there, here.square().sum(0) + left_over


def flattened(tensors: tuple[Tensor, ...]) -> Tensor:
    """As one vector."""
    return torch.cat([own.flatten() for own in tensors])


def rows_of_jacobian(values: Float[Tensor, " V"], leaves: list[Tensor]) -> Float[Tensor, "V T"]:
    """Derivatives of a few values, in one backward pass for all."""
    unit = torch.eye(len(values)).to(values)
    slopes = torch.autograd.grad(values, leaves, unit, retain_graph=True, is_grads_batched=True, allow_unused=True)
    pairs = zip(slopes, leaves, strict=True)
    none = unit.new_zeros(len(unit), 1)
    return torch.cat([none.expand(-1, at.numel()) if s is None else s.reshape(len(unit), -1) for s, at in pairs], 1)


def jacobian(values: Float[Tensor, " Q"], leaves: list[Tensor]) -> Float[Tensor, "T Q"]:
    """Derivatives of many values by a few numbers: Jᵀw is linear in w, and its Jacobian by w is Jᵀ."""
    probe = torch.zeros_like(values, requires_grad=True)
    pulled = flattened(torch.autograd.grad(values, leaves, probe, create_graph=True, materialize_grads=True))
    return rows_of_jacobian(pulled, [probe])
