"""Models of classes 0 … C−1: P(y_i = c) ∝ exp(f_ic), with f the logits given all latents.

``multinomial``, multinomial logistic regression with learned prior scales (Hassan et al. 2023, Section S3.2):

    f_i = W x_i + b,   W_cd ~ N(0, σ_W²),   b_c ~ N(0, σ_b²),   θ = (log σ_W, log σ_b).

Z_G = (W row by row, b); there are no local latents, so a site is one unit of width 0.

``hierarchical-bnn`` and ``fedpop``, networks with a personal part at every site (Section 4.1):

    f_i = W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x_i),   W⁽¹ʲ⁾ [H, D],   W⁽²ʲ⁾ [C, H] ~ N(0, 1), without biases.

``hierarchical-bnn``: W⁽¹ʲ⁾ = μ + σ ε⁽ʲ⁾ with μ, ε⁽ʲ⁾ ~ N(0, 1) entry by entry and one σ ~ N₊(0, 1), not centred;
Z_G = (μ, z) with σ = F⁻¹(Φ(z)), F the distribution function of N₊(0, 1), so that p(Z_G) = N(0, I); Z_L = (ε, W⁽²ʲ⁾).
``fedpop``: the fully Bayesian form of FedPop (Kotelevskii et al. 2022): W⁽¹⁾ ~ N(0, 1) is the same everywhere,
Z_G = W⁽¹⁾ and Z_L = W⁽²ʲ⁾. A site is one unit, and matrices are flattened row by row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.methods.family import LocalPosterior
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import SampledModel, Shared, SiteRows, SoftmaxClasses, Units
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows

START = 0
"""Seed of the mean that the last layer starts at, the same at all sites: hidden units are then alike from the start."""


class Multinomial(SampledModel):
    """W [C, D] and b [C]."""

    def __init__(self, num_inputs: int, num_classes: int, *, binary: bool = False) -> None:
        weights = num_inputs * num_classes
        block = (torch.arange(weights + num_classes) >= weights).long()
        super().__init__(torch.zeros(len(block), dtype=torch.float64), block)
        self.observed, self.binary = SoftmaxClasses(binary), binary
        self.num_inputs, self.num_classes = num_inputs, num_classes

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> Multinomial:
        """As many classes as configured."""
        return cls(num_inputs, options.classes, binary=section.likelihood == "bernoulli")

    def local_width(self, site: SiteRows) -> int:
        """No local latents."""
        return 0

    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S N C"]:
        """W x + b."""
        split = self.num_inputs * self.num_classes
        weight = z_global[..., :split].unflatten(-1, (self.num_classes, self.num_inputs))
        return torch.einsum("nd,...cd->...nc", site.features, weight) + z_global[..., None, split:]


class PersonalNetwork(SampledModel):
    """D inputs, H hidden units and C classes; the last C H local latents are W⁽²ʲ⁾.

    In ``hierarchical-bnn`` the sites' first layers are ``scattered`` around a shared one; otherwise they share it.
    """

    def __init__(self, num_inputs: int, options: SFVIOptions, *, binary: bool = False) -> None:
        self.scattered = options.model == "hierarchical-bnn"
        self.first, self.second = (options.hidden, num_inputs), (options.classes, options.hidden)
        super().__init__(torch.zeros(math.prod(self.first) + self.scattered, dtype=torch.float64))
        self.observed, self.binary = SoftmaxClasses(binary), binary

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> PersonalNetwork:
        """Hidden units and classes as configured."""
        return cls(num_inputs, options, binary=section.likelihood == "bernoulli")

    def local_width(self, site: SiteRows) -> int:
        """The last layer, and ε where first layers are scattered."""
        return math.prod(self.second) + self.scattered * math.prod(self.first)

    def initial_local(self, site: SiteRows, *, scale: float, whole: bool) -> LocalPosterior:
        """N(m, scale² I) with m = 0 but for the last layer, where it is drawn: hidden units would stay alike else."""
        start, head = super().initial_local(site, scale=scale, whole=whole), math.prod(self.second)
        generator = torch.Generator().manual_seed(START)
        mean = start.mean.clone()
        mean[:, -head:] = torch.randn(head, generator=generator, dtype=torch.float64) / math.sqrt(self.second[1])
        return replace(start, mean=mean)

    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S N C"]:
        """W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x)."""
        head, first = math.prod(self.second), z_global
        if self.scattered:
            first = z_global[..., :-1] + half_normal(z_global[..., -1:]) * z_local[..., 0, :-head]
        second = z_local[..., 0, -head:].unflatten(-1, self.second)
        return torch.relu(site.features @ first.unflatten(-1, self.first).mT) @ second.mT


def half_normal(z: Tensor) -> Tensor:
    """σ = F⁻¹(Φ(z)) = −Φ⁻¹(Φ(−z) / 2), which is |N(0, 1)| where z is N(0, 1)."""
    return -torch.special.ndtri(0.5 * torch.special.ndtr(-z))
