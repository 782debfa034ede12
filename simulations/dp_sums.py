"""FSGP with differential privacy: NLL against ε, noise split under masks beside the central mechanism.

    python simulations/dp_sums.py --data-dir DIR [--splits 0 1 2 3 4] [--draws 10]

Ten sites. *Masked*: the noise is split among the sites and only the total is seen; *central*: one party with all rows
adds the whole noise; *in the clear*: every site adds the whole noise to its own sums. Sums are formed once for a split
and noise is drawn several times, by the functions that server and sites call; a whole run under masks at ε = 1 stands
beside. Ranges are those of the whole tables, rounded outwards to a tenth, taken for public.

M and the lengthscale are chosen by central noise for each ε on the training rows of each split, a fifth held out
once more: no held-out row is looked at. This choice is not paid for in ε. What of the gram matrix counts as noise is
theory's edge and not chosen. Written to ``simulations/results/dp_sums.md``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from sfvi_runs import RESULTS, RUNS, ensure, write_table
from strategies.fsgp_private import evaluated, first_values
from torch import Tensor

from fedgp_flower.data.agreement import SiteDescription, agree
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import SparseGP, pooled_sums
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.messages import add
from fedgp_flower.methods.sgpr.messages import PrivateSums
from fedgp_flower.methods.sgpr.private import EDGE, Budget, disturbed
from fedgp_flower.run.files import write_json
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import Array
from strategies.fsgp import posterior_at

NAME, SITES, DELTA, DRAWS = "dp_sums", 10, 1e-5, 3
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 1e4)
CLOSE = 0.02
"""Nats per row."""
SETS, SIZES, FACTORS = ("uci/power", "kin40k"), (25, 50, 100, 200), (0.7, 1.0, 1.4)
"""Tables; M; lengthscales over √D."""
ARMS = ("masked", "central", "in_the_clear")
Told = Callable[[float, np.random.Generator], tuple[PrivateSums, float]]


@dataclass(frozen=True)
class Settings:
    """What is chosen."""

    size: int = 100
    factor: float = 1.0


@functools.cache
def ranges(data_dir: str, dataset: str) -> dict[str, list[float]]:
    """Of every column, rounded outwards."""
    table = pd.read_csv(f"{data_dir}/{dataset}.csv.gz")
    return {str(n): [math.floor(10 * own.min()) / 10, math.ceil(10 * own.max()) / 10] for n, own in table.items()}


def keys(data_dir: str, dataset: str, split: int, chosen: Settings) -> dict[str, Any]:
    """The configuration of a run at ε = 1."""
    known = ranges(data_dir, dataset)
    return {
        "method": "fsgp",
        "dataset": dataset,
        "data-dir": data_dir,
        "split": split,
        "model.num-inducing": chosen.size,
        "model.lengthscale": round(chosen.factor * math.sqrt(len(known) - 1), 3),
        "privacy.epsilon": 1.0,
        "privacy.ranges": json.dumps(known),
        "privacy.secure-aggregation": True,
        **{f"baselines.{name}": False for name in ("linear", "local-only", "pooled")},
    }


@dataclass(frozen=True)
class Rows:
    """Rows of the sites of a split, standardised by public ranges, targets clipped; and held-out rows."""

    sites: tuple[tuple[Tensor, Tensor], ...]
    x: Tensor
    y: Array
    scale: float

    @staticmethod
    def of(flat: dict[str, Any]) -> Rows:
        """As a run has them."""
        config = parse_config(flat)
        raw = load_all_sites(config, SITES)
        told = {own.site: own.describe(config.privacy.bounds) for own in raw}
        found = agree({site: SiteDescription(own.arrays, own.schema, own.num_examples) for site, own in told.items()})
        agreed = Preparation.from_wire(found.arrays, found.schema)
        rows = [own.encode(agreed) for own in raw]
        sites = tuple((torch.from_numpy(own.x), torch.from_numpy(own.y.clip(-EDGE, EDGE))) for own in rows)
        x, y = (np.concatenate([getattr(own, name) for own in rows]) for name in ("x_test", "y_test"))
        return Rows(sites, torch.from_numpy(x), y, agreed.target_scale)

    def inner(self) -> Rows:
        """Every fifth training row of each site held out."""
        kept = [torch.arange(len(y)) % 5 != 0 for _, y in self.sites]
        x, y = (
            torch.cat([own[at][~own_kept] for own, own_kept in zip(self.sites, kept, strict=True)]) for at in (0, 1)
        )
        fit = tuple((x[own], y[own]) for (x, y), own in zip(self.sites, kept, strict=True))
        return Rows(fit, x, y.numpy(), self.scale)


class Split:
    """Sums of the sites of a split at some settings, and its held-out rows."""

    def __init__(self, rows: Rows, flat: dict[str, Any]) -> None:
        self.rows, self.config = rows, parse_config(flat)
        self.total = sum(len(y) for _, y in rows.sites)
        self.values = first_values(self.config.model, rows.x.shape[1], self.config.seed)
        model = SparseGP.from_arrays(self.config.model, self.values)
        self.sites = [pooled_sums(model, *own) for own in rows.sites]
        self.whole: SparseSums = functools.reduce(operator.add, self.sites)

    def masked(self, noise: float, rng: np.random.Generator) -> tuple[PrivateSums, float]:
        """Noise split among sites."""
        return add([disturbed(own, 1.0, noise / math.sqrt(SITES), rng) for own in self.sites]), noise

    def central(self, noise: float, rng: np.random.Generator) -> tuple[PrivateSums, float]:
        """All noise once."""
        return disturbed(self.whole, 1.0, noise, rng), noise

    def in_the_clear(self, noise: float, rng: np.random.Generator) -> tuple[PrivateSums, float]:
        """All noise at every site."""
        return add([disturbed(own, 1.0, noise, rng) for own in self.sites]), noise * math.sqrt(SITES)

    def nll(self, told: Told, epsilon: float, rng: np.random.Generator) -> float:
        """Held-out NLL of a draw, in original units."""
        sums, noise = told(Budget(epsilon, DELTA, 1, len(self.whole.projection)).noise, rng)
        found = evaluated(self.values, sums, self.total, noise)
        posterior = posterior_at(found.values, found.totals)
        with torch.no_grad():
            model = SparseGP.from_arrays(self.config.model, posterior.values)
            mean, variance = (own.numpy() for own in model.predict(self.rows.x, posterior.whitened()))
        return float(-norm.logpdf(self.rows.y, mean, np.sqrt(variance)).mean() + math.log(self.rows.scale))


def chosen(inner: Rows, data_dir: str, dataset: str) -> dict[float, Settings]:
    """For every ε the settings of the lowest mean NLL over a few draws."""
    found: dict[float, dict[Settings, float]] = {epsilon: {} for epsilon in EPSILONS}
    for own in itertools.starmap(Settings, itertools.product(SIZES, FACTORS)):
        split = Split(inner, keys(data_dir, dataset, 0, own))
        for epsilon, values in found.items():
            drawn = [split.nll(split.central, epsilon, np.random.default_rng(draw)) for draw in range(DRAWS)]
            values[own] = float(np.mean(drawn))
    return {epsilon: min(values, key=values.__getitem__) for epsilon, values in found.items()}


def arms(splits: Sequence[Split], epsilon: float, draws: int) -> dict[str, list[float]]:
    """NLL of every split and draw."""
    return {
        arm: [
            own.nll(getattr(own, arm), epsilon, np.random.default_rng([number, draw, *arm.encode()]))
            for number, own in enumerate(splits)
            for draw in range(draws)
        ]
        for arm in ARMS
    }


def verdict(found: Mapping[str, Sequence[float]]) -> str:
    """The difference of masked and central noise, in words."""
    gap = np.mean(found["masked"]) - np.mean(found["central"])
    error = np.hypot(np.std(found["masked"]), np.std(found["central"])) / math.sqrt(len(found["masked"]))
    close = f"{'within' if abs(gap) <= CLOSE else 'not within'} {CLOSE}"
    return f"masked − central {gap:+.4f} ± {error:.4f} nats per row, {close}."


def drawn(dataset: str, given: argparse.Namespace) -> dict[str, Any]:
    """Lines and rows of a data set."""
    splits, best = [], []
    for number in given.splits:
        splits.append(Rows.of(keys(given.data_dir, dataset, number, Settings())))
        best.append(chosen(splits[-1].inner(), given.data_dir, dataset))
        print(dataset, number, best[-1], flush=True)
    rows, said = [], []
    for epsilon in EPSILONS:
        settings = [own[epsilon] for own in best]
        numbered = zip(given.splits, splits, settings, strict=True)
        found = arms([Split(r, keys(given.data_dir, dataset, n, own)) for n, r, own in numbered], epsilon, given.draws)
        means = {arm.replace("_", " "): float(np.mean(values)) for arm, values in found.items()}
        more = {"median, masked": float(np.median(found["masked"])), "sd": float(np.std(found["masked"]))}
        told = ", ".join(f"{own.size} and {own.factor:g}" for own in settings)
        rows.append({"data": dataset, "ε": f"{epsilon:g}", **means, **more, "M and lengthscale / √D": told})
        if epsilon == 1:
            said.append(f"{dataset}, ε = 1: {verdict(found)}")
            flat = keys(given.data_dir, dataset, given.splits[0], settings[0])
            name = f"{dataset.rpartition('/')[2]}-{settings[0].size}-{settings[0].factor:g}"
            run = ensure(NAME, name, SITES, flat)
            said.append(f"{dataset}, a whole run at ε = 1, split {given.splits[0]}: {run['test']['nll']:.3f}.")
        print(rows[-1], flush=True)
    drawn_from = f"{dataset}: splits {', '.join(map(str, given.splits))}, {given.draws} draws of noise each."
    return {"said": [drawn_from, *said], "rows": rows}


def main() -> None:
    """Choose, draw, and write the page of all tables that were drawn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    limit_threads(1)
    paths = {dataset: RUNS / NAME / f"{dataset.rpartition('/')[2]}.json" for dataset in SETS}
    for dataset in given.sets:
        write_json(paths[dataset], drawn(dataset, given))
    found = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    lines = [
        "`python simulations/dp_sums.py --data-dir DIR --sets … --splits … --draws …`",
        "",
        f"Mean held-out NLL in nats per row, original units, δ = {DELTA:g}; ε = 10000 is all but no noise. The"
        " docstring there says what the arms are, what is taken for public, and how M and the lengthscale were chosen"
        f" for each ε and split, of {len(SIZES) * len(FACTORS)} pairs, on training rows: that is not paid for in ε."
        " Where a mean is far above the median a few draws are far off.",
        "",
        *(f"- {line}" for own in found for line in own["said"]),
    ]
    table = pd.DataFrame([row for own in found for row in own["rows"]])
    write_table(RESULTS / f"{NAME}.md", "FSGP with differential privacy", lines, table)


if __name__ == "__main__":
    main()
