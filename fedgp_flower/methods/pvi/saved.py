"""What a run saves of a partitioned posterior: arrays under their names, what each is, and the equation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.pvi.messages import Factors, Marginal, Marginals
from fedgp_flower.typing import NamedArrays

PREDICTION_DRAWS = 100
"""Draws of (Z, β) that predict: their error is a tenth of a standard deviation of the mixture's spread."""
EQUATION = (
    "For draws (Z, β) ~ q(Z) q(β), L Lᵀ = k(Z, Z) + jitter · k(z, z) · I, A = L⁻¹k(Z, V), B = I + A S⁻¹ Aᵀ, "
    "h = A S⁻¹ m (factor.values adds LᵀΛL and Lᵀη, factor.whitened Λ and η), a = L⁻¹k(Z, x): f(x) ~ N(aᵀB⁻¹h, "
    "k(x, x) − aᵀa + aᵀB⁻¹a). Predict with the mixture over draws of p(y | f). x and y are standardised by input.mean, "
    "input.scale, target.mean, target.scale; β are logarithms of standard deviations and lengthscales."
)
SAVED_LATENTS = {"inducing": "inducing.locations", "hyper": "hyper"}
"""Names of Z and β in messages and in files."""
MEANINGS = {
    "inputs": "V, pseudo-inputs of all sites",
    "targets": "m, pseudo-targets",
    "root": "R, S⁻¹ = R², over σ² where tied",
    "eta1": "first natural parameter of the product of factors",
    "eta2": "second natural parameter of the product of factors",
}
POINTS = "factor.points-0."


def lengthscales_of(hyper: Marginal, names: Sequence[str]) -> tuple[NamedArrays, NamedArrays | None]:
    """By part of the kernel, means of the logarithms of lengthscales under q(β), and standard deviations if it has any.

    ``names`` are those of the entries of β.
    """
    parts: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        part, found, _ = name.partition("lengthscale")
        if found:
            parts.setdefault(f"kernel.{part.replace(' ', '.')}log_lengthscale", []).append(index)
    mean, variance = (each.numpy() for each in hyper.moments())
    scale = None if hyper.value is not None else {part: np.sqrt(variance[at]) for part, at in parts.items()}
    return {part: mean[at] for part, at in parts.items()}, scale


def saved_arrays(
    q: Marginals, factors: Factors, num_inputs: int, names: Sequence[str], *, tied: bool
) -> tuple[NamedArrays, dict[str, str]]:
    """Arrays of the saved posterior, and what each is; ``names`` are those of β."""
    arrays: NamedArrays = {}
    meanings: dict[str, str] = {}
    words = ("Z, inducing inputs", f"β, log hyperparameters: {', '.join(names)}")
    shapes = ((-1, num_inputs), (-1,))
    for name, marginal, word, shape in zip(SAVED_LATENTS.values(), (q.inducing, q.hyper), words, shapes, strict=True):
        mean, variance = (part.numpy().reshape(shape) for part in marginal.moments())
        arrays[f"{name}.mean"], meanings[f"{name}.mean"] = mean, f"mean of q of {word}"
        if marginal.value is None:
            arrays[f"{name}.scale"], meanings[f"{name}.scale"] = np.sqrt(variance), f"sd of q of {word}"
    for name, array in encode(factors).items():
        key = f"factor.{name}".replace("factor.points.", POINTS)
        arrays[key], meanings[key] = array, MEANINGS[name.rpartition(".")[2]]
    if factors.points is not None:
        arrays[f"{POINTS}tied"] = np.array(tied)
        meanings[f"{POINTS}tied"] = "whether pseudo-noise scales with σ²"
    return arrays, meanings


def read_marginal(arrays: Mapping[str, NDArray[np.generic]], name: str) -> Marginal:
    """q(Z) or q(β) of a saved posterior, by its name in messages."""
    saved = SAVED_LATENTS[name]
    mean = torch.tensor(arrays[f"{saved}.mean"]).double().flatten()
    if f"{saved}.scale" not in arrays:
        return Marginal(value=mean.numpy())
    scale = torch.tensor(arrays[f"{saved}.scale"]).double().flatten()
    return Marginal.of(DiagonalGaussian.from_moments(mean, scale.square()))


def read_factors(arrays: Mapping[str, NDArray[np.generic]]) -> tuple[Factors, bool]:
    """The factors of u of a saved posterior, and whether their noise is tied."""
    parts = {name.replace(POINTS, "factor.points."): array for name, array in arrays.items()}
    tied = bool(parts.pop("factor.points.tied", True))
    named = {name.removeprefix("factor."): array for name, array in parts.items() if name.startswith("factor.")}
    return decode(Factors, named), tied
