"""GPyTorch kernels from an expression, with positive parameters in log coordinates.

``rbf``, ``matern32``, ``matern52``, ``l1``, ``periodic`` and ``linear`` combine with ``+`` and ``*``: ``rbf + l1``, or
``matern52 * periodic`` for a season whose shape drifts. Terms of a sum have a scale each; a product has one.
``warp(rbf + l1)`` learns a scale of each input on which the function is equally smooth everywhere.

Installed packages add kernels by entry points of the group ``fedgp_flower.kernels``: functions of ``(num_inputs, ard)``
that return a GPyTorch kernel. Every site of a run needs the package.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

import torch
from gpytorch import settings
from gpytorch.constraints import Positive
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from jaxtyping import Float
from linear_operator import to_linear_operator
from torch import Tensor

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import KERNEL_GROUP, ModelSection, kernel_tree


class Scaled(ScaleKernel):
    """GPyTorch's kernel, without ``torch.broadcast_shapes`` for an empty batch, which loads SymPy for .5 s."""

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape, as in GPyTorch."""
        plain = not self._batch_shape and not self.base_kernel.batch_shape
        return torch.Size() if plain else super().batch_shape

    @batch_shape.setter
    def batch_shape(self, shape: torch.Size) -> None:
        self._batch_shape = shape


class Matern(MaternKernel):
    """GPyTorch's kernel, with second derivatives in trace mode, which ``torch.cdist`` of up to 25 rows lacks."""

    def covar_dist(self, x1: Tensor, x2: Tensor, **kind: Any) -> Tensor:
        """Distances of rows, in trace mode as roots of squared distances."""
        if settings.trace_mode.off() or kind.get("square_dist"):
            return super().covar_dist(x1, x2, **kind)
        return super().covar_dist(x1, x2, **kind | {"square_dist": True}).clamp_min(1e-30).sqrt()


class L1(Kernel):
    """The product over inputs of Matérn-1/2 kernels, k(x, z) = exp(−Σ_d |x_d − z_d| / ℓ_d).

    This Laplacian kernel suits steps along the axes; it is that of the Mondrian process (Balog et al. 2016).
    """

    has_lengthscale = True
    rough = True

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Covariances [..., N, M], or the diagonal [..., N]; in trace mode with second derivatives."""
        left, right = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            return (left - right).abs().sum(-1).neg().exp()
        if settings.trace_mode.off():
            return torch.cdist(left, right, p=1).neg().exp()
        return (left[..., :, None, :] - right[..., None, :, :]).abs().sum(-1).neg().exp()


class Linear(LinearKernel):
    """GPyTorch's kernel as a dense matrix, since sums with its low-rank form need a root of the other term."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Products v x₁ᵀx₂ [..., N, M], or its diagonal [..., N]."""
        variance = self.variance[..., 0] if diag else self.variance
        return variance * ((x1 * x2).sum(-1) if diag else x1 @ x2.mT)


WARP = (0.0, 0.5)
"""Mean and standard deviation of the prior of each ω of :func:`warped`."""
FLAT = 1e-3
"""Below this exponent of :func:`warped`, a series is more accurate."""


def warped(inputs: Float[Tensor, "*B N D"], log_slopes: Float[Tensor, "... 1 D"]) -> Float[Tensor, "*B N D"]:
    """Return g(x) of standardised inputs, the transformation of Yeo and Johnson (2000) with power λ = 1 + ω.

    g(0) = 0 and g'(x) = (1 + |x|)^(±ω), + above zero: e^ω is the slope at x = e − 1, relative to that at the mean. With
    ω = 0, g(x) = x.
    """
    side = 1.0 - 2.0 * (inputs < 0)
    power, size = 1.0 + side * log_slopes, torch.log1p(side * inputs)  # g = ±expm1(power · size)/power
    flat = power.abs() < FLAT
    safe = torch.where(flat, 1.0, power)
    series = size * (1 + power * size / 2 * (1 + power * size / 3 * (1 + power * size / 4)))
    return side * torch.where(flat, series, torch.expm1(safe * size) / safe)


class Warped(Kernel):
    """k(g(x), g(z)) with :func:`warped` inputs, whose slopes are learned (Snoek et al. 2014)."""

    def __init__(self, inner: Kernel, num_inputs: int) -> None:
        super().__init__()
        self.inner = inner
        self.register_parameter("raw_warp", torch.nn.Parameter(torch.zeros(1, num_inputs)))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """Covariances [..., N, M], or the diagonal [..., N]."""
        return self.inner(warped(x1, self.raw_warp), warped(x2, self.raw_warp), diag=diag, **params)


class OfEach(Kernel):
    """A kernel for each of C named functions; matrices [C, ..., N, M]."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        super().__init__()
        self.each = [*kernels.values()]
        for name, kernel in kernels.items():
            self.add_module(name, kernel)

    def __call__(self, x1: Tensor, x2: Tensor | None = None, diag: bool = False, **params: Any) -> Any:
        """Covariances, or the diagonal [C, ..., N], which GPyTorch would take for matrices if sizes agree."""
        found = [kernel(x1, x2, diag=diag, **params) for kernel in self.each]
        return torch.stack(found) if diag else to_linear_operator(torch.stack([part.to_dense() for part in found]))


def log_positive() -> Positive:
    """The constraint θ = exp(raw), so that GPyTorch's raw parameter is log θ."""
    return Positive(transform=torch.exp, inv_transform=torch.log)


def build_kernel(model: ModelSection, num_inputs: int) -> Kernel:
    """The kernel of ``model.kernel`` at the initial values of the configuration, in float64."""
    kernel = _build(kernel_tree(model.kernel), model, num_inputs).double()  # scales, too
    for name, parameter in kernel.named_parameters():
        if is_amplitude(name):
            parameter.data.fill_(math.log(model.outputscale))
        elif any(kind in name for kind in ("lengthscale", "period_length")):
            parameter.data.fill_(math.log(model.lengthscale))
    return kernel


def _build(node: ast.expr, model: ModelSection, num_inputs: int, scaled: bool = True) -> Kernel:
    """Build a node; each term of a sum has a scale, a product has one, and its factors have none."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined(AdditiveKernel, [_build(side, model, num_inputs) for side in (left, right)])
        case ast.BinOp(left=left, right=right):
            kernel = _joined(ProductKernel, [_build(side, model, num_inputs, False) for side in (left, right)])
        case ast.Call(func=ast.Name("steps"), args=[inner]):
            return _build(inner, model, num_inputs, scaled)  # see fedgp_flower.gp.steps
        case ast.Call(args=[inner]):
            return Warped(_build(inner, model, num_inputs, scaled), num_inputs)
        case _:
            name = cast(ast.Name, node).id
            kernel, scaled = _atom(name, model, num_inputs), scaled and name != "linear"  # its variance is its scale
    return Scaled(kernel, outputscale_constraint=log_positive()) if scaled else kernel


def _joined(kind: type[AdditiveKernel] | type[ProductKernel], parts: list[Kernel]) -> Kernel:
    """Join parts, with nested sums or products flattened."""
    return kind(*(kernel for part in parts for kernel in (part.kernels if type(part) is kind else [part])))


def _atom(name: str, model: ModelSection, num_inputs: int) -> Kernel:
    dims = num_inputs if model.ard else None
    atoms: Mapping[str, Callable[[], Kernel]] = {
        "rbf": lambda: RBFKernel(ard_num_dims=dims),
        "matern32": lambda: Matern(1.5, ard_num_dims=dims),
        "matern52": lambda: Matern(2.5, ard_num_dims=dims),
        "l1": lambda: L1(ard_num_dims=dims),
        "periodic": lambda: PeriodicKernel(ard_num_dims=dims or 1),
        "linear": Linear,
    }
    if name in atoms:
        return _in_logarithms(atoms[name](), name)
    found = tuple(entry_points(group=KERNEL_GROUP, name=name))
    if len(found) != 1:
        raise ConfigError(f"kernel {name!r}: {len(found)} packages register it, expected one; uninstall the others")
    return _in_logarithms(found[0].load()(num_inputs, model.ard), name)


def _in_logarithms(kernel: Kernel, name: str) -> Kernel:
    """Make log θ the raw parameters; raise ConfigError for a parameter with other bounds than θ > 0."""
    kernel = kernel.double()  # before the logarithm, which float32 would round
    for path, constraint in list(kernel.named_constraints()):
        *owner, raw = path.removesuffix("_constraint").split(".")
        module = kernel.get_submodule(".".join(owner))
        if float(constraint.lower_bound) != 0 or not math.isinf(float(constraint.upper_bound)):
            raise ConfigError(
                f"kernel {name!r}: parameter `{raw}` has constraint {constraint}; expected a positive or free one. "
                "Give its GPyTorch kernel a Positive constraint"
            )
        parameter = module.get_parameter(raw)
        parameter.data.copy_(constraint.transform(parameter.data).log())
        module.register_constraint(raw, log_positive())
    return kernel


@cache
def wire_name(parameter: str) -> str:
    """The name of a GPyTorch parameter in messages: ``base_kernel.raw_lengthscale`` is ``log_lengthscale``."""
    *path, leaf = [part for part in parameter.split(".") if part not in {"base_kernel", "inner"}]
    return ".".join([*path, leaf.replace("raw_", "log_", 1)])


@cache
def amplitude_names(model: ModelSection, num_inputs: int) -> tuple[str, ...]:
    """Names in messages of the amplitudes of all terms of a kernel."""
    outer, named = re.compile(r"(inner\.)?(kernels\.\d+\.)?raw_(outputscale|variance)"), build_kernel(model, num_inputs)
    return tuple(f"kernel.{wire_name(name)}" for name, _ in named.named_parameters() if outer.fullmatch(name))


def is_amplitude(name: str) -> bool:
    """Whether a parameter of this name is a variance."""
    return "outputscale" in name or "variance" in name


def prior_variance(kernel: Kernel, point: Tensor) -> Tensor:
    """The prior variance k(x, x) averaged over ``point`` [..., M, D], shape [...], the unit of jitter."""
    return kernel(point, diag=True).mean(-1)


class BatchedKernel:
    """k_β(x, x') for samples β, the logarithms of lengthscales and of standard deviations a (outputscale a²)."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, parameters = kernel, dict(kernel.named_parameters())
        self._powers = {name: 2.0 if is_amplitude(name) else 1.0 for name in parameters}  # the kernel keeps log θ
        self._shapes = [parameter.shape for parameter in parameters.values()]
        self.num_hyper = sum(shape.numel() for shape in self._shapes)
        """P, the number of hyperparameters of the kernel."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the entries of β, which are logarithms; variances enter as standard deviations."""
        names: list[str] = []
        for raw, shape in zip(self._powers, self._shapes, strict=True):
            path = [part for part in raw.split(".") if part not in {"kernels", "base_kernel", "inner"}]
            name, size = " ".join(path).replace("raw_", "").replace("outputscale", "amplitude"), shape.numel()
            names += [name] if size == 1 else [f"{name} {index + 1}" for index in range(size)]
        return tuple(names)

    def initial(self) -> Float[Tensor, " P"]:
        """β at the parameters of the kernel."""
        return torch.cat([p.detach().flatten() / self._powers[n] for n, p in self._kernel.named_parameters()])

    def __call__(
        self,
        hyper: Float[Tensor, "S P"],
        left: Float[Tensor, "... M D"],
        right: Float[Tensor, "... N D"],
        diag: bool = False,
    ) -> Tensor:
        """Covariances k_β(left, right) of every sample [S, M, N], or with ``diag`` those of equal places [S, M]."""
        batches = (rows.expand(len(hyper), *rows.shape[-2:]) for rows in (left, right))
        with settings.lazily_evaluate_kernels(False):  # evaluate before the parameters are restored
            values = torch.func.functional_call(self._kernel, self.raw(hyper), tuple(batches), {"diag": diag})
        return cast(Tensor, values if diag else values.to_dense())

    def raw(self, hyper: Float[Tensor, "S P"]) -> dict[str, Tensor]:
        """The kernel's raw parameters, with the samples as first axis."""
        pieces = hyper.split([shape.numel() for shape in self._shapes], 1)
        named = zip(self._powers.items(), pieces, self._shapes, strict=True)
        return {name: power * piece.reshape(-1, *shape) for (name, power), piece, shape in named}

    def at(self, hyper: Float[Tensor, " P"]) -> Kernel:
        """The GPyTorch kernel of one sample."""
        kernel = deepcopy(self._kernel)
        for name, value in self.raw(hyper[None]).items():
            kernel.get_parameter(name).data.copy_(value[0])
        return kernel
