"""MNIST by a Bayesian neural network under PVI.

Section 5.3 of Ashman et al. (2022), shrunk for two cores: all 60 000 training and 10 000 test images of 14 × 14 pixels
(means of four), 50 hidden units instead of 200, 100 steps a visit at most, few visits. Ten sites of 6000 images
(`even`); with two digits each, a hundred sites of 600 images (`uneven`), and for a study of damping twenty of 3000
(`study`). N(0, 1) priors, mean-field q. Free energy: of the training images under the posterior, nats an image; by it,
and not by test images, a ρ may be chosen. `global VI` is the same update of all rows with the steps that the sites take
together, from the same start. A visit starts from a tight q (sd .05) and may end early. Scores are of 30 draws.

The paper's figures are curves; it reports that both forms of PVI end near global VI, BCM poor, VCL reasonable but below
PVI, and slow progress of strongly damped rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Row, figures, fit, images, train_and_test

TWO: dict[str, Any] = {"partitioner": "pathological"}
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "even": (10, {"partitioner": "iid"}),
    "study": (20, TWO),
    "uneven": (100, TWO),
}
DAMPING = {"even": (5, (0.2,)), "study": (4, (0.1, 0.2, 0.5, 1.0)), "uneven": (4, (0.1, 0.2, 0.5, 1.0))}
"""Visits of a site, and values of ρ, of synchronous PVI; asynchronous PVI has as many visits."""
SEQUENTIAL = "sequential PVI"
METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    SEQUENTIAL: (3, {}),
    "streaming VB": (2, {"pvi.deletion": False}),
    "VCL": (1, {"pvi.preset": "vcl"}),
    "BCM (same)": (1, {"pvi.preset": "bcm-same"}),
    "BCM (split)": (1, {"pvi.preset": "bcm-split"}),
}


def table() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training images and test images."""
    found = []
    for part in ("train", "t10k"):
        x, y = images(part, 14)
        found.append(pd.DataFrame(x, columns=[f"p{i}" for i in range(196)]).assign(digit=y.astype(float)))
    return found[0], found[1]


def methods_of(split: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Everything that is run on a split: visits of a site and keys."""
    visits, values = DAMPING[split]
    found = {SEQUENTIAL: (visits, METHODS[SEQUENTIAL][1])} if split == "study" else dict(METHODS)
    for rho in values:
        found[f"synchronous PVI, ρ = {rho:g}"] = (visits, {"pvi.schedule": "synchronous", "pvi.damping": rho})
    found["asynchronous PVI, ρ = 0.2"] = (visits, {"pvi.schedule": "asynchronous", "pvi.damping": 0.2})
    return found


def study(splits: tuple[str, ...] = tuple(SPLITS), only: tuple[str, ...] = ("",)) -> Iterator[Row]:
    """A row for each split and method."""
    path = train_and_test("digits", table)
    for split in splits:
        sites, dealt = SPLITS[split]
        for method, (visits, keys) in methods_of(split).items():
            if only not in {("",), ()} and method not in only:
                continue
            together = keys.get("pvi.schedule") == "synchronous" or keys.get("pvi.preset", "").startswith("bcm")
            common = {"method": "pvi-bnn", "dataset": path, "target": "digit", "split": 0, "standardise": False}
            common |= {"pvi.steps": 100, **dealt, **keys}
            common |= {"num-server-rounds": visits if together else visits * sites}
            common |= {"baselines.pooled": method == SEQUENTIAL and split == "even"}
            run, row = fit(common, sites), {"split": f"{split}, {sites} sites", "method": method, "visits": visits}
            if "refused" in run:
                yield row | {"method": f"{method}: diverges"}
                continue
            energy = run["method_details"].get("free_energy", {}).get("total", np.nan) / 60_000
            yield row | {"free energy": energy, **figures(run)}
            if run["pooled"]:
                yield {"split": row["split"], "method": "global VI", **figures({"test": run["pooled"]})}
