"""Predictions and report panels of a finished deep-kernel run."""

from __future__ import annotations

import numpy as np
import torch

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite
from fedgp_flower.methods.at_site import Predict, at_site, predictor
from fedgp_flower.methods.deep_kernel.client import DeepKernelClient
from fedgp_flower.methods.deep_kernel.model import DeepKernel, DeepPosterior, HeadPosterior
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.report import Panel, html_table
from fedgp_flower.typing import NamedArrays

HEADS = ("heads.mean", "heads.covariance")
"""Names of saved arrays; all others are weights of the network."""


def weights_of(saved: Posterior) -> NamedArrays:
    """The weights of the network."""
    return {n: np.array(array) for n, array in saved.arrays.items() if n.startswith(("network.", "observed."))}


def saved_model(saved: Posterior, names: tuple[str, ...]) -> DeepPosterior:
    """The posterior of a finished run for a new site."""
    options = DeepKernelOptions.model_validate(saved.model["deep"]).of_classes(int(saved.model["classes"]))
    section = ModelSection.model_validate({"likelihood": saved.likelihood})
    model = DeepKernel(options, section, len(names)).load(weights_of(saved))
    mean, covariance = (torch.from_numpy(np.array(saved.arrays[name])) for name in HEADS)
    return DeepPosterior(model, mean, covariance, float(saved.model["share"]))


def site_model(run: Run, config: RunConfig, site: RawSite, state: NamedArrays) -> Predict:
    """Predictor with the personal head of a site, from its training rows."""
    client, saved = at_site(DeepKernelClient, run, config, site, state)
    mean, covariance = (saved.arrays[name] for name in HEADS)
    return predictor(client, HeadPosterior(weights_of(saved), mean, covariance, float(saved.model["share"])))


def panels(run: Run) -> list[Panel]:
    """Table of the evidence by ρ."""
    details = run.metrics.method_details
    rows = [
        (f"{share:g}", f"{value:,.1f}") for share, value in zip(details["shares"], details["evidence"], strict=True)
    ]
    caption = (
        "Share ρ of personal heads in the prior variance, and the log evidence of all training rows, in nats. The run"
        f" uses ρ = {details['share']:g}, with the highest evidence. At 0 all sites have the same head."
    )
    return [Panel("Personal heads", html_table(("ρ", "log evidence"), rows), caption)]
