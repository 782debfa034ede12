"""Prediction from features and a head: of a site that nobody has seen, or of one with its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedgp_flower.data.sites import RawSite
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.methods.deep_kernel.mathematics import Covariances, Means, latent
from fedgp_flower.methods.deep_kernel.messages import HeadPosterior
from fedgp_flower.methods.deep_kernel.model import DeepKernel
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets

if TYPE_CHECKING:
    from fedgp_flower.config import RunConfig
    from fedgp_flower.run.artefacts import Posterior, RunData

HEADS = ("heads.mean", "heads.covariance")
"""Names of saved arrays; all others are weights of the network."""


@dataclass(frozen=True, slots=True)
class DeepPosterior:
    """The network, and q(w) of the shared head; where ρ is 0, of any head."""

    model: DeepKernel
    mean: Means
    covariance: Covariances
    share: float
    """ρ."""

    @staticmethod
    def of(model: DeepKernel, sent: HeadPosterior) -> DeepPosterior:
        """From a message."""
        return DeepPosterior(model, torch.from_numpy(sent.mean), torch.from_numpy(sent.covariance), sent.share)

    @torch.no_grad()
    def personal(self, inputs: Rows, targets: Targets) -> DeepPosterior:
        """The head of a site with these rows."""
        own = self.model.sums(inputs, targets).personal(self.mean, self.covariance, self.share)
        return DeepPosterior(self.model, *own, 0.0)

    @torch.no_grad()
    def moments(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of an observation [N], or of indicators of classes [N, C]."""
        features = self.model.features(torch.from_numpy(inputs))
        spread = self.covariance + self.share * torch.eye(features.shape[1], dtype=features.dtype)
        mean, variance = self.model.observed.predict(*latent(features, self.mean, spread))
        return mean.numpy(), variance.numpy()

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an observation."""
        mean, variance = self.moments(inputs)
        return mean, np.sqrt(variance)


def saved_model(saved: Posterior, names: tuple[str, ...]) -> DeepPosterior:
    """The posterior of a finished run, for a site that nobody has seen."""
    options = DeepKernelOptions.model_validate(saved.model["deep"])
    section = ModelSection.model_validate({"likelihood": saved.likelihood})
    weights = {n: np.array(array) for n, array in saved.arrays.items() if n.startswith(("network.", "observed."))}
    model = DeepKernel(options, section, len(names)).load(weights)
    mean, covariance = (torch.from_numpy(np.array(saved.arrays[name])) for name in HEADS)
    return DeepPosterior(model, mean, covariance, float(saved.model["share"]))


def site_model(
    run: RunData, config: RunConfig, site: RawSite, state: NamedArrays
) -> Callable[[Array], tuple[Array, Array]] | None:
    """The same with the head of a site, from its training rows."""
    del state, config
    if run.posterior is None:
        return None
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    preparation = Preparation.from_wire(arrays, json.dumps(run.posterior.schema))
    rows = site.encode(preparation)
    shared = saved_model(run.posterior, tuple(preparation.names))
    return shared.personal(torch.from_numpy(rows.x), torch.from_numpy(rows.y))
