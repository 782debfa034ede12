"""Bayesian logistic regression with a random intercept for every unit (Hassan et al. 2023, Section S3.1).

    y_ij ~ Bernoulli(logit⁻¹(β₀ + βᵀx_ij + b_i)),   b_i | ω ~ N(0, exp(−2ω)),   β_k, ω ~ N(0, 10²)

Z_G = (β₀, β, ω). Units are the groups that share an intercept, so L_k is the identity in every sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import IndexVector, SampledModel, SiteData
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Targets


class LogisticMixed(SampledModel):
    """θ is empty: everything has a prior.

    Args:
        num_inputs: D, without the constant, which the model adds.
        prior_scale: Standard deviation of β and ω a priori.
        centred: Local latents are b_i themselves; otherwise b_i = exp(−ω) Z_i with Z_i ~ N(0, 1), which averages better
            because the scale of the latents no longer depends on Z_G.
    """

    def __init__(self, num_inputs: int, *, prior_scale: float = 10.0, centred: bool = False) -> None:
        super().__init__(torch.full((num_inputs + 2,), math.log(prior_scale), dtype=torch.float64))
        self.centred = centred

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> LogisticMixed:
        """Needs no key of ``model.*`` and no shared inputs."""
        del section, inputs
        return cls(num_inputs, prior_scale=options.prior_scale, centred=options.centred)

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteData:
        """Rows of a site; equal numbers in ``groups`` share an intercept and key its draws."""
        del key
        assert groups is not None
        keys, unit = torch.unique(groups, return_inverse=True)
        return SiteData(features, targets, unit, keys, features.new_zeros(0, features.shape[1]))

    def located(
        self, site: SiteData, features: Rows, groups: IndexVector, *, trained: bool
    ) -> Iterator[tuple[Tensor, SiteData, bool]]:
        """Rows of units that the site knows, then those of others, whose intercepts have their prior."""
        unit = torch.searchsorted(site.keys, groups).clamp(max=len(site.keys) - 1)
        known = (site.keys[unit] == groups) & trained
        if known.any():
            yield known, site.at(features[known], unit[known]), True
        if not known.all():
            new = ~known
            yield new, self.prepare(features[new], features.new_zeros(int(new.sum())), groups[new]), False

    def summary(self, site: SiteData) -> Float[Tensor, "U E"]:
        """What an amortised posterior sees of a unit: means of y, x and x y over its rows, and log of their number."""
        rows = torch.cat([site.targets[:, None], site.features, site.features * site.targets[:, None]], 1)
        count = rows.new_zeros(len(site.keys)).index_add(0, site.unit, rows.new_ones(len(rows)))[:, None]
        sums = rows.new_zeros(len(site.keys), rows.shape[1]).index_add(0, site.unit, rows)
        return torch.cat([sums / count, count.log()], 1)

    def local_width(self, site: SiteData) -> int:
        """One intercept."""
        return 1

    def log_local(
        self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U 1"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_j log p(y_ij | β, b_i) + log p(b_i | ω), or + log N(Z_i | 0, 1) when not centred."""
        latent = z_local[..., 0]
        rows = torch.nn.functional.logsigmoid((2 * site.targets - 1) * self._logits(site, z_global, latent))
        log_scale = -z_global[..., -1:] if self.centred else latent.new_zeros(1)
        prior = -0.5 * (latent / log_scale.exp()).square() - log_scale - 0.5 * math.log(2 * math.pi)
        return prior.index_add(-1, site.unit, rows)

    def draw_local(self, z_global: Float[Tensor, "*S M"], noise: Float[Tensor, "*S U 1"]) -> Float[Tensor, "*S U 1"]:
        """Intercepts of new units."""
        return noise * (-z_global[..., -1, None, None]).exp() if self.centred else noise

    def observation(
        self, site: SiteData, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U 1"]
    ) -> tuple[Tensor, Tensor]:
        """Probability p of y = 1, and p (1 − p)."""
        probability = self._logits(site, z_global, z_local[..., 0]).sigmoid()
        return probability, probability * (1 - probability)

    def link(self, site: SiteData, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U 1"]) -> Tensor:
        """Logits [S, N]."""
        return self._logits(site, z_global, z_local[..., 0])

    def _logits(self, site: SiteData, z_global: Tensor, latent: Tensor) -> Tensor:
        intercept = latent if self.centred else latent * (-z_global[..., -1:]).exp()
        fixed = z_global[..., :1] + z_global[..., 1:-1] @ site.features.mT
        return fixed + intercept.index_select(-1, site.unit)
