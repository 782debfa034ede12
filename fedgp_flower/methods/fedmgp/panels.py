"""Sections that FedMGP adds to a report: a panel per unit, and the shared latent functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.figures import BAND, DPI, FEDERATED, LOCAL, MISS, POOLED, Z95, label_text
from fedgp_flower.run.report import Panel
from fedgp_flower.typing import Array

COLUMNS = 3
Curve: TypeAlias = Mapping[str, Sequence[float]]


def panels(run: RunData) -> list[Panel]:
    """Sections for what ``method_details`` hold: units and latent functions."""
    details, names = run.metrics.method_details, ("input", "target")
    if run.posterior is not None:
        schema = run.posterior.schema
        names = label_text(str(schema["features"][0]["name"])), label_text(str(schema["target"]["name"]))
    sections: list[Panel] = []
    if details.get("units"):
        caption = (
            "Solid with band: federated mean and 95 % interval of an observation. Dashed: a GP of its rows "
            "alone. Grey dots: rows the unit trained on; red circles: held-out rows."
        )
        sections.append(Panel("Units", units(details["units"], _held_out(run), names), caption))
    if details.get("latents"):
        caption = "Mean and 95 % interval at the pseudo-inputs, all that the units share."
        sections.append(Panel("Shared latent functions", latents(details["latents"], names[0]), caption))
    return sections


def _held_out(run: RunData) -> dict[str, tuple[Array, Array]]:
    """Inputs and targets of held-out rows, by the label of their unit."""
    labels = run.metrics.labels
    if run.predictions is None:
        return {}
    [column] = [name for name in run.predictions.columns if str(name).startswith("input.")]
    groups = run.predictions.groupby("site")
    return {labels[str(site)]: (rows[column].to_numpy(), rows["target"].to_numpy()) for site, rows in groups}


def _band(ax: Axes, at: Sequence[float], curve: Curve) -> None:
    mean, sd = np.asarray(curve["mean"]), np.asarray(curve["sd"])
    ax.fill_between(at, mean - Z95 * sd, mean + Z95 * sd, color=BAND, alpha=0.7, lw=0)


def units(
    curves: Mapping[str, Curve],
    held_out: Mapping[str, tuple[Array, Array]],
    names: tuple[str, str] = ("input", "target"),
) -> Figure:
    """A panel per unit: rows, federated mean and 95 % band, independent GP, held-out rows."""
    count, rows = len(curves), -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(8.6, 2.3 * rows), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, min(COLUMNS, count), squeeze=False).ravel()
    for ax, (label, curve) in zip(axes, curves.items(), strict=False):
        _band(ax, curve["grid"], curve)
        ax.plot(curve["grid"], curve["alone_mean"], "--", color=LOCAL, lw=1.2)
        ax.plot(curve["grid"], curve["mean"], color=FEDERATED, lw=1.6)
        ax.plot(curve["x"], curve["y"], ".", color="#888888", ms=2.5)
        if label in held_out:
            ax.plot(*held_out[label], "o", mfc="none", mec=MISS, ms=3, mew=0.6)
        seen = np.concatenate([curve["y"], *(held_out[label][1:] if label in held_out else ())])
        if seen.size:  # beyond the rows a curve may go far
            ax.set_ylim(seen.min() - 0.3 * np.ptp(seen) - 1e-9, seen.max() + 0.3 * np.ptp(seen) + 1e-9)
        ax.set_title(label_text(label), fontsize=8)
        ax.tick_params(labelsize=7)
    for ax in axes[count:]:
        ax.set_visible(False)
    figure.supxlabel(names[0], fontsize=9)
    figure.supylabel(names[1], fontsize=9)
    return figure


def latents(functions: Sequence[Curve], name: str = "input") -> Figure:
    """Mean and 95 % band of every latent function at the pseudo-inputs."""
    figure = Figure(figsize=(8.6, 2.4), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(functions), squeeze=False)[0]
    for index, (ax, function) in enumerate(zip(axes, functions, strict=True)):
        _band(ax, function["w"], function)
        ax.plot(function["w"], function["mean"], "o-", color=POOLED, ms=2.5, lw=1.2)
        ax.set_title(f"g{index + 1}", fontsize=8)
        ax.tick_params(labelsize=7)
    figure.supxlabel(name, fontsize=9)
    figure.supylabel("value (standardised)", fontsize=9)
    return figure
