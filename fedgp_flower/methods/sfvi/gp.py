"""Hierarchical sparse GP: a shared trend, and a deviation and a noise level for each site.

    f_k = g + h_k,   g = c₀ + c₁ᵀx + GP(0, k_G),   h_k = s₀ + s₁ᵀx + GP(0, k_L),   y = f_k + σ exp(ζ_k) ε

Z_G holds the whitened values of g's GP at the shared inputs Z, then c. Z_Lk holds those of h_k's GP at inputs of the
site, then s / τ, then ζ_k / s_ζ. All are N(0, I) a priori, and f_k is linear in them. θ holds the hyperparameters of
both kernels, log τ and log σ². Counts and binary targets have no ζ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from jaxtyping import Float
from linear_operator import to_linear_operator
from linear_operator.operators import MatmulLinearOperator
from torch import Tensor, nn

from fedgp_flower.gp.kernels import build_kernel
from fedgp_flower.gp.likelihoods import NONE, Noise, build_point_likelihood, gaussian_likelihood
from fedgp_flower.gp.models import whitened
from fedgp_flower.gp.sums import LEAST_NOISE
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import Draws, IndexVector, ModelInputs, SiteRows, StructuredModel
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Scalar, Targets

DEVIATION = 0.3
"""Initial prior variance of a site's deviation, relative to ``model.outputscale``."""
SITE_INDUCING = 20
"""Inducing inputs of a site's deviation h_k."""
NOISE_SPREAD = 0.5
"""Prior standard deviation s_ζ of a site's log noise offset."""
SITE_SLOPE = 0.3
"""Initial standard deviation τ of a site's intercept and slopes."""
NOISE, AMPLITUDE, LENGTHSCALE = range(3)
"""Indices of the properties in which sites of ``hierarchical-gp`` differ."""


class HierarchicalModel(StructuredModel, GP):
    """Shared trend + site deviation, with closed-form or quadrature expectations; ``model(x)`` is f at a new site.

    ``noise_spread`` = 0 gives all sites the same noise. ``widths`` are initial w of noise, amplitude and lengthscale;
    with them sites differ in the shape of their deviation, as in ``hierarchical-gp``.
    """

    inputs: Tensor
    site_inducing = SITE_INDUCING
    q_global: GlobalPosterior
    """The q(Z_G) of ``model(x)``."""

    def __init__(
        self, section: ModelSection, inputs: Rows, noise_spread: float = NOISE_SPREAD, widths: Sequence[float] = ()
    ) -> None:
        size = inputs.shape[1] + 1
        super().__init__(torch.zeros(len(inputs) + size, dtype=torch.float64))
        self.jitter, self.gaussian = section.jitter, section.likelihood == "gaussian"
        self.observed = build_point_likelihood(section.likelihood)
        self.spread = noise_spread if self.gaussian else 0.0
        self.trend = build_kernel(section, size - 1)
        self.register_buffer("inputs", inputs.clone())
        deviation = section.model_copy(update={"outputscale": DEVIATION * section.outputscale})
        self.deviation = build_kernel(deviation, size - 1)
        self.log_site_slope = nn.Parameter(inputs.new_full((size,), math.log(SITE_SLOPE)))
        if self.gaussian:
            self.log_noise = nn.Parameter(torch.tensor(math.log(section.noise), dtype=torch.float64))
        self.shaped = len(widths) > 0
        self.least_noise = LEAST_NOISE if widths else 0.0  # the closed form factorises the covariance of rows
        if widths:
            self.log_width = nn.Parameter(inputs.new_tensor(widths).log())

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> HierarchicalModel:
        """The model with both kernels of type ``model.kernel``."""
        return cls(section, torch.zeros(section.num_inducing, num_inputs).double() if inputs is None else inputs)

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Rows of a site, with distant rows as inducing inputs of its deviation."""
        site = super().prepare(features, targets, groups, key=key)
        return replace(site, anchors=farthest_points(features, self.site_inducing))

    @property
    def offsets(self) -> int:
        """1 if sites have a noise offset ζ_k, the last of their latents, else 0."""
        return int(self.spread > 0)

    def width(self, which: int) -> float:
        """The w of a property, 0 if sites do not differ."""
        return float(self.log_width.detach()[which].exp()) if self.shaped else 0.0

    @property
    def noise(self) -> Scalar:
        """σ², the variance of noise where ζ_k = 0."""
        return self.least_noise + self.log_noise.exp()

    @property
    def noise_spread(self) -> float:
        """s_ζ, prior standard deviation of a site's log noise offset."""
        return self.width(NOISE) if self.shaped else self.spread

    @property
    def deviation_factor(self) -> float:
        """Prior variance of a new site's deviation over that of k_L: E exp(2 w₂ z₂)."""
        return math.exp(2 * self.width(AMPLITUDE) ** 2)

    def local_width(self, site: SiteRows) -> int:
        """Number of whitened inducing values, intercept and slopes, and noise offset."""
        return len(site.anchors) + site.features.shape[1] + 1 + self.offsets

    def site_term(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior, noise: Draws | None
    ) -> Scalar:
        """Σ_n E_q log p(y_n | f_n, ζ) + E_q log N(Z_L | 0, I) + H(q); the first approximate for Bernoulli."""
        rows = self.observed.expected_with(site.targets, *self._moments(site, q_global, q_local))
        second = q_local.mean.square().sum() + q_local.factor().square().sum()
        if q_local.coupling is not None:
            second = second + q_global.mixed(q_local.coupling).square().sum()
        return rows.sum() - 0.5 * second - 0.5 * q_local.mean.numel() * math.log(2 * math.pi) + q_local.entropy()

    @torch.no_grad()
    def moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None, rows: ModelInputs, link: bool
    ) -> tuple[Tensor, Tensor]:
        """Moments of f if ``link``, else of a noisy observation, with the offset ζ integrated out."""
        mean, variance, noise = self._moments(site.at(rows.features), q_global, q_local)
        return (mean, variance) if link else self.observed.moments_with(mean, variance, noise)

    def _moments(
        self, site: SiteRows, q_global: GlobalPosterior, q_local: LocalPosterior | None
    ) -> tuple[Tensor, Tensor, Noise]:
        """Moments of f and ζ under q, and their covariance, from their weights on ε_G and ε_L."""
        if q_local is None:
            return self._new_site(site, q_global)
        (shared, local, conditional), local_factor = self._basis(site), q_local.factor()[0]
        mean, weights = q_global.mean @ shared + q_local.mean[0] @ local, shared.mT
        if q_local.coupling is not None:
            weights = weights + local.mT @ q_local.coupling[0]
        on_global, on_local = q_global.mixed(weights), local.mT @ local_factor  # [N, M], [N, W]
        variance = conditional + on_global.square().sum(-1) + on_local.square().sum(-1)
        if not self.offsets:
            zero = mean.new_zeros(())
            return mean, variance, self._noise(zero, zero, zero)
        coupled = torch.zeros_like(q_global.mean) if q_local.coupling is None else q_local.coupling[0, -1]
        offset = q_global.mixed(coupled)
        spread = offset.square().sum() + local_factor[-1].square().sum()
        joint = on_global @ offset + on_local @ local_factor[-1]
        return mean, variance, self._noise(q_local.mean[0, -1], spread, joint)

    def _new_site(self, site: SiteRows, q_global: GlobalPosterior) -> tuple[Tensor, Tensor, Noise]:
        """Moments at a new site, where h and ζ have their priors."""
        shared, conditional = self.shared(site.features)
        mean, variance = q_global.mean @ shared, conditional + q_global.mixed(shared.mT).square().sum(-1)
        variance = variance + self.deviation_factor * self.deviation(site.features, diag=True)
        zero = mean.new_zeros(())
        noise = self._noise(zero, zero + float(self.offsets), zero)
        return mean, variance + self.slopes(site.features).square().sum(0), noise

    def _noise(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Noise:
        """The noise with offset ζ = s_ζ Z, given moments of Z."""
        log_noise = self.noise.log() if self.gaussian else mean.new_zeros(())
        spread = self.noise_spread
        return Noise(log_noise, spread * mean, spread**2 * variance, spread * covariance)

    def _basis(self, site: SiteRows) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of f on Z_G [M, N] and on Z_L [W, N], and its conditional variance [N]."""
        shared, conditional = self.shared(site.features)
        values, conditional_deviation = self.project(self.deviation, site.anchors, site.features)
        none = values.new_zeros(self.offsets, len(site.features))
        return shared, torch.cat([values, self.slopes(site.features), none]), conditional + conditional_deviation

    def shared(self, features: Float[Tensor, "*B N D"]) -> tuple[Tensor, Tensor]:
        """Weights Φ [*B, M, N] of g(x) on Z_G, and its variance given the inducing values [*B, N]."""
        values, conditional = self.project(self.trend, self.inputs.expand(*features.shape[:-2], -1, -1), features)
        return torch.cat([values, linear_terms(features)], -2), conditional

    def slopes(self, features: Float[Tensor, "*B N D"]) -> Tensor:
        """τ ∘ X̃ [*B, D + 1, N]."""
        return self.log_site_slope.exp()[:, None] * linear_terms(features)

    def project(
        self, kernel: Kernel, inputs: Float[Tensor, "*B M D"], features: Float[Tensor, "*B N D"]
    ) -> tuple[Tensor, Tensor]:
        """L⁻¹K_zx [*B, M, N] and the conditional variance k(x, x) − ‖L⁻¹K_zx‖² [*B, N]."""
        both, count = torch.cat([inputs, features], -2), inputs.shape[-2]
        across, prior = kernel(inputs, both).to_dense(), kernel(both, diag=True)
        variance, jitter = prior[..., :count].mean(-1), self.jitter
        weights = whitened(across[..., :count], across[..., count:], variance=variance, jitter=jitter)
        return weights, prior[..., count:] - weights.square().sum(-2)

    # Interface of GPyTorch, in evaluation mode and standardised coordinates.

    @property
    def inducing_points(self) -> Tensor:
        """Z, under the name that sparse GPs use."""
        return self.inputs

    def forward(self, inputs: Float[Tensor, "*B N D"]) -> MultivariateNormal:
        """Predict f at a new site: the trend plus a deviation from its prior."""
        weights, _ = self.shared(inputs)
        values = weights[..., : len(self.inputs), :]
        weighted = torch.cat([self.q_global.mixed(weights.mT).mT, self.slopes(inputs)], -2)
        finite = MatmulLinearOperator(torch.cat([weighted, values], -2).mT, torch.cat([weighted, -values], -2))
        curved = self.trend(inputs) + self.deviation(inputs) * inputs.new_tensor(self.deviation_factor)
        return MultivariateNormal(self.q_global.mean @ weights, curved + to_linear_operator(finite))

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood at a new site; Gaussian noise has variance E σ² e^{2ζ}."""
        if not self.gaussian:
            return self.observed.to_gpytorch(NONE).eval()
        noise = float(self.noise.detach()) * math.exp(2 * self.noise_spread**2)
        return gaussian_likelihood(noise).requires_grad_(False).eval()


def linear_terms(features: Float[Tensor, "*B N D"]) -> Tensor:
    """Constant and inputs, [*B, D + 1, N]."""
    return torch.cat([torch.ones_like(features[..., :1]), features], -1).mT


def farthest_points(features: Rows, count: int) -> Float[Tensor, "C D"]:
    """Up to ``count`` distinct rows, each the farthest from the earlier ones; the first is nearest to the mean."""
    distance = (features - features.mean(0)).square().sum(-1)
    chosen = [int(distance.argmin())]
    distance = (features - features[chosen[0]]).square().sum(-1)
    while len(chosen) < count and float(distance.max()) > 0:
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (features - features[chosen[-1]]).square().sum(-1))
    return features[chosen]
