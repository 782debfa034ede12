"""What a run of SFVI or SFVI-Avg saves, so that a new site is predicted without any of the old ones."""

from __future__ import annotations

from typing import cast

from fedgp_flower.config import RunConfig
from fedgp_flower.shapes import NamedArrays
from strategies.closing import Posterior
from strategies.sfvi_options import SFVIOptions

SHARED = "inducing.locations"
LEARNED = "theta.inputs"


def structured_posterior(arrays: NamedArrays, config: RunConfig) -> Posterior:
    """Arrays, meanings and the equation of prediction for a structured model."""
    meanings = {
        "q.mean": "μ_G, mean of the shared latents Z_G",
        "q.log_scale": "log σ_G, by entry of Z_G",
        "q.lower": "strictly lower entries of L_G, row by row",
        SHARED: "Z, shared inducing inputs",
    }
    coordinates = {name: "standardised" if name in (SHARED, LEARNED) else "unconstrained" for name in arrays}
    equation = (
        "q(Z_G) = N(μ_G, diag(σ_G) L_G L_Gᵀ diag(σ_G)); without q.lower, L_G = I. The model of `sfvi.model` with "
        "parameters θ (theta.*) gives p(y | x, Z_G, Z_L), and a new site has Z_L from its prior. For `gp`: "
        "f(x) = a(x)ᵀ Z_G[:M] + [1, x]ᵀ Z_G[M:] + h(x) with L Lᵀ = k_G(Z, Z) + jitter · k_G(z, z) · I, "
        "a(x) = L⁻¹ k_G(Z, x), h(x) ~ N(0, k_L(x, x) + [1, x²]ᵀ exp(2 theta.log_site_slope)), or h = 0 where "
        "`sfvi.site-inducing` is 0; x and y standardised."
    )
    options = cast(SFVIOptions, config.options)
    section = {key: value for key, value in config.model.model_dump(by_alias=True).items() if key != "inducing-init"}
    model = {"family": "structured", "model": section, "structure": options.model_dump(by_alias=True)}
    return Posterior(arrays, {n: meanings.get(n, "hyperparameter") for n in arrays}, coordinates, equation, model)
