"""MNIST with 90 % of one digit at a site: networks by SFVI.

Hierarchical BNN and fully Bayesian FedPop, Table 1 of Hassan et al. (2023), shrunk for two cores: 6000 of 60 000
training images and 4000 of 10 000 test images of 14 × 14 pixels (means of four) instead of 28 × 28, 50 hidden units
instead of 64, 200 rounds of SFVI instead of 10 000; the paper does not say how many local steps its 20 rounds of
SFVI-Avg have, here 25. 90 % of the images of a site, held-out ones too, are of one digit, so that a site which always
says that digit is right for 90 %. q is diagonal, one draw a gradient, settings chosen on training images alone.
Local-only: the same model of a site's rows alone; pooled: the same model with one site that has all rows. FedAvg:
Flower's own, of a plain network with the same layers, and with heads that stay at their sites (FedPer). Accuracy is
the mean over sites of held-out images, *spread* its standard deviation over sites, both averaged over runs, each of
which deals images anew. NLL in nats per image. Columns *paper*: accuracy and its spread over silos.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simulations.common import IMAGES, Array, Row, averaged, fit, image_table, images, remembered
from simulations.fedavg import WAYS, over_sites, scored

ROWS, HELD_OUT, HIDDEN = 6_000, 4_000, 50
MODELS = {"fully Bayesian FedPop": "fedpop", "Hierarchical BNN": "hierarchical-bnn"}
METHODS: dict[str, dict[str, Any]] = {
    "SFVI-Avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 25, "sfvi.learning-rate": 0.01},
    "SFVI": {"method": "sfvi", "num-server-rounds": 200, "sfvi.learning-rate": 0.02},
}
KEYS: dict[str, Any] = {
    **IMAGES,
    "sfvi.hidden": HIDDEN,
    "sfvi.samples": 1,
    "sfvi.initial-scale": 0.1,
}
PAPER = {
    ("Hierarchical BNN", "SFVI-Avg"): {10: "96.6 (0.68)", 50: "93.6 (1.68)"},
    ("Hierarchical BNN", "SFVI"): {10: "97.5 (0.50)", 50: "96.0 (1.03)"},
    ("fully Bayesian FedPop", "SFVI-Avg"): {10: "97.0 (0.62)", 50: "94.2 (1.33)"},
    ("fully Bayesian FedPop", "SFVI"): {10: "97.5 (0.46)", 50: "96.2 (1.05)"},
}
"""Table 1."""
AVERAGING: dict[str, Any] = {"rounds": 20, "steps": 50, "rate": 0.01, "batch": 64}


def dealt(sites: int, seed: int) -> Iterator[tuple[str, Array, Array, Array]]:
    """Images, digits and sites: the same number everywhere, 90 % of one digit and the others in turn."""
    rng = np.random.default_rng([seed, sites])
    for part, count in (("train", ROWS), ("t10k", HELD_OUT)):
        y = images(part)[1]
        pools = [list(rng.permutation(np.flatnonzero(y == digit))) for digit in range(10)]
        each, rows = count // sites, []
        for site in range(sites):
            others = [digit for digit in range(10) if digit != site % 10]
            main = round(0.9 * each)
            wanted = [site % 10] * main + [others[(site + k) % 9] for k in range(each - main)]
            rows += [pools[digit].pop() for digit in wanted]
        yield part, np.array(rows), y[rows], np.repeat(np.arange(sites), each)


class Network(nn.Module):
    """The layers of the paper, without biases and without a prior."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(196, HIDDEN, bias=False, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, 10, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(torch.relu(self.first(x)))
        return logits


def study(sites: tuple[int, ...] = (10, 50), seeds: tuple[int, ...] = (0,)) -> Iterator[Row]:
    """A row for each number of sites, model and way to fit it."""
    for count in sites:
        rows: list[Row] = []
        for seed in seeds:
            path = image_table(f"digits-{count}-{seed}", lambda c=count, s=seed: dealt(c, s))
            for way in WAYS:
                plan = {**AVERAGING, "seed": seed, "held_out": HELD_OUT}
                found = remembered(
                    "networks", [way, count, seed], lambda p=path, w=way, k=plan: scored(p, Network, w, **k)
                )
                rows.append({"sites": count, "model": "plain network", "inference": way, **found})
            for model, name in MODELS.items():
                for method, keys in METHODS.items():
                    beside = {f"baselines.{own}": method == "SFVI" for own in ("local-only", "pooled")}
                    run = fit({**KEYS, **keys, **beside, "sfvi.model": name, "dataset": path, "seed": seed}, 0)
                    parts = {method: {**run["test"], "per_site": run["per_site"]}}
                    parts |= {own: run[own] for own in ("local_only", "pooled") if run[own]}
                    rows += [
                        {"sites": count, "model": model, "inference": k, **over_sites(v)} for k, v in parts.items()
                    ]
        for row in averaged(rows, ("sites", "model", "inference")):
            yield row | {"paper": PAPER.get((row["model"], row["inference"]), {}).get(count)}
