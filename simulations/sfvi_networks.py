"""MNIST with 90 % of one digit at a site: hierarchical BNN and fully Bayesian FedPop by SFVI (Hassan et al. 2023, 4.1).

    python simulations/sfvi_networks.py --data-dir DIR [--seeds 0 1 2] [--sites 10 50]

Table 1 of the paper, made small: see the page in ``simulations/results/``. Complete runs are not repeated.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import over_sites
import pandas as pd
import torch
from flower_fedavg import fedavg
from sfvi_mnist import images
from sfvi_runs import RUNS, ensure
from torch import Tensor, nn

NAME = "sfvi_networks"
SITES = (10, 50)
ROWS, HELD_OUT, SIDE, HIDDEN = 6_000, 4_000, 14, 50
MODELS = {"fully Bayesian FedPop": "fedpop", "Hierarchical BNN": "hierarchical-bnn"}
METHODS: dict[str, dict[str, Any]] = {
    "SFVI-Avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 25},
    "SFVI": {"method": "sfvi", "num-server-rounds": 200, "sfvi.learning-rate": 0.02},
}
PAPER = {
    ("Hierarchical BNN", "SFVI-Avg"): ("96.6 (0.68)", "93.6 (1.68)"),
    ("Hierarchical BNN", "SFVI"): ("97.5 (0.50)", "96.0 (1.03)"),
    ("fully Bayesian FedPop", "SFVI-Avg"): ("97.0 (0.62)", "94.2 (1.33)"),
    ("fully Bayesian FedPop", "SFVI"): ("97.5 (0.46)", "96.2 (1.05)"),
}
"""Accuracy in per cent and its spread over silos, at 10 and 50 silos: Table 1."""
AVERAGING = {"rounds": 20, "steps": 50, "rate": 0.01, "batch": 64}
"""Flower's FedAvg of a plain network with the same layers."""
LINES = (
    "Shrunk from the paper's for two cores: 6000 of 60 000 training images and 4000 of 10 000 test images of 14 × 14",
    "pixels (means of four) instead of 28 × 28, 50 hidden units instead of 64, 200 rounds of SFVI instead of 10 000;",
    "the paper does not say how many local steps its 20 rounds of SFVI-Avg have, here 25. 90 % of the images of a",
    "site, held-out ones too, are of one digit, so that a site which always says that digit is right for 90 %. q is",
    "diagonal, one draw a gradient, Adam at 0.01 (SFVI 0.02), initial standard deviations 0.1, chosen on training",
    "images alone, some of them held out, as were rate and batches of FedAvg. Local-only: the same model",
    "of a site's rows alone, as many steps as SFVI; pooled: the same model with one site that has all rows, and so",
    "without a personal part. FedAvg: Flower's own, of a plain network with the same layers, and with heads that stay",
    "at their sites (FedPer). Accuracy is the mean over sites of held-out images, in brackets its standard deviation",
    "over sites, both averaged over runs, after ± that over runs; a run deals images anew. NLL in nats",
    "per image. `runs`: how many, at every number of sites.",
    "",
)


def dealt(digits: np.ndarray, sites: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images and their sites: ``count`` rows, the same number everywhere, 90 % of one digit and the others in turn."""
    pools = [list(rng.permutation(np.flatnonzero(digits == digit))) for digit in range(10)]
    each = count // sites
    rows, owner = [], []
    for site in range(sites):
        others = [digit for digit in range(10) if digit != site % 10]
        main = round(0.9 * each)
        wanted = [site % 10] * main + [others[(site + k) % 9] for k in range(each - main)]
        rows += [pools[digit].pop() for digit in wanted]
        owner += [site] * each
    return np.array(rows), np.array(owner)


def table_of(data_dir: Path, sites: int, seed: int) -> Path:
    """Training and held-out images with their site; the latter are split 0."""
    folder = (RUNS / NAME / "data").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"digits-{sites}-{seed}.parquet"
    if not path.exists():
        parts, rng = [], np.random.default_rng([seed, sites])
        for part, count in (("train", ROWS), ("t10k", HELD_OUT)):
            x, y = images(data_dir, part)
            chosen, owner = dealt(y, sites, count, rng)
            small = x[chosen].reshape(-1, SIDE, 28 // SIDE, SIDE, 28 // SIDE).mean((2, 4)).reshape(count, -1)
            own = pd.DataFrame(small, columns=[f"p{i}" for i in range(SIDE**2)])
            parts.append(own.assign(silo=[f"silo {k:02d}" for k in owner], digit=y[chosen].astype(float)))
        frame = pd.concat(parts, ignore_index=True)
        listing = {"n": len(frame), "n_splits": 1, "test": [list(range(ROWS, len(frame)))]}
        with gzip.open(folder / f"digits-{sites}-{seed}.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        frame.to_parquet(path)
    return path


def keys(path: Path, model: str, seed: int) -> dict[str, Any]:
    """What all runs of a table share."""
    return {
        "dataset": str(path),
        "target": "digit",
        "split": 0,
        "seed": seed,
        "standardise": False,
        "partitioner": "natural",
        "partition.column": "silo",
        "sfvi.model": MODELS[model],
        "sfvi.hidden": HIDDEN,
        "sfvi.samples": 1,
        "sfvi.learning-rate": 0.01,
        "sfvi.initial-scale": 0.1,
        "sfvi.initial-local-scale": 0.1,
        "sfvi.prediction-draws": 20,
    }


def figures(scores: dict[str, Any]) -> dict[str, float]:
    """Mean and spread over sites of the accuracy, and the NLL, of a run's scores or of a comparison's."""
    accuracy = [100 * row["accuracy"] for row in scores["per_site"]]
    spread = float(np.std(accuracy)) if len(accuracy) > 1 else np.nan
    return {"accuracy": float(np.mean(accuracy)), "spread": spread, "nll": scores["nll"]}


def of_a_run(path: Path, sites: int, seed: int, model: str, method: str) -> list[dict[str, Any]]:
    """Figures of a run; local-only and pooled come with SFVI."""
    name = f"{MODELS[model]}-{method.lower()}-{sites}-{seed}"
    beside = {"baselines.local-only": method == "SFVI", "baselines.pooled": method == "SFVI"}
    run = ensure(NAME, name, sites, keys(path, model, seed) | METHODS[method] | beside)
    rows = [{"inference": method, **figures({**run["test"], "per_site": run["per_site"]})}]
    rows[0]["rounds"] = run["rounds"]
    rows += [{"inference": key.replace("_", "-"), **figures(run[key])} for key in ("local_only", "pooled") if run[key]]
    return [{"sites": sites, "seed": seed, "model": model, **row} for row in rows]


class Network(nn.Module):
    """The layers of the paper, without biases and without a prior."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(SIDE**2, HIDDEN, bias=False, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, 10, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.relu(self.first(x)))


def loss(module: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(module(rows[0]), rows[1])


WAYS: dict[str, Callable[[str], bool]] = {
    "FedAvg": lambda name: True,
    "FedAvg, heads stay": lambda name: not name.startswith("head."),
}
"""What Flower's FedAvg averages, by the name of a parameter."""


def averaged(
    path: Path, kept: Path, make: Callable[[], nn.Module], seed: int, plans: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Flower's FedAvg of the whole network, and of all but the last layer, on a table with held-out rows at its end.

    ``plans`` are rounds, steps, rate and batch by what is averaged, a key of :data:`WAYS`.
    """
    if kept.exists():
        return list(json.loads(kept.read_text()))
    frame = pd.read_parquet(path)
    x = torch.from_numpy(frame[[f"p{i}" for i in range(SIDE**2)]].to_numpy(copy=True))
    y, silo = torch.from_numpy(frame["digit"].to_numpy(int, copy=True)), frame["silo"].to_numpy()
    with gzip.open(path.with_suffix(".splits.json.gz")) as file:
        training = np.arange(len(frame)) < json.load(file)["test"][0][0]
    names = sorted(set(silo))
    own, new = ({s: np.flatnonzero((silo == s) & part) for s in names} for part in (training, ~training))
    found = []
    for words, plan in plans.items():
        shared = WAYS[words]
        data = {s: (x[rows], y[rows]) for s, rows in own.items()}
        modules = fedavg(make, data, loss, shared=shared, seed=seed, **plan)
        right, nll = [], 0.0
        for s, rows in new.items():
            with torch.no_grad():
                log_class = modules[s](x[rows]).log_softmax(-1)
            right.append(100 * float((log_class.argmax(1) == y[rows]).double().mean()))
            nll -= float(log_class.gather(1, y[rows][:, None]).sum())
        scores = {"accuracy": float(np.mean(right)), "spread": float(np.std(right)), "nll": nll / (~training).sum()}
        common = {"sites": len(names), "seed": seed, "model": "plain network", "inference": words}
        found.append({**common, **scores, "rounds": plan["rounds"]})
    kept.write_text(json.dumps(found))
    return found


def page(rows: list[dict[str, Any]], made: list[str]) -> None:
    """Means over runs."""

    def paper(keys: tuple[str, ...], sites: int, own: pd.DataFrame) -> dict[str, str]:
        del own
        model, inference = keys
        return {f"paper, {sites}": PAPER.get((model, inference), ("", ""))[int(sites > SITES[0])]}

    def rounds(keys: tuple[str, ...], sites: int, own: pd.DataFrame) -> dict[str, str]:
        del keys, sites
        known = own["rounds"].dropna()
        return {"rounds": str(int(known.iloc[0])) if len(known) else ""}

    title = "MNIST with 90 % of one digit at a site: networks by SFVI"
    over_sites.write(NAME, title, [*made, *LINES], rows, ["model", "inference"], more=paper, last=rounds)


def tasks(data_dir: Path, sites: int, seed: int) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """What there is to do."""
    path = table_of(data_dir, sites, seed)
    kept = RUNS / NAME / f"fedavg-{sites}-{seed}.json"
    yield "FedAvg", lambda: averaged(path, kept, Network, seed, dict.fromkeys(WAYS, AVERAGING))
    for method in reversed(METHODS):
        for model in MODELS:
            yield f"{model} by {method}", partial(of_a_run, path, sites, seed, model, method)


if __name__ == "__main__":
    over_sites.run(__doc__, NAME, SITES, tasks, page)
