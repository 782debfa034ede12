"""Device, precision and threads of a site's computations. Messages are float64 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.typing import Array

Module = TypeVar("Module", bound=torch.nn.Module)


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and a floating-point type."""

    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(config: CoreConfig) -> Placement:
        """The configured placement; raise ConfigError if there is no CUDA device."""
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("`device` = 'cuda', but this site has no CUDA device; allowed here: 'auto', 'cpu'")
        device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
        return Placement(torch.device(device), getattr(torch, config.precision))

    def tensor(self, array: Array) -> Tensor:
        """An array as a tensor on the device."""
        return torch.as_tensor(array).to(self.device, self.dtype)

    def module(self, module: Module) -> Module:
        """Move a module's parameters to the device."""
        return module.to(self.device, self.dtype)


def to_array(tensor: Tensor) -> Array:
    """A tensor as a float64 array on the CPU, as in messages."""
    return tensor.detach().cpu().double().numpy()


@lru_cache(maxsize=1)
def limit_threads(count: int) -> None:
    """Set the threads of PyTorch and NumPy in this process."""
    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")
