"""The posterior of SFVI: how it is saved, and what it predicts for a site that nobody has seen or that took part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.gp.to_gpytorch import SparsePosterior
from fedgp_flower.messages import decode
from fedgp_flower.methods.family import GlobalPosterior, LocalFamily
from fedgp_flower.methods.sfvi.estimators import unit_noise
from fedgp_flower.methods.sfvi.exact_deviation import ExactDeviation
from fedgp_flower.methods.sfvi.export import export
from fedgp_flower.methods.sfvi.gp import HierarchicalGP
from fedgp_flower.methods.sfvi.learner import initial_local
from fedgp_flower.methods.sfvi.memory import SiteMemory
from fedgp_flower.methods.sfvi.models import Rows, model_and_rows, model_at, rows_of
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.pseudo_observed import PseudoObserved
from fedgp_flower.methods.sfvi.shaped import ShapedGP
from fedgp_flower.methods.sfvi.structured import (
    ClosedFormModel,
    Prediction,
    SampledModel,
    SiteData,
    StructuredModel,
    predict_by_draws,
)
from fedgp_flower.options import ModelSection
from fedgp_flower.run.artefacts import Posterior, RunData
from fedgp_flower.run.config import RunConfig
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
    draws: int
    """For a model whose expectations are not known."""

    def moments(
        self, site: SiteData, q_local: LocalFamily | None, rows: Rows, *, link: bool = False
    ) -> tuple[Array, Array]:
        """Mean and variance of an observation [N], or of indicators of the classes [N, C].

        Args:
            site: The site's training rows and units.
            q_local: q(Z_Lk | Z_G); None for a site that has none.
            rows: Where to predict; a unit that the site has no rows of has its latents from the prior.
            link: On the scale of the link function, where trend and deviation add up, instead of an observation's.
        """
        if isinstance(self.model, ClosedFormModel):
            where = (site.at(rows.features), self.q_global, None if q_local is None else q_local.unfold())
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

    def _by_draws(self, model: SampledModel, site: SiteData, q_local: LocalFamily | None, link: bool) -> Prediction:
        rng = np.random.default_rng(PREDICTION_SEED)
        noise = torch.from_numpy(rng.standard_normal((self.draws, model.global_size)))
        own = unit_noise(PREDICTION_SEED, 0, site.keys, (self.draws,), model.local_width(site))
        return predict_by_draws(model, site, self.q_global, q_local, noise_global=noise, noise_local=own, link=link)


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
        rows = Rows(features, torch.arange(len(features), dtype=torch.int64))
        nothing, unit = features[:0], torch.zeros(1, dtype=torch.int64)
        nobody = SiteData(nothing, nothing[:, 0], unit[:0], unit, nothing)
        mean, variance = self.posterior.moments(nobody, None, rows, link=self.link)
        return mean, np.sqrt(variance)

    def export(self) -> list[tuple[SparsePosterior, Likelihood]]:
        """The one model and likelihood of GPyTorch.

        Raises:
            RunError: the model is no Gaussian process.
        """
        model = self.posterior.model
        if not isinstance(model, HierarchicalGP):
            raise RunError(
                f"{type(model).__name__} is no Gaussian process; with `sfvi.model` = 'gp' it is. Use `predict`"
            )
        return [export(model, self.posterior.q_global)]


def saved_model(saved: Posterior, names: tuple[str, ...], *, link: bool = False) -> NewSite:
    """The posterior of a finished run, on the scale of an observation or of the link function."""
    options = SFVIOptions.model_validate({"objective": "stochastic", **saved.model["structure"]})
    columns = options.columns(names)
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    model = model_at(options, ModelSection.model_validate(dict(saved.model["model"])), len(columns), arrays)
    return NewSite(StructuredPosterior(model, GlobalPosterior.of(arrays), options.prediction_draws), columns, link)


def exact_site(
    config: RunConfig, preparation: Preparation, site: RawSite, arrays: Mapping[str, np.ndarray]
) -> ExactDeviation:
    """The rows of a site under the model at some parameters, for SFVI in closed form."""
    model, rows = model_and_rows(config, preparation, site, arrays)
    kind = ExactDeviation if config.model.likelihood == "gaussian" else PseudoObserved
    return kind(cast(ShapedGP, model), rows.features, rows.targets)


def site_model(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """The same with the local posterior of a site; None where its state is about other rows or another run.

    In closed form the site keeps no state: its rows are enough, also those of a site that took no part.
    """
    if run.posterior is None:
        return None
    options = cast(SFVIOptions, config.options)
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    preparation = Preparation.from_wire(arrays, json.dumps(run.posterior.schema))
    if options.in_closed_form(config.model):
        exact, shared = exact_site(config, preparation, site, arrays), GlobalPosterior.of(arrays)

        def predict_exactly(inputs: Array) -> tuple[Array, Array]:
            mean, variance = exact.predict(torch.from_numpy(inputs), shared)
            return mean.numpy(), variance.sqrt().numpy()

        return predict_exactly
    model, rows = model_and_rows(config, preparation, site, arrays)
    q_global, start = GlobalPosterior.of(arrays), initial_local(model, rows, options, seed=0)
    q_local = decode(SiteMemory, state).posterior(rows, start, q_global.mean, run.metrics.rounds)
    if q_local is None:
        return None
    posterior = StructuredPosterior(model, q_global, options.prediction_draws)

    def predict(inputs: Array) -> tuple[Array, Array]:
        mean, variance = posterior.moments(rows, q_local, rows_of(preparation, inputs, options))
        return mean, np.sqrt(variance)

    return predict
