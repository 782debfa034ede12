"""Weak priors of hyperparameters, for those that the data do not determine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from fedgp_flower.gp.kernels import WARP, is_amplitude, wire_name

Priors: TypeAlias = Mapping[str, tuple[float, float]]
"""Mean and standard deviation of each logarithm, by name in messages."""
NOISE = (-4.0, 2.0)


def hyperpriors(kernel: Kernel, num_inputs: int) -> Priors:
    """Priors of the log hyperparameters of a kernel of D inputs and of the noise.

    For kernels of |x − z|², which grows as D, log ℓ ~ N(½ log D + .3, 1); for ``l1``, a function of Σ |x_d − z_d|,
    log ℓ ~ N(log D + 1, 1). Scales have log a ~ N(1, 1.5²), or N(−2, 1.5²) for the rough ``l1``. A warp ω ~ N(0, ½²).
    """
    priors = {"likelihood.log_noise": NOISE}
    for name, _ in kernel.named_parameters():
        owner = kernel.get_submodule(name.rpartition(".")[0])
        rough = getattr(getattr(owner, "base_kernel", owner), "rough", False)
        if "lengthscale" in name:
            prior = (math.log(num_inputs) + 1.0 if rough else 0.5 * math.log(num_inputs) + 0.3, 1.0)
        elif is_amplitude(name):
            prior = (-2.0 if rough else 1.0, 1.5)
        elif name.endswith("raw_warp"):
            prior = WARP
        else:
            prior = (0.0, 1.0)
        priors[f"kernel.{wire_name(name)}"] = prior
    return priors


def log_prior(named: Mapping[str, Tensor], priors: Priors) -> Tensor:
    """Log density of the logarithms, up to a constant."""
    return -0.5 * torch.stack([((named[name] - m) / sd).square().sum() for name, (m, sd) in priors.items()]).sum()
