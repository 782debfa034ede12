"""Sections of a report by SFVI and by hierarchical-gp: a new site, deviations, the bound, distances between sites.

Trend and deviation are shown on the scale where they add up: that of the target, of a probit or logit, of a log rate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedgp_flower.data.standardisation import Column
from fedgp_flower.methods.sfvi.options import MODELS, SFVIOptions
from fedgp_flower.methods.sfvi.posterior import saved_model
from fedgp_flower.methods.sfvi.rows import ModelRow
from fedgp_flower.run.artefacts import Posterior, RunData
from fedgp_flower.run.dependence import ranges_of
from fedgp_flower.run.figures import BAND, DPI, FEDERATED, LOCAL, Z95, Predictor, confusion
from fedgp_flower.run.predict import Predictor as SavedPredictor
from fedgp_flower.run.predict import why_no_posterior
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import show
from fedgp_flower.typing import Array

MOST_INPUTS = 6
MOST_SITES = 60
MOST_NAMES = 8
REACH = 2.5
"""How far along an input, in its standard deviations, where no histogram told between which values rows lie."""


def panels(run: RunData) -> list[Panel]:
    """Prediction for a new site, deviations, the bound of SFVI-Avg, and distances between sites."""
    if run.posterior is None:
        return []
    predictor = trend_predictor(run)
    sections = tables(run.posterior)
    sections += [] if predictor is None else _trend_panels(run.posterior, predictor, ranges_of(run))
    rows = run.predictions
    if rows is not None and "deviation" in rows:
        columns = [str(name) for name in rows.columns if str(name).startswith("input.")] or ["trend"]
        caption = (
            "The prediction of a simulated site at its held-out rows less the shared trend: the posterior mean of its "
            "deviation. A real site shows it to nobody."
        )
        sections.append(Panel("Deviations", deviations(rows, columns, scale_of(run.posterior)), caption))
    if counts := run.metrics.method_details.get("confusion"):
        caption = "Held-out rows of all sites, without the cells of a site that are too small to leave it."
        sections.append(Panel("Confusion of classes", confusion(np.array(counts)), caption))
    if "site_estimate" in run.history:
        caption = (
            "Dashed: rounds of SFVI-Avg, in which the bound is not known. The line is the mean over sites and local "
            "steps of each site's estimate of the bound of all rows; it is the bound of no posterior."
        )
        sections.append(Panel("Bound of all rows", bound(run.history), caption))
    apart: Mapping[str, float] = run.metrics.method_details.get("spread", {})
    if apart and "spread" in run.history:
        caption = (
            "Wasserstein distance from a site's q(Z_G), after its local steps, to the barycentre of all: the mean over "
            "sites by round, and the sites of the latest average."
        )
        named = {run.metrics.labels.get(site, site): distance for site, distance in apart.items()}
        sections.append(Panel("How far apart the sites were", spread(run.history, named), caption))
    return sections


def row_of_model(posterior: Posterior) -> ModelRow:
    """The row of the model; that of a hierarchical GP is ``gp``."""
    return MODELS[posterior.model.get("structure", {"model": "gp"})["model"]]


def tables(posterior: Posterior) -> list[Panel]:
    """Tables that the model makes of its shared latents."""
    if "structure" not in posterior.model:
        return []
    saved = saved_model(posterior, tuple(posterior.inputs))
    names = [posterior.inputs[index] for index in saved.columns]
    found = []
    for title, head, rows, caption in saved.posterior.model.sections(saved.posterior.q_global, names):
        cells = [tuple(cell if isinstance(cell, str) else show(cell) for cell in row) for row in rows]
        found.append(Panel(title, html_table(head, cells), caption))
    return found


def trend_predictor(run: RunData) -> Predictor | None:
    """Prediction for a new site at encoded inputs in original units, on the scale of :func:`scale_of`, or None."""
    if run.posterior is None or why_no_posterior(run):
        return None
    row = row_of_model(run.posterior)
    if not row.along or (row.classes and run.posterior.likelihood != "bernoulli"):
        return None
    predictor = SavedPredictor.of(run)
    if run.posterior.likelihood == "gaussian":
        return predictor
    agreed = predictor.preparation
    standardised = saved_model(run.posterior, agreed.names, link=True)
    return lambda inputs: standardised((inputs - agreed.input_mean) / agreed.input_scale)


def scale_of(posterior: Posterior) -> str:
    """The scale of trend and deviation: the target itself, or what its distribution depends on."""
    target = str(posterior.schema["target"]["name"])
    if posterior.likelihood == "gaussian":
        return target
    if posterior.likelihood == "poisson":
        return f"log rate of {target}"
    return f"{row_of_model(posterior).link} of {target}"


def _trend_panels(posterior: Posterior, predictor: Predictor, ranges: Mapping[str, tuple[float, float]]) -> list[Panel]:
    names = [(c.kind, name) for c in map(Column.from_json, posterior.schema["features"]) for name in c.names]
    structure = posterior.model.get("structure")
    aside = SFVIOptions.model_validate(structure).groups_by if structure else ""
    numeric = [i for i, (kind, name) in enumerate(names) if kind == "numeric" and name != aside]
    if not numeric:
        return []
    mean, scale = (np.asarray(posterior.arrays[f"input.{name}"], dtype=float) for name in ("mean", "scale"))
    moved = {i: ranges.get(names[i][1], (-REACH, REACH)) for i in numeric}
    lines = {i: along(predictor, mean, scale, i, ends) for i, ends in moved.items() if ends[0] < ends[1]}
    if not lines:
        return []
    chosen = sorted(sorted(lines, key=lambda i: -float(np.ptp(lines[i]["centre"])))[:MOST_INPUTS])
    which = "" if len(chosen) == len(numeric) else f" Shown are the {len(chosen)} inputs along which it changes most."
    of = "an observation" if posterior.likelihood == "gaussian" else "what an observation depends on"
    caption = (
        f"Along one input, the others at their mean: the shared trend with the 95 % interval of {of} at a site that "
        f"nobody has seen, whose deviation has its prior.{which} Sites that took part add their own deviation, which "
        "stays with them."
    )
    return [Panel("A new site", trend({names[i][1]: lines[i] for i in chosen}, scale_of(posterior)), caption)]


def along(
    predictor: Predictor, mean: Array, scale: Array, index: int, ends: tuple[float, float] = (-REACH, REACH)
) -> pd.DataFrame:
    """Prediction along one input between two standardised values, others at their mean: ``x``, ``centre``, ``sd``."""
    steps = np.linspace(*ends, 120)
    x = np.tile(mean, (len(steps), 1))
    x[:, index] += steps * scale[index]
    centre, sd = predictor(x)
    return pd.DataFrame({"x": x[:, index], "centre": centre, "sd": sd})


def trend(lines: Mapping[str, pd.DataFrame], label: str) -> Figure:
    """Prediction for a new site along each input, by its name."""
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    figure = Figure(figsize=(min(2.9 * max(columns, 2), 8.6), 2.6 * rows), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for ax, (name, line) in zip(axes.ravel(), lines.items(), strict=False):
        low, high = line["centre"] - Z95 * line["sd"], line["centre"] + Z95 * line["sd"]
        ax.fill_between(line["x"], low, high, color=BAND, alpha=0.7, lw=0)
        ax.plot(line["x"], line["centre"], color=FEDERATED, lw=1.6)
        ax.set_xlabel(name, fontsize=8)
        ax.tick_params(labelsize=7)
    for ax in axes[:, 0]:
        ax.set_ylabel(label, fontsize=8)
    for ax in axes.ravel()[len(lines) :]:
        ax.set_visible(False)
    return figure


def deviations(rows: pd.DataFrame, columns: list[str], label: str) -> Figure:
    """Deviation of every held-out row along each of some columns, joined by site where there is one input."""
    figure = Figure(figsize=(8.6, 3.0), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    sites = rows.groupby("site", sort=False)
    for ax, column in zip(axes, columns, strict=True):
        for site, own in sites:
            shown = own.sort_values(column)
            style = "o-" if columns == [column] != ["trend"] else "o"
            name = f"site {site}" if sites.ngroups <= MOST_NAMES else None
            ax.plot(shown[column], shown["deviation"], style, ms=2.5, lw=1.0, alpha=0.8, label=name)
        ax.axhline(0, color="black", lw=0.7)
        ax.set_xlabel(f"trend of {label}" if column == "trend" else column.removeprefix("input."), fontsize=8)
        ax.tick_params(labelsize=7)
    axes[0].set_ylabel(f"deviation of {label}", fontsize=8)
    if sites.ngroups <= MOST_NAMES:
        axes[-1].legend(frameon=False, fontsize=7)
    return figure


def bound(history: pd.DataFrame) -> Figure:
    """The bound per row where it is known, and the sites' own estimate of it where they averaged."""
    figure = Figure(figsize=(6.2, 3.0), dpi=DPI, layout="constrained")
    ax = figure.subplots()
    kinds = (("objective", "-", FEDERATED, "ELBO"), ("site_estimate", "--", LOCAL, "sites' own estimate"))
    for name, style, colour, label in kinds:
        if name in history and history[name].notna().any():
            ax.plot(history["round"], history[name], style, color=colour, lw=1.4, label=label)
    ax.set(xlabel="round", ylabel="nats per row")
    ax.legend(frameon=False, fontsize=8)
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
