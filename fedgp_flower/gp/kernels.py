"""GPyTorch kernels from an expression, with every positive parameter in log coordinates.

``rbf``, ``matern32``, ``matern52``, ``periodic`` and ``linear`` combine with ``+`` and ``*``: ``matern52 + linear``, or
``matern52 * periodic`` for a season whose shape drifts. Terms of a sum have a scale each; a product has one.

Another package brings a kernel under a name, by an entry point of the group ``fedgp_flower.kernels``::

    [project.entry-points."fedgp_flower.kernels"]
    rational_quadratic = "my_package.kernels:rational_quadratic"

    def rational_quadratic(num_inputs: int, ard: bool) -> gpytorch.kernels.Kernel:
        return gpytorch.kernels.RQKernel(ard_num_dims=num_inputs if ard else None)

It is used like the others, as in ``rational_quadratic + linear``; every site of a run needs the package.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

import gpytorch
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

from fedgp_flower.errors import ConfigError, ProtocolError
from fedgp_flower.gp.placement import to_array
from fedgp_flower.options import KERNEL_GROUP, ModelSection, kernel_tree
from fedgp_flower.typing import Array, NamedArrays


class Scaled(ScaleKernel):
    """GPyTorch's kernel times an amplitude, without what it asks PyTorch of batches that there are not.

    ``torch.broadcast_shapes`` loads SymPy, half a second of each process that makes a kernel, and Flower answers every
    message in a new process.
    """

    @property
    def batch_shape(self) -> torch.Size:
        """Of kernels without a batch empty, as that of GPyTorch."""
        plain = not self._batch_shape and not self.base_kernel.batch_shape
        return torch.Size() if plain else super().batch_shape

    @batch_shape.setter
    def batch_shape(self, shape: torch.Size) -> None:
        self._batch_shape = shape


class Matern(MaternKernel):
    """GPyTorch's kernel with second derivatives between few rows as well, while it is traced.

    ``torch.cdist`` of at most 25 rows has none.
    """

    def covar_dist(self, x1: torch.Tensor, x2: torch.Tensor, **kind: Any) -> torch.Tensor:
        """Distances of rows; traced, the roots of squared ones."""
        if settings.trace_mode.off() or kind.get("square_dist"):
            return super().covar_dist(x1, x2, **kind)
        return super().covar_dist(x1, x2, **kind | {"square_dist": True}).clamp_min(1e-30).sqrt()


def log_positive() -> Positive:
    """The constraint θ = exp(raw): GPyTorch's raw parameter *is* log θ."""
    return Positive(transform=torch.exp, inv_transform=torch.log)


def build_kernel(model: ModelSection, num_inputs: int) -> Kernel:
    """The kernel of ``model.kernel`` at the initial values of the configuration, in float64."""
    kernel = _build(kernel_tree(model.kernel), model, num_inputs).double()  # scales, too
    for name, parameter in kernel.named_parameters():
        if any(kind in name for kind in ("outputscale", "variance")):
            parameter.data.fill_(math.log(model.outputscale))
        elif any(kind in name for kind in ("lengthscale", "period_length")):
            parameter.data.fill_(math.log(model.lengthscale))
    return kernel


def _build(node: ast.expr, model: ModelSection, num_inputs: int) -> Kernel:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms = [_build(side, model, num_inputs) for side in (node.left, node.right)]
        return AdditiveKernel(*_joined(terms, AdditiveKernel))
    if isinstance(node, ast.Name) and node.id == "linear":
        return _atom("linear", model, num_inputs)  # its variance is its scale
    return Scaled(_unscaled(node, model, num_inputs), outputscale_constraint=log_positive())


def _unscaled(node: ast.expr, model: ModelSection, num_inputs: int) -> Kernel:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [_unscaled(side, model, num_inputs) for side in (node.left, node.right)]
        return ProductKernel(*_joined(factors, ProductKernel))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _build(node, model, num_inputs)
    return _atom(cast(ast.Name, node).id, model, num_inputs)


def _atom(name: str, model: ModelSection, num_inputs: int) -> Kernel:
    dims = num_inputs if model.ard else None
    atoms: Mapping[str, Callable[[], Kernel]] = {
        "rbf": lambda: RBFKernel(ard_num_dims=dims),
        "matern32": lambda: Matern(1.5, ard_num_dims=dims),
        "matern52": lambda: Matern(2.5, ard_num_dims=dims),
        "periodic": lambda: PeriodicKernel(ard_num_dims=dims or 1),
        "linear": LinearKernel,
    }
    if name in atoms:
        return _in_logarithms(atoms[name](), name)
    found = tuple(entry_points(group=KERNEL_GROUP, name=name))
    if len(found) != 1:
        raise ConfigError(f"kernel {name!r}: {len(found)} packages register it, expected one; uninstall the others")
    return _in_logarithms(found[0].load()(num_inputs, model.ard), name)


def _in_logarithms(kernel: Kernel, name: str) -> Kernel:
    """The same kernel, the raw parameter of everything that is positive being its logarithm.

    Raises:
        ConfigError: for a parameter that is bounded in another way.
    """
    kernel = kernel.double()  # before the logarithm, which float32 would round
    for path, constraint in list(kernel.named_constraints()):
        *owner, raw = path.removesuffix("_constraint").split(".")
        module = kernel.get_submodule(".".join(owner))
        if float(constraint.lower_bound) != 0 or not math.isinf(float(constraint.upper_bound)):
            raise ConfigError(
                f"kernel {name!r}: parameter `{raw}` lies in {constraint}; expected one that is positive, or free. "
                "Give its GPyTorch kernel a Positive constraint"
            )
        parameter = module.get_parameter(raw)
        parameter.data.copy_(constraint.transform(parameter.data).log())
        module.register_constraint(raw, log_positive())
    return kernel


def _joined(parts: list[Kernel], kind: type[AdditiveKernel] | type[ProductKernel]) -> Iterator[Kernel]:
    for part in parts:
        if isinstance(part, kind):
            yield from part.kernels
        else:
            yield part


def wire_name(parameter: str) -> str:
    """The name a GPyTorch parameter has in messages: ``base_kernel.raw_lengthscale`` is ``log_lengthscale``."""
    *path, leaf = [part for part in parameter.split(".") if part != "base_kernel"]
    return ".".join([*path, leaf.replace("raw_", "log_", 1)])


def load_parameters(parameters: Iterable[tuple[str, torch.nn.Parameter]], arrays: Mapping[str, Array]) -> None:
    """Set named parameters from arrays; one without axes may also come as an array of one number.

    Raises:
        ProtocolError: naming the array that is missing or has another shape.
    """
    for name, parameter in parameters:
        if name not in arrays or arrays[name].shape not in (tuple(parameter.shape), tuple(parameter.shape) or (1,)):
            found = arrays[name].shape if name in arrays else "nothing"
            raise ProtocolError(f"array `{name}`: expected shape {tuple(parameter.shape)}, found {found}")
        parameter.data.copy_(torch.as_tensor(arrays[name]).view(parameter.shape))


def amplitudes(kernel: Kernel) -> Iterator[torch.nn.Parameter]:
    """The parameters that scale a kernel as a whole: those of the terms of a sum, or the one in front."""
    if isinstance(kernel, AdditiveKernel):
        for part in kernel.kernels:
            yield from amplitudes(part)
    else:
        yield kernel.raw_outputscale if isinstance(kernel, ScaleKernel) else kernel.raw_variance


class WiredModel(gpytorch.Module):
    """A kernel and a Gaussian likelihood whose parameters, in log coordinates, travel under their wire names."""

    covar_module: Kernel
    likelihood: gpytorch.likelihoods.GaussianLikelihood

    @property
    def kernel(self) -> Kernel:
        """The kernel, which GPyTorch calls ``covar_module``."""
        return self.covar_module

    @property
    def noise(self) -> torch.Tensor:
        """Noise variance σ² of the standardised target, shape []."""
        noise: torch.Tensor = self.likelihood.noise.squeeze(-1)
        return noise

    def wire_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter with its wire name, in a fixed order."""
        for name, parameter in self.kernel.named_parameters():
            yield f"kernel.{wire_name(name)}", parameter
        yield "likelihood.log_noise", self.likelihood.noise_covar.raw_noise

    @property
    def amplitude_names(self) -> list[str]:
        """Wire names of :func:`amplitudes`."""
        scaling = {id(parameter) for parameter in amplitudes(self.kernel)}
        return [name for name, parameter in self.wire_parameters() if id(parameter) in scaling]

    def to_arrays(self) -> NamedArrays:
        """Current parameters under their wire names."""
        return {name: to_array(parameter).copy() for name, parameter in self.wire_parameters()}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Set all parameters from arrays.

        Raises:
            ProtocolError: naming the array that is missing or has another shape.
        """
        load_parameters(self.wire_parameters(), arrays)


def prior_variance(kernel: Kernel, point: torch.Tensor) -> torch.Tensor:
    """The prior variance k(x, x) averaged over ``point`` [..., M, D], shape [...]: the unit jitter is measured in."""
    return kernel(point, diag=True).mean(-1)
