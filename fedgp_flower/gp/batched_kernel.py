"""A GPyTorch kernel as a pure function of its hyperparameters, for many samples of them at once.

A sample β collects the logarithms of the positive parameters on the scale of a *standard deviation*: log l for a
lengthscale or period, log a for an outputscale a², log v for a linear variance v². LN(0, 1) priors are N(0, I) on β.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

_VARIANCES = ("outputscale", "variance")


class _Dense(torch.nn.Module):
    """The kernel as a module whose ``forward`` is complete: nothing is left to evaluate when it returns."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
        with gpytorch.settings.lazily_evaluate_kernels(False):
            if diagonal:
                values: Tensor = self.kernel(left, right, diag=True)
                return values
            dense: Tensor = self.kernel(left, right).to_dense()
            return dense


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a parameter of the kernel sits in β."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    power: float  # raw = power * β, the kernel keeps log θ


class BatchedKernel:
    """k_β(x, x') for a batch of β, built around one kernel of :func:`~fedgp_flower.gp.kernels.build_kernel`."""

    def __init__(self, kernel: Kernel) -> None:
        self._module = _Dense(kernel)
        self._slots: list[_Slot] = []
        start = 0
        for name, parameter in self._module.named_parameters():
            power = 2.0 if any(kind in name for kind in _VARIANCES) else 1.0
            stop = start + parameter.numel()
            self._slots.append(_Slot(name, parameter.shape, start, stop, power))
            start = stop
        self.num_hyper = start
        """P, the number of hyperparameters of the kernel."""

    @property
    def names(self) -> tuple[str, ...]:
        """What each entry of β is the logarithm of; variances enter as standard deviations."""
        found: list[str] = []
        for slot in self._slots:
            path = [part for part in slot.name.split(".") if part not in {"kernel", "kernels", "base_kernel"}]
            name = " ".join(path).replace("raw_", "").replace("outputscale", "amplitude")
            size = slot.stop - slot.start
            found += [name] if size == 1 else [f"{name} {index + 1}" for index in range(size)]
        return tuple(found)

    def initial(self) -> Float[Tensor, " P"]:
        """β at the parameters of the kernel."""
        parameters = dict(self._module.named_parameters())
        return torch.cat([parameters[s.name].detach().flatten() / s.power for s in self._slots])

    def matrix(
        self, hyper: Float[Tensor, "S P"], left: Float[Tensor, "S M D"], right: Float[Tensor, "... N D"]
    ) -> Float[Tensor, "S M N"]:
        """Covariances k_β(left, right) of every sample."""
        samples = hyper.shape[0]
        return self._call(hyper, left, right.expand(samples, *right.shape[-2:]), diagonal=False)

    def diagonal(self, hyper: Float[Tensor, "S P"], inputs: Float[Tensor, "... N D"]) -> Float[Tensor, "S N"]:
        """Prior variances k_β(x, x) of every sample."""
        batch = inputs.expand(hyper.shape[0], *inputs.shape[-2:])
        return self._call(hyper, batch, batch, diagonal=True)

    def raw(self, hyper: Float[Tensor, "S P"]) -> dict[str, Tensor]:
        """The kernel's raw parameters for every sample, batched in front."""
        return {s.name: s.power * hyper[:, s.start : s.stop].reshape(-1, *s.shape) for s in self._slots}

    def at(self, hyper: Float[Tensor, " P"]) -> Kernel:
        """The kernel of one sample, as an ordinary one of GPyTorch."""
        module = deepcopy(self._module)
        parameters = dict(module.named_parameters())
        for name, value in self.raw(hyper[None]).items():
            parameters[name].data.copy_(value[0])
        return module.kernel

    def _call(self, hyper: Tensor, left: Tensor, right: Tensor, *, diagonal: bool) -> Tensor:
        values: Tensor = torch.func.functional_call(self._module, self.raw(hyper), (left, right, diagonal))
        return values
