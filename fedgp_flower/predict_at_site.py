"""Prediction of new rows at a site that took part: a run's saved posterior, and what that site alone keeps.

The site's rows are read as in training, for its latents refer to them; nothing is sent.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedgp_flower.artefacts import read_run
from fedgp_flower.clients.base import Request
from fedgp_flower.clients.sfvi import SFVIClient
from fedgp_flower.clients.state import SiteState
from fedgp_flower.config import Value
from fedgp_flower.data.sites import load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.models.structured_prediction import global_posterior
from fedgp_flower.predict import Predictor
from fedgp_flower.records import RunData
from fedgp_flower.registry import parse_config
from fedgp_flower.shapes import Array

STATE = "site-state.safetensors"


def predictor_at(run: Path, site: str, *, data: Path | None = None, state_dir: Path | None = None) -> Predictor:
    """Ready to predict at a site as it predicted its own held-out rows.

    Args:
        run: Folder of a finished run of ``sfvi`` or ``sfvi-avg``.
        site: Id or label of the site.
        data: The site's own table; a simulated site needs none.
        state_dir: What its node configuration names; a simulated site has its folder in the run's.

    Raises:
        RunError: the run is of another method, or the site's state is missing or about other rows.
        DataError: the site's rows cannot be used.
    """
    found = read_run(run)
    if found.posterior is None or found.posterior.model.get("family") != "structured":
        raise RunError(f"{run} is a run of {found.metrics.method!r}; only 'sfvi' and 'sfvi-avg' predict at a site")
    node = _node(found, site, data)
    folder = run / "sites" / str(node.get("partition-id")) if state_dir is None else state_dir
    try:
        arrays = load_file(folder / STATE)
    except (FileNotFoundError, SafetensorError):
        raise RunError(f"{folder / STATE} is missing or damaged: it is what a site keeps with a `state-dir`") from None
    config = parse_config(found.config)
    client = SFVIClient(config, load_site(config, node), SiteState("", arrays=arrays))
    own, schema = {name: np.array(a) for name, a in found.posterior.arrays.items()}, json.dumps(found.posterior.schema)
    request = Request("predict", own, found.metrics.rounds, 0, {"schema": schema})
    if client.local_posterior(request, client.learner(request), global_posterior(own)) is None:
        raise RunError(f"{folder / STATE} is about other rows than those of site {site!r}, or of another run")

    def standardised(inputs: Array) -> tuple[Array, Array]:
        prediction = client.predict(request, inputs)
        return prediction.mean, np.sqrt(prediction.variance)

    return Predictor(Preparation.from_wire(own, schema), standardised, found.posterior.likelihood)


def _node(found: RunData, site: str, data: Path | None) -> dict[str, Value]:
    """The configuration of the node that the site was."""
    names = {str(row["site"]): str(row.get("label") or row["site"]) for row in found.metrics.per_site}
    chosen = next((key for key, label in names.items() if site in {key, label}), None)
    if data is not None:
        return {"data-path": str(data), "site": chosen or site}
    if chosen is None or not chosen.isdecimal():
        raise RunError(f"{site!r} is not a simulated site of {found.path}: name its table with `--site-data`")
    return {"partition-id": int(chosen), "num-partitions": found.metrics.sites}
