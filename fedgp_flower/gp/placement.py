"""Where a site computes, and how precisely: the keys ``device`` and ``precision``. Messages are float64 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedgp_flower.errors import ConfigError
from fedgp_flower.run.config import CoreConfig
from fedgp_flower.typing import Array

Module = TypeVar("Module", bound=torch.nn.Module)

FLOAT32_JITTER = 1e-6
"""Least relative jitter of a kernel matrix in float32, where 1e-8 is below rounding."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and a floating-point type."""

    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(config: CoreConfig) -> Placement:
        """The placement a configuration asks for at this site.

        Raises:
            ConfigError: if it asks for CUDA where there is none.
        """
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("`device` = 'cuda', but this site has no CUDA device; allowed here: 'auto', 'cpu'")
        device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
        return Placement(torch.device(device), getattr(torch, config.precision))

    def tensor(self, array: Array) -> Tensor:
        """An array as a tensor there."""
        return torch.as_tensor(array).to(self.device, self.dtype)

    def module(self, module: Module) -> Module:
        """A module with its parameters there."""
        return module.to(self.device, self.dtype)


def to_array(tensor: Tensor) -> Array:
    """A tensor as a float64 array on the CPU: what travels."""
    return tensor.detach().cpu().double().numpy()
