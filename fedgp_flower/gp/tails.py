"""The shape of the errors of a Gaussian process: a scale mixture of normals, fitted to leave-one-out residuals.

A Gaussian process with Gaussian noise predicts normal distributions, but few real errors are normal. Let z be the
error of the prediction of a row from all other rows, in standard deviations of that prediction. The density of z is
taken as Σ_j p_j N(z; 0, κ_j²) on a fixed grid of κ, with the shares p of highest likelihood (Laird 1978), which EM
finds from a histogram of |z|. A new row then has the predictive distribution Σ_j p_j N(m(x), κ_j² s²(x)).
"""

from __future__ import annotations

import numpy as np

from fedgp_flower.lazy import special
from fedgp_flower.scores import Prediction, TargetUnits
from fedgp_flower.typing import Array

TAILS = "errors.mixture"
"""Name of the mixture among the parameters of a posterior."""
EDGES = np.concatenate([[0.0], 2.0 ** np.arange(-4, 5.25, 0.25)])
"""Lower edges of the bins of |z|; the last bin is open."""
FACTORS = 2.0 ** np.arange(-3, 3.25, 0.5)
"""The grid of κ."""
PRIOR_ROWS, STEPS = 0.1, 400
"""Rows that each share counts in advance, which keeps shares above zero; steps of EM."""
MINIMUM_GAIN = 3.0
"""Nats by which the mixture must be likelier than a normal distribution: it has two or three effective parameters."""


def histogram(residuals: Array) -> Array:
    """Return the number of residuals z in each bin of |z| [B]."""
    return np.bincount(np.searchsorted(EDGES, np.abs(residuals), side="right") - 1, minlength=len(EDGES)).astype(float)


def fitted(counts: Array) -> Array | None:
    """Return factors κ and shares p of the mixture [2, J] from a histogram [B]; None if a normal is as likely.

    Example: with as many residuals of sd ½ as of sd 2, most of p is near these factors.
    """
    below = 2 * special.ndtr(np.append(EDGES, np.inf)[:, None] / FACTORS)
    inside = np.diff(below, axis=0)  # [B, J]
    shares = np.full(len(FACTORS), 1 / len(FACTORS))
    for _ in range(STEPS):
        expected = shares * (counts / (inside @ shares) @ inside) + PRIOR_ROWS
        shares = expected / expected.sum()
    normal = inside[:, FACTORS == 1.0][:, 0]
    gain = counts @ (np.log(inside @ shares) - np.log(np.maximum(normal, np.finfo(float).tiny)))
    return np.stack([FACTORS, shares]) if gain > MINIMUM_GAIN else None


def unit_variance(mixture: Array) -> tuple[Array, float]:
    """Return the mixture with the variance Σ p κ² scaled to one, and that variance."""
    factors, shares = mixture
    variance = float(shares @ factors**2)
    return np.stack([factors / np.sqrt(variance), shares]), variance


def shaped(prediction: Prediction, residuals: Array, units: TargetUnits) -> Prediction:
    """Return a prediction with the shape of these residuals; unchanged for a transformed target."""
    mixture = fitted(histogram(residuals)) if units.transform is None else None
    if mixture is None:
        return prediction
    mixture, variance = unit_variance(mixture)
    return Prediction(prediction.mean, prediction.variance * variance, mixture)
