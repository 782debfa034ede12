"""Where exact sums grow.

One evaluation of the pooled bound with its gradient, one thread, generated rows, 100 sites, M = 512, 11 inputs, in one
process, beside the same operations at the rates of BLAS.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import Whitener, inducing_gradient, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import SparseSums, bound_gradient
from fedgp_flower.messages import add
from fedgp_flower.options import ModelSection
from simulations.common import Row
from simulations.studies.evaluation import least

INPUTS, SITES, INDUCING = 11, 100, 512


def site_rows(number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a site, made when they are asked for: no process holds those of all."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * x[:, 2:].sum(1) + noise


def study(rows: int = 2_000_000) -> Iterator[Row]:
    """A row for each site's sums, the server, and each site's share."""
    limit_threads(1)
    count, spent = rows // SITES, {"sums": 0.0, "server": 0.0, "shares": 0.0}
    model = SparseGP(ModelSection(), site_rows(SITES, INDUCING)[0])
    sums_at, shares_at = Whitener(model), Whitener(model)  # a site computes each in a process of its own

    def timed(part: str, action: Callable[[], Any]) -> Any:
        begun = time.process_time()
        answer = action()
        spent[part] += time.process_time() - begun
        return answer

    total: SparseSums | None = None
    for number in range(SITES):
        x, y = site_rows(number, count)
        summand = timed("sums", lambda x=x, y=y: pooled_sums(model, x, y, sums_at))
        total = summand if total is None else add([total, summand])
    bound = timed("server", lambda: bound_gradient(total, model.log_noise))
    assert total is not None
    timed("server", lambda: inducing_gradient(model, total, bound))
    for number in range(SITES):
        x, y = site_rows(number, count)
        timed("shares", lambda x=x, y=y: rows_gradient(model, x, y, bound, shares_at))
    a = torch.randn(INDUCING, 4096, dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.eye(INDUCING, dtype=torch.float64) + a @ a.mT / 4096)
    actions = {"product": lambda: a @ a.mT, "solve": lambda: torch.linalg.solve_triangular(factor, a, upper=False)}
    best, size = least(actions, 5, "cpu"), rows * INDUCING**2
    rates = {"product": 2 * INDUCING**2 * 4096 / best["product"], "solve": INDUCING**2 * 4096 / best["solve"]}
    for part, products, solves in (("sums", size, size), ("shares", 2 * size, size), ("server", 0, 0)):
        blas = products / rates["product"] + solves / rates["solve"]  # of W Wᵀ a half is enough
        row: Row = {
            "rows": rows,
            "part": part,
            "at the rates of BLAS, s": blas,
            "processor s": spent[part],
        }
        row["over BLAS"] = spent[part] / blas if blas else None
        yield row | {"peak memory, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
