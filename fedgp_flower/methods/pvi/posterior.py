"""Prediction from a partitioned posterior: a mixture over draws of (Z, β), the same draws wherever it is made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.gp.sums import WhitenedPosterior
from fedgp_flower.gp.to_gpytorch import SparsePosterior
from fedgp_flower.methods.pvi.factors import Factor, product, view
from fedgp_flower.methods.pvi.hierarchical import Draws, Latents, Point, SparseModel, draw, predict, sparse_model
from fedgp_flower.methods.pvi.saved import saved_factors, saved_latents
from fedgp_flower.methods.sparse_posterior import SavedSparseGP
from fedgp_flower.methods.sparse_posterior import saved_model as saved_sparse_gp
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.run.artefacts import Posterior


@dataclass(frozen=True, slots=True)
class SavedFactors:
    """The factors of all sites, and the draws of (Z, β) that predict."""

    model: SparseModel
    draws: Draws
    factors: Sequence[Factor]

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation [N] at standardised inputs [N, D]."""
        mixture = predict(self.model, self.draws, self.factors, torch.from_numpy(inputs))
        return mixture.mean().numpy(), mixture.variance().sqrt().numpy()

    @torch.no_grad()
    def export(self) -> list[tuple[SparsePosterior, Likelihood]]:
        """A model and likelihood of GPyTorch for every draw, in evaluation mode and standardised coordinates."""
        model, draws = self.model, self.draws
        density = product(view(model.geometry(draws), self.factors), self.factors).density()
        exported = []
        for s, own in enumerate(model.own_hyper(draws)):
            kernel = model.kernel.at(draws.hyper[s, : model.kernel.num_hyper])
            covariance = torch.cholesky_inverse(density.chol[s])  # the inverse is the answer here
            q = WhitenedPosterior(density.mean[s], covariance)
            likelihood = model.likelihood.to_gpytorch(own).requires_grad_(False).eval()
            exported.append((SparsePosterior(kernel, draws.inducing[s], q, model.jitter), likelihood))
        return exported


def saved_model(saved: Posterior, names: tuple[str, ...]) -> SavedFactors | SavedSparseGP:
    """The posterior of a finished run; at agreed Z and β it is that of a sparse GP."""
    if saved.model["family"] == "sparse":
        return saved_sparse_gp(saved, names)
    section = {key: saved.model[key] for key in ("kernel", "ard", "jitter", "likelihood")}
    num_inputs = saved.arrays["inducing.locations.mean"].shape[-1]
    model = sparse_model(ModelSection.model_validate(section), num_inputs)
    number, seed = int(saved.model["samples"]), int(saved.model["seed"])
    draws = prediction_draws(saved_latents(saved.arrays), model, num_samples=number, seed=seed)
    return SavedFactors(model, draws, saved_factors(saved.arrays))


def random_source(*words: object) -> torch.Generator:
    """A generator derived from words such as (seed, purpose, site, round)."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def prediction_draws(latents: Latents, model: SparseModel, *, num_samples: int, seed: int) -> Draws:
    """Draws of (Z, β) ~ q that depend on the seed alone; a single one where both are points."""
    if isinstance(latents.inducing, Point) and isinstance(latents.hyper, Point):
        num_samples = 1
    return draw(latents, num_samples, model.num_inputs, random_source(seed, "prediction"))
