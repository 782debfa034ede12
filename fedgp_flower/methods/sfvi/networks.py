"""Bayesian neural networks with a personal part at every site (Hassan et al. 2023, Section 4.1).

    P(y_i = c | site j) = softmax(W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x_i))_c,   W⁽¹ʲ⁾ [H, D],   W⁽²ʲ⁾ [C, H] ~ N(0, 1), without biases.

``hierarchical-bnn``: W⁽¹ʲ⁾ = μ + σ ε⁽ʲ⁾ with μ, ε⁽ʲ⁾ ~ N(0, 1) entry by entry and one σ ~ N₊(0, 1), not centred;
Z_G = (μ, z) with σ = F⁻¹(Φ(z)), F the distribution function of N₊(0, 1), so that p(Z_G) = N(0, I); Z_L = (ε, W⁽²ʲ⁾).
``fedpop``: the fully Bayesian form of FedPop (Kotelevskii et al. 2022): W⁽¹⁾ ~ N(0, 1) is the same everywhere,
Z_G = W⁽¹⁾ and Z_L = W⁽²ʲ⁾. A site is one unit, and matrices are flattened row by row.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.methods.family import LocalPosterior
from fedgp_flower.methods.sfvi.catalogue.multinomial import HiddenKeys
from fedgp_flower.methods.sfvi.classifier import Classifier
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import SiteData
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows

START = 0
"""Seed of the mean that the last layer starts at, the same at all sites: hidden units are then alike from the start."""


class PersonalNetwork(Classifier):
    """Lengths D, H and C; the last C H local latents are W⁽²ʲ⁾."""

    extra: ClassVar[int]
    """Shared latents besides those of a first layer."""

    def __init__(self, num_inputs: int, hidden: int, num_classes: int, *, binary: bool = False) -> None:
        size = hidden * num_inputs + self.extra
        super().__init__(torch.zeros(size, dtype=torch.float64), classes=num_classes, binary=binary)
        self.num_inputs, self.hidden = num_inputs, hidden

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> PersonalNetwork:
        """Needs no shared inputs."""
        del inputs
        keys = options.of(HiddenKeys)
        return cls(num_inputs, keys.hidden, keys.classes, binary=section.likelihood == "bernoulli")

    @abstractmethod
    def first_layer(self, z_global: Float[Tensor, "*S M"], own: Float[Tensor, "*S V"]) -> Float[Tensor, "*S D1"]:
        """W⁽¹ʲ⁾ [*S, H D], of the shared latents and of the local ones before W⁽²ʲ⁾."""

    @property
    def head(self) -> int:
        """Entries of W⁽²ʲ⁾."""
        return self.num_classes * self.hidden

    def initial_local(self, site: SiteData, *, scale: float, coupled: bool, triangular: bool) -> LocalPosterior:
        """N(m, scale² I) with m = 0 but for the last layer, where it is drawn: hidden units would stay alike else."""
        start = super().initial_local(site, scale=scale, coupled=coupled, triangular=triangular)
        generator = torch.Generator().manual_seed(START)
        drawn = torch.randn(self.head, generator=generator, dtype=torch.float64) / math.sqrt(self.hidden)
        mean = start.mean.clone()
        mean[:, -self.head :] = drawn
        return replace(start, mean=mean)

    def log_local(
        self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | Z_G, Z_L) + log N(Z_L | 0, I)."""
        prior = -0.5 * z_local.square().sum(-1) - 0.5 * z_local.shape[-1] * math.log(2 * math.pi)
        return self.log_likelihood(site, z_global, z_local) + prior

    def logits(self, site: SiteData, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]) -> Tensor:
        """W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x)."""
        own = z_local[..., 0, :]
        first = self.first_layer(z_global, own[..., : -self.head]).unflatten(-1, (self.hidden, self.num_inputs))
        second = own[..., -self.head :].unflatten(-1, (self.num_classes, self.hidden))
        return torch.relu(site.features @ first.mT) @ second.mT


class FedPop(PersonalNetwork):
    """The first layer is the same everywhere, the last one personal."""

    extra = 0

    def local_width(self, site: SiteData) -> int:
        """The last layer."""
        return self.head

    def first_layer(self, z_global: Float[Tensor, "*S M"], own: Float[Tensor, "*S V"]) -> Float[Tensor, "*S D1"]:
        """Z_G itself."""
        del own
        return z_global


class HierarchicalNetwork(PersonalNetwork):
    """The first layers of the sites are scattered around a shared one, the last ones personal."""

    extra = 1

    def local_width(self, site: SiteData) -> int:
        """ε and the last layer."""
        return self.hidden * self.num_inputs + self.head

    def first_layer(self, z_global: Float[Tensor, "*S M"], own: Float[Tensor, "*S V"]) -> Float[Tensor, "*S D1"]:
        """μ + σ ε."""
        return z_global[..., :-1] + half_normal(z_global[..., -1:]) * own


def half_normal(z: Tensor) -> Tensor:
    """σ = F⁻¹(Φ(z)) = −Φ⁻¹(Φ(−z) / 2), which is |N(0, 1)| where z is N(0, 1)."""
    return -torch.special.ndtri(0.5 * torch.special.ndtr(-z))
