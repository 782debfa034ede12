"""Weather by country: SFVI, SFVI-Avg, the one after the other, and what they are compared with; five folds by country.

    python simulations/sfvi_weather.py --data-dir DIR [--folds 0 1 2 3 4] [--only "SFVI" …]

Least temperature from longitude, latitude and height at the 34 countries with ten stations or more. Beside the two
methods: the trend g alone (sites have their own noise and no deviation; L_G is full), what every country can do by
itself, and the same hierarchical model fitted by L-BFGS to all rows at once. Scores are those of the standardised
target, over all folds; a country wins where its held-out rows of all folds have a smaller sum than by itself. Tables,
the bound against communications and a map go to ``simulations/results/``. Complete runs are not repeated.
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
from sfvi_weather_model import map_figure, pooled_sums

NAME = "sfvi_weather"
LEAST_STATIONS = 10
MANY_STATIONS = 30
TITLE = "Weather by country: structured federated variational inference"
LINES = (
    "Made by `python simulations/sfvi_weather.py`. Standardised target, five folds; wins: countries whose sum over",
    "folds is below that of local-only, a Gaussian process of the country's own rows with weak priors on its",
    f"hyperparameters. Small countries have fewer than {MANY_STATIONS} stations.",
)
FIGURE_NOTE = (
    "Dashed: rounds of SFVI-Avg, for which nobody knows the bound. Shown is the mean over sites and local steps of",
    "what each site by itself takes for the bound of all rows; it is the bound of no posterior and may lie above it.",
)
SCRATCH, WARM, SHORT = "SFVI", "5 rounds of SFVI-Avg, then SFVI", "SFVI, 80 rounds"
POOLED, ALONE, TREND = "pooled, L-BFGS", "local-only", "SFVI, g only, full L_G"
RESAMPLES = 10_000
VARIANTS: dict[str, dict[str, Any]] = {
    "SFVI-Avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 20},
    WARM: {
        "method": "sfvi",
        "sfvi.objective": "stochastic",
        "num-server-rounds": 80,
        "sfvi.warm-start-rounds": 5,
        "sfvi.local-steps": 50,
        "sfvi.constant-share": 0.8,
    },
    SHORT: {"method": "sfvi", "sfvi.objective": "stochastic", "num-server-rounds": 80, "sfvi.constant-share": 0.8},
    SCRATCH: {"method": "sfvi", "sfvi.objective": "stochastic", "num-server-rounds": 300, "baselines.local-only": True},
    TREND: {
        "method": "sfvi",
        "sfvi.objective": "stochastic",
        "num-server-rounds": 200,
        "sfvi.site-inducing": 0,
        "sfvi.structure": "full",
    },
}
ARMS = (*VARIANTS, POOLED)


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
    if not (folder / "stations.splits.json.gz").exists():
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
        "evaluate-every": 50,
    }


def folder_of(variant: str, fold: int) -> str:
    """Name of a run's folder."""
    return "".join(c if c.isalnum() else "-" for c in f"{variant}-{fold}")


def sums(rows: list[dict[str, Any]], labels: dict[str, str], shift: float, scale: float) -> pd.DataFrame:
    """Rows, NLL and squared error (standardised) by country, as sums over the held-out rows of a fold."""
    frame = pd.DataFrame(rows)
    count = frame["num_examples"].astype(float)
    country = [labels[site] for site in frame["site"]]
    squares = (frame["rmse"] / scale) ** 2 * count
    return pd.DataFrame({"rows": count, "nll": (frame["nll"] - shift) * count, "squares": squares}).set_axis(country)


Found = dict[str, dict[int, pd.DataFrame]]


def collect(path: Path, folds: list[int], names: list[str], sites: int) -> Found:
    """Sums by method and fold; runs that are missing are made, if they were asked for."""
    found: Found = {}
    for variant, fold in ((v, f) for v in VARIANTS for f in folds):
        there = (RUNS / NAME / folder_of(variant, fold) / "metrics.json").exists()
        if (variant not in names and not there) or (variant in (WARM, SHORT) and fold != 0):
            continue
        run = ensure(NAME, folder_of(variant, fold), sites, keys(path, fold) | VARIANTS[variant])
        shift = run["test"]["nll"] - run["test_standardised"]["nll"]
        scale = run["test"]["rmse"] / run["test_standardised"]["rmse"]
        labels = {row["site"]: row["label"] for row in run["per_site"]}
        arms = {variant: run["per_site"]} | ({ALONE: run["local_only"]["per_site"]} if run["local_only"] else {})
        for arm, rows in arms.items():
            found.setdefault(arm, {})[fold] = sums(rows, labels, shift, scale)
    for fold in folds:
        model = RUNS / NAME / folder_of(SCRATCH, fold)
        if (model / "metrics.json").exists() and (POOLED in names or pooled_file(fold).exists()):
            found.setdefault(POOLED, {})[fold] = pooled(model, fold, sites)
    return found


def pooled_file(fold: int) -> Path:
    """Where the sums of the pooled model are kept."""
    return RUNS / NAME / f"pooled-{fold}.csv"


def pooled(model: Path, fold: int, sites: int) -> pd.DataFrame:
    """Sums of the hierarchical model that sees all rows; made if they are missing."""
    if not pooled_file(fold).exists():
        pooled_sums(model, sites).to_csv(pooled_file(fold))
    return pd.read_csv(pooled_file(fold), index_col=0)


def summary(found: Found, stations: dict[str, int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per method, and a row per country."""
    total = {arm: sum(folds.values()) for arm, folds in found.items() if folds}
    rows, countries = [], pd.DataFrame()
    for arm, own in total.items():
        n = own["rows"].sum()
        row = {"method": arm, "folds": len(found[arm]), "NLL": own["nll"].sum() / n}
        row["RMSE"] = math.sqrt(own["squares"].sum() / n)
        if arm != ALONE and ALONE in total and set(found[ALONE]) == set(found[arm]):
            base = total[ALONE].loc[own.index]
            small = np.array([stations[country] < MANY_STATIONS for country in own.index])
            for score, column in (("NLL", "nll"), ("RMSE", "squares")):
                won = (own[column] < base[column]).to_numpy()
                row[f"wins, {score}"] = f"{won.sum()} of {len(won)}"
                row[f"small, {score}"] = f"{won[small].sum()} of {small.sum()}"
        rows.append(row)
        if len(found[arm]) == max(len(folds) for folds in found.values()):
            countries[f"NLL, {arm}"] = own["nll"] / own["rows"]
            countries[f"RMSE, {arm}"] = np.sqrt(own["squares"] / own["rows"])
    countries.insert(0, "stations", countries.index.map(stations))
    countries.insert(0, "country", countries.index)
    return pd.DataFrame(rows), countries.sort_values("stations", ascending=False)


def differences(found: Found) -> list[str]:
    """How far each method is below local-only in NLL per row, with the bootstrap of countries."""
    total = {arm: sum(folds.values()) for arm, folds in found.items() if set(folds) == set(found.get(ALONE, {}))}
    lines, base = [], total.pop(ALONE, None)
    for arm, own in total.items() if base is not None else ():
        gap, rows = (own["nll"] - base.loc[own.index, "nll"]).to_numpy(), own["rows"].to_numpy()
        chosen = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
        low, high = np.quantile(gap[chosen].sum(axis=1) / rows[chosen].sum(axis=1), [0.025, 0.975])
        clear = "a clear difference" if low > 0 or high < 0 else "no clear difference"
        text = f"- {arm}: {gap.sum() / rows.sum():+.3f} ({low:+.3f} to {high:+.3f}), {clear}"
        worst = int(np.argmax(gap))
        lines.append(f"{text}; it loses most, {gap[worst]:.0f} nats, in {own.index[worst]}.")
    head = f"NLL per row less that of local-only, with 95 % intervals from {RESAMPLES} bootstraps of countries:"
    return [head, "", *lines] if lines else []


def history_of(variant: str) -> pd.DataFrame:
    """Bound by round of fold 0, with communications and megabytes so far."""
    history = pd.read_csv(RUNS / NAME / folder_of(variant, 0) / "history.csv")
    history["MB"] = (history["bytes_up"] + history["bytes_down"]).cumsum() / 1e6
    return history


def bound_figure(names: list[str]) -> Figure:
    """Bound per row against communications and against bytes, fold 0."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = ("visits to sites", "bytes up and down (MB)")
    for ax, column, label in zip(axes, ("communications", "MB"), labels, strict=True):
        for index, variant in enumerate(names):
            history, colour = history_of(variant), f"C{index}"
            bounded = history["objective"].notna().any()
            ax.plot(history[column], history["objective"], label=variant if bounded else None, lw=1.4, color=colour)
            if "site_estimate" in history:
                name = None if bounded else f"{variant}, sites' own estimate"
                ax.plot(history[column], history["site_estimate"], label=name, lw=1.2, ls="--", color=colour)
        ax.set(xlabel=label, ylabel="ELBO per row (nats)", xscale="log", ylim=(-1.1, -0.7))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def warm_lines() -> list[str]:
    """When SFVI by itself has what SFVI after rounds of SFVI-Avg ends with, from the histories of fold 0."""
    warm, alone = history_of(WARM), history_of(SCRATCH)
    end = warm.iloc[-1]
    reached = alone[alone["objective"] >= end["objective"]]
    text = f"Fold 0: {int(end['round'])} rounds, of which 5 of SFVI-Avg, end with {end['objective']:.4f} nats per row"
    text += f" after {int(end['communications'])} visits and {end['MB']:.2f} MB;"
    if reached.empty:
        last = alone.iloc[-1]
        return [f"{text} SFVI by itself has {last['objective']:.4f} after {int(last['round'])} rounds."]
    first = reached.iloc[0]
    where = f"round {int(first['round'])}, {int(first['communications'])} visits and {first['MB']:.2f} MB"
    return [f"{text} SFVI by itself has that at {where}."]


def main() -> None:
    """Run what is missing, then write tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--folds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="*", choices=list(ARMS), default=list(ARMS))
    chosen = parser.parse_args()
    path, stations = table_of(chosen.data_dir)
    found = collect(path, chosen.folds, chosen.only, len(stations))
    overall, countries = summary(found, stations)
    lines = [*LINES, "", *differences(found)]
    there = [v for v in VARIANTS if (RUNS / NAME / folder_of(v, 0) / "metrics.json").exists()]
    if {SCRATCH, WARM} <= set(there) and 0 in chosen.folds:
        bound_figure([name for name in there if name != TREND]).savefig(RESULTS / f"{NAME}.png", dpi=150)
        map_figure(RUNS / NAME / folder_of(SCRATCH, 0), len(stations)).savefig(RESULTS / f"{NAME}_map.png", dpi=150)
        lines += ["", *warm_lines(), "", f"![bound]({NAME}.png)", "", *FIGURE_NOTE, "", f"![map]({NAME}_map.png)"]
    write_table(RESULTS / f"{NAME}.md", TITLE, lines, overall)
    write_table(RESULTS / f"{NAME}_countries.md", "Weather: countries", LINES, countries)


if __name__ == "__main__":
    main()
