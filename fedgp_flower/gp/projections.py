"""The one projection every sparse model stands on: W = L⁻¹ K_zx with L Lᵀ = K_zz + jitter."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from fedgp_flower.gp.kernels import prior_variance
from fedgp_flower.gp.linalg import kernel_cholesky


def whitened(
    kzz: Float[Tensor, "*S M M"], kzx: Float[Tensor, "*S M N"], *, variance: Tensor, jitter: float, of: str = "K_zz"
) -> Float[Tensor, "*S M N"]:
    """W = L⁻¹ K_zx, L Lᵀ = K_zz + jitter · variance · I: the weights f(x) has on whitened values v = L⁻¹u ~ N(0, I)."""
    factor = kernel_cholesky(kzz, variance=variance, jitter=jitter, of=of)
    return torch.linalg.solve_triangular(factor, kzx, upper=False)


def whitened_projection(
    kernel: Kernel, inducing: Float[Tensor, "*S M D"], inputs: Float[Tensor, "*S N D"], *, jitter: float
) -> Float[Tensor, "*S M N"]:
    """:func:`whitened` of a kernel, its jitter relative to the mean prior variance at Z."""
    kzz, kzx = kernel(inducing).to_dense(), kernel(inducing, inputs).to_dense()
    return whitened(kzz, kzx, variance=prior_variance(kernel, inducing), jitter=jitter)
