"""Whether masks move an optimum: exact FSGP on UCI energy, ten sites, until L-BFGS ends, in the clear and under masks.

    python simulations/masked_convergence.py --data-dir DIR

Masks round at 2^-80 and add in another order, so that two paths of an optimiser part in their last digits; only where
both have converged can their bounds be compared. With tolerance 0 they end where no step is an improvement any more or
where no entry of the gradient exceeds 1e-6 nats per row. At the optimum under masks its totals are also held against
plain sums of what the ten sites add at the same parameters. Written to ``simulations/results/masked_convergence.md``.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord
from sfvi_runs import QUIET, RESULTS, write_table
from strategies.fsgp_exact import FSGPExact

from fedgp_flower import client_app
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.outcome import Observer
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.run.registry import parse_config

SITES = 10
CASES = {"M = 3, a lengthscale each": (3, True, 1000)}
"""M, whether each input has a lengthscale, and most rounds.

The stop at a gradient of 1e-6 leaves more points further apart: pooled fits from starts 1e-13 apart by 3e-8 at M = 5.
With one lengthscale of all inputs it comes late: at M = 10, where they ended 2e-11 apart, after two thousand rounds.
"""
KEYS = {"method": "fsgp", "fsgp.objective": "exact", "fsgp.tolerance": 0.0, "dataset": "uci/energy", "split": 0}
BOUND = 1e-8
"""What the bounds may be apart, relative."""
LINES = [
    "`python simulations/masked_convergence.py --data-dir DIR`",
    "",
    "`uci/energy`, split 0, ten sites, `fsgp.objective=exact`, `fsgp.tolerance=0`: both runs from the same start until"
    " L-BFGS ends. *Bounds apart*: of the final bounds, relative. *Totals apart*: A, b, s and c under masks, from the"
    " plain sums of the sites' summands at the same parameters, relative to the largest entry of each; the worst.",
]


def trained(keys: dict[str, Any]) -> FSGPExact:
    """The Strategy after a run in this process that writes nothing."""
    config = parse_config({**QUIET, **KEYS, **keys, "sites": SITES})
    nodes = [{"partition-id": site, "num-partitions": SITES} for site in range(SITES)]
    strategy = FSGPExact.from_config(config, Observer())
    grid = InProcessGrid(client_app.app, config.flat(), nodes)
    strategy.start(grid, ArrayRecord(), num_rounds=config.num_server_rounds)
    return strategy


@torch.no_grad()
def totals_apart(strategy: FSGPExact) -> float:
    """How far the totals at the optimum are from plain sums of what the sites add there."""
    totals = strategy.last[1].sums()
    model = SparseGP.from_arrays(strategy.config.model, strategy.current.best)
    agreed = Preparation.from_wire(strategy.preparation.arrays, strategy.preparation.schema)
    encoded = [site.encode(agreed) for site in load_all_sites(strategy.config, SITES)]
    plain = [model.sums(torch.from_numpy(own.x), torch.from_numpy(own.y)) for own in encoded]
    worst = 0.0
    for name in ("gram", "projection", "target_squares", "prior_variance"):
        ours = np.asarray(getattr(totals, name))
        theirs = sum(np.asarray(getattr(own, name)) for own in plain)
        worst = max(worst, float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return worst


def main() -> None:
    """Make the runs, write the page after each pair, and fail where bounds are too far apart."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True, type=Path)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows = []
    for name, (points, ard, rounds) in CASES.items():
        keys = {"model.num-inducing": points, "model.ard": ard, "num-server-rounds": rounds}
        keys["data-dir"] = str(given.data_dir)
        plain, masked = (trained({**keys, "privacy.secure-aggregation": on}) for on in (False, True))
        before, after = plain.details()["bound"], masked.details()["bound"]
        apart = abs(after - before) / abs(before)
        ended = all(own.converged(own.current) for own in (plain, masked))
        rows.append(
            {
                "model": name,
                "rounds": f"{plain.round} and {masked.round}",
                "both converged": "yes" if ended else "no",
                "bound, plain": f"{before:.9f}",
                "bound, masked": f"{after:.9f}",
                "bounds apart": f"{apart:.1e}",
                "totals apart": f"{totals_apart(masked):.1e}",
            }
        )
        print(rows[-1], flush=True)
        write_table(RESULTS / "masked_convergence.md", "The same optimum under masks", LINES, pd.DataFrame(rows))
        if not (ended and apart <= BOUND):
            raise SystemExit(f"{name}: bounds are {apart:.1e} apart")


if __name__ == "__main__":
    main()
