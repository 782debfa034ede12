"""Predictions of a unit of a finished FedMGP run, and the panels of its report."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.methods.at_site import Predict, at_site, predictor
from fedgp_flower.methods.fedmgp.client import FedMGPClient
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior, Move
from fedgp_flower.methods.fedmgp.messages import Known, View
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import FEDERATED, Z95, axes_of, band, label_text, site_curves
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.report import Panel
from fedgp_flower.typing import NamedArrays

MOST_UNITS, POINTS = 12, 161
"""Most units in a figure, and points of a curve."""


def site_model(run: Run, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """Predictor of a unit (paper, Eq. 16) with φ_m of its last report, else fitted; None if its state was lost."""
    assert run.saved is not None
    never = {"report": 0, "offset": np.zeros_like(run.saved.arrays["latents.scales"]), "stretch": 1.0, "hold": "gain"}
    report = run.saved.model["known"].get(site.site, never)
    if report["report"] and not state:
        return None
    client, saved = at_site(FedMGPClient, run, config, site, state if report["report"] else {})
    inducing, scales, amplitudes = (saved.arrays[f"latents.{name}"] for name in ("inducing", "scales", "amplitudes"))
    known = Known(report["report"], Move(np.array(report["offset"], np.float64), report["stretch"], report["hold"]))
    q = LatentPosterior(saved.arrays["posterior.mean"], saved.arrays["posterior.covariance"])
    return predictor(client, View(LatentFunctions(inducing, scales, amplitudes, saved.model["jitter"]), q, known))


def panels(run: Run) -> list[Panel]:
    """Predictions of simulated units and the latent functions, for a single input."""
    if run.saved is None or len(run.saved.inputs) != 1:
        return []
    saved, sections = run.saved, []
    W = saved.arrays["latents.inducing"][:, 0] * saved.arrays["input.scale"][0] + saved.arrays["input.mean"][0]
    if run.predictions is not None and not saved.schema["target"].get("levels"):
        units = {}
        for label in [*run.metrics.labels.values()][:MOST_UNITS]:
            with suppress(DataError, RunError):  # the unit's rows or state may be lost, or on another machine
                units[label] = Predictor.at_site(run.path, label)
        if units:
            frame = pd.DataFrame({saved.schema["features"][0]["name"]: np.linspace(W.min(), W.max(), POINTS)})
            caption = "Mean and 95 % interval of an observation. Grey: rows the unit trained on; red: held-out rows."
            sections.append(Panel("Units", site_curves(units, frame), caption))
    caption = "Mean and 95 % interval at the pseudo-inputs; units share nothing else."
    return [*sections, Panel("Shared latent functions", latents(saved, W), caption)]


def latents(saved: Posterior, W: np.ndarray) -> Figure:
    """Mean and 95 % band of every latent function at the pseudo-inputs."""
    shape = len(saved.arrays["latents.scales"]), len(W)
    figure, axes = axes_of(shape[0], height=2.4)
    means, variances = saved.arrays["latents.mean"], np.diag(saved.arrays["latents.covariance"])
    parts = zip(axes, means.reshape(shape), np.sqrt(variances).reshape(shape), strict=True)
    for index, (ax, mean, sd) in enumerate(parts, 1):
        band(ax, W, mean - Z95 * sd, mean, mean + Z95 * sd)
        ax.scatter(W, mean, 7, color=FEDERATED)
        ax.set_title(f"g{index}", fontsize=8)
    figure.supxlabel(label_text(saved.inputs[0]), fontsize=9)
    figure.supylabel("value (standardised)", fontsize=9)
    return figure
