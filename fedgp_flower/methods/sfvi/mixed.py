"""Generalised linear mixed models: shared fixed effects, and random intercepts and slopes of units within sites.

    g(E y_ij) = β₀ + βᵀx_ij + b_i0 + b_iᵀz_ij,   b_iw = exp(−ω_w) Z_iw,   Z_iw ~ N(0, 1),   β_k, ω_w, ς ~ N(0, s²)

with z_ij the features that have random slopes, y Gaussian (standard deviation e^{−ς}), Bernoulli (logit) or Poisson
(log). Z_G = (β₀, β, ω), and ς where y is Gaussian. With only a random intercept and two classes this is the model of
Hassan et al. (2023), Section S3.1. Units are the groups that share effects; L_k couples the effects of one unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.likelihoods import canonical_likelihood
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior, named, with_named
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import (
    IndexVector,
    ModelInputs,
    Placed,
    ReportTable,
    SampledModel,
    Shared,
    SiteRows,
    Units,
)
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Targets

Z95 = NormalDist().inv_cdf(0.975)
PRIOR_SCALE = 10.0
"""Prior standard deviation of β, ω and ς, as in Hassan et al.; nearly flat for standardised inputs."""


class GroupedModel(SampledModel):
    """The model with empty θ; features are x, then the columns z of the ``num_slopes`` random slopes."""

    def __init__(
        self, num_inputs: int, num_slopes: int = 0, *, likelihood: str = "bernoulli", prior_scale: float = PRIOR_SCALE
    ) -> None:
        self.width, self.fixed = 1 + num_slopes, 1 + num_inputs
        size = self.fixed + self.width + (likelihood == "gaussian")
        super().__init__(torch.full((size,), math.log(prior_scale), dtype=torch.float64))
        self.observed = canonical_likelihood(likelihood)

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> GroupedModel:
        """The model; ``num_inputs`` counts the columns of x and z."""
        slopes = len(options.slopes)
        return cls(num_inputs - slopes, slopes, likelihood=section.likelihood)

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Rows of a site; rows with equal ``groups`` share effects and draws."""
        assert groups is not None
        keys, unit = torch.unique(groups, return_inverse=True)
        return SiteRows(features, targets, unit, keys, features.new_zeros(0, features.shape[1]))

    def placed(self, site: SiteRows, rows: ModelInputs, q_local: LocalPosterior | None) -> Placed:
        """Rows of any units; those that the site does not have keep their prior, a q of zeros."""
        new = self.prepare(rows.features, rows.features.new_zeros(len(rows.features)), rows.groups)
        if q_local is None:
            return new, None
        place = torch.searchsorted(site.keys, new.keys).clamp(max=len(site.keys) - 1)
        known = site.keys[place] == new.keys
        values = {name: part[place] * known.view(-1, *[1] * (part.ndim - 1)) for name, part in named(q_local).items()}
        return new, with_named(q_local, values)

    def sections(self, q_global: GlobalPosterior, names: Sequence[str]) -> list[ReportTable]:
        """Table of fixed effects and standard deviations of random effects and noise."""
        caption = "Median and 95 % interval under q, for standardised inputs and target, on the link scale."
        reach = Z95 * q_global.factor().square().sum(1).sqrt()
        ends = torch.stack([q_global.mean, q_global.mean - reach, q_global.mean + reach], 1)
        ends[self.fixed :] = (-ends[self.fixed :, [0, 2, 1]]).exp()  # logarithms of precisions
        fixed, slopes = names[: self.fixed - 1], names[self.fixed - 1 :]
        spreads = ["intercept of a unit, sd", *(f"slope of a unit in {name}, sd" for name in slopes), "noise, sd"]
        entries = ["intercept", *fixed, *spreads[: self.global_size - self.fixed]]
        rows = [(words, *values) for words, values in zip(entries, ends.tolist(), strict=True)]
        return [ReportTable("Effects", ("effect", "median", "2.5 %", "97.5 %"), rows, caption)]

    def local_width(self, site: SiteRows) -> int:
        """Number of random effects of a unit."""
        return self.width

    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S N"]:
        """The linear predictor."""
        effects = z_local * (-z_global[..., None, self.fixed : self.fixed + self.width]).exp()
        fixed = z_global[..., :1] + z_global[..., 1 : self.fixed] @ site.features[:, : self.fixed - 1].mT
        unit = effects.index_select(-2, site.unit)  # [*S, N, W]
        return fixed + unit[..., 0] + (unit[..., 1:] * site.features[:, self.fixed - 1 :]).sum(-1)

    def hyper(self, z_global: Shared) -> Float[Tensor, "*S R"]:
        """Log standard deviation of Gaussian noise; empty for other likelihoods."""
        return -z_global[..., self.fixed + self.width :]
