"""Ours beside GPyTorch: agreement at 1e-6 first, then time in turns; whoever is faster is named.

    python simulations/benchmarks/run_all.py [--repeats 7]

One thread, processor time, generated rows, ten sites in one process. Written to ``simulations/results/benchmarks.json``
and the page beside it. What has no peer is on pages of its own: ``trip.py``, ``scale.py``, ``masks.py``, ``pvi.py``,
``pvi_logistic.py``, ``sfvi.py``, ``fedmgp.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gpytorch
import numpy as np
import torch
from common import RESULTS, least, repeats_asked, table, write_page
from evaluation import SIZES, Pooled, agreement, computation, federated, problem
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor

from fedgp_flower.gp.sparse import SparseGP, Whitener, pooled_sums
from fedgp_flower.gp.sums import WhitenedPosterior, exact_posterior

NEW_ROWS = 1000


class Variational(gpytorch.models.ApproximateGP):
    """GPyTorch's SVGP with a given q(v)."""

    def __init__(self, kernel: gpytorch.kernels.Kernel, points: Tensor, posterior: WhitenedPosterior) -> None:
        distribution = CholeskyVariationalDistribution(len(points)).double()
        distribution.variational_mean.data.copy_(posterior.mean)
        distribution.chol_variational_covar.data.copy_(torch.linalg.cholesky(posterior.covariance))
        strategy = VariationalStrategy(self, points.clone(), distribution, jitter_val=1e-12)
        strategy.variational_params_initialized.fill_(1)
        super().__init__(strategy)
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(x.new_zeros(len(x)), self.covar_module(x))


Arrays = Sequence[Any]
Case = tuple[Callable[[], Arrays], Callable[[], Arrays]]


def pieces(rows: int, inducing: int) -> tuple[SparseGP, list[tuple[Tensor, Tensor]], Pooled, WhitenedPosterior]:
    """Our model, ten sites' rows, the peer's model, and the exact posterior."""
    model, x, y, _ = problem(rows, inducing)
    parts = list(zip(x.tensor_split(10), y.tensor_split(10), strict=True))
    posterior = exact_posterior(pooled_sums(model, x, y), float(model.noise.detach()))
    return model, parts, Pooled(x, y, model.inducing_points.detach()), posterior


def prediction(rows: int, inducing: int) -> Case:
    """The mean at new inputs from rows: sums of ten sites, posterior, prediction (ours with the variance).

    The peer's mean is Titsias' only without its correction of diagonals; its variance then is not.
    """
    model, parts, peer, _ = pieces(rows, inducing)
    new = torch.randn(NEW_ROWS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    @torch.no_grad()
    def ours() -> Arrays:
        whitener = Whitener(model)
        sums = [pooled_sums(model, x, y, whitener) for x, y in parts]
        total = sums[0]
        for own in sums[1:]:
            total = total + own
        return model.predict(new, exact_posterior(total, float(model.noise.detach())))[:1]

    @torch.no_grad()
    def theirs() -> Arrays:
        peer.train()  # forgets what it has kept of the rows
        peer.eval()
        peer.covar_module._clear_cache()
        with gpytorch.settings.sgpr_diagonal_correction(False):
            return [peer(new).mean]

    return ours, theirs


def variational(rows: int, inducing: int) -> Case:
    """The bound with its gradient in Z beside SVGP's evidence bound at the exact q, where nothing is left to gain."""
    model, parts, peer, posterior = pieces(rows, inducing)
    x, y = (torch.cat(own) for own in zip(*parts, strict=True))
    svgp = Variational(peer.covar_module.base_kernel, model.inducing_points.detach(), posterior)
    objective = gpytorch.mlls.VariationalELBO(peer.likelihood, svgp, num_data=len(y))
    points = svgp.variational_strategy.inducing_points

    def theirs() -> Arrays:
        svgp.zero_grad()
        value = objective(svgp(x), y)
        value.backward()
        return float(value.detach()), points.grad.numpy().copy()

    return partial(federated, model, parts), theirs


CASES: dict[str, tuple[str, Callable[[int, int], Case]]] = {
    "prediction from rows": ("SGPR", prediction),
    "bound and gradient": ("SVGP, all rows in a batch", variational),
}
LIMIT = (
    "What these figures do not show: ten sites here share a process, which factorises K_zz once; on machines of their"
    " own each does. There an exchange takes seconds, whatever is computed (`trip.py`): the peer, which has all rows at"
    " one place, is then faster by orders of magnitude, and that is the price of rows that stay where they are."
)


def row(case: str, peer: str, size: tuple[int, int], apart: float, ours: float, theirs: float) -> dict[str, Any]:
    """A line of the table."""
    faster = "ours" if ours < theirs else "GPyTorch"
    own = {"case": case, "peer": f"GPyTorch {peer}", "rows": size[0], "M": size[1], "apart": apart}
    return own | {"ours, ms": ours, "peer, ms": theirs, "ratio": ours / theirs, "faster": faster}


def figures(repeats: int) -> list[dict[str, Any]]:
    """All rows."""
    found = []
    for size in SIZES:
        [own] = computation(*size, (10,), repeats)
        times = own["sites and server, ms"], own["GPyTorch SGPR, pooled, ms"]
        found.append(row("bound and gradient", "SGPR", size, own["apart"], *times))
        for name, (peer, build) in CASES.items():
            ours, theirs = build(*size)
            apart = agreement([np.asarray(a) for a in ours()], [np.asarray(b) for b in theirs()])
            best = least({"ours": ours, "peer": theirs}, repeats)
            found.append(row(name, peer, size, apart, 1e3 * best["ours"], 1e3 * best["peer"]))
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, write JSON and page."""
    repeats = repeats_asked(__doc__)
    with gpytorch.settings.max_cholesky_size(10**6):
        found = figures(repeats)
    (RESULTS / "benchmarks.json").write_text(json.dumps(found, indent=1) + "\n")
    words = (
        f"`python simulations/benchmarks/run_all.py --repeats {repeats}`: one thread, processor time, least of"
        " repetitions in turns, ten sites in one process; `apart` is the largest difference of any number, as a part of"
        " the largest, and was at most 1e-6 before anything was timed."
    )
    write_page("benchmarks", ["# Beside GPyTorch", words, table(found), LIMIT])


if __name__ == "__main__":
    main()
