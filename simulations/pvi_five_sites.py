"""Five sites along a line: inducing inputs by federated averaging against a distribution over them.

    python simulations/pvi_five_sites.py [--seeds 0 1 2] [--steps 1 10 100 1000]

The synthetic problem of *Federated learning of sparse Gaussian processes* (Figures 1 and 2, Section 6.1): a site has
the rows of an interval, hyperparameters are fixed at their true values, sites are visited in turn, and a visit takes J
steps of Adam. Held-out rows lie in the intervals and in the gaps between them. Page and figure go to
``simulations/results/``. Complete runs are not repeated, and one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pvi_runs import ensure
from sfvi_runs import RESULTS, RUNS, write_table

NAME = "pvi_five_sites"
SITES, ROWS, HELD_OUT = 5, 30, 30
WIDTH, GAP = 0.64, 0.2
LENGTHSCALE, NOISE_SD = 0.3, 0.15
ROUNDS = 20
STEPS = (1, 10, 100, 1000)
LATENTS: dict[str, dict[str, Any]] = {
    "q(Z)": {"pvi.inducing": "distribution"},
    "averaged Z": {"pvi.inducing": "average", "pvi.samples": 1},  # nothing is random: all draws would be equal
}
TITLE = "Five sites along a line: federated averaging of Z against q(Z)"
LINES = (
    f"Made by `python simulations/pvi_five_sites.py`: {SITES} sites with {ROWS} rows each in adjacent intervals of",
    f"width {WIDTH} with gaps of {GAP}, a draw of a Gaussian process with lengthscale {LENGTHSCALE}, amplitude 1 and",
    f"noise sd {NOISE_SD}, all known; M = 20, M_k = 24, sequential visits in turn, DPO factors, Adam with learning",
    "rate 0.01. A visit takes at most J steps: when the means of two windows of 50 steps differ by less than 0.001",
    "nats per row, it ends after a quarter of J more at a lower rate. NLL of held-out rows in the intervals and in the",
    "gaps, mean and standard error over draws of the data; `exact` is the Gaussian process of all rows.",
)
CAPTION = (
    f"Top: the first draw after {ROUNDS} communications, training rows in the colour of their site, 95 % bands of an",
    "observation, and Z as a staircase with 95 % intervals of q(Z); `exact` is the band of all rows. Bottom: mean and",
    "standard error over draws. Factors start at averages of rows and Z from the pooled distribution of x, so that few",
    "steps are enough here; with many, averaged Z comes apart, because a site fits its factor at its own Z, not at the",
    "average, and Z drifts away from the data.",
)


def draw(seed: int) -> pd.DataFrame:
    """Rows of one draw: site, x, y, and whether held out. A gap is held out by the site on its left."""
    rng = np.random.default_rng(seed)
    start = -0.5 * (SITES * WIDTH + (SITES - 1) * GAP) + np.arange(SITES) * (WIDTH + GAP)
    inside = start[:, None] + WIDTH * rng.random((SITES, ROWS))
    stretch = np.where(np.arange(SITES) < SITES - 1, WIDTH + GAP, WIDTH)[:, None]
    outside = start[:, None] + stretch * rng.random((SITES, HELD_OUT))
    x = np.concatenate([inside, outside], axis=1)
    site = np.repeat(np.arange(SITES), ROWS + HELD_OUT)
    held_out = np.tile(np.arange(ROWS + HELD_OUT) >= ROWS, SITES)
    x = x.ravel()
    f = np.linalg.cholesky(kernel(x, x) + 1e-8 * np.eye(len(x))) @ rng.standard_normal(len(x))
    y = f + NOISE_SD * rng.standard_normal(len(x))
    return pd.DataFrame({"site": [f"site {s}" for s in site], "x": x, "y": y, "held_out": held_out})


def kernel(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """exp(−(x − x')² / 2l²)."""
    return np.exp(-0.5 * ((left[:, None] - right[None]) / LENGTHSCALE) ** 2)


def exact(rows: pd.DataFrame, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd of an observation at ``x`` given all training rows."""
    train = rows[~rows["held_out"]]
    cross = kernel(train["x"].to_numpy(), x)
    gram = kernel(train["x"].to_numpy(), train["x"].to_numpy()) + NOISE_SD**2 * np.eye(len(train))
    weights = np.linalg.solve(gram, cross)
    variance = 1.0 - (cross * weights).sum(0) + NOISE_SD**2
    return weights.T @ train["y"].to_numpy(), np.sqrt(variance)


def gaussian_nll(y: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> float:
    """Mean of −log N(y | mean, sd²)."""
    return float(np.mean(0.5 * np.log(2 * np.pi * sd**2) + 0.5 * ((y - mean) / sd) ** 2))


def table_of(seed: int) -> Path:
    """The draw as a file with its split."""
    folder = (RUNS / NAME / "data").resolve()
    path = folder / f"line-{seed}.csv"
    rows = draw(seed)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        listing = {"n": len(rows), "n_splits": 1, "test": [np.flatnonzero(rows["held_out"]).tolist()]}
        with gzip.open(folder / f"line-{seed}.splits.json.gz", "wt") as out:
            json.dump(listing, out)
        rows.drop(columns="held_out").to_csv(path, index=False)
    return path


def keys(seed: int, steps: int) -> dict[str, Any]:
    """What both ways to learn Z share."""
    return {
        "method": "pvi",
        "dataset": str(table_of(seed)),
        "split": 0,
        "features": "x",
        "target": "y",
        "standardise": False,
        "partitioner": "natural",
        "partition.column": "site",
        "seed": seed,
        "num-server-rounds": ROUNDS,
        "evaluate-every": 1,
        "model.num-inducing": 20,
        "model.lengthscale": LENGTHSCALE,
        "model.noise": NOISE_SD**2,
        "pvi.hyper": "fixed",
        "pvi.local-update": "adam",
        "pvi.steps": steps,
        "pvi.first-steps": steps,
        "pvi.learning-rate": 0.01,
        "pvi.alpha": 0.1,
        "pvi.min-rows-per-pseudo-point": 1,
    }


def collect(seeds: list[int], steps: list[int]) -> dict[tuple[str, int, int], Path]:
    """Folders of runs by way, J and seed; those that are missing are made."""
    return {
        (way, count, seed): ensure(NAME, f"{way[0]}-{count}-{seed}", SITES, keys(seed, count) | LATENTS[way])["folder"]
        for seed in seeds
        for count in steps
        for way in LATENTS
    }


def curves(runs: dict[tuple[str, int, int], Path]) -> pd.DataFrame:
    """Held-out NLL of every run after every communication."""
    parts = []
    for (way, steps, seed), folder in runs.items():
        history = pd.read_csv(folder / "history.csv")
        own = pd.DataFrame({"visits": history["visits"].astype(int), "nll": history["test_nll"]})
        parts.append(own.assign(way=way, steps=steps, seed=seed))
    return pd.concat(parts)


def spread(values: Iterable[float]) -> str:
    """Mean ± standard error."""
    found = np.asarray(list(values))
    return (
        f"{found.mean():.3f} ± {found.std(ddof=1) / np.sqrt(len(found)):.3f}" if len(found) > 1 else f"{found[0]:.3f}"
    )


def table(frame: pd.DataFrame, seeds: list[int]) -> pd.DataFrame:
    """NLL after 5, 10 and 20 communications."""
    rows = []
    for (way, steps), own in frame.groupby(["way", "steps"], sort=False):
        at = {f"after {n}": spread(own[own["visits"] == n]["nll"]) for n in (5, 10, 20)}
        rows.append({"Z": way, "J": str(steps), **at})
    best = []
    for seed in seeds:
        data = draw(seed)
        test = data[data["held_out"]]
        best.append(gaussian_nll(test["y"].to_numpy(), *exact(data, test["x"].to_numpy())))
    return pd.DataFrame([*rows, {"Z": "exact", "J": "", "after 20": spread(best)}])


def picture(runs: dict[tuple[str, int, int], Path], frame: pd.DataFrame, seed: int) -> Figure:
    """Posteriors after the last communication, a row per way to learn Z, and NLL against communications."""
    steps = sorted({own for _, own, _ in runs})
    figure = Figure(figsize=(3.6 * len(steps), 9.0), layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=(2, 1.1), squeeze=False)
    upper, lower = parts[0, 0], parts[1, 0]
    grid = upper.subplots(len(LATENTS), len(steps), sharex=True, sharey=True, squeeze=False)
    for way, row in zip(LATENTS, grid, strict=True):
        for count, axes in zip(steps, row, strict=True):
            posterior(axes, runs[way, count, seed], draw(seed))
            axes.set_title(f"{way}, J = {count}, {ROUNDS} communications", fontsize=9)
        row[0].set_ylabel("y")
    for axes in grid[-1]:
        axes.set_xlabel("x")
    grid[0][0].legend(frameon=False, fontsize=6.5, ncols=2, loc="upper left")
    panels = lower.subplots(1, len(LATENTS), sharey=True)
    for way, axes in zip(LATENTS, panels, strict=True):
        progress(axes, frame[frame["way"] == way], way)
    panels[0].set_ylabel("held-out NLL (nats per row)")
    panels[1].legend(frameon=False, title="steps per visit", fontsize=8)
    return figure


def posterior(axes: Axes, folder: Path, rows: pd.DataFrame) -> None:
    """Mean and 95 % band of an observation, training rows by site, and where Z is, with 95 % intervals."""
    from fedgp_flower.run.artefacts import read_posterior
    from fedgp_flower.run.predict import Predictor

    x = np.linspace(rows["x"].min() - 0.3, rows["x"].max() + 0.3, 300)
    mean, sd = Predictor.of_run(folder)(x[:, None])
    axes.fill_between(x, mean - 1.96 * sd, mean + 1.96 * sd, color="0.85", linewidth=0, label="95 % band")
    axes.plot(x, mean, color="0.2", linewidth=1.2, label="mean")
    known, width = exact(rows, x)
    for side in (-1.96, 1.96):
        axes.plot(
            x, known + side * width, color="0.5", linewidth=0.7, linestyle="--", label="exact" if side > 0 else None
        )
    for index, (_, own) in enumerate(rows[~rows["held_out"]].groupby("site")):
        axes.plot(own["x"], own["y"], ".", color=f"C{index}", markersize=4)
    arrays = read_posterior(folder).arrays
    Z = np.asarray(arrays["inducing.locations.mean"])[:, 0]
    reach = 1.96 * np.asarray(arrays.get("inducing.locations.scale", np.zeros((len(Z), 1))))[:, 0]
    steps = -3.9 + 0.06 * np.argsort(np.argsort(Z))  # a staircase, or intervals would hide one another
    axes.errorbar(Z, steps, xerr=reach, fmt="^", color="black", markersize=3, linewidth=0.6, label="Z, 95 %")
    away = int(((x[0] > Z) | (x[-1] < Z)).sum())
    axes.text(0.98, 0.04, f"{away} of {len(Z)} Z beyond the axis", transform=axes.transAxes, ha="right", fontsize=7)
    axes.set(xlim=(x[0], x[-1]), ylim=(-4.8, 4.5))


def progress(axes: Axes, frame: pd.DataFrame, way: str) -> None:
    """Mean over draws with standard errors, a line per J."""
    for index, (steps, own) in enumerate(frame.groupby("steps")):
        by = own.groupby("visits")["nll"]
        error: Any = by.std() / np.sqrt(by.count())
        axes.errorbar(
            by.mean().index, by.mean(), error, marker="o", markersize=3, color=f"C{index}", label=f"J = {steps}"
        )
    axes.set(xlabel="communications", title=way)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def main() -> None:
    """Run what is missing, then write page and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", nargs="*", type=int, default=list(STEPS))
    chosen = parser.parse_args()
    runs = collect(chosen.seeds, chosen.steps)
    frame = curves(runs)
    lines = [*LINES, "", f"![posteriors and NLL]({NAME}.png)", "", *CAPTION]
    write_table(RESULTS / f"{NAME}.md", TITLE, lines, table(frame, chosen.seeds))
    picture(runs, frame, chosen.seeds[0]).savefig(RESULTS / f"{NAME}.png", dpi=110)


if __name__ == "__main__":
    main()
