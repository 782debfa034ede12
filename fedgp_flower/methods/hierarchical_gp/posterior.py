"""The posterior of the hierarchical GP: for a site that nobody has seen, and at a site with its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from fedgp_flower.clients.numpy_client import Setting
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.client import HierarchicalClient, theta_of
from fedgp_flower.methods.hierarchical_gp.messages import HierarchicalView
from fedgp_flower.methods.hierarchical_gp.smooth import ShapedGP
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.methods.sfvi.posterior import NewSite
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.typing import Array, NamedArrays

Predict: TypeAlias = Callable[[Array], tuple[Array, Array]]


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewSite:
    """The smooth deviation of a site that nobody has seen has its prior."""
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    section = ModelSection.model_validate(dict(saved.model["model"]))
    model = ShapedGP(section, torch.from_numpy(arrays[SHARED]))
    model.load_theta(theta_of(arrays))
    return NewSite(model, GlobalPosterior.of(arrays), range(len(names)))


def site_model(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """Prediction at a site; its rows are enough, also those of a site that took no part."""
    del state
    if run.posterior is None:
        return None
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    agreed = Preparation.from_wire(arrays, json.dumps(run.posterior.schema))
    constants = {SHARED: arrays[SHARED]}
    client = HierarchicalClient(Setting(config, site, SiteState(""), agreed, run.metrics.rounds, constants))
    view = HierarchicalView(arrays, arrays.get("factors"))

    def predict(inputs: Array) -> tuple[Array, Array]:
        prediction = client.predict(view, inputs)
        return prediction.mean, np.sqrt(prediction.variance)

    return predict
