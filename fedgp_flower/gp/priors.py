"""Weak Gaussian priors of log hyperparameters; they matter only if the data do not determine a hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from fedgp_flower.gp.kernels import WARP, is_amplitude, wire_name
from fedgp_flower.gp.models import LOG_NOISE

Priors: TypeAlias = Mapping[str, tuple[float, float]]
"""Mean and standard deviation of each log hyperparameter, by wire name."""
NOISE = (-4.0, 2.0)
"""Mean and standard deviation of log σ²."""


def hyperpriors(kernel: Kernel, num_inputs: int) -> Priors:
    """Return the priors of the log noise and of the log hyperparameters of a kernel of D inputs.

    Lengthscales have log ℓ ~ N(½ log D + .3, 1), since |x − z|² grows in proportion to D. For ``l1``, a function of
    Σ |x_d − z_d|, log ℓ ~ N(log D + 1, 1). Amplitudes have log a ~ N(1, 1.5²), or N(−2, 1.5²) for ``l1``, which is
    rough. A warp has ω ~ N(0, ½²), any other parameter N(0, 1).
    """
    priors = {LOG_NOISE: NOISE}
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
    """Return the log prior density of the log hyperparameters, up to a constant."""
    return -0.5 * torch.stack([((named[name] - m) / sd).square().sum() for name, (m, sd) in priors.items()]).sum()
