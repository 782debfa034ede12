"""What predicts one unit: what a run saved, and what the unit keeps or its rows say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from fedgp_flower.clients.numpy_client import Prediction, Setting
from fedgp_flower.clients.state import SiteState
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.methods.fedmgp.client import FedMGPClient
from fedgp_flower.methods.fedmgp.deviating_client import DeviatingClient
from fedgp_flower.methods.fedmgp.latents import Latents, Move, Posterior
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS, Known, TrendView, View
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import Array, NamedArrays

Predict: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Mean and sd [N] of an observation at standardised inputs [N, D]."""


def site_model(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict | None:
    """Personalised prediction at a unit, as it predicted its held-out rows; nothing is sent.

    None where a unit that took part has lost what it kept.
    """
    if run.posterior is None:
        return None
    arrays, model = {name: np.array(array) for name, array in run.posterior.arrays.items()}, run.posterior.model
    agreed, numbers = (
        Preparation.from_wire(arrays, json.dumps(run.posterior.schema)),
        (run.metrics.rounds, run.metrics.communications),
    )
    told = model.get("known", {}).get(site.site)
    if told is not None and told["report"] and not state:
        return None
    constants = {name: array for name, array in arrays.items() if name == PSEUDO_INPUTS}
    setting = Setting(config, site, SiteState("", arrays=state if told else {}), agreed, *numbers, constants)
    return FAMILIES[model["family"]](setting, arrays, model)


def view_of_latents(setting: Setting, arrays: NamedArrays, model: Mapping[str, Any]) -> Predict:
    """The unit's view of the latent functions (paper, Eq. 16), with φ_m behind the unit's last report.

    A unit that took no part fits φ_m to its rows with g as it is.
    """
    inducing, scales, amplitudes = (arrays[f"latents.{name}"] for name in ("inducing", "scales", "amplitudes"))
    told = model["known"].get(setting.site.site)
    known = Known(0, 0, Move(np.zeros_like(scales), 1.0, "gain")) if told is None else Known.read(told)
    latents = Latents(inducing, scales, amplitudes, model["jitter"])
    view = View(latents, Posterior(arrays["posterior.mean"], arrays["posterior.covariance"]), known)
    client = FedMGPClient(setting)
    return lambda inputs: _moments(client.predict(view, inputs))


def deviation(setting: Setting, arrays: NamedArrays, model: Mapping[str, Any]) -> Predict:
    """The shared curve and the deviation that the unit's rows show, whether it took part or not."""
    del model
    view, client = TrendView(arrays, arrays["factors"]), DeviatingClient(setting)
    return lambda inputs: _moments(client.predict(view, inputs))


FAMILIES: Mapping[str, Callable[[Setting, NamedArrays, Mapping[str, Any]], Predict]] = {
    "shared-latents": view_of_latents,
    "deviations": deviation,
}
"""By the family that a posterior is of."""


def _moments(prediction: Prediction) -> tuple[Array, Array]:
    return prediction.mean, np.sqrt(prediction.variance)
