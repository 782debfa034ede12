"""Where exact sums grow.

One thread, generated rows. `rows`: one evaluation of the pooled bound with its gradient, 100 sites, M = 512, 11 inputs,
in one process, beside the same operations at the rates of BLAS. `sites`: a round of `sgpr` over an in-process Grid, the
same rows at more and more sites. `terrain`: `sgpr` at its defaults on generated relief of two inputs, tiles as sites,
beside the same model of all rows.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import Whitener, inducing_gradient, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import SparseSums, bound_gradient
from fedgp_flower.messages import add
from fedgp_flower.options import ModelSection
from simulations.common import Row, fit, kept_table
from simulations.studies.evaluation import least
from simulations.studies.overhead import measured, smooth

INPUTS, SITES, INDUCING = 11, 100, 512


def site_rows(number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a site, made when they are asked for: no process holds those of all."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * x[:, 2:].sum(1) + noise


def evaluated(rows: int) -> Iterator[Row]:
    """One value and gradient of the pooled bound: each site's sums, the server, each site's share."""
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
    best, size = least(actions, 5), rows * INDUCING**2
    rates = {"product": 2 * INDUCING**2 * 4096 / best["product"], "solve": INDUCING**2 * 4096 / best["solve"]}
    for part, products, solves in (("sums", size, size), ("shares", 2 * size, size), ("server", 0, 0)):
        blas = products / rates["product"] + solves / rates["solve"]  # of W Wᵀ a half is enough
        row: Row = {
            "table": "rows",
            "rows": rows,
            "part": part,
            "at the rates of BLAS, s": blas,
            "processor s": spent[part],
        }
        row["over BLAS"] = spent[part] / blas if blas else None
        yield row | {"peak memory, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def relief(rows: int) -> pd.DataFrame:
    """Heights with ridges at several scales, over the unit square."""
    rng = np.random.default_rng(0)
    place, height = rng.uniform(size=(rows, 2)), np.zeros(rows)
    for octave in range(5):
        angles, shifts = rng.uniform(0, 2 * np.pi, 3), rng.uniform(0, 2 * np.pi, 3)
        phase = 2.0**octave * 2 * np.pi * place @ np.stack([np.cos(angles), np.sin(angles)]) + shifts
        height += 0.6**octave * (1 - np.abs(np.sin(phase))).mean(1)
    return pd.DataFrame(place, columns=["east", "north"]).assign(y=height + 0.01 * rng.standard_normal(rows))


def terrain(rows: int) -> Row:
    """Figures of a run on relief."""
    keys = {"method": "sgpr", "dataset": kept_table(f"relief-{rows}", lambda: relief(rows)), "partitioner": "kmeans"}
    keys |= {"model.num-inducing": 400, "baselines.pooled": True, "baselines.max-evaluations": 60}
    run = fit(keys, SITES)
    row: Row = {"table": "terrain", "rows": rows, "M": 400, "sites": run["sites"], "exchanges": run["exchanges"]}
    row |= {f"MB {way}, a site": run["bytes"][way] / run["sites"] / 1e6 for way in ("up", "down")}
    row |= {"training, s": run["seconds"]["training"], "NLL": run["test"]["nll"]}
    return row | {"NLL, pooled M = 100": run["pooled"]["nll"]}


def study(
    parts: tuple[str, ...] = ("rows", "sites", "terrain"),
    rows: int = 2_000_000,
    sites: tuple[int, ...] = (10, 100, 1000),
    terrain_rows: int = 30_000,
) -> Iterator[Row]:
    """A table for each part."""
    limit_threads(1)
    if "rows" in parts:
        yield from evaluated(rows)
    for count in sites if "sites" in parts else ():
        table = kept_table("smooth-20000", lambda: smooth(20_000))
        yield {"table": "sites", "rows": 20_000, **measured("sgpr", table, count, 3, inducing=20)}
    if "terrain" in parts:
        yield terrain(terrain_rows)
