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
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedgp_flower.errors import DataError
from fedgp_flower.methods.family import LocalPosterior
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import IndexVector, SampledModel, SiteRows
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Targets

START = 0
"""Seed of the mean that the last layer starts at, the same at all sites: hidden units are then alike from the start."""


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
    def logits(self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]) -> Tensor:
        """F [*S, N, C]."""

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Rows of a site.

        Raises:
            DataError: a target is not the number of a class.
        """
        if not torch.isin(targets, torch.arange(self.num_classes)).all():
            raise DataError(f"targets must be whole numbers below `sfvi.classes` = {self.num_classes}")
        return super().prepare(features, targets, groups, key=key)

    def log_likelihood(
        self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | Z_G, Z_L), by unit."""
        log_class = self.logits(site, z_global, z_local).log_softmax(-1)
        chosen = site.targets.long().expand(log_class.shape[:-1])[..., None]
        rows = log_class.gather(-1, chosen)[..., 0]
        return rows.new_zeros(*rows.shape[:-1], len(site.keys)).index_add(-1, site.unit, rows)

    def observation(
        self, site: SiteRows, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U W"]
    ) -> tuple[Tensor, Tensor]:
        """Class probabilities p, and p (1 − p)."""
        every = self.logits(site, z_global, z_local).softmax(-1)
        probability = every[..., 1] if self.binary else every
        return probability, probability * (1 - probability)

    def link(self, site: SiteRows, z_global: Float[Tensor, "S M"], z_local: Float[Tensor, "S U W"]) -> Tensor:
        """Logits; of two classes the log odds of the second."""
        every = self.logits(site, z_global, z_local)
        return every[..., 1] - every[..., 0] if self.binary else every


def standard_normal(z: Float[Tensor, "*S U W"]) -> Float[Tensor, "*S U"]:
    """Log N(z | 0, I) by unit."""
    return -0.5 * z.square().sum(-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)


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
        """W [C, D] and b [C]."""
        return cls(num_inputs, options.classes, binary=section.likelihood == "bernoulli")

    def local_width(self, site: SiteRows) -> int:
        """No local latents."""
        return 0

    def log_local(
        self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U 0"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | W, b), by unit."""
        return self.log_likelihood(site, z_global, z_local)

    def logits(self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U 0"]) -> Tensor:
        """W x + b."""
        split = self.num_inputs * self.num_classes
        weight = z_global[..., :split].unflatten(-1, (self.num_classes, self.num_inputs))
        return torch.einsum("nd,...cd->...nc", site.features, weight) + z_global[..., None, split:]


class PersonalNetwork(Classifier):
    """Lengths D, H and C; the last C H local latents are W⁽²ʲ⁾."""

    extra: ClassVar[int]
    """Shared latents besides those of a first layer."""

    def __init__(self, num_inputs: int, hidden: int, num_classes: int, *, binary: bool = False) -> None:
        size = hidden * num_inputs + self.extra
        super().__init__(torch.zeros(size, dtype=torch.float64), classes=num_classes, binary=binary)
        self.num_inputs, self.hidden, self.head = num_inputs, hidden, num_classes * hidden

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> PersonalNetwork:
        """Hidden units and classes as configured."""
        return cls(num_inputs, options.hidden, options.classes, binary=section.likelihood == "bernoulli")

    @abstractmethod
    def first_layer(self, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S V"]) -> Float[Tensor, "*S D1"]:
        """W⁽¹ʲ⁾ [*S, H D], of the shared latents and of the local ones before W⁽²ʲ⁾."""

    def initial_local(self, site: SiteRows, *, scale: float, coupled: bool, triangular: bool) -> LocalPosterior:
        """N(m, scale² I) with m = 0 but for the last layer, where it is drawn: hidden units would stay alike else."""
        start = super().initial_local(site, scale=scale, coupled=coupled, triangular=triangular)
        generator = torch.Generator().manual_seed(START)
        drawn = torch.randn(self.head, generator=generator, dtype=torch.float64) / math.sqrt(self.hidden)
        mean = start.mean.clone()
        mean[:, -self.head :] = drawn
        return replace(start, mean=mean)

    def log_local(
        self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]
    ) -> Float[Tensor, "*S U"]:
        """Σ_i log p(y_i | Z_G, Z_L) + log N(Z_L | 0, I)."""
        return self.log_likelihood(site, z_global, z_local) + standard_normal(z_local)

    def logits(self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]) -> Tensor:
        """W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x)."""
        before, last = z_local[..., 0, : -self.head], z_local[..., 0, -self.head :]
        first = self.first_layer(z_global, before).unflatten(-1, (self.hidden, self.num_inputs))
        second = last.unflatten(-1, (self.num_classes, self.hidden))
        return torch.relu(site.features @ first.mT) @ second.mT


class FedPop(PersonalNetwork):
    """The first layer is the same everywhere, the last one personal."""

    extra = 0

    def local_width(self, site: SiteRows) -> int:
        """The last layer."""
        return self.head

    def first_layer(self, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S V"]) -> Float[Tensor, "*S D1"]:
        """Z_G itself."""
        return z_global


class HierarchicalNetwork(PersonalNetwork):
    """The first layers of the sites are scattered around a shared one, the last ones personal."""

    extra = 1

    def local_width(self, site: SiteRows) -> int:
        """ε and the last layer."""
        return self.hidden * self.num_inputs + self.head

    def first_layer(self, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S V"]) -> Float[Tensor, "*S D1"]:
        """μ + σ ε."""
        return z_global[..., :-1] + half_normal(z_global[..., -1:]) * z_local


def half_normal(z: Tensor) -> Tensor:
    """σ = F⁻¹(Φ(z)) = −Φ⁻¹(Φ(−z) / 2), which is |N(0, 1)| where z is N(0, 1)."""
    return -torch.special.ndtri(0.5 * torch.special.ndtr(-z))
