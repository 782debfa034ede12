"""Covariances of outputs that are smoothed, scaled copies of shared latent functions.

Every output is f = Σ_i s_i (g_i smoothed by N(0, R_i)), rescaled to the variance of g_i. For two such functions

    cov_i(x, x') = (|2R + S| |2R' + S|)^¼ |R + R' + S|^(−½) exp(−½ (x − x')ᵀ (R + R' + S)⁻¹ (x − x')),

and a latent function has R = 0, so that one formula gives c_ff, c_fg and c_gg. With v = s (|2R + S| / |S|)^¼ the
cross covariance is Eq. 18 of Chung and Al Kontar (2024). R = 0 throughout is the linear model of coregionalisation.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import Parameter


def smoothed_covariance(x: Tensor, other: Tensor, scales: Tensor, smoothing: Tensor, smoothing_other: Tensor) -> Tensor:
    """Covariance [I, N, N'] of two unit-variance copies of each g_i from the diagonals of S_i and of two R_i [I, D]."""
    width = smoothing + smoothing_other + scales  # [I, D]
    height = (((2 * smoothing + scales) * (2 * smoothing_other + scales)).pow(0.25) / width.sqrt()).prod(-1)  # [I]
    gaps = (x[:, None, :] - other[None, :, :]).square()  # [N, N', D]
    exponent = torch.einsum("nkd,id->ink", gaps, -0.5 / width)
    return height[:, None, None] * exponent.exp()


class ConvolvedKernel(Kernel):
    """Covariance c_ff of one unit's output, from log S and log R [I, D] and signed amplitudes s [I]."""

    is_stationary = True

    def __init__(self, raw_scales: Tensor, raw_smoothing: Tensor, amplitudes: Tensor) -> None:
        super().__init__()
        self.raw_scales, self.raw_smoothing = Parameter(raw_scales), Parameter(raw_smoothing)
        self.amplitudes = Parameter(amplitudes)

    @property
    def scales(self) -> Tensor:
        """Squared lengthscales S of the latent functions, [I, D]."""
        return self.raw_scales.exp()

    @property
    def smoothing(self) -> Tensor:
        """Squared smoothing widths R of this unit, [I, D]."""
        return self.raw_smoothing.exp()

    def latent(self, inducing: Tensor) -> Tensor:
        """c_gg at the pseudo-inputs [J, D], unit variance: [I, J, J]."""
        zero = torch.zeros_like(self.scales)
        return smoothed_covariance(inducing, inducing, self.scales, zero, zero)

    def cross(self, x: Tensor, inducing: Tensor) -> Tensor:
        """c_fg between rows [N, D] and pseudo-inputs [J, D]: [I, N, J]."""
        zero = torch.zeros_like(self.scales)
        return self.amplitudes[:, None, None] * smoothed_covariance(x, inducing, self.scales, self.smoothing, zero)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """c_ff(x, x') = Σ_i s_i² exp(−½ (x − x')ᵀ (2R_i + S_i)⁻¹ (x − x'))."""
        variance = self.amplitudes.square()
        if diag:
            return variance.sum().expand(x1.shape[:-1])
        unit = smoothed_covariance(x1, x2, self.scales, self.smoothing, self.smoothing)
        return (variance[:, None, None] * unit).sum(0)
