"""What taking a site's factor out of a run changed of the posterior, and what may still owe something to the site."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import NamedArrays


def changes(before: RunData, after: RunData) -> dict[str, Any]:
    """``divergence``, in nats by part of the posterior, and ``remains``, in words."""
    return {"divergence": _divergences(before, after), "remains": _remains(before)}


def _divergences(before: RunData, after: RunData) -> dict[str, float]:
    """KL(after ‖ before) in nats of the parts of q that are Gaussian: q(Z), q(β), and q(v) where Z and β are fixed."""
    if before.posterior is None or after.posterior is None:
        return {}
    old, new = _densities(before.posterior.arrays), _densities(after.posterior.arrays)
    return {name: float(new[name].kl(old[name])) for name in old if name in new}


def _densities(arrays: NamedArrays) -> dict[str, Gaussian]:
    densities: dict[str, Gaussian] = {}
    for name, saved in (("inducing", "inducing.locations"), ("hyper", "hyper")):
        if f"{saved}.scale" in arrays:
            mean, scale = (arrays[f"{saved}.{part}"].ravel() for part in ("mean", "scale"))
            densities[name] = DiagonalGaussian.from_arrays({"eta1": mean / scale**2, "eta2": -0.5 / scale**2})
    if "inducing.covariance" in arrays:
        size = len(arrays["inducing.locations"])  # of a mixture the first component, the product of the factors
        shapes = {"mean": (-1, size), "covariance": (-1, size, size)}
        moments = (torch.from_numpy(arrays[f"inducing.{part}"]).reshape(own)[0] for part, own in shapes.items())
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
    if not ((options.linear or options.agrees) and config.model.likelihood == "gaussian"):
        remains.append("factors of other sites, fitted beside the site's; further visits let them settle")
    return remains
