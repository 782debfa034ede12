"""Prediction from the saved posterior of a federated sparse GP."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods.times import Times
from fedgp_flower.gp.models import LatentGP, SparseGP, WhitenedPosterior, sparse_gp
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior


@dataclass(frozen=True, slots=True)
class SavedSparseGP:
    """The model of a run with its q(v)."""

    model: SparseGP
    whitened: WhitenedPosterior

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation [N] at standardised inputs [N, D]; for classes [N, C]."""
        with torch.no_grad():
            mean, variance = self.model.predict(torch.from_numpy(inputs), self.whitened)
        return mean.numpy(), variance.sqrt().numpy()

    def mean(self, inputs: Array) -> Array:
        """Mean of an observation [N]."""
        return self.model.means(torch.from_numpy(inputs), self.whitened).numpy()

    def export(self) -> list[tuple[SparseGP, Likelihood]]:
        """The model and its likelihood in GPyTorch."""
        model = deepcopy(self.model).hold(self.whitened).requires_grad_(False)
        return [(model, model.likelihood)]


class SavedLatentGP(SavedSparseGP):
    """The saved model with a likelihood that is not Gaussian."""

    model: LatentGP

    def mean(self, inputs: Array) -> Array:
        """Mean of an observation, which depends on the variance of f."""
        return self(inputs)[0]

    def quantiles(self, inputs: Array, levels: Sequence[float]) -> Array:
        """Quantiles of an observation [levels, N]."""
        mean, variance = self.model.latent(torch.from_numpy(inputs), self.whitened)
        return self.model.observed.quantiles(mean.numpy(), variance.numpy(), self.model.hyper.detach(), levels)

    def survival(self, inputs: Array, times: Sequence[float]) -> Array:
        """P(T > t) [times, N] for a time to an event; raise RunError for other targets."""
        if not isinstance(self.model.observed, Times):
            raise RunError("`times` are for a target that is a time to an event")
        moments = self.model.latent(torch.from_numpy(inputs), self.whitened)
        at = torch.tensor(times, dtype=torch.float64)[:, None]
        return self.model.observed.survival(at, *moments, self.model.hyper.detach()).detach().numpy()


def saved_model(saved: Posterior, names: tuple[str, ...]) -> SavedSparseGP:
    """The posterior of a finished run; parameters are saved without logarithms."""
    settings = {key: saved.model[key] for key in ("kernel", "ard", "jitter", "likelihood") if key in saved.model}
    section, arrays = ModelSection.model_validate(settings), dict(saved.arrays)
    for name, array in saved.arrays.items():
        if name.startswith(("kernel.", "likelihood.")):
            *path, leaf = name.split(".")
            arrays[".".join([*path, f"log_{leaf}"])] = np.log(array)
    mean, covariance = (torch.as_tensor(arrays[f"inducing.{part}"]).double() for part in ("mean", "covariance"))
    model = sparse_gp(section, arrays)
    return (SavedLatentGP if isinstance(model, LatentGP) else SavedSparseGP)(model, WhitenedPosterior(mean, covariance))
