"""What predicts one unit: what a run saved, and what the unit keeps or its rows say."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from fedgp_flower.clients.numpy_client import Setting
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.methods.fedmgp.client import FedMGPClient
from fedgp_flower.methods.fedmgp.latents import Latents, Move, Posterior, still
from fedgp_flower.methods.fedmgp.messages import Known, View
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.typing import Array, NamedArrays


def site_model(
    run: RunData, config: RunConfig, site: RawSite, state: NamedArrays
) -> Callable[[Array], tuple[Array, Array]] | None:
    """Mean and sd [N] of a unit's observations at standardised inputs [N, D] (paper, Eq. 16); nothing is sent.

    It uses φ_m behind the unit's last report; a unit that took no part fits φ_m to its rows with g as it is. None where
    a unit that took part has lost what it kept.
    """
    if run.posterior is None:
        return None
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    model, told = run.posterior.model, run.posterior.model["known"].get(site.site)
    if told is not None and told["report"] and not state:
        return None
    inducing, scales, amplitudes = (arrays[f"latents.{name}"] for name in ("inducing", "scales", "amplitudes"))
    known = Known(0, still(scales.shape))
    if told is not None:
        known = Known(told["report"], Move(np.array(told["offset"], np.float64), told["stretch"], told["hold"]))
    q = Posterior(arrays["posterior.mean"], arrays["posterior.covariance"])
    view = View(Latents(inducing, scales, amplitudes, model["jitter"]), q, known)
    agreed = Preparation.from_wire(arrays, json.dumps(run.posterior.schema))
    kept = SiteState("", arrays={} if told is None else state)
    client = FedMGPClient(Setting(config, site, kept, agreed, run.metrics.rounds))

    def predicted(inputs: Array) -> tuple[Array, Array]:
        prediction = client.predict(view, inputs)
        return prediction.mean, np.sqrt(prediction.variance)

    return predicted
