"""Prediction from a saved partitioned posterior, and what forgetting a site changed.

A prediction is a mixture over draws of (Z, β), the same draws wherever it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from gpytorch.likelihoods import Likelihood

from fedgp_flower.gp.gaussian import Gaussian, NaturalGaussian
from fedgp_flower.gp.models import WhitenedGP, WhitenedPosterior
from fedgp_flower.methods.pvi.messages import LATENTS, Marginals
from fedgp_flower.methods.pvi.model import Draws, Factor, SparseModel, factors_of, predict, prediction_draws
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.saved import SAVED_LATENTS, read_factors, read_marginal
from fedgp_flower.methods.sparse_posterior import SavedSparseGP
from fedgp_flower.methods.sparse_posterior import saved_model as saved_sparse_gp
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import Array, NamedArrays

if TYPE_CHECKING:
    from fedgp_flower.outcome import Posterior
    from fedgp_flower.run.artefacts import Run


@dataclass(frozen=True, slots=True)
class SavedFactors:
    """The factors of all sites, and the draws of (Z, β) that predict."""

    draws: Draws
    factors: Sequence[Factor]

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and sd of a noisy observation [N] at standardised inputs [N, D]."""
        mixture = predict(self.draws, self.factors, torch.from_numpy(inputs))
        return mixture.mean().numpy(), mixture.variance().sqrt().numpy()

    @torch.no_grad()
    def export(self) -> list[tuple[WhitenedGP, Likelihood]]:
        """A model and likelihood of GPyTorch for every draw, in evaluation mode and standardised coordinates."""
        draws, exported = self.draws, []
        q, model = draws.product(self.factors), draws.model
        for s, hyper in enumerate(draws.likelihood_hyper):
            gp = WhitenedGP(model.kernel.at(draws.kernel_hyper[s]), draws.inducing[s], model.jitter)
            covariance = torch.cholesky_inverse(q.chol[s])  # the inverse is the answer here
            gp = gp.hold(WhitenedPosterior(q.mean[s], covariance)).requires_grad_(False)
            exported.append((gp, model.likelihood.to_gpytorch(hyper).requires_grad_(False).eval()))
        return exported


def saved_model(saved: Posterior, names: tuple[str, ...]) -> SavedFactors | SavedSparseGP:
    """The posterior of a finished run; at agreed Z and β it is that of a sparse GP."""
    if saved.model["family"] == "sparse":
        return saved_sparse_gp(saved, names)
    section = {key: saved.model[key] for key in ("kernel", "ard", "jitter", "likelihood")}
    num_inputs = saved.arrays["inducing.locations.mean"].shape[-1]
    model = SparseModel(ModelSection.model_validate(section), num_inputs)
    q = Marginals(*(read_marginal(saved.arrays, name) for name in LATENTS))
    factors, tied = read_factors(saved.arrays)
    draws = prediction_draws(q, model, int(saved.model["samples"]), int(saved.model["seed"]))
    return SavedFactors(draws, factors_of(factors, tied=tied))


# ---- What forgetting a site changed ---------------------------------------------------------------------------------


def changes(before: Run, after: Run) -> dict[str, object]:
    """``divergence``, KL(after ‖ before) in nats by part of q, and ``remains``, what may still depend on the site."""
    divergence = {}
    if before.saved is not None and after.saved is not None:
        old, new = _densities(before.saved.arrays), _densities(after.saved.arrays)
        divergence = {name: float(new[name].kl(old[name])) for name in old if name in new}
    return {"divergence": divergence, "remains": _remains(before)}


def _densities(arrays: NamedArrays) -> dict[str, Gaussian]:
    distributions = [name for name, saved in SAVED_LATENTS.items() if f"{saved}.scale" in arrays]
    densities = {name: read_marginal(arrays, name).natural().gaussian for name in distributions}
    if "inducing.covariance" in arrays:
        moments = (torch.from_numpy(arrays[f"inducing.{part}"]) for part in ("mean", "covariance"))
        densities["whitened"] = NaturalGaussian.from_moments(*moments)
    elif (whitened := read_factors(arrays)[0].whitened) is not None:
        eye = torch.eye(whitened.size, dtype=torch.float64)
        densities["whitened"] = whitened.gaussian * NaturalGaussian(torch.zeros_like(eye[0]), -0.5 * eye)
    return densities


def _remains(before: Run) -> list[str]:
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
