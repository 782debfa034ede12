"""MNIST with two digits at a site: a Gaussian process on shared features.

The split of pFedGP (Achituve et al. 2021) on MNIST: 2000 of 60 000 training images dealt to sites with two digits
each, 2000 of the 10 000 test images likewise; 14 × 14 pixels (means of four). All have the same network: twice 3 × 3
filters (8, 16) at every second pixel, then 32 features; 20 rounds of 10 steps of Adam at 0.003 with all rows of a site.
*GP*: `deep-kernel`, a Gaussian process of ten classes on the features, which are trained by the evidence of each site's
rows; heads by exact sums; *share* is the part of the prior variance that heads of sites have for themselves, which the
evidence of all rows chooses. *Local-only* is the same of a site's rows alone, *pooled* of all rows in one place.
*FedAvg*: Flower's own, the same network with a linear head, by cross entropy; *heads stay*: they are not averaged
(FedPer). Its rate, of .001, .003, .01 and .03, is the best by accuracy on a fifth of the training images of another
deal to 50 sites; the settings of the GP were chosen on training images of another deal. Accuracy is the mean over sites
of held-out images, *spread* its standard deviation over sites; NLL in nats per image; means over runs, each of which
deals images anew. pFedGP has 88 to 90 % on CIFAR-10 with two classes at each of 50 to 100 clients (quoted, not measured
here): harder images, ten times as many, and a larger network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from simulations.common import IMAGES, Array, Row, averaged, fit, image_table, images, kept_table, remembered
from simulations.fedavg import WAYS, over_sites, scored

ROWS, HELD_OUT, ROUNDS, STEPS, RATE = 2_000, 2_000, 20, 10, 0.003
RATES, TUNED = (0.001, 0.003, 0.01, 0.03), (50, 99)
"""What FedAvg may choose from; sites and seed of the deal on whose training images it does."""
PLAN: dict[str, Any] = {"rounds": ROUNDS, "steps": STEPS, "batch": ROWS}
KEYS: dict[str, Any] = {
    **IMAGES,
    "method": "deep-kernel",
    "deep.network": "convolutional",
    "model.likelihood": "categorical",
    "deep.local-steps": STEPS,
    "deep.learning-rate": RATE,
    "num-server-rounds": ROUNDS,
    "baselines.local-only": True,
    "baselines.pooled": True,
}


def dealt(sites: int, seed: int) -> Iterator[tuple[str, Array, Array, Array]]:
    """Images, digits and sites: as many everywhere, half of each of two digits; every digit as often."""
    rng = np.random.default_rng([seed, sites])
    pairs = np.array([(k % 10, (k % 10 + 1 + k // 10 % 9) % 10) for k in range(sites)])
    for part, count in (("train", ROWS), ("t10k", HELD_OUT)):
        y, half = images(part)[1], count // sites // 2
        pools = [list(rng.permutation(np.flatnonzero(y == digit))) for digit in range(10)]
        rows = [pools[digit].pop() for pair in pairs for digit in np.repeat(pair, half)]
        yield part, np.array(rows), y[rows], np.repeat(np.arange(sites), 2 * half)


class Network(nn.Module):
    """The network of the runs, with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        image = nn.Unflatten(-1, (1, 14, 14))
        filters = (nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
        self.features = nn.Sequential(image, *filters, nn.Flatten(-3), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.features(x))
        return logits


def best_rate(way: str) -> float:
    """By accuracy on a fifth of the training images of another deal."""
    sites, seed = TUNED
    path = image_table(f"pairs-{sites}-{seed}", lambda: dealt(sites, seed))

    def last_fifth() -> pd.DataFrame:
        frame = pd.read_parquet(path).iloc[:ROWS]
        order = np.argsort(frame.groupby("silo").cumcount() % 5 == 4, kind="stable")
        return frame.iloc[order].reset_index(drop=True)

    tuning = kept_table("pairs-tuning", last_fifth)
    plan = {**PLAN, "seed": seed, "held_out": ROWS // 5}
    found = {
        rate: remembered(
            "deep_kernel", ["tuning", way, rate], lambda r=rate: scored(tuning, Network, way, rate=r, **plan)
        )
        for rate in RATES
    }
    return max(RATES, key=lambda rate: float(found[rate]["accuracy, %"]))


def study(sites: tuple[int, ...] = (20, 50, 100), seeds: tuple[int, ...] = (0,)) -> Iterator[Row]:
    """A row for each number of sites and method."""
    for count in sites:
        rows: list[Row] = []
        for seed in seeds:
            path = image_table(f"pairs-{count}-{seed}", lambda c=count, s=seed: dealt(c, s))
            for way in WAYS:
                plan = {**PLAN, "seed": seed, "held_out": HELD_OUT, "rate": best_rate(way)}
                found = remembered(
                    "deep_kernel",
                    [way, count, seed, plan["rate"]],
                    lambda p=path, w=way, k=plan: scored(p, Network, w, **k),
                )
                rows.append({"sites": count, "method": way, "rate": plan["rate"], **found})
            run = fit({**KEYS, "dataset": path, "seed": seed}, 0)
            parts = {"GP": {**run["test"], "per_site": run["per_site"]}}
            parts |= {f"GP, {name}": run[name] for name in ("local_only", "pooled")}
            rows += [{"sites": count, "method": name, "rate": RATE, **over_sites(own)} for name, own in parts.items()]
            rows[-3]["share"] = run["method_details"]["share"]
        yield from averaged(rows, ("sites", "method"))
