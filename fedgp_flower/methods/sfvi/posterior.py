"""Predictions of a finished SFVI run at new and known sites, and the panels of its report."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from matplotlib.figure import Figure

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import RunError
from fedgp_flower.methods.at_site import Predict, at_site, predictor
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.sfvi.client import SFVIClient
from fedgp_flower.methods.sfvi.gp import HierarchicalModel
from fedgp_flower.methods.sfvi.learner import model_at
from fedgp_flower.methods.sfvi.options import SFVIKeys
from fedgp_flower.methods.sfvi.structured import ModelInputs, SiteRows, StructuredModel
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import axes_of
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.run.summary import show
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays

MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class NewSite:
    """Prediction at a new site, where the deviation has its prior."""

    model: StructuredModel
    """The model at the trained θ."""
    q_global: GlobalPosterior
    columns: Sequence[int]
    """Indices of the inputs that the model uses."""

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation at standardised inputs [N, D]."""
        features = torch.from_numpy(inputs[:, self.columns])
        rows = ModelInputs(features, torch.arange(len(features), dtype=torch.int64))
        empty, unit = features[:0], torch.zeros(1, dtype=torch.int64)
        new_site = SiteRows(empty, empty[:, 0], unit[:0], unit, empty)
        mean, variance = self.model.moments(new_site, self.q_global, None, rows, link=False)
        return mean.numpy(), variance.sqrt().numpy()

    def export(self) -> list[tuple[GP, Likelihood]]:
        """The model and its likelihood in GPyTorch."""
        if not isinstance(self.model, HierarchicalModel):
            name = type(self.model).__name__
            raise RunError(f"{name} is not a Gaussian process; use `predict`, or train with `sfvi.model` = 'gp'")
        model = deepcopy(self.model).requires_grad_(False).eval()
        model.q_global = self.q_global
        return [(model, model.likelihood)]


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewSite:
    """The posterior of a finished run."""
    options = SFVIKeys.model_validate(saved.model["structure"]).of_classes(int(saved.model["classes"]))
    columns = options.columns(names)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    model = model_at(options, ModelSection.model_validate(dict(saved.model["model"])), len(columns), arrays)
    return NewSite(model, GlobalPosterior.of(arrays), columns)


def site_model(run: Run, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """Predictor with the local posterior of a site; None if its state is of other units or another run."""
    if not state:
        return None
    client, saved = at_site(SFVIClient, run, config, site, state)
    return None if client.posterior(saved.arrays)[2] is None else predictor(client, Parameters(saved.arrays))


def panels(run: Run) -> list[Panel]:
    """Tables of the model, and deviations of simulated sites."""
    if run.saved is None:
        return []
    sections = []
    if "structure" in run.saved.model:
        new = saved_model(run.saved, tuple(run.saved.inputs))
        names = [run.saved.inputs[index] for index in new.columns]
        for title, head, table, caption in new.model.sections(new.q_global, names):
            cells = [tuple(cell if isinstance(cell, str) else show(cell) for cell in row) for row in table]
            sections.append(Panel(title, html_table(head, cells), caption))
    rows = run.predictions
    if rows is not None and "deviation" in rows:
        columns = [str(name) for name in rows.columns if str(name).startswith("input.")] or ["trend"]
        caption = (
            "The prediction of a simulated site at its held-out rows minus the shared trend: the posterior mean of its "
            "deviation. A real site never sends it."
        )
        target = str(run.saved.schema["target"]["name"])
        label = target if run.saved.likelihood == "gaussian" else f"the latent function of {target}"
        named = rows.assign(site=rows["site"].map(run.metrics.labels))
        sections.append(Panel("Deviations", deviations(named, columns, label), caption))
    return sections


def deviations(rows: pd.DataFrame, columns: list[str], label: str) -> Figure:
    """Plot deviations of held-out rows against each column, with lines per site for a single input."""
    figure, axes = axes_of(len(columns))
    for ax in axes[1:]:
        ax.sharey(axes[0])
    sites = rows.groupby("site", sort=False)
    for ax, column in zip(axes, columns, strict=True):
        for site, of_site in sites:
            shown = of_site.sort_values(column)
            style = "o-" if columns == [column] != ["trend"] else "o"
            name = f"site {site}" if sites.ngroups <= MOST_NAMES else None
            ax.plot(shown[column], shown["deviation"], style, ms=2.5, lw=1.0, alpha=0.8, label=name)
        ax.axhline(0, color="black", lw=0.7)
        ax.set_xlabel(f"trend of {label}" if column == "trend" else column.removeprefix("input."))
    axes[0].set_ylabel(f"deviation of {label}")
    if sites.ngroups <= MOST_NAMES:
        axes[-1].legend(frameon=False, fontsize=7)
    return figure
