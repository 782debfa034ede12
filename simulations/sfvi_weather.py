"""Weather by country: SFVI, SFVI-Avg and the one after the other, five folds within each country.

    python simulations/sfvi_weather.py --data-dir DIR [--folds 0 1 2 3 4] [--only "SFVI" …]

Least temperature from longitude, latitude and height at the 34 countries with ten stations or more, beside what every
country can do alone. Scores are those of the standardised target, over all folds; a country wins where its held-out
rows of all folds have a smaller sum. Tables and a figure of the bound against communications go to
``simulations/results/``. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sfvi_runs import RESULTS, RUNS, ensure, write_table

NAME = "sfvi_weather"
LEAST_STATIONS = 10
TITLE = "Weather by country: structured federated variational inference"
LINES = (
    "Made by `python simulations/sfvi_weather.py`. Standardised target; wins: countries of 34 where a method's sum",
    "over folds is below that of a Gaussian process of the country's own rows.",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "SFVI-Avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 20},
    "5 rounds of SFVI-Avg, then SFVI": {
        "method": "sfvi",
        "num-server-rounds": 80,
        "sfvi.warm-start-rounds": 5,
        "sfvi.local-steps": 20,
    },
    "SFVI": {"method": "sfvi", "num-server-rounds": 300, "baselines.local-only": True},
}


def table_of(data_dir: Path) -> tuple[Path, dict[str, int]]:
    """Countries with enough stations; split k holds out every fifth station of each. Also stations by country."""
    frame = pd.read_csv(data_dir / "weather.csv.gz")
    count = frame["country"].value_counts()
    frame = frame[frame["country"].isin(count[count >= LEAST_STATIONS].index)].reset_index(drop=True)
    rng, fold = np.random.default_rng(0), np.empty(len(frame), dtype=int)
    for country in sorted(frame["country"].unique()):
        own = rng.permutation(np.flatnonzero(frame["country"] == country))
        fold[own] = np.arange(len(own)) % 5
    folder = RUNS / NAME / "data"
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "stations.csv", index=False)
    listing = {"n": len(frame), "n_splits": 5, "test": [np.flatnonzero(fold == k).tolist() for k in range(5)]}
    with gzip.open(folder / "stations.splits.json.gz", "wt") as out:
        json.dump(listing, out)
    return folder / "stations.csv", {str(name): int(n) for name, n in frame["country"].value_counts().items()}


def keys(path: Path, fold: int) -> dict[str, Any]:
    """What all variants share."""
    return {
        "dataset": str(path),
        "split": fold,
        "features": "lon,lat,elev",
        "target": "tmin",
        "partitioner": "natural",
        "partition.column": "country",
        "partition.min-rows": 8,
        "model.kernel": "matern52",
        "model.num-inducing": 60,
        "model.noise": 0.3,
        "model.jitter": 1e-6,
        "evaluate-every": 50,
    }


def sums(rows: list[dict[str, Any]], labels: dict[str, str], shift: float) -> pd.DataFrame:
    """Rows, NLL (standardised) and squared error by country, as sums over the held-out rows of a fold."""
    frame = pd.DataFrame(rows)
    count = frame["num_examples"].astype(float)
    country = [labels[site] for site in frame["site"]]
    nll = (frame["nll"] - shift) * count
    return pd.DataFrame({"rows": count, "nll": nll, "squares": frame["rmse"] ** 2 * count}).set_axis(country)


def collect(path: Path, folds: list[int], names: list[str], sites: int) -> dict[str, dict[int, pd.DataFrame]]:
    """Sums by method and fold; runs that are missing are made."""
    found: dict[str, dict[int, pd.DataFrame]] = {"alone": {}}
    for variant in names:
        for fold in folds:
            name = "".join(c if c.isalnum() else "-" for c in f"{variant}-{fold}")
            run = ensure(NAME, name, sites, keys(path, fold) | VARIANTS[variant])
            shift = run["test"]["nll"] - run["test_standardised"]["nll"]
            scale = run["test"]["rmse"] / run["test_standardised"]["rmse"]
            labels = {row["site"]: row["label"] for row in run["per_site"]}
            arms = {variant: run["per_site"]} | ({"alone": run["local_only"]["per_site"]} if run["local_only"] else {})
            for arm, rows in arms.items():
                own = sums(rows, labels, shift)
                own["squares"] /= scale**2
                found.setdefault(arm, {})[fold] = own
    return found


def summary(found: dict[str, dict[int, pd.DataFrame]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per method, and a row per country."""
    total = {arm: sum(folds.values()) for arm, folds in found.items() if folds}
    rows, countries = [], pd.DataFrame()
    for arm, own in total.items():
        n = own["rows"].sum()
        row = {"method": arm, "folds": len(found[arm]), "NLL": own["nll"].sum() / n}
        row["RMSE"] = math.sqrt(own["squares"].sum() / n)
        if "alone" in total and len(found["alone"]) == len(found[arm]):
            base = total["alone"].loc[own.index]
            row["wins, NLL"] = str(int((own["nll"] < base["nll"]).sum()))
            row["wins, RMSE"] = str(int((own["squares"] < base["squares"]).sum()))
        rows.append(row)
        countries[f"NLL, {arm}"] = own["nll"] / own["rows"]
    countries.insert(0, "country", countries.index)
    return pd.DataFrame(rows), countries


def bound_figure(names: list[str], fold: int) -> Figure:
    """Bound per row against communications and against bytes."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    for ax, column, label in zip(figure.subplots(1, 2), ("communications", "bytes"), ("visits", "MB"), strict=True):
        for variant in names:
            name = "".join(c if c.isalnum() else "-" for c in f"{variant}-{fold}")
            history = pd.read_csv(RUNS / NAME / name / "history.csv")
            history["bytes"] = (history["bytes_up"] + history["bytes_down"]).cumsum() / 1e6
            ax.plot(history[column], history["objective"], label=variant, lw=1.4)
        ax.set(xlabel=label, ylabel="ELBO per row (nats)", xscale="log", ylim=(-1.3, -0.6))
    ax.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Run what is missing, then write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--folds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    chosen = parser.parse_args()
    path, stations = table_of(chosen.data_dir)
    overall, countries = summary(collect(path, chosen.folds, chosen.only, len(stations)))
    countries["stations"] = countries["country"].map(stations)
    write_table(RESULTS / f"{NAME}.md", TITLE, [*LINES, "", f"![bound]({NAME}.png)"], overall)
    write_table(RESULTS / f"{NAME}_countries.md", "Weather: countries", LINES, countries)
    bound_figure(chosen.only, chosen.folds[0]).savefig(RESULTS / f"{NAME}.png", dpi=150)


if __name__ == "__main__":
    main()
