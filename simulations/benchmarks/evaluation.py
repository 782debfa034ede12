"""What the pooled bound and its gradient cost ten sites and the server, beside GPyTorch's pooled SGPR.

    python simulations/benchmarks/evaluation.py [--sites 10] [--repeats 7]

One thread, processor time. Value and gradient agree to 1e-6 before anything is timed; the two are timed in turn, in one
process, and the smallest of each is kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from fedgp_flower.gp.sparse import Adjoints, SparseGP, inducing_gradient, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import bound_gradient
from fedgp_flower.options import ModelSection

SIZES = ((10_000, 100), (10_000, 512), (1000, 100))
RESULT = Path(__file__).parent.parent / "results" / "evaluation.md"


class Pooled(gpytorch.models.ExactGP):
    """GPyTorch's sparse GP regression on all rows."""

    def __init__(self, x: Tensor, y: Tensor, points: Tensor) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        super().__init__(x, y, likelihood)
        base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1])).double()
        base.outputscale, base.base_kernel.lengthscale, likelihood.noise = 1.0, 1.0, 0.1
        self.covar_module = gpytorch.kernels.InducingPointKernel(base, points.clone(), likelihood)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(x.new_zeros(len(x)), self.covar_module(x))


def federated(model: SparseGP, parts: list[tuple[Tensor, Tensor]]) -> tuple[float, np.ndarray]:
    """Bound per row and its gradient in Z, as sites and server compute them."""
    with torch.no_grad():
        factor = model.factor()
    pieces = [pooled_sums(model, x, y, factor) for x, y in parts]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    bound = bound_gradient(total, float(model.noise.detach().log()))
    adjoints = Adjoints.of(bound.gram, bound.projection, bound.prior_variance, parts[0][0])
    shares = [rows_gradient(model, x, y, adjoints, factor) for x, y in parts]
    shares.append(inducing_gradient(model, total.gram, total.projection, adjoints))
    count = sum(len(y) for _, y in parts)
    return bound.value / count, sum(own["inducing.locations"] for own in shares) / count


def pooled(model: Pooled, objective: gpytorch.mlls.ExactMarginalLogLikelihood, y: Tensor) -> tuple[float, np.ndarray]:
    """The same with GPyTorch."""
    model.zero_grad()
    value = objective(model(*model.train_inputs), y)
    value.backward()
    return float(value.detach()), model.covar_module.inducing_points.grad.numpy().copy()


def processor_seconds(action: Callable[[], object]) -> float:
    """Of one call."""
    started = time.process_time()
    action()
    return time.process_time() - started


def measured(rows: int, inducing: int, sites: int, repeats: int) -> tuple[float, float]:
    """Smallest processor seconds of ours and of the peer, after both agreed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1)) + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    points = x[:inducing] + 0.05
    ours = SparseGP(ModelSection(jitter=0.0), points)
    peer = Pooled(x, y, points)
    peer.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(peer.likelihood, peer)
    parts = list(zip(x.tensor_split(sites), y.tensor_split(sites), strict=True))
    with gpytorch.settings.max_cholesky_size(10**6):
        mine, theirs = federated(ours, parts), pooled(peer, objective, y)
        np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-6)
        np.testing.assert_allclose(mine[1], theirs[1], atol=1e-6 * np.abs(theirs[1]).max())
        seconds = [
            (processor_seconds(lambda: federated(ours, parts)), processor_seconds(lambda: pooled(peer, objective, y)))
            for _ in range(repeats)
        ]
    return min(own for own, _ in seconds), min(other for _, other in seconds)


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# One evaluation of the pooled bound with its gradient",
        "",
        f"`python simulations/benchmarks/evaluation.py --sites {chosen.sites} --repeats {chosen.repeats}`, one",
        "thread,",
        "processor time, RBF kernel, 8 inputs. All sites are in one process, which factorises K_zz once for all;",
        "sites on machines of their own do so once each. Agreement with GPyTorch at 1e-6 was asserted before.",
        "",
        "| rows | M | all sites and server, s | GPyTorch SGPR, pooled, s | ratio |",
        "|---|---|---|---|---|",
    ]
    for rows, inducing in SIZES:
        ours, peer = measured(rows, inducing, chosen.sites, chosen.repeats)
        lines.append(f"| {rows} | {inducing} | {ours:.4f} | {peer:.4f} | {ours / peer:.2f} |")
        print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
