"""Hierarchical sparse GP: a shared trend, each site's deviation from it, and the noise of each site.

    f_k = g + h_k,   g = c₀ + c₁ᵀx + GP(0, k_G),   h_k = s₀ + s₁ᵀx + GP(0, k_L),   y = f_k + σ exp(ζ_k) ε

Z_G holds the whitened values of g's GP at the shared inputs Z, then c; Z_Lk those of h_k's GP at inputs of the
site, then s / τ, then ζ_k / s_ζ. All are N(0, I) a priori, and f_k is linear in them. θ holds the hyperparameters of
both kernels, log τ and log σ². Counts and binary targets have no ζ.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import NONE, Noise, build_point_likelihood, gaussian_likelihood
from fedgp_flower.gp.models import WhitenedGP, WhitenedPosterior, whitened
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import ClosedFormModel, IndexVector, PredictiveMoments, SiteRows
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Scalar, Targets

QUADRATURE_NODES = 32
"""Error below 1e-9 for standard deviations of f up to 3."""
DEVIATION = 0.3
"""Initial prior variance of a site's deviation, relative to ``model.outputscale``."""


SITE_INDUCING = 20
"""Inducing inputs of a site's deviation h_k."""
NOISE_SPREAD = 0.5
"""Prior standard deviation s_ζ of a site's log noise offset."""
SITE_SLOPE = 0.3
"""Initial standard deviation τ of a site's intercept and slopes."""


class HierarchicalModel(ClosedFormModel):
    """Shared trend + site deviation, with closed-form or quadrature expectations.

    The shared inducing inputs Z travel, so they must not be rows of a site. ``noise_spread`` = 0 gives all sites the
    same noise.
    """

    inputs: Tensor
    site_inducing = SITE_INDUCING

    def __init__(self, section: ModelSection, inputs: Rows, noise_spread: float = NOISE_SPREAD) -> None:
        size = inputs.shape[1] + 1
        super().__init__(torch.zeros(len(inputs) + size, dtype=torch.float64))
        self.jitter, self.gaussian = section.jitter, section.likelihood == "gaussian"
        self.likelihood = build_point_likelihood(section.likelihood, nodes=QUADRATURE_NODES)
        self.spread = noise_spread if self.gaussian else 0.0
        self.trend = build_kernel(section, size - 1)
        self.register_buffer("inputs", inputs.clone())
        deviation = section.model_copy(update={"outputscale": DEVIATION * section.outputscale})
        self.deviation = build_kernel(deviation, size - 1)
        self.log_site_slope = nn.Parameter(inputs.new_full((size,), math.log(SITE_SLOPE)))
        if self.gaussian:
            self.log_noise = nn.Parameter(torch.tensor(math.log(section.noise), dtype=torch.float64))

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> HierarchicalModel:
        """Both kernels as ``model.kernel`` says."""
        return cls(section, torch.zeros(section.num_inducing, num_inputs).double() if inputs is None else inputs)

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Rows of a site, and the inputs of its deviation: rows of the site that are far apart."""
        site = super().prepare(features, targets, groups, key=key)
        return replace(site, anchors=farthest_points(features, self.site_inducing))

    @property
    def offsets(self) -> int:
        """1 where a site has a noise offset ζ_k, the last of its latents."""
        return int(self.spread > 0)

    @property
    def noise_spread(self) -> float:
        """s_ζ, prior standard deviation of a site's log noise offset."""
        return self.spread

    @property
    def deviation_factor(self) -> float:
        """Prior variance of a new site's deviation over that of k_L."""
        return 1.0

    def local_width(self, site: SiteRows) -> int:
        """Whitened inducing values, intercept and slopes, noise offset."""
        return len(site.anchors) + site.features.shape[1] + 1 + self.offsets

    def expected_log_local(self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior) -> Scalar:
        """Σ_n E_q log p(y_n | f_n, ζ) + E_q log N(Z_L | 0, I); the first by quadrature for Bernoulli."""
        mean, variance, noise = self._moments(site, q_global, q_local)
        rows = self.likelihood.expected_with(site.targets, mean, variance, noise)
        second = q_local.mean.square().sum() + q_local.factor().square().sum()
        if q_local.coupling is not None:
            second = second + q_global.mixed(q_local.coupling).square().sum()
        return rows.sum() - 0.5 * second - 0.5 * q_local.mean.numel() * math.log(2 * math.pi)

    def latent(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Mean and variance of f at ``site.features``; without ``q_local``, of g plus a deviation from its prior."""
        with torch.no_grad():
            mean, variance, _ = self._moments(site, q_global, q_local)
        return mean, variance

    def predict(self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None) -> PredictiveMoments:
        """Mean and variance of a noisy observation, with the offset ζ integrated out."""
        with torch.no_grad():
            return PredictiveMoments(*self.likelihood.moments_with(*self._moments(site, q_global, q_local)))

    def trend_moments(self, features: Rows, q_global: GlobalPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of the shared trend g alone."""
        with torch.no_grad():
            shared, left_over = self.project(self.trend, self.inputs, features)
            weights = torch.cat([shared, linear_terms(features)])
            return q_global.mean @ weights, left_over + q_global.mixed(weights.mT).square().sum(-1)

    def _moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None
    ) -> tuple[Tensor, Tensor, Noise]:
        """Moments of f and ζ under q, and their covariance, through the weights they have on ε_G and ε_L."""
        if q_local is None:
            return self._new_site(site, q_global)
        basis, local_factor = self._basis(site), q_local.factor()[0]
        mean = q_global.mean @ basis.shared + q_local.mean[0] @ basis.local
        weights = basis.shared.mT
        if q_local.coupling is not None:
            weights = weights + basis.local.mT @ q_local.coupling[0]
        on_global, on_local = q_global.mixed(weights), basis.local.mT @ local_factor  # [N, M], [N, W]
        variance = basis.left_over + on_global.square().sum(-1) + on_local.square().sum(-1)
        if not self.offsets:
            zero = mean.new_zeros(())
            return mean, variance, self._noise(zero, zero, zero)
        coupled = torch.zeros_like(q_global.mean) if q_local.coupling is None else q_local.coupling[0, -1]
        offset = q_global.mixed(coupled)
        spread = offset.square().sum() + local_factor[-1].square().sum()
        joint = on_global @ offset + on_local @ local_factor[-1]
        return mean, variance, self._noise(q_local.mean[0, -1], spread, joint)

    def _new_site(self, site: SiteRows, q_global: GlobalPosterior) -> tuple[Tensor, Tensor, Noise]:
        """Moments where h and ζ have their priors."""
        mean, variance = self.trend_moments(site.features, q_global)
        zero = mean.new_zeros(())
        linear = (self.log_site_slope.exp()[:, None] * linear_terms(site.features)).square().sum(0)
        variance = variance + self.deviation_factor * self.deviation(site.features, diag=True) + linear
        return mean, variance, self._noise(zero, zero + float(self.offsets), zero)

    def _noise(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Noise:
        """ζ = s_ζ Z in units of log σ."""
        log_noise = self.log_noise if self.gaussian else mean.new_zeros(())
        spread = self.noise_spread
        return Noise(log_noise, spread * mean, spread**2 * variance, spread * covariance)

    def _basis(self, site: SiteRows) -> Basis:
        linear = linear_terms(site.features)
        shared, left_over = self.project(self.trend, self.inputs, site.features)
        values, left_deviation = self.project(self.deviation, site.anchors, site.features)
        none = linear.new_zeros(self.offsets, len(site.features))
        local = torch.cat([values, self.log_site_slope.exp()[:, None] * linear, none])
        return Basis(torch.cat([shared, linear]), local, left_over + left_deviation)

    def project(self, kernel: Kernel, inputs: Float[Tensor, "M D"], features: Rows) -> tuple[Tensor, Tensor]:
        """L⁻¹K_zx [M, N] and the conditional variance k(x, x) − ‖L⁻¹K_zx‖² [N]."""
        both, count = torch.cat([inputs, features]), len(inputs)
        across, prior = kernel(inputs, both).to_dense(), kernel(both, diag=True)
        variance, jitter = prior[:count].mean(), self.jitter
        weights = whitened(across[:, :count], across[:, count:], variance=variance, jitter=jitter)
        return weights, prior[count:] - weights.square().sum(0)


@dataclass(frozen=True, slots=True)
class Basis:
    """f = sharedᵀ Z_G + localᵀ Z_L + what the inducing values leave open."""

    shared: Float[Tensor, "M N"]
    local: Float[Tensor, "W N"]
    left_over: Float[Tensor, " N"]


def linear_terms(features: Float[Tensor, "*B N D"]) -> Tensor:
    """Constant and inputs, [*B, D + 1, N]."""
    return torch.cat([torch.ones_like(features[..., :1]), features], -1).mT


def farthest_points(features: Rows, count: int) -> Float[Tensor, "C D"]:
    """At most ``count`` different rows, each the farthest from those before it; the first is nearest the centre."""
    distance = (features - features.mean(0)).square().sum(-1)
    chosen = [int(distance.argmin())]
    distance = (features - features[chosen[0]]).square().sum(-1)
    while len(chosen) < count and float(distance.max()) > 0:
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (features - features[chosen[-1]]).square().sum(-1))
    return features[chosen]


# The posterior as a model of GPyTorch.


class LinearTerms(Kernel):
    """Covariance Σ_i s_i² φ_i(x) φ_i(x') of a linear function with φ(x) = (1, x) and independent weights N(0, s_i²)."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("scales", scales)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        """The covariance."""
        left, right = (self.scales * torch.cat([torch.ones_like(x[..., :1]), x], -1) for x in (x1, x2))
        return (left * right).sum(-1) if diag else left @ right.mT


class SharedTrend(WhitenedGP):
    """The trend g with q(Z_G) of its whitened inducing values and linear terms, plus a deviation from its prior."""

    def __init__(
        self, trend: Kernel, kernel: Kernel, inputs: Rows, posterior: WhitenedPosterior, jitter: float
    ) -> None:
        super().__init__(kernel, inputs, jitter)
        self.trend = trend
        self.hold(posterior).requires_grad_(False)

    def project(self, inducing_points: Tensor, inputs: Tensor, kernel: Kernel | None = None) -> Tensor:
        """The weights of g(x) on Z_G."""
        values = super().project(inducing_points, inputs, kernel or self.trend)
        return torch.cat([values, linear_terms(inputs)], -2)


@torch.no_grad()
def export(
    model: HierarchicalModel, q_global: GlobalPosterior, *, deviation: bool = True
) -> tuple[WhitenedGP, Likelihood]:
    """Model and likelihood of a new site, in evaluation mode and standardised coordinates.

    f includes h_k from its prior; without ``deviation`` it is the trend g.
    """
    trend, width = deepcopy(model.trend), model.inputs.shape[1] + 1
    kernel = trend + LinearTerms(torch.ones(width, dtype=torch.float64))
    if deviation:
        scaled = ScaleKernel(deepcopy(model.deviation)).to(q_global.mean)
        scaled.outputscale = q_global.mean.new_tensor(model.deviation_factor)  # a float would pass through float32
        kernel = kernel + scaled + LinearTerms(model.log_site_slope.exp())
    factor = q_global.factor()
    posterior = WhitenedPosterior(q_global.mean, factor @ factor.mT)
    exported = SharedTrend(trend, kernel, model.inputs, posterior, model.jitter)
    if not model.gaussian:
        return exported, model.likelihood.to_gpytorch(NONE).eval()
    noise = float((model.log_noise + 2 * model.noise_spread**2).exp())  # E σ² e^{2ζ}
    return exported, gaussian_likelihood(noise).requires_grad_(False).eval()
