"""Sections that PVI adds to a report: q(β), where Z began and ended, what factors say, what was forgotten."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedgp_flower.files import read_json
from fedgp_flower.methods.pvi.saved import names_of
from fedgp_flower.methods.pvi.updates import ALPHA
from fedgp_flower.options import ModelSection
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.figures import DPI, FEDERATED, Z95, label_text
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import cell, number, show, title_of
from fedgp_flower.typing import NamedArrays

STRENGTHS = {
    "rows": "training rows",
    "points": "pseudo-observations",
    "weight": "weight",
    "directions": "directions of v",
    "values": "precision of u",
    "inducing": "precision of Z",
    "hyper": "precision of β",
}
"""Column of the table of factors → its title."""


def panels(run: RunData) -> list[Panel]:
    """The posterior of the hyperparameters, inducing inputs, factors, free energy, and what was forgotten."""
    if run.posterior is None:
        return []
    arrays, details = run.posterior.arrays, run.metrics.method_details
    sections: list[Panel] = []
    if "hyper.mean" in arrays:  # else Z and β are those that sums agreed on
        section = ModelSection.model_validate({n: run.posterior.model[n] for n in ("kernel", "ard", "likelihood")})
        figure = hyperparameters(arrays, called(names_of(section, len(run.posterior.inputs)), run.posterior.inputs))
        sections.append(Panel("Posterior of the hyperparameters", figure, _hyper_caption(details)))
    if "inducing.first" in arrays and arrays["inducing.first"].shape[1] <= 2:
        names = [str(column["name"]) for column in run.posterior.schema["features"]]
        caption = (
            "Standardised inputs. Grey: where Z began; colour: the mean of q(Z), with 95 % intervals where Z has a"
        )
        sections.append(Panel("Inducing inputs", inducing(arrays, names), f"{caption} distribution."))
    labels = run.metrics.labels
    if details.get("factors"):
        sections.append(Panel("What each factor says", strength_table(details, labels), _strength_caption(run)))
    if details.get("free_energy"):
        body, caption = free_energy_table(details["free_energy"], ALPHA)
        sections.append(Panel("Free energy", body, caption))
    if (run.path / "forgotten.json").exists():
        sections.insert(0, forgetting(read_json(run.path / "forgotten.json")))
    return sections


def called(names: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """Names of the entries of β, lengthscales by the name of their input instead of its number."""
    parts = [re.fullmatch(r"(.*lengthscale) (\d+)", name) for name in names]
    return [f"{p[1]} of {inputs[int(p[2]) - 1]}" if p else name for name, p in zip(names, parts, strict=True)]


def hyperparameters(arrays: NamedArrays, names: Sequence[str]) -> Figure:
    """Log-normal 95 % intervals of every hyperparameter."""
    mean = np.asarray(arrays["hyper.mean"])
    scale = np.asarray(arrays.get("hyper.scale", np.zeros_like(mean)))
    figure = Figure(figsize=(5.6, 0.8 + 0.24 * len(mean)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(mean))[::-1]
    axes.hlines(rows, np.exp(mean - Z95 * scale), np.exp(mean + Z95 * scale), color=FEDERATED, linewidth=2)
    axes.plot(np.exp(mean), rows, "o", color=FEDERATED, markersize=4)
    labels = [label_text(name) for name in names]
    axes.set(xscale="log", xlabel="value in standardised units", yticks=rows, yticklabels=labels)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    return figure


def inducing(arrays: NamedArrays, names: Sequence[str]) -> Figure:
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


def strength_table(details: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """A row per site with the strength of its factors, as HTML; columns that no site has are left out."""
    strengths: Mapping[str, Mapping[str, float]] = details["factors"]
    shown = [name for name in STRENGTHS if any(name in own for own in strengths.values())]
    whole, place = {"rows", "points"}, {site: index for index, site in enumerate(labels)}
    rows = [
        (
            labels.get(site, site),
            str(details["visits"].get(site, 0)),
            *(f"{own[n]:,.0f}" if n in whole else show(number(own[n])) if n in own else "–" for n in shown),
        )
        for site, own in sorted(strengths.items(), key=lambda each: place.get(each[0], len(place)))
    ]
    return html_table(("site", "visits", *(STRENGTHS[name] for name in shown)), rows)


def free_energy_table(parts: Mapping[str, float], alpha: float) -> tuple[str, str]:
    """The free energy and its parts in nats, as HTML, and what to read in them."""
    names = {
        "fit": "expected log likelihood of all training rows",
        "kl_function": "− KL of q(u) from its prior",
        "kl_inducing": f"− {alpha:g} × KL of q(Z) from its prior",
        "kl_hyper": "− KL of q(β) from its prior",
    }
    signs = {"fit": 1.0, "kl_function": -1.0, "kl_inducing": -alpha, "kl_hyper": -1.0}
    rows = [(words, show(signs[name] * parts[name])) for name, words in names.items()]
    caption = "An estimate of the log evidence of the standardised training rows"
    caption += ", and a lower bound of it." if alpha >= 1 else "; with α below 1 it is no lower bound of it."
    return html_table(("part", "nats"), [*rows, ("free energy", show(parts["total"]))]), caption


def forgetting(content: Mapping[str, Any]) -> Panel:
    """What ``forgotten.json`` says: figures before and after, and how far the posterior moved."""
    before, after = content["test_before"], content["test_after"]
    rows = [(title_of(name), cell(name, before[name]), cell(name, after[name])) for name in before if name in after]
    body = html_table(("held-out figure", "before", "after"), rows)
    symbols = {"inducing": "q(Z)", "hyper": "q(β)", "whitened": "q(v)"}
    moved = [f"{symbols[name]} moved by {show(value)} nats" for name, value in content["divergence"].items()]
    shifts = content["predictions"]
    if "rms_shift_in_sd" in shifts:
        moved.append(f"predictive means by {show(shifts['rms_shift_in_sd'])} standard deviations (root mean square)")
        moved.append(f"standard deviations by a factor of {show(shifts['sd_ratio'])}")
    if "mean_change_of_probability" in shifts:
        moved.append(f"class probabilities by {show(shifts['mean_change_of_probability'])} on average")
    removed = content["training_rows_removed"]
    caption = f"Run {content['from']} without site {content['label'] or content['site']}"
    caption += "" if removed is None else f" and its {removed:,} training rows"
    caption += f", after {content['rounds_after']} further rounds: {content['sites_after']} sites of "
    caption += f"{content['sites_before']}. Both columns are over the same {content['test_rows']:,} held-out rows, "
    caption += f"those of sites that remain. {'; '.join(moved)}. What may still owe something to the site: "
    return Panel("What forgetting changed", body, f"{caption}{'; '.join(content['remains'])}.")


def _strength_caption(run: RunData) -> str:
    caption = "How much each site's factor says."
    strengths = run.metrics.method_details["factors"].values()
    if any("weight" in own for own in strengths):
        units = "in rows of noise σ²" if run.config["pvi.factor"] == "tied" else "over the standardised target"
        caption += f" Weight: summed precision of its pseudo-observations, {units}."
    if any("directions" in own for own in strengths):
        caption += " Directions: of those of v, the whitened inducing values, how many the factor alone determines."
    if any("values" in own for own in strengths):
        caption += " Precision of u: mean over the inducing values."
    if any("inducing" in own or "hyper" in own for own in strengths):
        caption += " Precisions of Z and β: mean of the site's factor; the prior has 1."
    return caption


def _hyper_caption(details: Mapping[str, Any]) -> str:
    counts = f"{details.get('halvings', 0)} times an update was damped further to keep q proper, "
    counts += f"{details.get('refused', 0)} updates were refused."
    local = details.get("local", {})
    counts += f" At the sites {local.get('rejected', 0)} trial points of line searches were rejected and "
    counts += f"{local.get('halvings', 0)} steps of fixed points shortened."
    return (
        "Medians and 95 % intervals of the log-normal posterior; amplitudes and noise as standard deviations of the "
        f"standardised target. {counts}"
    )
