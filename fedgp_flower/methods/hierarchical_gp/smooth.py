"""Smooth deviations of sites, integrated out; sites differ in the shape of their deviation and in their noise.

    noise σ exp(w₁z₁),   h_k = s₀ + s₁ᵀx + GP with amplitude exp(w₂z₂) and lengthscales exp(w₃z₃) times those of k_L

z_k ~ N(0, I) belongs to the site; the widths w, of which w₂ and w₃ are learned, measure how much sites differ. Inputs
are divided by exp(w₃z₃), so that periods stretch too. The covariance of a site's rows given the trend is

    R_k = s_k² I + K_k(X_k, X_k) + X̃ᵀ diag(τ²) X̃.

Sums are those at the mode of J_k. Predictions average over the Laplace approximation of z_k, because z_k of a small
site is uncertain. With more than :data:`DENSE_ROWS` rows the deviation has :data:`ANCHORS` inducing inputs, distant
rows of the site, and the bound is that of Titsias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy

import torch
from gpytorch import settings
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor
from torch.nn.functional import pad

from fedgp_flower.gp.error_law import SCALE_POINTS
from fedgp_flower.gp.kernels import prior_variance
from fedgp_flower.gp.likelihoods.integrals import hermite_rule
from fedgp_flower.gp.linalg import cholesky, kernel_cholesky
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.messages import ExpansionShare
from fedgp_flower.methods.hierarchical_gp.newton import (
    Expanded,
    Sums,
    mixture,
    newton_step,
    rows_of_jacobian,
    second_order,
    share_of,
)
from fedgp_flower.methods.sfvi.gp import AMPLITUDE, LENGTHSCALE, NOISE, HierarchicalModel, farthest_points
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, Rows, Scalar, Targets

WIDTHS = "theta.log_width"
"""Name of log w among the parameters."""
FIRST_WIDTHS = (0.5, 0.5, 0.3)
"""Initial w of noise, amplitude and lengthscale."""
DENSE_ROWS, ANCHORS = 2000, 400
"""Most rows of a site without inducing inputs of its deviation; number of these for more."""
TOLERANCE, MODE_STEPS = 1e-12, 100
"""Newton steps to the mode of z_k stop at this predicted increase, in nats, or after this number."""
ROUNDING = 1e-9
"""Allowed decrease by rounding, in nats."""
NODES = 3
"""Gauss–Hermite nodes along each entry of z_k."""
ROWS = "covariance of a site's rows"
"""Name of a matrix in errors."""
VARIANCES = ("outputscale", "variance", "noise")
EQUATION = (
    "q(Z_G) = N(μ_G, diag(σ_G) L_G L_Gᵀ diag(σ_G)). f(x) = a(x)ᵀ Z_G[:M] + [1, x]ᵀ Z_G[M:] + h(x) with "
    "L Lᵀ = k_G(Z, Z) + jitter · k_G(z, z) · I, a(x) = L⁻¹ k_G(Z, x). At a new site "
    "h(x) ~ N(0, e^(2 w₂²) k_L(x, x) + [1, x²]ᵀ exp(2 theta.log_site_slope)), and its noise has variance "
    "(10⁻⁶ + e^theta.log_noise) e^(2 w₁ z), z ~ N(0, 1). theta.log_width has log w of noise, amplitude and "
    "lengthscale. x and y are standardised."
)


def shaped_gp(section: ModelSection, points: Array) -> HierarchicalModel:
    """The hierarchical GP whose sites differ in the shape of their deviation, at its initial θ."""
    return HierarchicalModel(section, torch.as_tensor(points), widths=FIRST_WIDTHS)


def prior_of(name: str) -> tuple[float, float]:
    """Standard deviation of an entry of θ under its normal prior, and κ of its exponential prior."""
    variance = any(kind in name for kind in VARIANCES)
    if "site_slope" in name or ("deviation." in name and variance):
        return 4.0, 0.5 if variance else 1.0
    return 2.0 if variance else 1.0, 0.0


@torch.no_grad()
def inducing_factor(model: HierarchicalModel, values: Mapping[str, ndarray]) -> torch.Tensor:
    """L with L Lᵀ = K_zz of the trend at θ = ``values``."""
    model.load_theta(values)
    kzz = model.trend(model.inputs).to_dense()
    return kernel_cholesky(kzz, variance=prior_variance(model.trend, model.inputs), jitter=model.jitter)


class LowRank:
    """R = s² I + Uᵀ(I + E)⁻¹U to second order, with E = 0 here, by D = I + E + U Uᵀ / s²."""

    def __init__(
        self, noise: Scalar, weights: Float[Tensor, "W N"], change: Float[Tensor, "W W"], leaves: Sequence[Tensor]
    ) -> None:
        size, self.noise, self.weights = len(change), noise, weights
        outer = torch.eye(size).to(change) + change + weights @ weights.mT / noise
        self.outer = Expanded.whole(outer, leaves, of=ROWS)
        log_inner = change.trace() - 0.5 * change.square().sum()
        self.log_det = weights.shape[1] * noise.log() + self.outer.log_det - log_inner
        self.bend = self.outer.bend

    def inverse_diagonal(self) -> Float[Tensor, " N"]:
        """Diagonal of R⁻¹ at this θ."""
        half = torch.linalg.solve_triangular(self.outer.factor, self.weights, upper=False)
        return (1 - half.square().sum(0) / self.noise) / self.noise

    def solve(self, rows: Float[Tensor, "A N"]) -> Float[Tensor, "N A"]:
        """R⁻¹ rowsᵀ at this θ."""
        projected = self.outer.solve(rows @ self.weights.mT / self.noise)
        return (rows.mT - self.weights.mT @ projected) / self.noise

    def products(self, rows: Float[Tensor, "A N"]) -> Float[Tensor, "A A"]:
        """Rows R⁻¹ rowsᵀ."""
        return rows @ rows.mT / self.noise - self.outer.products(rows @ self.weights.mT / self.noise)


class SmoothDeviation:
    """The rows of a site, features [N, D] and targets [N], under a model with Gaussian noise at its θ."""

    def __init__(self, model: HierarchicalModel, features: Rows, targets: Targets) -> None:
        self.model, self.features, self.targets = model, features, targets
        self.dense, self.width = len(features) <= DENSE_ROWS, len(model.log_width)
        self.anchors = features if self.dense else farthest_points(features, ANCHORS)
        """Inducing inputs of the deviation."""

    def shape(self, offset: Float[Tensor, " W"]) -> Float[Tensor, 3]:
        """Factors of noise, amplitude and lengthscale at a z_k."""
        return (self.model.log_width.exp() * offset).exp()

    def covariance(
        self, offset: Float[Tensor, " W"], known: tuple[Tensor, Tensor]
    ) -> tuple[Expanded | LowRank, Scalar, Scalar]:
        """R_k, the noise s_k², and the variance of f given the inducing values, summed over rows, at a z_k."""
        model, shape, unexplained = self.model, self.shape(offset), known[1].sum()
        leaves = [offset, model.log_noise, model.log_site_slope, *model.deviation.parameters()]
        noise, eye = model.noise * shape[NOISE].square(), torch.eye(len(self.anchors)).to(self.anchors)
        if self.dense:

            def block(rows: slice, columns: slice) -> Tensor:
                covariance = self._covariance(self.features[rows], self.features[columns], shape)
                return covariance + noise * eye[rows, columns]

            return Expanded(block, len(eye), leaves, of=ROWS), noise, unexplained
        weights, change = self._weights(self.features, shape)
        gram = weights @ weights.mT
        explained = gram.trace() - (change * gram).sum() + ((change @ change) * gram).sum()  # tr Uᵀ(I + E)⁻¹U
        unexplained = unexplained + self._prior(self.features, shape).sum() - explained
        return LowRank(noise, weights, change, leaves), noise, unexplained

    def sums(self, offset: Float[Tensor, " W"], known: tuple[Tensor, Tensor] | None = None) -> Sums:
        """P_k, p_k and c_k at a z_k; ``known`` is :meth:`~HierarchicalModel.shared` of the rows."""
        with settings.trace_mode():
            known = known or self.model.shared(self.features)
        covariance, noise, unexplained = self.covariance(offset, known)
        products = covariance.products(torch.cat([known[0], self.targets[None]]))
        fit = covariance.log_det + products[-1, -1] + len(self.targets) * math.log(2 * math.pi)
        constant = -0.5 * (fit + unexplained / noise + offset.square().sum())
        return Sums(products[:-1, :-1], products[:-1, -1], constant, covariance.bend)

    def mode(self, q_global: GlobalPosterior) -> tuple[Float[Tensor, " W"], Float[Tensor, "W W"]]:
        """The z_k that maximises J_k given q(Z_G), and H = −J_k″ there."""
        fixed = copy(self)
        fixed.model = deepcopy(self.model).requires_grad_(False)  # no graph of θ is needed
        known = fixed.model.shared(self.features)

        def expanded(offset: Tensor) -> tuple[float, Tensor, Tensor]:
            offset = offset.detach().requires_grad_()
            value = fixed.sums(offset, known).expected(q_global)
            [slope] = torch.autograd.grad(value, offset, create_graph=True)
            return float(value.detach()), slope.detach(), rows_of_jacobian(slope, [offset])

        offset, radius = self.targets.new_zeros(self.width), 1.0
        value, slope, curvature = expanded(offset)
        for _ in range(MODE_STEPS):
            step, rise = newton_step(slope, curvature, radius)
            trial = expanded(offset + step)
            if trial[0] < value - ROUNDING:
                radius = 0.25 * float(step.abs().max())
                continue
            offset, (value, slope, curvature) = offset + step, trial
            if rise < TOLERANCE:
                break
        return offset, -curvature

    def derivatives(self, q_global: GlobalPosterior) -> ExpansionShare:
        """Sums at the mode, and *total* derivatives by θ without w, with dz_k/dθ = H⁻¹ J_zθ."""
        offset, precision = self.mode(q_global)
        offset.requires_grad_()
        theta = [value for name, value in sorted(self.model.theta().items()) if name != WIDTHS]
        sums = self.sums(offset)
        slopes, hessian = second_order(sums, sums.expected(q_global), [*theta, offset])
        size = len(slopes) - self.width
        factor = cholesky(precision, of="curvature of a site's shape")
        dz_dtheta = torch.cholesky_solve(hessian[size:, :size], factor)
        total = slopes[:size] + dz_dtheta.mT @ slopes[size:]
        curvature = hessian[:size, :size] + hessian[:size, size:] @ dz_dtheta
        variance = torch.linalg.solve_triangular(factor, torch.eye(self.width).to(factor), upper=False).square().sum(0)
        return share_of(sums, total, curvature, offset.detach(), 1 - variance, len(self.targets))

    @torch.no_grad()
    def predict(self, features: Rows, q_global: GlobalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of a noisy observation, averaged over z_k.

        With A = R⁻¹k_*, w = φ_* − ΦA: mean Aᵀy + wᵀm, variance k_** − k_*ᵀA + wᵀSw + (k_G − |φ_GP|²) + s_k².
        """
        offsets, shares = self.mixture(q_global)
        train, (test, conditional) = (self.model.shared(rows) for rows in (self.features, features))
        means, variances = [], []
        for offset in offsets:
            covariance, noise, _ = self.covariance(offset, train)
            shape = self.shape(offset)
            cross = self._cross(features, shape)
            gain = covariance.solve(cross)
            weight = test - train[0] @ gain
            left = self._prior(features, shape) - (cross.mT * gain).sum(0)
            means.append(self.targets @ gain + q_global.mean @ weight)
            spread = (q_global.factor().mT @ weight).square().sum(0)
            variances.append(left + spread + conditional + noise)
        return mixture(shares, torch.stack(means), torch.stack(variances))

    @torch.no_grad()
    def scale_features(self, features: Rows, mean: Targets) -> Float[Tensor, "N P"]:
        """Features 1, μ, μ² − 1 and L⁻¹k_G(Z, x) of the log scale of errors, at predictive means μ [N]."""
        known = self.model.shared(features)[0][: min(SCALE_POINTS, len(self.model.inputs))]
        return torch.cat([torch.stack([torch.ones_like(mean), mean, mean.square() - 1]), known]).mT

    @torch.no_grad()
    def left_out(self, q_global: GlobalPosterior) -> tuple[Targets, Targets]:
        """Errors z of rows, each predicted from all other rows, in standard deviations of these predictions; means.

        With V = R + ΦᵀΦ for a prior of Z_G that knows the rows of other sites, V⁻¹ = R⁻¹ − R⁻¹ΦᵀSΦR⁻¹ and the residual
        is V⁻¹(y − Φᵀm₋) = R⁻¹(y − Φᵀm), because q(Z_G) = N(m, S) knows all rows. A row's error is its residual over
        (V⁻¹)ₙₙ, with the variance 1/(V⁻¹)ₙₙ and that of f given the inducing values.
        """
        with torch.enable_grad():
            offset = self.mode(q_global)[0].detach()
        weights, conditional = self.model.shared(self.features)
        covariance = self.covariance(offset, (weights, conditional))[0]
        solved = covariance.solve(torch.cat([weights, (self.targets - q_global.mean @ weights)[None]]))
        precision = covariance.inverse_diagonal() - (solved[:, :-1] @ q_global.factor()).square().sum(1)
        if not self.dense:
            shape = self.shape(offset)
            explained = self._weights(self.features, shape)[0].square().sum(0)
            conditional = conditional + self._prior(self.features, shape) - explained
        z = solved[:, -1] / (precision * (1 + precision * conditional)).sqrt()
        return z, self.targets - solved[:, -1] / precision

    @torch.no_grad()
    def trend(self, features: Rows, q_global: GlobalPosterior) -> Float[Tensor, " n"]:
        """Mean of the shared trend."""
        return q_global.mean @ self.model.shared(features)[0]

    @torch.no_grad()
    def mixture(self, q_global: GlobalPosterior) -> tuple[Float[Tensor, "J W"], Float[Tensor, " J"]]:
        """Values of z_k and their weights, by a Gauss–Hermite rule around the mode.

        At nodes ẑ + H^{−½} ξ_j with weights ω_j these weights are proportional to ω_j exp(J_k(z_j) + ½|ξ_j|²).
        """
        with torch.enable_grad():
            mode, precision = self.mode(q_global)
        grid, log_weight = hermite_rule(NODES, self.width)
        scale = cholesky(precision, of="curvature of a site's shape")
        offsets = mode + torch.linalg.solve_triangular(scale.mT, grid.mT, upper=True).mT
        known = self.model.shared(self.features)
        value = torch.stack([self.sums(offset, known).expected(q_global) for offset in offsets])
        return offsets, (log_weight + value + 0.5 * grid.square().sum(-1)).softmax(0)

    def _covariance(self, left: Rows, right: Float[Tensor, "K D"], shape: Float[Tensor, 3]) -> Tensor:
        """Covariance of d_k between rows."""
        curved = shape[AMPLITUDE].square() * self._curved(left, right, shape)
        return curved + self.model.slopes(left).mT @ self.model.slopes(right)

    def _curved(self, left: Rows, right: Float[Tensor, "K D"], shape: Float[Tensor, 3]) -> Tensor:
        """k_L between rows, with the lengthscales of the site."""
        stretch = shape[LENGTHSCALE]
        with settings.trace_mode():  # GPyTorch's faster kernels have no second derivative
            return self.model.deviation(left / stretch, right / stretch).to_dense()

    def _prior(self, features: Rows, shape: Float[Tensor, 3]) -> Float[Tensor, " N"]:
        """Variance of d_k at rows."""
        curved: Tensor = self.model.deviation(features / shape[LENGTHSCALE], diag=True)
        return shape[AMPLITUDE].square() * curved + self.model.slopes(features).square().sum(0)

    def _weights(self, features: Rows, shape: Float[Tensor, 3]) -> tuple[Tensor, Tensor]:
        """U [W, N] and E [W, W], whitened by the factor of K_zz here."""
        kzz, kzx = (self._curved(self.anchors, to, shape) for to in (self.anchors, features))
        variance = prior_variance(self.model.deviation, self.anchors / shape[LENGTHSCALE])
        factor = kernel_cholesky(kzz.detach(), variance=variance.detach(), jitter=self.model.jitter)
        change = kzz + self.model.jitter * variance * torch.eye(len(kzz)).to(kzz)
        half = torch.linalg.solve_triangular(factor, change - change.detach(), upper=False)
        change = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        values, slopes = torch.linalg.solve_triangular(factor, kzx, upper=False), self.model.slopes(features)
        weights = torch.cat([shape[AMPLITUDE] * values, slopes])
        return weights, pad(change, (0, len(slopes), 0, len(slopes)))

    def _cross(self, features: Rows, shape: Float[Tensor, 3]) -> Tensor:
        """Covariance of d_k between new rows and the rows of the site."""
        if self.dense:
            return self._covariance(features, self.features, shape)
        return self._weights(features, shape)[0].mT @ self._weights(self.features, shape)[0]
