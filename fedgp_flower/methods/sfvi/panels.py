"""Sections of a report by SFVI and by hierarchical-gp: the model's tables, deviations, and the confusion of classes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedgp_flower.methods.sfvi.options import MODELS
from fedgp_flower.methods.sfvi.posterior import saved_model
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import DPI, confusion
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import show

MOST_NAMES = 8


def panels(run: Run) -> list[Panel]:
    """What the saved posterior and the predictions of a run show."""
    if run.saved is None:
        return []
    sections = []
    if "structure" in run.saved.model:
        new = saved_model(run.saved, tuple(run.saved.inputs))
        names = [run.saved.inputs[index] for index in new.columns]
        for title, head, rows, caption in new.model.sections(new.q_global, names):
            cells = [tuple(cell if isinstance(cell, str) else show(cell) for cell in row) for row in rows]
            sections.append(Panel(title, html_table(head, cells), caption))
    told = run.predictions
    if told is not None and "deviation" in told:
        columns = [str(name) for name in told.columns if str(name).startswith("input.")] or ["trend"]
        caption = (
            "The prediction of a simulated site at its held-out rows minus the shared trend: the posterior mean of its "
            "deviation. A real site shows it to nobody."
        )
        sections.append(Panel("Deviations", deviations(told, columns, scale_of(run.saved)), caption))
    if counts := run.metrics.method_details.get("confusion"):
        caption = "Held-out rows of all sites. Cells that are too small to leave a site are left out."
        sections.append(Panel("Confusion of classes", confusion(np.array(counts)), caption))
    return sections


def scale_of(posterior: Posterior) -> str:
    """The scale where trend and deviation add up: the target itself, or what its distribution depends on."""
    target = str(posterior.schema["target"]["name"])
    if posterior.likelihood == "gaussian":
        return target
    if posterior.likelihood == "poisson":
        return f"log rate of {target}"
    return f"{MODELS[posterior.model['structure']['model']].link} of {target}"


def deviations(rows: pd.DataFrame, columns: list[str], label: str) -> Figure:
    """Deviation of every held-out row along each of some columns, joined by site where there is one input."""
    figure = Figure(figsize=(8.6, 3.0), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    sites = rows.groupby("site", sort=False)
    for ax, column in zip(axes, columns, strict=True):
        for site, of_site in sites:
            shown = of_site.sort_values(column)
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
