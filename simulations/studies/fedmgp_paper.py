"""FedMGP, Section 5.1 of Chung and Al Kontar (2024): the hidden half of unit 1.

Five units, one with half its curve unobserved, so many data sets. Mean squared error against noisy held-out values; the
noise alone is .0100, the paper's FedMGP .012 ± .003. Alone: a Gaussian process of each unit's own rows; pooled: the
same model, all rows in one place, by L-BFGS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulations.common import Row, averaged, fit
from simulations.studies.signals import EXACT, NATURAL, SIGNALS, scores

BESIDE = {"baselines.local-only": True, "baselines.pooled": True, "baselines.max-evaluations": 300}
ARMS: dict[str, dict[str, Any]] = {
    "exact": EXACT | BESIDE,
    "natural": NATURAL,
}


def study(arms: tuple[str, ...] = tuple(ARMS), seeds: int = 20) -> Iterator[Row]:
    """A row for each arm, and for the two baselines of the exact rounds."""
    rows = []
    for seed in range(seeds):
        for arm in arms:
            run = fit(SIGNALS | ARMS[arm] | {"seed": seed}, 0)
            rows.append({"method": arm, **scores(run)})
            for name in ("local_only", "pooled"):
                rows += [{"method": name, **scores({"test": run[name]})}] if run[name] else []
    yield from averaged(rows, ("method",), worst=("MSE",))
