"""What a run saves of a partitioned posterior: arrays under their names, what each is, and the equation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedgp_flower.methods.pvi.messages import Marginal, Predictive
from fedgp_flower.methods.pvi.model import location_scale, sparse_model
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import NamedArrays

PREDICTION_DRAWS = 100
"""Draws of (Z, β) that predict: their error is a tenth of a standard deviation of the mixture's spread."""
EQUATION = (
    "For draws (Z, β) ~ q(Z) q(β), L Lᵀ = k(Z, Z) + jitter · k(z, z) · I, A = L⁻¹k(Z, V), B = I + A S⁻¹ Aᵀ, "
    "h = A S⁻¹ m (factor.values adds LᵀΛL and Lᵀη), a = L⁻¹k(Z, x): f(x) ~ N(aᵀB⁻¹h, "
    "k(x, x) − aᵀa + aᵀB⁻¹a). Predict with the mixture over draws of p(y | f). x and y are standardised by input.mean, "
    "input.scale, target.mean, target.scale; β are logarithms of standard deviations and lengthscales."
)
LATENTS = {"inducing.locations": "Z, inducing inputs", "hyper": "β, log hyperparameters"}
POINTS = {
    "inputs": "V, pseudo-inputs of all sites",
    "targets": "m, pseudo-targets",
    "root": "R, S⁻¹ = R², over σ² where tied",
}
GAUSSIAN = {
    "eta1": "first natural parameter of the product of factors",
    "eta2": "second natural parameter of the product of factors",
}
POINTS_NAME = "factor.points-0"
Arrays = Mapping[str, NDArray[np.generic]]


def names_of(section: ModelSection, num_inputs: int) -> list[str]:
    """The quantities whose logarithms are the entries of β, in their order."""
    likelihood = {"gaussian": ["noise sd"], "student-t": ["scale", "degrees of freedom − 2"]}
    return [*sparse_model(section, num_inputs).kernel.names, *likelihood.get(section.likelihood, [])]


def lengthscales_of(hyper: Marginal, names: Sequence[str]) -> tuple[NamedArrays, NamedArrays | None]:
    """By part of the kernel, means of the logarithms of lengthscales under q(β), and standard deviations if it has any.

    Args:
        hyper: q(β).
        names: Of its entries, by :func:`names_of`.
    """
    parts: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        part, found, _ = name.partition("lengthscale")
        if found:
            parts.setdefault(f"kernel.{part.replace(' ', '.')}log_lengthscale", []).append(index)
    moments = (each.numpy() for each in location_scale(hyper.latent()))
    mean, scale = ({part: each[at] for part, at in parts.items()} for each in moments)
    return mean, None if hyper.value is not None else scale


def saved_arrays(
    predictive: Predictive, num_inputs: int, names: Sequence[str], *, tied: bool
) -> tuple[NamedArrays, dict[str, str]]:
    """Arrays of the saved posterior, and what each is; ``names`` are those of β."""
    arrays: NamedArrays = {}
    meanings: dict[str, str] = {}

    def add(name: str, array: NDArray[np.generic], words: str) -> None:
        arrays[name], meanings[name] = array, words

    assert predictive.q is not None
    shapes = {"inducing.locations": (-1, num_inputs), "hyper": (-1,)}
    latents = LATENTS | {"hyper": f"{LATENTS['hyper']}: {', '.join(names)}"}
    for (name, words), marginal in zip(latents.items(), (predictive.q.inducing, predictive.q.hyper), strict=True):
        mean, scale = (part.numpy().reshape(shapes[name]) for part in location_scale(marginal.latent()))
        add(f"{name}.mean", mean, f"mean of q of {words}")
        if marginal.value is None:
            add(f"{name}.scale", scale, f"sd of q of {words}")
    if predictive.factors.points is not None:
        for name, words in POINTS.items():
            add(f"{POINTS_NAME}.{name}", getattr(predictive.factors.points, name), words)
        add(f"{POINTS_NAME}.tied", np.array(tied), "whether pseudo-noise scales with σ²")
    if predictive.factors.values is not None:
        for name, words in GAUSSIAN.items():
            add(f"factor.values.{name}", getattr(predictive.factors.values, name), words)
    return arrays, meanings
