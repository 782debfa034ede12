"""Predictions of a finished hierarchical GP at new sites and at sites with rows."""

from __future__ import annotations

import numpy as np

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.methods.at_site import Predict, at_site, predictor
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.client import HierarchicalClient
from fedgp_flower.methods.hierarchical_gp.smooth import shaped_gp
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.methods.sfvi.posterior import NewSite
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import NamedArrays


def saved_model(saved: Posterior, names: tuple[str, ...]) -> NewSite:
    """The posterior for a new site, whose smooth deviation has its prior."""
    arrays = {name: np.array(array) for name, array in saved.arrays.items()}
    model = shaped_gp(ModelSection.model_validate(dict(saved.model["model"])), arrays[SHARED])
    model.load_theta(arrays)
    return NewSite(model, GlobalPosterior.of(arrays), range(len(names)))


def site_model(run: Run, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict:
    """Predictor at any site with rows, also one that was not in the run."""
    client, saved = at_site(HierarchicalClient, run, config, site, state)
    return predictor(client, Parameters(saved.arrays))
