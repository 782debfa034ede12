"""Classes, counts and outliers from sums, against GPyTorch's SVGP of all rows.

Ten sites of rows dealt at random, M = 100, other keys at their defaults; test NLL in nats per row. SVGP has the same M
and all training rows, starts at rows drawn at random and takes Adam: full batches with a cosine schedule, or, of more
than 10 000 rows, batches of 1000 at a rate that is halved after 3 epochs in which the mean bound has not risen by
1e-4 of itself, until it is below .001. *Before* is its NLL at 80 % of the steps or at the last halving but one, and
shows how far it has settled. *Within from* is the exchange from which on the NLL stays within .005 nats of SVGP's or
better (.01 for the generated sets). Larger sets are cut to so many rows (0: all). Student-t noise has more than 2
degrees of freedom in SVGP and at least 2.5 here; fewer than 2 describe `outliers` best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import gpytorch
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from simulations.common import Row, averaged, data_dir, fit, history, kept_table, remembered, sites_of

INDUCING, RATE, STEPS, FULL, BATCH = 100, 0.03, 1500, 10_000, 1000
SETS = ("breast-cancer", "credit", "bank", "adult", "counts", "outliers")
LIKELIHOODS = {"counts": "poisson", "outliers": "student-t"}
BEFORE = 2
"""Exchanges before training."""


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


def table(name: str, rows: int) -> str:
    """What ``dataset`` names."""
    if name == "breast-cancer":
        return name

    def make() -> pd.DataFrame:
        if name in LIKELIHOODS:
            return generated(name, rows or 2000)
        frame = (
            pd.read_csv(data_dir() / f"{name}.csv.gz", na_values="?").drop(columns="split", errors="ignore").dropna()
        )
        return frame.iloc[np.sort(np.random.default_rng(0).permutation(len(frame))[: rows or len(frame)])]

    return kept_table(f"classes-{name}-{rows}", make)


class SVGP(gpytorch.models.ApproximateGP):
    """Constant mean, squared exponential, free inducing points."""

    def __init__(self, points: Tensor) -> None:
        q = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
        self.mean_module, inputs = gpytorch.means.ConstantMean(), points.shape[-1]
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=inputs))
        self.covar_module.base_kernel.lengthscale = inputs**0.5

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def batches(x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Rows in batches of about the same size."""
    parts = math.ceil(len(x) / BATCH)
    return zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)


def reference(keys: Row) -> Row:
    """SVGP with all rows: NLL in original units at its end, and a good while before."""
    from fedgp_flower.gp.likelihoods import build_point_likelihood

    sites, scale = sites_of(keys, 10)
    parts = ([getattr(own, name) for own in sites.values()] for name in ("x", "y", "x_test", "y_test"))
    x, y, x_test, y_test = (torch.from_numpy(np.concatenate(part)) for part in parts)
    torch.manual_seed(0)
    model = SVGP(x[torch.randperm(len(x))[:INDUCING]]).double()
    point = build_point_likelihood(keys["model.likelihood"])
    likelihood = point.to_gpytorch(point.initial)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=RATE)

    def nll() -> float:
        model.eval()
        with torch.no_grad():
            density = torch.cat([likelihood.log_marginal(t, model(r)) for r, t in batches(x_test, y_test)]).mean()
        model.train()
        return math.log(scale) - float(density)

    def step(rows: Tensor, targets: Tensor) -> float:
        optimiser.zero_grad()
        loss = -bound(model(rows), targets)
        loss.backward()
        optimiser.step()
        return -float(loss.detach())

    before = [math.nan, math.nan]
    if len(x) <= FULL:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
        for number in range(STEPS):
            before[0] = nll() if number == STEPS * 4 // 5 else before[0]
            step(x, y)
            schedule.step()
    else:
        falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, "max", 0.5, patience=2, threshold=1e-4)
        while (rate := optimiser.param_groups[0]["lr"]) >= 0.001:
            order = torch.randperm(len(x))
            falling.step(float(np.mean([step(*own) for own in batches(x[order], y[order])])))
            before += [nll()] if optimiser.param_groups[0]["lr"] < rate else []
    return {"SVGP": nll(), "before": before[-2], "rows": len(x), "held out": len(x_test)}


def study(sets: tuple[str, ...] = SETS, rows: int = 2000, seeds: tuple[int, ...] = (0,)) -> Iterator[Row]:
    """A row for each set."""
    for name in sets:
        found = []
        for seed in seeds:
            keys: dict[str, Any] = {
                "dataset": table(name, rows),
                "model.likelihood": LIKELIHOODS.get(name, "bernoulli"),
            }
            keys |= {"model.num-inducing": INDUCING, "seed": seed}
            svgp = remembered("classes", [name, rows, seed], lambda k=keys: reference(k))
            run = fit({"method": "svgp", "evaluate-every": 1, **keys})
            nll = history(run)["test_nll"].to_numpy()
            beyond = np.flatnonzero(nll > svgp["SVGP"] + (0.01 if name in LIKELIHOODS else 0.005))
            within = BEFORE + (int(beyond[-1]) + 2 if len(beyond) else 1)
            row = {"set": name, **svgp, "NLL": float(nll[-1]), "gap": float(nll[-1]) - svgp["SVGP"]}
            row["within from"] = math.inf if len(beyond) and beyond[-1] == len(nll) - 1 else within
            found.append(row | {"exchanges": run["method_details"].get("exchanges", run["exchanges"])})
        yield from averaged(found, ("set",), worst=("gap", "within from"))
