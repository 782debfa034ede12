"""The law of the errors of a Gaussian process: a scale that varies with the inputs, and a scale mixture of normals.

A Gaussian process with Gaussian noise predicts normal distributions whose noise is the same everywhere. Few real errors
are like that. Let z be the error of the prediction of a row from all other rows, in standard deviations of that
prediction, N(μ, s²). A new row has the predictive distribution Σ_j p_j N(μ, κ_j² e^η s²).

*Scale.* η(x) = φ(x)ᵀb is a ridge regression of log z² (Harvey 1976) on features φ of the inputs and of μ, those of
:meth:`fedgp_flower.gp.models.SparseGP.scale_features`. It regresses t = η₀ + [log(1 + r²) − E log(1 + r²)]/a a few
times, where r = z e^−η₀/2 has the scale η₀ of the regression before, at first 0. The mean and the slope
a = E r²/(1 + r²) are those of a standard normal r; the 1 bounds the influence of errors near zero. The sums Σ φφᵀ, Σ φt
and Σ t² give b, and the evidence that chooses the penalty. Then b is multiplied by one of a few strengths, chosen by
the likelihood of rows whose μ, s and η come from all other rows. Strength 0 is a constant scale.

*Shape.* The density of z e^−η/2 is Σ_j p_j N(0, κ_j²) on a fixed grid of κ, with the shares p of highest likelihood
(Laird 1978), which EM finds from a histogram.
"""

from __future__ import annotations

import numpy as np
import torch

from fedgp_flower.lazy import special
from fedgp_flower.scores import Prediction, TargetUnits
from fedgp_flower.typing import Array

TAILS, SCALE, BEFORE, PRECISION = "errors.mixture", "errors.scale", "errors.scale_before", "errors.scale_precision"
"""Names of the mixture, of b, of b of the regression before, and of A, among the parameters of a posterior."""
SCALE_POINTS, FIXED_FEATURES = 256, 3
"""Largest number of inducing points in the features of the scale, and number of the other features."""
REGRESSIONS = 3
"""Number of regressions."""
STRENGTHS = np.array([0.0, 0.5, 1.0])
"""Factors of b that are tried."""
MOST_LEVERAGE = 0.9
"""Largest h of a row, which bounds what its own error adds to its scale; with reduced weights h could exceed 1."""
LOG_PENALTIES = np.arange(-3.0, 13.0)
"""Grid of the log penalty of b."""
EDGES = np.concatenate([[0.0], 2.0 ** np.arange(-4, 5.25, 0.25)])
"""Lower edges of the bins of |z|; the last bin is open."""
WIDTHS = np.append(np.diff(EDGES), 1.0)
"""Widths of the bins; of the open one, any."""
FACTORS = 2.0 ** np.arange(-3, 3.25, 0.5)
"""The grid of κ."""
PRIOR_ROWS, STEPS = 0.1, 400
"""Rows that each share counts in advance, which keeps shares above zero; steps of EM."""
MINIMUM_GAIN = 3.0
"""Nats by which a mixture, or a scale that varies, must be likelier: each has two or three effective parameters."""
_nodes, _weights = np.polynomial.hermite_e.hermegauss(80)
_squares = _nodes**2
NORMAL_MEAN, NORMAL_SLOPE = (
    float(_weights @ values / _weights.sum()) for values in (np.log1p(_squares), _squares / (1 + _squares))
)
"""E log(1 + r²) and E r²/(1 + r²) of a standard normal r."""


def log_squares(z: Array, before: Array) -> Array:
    """Return t [N], estimates of the log variances of errors z [N], from the scale η₀ [N] of the regression before."""
    return before + (np.log1p(z**2 * np.exp(-before)) - NORMAL_MEAN) / NORMAL_SLOPE


def regression(products: Array, moment: Array, square: float) -> tuple[Array, Array]:
    """Return b [P] and A = Σ φφᵀ + λI [P, P] from Σ φφᵀ, Σ φt and Σ t², with the penalty λ of highest evidence.

    The first feature is 1, and its coefficient has no penalty. With the rows centred, and t ~ N(φᵀb, τ²) and
    b ~ N(0, τ²/λ I), the evidence at the best τ² is −½ [(N − 1) log(Σ t² − Σ tφᵀb) + log|Σ φφᵀ + λI| − P log λ].
    """
    rows, means = float(products[0, 0]), products[0, 1:] / products[0, 0]
    gram = products[1:, 1:] - rows * np.outer(means, means)
    along = moment[1:] - moment[0] * means
    roots, axes = np.linalg.eigh(gram)
    roots, along = np.maximum(roots, 0.0), axes.T @ along
    total = square - float(moment[0]) ** 2 / rows

    def evidence(penalty: float) -> float:
        left = max(total - float(along**2 @ (1 / (roots + penalty))), 1e-9 * total)
        return -((rows - 1) * np.log(left) + np.log1p(roots / penalty).sum()) / 2

    penalty = max(np.exp(LOG_PENALTIES), key=evidence) if total > 0 else np.exp(LOG_PENALTIES[-1])
    slopes = axes @ (along / (roots + penalty))
    penalties = np.full(len(products), penalty)
    penalties[0] = 0.0
    return np.append(moment[0] / rows - means @ slopes, slopes), products + np.diag(penalties)


def left_out_scale(features: Array, b: Array, precision: Array, t: Array) -> Array:
    """Return η of each row [N] from the regression on all other rows, η − (t − η) h/(1 − h), h = φᵀA⁻¹φ."""
    factor = torch.linalg.cholesky(torch.from_numpy(precision))
    weight = torch.linalg.solve_triangular(factor, torch.from_numpy(features).mT, upper=False).square().sum(0).numpy()
    found: Array = features @ b
    return found - (t - found) * weight / (1 - np.minimum(weight, MOST_LEVERAGE))


def histogram(residuals: Array) -> Array:
    """Return the number of residuals z in each bin of |z| [B]."""
    return np.bincount(np.searchsorted(EDGES, np.abs(residuals), side="right") - 1, minlength=len(EDGES)).astype(float)


def fitted(counts: Array) -> tuple[Array, float, float]:
    """Return factors κ and shares p of the mixture [2, J] from a histogram [B], and two log likelihoods of the rows.

    They are under the mixture and under a standard normal distribution. Example: with as many residuals of sd ½ as of
    sd 2, most of p is near these factors.
    """
    below = 2 * special.ndtr(np.append(EDGES, np.inf)[:, None] / FACTORS)
    inside = np.diff(below, axis=0)  # [B, J]
    shares = np.full(len(FACTORS), 1 / len(FACTORS))
    for _ in range(STEPS):
        expected = shares * (counts / (inside @ shares) @ inside) + PRIOR_ROWS
        shares = expected / expected.sum()
    normal = np.maximum(inside[:, FACTORS == 1.0][:, 0], np.finfo(float).tiny)
    mixed, single = (float(counts @ np.log(chances / WIDTHS)) for chances in (inside @ shares, normal))
    return np.stack([FACTORS, shares]), mixed, single


def best_strength(counts: Array, logs: Array) -> tuple[float, Array | None]:
    """Return the strength of highest likelihood and the mixture there, from a histogram for each strength [K, B].

    ``logs`` [K] are Σ ½η. A constant scale, and with it normal errors (None), are kept unless another law is likelier
    by :data:`MINIMUM_GAIN`.
    """
    found = [fitted(each) for each in counts]
    heights = np.array([mixed for _, mixed, _ in found]) - logs
    mixture, mixed, normal = found[0]
    first = mixture if mixed > normal + MINIMUM_GAIN else None
    best = int(heights.argmax())
    if heights[best] > (normal if first is None else mixed) + MINIMUM_GAIN and STRENGTHS[best]:
        return float(STRENGTHS[best]), found[best][0]
    return 0.0, first


def by_strength(residuals: Array, scales: Array) -> tuple[Array, Array]:
    """Return the histogram of z e^−η/2 [K, B], and Σ ½η [K], for each strength of η [N]."""
    halves = STRENGTHS[:, None] * scales / 2
    return np.stack([histogram(residuals * np.exp(-half)) for half in halves]), halves.sum(axis=1)


def unit_variance(mixture: Array) -> tuple[Array, float]:
    """Return the mixture with the variance Σ p κ² scaled to one, and that variance."""
    factors, shares = mixture
    variance = float(shares @ factors**2)
    return np.stack([factors / np.sqrt(variance), shares]), variance


def with_law(
    prediction: Prediction, residuals: Array, units: TargetUnits, features: tuple[Array, Array] | None = None
) -> Prediction:
    """Return a prediction with the law of these residuals z [N]; unchanged for a transformed target.

    ``features`` φ of the rows and of the prediction allow a scale that varies.
    """
    if units.transform is not None:
        return prediction
    of_rows, of_new = np.zeros(len(residuals)), np.zeros(len(prediction.mean))
    if features is not None:
        known, new = features
        b = np.zeros(known.shape[1])
        for _ in range(REGRESSIONS):
            t = log_squares(residuals, known @ b)
            b, precision = regression(known.T @ known, known.T @ t, float(t @ t))
        of_rows, of_new = left_out_scale(known, b, precision, t), new @ b
    strength, mixture = best_strength(*by_strength(residuals, of_rows))
    variance = prediction.variance * np.exp(strength * of_new)
    if mixture is None:
        return Prediction(prediction.mean, variance)
    mixture, common = unit_variance(mixture)
    return Prediction(prediction.mean, variance * common, mixture)
