"""The posterior of SFVI: what it predicts for a site that nobody has seen or that took part."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import RunError
from fedgp_flower.methods.at_site import Predict, at_site, predictor
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.sfvi.client import SFVIClient
from fedgp_flower.methods.sfvi.gp import HierarchicalModel
from fedgp_flower.methods.sfvi.learner import model_at
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import ModelInputs, SiteRows, StructuredModel
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays


@dataclass(frozen=True, slots=True)
class NewSite:
    """Prediction at a site that nobody has seen: its deviation has its prior."""

    model: StructuredModel
    """Holding θ."""
    q_global: GlobalPosterior
    columns: Sequence[int]
    """Of the inputs, as the model sees them: without the one that names units."""

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation at standardised inputs [N, D]."""
        features = torch.from_numpy(inputs[:, self.columns])
        rows = ModelInputs(features, torch.arange(len(features), dtype=torch.int64))
        nothing, unit = features[:0], torch.zeros(1, dtype=torch.int64)
        nobody = SiteRows(nothing, nothing[:, 0], unit[:0], unit, nothing)
        mean, variance = self.model.moments(nobody, self.q_global, None, rows, link=False)
        return mean.numpy(), variance.sqrt().numpy()

    def export(self) -> list[tuple[GP, Likelihood]]:
        """The same model of GPyTorch, and its likelihood."""
        if not isinstance(self.model, HierarchicalModel):
            name = type(self.model).__name__
            raise RunError(f"{name} is no Gaussian process; with `sfvi.model` = 'gp' it is. Use `predict`")
        model = deepcopy(self.model).hold(self.q_global).requires_grad_(False)
        return [(model, model.likelihood)]


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewSite:
    """The posterior of a finished run."""
    options = SFVIOptions.model_validate(saved.model["structure"])
    columns = options.columns(names)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    model = model_at(options, ModelSection.model_validate(dict(saved.model["model"])), len(columns), arrays)
    return NewSite(model, GlobalPosterior.of(arrays), columns)


def site_model(run: Run, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """The same with the local posterior of a site; None where its state is about other rows or another run."""
    if run.saved is None or not state:
        return None
    client, arrays = at_site(SFVIClient, run, config, site, state)
    return None if client.posterior(arrays)[2] is None else predictor(client, Parameters(arrays))
