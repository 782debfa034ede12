"""The hierarchical GP whose sites differ in the shape of what is their own: noise, and size and lengthscale of h_k.

    noise σ exp(w₁z₁),   h_k = s₀ + s₁ᵀx + GP with amplitude exp(w₂z₂) and lengthscales exp(w₃z₃) times those of k_L

z_k ~ N(0, I) is the site's; the widths w say how much sites differ; w₂ and w₃ are learned. Lengthscales stretch
by dividing inputs, so that a period stretches as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from fedgp_flower.methods.sfvi.gp import GPOptions, HierarchicalGP, parts_of
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows

NOISE, AMPLITUDE, LENGTHSCALE = range(3)
WIDTHS = "log_width"
"""Name of log w among the parameters."""


class ShapedGP(HierarchicalGP):
    """Shared trend + site deviation + site noise, the last two of a shape of the site's own.

    Args:
        trend: k_G.
        deviation: k_L.
        inputs: Shared inducing inputs.
        options: As of the base.
        widths: Initial w of noise, amplitude and lengthscale; where 0 all sites are the same.
    """

    def __init__(
        self, trend: Kernel, deviation: Kernel, inputs: Rows, options: GPOptions, widths: Sequence[float]
    ) -> None:
        super().__init__(trend, deviation, inputs, options)
        self.varied = [which for which, width in enumerate(widths) if width > 0]
        if self.varied:
            start = inputs.new_tensor([widths[which] for which in self.varied])
            self.log_width = nn.Parameter(start.log())  # WIDTHS

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> ShapedGP:
        """Kernels as the base has them; sites differ in shape where noise is Gaussian."""
        trend, deviation, points, own = parts_of(options, section, num_inputs, inputs)
        if own.likelihood != "gaussian":
            return cls(trend, deviation, points, own, (0.0, 0.0, 0.0))
        shape = (options.site_amplitude, options.site_lengthscale) if own.deviates else (0.0, 0.0)
        return cls(trend, deviation, points, own, (options.site_noise, *shape))

    def shape(self, offset: Float[Tensor, " W"]) -> Float[Tensor, 3]:
        """What noise, amplitude and lengthscale are multiplied by at a z_k."""
        whole = offset.new_zeros(3)
        if self.varied:
            whole = whole.index_add(0, torch.tensor(self.varied), self.log_width.exp() * offset)
        return whole.exp()

    def width(self, which: int) -> float:
        """A w, 0 where sites do not differ."""
        return float(self.log_width.detach()[self.varied.index(which)].exp()) if which in self.varied else 0.0

    @property
    def noise_spread(self) -> float:
        """That of noise."""
        return self.width(NOISE)

    @property
    def deviation_factor(self) -> float:
        """E exp(2 w₂ z₂)."""
        return math.exp(2 * self.width(AMPLITUDE) ** 2)
