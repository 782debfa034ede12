"""Prediction at a site of a finished run, by the client that trained there; nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from fedgp_flower.clients.numpy_client import Setting, SiteClient
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.typing import Array, NamedArrays

C = TypeVar("C", bound=SiteClient)
Predict: TypeAlias = Callable[[Array], tuple[Array, Array]]


def at_site(kind: type[C], run: Run, config: RunConfig, site: RawSite, state: NamedArrays) -> tuple[C, Posterior]:
    """A client with the rows and the final state of a site, and the run's posterior with writable arrays."""
    assert run.saved is not None
    known = run.saved.at_site()
    saved = replace(known, arrays={name: np.array(array) for name, array in known.arrays.items()})
    agreed = Preparation.from_wire(saved.arrays, json.dumps(saved.schema))
    return kind(Setting(config, site, SiteState("", arrays=state), agreed, run.metrics.rounds, saved.arrays)), saved


def predictor(client: SiteClient, request: Any) -> Predict:
    """Return the client's mean and sd of a noisy observation as a function of standardised inputs [N, D]."""

    def predict(inputs: Array) -> tuple[Array, Array]:
        found = client.predict(request, inputs)
        return found.mean, np.sqrt(found.variance)

    return predict
