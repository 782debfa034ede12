"""Sections that SFVI and SFVI-Avg add to a report: what a new site would see, and how far apart the sites were."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedgp_flower.figures import BAND, DPI, FEDERATED, Z95, Predictor
from fedgp_flower.records import RunData
from fedgp_flower.report import Panel
from fedgp_flower.shapes import Array

MOST_INPUTS = 6
MOST_SITES = 60
MOST_NAMES = 8


def panels(run: RunData, predictor: Predictor | None) -> list[Panel]:
    """Sections for a run whose posterior is of the family ``structured``; none for other runs."""
    if run.posterior is None or run.posterior.model.get("family") != "structured":
        return []
    found: list[Panel] = []
    inputs = [str(column["name"]) for column in run.posterior.schema["features"] if column["kind"] == "numeric"]
    plain = len(inputs) == len(run.posterior.schema["features"]) and len(inputs) <= MOST_INPUTS
    if predictor is not None and plain and run.posterior.likelihood == "gaussian":
        caption = (
            "Along one input, the others at their mean: the shared trend with the 95 % interval of an observation at a "
            "site that nobody has seen, whose deviation has its prior. Sites that took part add their own deviation, "
            "which stays with them."
        )
        mean, scale = (np.asarray(run.posterior.arrays[f"input.{name}"], dtype=float) for name in ("mean", "scale"))
        target = str(run.posterior.schema["target"]["name"])
        found.append(Panel("A new site", trend(predictor, mean, scale, inputs, target), caption))
        columns = [f"input.{name}" for name in inputs]
        if run.predictions is not None and set(columns) <= set(run.predictions):
            caption = (
                "What a simulated site predicts at its held-out rows less what a new site would: the posterior mean of "
                "its deviation from the trend. A real site shows it to nobody."
            )
            shift = run.predictions["mean"] - predictor(run.predictions[columns].to_numpy(dtype=float))[0]
            frame = run.predictions.assign(deviation=shift)
            found.append(Panel("Deviations", deviations(frame, columns, target), caption))
    apart: Mapping[str, float] = run.metrics.method_details.get("spread", {})
    if apart and "spread" in run.history:
        labels = {str(row["site"]): str(row.get("label") or row["site"]) for row in run.metrics.per_site}
        caption = (
            "Wasserstein distance from a site's q(Z_G), after its own steps, to the barycentre of all: the mean over "
            "sites by round, and the sites of the latest average."
        )
        found.append(
            Panel(
                "How far apart the sites were",
                spread(run.history, {labels.get(s, s): d for s, d in apart.items()}),
                caption,
            )
        )
    return found


def trend(predictor: Predictor, mean: Array, scale: Array, inputs: list[str], target: str) -> Figure:
    """Prediction for a new site along each input."""
    figure = Figure(figsize=(min(2.9 * len(inputs), 8.6), 2.6 * -(-len(inputs) // 3)), dpi=DPI, layout="constrained")
    columns = min(3, len(inputs))
    axes = figure.subplots(-(-len(inputs) // columns), columns, squeeze=False).ravel()
    steps = np.linspace(-2.5, 2.5, 120)
    for index, (ax, name) in enumerate(zip(axes, inputs, strict=False)):
        x = np.tile(mean, (len(steps), 1))
        x[:, index] += steps * scale[index]
        centre, sd = predictor(x)
        ax.fill_between(x[:, index], centre - Z95 * sd, centre + Z95 * sd, color=BAND, alpha=0.7, lw=0)
        ax.plot(x[:, index], centre, color=FEDERATED, lw=1.6)
        ax.set_xlabel(name, fontsize=8)
        ax.tick_params(labelsize=7)
    axes[0].set_ylabel(target, fontsize=8)
    for ax in axes[len(inputs) :]:
        ax.set_visible(False)
    return figure


def deviations(rows: pd.DataFrame, columns: list[str], target: str) -> Figure:
    """Deviation of every held-out row along each input, joined by site."""
    figure = Figure(figsize=(8.6, 3.0), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    sites = rows.groupby("site", sort=False)
    for ax, column in zip(axes, columns, strict=True):
        for site, own in sites:
            shown = own.sort_values(column)
            style = "o-" if len(columns) == 1 else "o"
            label = f"site {site}" if sites.ngroups <= MOST_NAMES else None
            ax.plot(shown[column], shown["deviation"], style, ms=2.5, lw=1.0, alpha=0.8, label=label)
        ax.axhline(0, color="black", lw=0.7)
        ax.set_xlabel(column.removeprefix("input."), fontsize=8)
        ax.tick_params(labelsize=7)
    axes[0].set_ylabel(f"deviation of {target}", fontsize=8)
    if sites.ngroups <= MOST_NAMES:
        axes[-1].legend(frameon=False, fontsize=7)
    return figure


def spread(history: pd.DataFrame, apart: Mapping[str, float]) -> Figure:
    """Mean distance by round, and a bar per site."""
    figure = Figure(figsize=(8.6, 3.0), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = history[["round", "spread"]].dropna()
    left.plot(rows["round"], rows["spread"], "o-", color=FEDERATED, ms=3, lw=1.4)
    left.set(xlabel="round", ylabel="mean distance")
    shown = sorted(apart.items(), key=lambda item: -item[1])[:MOST_SITES]
    right.bar(range(len(shown)), [distance for _, distance in shown], color=FEDERATED)
    right.set_xticks(range(len(shown)), [name for name, _ in shown], rotation=90, fontsize=6)
    right.set_ylabel("distance")
    return figure
