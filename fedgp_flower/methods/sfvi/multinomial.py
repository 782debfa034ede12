"""Multinomial logistic regression with learned prior scales (Hassan et al. 2023, Section S3.2).

    P(y_i = c) ∝ exp(W_c x_i + b_c),   W_cd ~ N(0, σ_W²),   b_c ~ N(0, σ_b²),   θ = (log σ_W, log σ_b)

Z_G = (W row by row, b); there are no local latents, so a site is one unit of width 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.errors import DataError
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import IndexVector, SampledModel, SiteData
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Targets


class Multinomial(SampledModel):
    """Classes 0 … C−1."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        self.num_inputs, self.num_classes = num_inputs, num_classes
        weights = num_inputs * num_classes
        block = (torch.arange(weights + num_classes) >= weights).long()
        super().__init__(torch.zeros(len(block), dtype=torch.float64), block)

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> Multinomial:
        """Needs no key of ``model.*`` and no shared inputs."""
        del section, inputs
        return cls(num_inputs, options.classes)

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteData:
        """Rows of a site.

        Raises:
            DataError: a target is not the number of a class.
        """
        if not torch.isin(targets, torch.arange(self.num_classes)).all():
            raise DataError(f"targets must be whole numbers below `sfvi.classes` = {self.num_classes}")
        return super().prepare(features, targets, groups, key=key)

    def local_width(self, site: SiteData) -> int:
        """No local latents."""
        return 0

    def log_local(
        self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U 0"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | W, b), by unit."""
        log_class = self._logits(site, z_global).log_softmax(-1)
        chosen = site.targets.long().expand(log_class.shape[:-1])[..., None]
        rows = log_class.gather(-1, chosen)[..., 0]
        return rows.new_zeros(*rows.shape[:-1], len(site.keys)).index_add(-1, site.unit, rows)

    def observation(
        self, site: SiteData, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U 0"]
    ) -> tuple[Tensor, Tensor]:
        """Class probabilities p, and p (1 − p)."""
        probability = self._logits(site, z_global).softmax(-1)
        return probability, probability * (1 - probability)

    def link(self, site: SiteData, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U 0"]) -> Tensor:
        """Logits [S, N, C]."""
        return self._logits(site, z_global)

    def _logits(self, site: SiteData, z_global: Tensor) -> Tensor:
        split = self.num_inputs * self.num_classes
        weight = z_global[..., :split].reshape(*z_global.shape[:-1], self.num_classes, self.num_inputs)
        return torch.einsum("nd,...cd->...nc", site.features, weight) + z_global[..., None, split:]
