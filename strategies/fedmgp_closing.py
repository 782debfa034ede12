"""What a run of FedMGP leaves: the posterior of the shared latent functions, and facts for the report."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgp_flower.config import RunConfig
from fedgp_flower.latent import Latents, to_wire
from fedgp_flower.latent import Posterior as LatentPosterior
from strategies.closing import Posterior
from strategies.exact_q import is_flat
from strategies.wire import ArraySpec

if TYPE_CHECKING:
    from strategies.fedmgp import FedMGP

logger = logging.getLogger("fedgp")

MOST_CURVES = 12
"""Units whose curves are drawn."""
CURVE_POINTS = 161
CURVE = ("mean", "sd", "alone.mean", "alone.sd", "x", "y")

EQUATION = (
    "g_i ~ GP(0, a_i² exp(−½ (w − w')ᵀ S_i⁻¹ (w − w'))) with values a_i L_i u_i at the pseudo-inputs W, where "
    "L_i L_iᵀ = exp(−½ (W − W')ᵀ S_i⁻¹ (W − W')) + jitter · I, and u = (u_1, …, u_I) ~ N(posterior.mean, "
    "posterior.covariance). latents.mean and latents.covariance are those of the values. A unit's output is "
    "Σ_i s_i (g_i smoothed by N(0, R_i)) + noise; s, R and the noise stay at the unit. Inputs and targets are "
    "standardised by input.mean, input.scale, target.mean, target.scale."
)
MEANINGS = {
    "latents.inducing": "W, pseudo-inputs",
    "latents.scales": "S, squared lengthscales of each latent function",
    "latents.amplitudes": "a, amplitude of each latent function",
    "latents.mean": "mean of g at the pseudo-inputs, function by function",
    "latents.covariance": "covariance of g at the pseudo-inputs",
    "posterior.mean": "m, mean of the whitened values u",
    "posterior.covariance": "V, covariance of the whitened values u",
}


def posterior(latents: Latents, q: LatentPosterior, config: RunConfig) -> Posterior:
    """The saved posterior of g. It predicts no unit: that takes what the unit alone knows."""
    mean, covariance = q.of_latents(latents)
    arrays = {**to_wire(latents, q), "latents.mean": mean, "latents.covariance": covariance}
    coordinates = dict.fromkeys(arrays, "standardised") | {n: "whitened" for n in arrays if n.startswith("posterior.")}
    model = {"family": "shared-latents", "kernel": config.model.kernel, "jitter": latents.jitter}
    return Posterior(arrays, MEANINGS, coordinates, EQUATION, model)


def details(strategy: FedMGP) -> dict[str, Any]:
    """Facts of the run for ``metrics.json``."""
    latents, q = strategy.shared()
    flat = is_flat({site: 1.0 - own for site, own in strategy.flat.items()}, threshold=0.5)
    if flat:
        logger.warning(
            "the model collapsed: in most units the noise explains the signal; lower `fedmgp.start-multiple`"
        )
    mean, covariance = q.of_latents(latents)
    sd, J = np.sqrt(np.diag(covariance)), len(latents.inducing)
    own = strategy.preparation.arrays
    found: dict[str, Any] = {
        "update": "exact" if strategy.options.exact(strategy.config) else "pseudo-gradient",
        "bound": strategy.track.state.bound if strategy.pseudo is None else None,
        "bounds_of_starts": [track.state.bound for track in strategy.tracks] if strategy.pseudo is None else [],
        "collapsed": flat,
        "flat_units": [site for site, own in strategy.flat.items() if own],
        "lengthscales": (np.sqrt(latents.scales) * own["input.scale"]).tolist(),
        "weights": strategy.weights,
        "latents": [],
        "units": {},
    }
    if latents.inducing.shape[1] == 1:
        w = (latents.inducing[:, 0] * own["input.scale"][0] + own["input.mean"][0]).tolist()
        found["latents"] = [
            {"w": w, "mean": part.tolist(), "sd": spread.tolist()}
            for part, spread in zip(mean.reshape(-1, J), sd.reshape(-1, J), strict=True)
        ]
        found["units"] = _curves(strategy)
    return found


def _curves(strategy: FedMGP) -> dict[str, Any]:
    """Prediction along the one input, with and without the others, and rows, of the first simulated units."""
    config, preparation = strategy.config, strategy.preparation
    if not (preparation.simulated and config.keep_predictions and config.model.likelihood == "gaussian"):
        return {}
    ends = strategy.inducing.min(), strategy.inducing.max()
    grid = np.linspace(*ends, CURVE_POINTS)[:, None]
    specs = {f"curve.{name}": ArraySpec((None,)) for name in CURVE}
    sites = strategy.network.sites()[:MOST_CURVES]
    answers = strategy.ask("query.curve", {**strategy.predictive(), "grid": grid}, specs, sites)
    at = grid[:, 0] * preparation.arrays["input.scale"][0] + preparation.arrays["input.mean"][0]
    return {
        preparation.labels[site]: {"grid": at.tolist()} | {name: own.arrays[f"curve.{name}"].tolist() for name in CURVE}
        for site, own in answers.items()
    }
