"""What models of classes 0 … C−1 share: P(y_i = c) ∝ exp(f_ic), with f the logits given all latents."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedgp_flower.errors import DataError
from fedgp_flower.methods.sfvi.structured import IndexVector, SampledModel, SiteData
from fedgp_flower.typing import Rows, Targets


class Classifier(SampledModel):
    """A subclass says what the logits are, and what is beside the likelihood in log p(y, Z_L | Z_G)."""

    def __init__(
        self,
        fixed_log_scale: Float[Tensor, " M"],
        block: Int64[Tensor, " M"] | None = None,
        *,
        classes: int,
        binary: bool = False,
    ) -> None:
        """C; ``binary``: an observation is whether the class is the second of two, not an indicator of each."""
        super().__init__(fixed_log_scale, block)
        self.num_classes, self.binary = classes, binary

    @abstractmethod
    def logits(self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]) -> Tensor:
        """F [*S, N, C]."""

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteData:
        """Rows of a site.

        Raises:
            DataError: a target is not the number of a class.
        """
        if not torch.isin(targets, torch.arange(self.num_classes)).all():
            raise DataError(f"targets must be whole numbers below `sfvi.classes` = {self.num_classes}")
        return super().prepare(features, targets, groups, key=key)

    def log_likelihood(
        self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | Z_G, Z_L), by unit."""
        log_class = self.logits(site, z_global, z_local).log_softmax(-1)
        chosen = site.targets.long().expand(log_class.shape[:-1])[..., None]
        rows = log_class.gather(-1, chosen)[..., 0]
        return rows.new_zeros(*rows.shape[:-1], len(site.keys)).index_add(-1, site.unit, rows)

    def observation(
        self, site: SiteData, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U W"]
    ) -> tuple[Tensor, Tensor]:
        """Class probabilities p, and p (1 − p)."""
        every = self.logits(site, z_global, z_local).softmax(-1)
        probability = every[..., 1] if self.binary else every
        return probability, probability * (1 - probability)

    def link(self, site: SiteData, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U W"]) -> Tensor:
        """Logits; of two classes the log odds of the second."""
        every = self.logits(site, z_global, z_local)
        return every[..., 1] - every[..., 0] if self.binary else every
