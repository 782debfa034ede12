"""Prediction from a saved partitioned posterior, and what forgetting a site changed.

A prediction is a mixture over draws of (Z, β), the same draws wherever it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.gp.models import WhitenedGP, WhitenedPosterior
from fedgp_flower.methods.pvi.messages import Factors, NaturalParameters, PseudoPoints
from fedgp_flower.methods.pvi.model import (
    Draws,
    Factor,
    Latent,
    Latents,
    Point,
    SparseModel,
    predict,
    prediction_draws,
    product,
    sparse_model,
)
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.saved import GAUSSIAN, LATENTS, POINTS, POINTS_NAME, Arrays
from fedgp_flower.methods.sparse_posterior import SavedSparseGP
from fedgp_flower.methods.sparse_posterior import saved_model as saved_sparse_gp
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior
    from fedgp_flower.run.artefacts import RunData


def saved_latents(arrays: Arrays) -> Latents:
    """q(Z) and q(β) of a saved posterior."""
    return Latents(*(_latent(arrays, name) for name in LATENTS))


def _latent(arrays: Arrays, name: str) -> Latent:
    mean = torch.as_tensor(np.array(arrays[f"{name}.mean"], dtype=np.float64)).flatten()
    if f"{name}.scale" not in arrays:
        return Point(mean)
    scale = torch.as_tensor(np.array(arrays[f"{name}.scale"], dtype=np.float64)).flatten()
    return DiagonalGaussian.from_moments(mean, scale.square())


def saved_factors(arrays: Arrays) -> list[Factor]:
    """The factors of u of a saved posterior."""
    points = None
    if f"{POINTS_NAME}.inputs" in arrays:
        points = PseudoPoints(*(arrays[f"{POINTS_NAME}.{name}"] for name in POINTS))
    gaussians = {
        kind: NaturalParameters(*(arrays[f"factor.{kind}.{name}"] for name in GAUSSIAN))
        for kind in ("values", "whitened")
        if f"factor.{kind}.eta1" in arrays
    }
    return Factors(points, **gaussians).factors(tied=bool(arrays.get(f"{POINTS_NAME}.tied", True)))


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
    def export(self) -> list[tuple[WhitenedGP, Likelihood]]:
        """A model and likelihood of GPyTorch for every draw, in evaluation mode and standardised coordinates."""
        model, draws = self.model, self.draws
        density = product(model.geometry(draws), self.factors)[0].density()
        exported = []
        for s, hyper in enumerate(model.noise_hyper(draws)):
            kernel = model.kernel.at(draws.hyper[s, : model.kernel.num_hyper])
            covariance = torch.cholesky_inverse(density.chol[s])  # the inverse is the answer here
            q = WhitenedPosterior(density.mean[s], covariance)
            likelihood = model.likelihood.to_gpytorch(hyper).requires_grad_(False).eval()
            gp = WhitenedGP(kernel, draws.inducing[s], model.jitter).hold(q).requires_grad_(False)
            exported.append((gp, likelihood))
        return exported


def saved_model(saved: Posterior, names: tuple[str, ...]) -> SavedFactors | SavedSparseGP:
    """The posterior of a finished run; at agreed Z and β it is that of a sparse GP."""
    if saved.model["family"] == "sparse":
        return saved_sparse_gp(saved, names)
    section = {key: saved.model[key] for key in ("kernel", "ard", "jitter", "likelihood")}
    num_inputs = saved.arrays["inducing.locations.mean"].shape[-1]
    model = sparse_model(ModelSection.model_validate(section), num_inputs)
    draws = prediction_draws(saved_latents(saved.arrays), model, int(saved.model["samples"]), int(saved.model["seed"]))
    return SavedFactors(model, draws, saved_factors(saved.arrays))


# ---- What forgetting a site changed ---------------------------------------------------------------------------------


def changes(before: RunData, after: RunData) -> dict[str, Any]:
    """``divergence``, KL(after ‖ before) in nats by part of q, and ``remains``, what may still depend on the site."""
    divergence = {}
    if before.posterior is not None and after.posterior is not None:
        old, new = _densities(before.posterior.arrays), _densities(after.posterior.arrays)
        divergence = {name: float(new[name].kl(old[name])) for name in old if name in new}
    return {"divergence": divergence, "remains": _remains(before)}


def _densities(arrays: NamedArrays) -> dict[str, Gaussian]:
    densities: dict[str, Gaussian] = {}
    for name, saved in (("inducing", "inducing.locations"), ("hyper", "hyper")):
        if f"{saved}.scale" in arrays:
            latent = _latent(arrays, saved)
            assert isinstance(latent, DiagonalGaussian)
            densities[name] = latent
    if "inducing.covariance" in arrays:
        moments = (torch.from_numpy(arrays[f"inducing.{part}"]) for part in ("mean", "covariance"))
        densities["whitened"] = NaturalGaussian.from_moments(*moments)
    if "factor.whitened.eta2" in arrays:
        eta2 = arrays["factor.whitened.eta2"]
        whitened = {"eta1": arrays["factor.whitened.eta1"], "eta2": eta2 - 0.5 * np.eye(len(eta2))}
        densities["whitened"] = NaturalGaussian.from_arrays(whitened)
    return densities


def _remains(before: RunData) -> list[str]:
    config = parse_config(before.config)
    options = cast(PVIOptions, config.options)
    remains = ["the standardisation and the first inducing inputs, which all sites agreed on"]
    if options.inducing == "average":
        remains.append("the inducing inputs, an average that the site took part in")
    if options.agrees:
        remains.append("inducing inputs and hyperparameters, which all sites agreed on")
    if not (options.linear and config.model.likelihood == "gaussian"):
        remains.append("factors of other sites, fitted beside the site's; further visits let them settle")
    return remains
