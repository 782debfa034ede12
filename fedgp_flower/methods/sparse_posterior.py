"""Prediction from the saved posterior of a federated sparse GP."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.gp.latent import LatentGP, sparse_gp
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.gp.sums import WhitenedPosterior
from fedgp_flower.gp.to_gpytorch import SparsePosterior, export
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.run.artefacts import Posterior


@dataclass(frozen=True, slots=True)
class SavedSparseGP:
    """Kernel, noise, Z and q(v)."""

    model: SparseGP
    whitened: WhitenedPosterior

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation [N] at standardised inputs [N, D]."""
        with torch.no_grad():
            mean, variance = self.model.predict(torch.from_numpy(inputs), self.whitened)
        return mean.numpy(), variance.sqrt().numpy()

    def export(self) -> list[tuple[SparsePosterior, Likelihood]]:
        """The one model and likelihood of GPyTorch."""
        return [export(self.model, self.whitened)]


class SavedLatentGP(SavedSparseGP):
    """The same behind another likelihood than a Gaussian one."""

    model: LatentGP

    def export(self) -> list[tuple[SparsePosterior, Likelihood]]:
        """The one model, with its constant mean, and likelihood of GPyTorch."""
        points = self.model.inducing_points.detach()
        model = SparsePosterior(deepcopy(self.model.kernel), points, self.whitened, self.model.jitter)
        model.mean_module = self.model.mean_of_gpytorch()
        return [(model, self.model.likelihood_of_gpytorch())]


def saved_model(saved: Posterior, names: tuple[str, ...]) -> SavedSparseGP:
    """The posterior of a finished run; positive parameters are saved as they are."""
    del names
    settings = {key: saved.model[key] for key in ("kernel", "ard", "jitter", "likelihood") if key in saved.model}
    section, arrays = ModelSection.model_validate(settings), dict(saved.arrays)
    for name, array in saved.arrays.items():
        if name.startswith(("kernel.", "likelihood.")):
            *path, leaf = name.split(".")
            arrays[".".join([*path, f"log_{leaf}"])] = np.log(array)
    model, whitened = sparse_gp(section, arrays), WhitenedPosterior.from_arrays(arrays)
    return SavedLatentGP(model, whitened) if isinstance(model, LatentGP) else SavedSparseGP(model, whitened)
