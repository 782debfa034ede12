"""Many rows, many sites, sharp relief: memory, seconds and bytes of exact sums where they grow.

    python simulations/benchmarks/scale.py rows [--rows 2000000]
    python simulations/benchmarks/scale.py sites [--sites 10 100 1000]
    python simulations/benchmarks/scale.py terrain [--rows 30000]

Each part runs by itself; what it finds is kept in ``simulations/results/scale.json``, and the page beside it is written
from all that is there. One thread, generated rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RESULTS, least, make_table, table, training_alone, write_page
from flwr.app import ArrayRecord

from fedgp_flower import client_app
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import Adjoints, SparseGP, Whitener, inducing_gradient, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import SparseSums, bound_gradient
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Snapshot
from fedgp_flower.run.in_process import InProcessGrid, run_in_process, simulated_nodes
from fedgp_flower.run.registry import parse_config, strategy_class

INPUTS, SITES, INDUCING = 11, 100, 512
FOUND = RESULTS / "scale.json"


def site_rows(number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a site, made when they are asked for: no process holds those of all."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * x[:, 2:].sum(1) + noise


def rates() -> dict[str, float]:
    """Operations a second of a product and of a triangular solve at the shapes of a chunk of rows."""
    A = torch.randn(INDUCING, 4096, dtype=torch.float64)
    L = torch.linalg.cholesky(torch.eye(INDUCING, dtype=torch.float64) + A @ A.mT / 4096)
    best = least({"product": lambda: A @ A.mT, "solve": lambda: torch.linalg.solve_triangular(L, A, upper=False)}, 5)
    return {"product": 2 * INDUCING**2 * 4096 / best["product"], "solve": INDUCING**2 * 4096 / best["solve"]}


def rows(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One value and gradient of the pooled bound: each site's sums, the server, each site's share."""
    count = chosen.rows // SITES
    model = SparseGP(ModelSection(), site_rows(SITES, INDUCING)[0])
    sums_at, shares_at = Whitener(model), Whitener(model)  # a site computes each in a process of its own
    spent = {"sums": 0.0, "server": 0.0, "shares": 0.0}

    def timed(part: str, action: Callable[[], Any]) -> Any:
        begun = time.process_time()
        answer = action()
        spent[part] += time.process_time() - begun
        return answer

    total: SparseSums | None = None
    for number in range(SITES):
        x, y = site_rows(number, count)
        own = timed("sums", lambda x=x, y=y: pooled_sums(model, x, y, sums_at))
        total = own if total is None else total + own
    assert total is not None
    gathered = total
    bound = timed("server", lambda: bound_gradient(gathered, float(model.noise.detach().log())))
    adjoints = Adjoints.of(bound.gram, bound.projection, bound.prior_variance, sums_at.factor)
    timed("server", lambda: inducing_gradient(model, gathered.gram, gathered.projection, adjoints))
    for number in range(SITES):
        x, y = site_rows(number, count)
        timed("shares", lambda x=x, y=y: rows_gradient(model, x, y, adjoints, shares_at))
    rate, size = rates(), chosen.rows * INDUCING**2
    counted = {"sums": (size, size), "shares": (2 * size, size), "server": (0, 0)}  # of W Wᵀ a half is enough
    found = []
    for part, (products, solves) in counted.items():
        blas = products / rate["product"] + solves / rate["solve"]
        found.append(
            {
                "rows": chosen.rows,
                "part": part,
                "operations, 10⁹": (products + solves) / 1e9,
                "at the rates of BLAS, s": blas,
                "processor s": spent[part],
                "over BLAS": spent[part] / blas if blas else "",
                "peak memory, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
    return found


class Metered(InProcessGrid):
    """A Grid and observer that notes, at the end of every round, processor time and how much of it the sites took."""

    spent = 0.0

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.ends: list[tuple[float, float]] = []

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        """Note the time."""
        del row, total
        self.ends.append((time.process_time(), self.spent))

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """Keep nothing: a disk is not what is measured."""

    def answer(self, message: Any) -> Any:
        """The reply, its time booked."""
        begun = time.process_time()
        reply = super().answer(message)
        self.spent += time.process_time() - begun
        return reply


def sites(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of exact FSGP at a fixed number of rows, dealt to more and more sites."""
    found = []
    for count in chosen.sites:
        with tempfile.TemporaryDirectory() as folder:
            flat = training_alone(make_table(Path(folder), 20_000), "exact", 3, Path(folder), "x")
            flat |= {"model.num-inducing": 20, "test-fraction": 0.0}
            config, grid = parse_config(flat), Metered(client_app.app, flat, simulated_nodes(count))
            strategy = strategy_class(config).from_config(config, grid)
            strategy.start(grid, ArrayRecord(), num_rounds=3, timeout=config.round_timeout)
        seconds, own = np.subtract(grid.ends[-1], grid.ends[-2])
        found.append({"rows": 20_000, "M": 20, "sites": count, "processor s a round": seconds})
        found[-1] |= {"ms a visit": 500 * seconds / count, "of it in the sites' apps": 500 * own / count}
    return found


def relief(rows: int) -> pd.DataFrame:
    """Heights with ridges at several scales, over the unit square."""
    rng = np.random.default_rng(0)
    place = rng.uniform(size=(rows, 2))
    height = np.zeros(rows)
    for octave in range(5):
        angles, shifts = rng.uniform(0, 2 * np.pi, 3), rng.uniform(0, 2 * np.pi, 3)
        phase = 2.0**octave * 2 * np.pi * place @ np.stack([np.cos(angles), np.sin(angles)]) + shifts
        height += 0.6**octave * (1 - np.abs(np.sin(phase))).mean(1)
    return pd.DataFrame(place, columns=["east", "north"]).assign(y=height + 0.01 * rng.standard_normal(rows))


def terrain(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """FSGP at its defaults on sharp relief, tiles as sites, beside the same model of all rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "terrain.csv"
        relief(chosen.rows).to_csv(path, index=False)
        flat = {"dataset": str(path), "partitioner": "kmeans", "model.num-inducing": 400, "output-dir": folder}
        flat |= {"name": "x", "evaluate-every": 0, "baselines.local-only": False, "keep-predictions": False}
        flat |= {"baselines.max-evaluations": 60}
        run_in_process(flat, SITES)
        metrics = json.loads((Path(folder) / "x" / "metrics.json").read_text())
    own = {"rows": chosen.rows, "M": 400, "sites": metrics["sites"], "exchanges": metrics["exchanges"]}
    return [
        own
        | {f"MB {way}, a site": metrics["bytes"][way] / metrics["sites"] / 1e6 for way in ("up", "down")}
        | {"training, s": metrics["seconds"]["training"], "NLL": metrics["test"]["nll"]}
        | {"NLL, pooled M = 100": metrics["pooled"]["nll"]}
    ]


PARTS: Mapping[str, tuple[Callable[[argparse.Namespace], list[dict[str, Any]]], str]] = {
    "rows": (
        rows,
        f"One evaluation with its gradient, {SITES} sites, M = {INDUCING}, {INPUTS} inputs, in one process:",
    ),
    "sites": (sites, "A round of exact FSGP over an in-process Grid, the same rows at more and more sites:"),
    "terrain": (terrain, "FSGP at its defaults on generated relief of two inputs:"),
}


def main() -> None:
    """Measure a part, write the page of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--sites", type=int, nargs="*", default=[10, 100, 1000])
    chosen = parser.parse_args()
    chosen.rows = chosen.rows or {"rows": 2_000_000, "terrain": 30_000}.get(chosen.part)
    limit_threads(1)
    known = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    known[chosen.part] = PARTS[chosen.part][0](chosen)
    FOUND.write_text(json.dumps(known, indent=1) + "\n")
    parts = [
        "# Where exact sums grow",
        f"`python simulations/benchmarks/scale.py PART`, one thread, {platform.machine()}.",
    ]
    for name, (_, words) in PARTS.items():
        parts += [f"`{name}`. {words}", table(known[name])] if name in known else []
    write_page("scale", parts)


if __name__ == "__main__":
    main()
