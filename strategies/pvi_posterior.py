"""What a finished run of PVI saves and says: the posterior with its equation, and the free energy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgp_flower.config import RunConfig
from fedgp_flower.shapes import NamedArrays
from strategies import pvi_arrays as wire
from strategies.closing import Posterior
from strategies.meeting import Preparation
from strategies.pvi_state import PVIState
from strategies.wire import Answer

MEANINGS = {
    "inputs": "V, pseudo-inputs of all sites",
    "targets": "m, pseudo-targets",
    "root": "R, S⁻¹ = R Rᵀ, over σ² where tied",
    "residual": "c, squares that the pseudo-observations do not carry",
    "count": "rows that the pseudo-observations stand for",
    "tied": "whether pseudo-noise scales with σ²",
    "eta1": "first natural parameter of the product of factors",
    "eta2": "second natural parameter of the product of factors",
}
EQUATION = (
    "For draws (Z, β) ~ q(Z) q(β), L Lᵀ = k(Z, Z) + jitter · k(z, z) · I, A = L⁻¹k(Z, V), B = I + A S⁻¹ Aᵀ, "
    "h = A S⁻¹ m (factor.values adds LᵀΛL and Lᵀη, factor.whitened Λ and η), a = L⁻¹k(Z, x): f(x) ~ N(aᵀB⁻¹h, "
    "k(x, x) − aᵀa + aᵀB⁻¹a). Predict with the mixture over draws of p(y | f). x and y are standardised by input.mean, "
    "input.scale, target.mean, target.scale; β are logarithms of standard deviations and lengthscales."
)


def described(predictive: NamedArrays, first: np.ndarray, config: RunConfig, preparation: Preparation) -> Posterior:
    """Arrays under their saved names, what each is, and the equation; ``first`` is where Z began."""
    shape = (config.model.num_inducing, preparation.num_inputs)
    arrays: NamedArrays = {"inducing.first": first.reshape(shape)}
    meanings = {"inducing.first": "Z before training; not used for prediction"}
    for name, words in (("inducing", "Z, inducing inputs"), ("hyper", "β, log hyperparameters")):
        saved = "inducing.locations" if name == "inducing" else name
        mean, scale = _moments(wire.part(predictive, f"q.{name}"))
        own_shape = shape if name == "inducing" else mean.shape
        arrays[f"{saved}.mean"], meanings[f"{saved}.mean"] = mean.reshape(own_shape), f"mean of q of {words}"
        if scale is not None:
            arrays[f"{saved}.scale"], meanings[f"{saved}.scale"] = scale.reshape(own_shape), f"sd of q of {words}"
    for name, array in wire.part(predictive, "others").items():
        arrays[f"factor.{name}"] = array
        meanings[f"factor.{name}"] = MEANINGS[name.rpartition(".")[2]]
    own: Any = config.options
    keys = {"kernel": config.model.kernel, "ard": config.model.ard, "jitter": config.model.jitter}
    model = {"family": "pvi", **keys, "likelihood": config.model.likelihood}
    model |= {"samples": own.prediction_samples, "seed": config.seed}
    return Posterior(arrays, meanings, dict.fromkeys(arrays, "standardised"), EQUATION, model)


def _moments(latent: NamedArrays) -> tuple[np.ndarray, np.ndarray | None]:
    if "value" in latent:
        return latent["value"], None
    precision = -2.0 * latent["eta2"]
    return latent["eta1"] / precision, 1.0 / np.sqrt(precision)


def factor_strengths(state: PVIState) -> dict[str, dict[str, float]]:
    """How much each site's factor says, by site and in units that compare sites.

    ``points``: M_k. ``weight``: tr S_k⁻¹, which for tied noise is in units of 1/σ², that is, in rows. ``inducing``,
    ``hyper``: mean precision of the factors of Z and β, where the prior has 1. ``directions``: tr Λ_k(I + Λ_k)⁻¹, how
    many of the M directions of v the factor alone would determine. ``values``: mean precision of u.
    """
    strengths: dict[str, dict[str, float]] = {}
    for site, own in state.sites.items():
        found = {"rows": float(own.num_examples)}
        if own.arrays:
            found |= {"points": float(len(own.arrays["targets"])), "weight": float(np.square(own.arrays["root"]).sum())}
        for name, factor in own.factors.items():
            precision = factor.precision.numpy()
            if name == "whitened":
                found["directions"] = float(np.trace(np.linalg.solve(np.eye(len(precision)) + precision, precision)))
            else:
                found[name] = float((precision if precision.ndim == 1 else precision.diagonal()).mean())
        strengths[site] = found
    return strengths


def free_energy(
    answers: Mapping[str, Answer], wanted: set[str], kl: Mapping[str, float], alpha: float
) -> dict[str, float] | None:
    """F = Σ_k E_q log p(y_k | f) − E KL(q(u)) − α KL(q(Z)) − KL(q(β)); None unless all sites with a factor answered."""
    if wanted - set(answers):
        return None
    fit = sum(answers[site].number("fit") for site in sorted(wanted))
    divergence = float(np.median([own.number("divergence") for own in answers.values()]))
    total = fit - divergence - alpha * kl["inducing"] - kl["hyper"]
    parts = {f"kl_{name}": value for name, value in kl.items()}
    return {"total": total, "fit": fit, "kl_function": divergence, **parts}
