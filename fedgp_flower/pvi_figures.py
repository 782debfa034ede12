"""Sections that PVI adds to a report: q(β), where Z began and ended, and how near pseudo-observations are to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import escape
from matplotlib.figure import Figure

from fedgp_flower.config import ModelSection
from fedgp_flower.figures import DPI, FEDERATED, Z95
from fedgp_flower.models.pvi_arrays import sparse_model
from fedgp_flower.records import Posterior, RunData
from fedgp_flower.report import Panel
from fedgp_flower.shapes import Array


def panels(run: RunData) -> list[Panel]:
    """Sections for a run whose posterior is of the family ``pvi``; none for other runs."""
    if run.posterior is None or run.posterior.model.get("family") != "pvi":
        return []
    arrays, details = run.posterior.arrays, run.metrics.method_details
    found = [
        Panel(
            "Posterior of the hyperparameters",
            hyperparameters(arrays, names_of(run.posterior)),
            _hyper_caption(details),
        )
    ]
    if arrays["inducing.first"].shape[1] <= 2:
        names = [str(column["name"]) for column in run.posterior.schema["features"]]
        caption = (
            "Standardised inputs. Grey: where Z began; colour: the mean of q(Z), with 95 % intervals where Z has a"
        )
        found.append(Panel("Inducing inputs", inducing(arrays, names), f"{caption} distribution."))
    leakage: Mapping[str, Mapping[str, float]] = details.get("leakage", {})
    if any(leakage.values()):
        labels = {str(row["site"]): str(row.get("label") or row["site"]) for row in run.metrics.per_site}
        floor = int(run.config["pvi.min-rows-per-pseudo-point"])
        found.append(
            Panel("What pseudo-observations give away", leakage_table(leakage, labels), _leakage_caption(floor))
        )
    return found


def hyperparameters(arrays: Mapping[str, Array], names: Sequence[str]) -> Figure:
    """Log-normal 95 % intervals of every hyperparameter."""
    mean = np.asarray(arrays["hyper.mean"])
    scale = np.asarray(arrays.get("hyper.scale", np.zeros_like(mean)))
    figure = Figure(figsize=(5.6, 0.8 + 0.24 * len(mean)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(mean))[::-1]
    axes.hlines(rows, np.exp(mean - Z95 * scale), np.exp(mean + Z95 * scale), color=FEDERATED, linewidth=2)
    axes.plot(np.exp(mean), rows, "o", color=FEDERATED, markersize=4)
    axes.set(xscale="log", xlabel="value in standardised units", yticks=rows, yticklabels=names)
    return figure


def names_of(run: Posterior) -> list[str]:
    """What the entries of β are, in their order."""
    section = {key: run.model[key] for key in ("kernel", "ard", "jitter", "likelihood")}
    model = sparse_model(ModelSection.model_validate(section), run.arrays["inducing.first"].shape[1])
    own = {"gaussian": ["noise sd"], "student-t": ["scale", "degrees of freedom − 2"]}
    return [*model.kernel.names, *own.get(str(run.likelihood), [])]


def inducing(arrays: Mapping[str, Array], names: Sequence[str]) -> Figure:
    """Inducing inputs of one or two dimensions before and after."""
    first, mean = np.asarray(arrays["inducing.first"]), np.asarray(arrays["inducing.locations.mean"])
    scale = np.asarray(arrays.get("inducing.locations.scale", np.zeros_like(mean)))
    figure = Figure(figsize=(5.6, 1.8 if mean.shape[1] == 1 else 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    flat = mean.shape[1] == 1
    up = (np.zeros(len(mean)), np.ones(len(first))) if flat else (mean[:, 1], first[:, 1])
    axes.plot(first[:, 0], up[1], "o", color="0.6", markersize=4)
    bars = None if flat else Z95 * scale[:, 1]
    axes.errorbar(mean[:, 0], up[0], bars, Z95 * scale[:, 0], fmt="o", color=FEDERATED, markersize=4, linewidth=1)
    axes.set_xlabel(names[0])
    if flat:
        axes.set(yticks=[0, 1], yticklabels=["after", "before"], ylim=(-0.5, 1.5))
    else:
        axes.set_ylabel(names[1])
    return figure


def leakage_table(leakage: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]) -> str:
    """A row per site, as HTML."""
    head = ("site", "within 0.05 of a row", "distance, 5 %", "distance, median", "membership AUC")
    rows = [
        (
            labels.get(site, site),
            f"{own['near']:.0%}",
            f"{own['low']:.2f}",
            f"{own['median']:.2f}",
            f"{own['auc']:.2f}" if "auc" in own else "–",
        )
        for site, own in leakage.items()
        if own
    ]
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr></thead><tbody>{cells}</tbody></table>"
    )


def _hyper_caption(details: Mapping[str, Any]) -> str:
    counts = f"{details.get('halvings', 0)} times an update was damped further to keep q proper, "
    counts += f"{details.get('refused', 0)} updates were refused."
    return (
        "Medians and 95 % intervals of the log-normal posterior; amplitudes and noise as standard deviations of the "
        f"standardised target. {counts}"
    )


def _leakage_caption(floor: int) -> str:
    start = "near single rows of a site" if floor == 1 else f"as averages of at least {floor} rows"
    return (
        f"Pseudo-observations started {start}. Distances to the nearest row of the same site, inputs and target "
        "jointly, in units of the typical distance between rows. Membership AUC (simulation only): the probability "
        "that a row the site trained on is nearer to a pseudo-observation than a held-out row is; 0.5 is chance. "
        "This measures one attack; it promises nothing about others."
    )
