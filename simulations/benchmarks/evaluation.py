"""What the pooled bound and its gradient cost ten sites and the server, beside GPyTorch's pooled SGPR.

    python simulations/benchmarks/evaluation.py [--repeats 7]

One thread, processor time. Value and gradient agree to 1e-6 before anything is timed; the two are timed in turn, in one
process, and the smallest of each is kept.
"""

from __future__ import annotations

import operator
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpytorch
import numpy as np
import torch
from common import least, make_table, repeats_asked, table, training_alone, write_page
from flwr.app import ArrayRecord
from gpytorch.distributions import MultivariateNormal
from numpy.typing import ArrayLike
from torch import Tensor

from fedgp_flower import client_app
from fedgp_flower.gp import sparse
from fedgp_flower.gp.sparse import Adjoints, SparseGP, Whitener, inducing_gradient, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import bound_gradient
from fedgp_flower.methods.sgpr import client
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Snapshot
from fedgp_flower.run.in_process import InProcessGrid, simulated_nodes
from fedgp_flower.run.registry import parse_config, strategy_class
from strategies import fsgp_exact

SIZES = ((10_000, 100), (10_000, 512), (1000, 100))
TOLERANCE = 1e-6
COUNTS = {SIZES[0]: (1, 10, 100), SIZES[1]: (1, 10, 100)}
"""Numbers of sites; ten elsewhere."""


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
    whitener = Whitener(model)
    total = reduce(operator.iadd, (pooled_sums(model, x, y, whitener) for x, y in parts))
    bound = bound_gradient(total, float(model.noise.detach().log()))
    adjoints = Adjoints.of(bound.gram, bound.projection, bound.prior_variance, parts[0][0])
    shares = [rows_gradient(model, x, y, adjoints, whitener) for x, y in parts]
    shares.append(inducing_gradient(model, total.gram, total.projection, adjoints))
    count = sum(len(y) for _, y in parts)
    return bound.value / count, sum(own["inducing.locations"] for own in shares) / count


@torch.no_grad()
def products(model: SparseGP, adjoints: Adjoints, parts: list[tuple[Tensor, Tensor]]) -> None:
    """The products, solves and exponentials that sites cannot do without, in a bare loop."""
    factor, points = model.factor(), model.inducing_points
    kept = []
    for x, y in parts:
        covariance = torch.mm(x, points.mT).exp_()
        cross = torch.linalg.solve_triangular(factor, covariance.mT, upper=False)
        torch.mm(cross, cross.mT), torch.mv(cross, y)
        kept.append((covariance, cross))
    pulled = torch.linalg.solve_triangular(factor, adjoints.gram, upper=False, left=False)
    for (x, _), (covariance, cross) in zip(parts, kept, strict=True):
        torch.mm(torch.mm(cross.mT, pulled).mul_(covariance).mT, x)


def pooled(model: Pooled, objective: gpytorch.mlls.ExactMarginalLogLikelihood, y: Tensor) -> tuple[float, np.ndarray]:
    """The same with GPyTorch."""
    model.zero_grad()
    value = objective(model(*model.train_inputs), y)
    value.backward()
    return float(value.detach()), model.covar_module.inducing_points.grad.numpy().copy()


@dataclass
class Turns:
    """An observer of a run that has the peer evaluate after every round, and times both."""

    peer: Callable[[], object]
    begun: float = 0.0
    computing: float = 0.0
    rounds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    peers: list[float] = field(default_factory=list)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Book what sites and server compute, within this block."""
        places = [(client, "Whitener"), (client, "pooled_sums"), (fsgp_exact, "bound_gradient")]
        places += [(sparse, "rows_gradient"), (sparse, "inducing_gradient")]
        with ExitStack() as stack:
            for module, name in places:
                stack.enter_context(patch.object(module, name, self.booked(getattr(module, name))))
            yield

    def booked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is computation."""

        def timed(*of: Any) -> Any:
            begun = time.process_time()
            answer = function(*of)
            self.computing += time.process_time() - begun
            return answer

        return timed

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        """The round is over: it is the peer's turn."""
        del row, total
        now = time.process_time()
        self.rounds.append(now - self.begun)
        self.outside.append(self.rounds[-1] - self.computing)
        self.peer()
        self.begun, self.computing = time.process_time(), 0.0
        self.peers.append(self.begun - now)

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """Keep nothing: a disk is not what is measured."""


def problem(rows: int, inducing: int) -> tuple[SparseGP, Tensor, Tensor, Callable[[], tuple[float, np.ndarray]]]:
    """Our model, inputs and targets, and the peer's evaluation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1)) + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    points = x[:inducing] + 0.05
    peer = Pooled(x, y, points)
    peer.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(peer.likelihood, peer)
    return SparseGP(ModelSection(jitter=0.0), points), x, y, lambda: pooled(peer, objective, y)


def agreement(ours: Sequence[ArrayLike], theirs: Sequence[ArrayLike]) -> float:
    """The largest difference, as a part of the largest number of its kind.

    Raises:
        AssertionError: it is above 1e-6, so that there is nothing to time.
    """
    apart = max(float(np.abs(np.subtract(a, b)).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))
    assert apart <= TOLERANCE, apart
    return apart


def computation(rows: int, inducing: int, counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Sites and server alone, for several numbers of sites, beside the peer, after all agreed."""
    model, x, y, peer = problem(rows, inducing)
    actions: dict[str, Callable[[], Any]] = {"peer": peer}
    for sites in counts:
        parts = list(zip(x.tensor_split(sites), y.tensor_split(sites), strict=True))
        actions[str(sites)] = partial(federated, model, parts)
    apart = {name: agreement(action(), peer()) for name, action in actions.items()}
    some = torch.eye(inducing, dtype=x.dtype)
    adjoints = Adjoints(some, some[0], some[0, 0])
    for sites in counts:
        parts = list(zip(x.tensor_split(sites), y.tensor_split(sites), strict=True))
        actions[f"products, {sites}"] = partial(products, model, adjoints, parts)
    best = least(actions, repeats)
    print(rows, inducing, best, flush=True)
    return [
        {
            "rows": rows,
            "M": inducing,
            "sites": sites,
            "apart": apart[str(sites)],
            "sites and server, ms": 1e3 * best[str(sites)],
            "their products alone, ms": 1e3 * best[f"products, {sites}"],
        }
        | {"GPyTorch SGPR, pooled, ms": 1e3 * best["peer"], "ratio": best[str(sites)] / best["peer"]}
        for sites in counts
    ]


def whole_round(rows: int, inducing: int, sites: int, rounds: int) -> dict[str, Any]:
    """A round of the Strategy over an in-process Grid: what Flower and the checks of messages add."""
    *_, peer = problem(rows, inducing)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        flat = training_alone(make_table(folder, rows), "exact", rounds, folder, "x")
        flat |= {"model.num-inducing": inducing, "test-fraction": 0.0}
        config, turns = parse_config(flat), Turns(peer)
        strategy = strategy_class(config).from_config(config, turns)
        grid = InProcessGrid(client_app.app, flat, simulated_nodes(sites))
        with turns.attached():
            strategy.start(grid, ArrayRecord(), num_rounds=rounds, timeout=config.round_timeout)
    ours, theirs = min(turns.rounds[1:]), min(turns.peers)
    print(rows, inducing, ours, theirs, flush=True)
    traffic = strategy.network.traffic
    packed = 8 * (inducing * (inducing + 1) // 2 + inducing * 9)
    return {
        "rows": rows,
        "M": inducing,
        "round, ms": 1e3 * ours,
        "GPyTorch, ms": 1e3 * theirs,
        "ratio": ours / theirs,
        "outside computation, ms a visit": 1e3 * min(turns.outside[1:]) / (2 * sites),
        "kB up, a site": traffic.bytes_up / sites / rounds / 1e3,
        "kB down, a site": traffic.bytes_down / sites / rounds / 1e3,
        "packed A, b, [M, D], kB": packed / 1e3,
    }


def main() -> None:
    """Measure and write the page."""
    repeats = repeats_asked(__doc__)
    with gpytorch.settings.max_cholesky_size(10**6):
        alone = [row for size in SIZES for row in computation(*size, COUNTS.get(size, (10,)), repeats)]
        whole = [whole_round(*size, 10, repeats + 1) for size in SIZES]
    write_page(
        "evaluation",
        [
            "# One evaluation of the pooled bound with its gradient",
            f"`python simulations/benchmarks/evaluation.py --repeats {repeats}`: one thread, processor time, RBF"
            " kernel, 8 inputs, least of repetitions in turns with the peer. All sites are in one process, which"
            " factorises K_zz once for all of them and keeps what their rows are projected to from the sums to the"
            " gradient; sites on machines of their own do either anew for each message. Agreement with"
            " GPyTorch at 1e-6 was asserted before. Products alone: a bare loop over the same sites with nothing but"
            " the matrix products, triangular solves and exponentials that they need, W Wᵀ as a plain product.",
            table(alone),
            "The whole round over an in-process Grid, ten sites: messages, their checks and the optimiser included."
            " Outside computation: what is left of a round without factorisation, sums, bound and gradients, timed in"
            " it; least of the rounds. Bytes are the mean over a run, what is sent once included.",
            table(whole),
        ],
    )


if __name__ == "__main__":
    main()
