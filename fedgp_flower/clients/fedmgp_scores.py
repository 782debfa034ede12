"""Scores of what a unit of FedMGP predicts where targets are not numbers with Gaussian noise."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from fedgp_flower.clients.base import Prediction, Request, to_original_units
from fedgp_flower.clients.counts import count_scores
from fedgp_flower.metrics import Scores, bernoulli_scores, gaussian_scores
from fedgp_flower.models.exact_q import UnitParameters
from fedgp_flower.models.multi_output_likelihoods import Kind, log_density, moments
from fedgp_flower.shapes import Array


def scores_of(
    kind: Kind, request: Request, function: tuple[Array, Array], parameters: UnitParameters, target: Array
) -> Scores:
    """Scores of y given mean m and variance v of f at held-out rows.

    Classes by their probability Φ(m / √(1 + v)), counts as a mixture of Poisson distributions; heavy-tailed numbers by
    their own density, with intervals and CRPS of a Gaussian with the same two moments.
    """
    mean, variance = function
    if kind == "bernoulli":
        return bernoulli_scores(ndtr(mean / np.sqrt(1 + variance)), target)
    if kind == "poisson":
        return count_scores(mean, variance, target)
    rough = gaussian_scores(*to_original_units(request, Prediction(*moments(kind, *function, parameters)), target))
    scale = float(request.arrays["target.scale"])
    density = log_density(kind, target, *function, parameters)
    return Scores(rough.sums | {"nll": float(np.sum(np.log(scale) - density))}, rough.arrays)
