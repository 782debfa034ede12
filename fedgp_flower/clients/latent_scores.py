"""Scores of held-out rows where the likelihood is not Gaussian, from the moments of f."""

from __future__ import annotations

import math

import torch

from fedgp_flower.clients.counts import count_scores
from fedgp_flower.gp.latent import LatentGP
from fedgp_flower.gp.likelihoods import Counts, Probit
from fedgp_flower.run.metrics import Scores, bernoulli_scores, gaussian_scores
from fedgp_flower.typing import Array


def latent_scores(model: LatentGP, mean: Array, variance: Array, target: Array, scale: float) -> Scores:
    """Classes by their probability, counts as mixtures of Poisson distributions, heavy-tailed numbers by density.

    Intervals and CRPS of the last are those of a Gaussian with the same two moments.

    Args:
        model: Whose likelihood is meant.
        mean: Of f [n], standardised.
        variance: Of f [n].
        target: Standardised [n].
        scale: Of the target, in original units.
    """
    observed, own = model.observed, model.own.detach().double().cpu()
    moments = torch.from_numpy(mean), torch.from_numpy(variance)
    if isinstance(observed, Counts):
        return count_scores(mean, variance, target)
    centre, spread = (part.numpy() for part in observed.moments(*moments, own))
    if isinstance(observed, Probit):
        return bernoulli_scores(centre, target)
    scores = gaussian_scores(scale * centre, scale * spread**0.5, scale * target)
    density = observed.log_predictive(torch.from_numpy(target), *moments, own)
    return Scores(scores.sums | {"nll": len(target) * math.log(scale) - float(density.sum())}, scores.arrays)
