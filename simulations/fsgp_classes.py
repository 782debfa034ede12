"""FSGP for classes, counts and outliers against GPyTorch's SVGP that sees all rows: how many exchanges until equal.

    python simulations/fsgp_classes.py --data-dir DIR [--rows 2000] [--only bank adult]

Ten sites with defaults and M = 100; SVGP with the same M, full batch, started at the same hyperparameters and at rows
drawn at random, by Adam with a cosine schedule. Both are fitted to the same training rows and judged on the same
held-out ones. A set with more rows is cut to ``--rows`` drawn at random, and rows with gaps are left out. What is there
already is not made again: remove ``results/fsgp_classes`` first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import pandas as pd
import torch
from sfvi_runs import QUIET, RESULTS, RUNS, write_table

from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.latent import AMPLITUDE, REACH
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import parse_config
from strategies.server.standardisation import SiteDescription, agree

SITES, INDUCING, EXCHANGES, STEPS = 10, 100, 60, 1500
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
        frame = generated(name, rows)
    else:
        frame = pd.read_csv(data / f"{name}.csv.gz", na_values="?").drop(columns="split", errors="ignore").dropna()
        chosen = np.random.default_rng(0).permutation(len(frame))[:rows]
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
    """SVGP with all rows: test NLL per row in original units, after all steps and after 80 % of them."""
    x, y, x_test, y_test, scale = pooled_rows(flat)
    torch.manual_seed(0)
    model = SVGP(x[torch.randperm(len(x))[:INDUCING]]).double()
    point = build_point_likelihood(likelihood)
    observed = point.to_gpytorch(point.initial)
    bound = gpytorch.mlls.VariationalELBO(observed, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *observed.parameters()], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)

    def nll() -> float:
        model.eval()
        with torch.no_grad():
            density = observed.log_marginal(y_test, model(x_test)).mean()
        model.train()
        return float(scale.log() - density)

    started, before = time.perf_counter(), math.nan
    for step in range(STEPS):
        if step == STEPS * 4 // 5:
            before = nll()
        optimiser.zero_grad()
        loss = -bound(model(x), y)
        loss.backward()
        optimiser.step()
        schedule.step()
    return {"nll": nll(), "before": before, "bound": -float(loss.detach()), "seconds": time.perf_counter() - started}


def figures(name: str, data: Path, rows: int) -> dict[str, Any]:
    """One line of the table."""
    likelihood, dataset = LIKELIHOODS.get(name, "bernoulli"), table(name, data, rows)
    flat = {**QUIET, "dataset": dataset, "model.likelihood": likelihood, "model.num-inducing": INDUCING}
    flat |= {"num-server-rounds": EXCHANGES, "evaluate-every": 1, "output-dir": str(FOLDER), "name": f"{name}-{rows}"}
    cached = FOLDER / f"{name}-{rows}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not cached.exists():
        cached.write_text(json.dumps(reference(flat, likelihood)))
    svgp = json.loads(cached.read_text())
    folder = FOLDER / str(flat["name"])
    if not (folder / "metrics.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run_in_process(flat, SITES)
    history = pd.read_csv(folder / "history.csv")
    gaps = history["test_nll"].to_numpy() - svgp["nll"]
    reached = np.flatnonzero(gaps <= SETS[name])
    beyond = np.flatnonzero(gaps > SETS[name])
    stays = int(beyond[-1]) + 2 if len(beyond) else 1
    x, _, x_test, _, _ = pooled_rows(flat)
    return {
        "set": name,
        "training rows": len(x),
        "held out": len(x_test),
        "inputs": x.shape[1],
        "SVGP": svgp["nll"],
        "SVGP at 80 %": svgp["before"],
        "first within": int(reached[0]) + 1 if len(reached) else "never",
        "from then on within": stays if stays <= len(gaps) else "never",
        "NLL after 20": float(history["test_nll"].iloc[min(19, len(gaps) - 1)]),
        "at the end": float(history["test_nll"].iloc[-1]),
        "exchanges": len(gaps),
        "KB up a site": round(float(history["bytes_up"].iloc[1:3].mean()) / SITES / 1e3),
    }


def main() -> None:
    """Fit both to every set, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--only", nargs="*", default=list(SETS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name in chosen.only:
        lines.append(figures(name, chosen.data_dir, chosen.rows))
        print(lines[-1], flush=True)
    words = [
        f"Made by `python simulations/fsgp_classes.py --data-dir DIR --rows {chosen.rows}`: {SITES} sites of iid rows,",
        f"M = {INDUCING}, defaults of `fsgp`; test NLL in nats per row.",
        f"SVGP is GPyTorch's with all training rows, full batch, {STEPS} steps of Adam; its NLL at 80 % of them shows",
        "how far it has settled. Exchanges are rounds of training; two before them agree on columns and first points.",
        "“Within” is .005 nats above SVGP or better, .01 for the generated sets. Larger sets are cut to so many rows.",
    ]
    write_table(RESULTS / "fsgp_classes.md", "Classes, counts and outliers from sums", words, pd.DataFrame(lines), 4)


if __name__ == "__main__":
    main()
