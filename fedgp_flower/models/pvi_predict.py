"""Prediction from a partitioned posterior: a mixture over draws of (Z, β), the same draws wherever it is made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from fedgp_flower.config import ModelSection
from fedgp_flower.gaussian import DiagonalGaussian
from fedgp_flower.models import pvi_arrays as wire
from fedgp_flower.models.hierarchical import Draws, Latent, Latents, Point, SparseModel, draw, predict
from fedgp_flower.shapes import Array


def random_source(*words: object) -> torch.Generator:
    """A generator derived from words such as (seed, purpose, site, round)."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def prediction_draws(latents: Latents, model: SparseModel, *, num_samples: int, seed: int) -> Draws:
    """Draws of (Z, β) ~ q that depend on the seed alone; a single one where both are points."""
    if isinstance(latents.inducing, Point) and isinstance(latents.hyper, Point):
        num_samples = 1
    return draw(latents, num_samples, model.num_inputs, random_source(seed, "prediction"))


def pvi_predictor(
    arrays: wire.Arrays, section: ModelSection, *, num_samples: int, seed: int
) -> Callable[[Array], tuple[Array, Array]]:
    """Mean and sd of a noisy observation at standardised inputs [N, D], from the arrays of a saved posterior."""
    model = sparse_model(arrays, section)
    latents = Latents(_latent(arrays, "inducing.locations"), _latent(arrays, "hyper"))
    draws = prediction_draws(latents, model, num_samples=num_samples, seed=seed)
    factors = wire.factors_of(arrays, "factor")

    def standardised(inputs: Array) -> tuple[Array, Array]:
        mixture = predict(model, draws, factors, torch.from_numpy(inputs))
        return mixture.mean().numpy(), mixture.variance().sqrt().numpy()

    return standardised


def sparse_model(arrays: wire.Arrays, section: ModelSection) -> SparseModel:
    """The model of a saved posterior."""
    return wire.sparse_model(section, np.shape(arrays["inducing.locations.mean"])[-1])


def _latent(arrays: wire.Arrays, name: str) -> Latent:
    mean = torch.as_tensor(np.array(arrays[f"{name}.mean"], dtype=np.float64)).flatten()
    if f"{name}.scale" not in arrays:
        return Point(mean)
    scale = torch.as_tensor(np.array(arrays[f"{name}.scale"], dtype=np.float64)).flatten()
    return DiagonalGaussian.from_moments(mean, scale.square())
