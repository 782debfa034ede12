"""MNIST with two digits at a site: a Gaussian process on shared features with personal heads, beside networks.

    python simulations/deep_kernel.py --data-dir DIR [--seeds 0] [--sites 20 50 100]

The split is that of pFedGP (Achituve et al. 2021), on smaller images; see the page in ``simulations/results/``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import over_sites
import pandas as pd
import torch
from sfvi_mnist import images
from sfvi_networks import SIDE, WAYS, averaged, figures
from sfvi_runs import RUNS, ensure
from torch import Tensor, nn

from fedgp_flower.methods.deep_kernel.model import convolutional
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions

NAME = "deep_kernel"
ROWS, HELD_OUT = 2_000, 2_000
ROUNDS, STEPS, RATE = 20, 10, 0.003
HEADS = {"GP, personal heads": "personal", "GP, one head": "shared"}
AVERAGING = {"rounds": ROUNDS, "steps": STEPS, "rate": RATE, "batch": ROWS}
RATES, TUNED = (0.001, 0.003, 0.01, 0.03), (50, 99)
"""What FedAvg may choose from, and the sites and the seed of the deal on whose training images it does."""
LINES = (
    f"MNIST, {ROWS} of 60 000 training images dealt to sites with two digits each, {HELD_OUT} of the 10",
    f"000 test images likewise; {SIDE} × {SIDE} pixels (means of four). All have the same network: twice 3",
    f"× 3 filters (8, 16) at every second pixel, then 32 features; {ROUNDS} rounds of {STEPS} steps of",
    f"Adam at {RATE} with all rows of a site. *GP*: `deep-kernel`, a Gaussian process of ten classes on",
    "the features, which are trained by the evidence of each site's rows; heads by exact sums; ρ is the",
    "share of the prior variance that heads of sites have for themselves, which the evidence of all rows",
    "chooses. *Local-only* is the same of a site's rows alone, *pooled* of all rows in one place, with",
    "one head. *FedAvg*: Flower's own, the same network with a linear head, by cross entropy; *heads",
    "stay*: they are not averaged (FedPer). Accuracy is the mean over sites of held-out images, in",
    "brackets its standard deviation over sites; NLL in nats per image; means over runs, each of which",
    "deals images anew, after ± that over runs. Rate, steps and α = 0.01 of the GP were chosen on training",
    f"images of another deal; the rate of either FedAvg likewise, of {', '.join(map(str, RATES))}, by accuracy on a",
    "fifth of the training images of a deal to 50 sites. The published rival, pFedGP, has 88 to 90 % on CIFAR-10",
    "with two classes at each of 50 to 100 clients (Achituve et al. 2021; quoted, not measured here): harder images,",
    "ten times as many, and a larger network. Runs that are there are not made again: those of the GP on the first",
    "deal are of an earlier commit (`f2ec1b9`).",
    "",
)


def dealt(digits: np.ndarray, pairs: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images and their sites: as many everywhere, half of each of two digits."""
    half = count // len(pairs) // 2
    pools = [list(rng.permutation(np.flatnonzero(digits == digit))) for digit in range(10)]
    rows = [pools[digit].pop() for pair in pairs for digit in np.repeat(pair, half)]
    return np.array(rows), np.repeat(np.arange(len(pairs)), 2 * half)


def table_of(data_dir: Path, sites: int, seed: int) -> Path:
    """Training and held-out images with their site; the latter are split 0."""
    folder = (RUNS / NAME / "data").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"pairs-{sites}-{seed}.parquet"
    if not path.exists():
        parts, rng = [], np.random.default_rng([seed, sites])
        # every digit as often: steps around the circle of ten
        pairs = np.array([(k % 10, (k % 10 + 1 + k // 10 % 9) % 10) for k in range(sites)])
        for part, count in (("train", ROWS), ("t10k", HELD_OUT)):
            x, y = images(data_dir, part)
            chosen, owner = dealt(y, pairs, count, rng)
            small = x[chosen].reshape(-1, SIDE, 28 // SIDE, SIDE, 28 // SIDE).mean((2, 4)).reshape(len(chosen), -1)
            own = pd.DataFrame(small, columns=[f"p{i}" for i in range(SIDE**2)])
            parts.append(own.assign(silo=[f"silo {k:03d}" for k in owner], digit=y[chosen].astype(float)))
        frame, held = pd.concat(parts, ignore_index=True), len(parts[0])
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(held, len(frame)))]}
        with gzip.open(folder / f"pairs-{sites}-{seed}.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        frame.to_parquet(path)
    return path


def of_a_run(path: Path, sites: int, seed: int, name: str) -> list[dict[str, Any]]:
    """Figures of a run; local-only and pooled come with personal heads."""
    beside = HEADS[name] == "personal"
    keys = {
        "method": "deep-kernel",
        "dataset": str(path),
        "target": "digit",
        "split": 0,
        "seed": seed,
        "standardise": False,
        "partitioner": "natural",
        "partition.column": "silo",
        "deep.network": "convolutional",
        "deep.classes": 10,
        "deep.heads": HEADS[name],
        "deep.local-steps": STEPS,
        "deep.learning-rate": RATE,
        "num-server-rounds": ROUNDS,
        "baselines.local-only": beside,
        "baselines.pooled": beside,
    }
    run = ensure(NAME, f"{HEADS[name]}-{sites}-{seed}", sites, keys)
    share = run["method_details"]["share"]
    rows = [{"inference": name, "share": share, **figures({**run["test"], "per_site": run["per_site"]})}]
    rows += [
        {"inference": f"GP, {key.replace('_', '-')}", **figures(run[key])}
        for key in ("local_only", "pooled")
        if run[key]
    ]
    return [{"sites": sites, "seed": seed, **row} for row in rows]


class Network(nn.Module):
    """The network of the runs, with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = DeepKernelOptions()
        self.features, self.head = convolutional(SIDE**2, options), nn.Linear(options.features, 10)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.features(x))


@cache
def rates(data_dir: Path) -> dict[str, float]:
    """The best rate of each way to average, by accuracy on a fifth of the training images of another deal."""
    sites, seed = TUNED
    path = table_of(data_dir, sites, seed)
    tuning = path.with_name("tuning.parquet")
    if not tuning.exists():
        frame = pd.read_parquet(path).iloc[:ROWS]
        order = np.argsort(frame.groupby("silo").cumcount() % 5 == 4, kind="stable")
        frame.iloc[order].to_parquet(tuning)
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(ROWS - ROWS // 5, ROWS))]}
        with gzip.open(tuning.with_suffix(".splits.json.gz"), "wt") as out:
            json.dump(listing, out)
    found = {}
    for rate in RATES:
        kept = RUNS / NAME / f"tuning-{rate}.json"
        for row in averaged(tuning, kept, Network, seed, {way: {**AVERAGING, "rate": rate} for way in WAYS}):
            found[row["inference"], rate] = row["accuracy"]
    return {way: max(RATES, key=lambda rate: found[way, rate]) for way in WAYS}


def fedavg(data_dir: Path, path: Path, sites: int, seed: int) -> list[dict[str, Any]]:
    """Flower's, at the rates chosen."""
    chosen = rates(data_dir)
    kept = RUNS / NAME / f"fedavg-{sites}-{seed}-{'-'.join(map(str, chosen.values()))}.json"
    rows = averaged(path, kept, Network, seed, {way: {**AVERAGING, "rate": rate} for way, rate in chosen.items()})
    return [{**row, "rate": chosen[row["inference"]]} for row in rows]


def page(rows: list[dict[str, Any]], made: list[str]) -> None:
    """Means over runs."""

    def shares(keys: tuple[str, ...], sites: int, own: pd.DataFrame) -> dict[str, str]:
        del keys
        return {f"ρ, {sites}": ", ".join(f"{value:g}" for value in own["share"].dropna())}

    def rate(keys: tuple[str, ...], sites: int, own: pd.DataFrame) -> dict[str, str]:
        del keys, sites
        return {"rate": f"{own['rate'].iloc[0]:g}"}

    title = "MNIST with two digits at a site: a Gaussian process on shared features"
    usual: dict[str, Any] = {"share": np.nan, "rate": RATE}
    full = [{**usual, **row} for row in rows]
    over_sites.write(NAME, title, [*made, *LINES], full, ["inference"], more=shares, last=rate)


def tasks(data_dir: Path, sites: int, seed: int) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """What there is to do."""
    path = table_of(data_dir, sites, seed)
    yield "FedAvg", partial(fedavg, data_dir, path, sites, seed)
    for name in HEADS:
        yield name, partial(of_a_run, path, sites, seed, name)


if __name__ == "__main__":
    over_sites.run(__doc__, NAME, (20, 50, 100), tasks, page)
