"""The sparse GP of every sparse method: a GPyTorch kernel and likelihood with shared inducing points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedgp_flower.config import ModelSection
from fedgp_flower.errors import NumericsError
from fedgp_flower.linalg import kernel_cholesky
from fedgp_flower.models.kernels import WiredModel, build_kernel, build_likelihood, prior_variance
from fedgp_flower.models.placement import FLOAT32_JITTER, to_array
from fedgp_flower.shapes import Array, NamedArrays, Rows, Targets
from fedgp_flower.statistics import SparseSums, WhitenedPosterior, bound_gradient

CHUNK = 4096
"""Rows handled at once: no array grows with N beyond M × CHUNK."""


class SparseGP(WiredModel):
    """Kernel, Gaussian noise and inducing points; parameters in log coordinates, data standardised."""

    def __init__(self, model: ModelSection, inducing_points: Tensor) -> None:
        super().__init__()
        self.kernel = build_kernel(model, inducing_points.shape[-1])
        self.likelihood = build_likelihood(model)
        self.inducing_points = torch.nn.Parameter(inducing_points.double().clone())
        self.requested_jitter = model.jitter

    @staticmethod
    def from_arrays(model: ModelSection, arrays: Mapping[str, Array]) -> SparseGP:
        """The model that ``arrays`` describe; the inverse of :meth:`to_arrays`."""
        sparse = SparseGP(model, torch.as_tensor(arrays["inducing.locations"]))
        sparse.load(arrays)
        return sparse

    def wire_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The inducing points before kernel and noise."""
        yield "inducing.locations", self.inducing_points
        yield from super().wire_parameters()

    @property
    def jitter(self) -> float:
        """Relative jitter of K_zz; float32 needs more than float64."""
        single = self.inducing_points.dtype == torch.float32
        return max(self.requested_jitter, FLOAT32_JITTER) if single else self.requested_jitter

    @property
    def noise(self) -> Tensor:
        """Noise variance σ² of the standardised target, shape []."""
        return self.likelihood.noise.squeeze(-1)

    def whitened_cross(self, inputs: Rows) -> Tensor:
        """W = L⁻¹ K_zx with L Lᵀ = K_zz + jitter, shape [M, N]."""
        kzz = self.kernel(self.inducing_points).to_dense()
        variance = prior_variance(self.kernel, self.inducing_points)
        factor = kernel_cholesky(kzz, variance=variance, jitter=self.jitter)
        kzx = self.kernel(self.inducing_points, inputs).to_dense()
        return torch.linalg.solve_triangular(factor, kzx, upper=False)

    def sums(self, inputs: Rows, targets: Targets) -> SparseSums:
        """The additive sums of some rows, differentiable by the parameters."""
        cross = self.whitened_cross(inputs)
        return SparseSums(
            gram=cross @ cross.mT,
            projection=cross @ targets,
            target_squares=targets.square().sum(),
            prior_variance=self.kernel(inputs, diag=True).sum(),
            count=torch.tensor(float(len(targets)), dtype=targets.dtype, device=targets.device),
        )

    def predict(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        """Mean and variance of a noisy observation, both [N], in standardised units.

        With a = L⁻¹k_zx: mean aᵀm, variance k_xx - aᵀa + aᵀSa + σ².

        Raises:
            NumericsError: if a variance is not positive, which means that the posterior is broken.
        """
        pieces = [self._predict(chunk, posterior) for chunk in inputs.split(CHUNK)]
        mean, variance = (torch.cat(part) for part in zip(*pieces, strict=True))
        if not bool((variance > 0).all()):
            raise NumericsError(
                f"{int((variance <= 0).sum())} of {len(variance)} predictive variances are not positive."
            )
        return mean, variance

    def _predict(self, inputs: Rows, posterior: WhitenedPosterior) -> tuple[Tensor, Tensor]:
        cross = self.whitened_cross(inputs)
        prior = self.kernel(inputs, diag=True)
        mean, covariance = posterior.mean.to(cross), posterior.covariance.to(cross)
        explained = cross.square().sum(0) - (covariance @ cross * cross).sum(0)
        return cross.mT @ mean, prior - explained + self.noise


def pooled_sums(model: SparseGP, inputs: Rows, targets: Targets) -> SparseSums:
    """The sums of any number of rows, chunk by chunk, without a graph."""
    with torch.no_grad():
        chunks = zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True)
        first, *rest = (model.sums(x, y) for x, y in chunks)
        total = first
        for sums in rest:
            total = total + sums
    return total


def sums_gradient(model: SparseGP, inputs: Rows, targets: Targets, adjoints: Mapping[str, Array]) -> NamedArrays:
    """⟨∂F/∂A, dA/dw⟩ + ⟨∂F/∂b, db/dw⟩ + ∂F/∂c dc/dw for these rows: a site's share of the gradient of the pooled bound.

    Args:
        model: At the parameters the adjoints were formed for.
        inputs: Standardised inputs [N, D].
        targets: Standardised targets [N].
        adjoints: ``adjoint.gram`` [M, M], ``adjoint.projection`` [M], ``adjoint.prior_variance`` [].

    Returns:
        Under each parameter's wire name its share; the noise has none, its derivative is formed from the sums.
    """
    gram, projection, variance = (
        torch.as_tensor(adjoints[f"adjoint.{name}"]).to(inputs) for name in ("gram", "projection", "prior_variance")
    )
    total = {name: torch.zeros_like(parameter) for name, parameter in model.wire_parameters()}
    parameters = {name: parameter for name, parameter in model.wire_parameters() if parameter.requires_grad}
    for x, y in zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True):
        cross = model.whitened_cross(x)
        share = ((gram @ cross) * cross).sum() + projection @ (cross @ y) + variance * model.kernel(x, diag=True).sum()
        grads = torch.autograd.grad(share, list(parameters.values()), allow_unused=True)
        for name, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                total[name] += grad
    return {name: to_array(grad) for name, grad in total.items()}


class _ChunkedBound(torch.autograd.Function):
    """Value and gradient of the collapsed bound in two passes over chunks, so that memory does not grow with N."""

    @staticmethod
    def forward(ctx: Any, model: SparseGP, inputs: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        """Sums of all chunks, then the bound."""
        del parameters
        sums = SparseSums.from_arrays(pooled_sums(model, inputs, targets).to_arrays())
        bound = bound_gradient(sums, float(model.noise.detach().log()))
        ctx.model, ctx.inputs, ctx.targets, ctx.bound = model, inputs, targets, bound
        return torch.tensor(bound.value, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """The derivatives by the sums, pulled back through each chunk."""
        adjoints: NamedArrays = {
            f"adjoint.{name}": getattr(ctx.bound, name) for name in ("gram", "projection", "prior_variance")
        }
        with torch.enable_grad():
            shares = sums_gradient(ctx.model, ctx.inputs, ctx.targets, adjoints)
        shares["likelihood.log_noise"] = shares["likelihood.log_noise"] + ctx.bound.log_noise
        scale = grad_outputs[0]
        return None, None, None, *(scale.item() * torch.from_numpy(share).to(ctx.inputs) for share in shares.values())


def pooled_bound(model: SparseGP, inputs: Rows, targets: Targets) -> Tensor:
    """Titsias' bound of any number of rows, in nats, with its gradient in O(M² + M·CHUNK) memory."""
    parameters = [parameter for _, parameter in model.wire_parameters()]
    value: Tensor = _ChunkedBound.apply(model, inputs, targets, *parameters)
    return value
