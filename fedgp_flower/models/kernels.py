"""GPyTorch kernels from an expression, with every positive parameter in log coordinates.

``rbf``, ``matern32``, ``matern52``, ``periodic`` and ``linear`` combine with ``+`` and ``*``: ``matern52 + linear``.
Terms of a sum have their own scale; a product has one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import gpytorch
import torch
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

from fedgp_flower.config import ModelSection, kernel_tree
from fedgp_flower.errors import ProtocolError
from fedgp_flower.models.placement import to_array
from fedgp_flower.shapes import Array, NamedArrays

UNBATCHED = torch.Size()


def log_positive() -> Positive:
    """The constraint θ = exp(raw): GPyTorch's raw parameter *is* log θ."""
    return Positive(transform=torch.exp, inv_transform=torch.log)


def build_kernel(model: ModelSection, num_inputs: int, *, batch_shape: torch.Size = UNBATCHED) -> Kernel:
    """The kernel of ``model.kernel`` at the initial values of the configuration, in float64.

    Args:
        model: Kernel expression, ARD, initial lengthscale and outputscale.
        num_inputs: D, the number of encoded inputs.
        batch_shape: Batch of independent hyperparameters, for samples of them.
    """
    tree = kernel_tree(model.kernel)
    kernel = _build(tree, model, num_inputs, batch_shape).double()
    for name, parameter in kernel.named_parameters():
        parameter.data.fill_(_initial(name, model))
    return kernel


def _build(node: ast.expr, model: ModelSection, num_inputs: int, batch: torch.Size) -> Kernel:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms = [_build(side, model, num_inputs, batch) for side in (node.left, node.right)]
        return AdditiveKernel(*_joined(terms, AdditiveKernel))
    if isinstance(node, ast.Name) and node.id == "linear":
        return _atom("linear", model, num_inputs, batch)  # its variance is its scale
    base = _unscaled(node, model, num_inputs, batch)
    return ScaleKernel(base, batch_shape=batch, outputscale_constraint=log_positive())


def _unscaled(node: ast.expr, model: ModelSection, num_inputs: int, batch: torch.Size) -> Kernel:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [_unscaled(side, model, num_inputs, batch) for side in (node.left, node.right)]
        return ProductKernel(*_joined(factors, ProductKernel))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _build(node, model, num_inputs, batch)
    return _atom(cast(ast.Name, node).id, model, num_inputs, batch)


def _atom(name: str, model: ModelSection, num_inputs: int, batch: torch.Size) -> Kernel:
    dims = num_inputs if model.ard else None
    if name == "linear":
        return LinearKernel(batch_shape=batch, variance_constraint=log_positive())
    if name == "periodic":
        return PeriodicKernel(
            batch_shape=batch,
            ard_num_dims=dims,
            lengthscale_constraint=log_positive(),
            period_length_constraint=log_positive(),
        )
    if name == "rbf":
        return RBFKernel(batch_shape=batch, ard_num_dims=dims, lengthscale_constraint=log_positive())
    nu = {"matern32": 1.5, "matern52": 2.5}[name]
    return MaternKernel(nu, batch_shape=batch, ard_num_dims=dims, lengthscale_constraint=log_positive())


def _joined(parts: list[Kernel], kind: type[AdditiveKernel] | type[ProductKernel]) -> Iterator[Kernel]:
    for part in parts:
        if isinstance(part, kind):
            yield from part.kernels
        else:
            yield part


def _initial(name: str, model: ModelSection) -> float:
    value = model.outputscale if "outputscale" in name or "variance" in name else model.lengthscale
    return float(torch.tensor(value, dtype=torch.float64).log())


def wire_name(parameter: str) -> str:
    """The name a GPyTorch parameter has in messages: ``base_kernel.raw_lengthscale`` is ``log_lengthscale``."""
    *path, leaf = [part for part in parameter.split(".") if part != "base_kernel"]
    return ".".join([*path, leaf.replace("raw_", "log_", 1)])


def load_parameters(parameters: Iterable[tuple[str, torch.nn.Parameter]], arrays: Mapping[str, Array]) -> None:
    """Set named parameters from arrays.

    Raises:
        ProtocolError: naming the array that is missing or has another shape.
    """
    for name, parameter in parameters:
        if name not in arrays or arrays[name].shape != tuple(parameter.shape):
            found = arrays[name].shape if name in arrays else "nothing"
            raise ProtocolError(f"array `{name}`: expected shape {tuple(parameter.shape)}, found {found}")
        parameter.data.copy_(torch.as_tensor(arrays[name]))


class WiredModel(gpytorch.Module):
    """A kernel and a Gaussian likelihood whose parameters, in log coordinates, travel under their wire names."""

    kernel: Kernel
    likelihood: gpytorch.likelihoods.GaussianLikelihood

    def wire_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter with its wire name, in a fixed order."""
        for name, parameter in self.kernel.named_parameters():
            yield f"kernel.{wire_name(name)}", parameter
        yield "likelihood.log_noise", self.likelihood.noise_covar.raw_noise

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


def build_likelihood(model: ModelSection) -> gpytorch.likelihoods.GaussianLikelihood:
    """A Gaussian likelihood whose noise variance is kept as its logarithm."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=log_positive()).double()
    likelihood.noise = model.noise
    return likelihood
