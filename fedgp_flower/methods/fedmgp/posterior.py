"""What predicts one unit: what a run saved, and what the unit keeps or its rows say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from fedgp_flower.clients.numpy_client import Prediction, Setting
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.methods.fedmgp.client import FedMGPClient
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior, still
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS, Known, View
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.typing import Array, NamedArrays

UnitPredictor: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Mean and sd [N] of an observation at standardised inputs [N, D]."""


def site_model(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> UnitPredictor | None:
    """The unit's view of the latent functions (paper, Eq. 16), with φ_m behind its last report; nothing is sent.

    A unit that took no part fits φ_m to its rows with g as it is. None where a unit that took part has lost what it
    kept.
    """
    if run.posterior is None:
        return None
    arrays, model = run.posterior.arrays, run.posterior.model
    inducing, scales, amplitudes = (arrays[f"latents.{name}"] for name in ("inducing", "scales", "amplitudes"))
    latents = Latents(inducing, scales, amplitudes, model["jitter"])
    told = model["known"].get(site.site)
    if told is not None and told["report"] and not state:
        return None
    known = Known(0, 0, still(scales.shape)) if told is None else Known.read(told)
    view = View(latents, Posterior(arrays["posterior.mean"], arrays["posterior.covariance"]), known)
    client = FedMGPClient(setting(run, config, site, state if told else {}))
    return lambda inputs: standard_deviations(client.predict(view, inputs))


def setting(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> Setting:
    """What a client of a finished run is made of."""
    assert run.posterior is not None
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    agreed = Preparation.from_wire(arrays, json.dumps(run.posterior.schema))
    constants = {name: array for name, array in arrays.items() if name == PSEUDO_INPUTS}
    numbers = run.metrics.rounds, run.metrics.communications
    return Setting(config, site, SiteState("", arrays=state), agreed, *numbers, constants)


def standard_deviations(prediction: Prediction) -> tuple[Array, Array]:
    """Mean and sd of a prediction."""
    return prediction.mean, np.sqrt(prediction.variance)
