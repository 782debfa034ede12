"""FSGP for classes, counts and outliers against GPyTorch's SVGP that sees all rows: how many exchanges until equal.

    python simulations/fsgp_classes.py --data-dir DIR [--rows 2000] [--only bank adult] [--seeds 0 1 2]

Ten sites with defaults and M = 100; SVGP with the same M, started at the same hyperparameters and at rows drawn at
random, by Adam: full batch with a cosine schedule, or, of more than 10 000 training rows, minibatches with a rate that
is halved where an epoch no longer raises the bound, until it is low. Both are fitted to the same training rows and
judged on the same held-out ones. A set with more rows is cut to ``--rows`` drawn at random (0: all), and rows with
gaps are left out. Every seed deals and holds out other rows. What is there already is not made again: remove
``results/fsgp_classes`` first. The page keeps its other rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import pandas as pd
import torch
from sfvi_runs import QUIET, RESULTS, RUNS, write_table

from fedgp_flower.data.agreement import SiteDescription, agree
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.latent import AMPLITUDE, REACH
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import parse_config

SITES, INDUCING, BEFORE = 10, 100, 2
RATE, STEPS = 0.03, 1500
"""Of Adam with all rows in a batch."""
FULL, BATCH, RISE, PATIENCE, LOWEST = 10_000, 1000, 1e-4, 3, 0.001
"""Training rows up to which a batch holds all; rows of a batch beyond. The rate is halved after so many epochs in which
the bound has not risen by such a part of itself, and below the lowest rate the fit has converged."""
FOLDER = RUNS / "fsgp_classes"
SETS = {"breast-cancer": 0.005, "credit": 0.005, "bank": 0.005, "adult": 0.005, "counts": 0.01, "outliers": 0.01}
"""Nats within which the issue wants a set."""
LIKELIHOODS = {"counts": "poisson", "outliers": "student-t"}


def generated(name: str, rows: int) -> pd.DataFrame:
    """Counts with rate exp(1 + sin 2x₀ + ½ x₁), or that function with noise .1 and 10 % outliers of sd 3."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-2, 2, (rows, 2))
    f = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1]
    if name == "counts":
        y = draw.poisson(np.exp(1 + f)).astype(float)
    else:
        y = f + np.where(draw.random(rows) < 0.1, 3.0, 0.1) * draw.standard_normal(rows)
    return pd.DataFrame({"x0": x[:, 0], "x1": x[:, 1], "y": y})


def table(name: str, data: Path, rows: int) -> str:
    """What ``dataset`` names: a built-in set, or a file of the rows that are used."""
    if name == "breast-cancer":
        return name
    path = FOLDER / "data" / f"{name}-{rows}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in LIKELIHOODS:
        frame = generated(name, rows or 2000)
    else:
        frame = pd.read_csv(data / f"{name}.csv.gz", na_values="?").drop(columns="split", errors="ignore").dropna()
        chosen = np.random.default_rng(0).permutation(len(frame))[: rows or len(frame)]
        frame = frame.iloc[np.sort(chosen)]
    frame.to_csv(path, index=False)
    return str(path)


def pooled_rows(flat: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Inputs and targets of all sites as they see them, then those held out."""
    config = parse_config(flat)
    sites = load_all_sites(config, SITES)
    described = {site.site: site.describe() for site in sites}
    facts = {k: SiteDescription(d.arrays, d.schema, d.num_examples) for k, d in described.items()}
    agreed = agree(facts, likelihood=config.model.likelihood)
    preparation = Preparation.from_wire(agreed.arrays, agreed.schema)
    encoded = [site.encode(preparation) for site in sites]
    parts = ("x", "y", "x_test", "y_test")
    scale = torch.tensor(float(agreed.arrays["target.scale"]))
    return *(torch.from_numpy(np.concatenate([getattr(own, part) for own in encoded])) for part in parts), scale


class SVGP(gpytorch.models.ApproximateGP):
    """Constant mean, squared exponential, free inducing points."""

    def __init__(self, points: torch.Tensor) -> None:
        q = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        inputs = points.shape[-1]
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=inputs))
        self.covar_module.outputscale, self.covar_module.base_kernel.lengthscale = AMPLITUDE, REACH * inputs**0.5

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def reference(flat: dict[str, Any], likelihood: str) -> dict[str, float]:
    """SVGP with all rows: test NLL per row in original units at its end, and a good while before."""
    x, y, x_test, y_test, scale = pooled_rows(flat)
    torch.manual_seed(0)
    model = SVGP(x[torch.randperm(len(x))[:INDUCING]]).double()
    point = build_point_likelihood(likelihood)
    observed = point.to_gpytorch(point.initial)
    bound = gpytorch.mlls.VariationalELBO(observed, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *observed.parameters()], lr=RATE)

    def nll() -> float:
        model.eval()
        with torch.no_grad():
            density = torch.cat([observed.log_marginal(t, model(r)) for r, t in batches(x_test, y_test)]).mean()
        model.train()
        return float(scale.log() - density)

    def step(rows: torch.Tensor, targets: torch.Tensor) -> float:
        optimiser.zero_grad()
        loss = -bound(model(rows), targets)
        loss.backward()
        optimiser.step()
        return -float(loss.detach())

    started = time.perf_counter()
    found = of_all_rows(step, x, y, optimiser, nll) if len(x) <= FULL else by_batches(step, x, y, optimiser, nll)
    return found | {"nll": nll(), "seconds": time.perf_counter() - started}


Stepping = Callable[[torch.Tensor, torch.Tensor], float]


def of_all_rows(
    step: Stepping, x: torch.Tensor, y: torch.Tensor, optimiser: torch.optim.Optimizer, nll: Callable[[], float]
) -> dict[str, float]:
    """So many steps with all rows; the NLL at 80 % of them, the bound at the end."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    before = value = math.nan
    for number in range(STEPS):
        if number == STEPS * 4 // 5:
            before = nll()
        value = step(x, y)
        schedule.step()
    return {"before": before, "bound": value, "epochs": STEPS}


def by_batches(
    step: Stepping, x: torch.Tensor, y: torch.Tensor, optimiser: torch.optim.Optimizer, nll: Callable[[], float]
) -> dict[str, float]:
    """Epochs until the rate is low; the NLL at the last halving but one, the bound of the last epoch."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, mode="max", factor=0.5, patience=PATIENCE - 1, threshold=RISE
    )
    before, rate, value, epochs = [math.nan], RATE, math.nan, 0
    while rate >= LOWEST:
        order = torch.randperm(len(x))
        value = float(np.mean([step(*own) for own in batches(x[order], y[order])]))
        schedule.step(value)
        epochs += 1
        if optimiser.param_groups[0]["lr"] < rate:
            before.append(nll())
            print(f"epoch {epochs}: bound {value:.5f}, NLL {before[-1]:.5f}, rate {rate:.4f}", flush=True)
        rate = optimiser.param_groups[0]["lr"]
    return {"before": before[-2], "bound": value, "epochs": epochs}


def batches(x: torch.Tensor, y: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Rows in batches of about the same size."""
    parts = math.ceil(len(x) / BATCH)
    return zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)


def run(name: str, data: Path, rows: int, seed: int) -> dict[str, Any]:
    """Both fits for one seed, and when ours was within reach of the other."""
    likelihood, dataset = LIKELIHOODS.get(name, "bernoulli"), table(name, data, rows)
    flat = {**QUIET, "dataset": dataset, "model.likelihood": likelihood, "model.num-inducing": INDUCING, "seed": seed}
    own = f"{name}-{rows}-{seed}"
    flat |= {"evaluate-every": 1, "output-dir": str(FOLDER), "name": own}
    cached = FOLDER / f"{own}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not cached.exists():
        cached.write_text(json.dumps(reference(flat, likelihood)))
    svgp = json.loads(cached.read_text())
    folder = FOLDER / own
    if not (folder / "metrics.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run_in_process(flat, SITES)
    metrics = json.loads((folder / "metrics.json").read_text())
    history = pd.read_csv(folder / "history.csv")
    gaps = history["test_nll"].to_numpy() - svgp["nll"]
    reached, beyond = np.flatnonzero(gaps <= SETS[name]), np.flatnonzero(gaps > SETS[name])
    x, _, x_test, _, _ = pooled_rows(flat)
    return {
        "rows": len(x),
        "held out": len(x_test),
        "inputs": x.shape[1],
        "SVGP": svgp["nll"],
        "SVGP before": svgp["before"],
        "epochs": svgp.get("epochs", STEPS),
        "first": BEFORE + int(reached[0]) + 1 if len(reached) else math.inf,
        "stays": BEFORE + (int(beyond[-1]) + 2 if len(beyond) else 1) if gaps[-1] <= SETS[name] else math.inf,
        "after 20": float(history["test_nll"].iloc[min(19 - BEFORE, len(gaps) - 1)]),
        "end": float(history["test_nll"].iloc[-1]),
        "exchanges": metrics["method_details"]["exchanges"],
        "converged": metrics["converged"],
        "KB": float(history["bytes_up"].iloc[1:3].mean()) / SITES / 1e3,
    }


def figures(name: str, data: Path, rows: int, seeds: list[int]) -> dict[str, Any]:
    """One line of the table."""
    runs = pd.DataFrame([run(name, data, rows, seed) for seed in seeds])
    gap = runs["end"] - runs["SVGP"]
    ends = {"first within": runs["first"].max(), "from then on within": runs["stays"].max()}
    return {
        "set": name,
        "rows": "all" if not rows or name == "breast-cancer" else str(rows),
        "training rows": int(runs["rows"].iloc[0]),
        "held out": int(runs["held out"].iloc[0]),
        "inputs": int(runs["inputs"].max()),
        "seeds": len(runs),
        "SVGP": runs["SVGP"].mean(),
        "SVGP before": runs["SVGP before"].mean(),
        "SVGP's epochs": f"{runs['epochs'].max():.0f}",
        "NLL after 20": runs["after 20"].mean(),
        "at the end": runs["end"].mean(),
        "gap": f"{gap.mean():+.4f}",
        "its standard error": f"{gap.std() / len(gap) ** 0.5:.4f}" if len(gap) > 1 else "",
        "worst": f"{gap.max():+.4f}",
        **{words: f"{when:.0f}" if math.isfinite(when) else "never" for words, when in ends.items()},
        "exchanges": f"{runs['exchanges'].max():.0f}",
        "converged": f"{int(runs['converged'].sum())} of {len(runs)}",
        "KB up a site": round(runs["KB"].mean()),
    }


def main() -> None:
    """Fit both to every set, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--only", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    chosen = parser.parse_args()
    limit_threads(1)
    page, asked = RESULTS / "fsgp_classes.md", f"--rows {chosen.rows} --seeds {' '.join(map(str, chosen.seeds))}"
    words = [
        "Made by `python simulations/fsgp_classes.py --data-dir DIR`, some sets at a time (here last:",
        f"`--only {' '.join(chosen.only)} {asked}`).",
        f"{SITES} sites of iid rows, M = {INDUCING}, defaults of `fsgp`; test NLL in nats per row, mean over seeds.",
        f"SVGP is GPyTorch's with all training rows, by Adam: full batch and {STEPS} steps, or, of more than {FULL}",
        f"training rows, batches of {BATCH} at a rate of {RATE} that is halved after {PATIENCE} epochs in which the",
        f"mean bound has not risen by {RISE:g} of itself, until it is below {LOWEST}. Its NLL before, at 80 % of the",
        "steps or at the last halving but one, shows how far it has settled. Gap: NLL at the end less SVGP's.",
        "Exchanges with every site, two before training among them; when first within, and from when on, in the",
        "slowest seed: “within” is .005 nats above SVGP or better, .01 for the generated sets. Larger sets are cut to",
        "so many rows.",
    ]
    lines: list[dict[str, Any]] = []
    for name in chosen.only:
        lines.append(figures(name, chosen.data_dir, chosen.rows, chosen.seeds))
        print(lines[-1], flush=True)
        found = pd.concat([pd.DataFrame(lines), others(page, lines)], ignore_index=True)
        order = found["set"].map(list(SETS).index) + 0.5 * (found["rows"] == "all")
        write_table(page, "Classes, counts and outliers from sums", words, found.iloc[order.argsort(kind="stable")], 4)


def others(page: Path, lines: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows of the page that are of other sets, or of other numbers of rows."""
    again = {(row["set"], row["rows"]) for row in lines}
    cells = [row for row in page.read_text().splitlines() if row.startswith("| ")] if page.exists() else []
    head, *rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in cells] or [list(lines[0])]
    if head != list(lines[0]):  # a page of before
        return pd.DataFrame(columns=list(lines[0]))
    return pd.DataFrame([row for row in rows if row[0] != "---" and (row[0], row[1]) not in again], columns=head)


if __name__ == "__main__":
    main()
