"""Multinomial logistic regression with learned prior scales (Hassan et al. 2023, Section S3.2).

    P(y_i = c) ∝ exp(W_c x_i + b_c),   W_cd ~ N(0, σ_W²),   b_c ~ N(0, σ_b²),   θ = (log σ_W, log σ_b)

Z_G = (W row by row, b); there are no local latents, so a site is one unit of width 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.methods.sfvi.catalogue.multinomial import ClassKeys
from fedgp_flower.methods.sfvi.classifier import Classifier
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import SiteData
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows


class Multinomial(Classifier):
    """W and b."""

    def __init__(self, num_inputs: int, num_classes: int, *, binary: bool = False) -> None:
        weights = num_inputs * num_classes
        block = (torch.arange(weights + num_classes) >= weights).long()
        super().__init__(torch.zeros(len(block), dtype=torch.float64), block, classes=num_classes, binary=binary)
        self.num_inputs = num_inputs

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> Multinomial:
        """Needs no shared inputs."""
        del inputs
        return cls(num_inputs, options.of(ClassKeys).classes, binary=section.likelihood == "bernoulli")

    def local_width(self, site: SiteData) -> int:
        """No local latents."""
        return 0

    def log_local(
        self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U 0"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | W, b), by unit."""
        return self.log_likelihood(site, z_global, z_local)

    def logits(self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U 0"]) -> Tensor:
        """W x + b."""
        split = self.num_inputs * self.num_classes
        weight = z_global[..., :split].reshape(*z_global.shape[:-1], self.num_classes, self.num_inputs)
        return torch.einsum("nd,...cd->...nc", site.features, weight) + z_global[..., None, split:]
