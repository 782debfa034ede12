"""Prediction from a saved PVI posterior: a mixture over draws of (Z, β) from a fixed seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from numpy.typing import NDArray

from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.gp.models import WhitenedGP, WhitenedPosterior
from fedgp_flower.messages import decode
from fedgp_flower.methods.pvi.messages import LATENTS, POINTS, SAVED_LATENTS, Factors, LatentFactor, Marginals
from fedgp_flower.methods.pvi.model import Draws, Factor, SparseModel, factors_of, predict, prediction_draws
from fedgp_flower.methods.sparse_posterior import SavedSparseGP
from fedgp_flower.methods.sparse_posterior import saved_model as saved_sparse_gp
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior


def read_marginal(arrays: Mapping[str, NDArray[np.generic]], name: str) -> LatentFactor:
    """q(Z) or q(β) of a saved posterior, by its name in messages."""
    saved = SAVED_LATENTS[name]
    mean = torch.tensor(arrays[f"{saved}.mean"]).double().flatten()
    if f"{saved}.scale" not in arrays:
        return LatentFactor(value=mean.numpy())
    scale = torch.tensor(arrays[f"{saved}.scale"]).double().flatten()
    return LatentFactor.of(Gaussian.from_moments(mean, scale.square()))


def read_factors(arrays: Mapping[str, NDArray[np.generic]]) -> tuple[Factors, bool]:
    """The factors of u of a saved posterior, and whether their noise is tied."""
    parts = {name.replace(POINTS, "factor.points."): array for name, array in arrays.items()}
    tied = bool(parts.pop("factor.points.tied", True))
    named = {name.removeprefix("factor."): array for name, array in parts.items() if name.startswith("factor.")}
    return decode(Factors, named), tied


@dataclass(frozen=True, slots=True)
class SavedFactors:
    """The factors of all sites, and the draws of (Z, β)."""

    draws: Draws
    factors: Sequence[Factor]

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation [N] at standardised inputs [N, D]."""
        mixture = predict(self.draws, self.factors, torch.from_numpy(inputs))
        return mixture.mean().numpy(), mixture.variance().sqrt().numpy()

    @torch.no_grad()
    def export(self) -> list[tuple[WhitenedGP, Likelihood]]:
        """GPyTorch model and likelihood of every draw, in evaluation mode and standardised coordinates."""
        draws, exported = self.draws, []
        (mean, covariance), model = draws.product(self.factors).moments(), draws.model
        for s, hyper in enumerate(draws.likelihood_hyper):
            gp = WhitenedGP(model.kernel.at(draws.kernel_hyper[s]), draws.inducing[s], model.jitter)
            gp = gp.hold(WhitenedPosterior(mean[s], covariance[s])).requires_grad_(False)
            exported.append((gp, model.likelihood.to_gpytorch(hyper).requires_grad_(False).eval()))
        return exported


def saved_model(saved: Posterior, names: tuple[str, ...]) -> SavedFactors | SavedSparseGP:
    """The posterior of a finished run; a sparse GP if Z and β were agreed."""
    if saved.model["family"] == "sparse":
        return saved_sparse_gp(saved, names)
    section = {key: saved.model[key] for key in ("kernel", "ard", "jitter", "likelihood")}
    num_inputs = saved.arrays["inducing.locations.mean"].shape[-1]
    model = SparseModel(ModelSection.model_validate(section), num_inputs)
    q = Marginals(*(read_marginal(saved.arrays, name) for name in LATENTS))
    factors, tied = read_factors(saved.arrays)
    draws = prediction_draws(q, model, int(saved.model["seed"]), int(saved.model["samples"]))
    return SavedFactors(draws, factors_of(factors, tied=tied))
