"""The baselines that look at no Gaussian process: the mean of the target, and regression that is linear in the inputs.

Both are fitted from totals over sites and equal the fit of all rows in one place, whatever the partition.

Gaussian: y = b + (X − x̄)w + ε with w ~ N(0, σ²/λ I) and a flat prior on b. With the scatter X_cᵀX_c = V diag(d) Vᵀ and
z = VᵀX_cᵀy, after b and w are integrated out,

    −2 log p(y | λ, σ²) = (N − 1) log σ² + Σᵢ log(1 + dᵢ/λ) + (y_cᵀy_c − Σᵢ zᵢ²/(dᵢ + λ)) / σ² + const

(MacKay 1992, in the eigenbasis). σ² is at its maximum, λ at the best of a grid: on a grid the choice does not move with
rounding. Classes: w at the mode of log p(y | w) − ½‖w‖² without a penalty on the intercept, by Newton's method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedgp_flower.shared_messages import Coefficients, LinearPredictor, LogisticSums, Moments, Nothing
from strategies.server.questions import Asking, Summed, Total

PENALTIES = 10.0 ** np.arange(-6, 6.25, 0.25)
"""λ, in rows that carry as much information as the prior."""
NEWTON_STEPS = 30
TOLERANCE = 1e-10
"""Newton decrement, in nats, below which the mode is reached."""


def constant(
    target: Mapping[str, float], rows: int, inputs: int, likelihood: str, scale: tuple[float, float]
) -> LinearPredictor:
    """What looks at no input: the mean and spread of the training targets, or the share of the second class.

    Counts: log rate ~ N(m, v) with E y = r = exp(m + ½ v) and var y = r + r² (e^v − 1), or Poisson where var y < r.
    """
    if likelihood == "bernoulli":
        at, variance = math.log(target["share"] / (1 - target["share"])), 0.0
    elif likelihood == "poisson":
        variance = math.log1p(max(target["sd"] ** 2 - target["mean"], 0.0) / target["mean"] ** 2)
        at = math.log(target["mean"]) - variance / 2
    else:
        at = (target["mean"] - scale[0]) / scale[1]
        variance = (target["sd"] / scale[1]) ** 2 * (rows + 1) / (rows - 1)  # of a new row about the mean of N others
    return LinearPredictor(np.zeros(inputs), np.zeros(inputs), at, variance)


def linear_fit(sites: tuple[str, ...], likelihood: str, inputs: int) -> Asking[LinearPredictor | None]:
    """Linear regression for numbers, logistic regression for two classes; None for counts, or if nobody answers."""
    if likelihood == "poisson":
        return None
    if likelihood == "bernoulli":
        return (yield from _logistic(sites, inputs))
    summed: Summed[Moments] = yield Total(Moments, Nothing(), sites)
    return None if summed.total is None or summed.total.gram[0, 0] < 2 else ridge(summed.total)


def ridge(sums: Moments) -> LinearPredictor:
    """The Bayesian linear regression of rows with these sums; see the top of this module."""
    rows = float(sums.gram[0, 0])
    centre, middle = sums.gram[0, 1:] / rows, float(sums.products[0]) / rows
    roots, vectors = np.linalg.eigh(sums.gram[1:, 1:] - rows * np.outer(centre, centre))
    roots = np.maximum(roots, 0.0)  # a scatter has no negative roots but for rounding
    projected = vectors.T @ (sums.products[1:] - rows * middle * centre)
    total = float(sums.square) - rows * middle**2
    left = total - (projected**2 / (roots + PENALTIES[:, None])).sum(axis=1)
    left = np.maximum(left, rows * np.finfo(float).eps * total)  # of rows that lie on a plane, rounding is left
    chosen = int(np.argmin((rows - 1) * np.log(left) + np.log1p(roots / PENALTIES[:, None]).sum(axis=1)))
    shrunk = roots + PENALTIES[chosen]
    noise = float(left[chosen]) / (rows - 1)
    spread = vectors.T * np.sqrt(noise / shrunk)[:, None]
    return LinearPredictor(centre, vectors @ (projected / shrunk), middle, noise * (1 + 1 / rows), spread)


def _logistic(sites: tuple[str, ...], inputs: int) -> Asking[LinearPredictor | None]:
    """Newton's method, a step halved while it lowers the penalised log likelihood."""
    penalty = np.diag([0.0, *np.ones(inputs)])
    weights, step, value = np.zeros(1 + inputs), np.zeros(1 + inputs), -math.inf
    for _ in range(NEWTON_STEPS):
        tried = weights + step
        summed: Summed[LogisticSums] = yield Total(LogisticSums, Coefficients(tried), sites)
        if summed.total is None:
            return None
        now = float(summed.total.likelihood - 0.5 * tried @ penalty @ tried)
        if now < value:
            step = step / 2
            continue
        weights, value, gradient = tried, now, summed.total.gradient - penalty @ tried
        step = np.linalg.solve(summed.total.information + penalty, gradient)
        if gradient @ step < TOLERANCE:
            break
    return LinearPredictor(np.zeros(inputs), weights[1:], float(weights[0]), 0.0)
