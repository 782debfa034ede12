"""The posterior of SFVI: how it is saved, and what it predicts for a site that nobody has seen or that took part."""

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
from fedgp_flower.gp.to_gpytorch import SparsePosterior
from fedgp_flower.messages import decode
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior
from fedgp_flower.methods.sfvi.gp import HierarchicalModel, export
from fedgp_flower.methods.sfvi.learner import (
    ModelInputs,
    initial_local,
    model_and_rows,
    model_at,
    rows_of,
    unit_noise,
)
from fedgp_flower.methods.sfvi.memory import SiteMemory
from fedgp_flower.methods.sfvi.options import PREDICTION_DRAWS, SFVIOptions
from fedgp_flower.methods.sfvi.structured import (
    ClosedFormModel,
    PredictiveMoments,
    SampledModel,
    SiteRows,
    StructuredModel,
    predict_by_draws,
)
from fedgp_flower.options import ModelSection
from fedgp_flower.run.artefacts import Posterior, RunData
from fedgp_flower.typing import Array, NamedArrays

Predict: TypeAlias = Callable[[Array], tuple[Array, Array]]
PREDICTION_SEED = 20
"""Draws of a prediction are always the same: it is a function of the posterior alone."""


@dataclass(frozen=True, slots=True)
class StructuredPosterior:
    """θ and q(Z_G), with the local posteriors of a site or without."""

    model: StructuredModel
    """Holding θ."""
    q_global: GlobalPosterior

    def moments(
        self, site: SiteRows, q_local: LocalPosterior | None, rows: ModelInputs, *, link: bool = False
    ) -> tuple[Array, Array]:
        """Mean and variance of an observation [N], or of indicators of the classes [N, C].

        Args:
            site: The site's training rows and units.
            q_local: q(Z_Lk | Z_G); None for a site that has none.
            rows: Where to predict; a unit that the site has no rows of has its latents from the prior.
            link: On the scale of the link function, where trend and deviation add up, instead of an observation's.
        """
        if isinstance(self.model, ClosedFormModel):
            where = (site.at(rows.features), self.q_global, q_local)
            mean, variance = self.model.latent(*where) if link else self.model.predict(*where)
            return mean.numpy(), variance.numpy()
        assert isinstance(self.model, SampledModel)
        parts = [
            (chosen, self._by_draws(self.model, data, q_local if known else None, link))
            for chosen, data, known in self.model.located(site, rows.features, rows.groups, trained=q_local is not None)
        ]
        if len(parts) == 1:
            [(_, part)] = parts
            return part.mean.numpy(), part.variance.numpy()
        joined = rows.features.new_empty(2, len(rows.features))
        for chosen, part in parts:
            joined[:, chosen] = torch.stack(part)
        mean, variance = joined
        return mean.numpy(), variance.numpy()

    def _by_draws(
        self, model: SampledModel, site: SiteRows, q_local: LocalPosterior | None, link: bool
    ) -> PredictiveMoments:
        rng = np.random.default_rng(PREDICTION_SEED)
        noise = torch.from_numpy(rng.standard_normal((PREDICTION_DRAWS, model.global_size)))
        noise_local = unit_noise(PREDICTION_SEED, 0, site.keys, (PREDICTION_DRAWS,), model.local_width(site))
        return predict_by_draws(
            model, site, self.q_global, q_local, noise_global=noise, noise_local=noise_local, link=link
        )


@dataclass(frozen=True, slots=True)
class NewSite:
    """Prediction at a site that nobody has seen: its deviation has its prior."""

    posterior: StructuredPosterior
    columns: Sequence[int]
    """Of the inputs, as the model sees them: without the one that names units."""
    link: bool

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation at standardised inputs [N, D]."""
        features = torch.from_numpy(inputs[:, self.columns])
        rows = ModelInputs(features, torch.arange(len(features), dtype=torch.int64))
        nothing, unit = features[:0], torch.zeros(1, dtype=torch.int64)
        nobody = SiteRows(nothing, nothing[:, 0], unit[:0], unit, nothing)
        mean, variance = self.posterior.moments(nobody, None, rows, link=self.link)
        return mean, np.sqrt(variance)

    def export(self) -> list[tuple[SparsePosterior, Likelihood]]:
        """The one model and likelihood of GPyTorch.

        Raises:
            RunError: the model is no Gaussian process.
        """
        model = self.posterior.model
        if not isinstance(model, HierarchicalModel):
            raise RunError(
                f"{type(model).__name__} is no Gaussian process; with `sfvi.model` = 'gp' it is. Use `predict`"
            )
        return [export(model, self.posterior.q_global)]


def saved_model(saved: Posterior, names: tuple[str, ...], *, link: bool = False) -> NewSite:
    """The posterior of a finished run, on the scale of an observation or of the link function."""
    options = SFVIOptions.model_validate(saved.model["structure"])
    columns = options.columns(names)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    model = model_at(options, ModelSection.model_validate(dict(saved.model["model"])), len(columns), arrays)
    return NewSite(StructuredPosterior(model, GlobalPosterior.of(arrays)), columns, link)


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
    posterior = StructuredPosterior(model, q_global)

    def predict(inputs: Array) -> tuple[Array, Array]:
        mean, variance = posterior.moments(rows, q_local, rows_of(preparation, inputs, options))
        return mean, np.sqrt(variance)

    return predict
