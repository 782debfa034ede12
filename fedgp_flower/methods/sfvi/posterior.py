"""The posterior of SFVI: what it predicts for a site that nobody has seen or that took part."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.gp.models import WhitenedGP
from fedgp_flower.messages import decode
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.sfvi.gp import HierarchicalModel, export
from fedgp_flower.methods.sfvi.learner import initial_local, model_and_rows, model_at, rows_of
from fedgp_flower.methods.sfvi.memory import SiteMemory
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import ModelInputs, SiteRows, StructuredModel
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.typing import Array, NamedArrays

Predict: TypeAlias = Callable[[Array], tuple[Array, Array]]


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

    def export(self) -> list[tuple[WhitenedGP, Likelihood]]:
        """The one model and likelihood of GPyTorch.

        Raises:
            RunError: the model is no Gaussian process.
        """
        if not isinstance(self.model, HierarchicalModel):
            name = type(self.model).__name__
            raise RunError(f"{name} is no Gaussian process; with `sfvi.model` = 'gp' it is. Use `predict`")
        return [export(self.model, self.q_global)]


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewSite:
    """The posterior of a finished run."""
    options = SFVIOptions.model_validate(saved.model["structure"])
    columns = options.columns(names)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    model = model_at(options, ModelSection.model_validate(dict(saved.model["model"])), len(columns), arrays)
    return NewSite(model, GlobalPosterior.of(arrays), columns)


def site_model(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """The same with the local posterior of a site; None where its state is about other rows or another run."""
    if run.posterior is None or not state:
        return None
    options = cast(SFVIOptions, config.options)
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    preparation = Preparation.from_wire(arrays, json.dumps(run.posterior.schema))
    model, rows = model_and_rows(config, preparation, site, arrays)
    q_global, start = GlobalPosterior.of(arrays), initial_local(model, rows, options)
    q_local = decode(SiteMemory, state).posterior(rows, start, q_global.mean, run.metrics.rounds)
    if q_local is None:
        return None

    def predict(inputs: Array) -> tuple[Array, Array]:
        new = rows_of(preparation, inputs, options)
        mean, variance = model.moments(rows, q_global, q_local, new, link=False)
        return mean.numpy(), variance.sqrt().numpy()

    return predict
