"""One evaluation of the pooled bound with its gradient, beside GPyTorch.

One thread, processor time, RBF kernel, 8 inputs, least of repetitions in turns with the peer. All sites are in one
process, which factorises K_zz once for all of them and keeps what their rows are projected to from the sums to the
gradient; sites on machines of their own do either anew for each message. Agreement with GPyTorch at 1e-6 is asserted
before anything is timed. Products alone: a bare loop over the same sites with nothing but the matrix products,
triangular solves and exponentials that they need, W Wᵀ as a plain product. With `--device cuda`, seconds of the wall of
all sites on that device, with more rows and points; `sgpr` is one evaluation of its evidence with the gradient by the
hyperparameters, at each site's device in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

from fedgp_flower.gp.fitc import weighted_gradient, weighted_sums
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import Whitener, inducing_gradient, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import bound_gradient
from fedgp_flower.messages import add
from fedgp_flower.options import ModelSection
from simulations.common import Array, Row

SIZES: Mapping[tuple[int, int], tuple[int, ...]] = {
    (10_000, 100): (1, 10, 100),
    (10_000, 512): (1, 10, 100),
    (1000, 100): (10,),
}
"""(rows, M): numbers of sites."""
LARGE: Mapping[tuple[int, int], tuple[int, ...]] = {(40_000, 1000): (10,), (40_000, 4000): (10,)}
"""On a device that is made for it."""
TOLERANCE = 1e-6
Parts = list[tuple[Tensor, Tensor]]


def seconds(device: str) -> float:
    """Processor seconds; on another device those of the wall, once all is computed that was asked for."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def least(actions: Mapping[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Seconds of the cheapest repetition of each; they take turns, so that other load treats them alike."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(repeats):
        for name, action in actions.items():
            started = seconds(device)
            action()
            best[name] = min(best[name], seconds(device) - started)
    return best


class Peer(gpytorch.models.ExactGP):
    """GPyTorch's sparse GP regression on all rows."""

    def __init__(self, x: Tensor, y: Tensor, points: Tensor) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        super().__init__(x, y, likelihood)
        base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1])).double()
        base.outputscale, base.base_kernel.lengthscale, likelihood.noise = 1.0, 1.0, 0.1
        self.covar_module = gpytorch.kernels.InducingPointKernel(base, points.clone(), likelihood)
        self.train()
        self.objectives = (gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self),)  # a tuple: it holds this module

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(x.new_zeros(len(x)), self.covar_module(x))

    def evaluation(self) -> tuple[float, Array]:
        """Bound per row, and its gradient in Z."""
        self.zero_grad()
        value = self.objectives[0](self(*self.train_inputs), self.train_targets)
        value.backward()
        gradient: Array = self.covar_module.inducing_points.grad.cpu().numpy().copy()
        return float(value.detach()), gradient


def federated(model: SparseGP, parts: Parts) -> tuple[float, Array]:
    """Bound per row and its gradient in Z, as sites and server compute them."""
    whitener = Whitener(model)
    total = add(pooled_sums(model, x, y, whitener) for x, y in parts)
    bound = bound_gradient(total, model.log_noise)
    shares = [rows_gradient(model, x, y, bound, whitener) for x, y in parts]
    shares.append(inducing_gradient(model, total, bound, whitener))
    count = sum(len(y) for _, y in parts)
    gradient: Array = sum(own["inducing.locations"] for own in shares) / count
    return bound.value / count, gradient


def evidence(model: SparseGP, parts: Parts) -> None:
    """What an exchange of `sgpr` computes: sums, the posterior of all rows, and the gradient by the hyperparameters."""
    whitener = Whitener(model)
    q = add(weighted_sums(model, x, y, whitener) for x, y in parts).posterior()
    for x, y in parts:
        weighted_gradient(model, x, y, q, whitener)


@torch.no_grad()
def products(model: SparseGP, parts: Parts) -> None:
    """The products, solves and exponentials that sites cannot do without, in a bare loop."""
    factor, points, kept = model.factor(), model.inducing_points, []
    for x, y in parts:
        covariance = torch.mm(x, points.mT).exp_()
        cross = torch.linalg.solve_triangular(factor, covariance.mT, upper=False)
        torch.mm(cross, cross.mT), torch.mv(cross, y)
        kept.append((covariance, cross))
    pulled = torch.linalg.solve_triangular(factor, torch.eye(len(points), dtype=points.dtype), upper=False, left=False)
    for (x, _), (covariance, cross) in zip(parts, kept, strict=True):
        torch.mm(torch.mm(cross.mT, pulled).mul_(covariance).mT, x)


def apart(ours: tuple[float, Array], theirs: tuple[float, Array]) -> float:
    """The largest difference, as a part of the largest number of its kind."""
    found = max(float(np.abs(np.subtract(a, b)).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))
    assert found <= TOLERANCE, f"GPyTorch has other numbers, {found:.1e} apart: there is nothing to time"
    return found


def study(repeats: int = 7, rows: int = 0, device: str = "cpu") -> Iterator[Row]:
    """A row for each number of rows, M and sites."""
    limit_threads(1)
    with gpytorch.settings.max_cholesky_size(10**6):
        for (count, inducing), numbers in (SIZES if device == "cpu" else LARGE).items():
            if rows in {0, count}:
                yield from measured(count, inducing, numbers, repeats, device)


def measured(rows: int, inducing: int, numbers: tuple[int, ...], repeats: int, device: str) -> Iterator[Row]:
    """Sites and server alone, for several numbers of sites, beside the peer, after all agreed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1)) + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    x, y = x.to(device), y.to(device)
    model = SparseGP(ModelSection(jitter=0.0), x[:inducing].cpu() + 0.05).to(device)
    peer = Peer(x, y, x[:inducing] + 0.05).to(device)
    parts = {sites: list(zip(x.tensor_split(sites), y.tensor_split(sites), strict=True)) for sites in numbers}
    far = {sites: apart(federated(model, own), peer.evaluation()) for sites, own in parts.items()}
    actions: dict[str, Callable[[], Any]] = {"peer": peer.evaluation}
    for sites, own in parts.items():
        actions |= {f"ours {sites}": partial(federated, model, own), f"products {sites}": partial(products, model, own)}
        actions |= {f"sgpr {sites}": partial(evidence, model, own)}
    best = {name: 1e3 * spent for name, spent in least(actions, repeats, device).items()}
    for sites in numbers:
        row: Row = {"rows": rows, "M": inducing, "sites": sites, "apart": f"{far[sites]:.1e}"}
        row |= {"sites and server, ms": best[f"ours {sites}"], "their products alone, ms": best[f"products {sites}"]}
        row |= {"GPyTorch SGPR, pooled, ms": best["peer"], "ratio": best[f"ours {sites}"] / best["peer"]}
        yield row | {"sgpr, ms": best[f"sgpr {sites}"], "its ratio": best[f"sgpr {sites}"] / best["peer"]}
