"""Initial inducing points from federated statistics alone: no site sends a row.

``normal`` draws standard normal points. ``copula`` knows more: sites send counts of each standardised input in fixed
bins, and the matrix of products XᵀX. The points then follow the pooled marginal distributions, joined by a Gaussian
copula with the pooled correlations, so that they lie where data are: on the few values of a discrete column, inside
the box of a uniform one. Both use scrambled Sobol points, which leave fewer holes than independent draws.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr
from scipy.stats import qmc

from fedgp_flower.gp.sums import INPUT_EDGES
from fedgp_flower.typing import Array


def initial_inducing_points(
    kind: str, count: int, histogram: Array, products: Array, num_rows: float, rng: np.random.Generator
) -> Array:
    """Inducing inputs [M, D] in standardised units, ``normal`` or ``copula``.

    From the pooled counts [D, B] of :func:`fedgp_flower.gp.sums.input_shape`, and XᵀX [D, D] of N rows.
    """
    num_inputs = len(histogram)
    if kind == "normal":
        correlation = np.eye(num_inputs)
    else:
        spread = np.sqrt(np.maximum(np.diag(products) / num_rows, 1e-12))
        correlation = products / num_rows / np.outer(spread, spread)
        np.fill_diagonal(correlation, 1.0)
        # Constant columns give zero rows, duplicated columns a singular matrix: shrink a little towards independence.
        correlation = 0.99 * correlation + 0.01 * np.eye(num_inputs)
    root = np.linalg.cholesky(correlation)
    normal = _normal_points(count, num_inputs, rng) @ root.T
    return normal if kind == "normal" else _to_marginals(normal, histogram)


def box_points(count: int, histogram: Array, rng: np.random.Generator) -> Array:
    """Sobol points [M, D] in the box between the outer edges of each column's outermost bins that are not empty."""
    filled = histogram > 0
    low = INPUT_EDGES[filled.argmax(axis=1)]
    high = INPUT_EDGES[filled.shape[1] - filled[:, ::-1].argmax(axis=1)]
    power = int(np.ceil(np.log2(max(count, 1))))
    unit = qmc.Sobol(len(histogram), rng=rng).random(2**power)[:count]
    return np.asarray(low + (high - low) * unit, dtype=np.float64)


def _normal_points(count: int, num_inputs: int, rng: np.random.Generator) -> Array:
    engine = qmc.MultivariateNormalQMC(np.zeros(num_inputs), engine=qmc.Sobol(num_inputs, rng=rng), inv_transform=True)
    power = int(np.ceil(np.log2(max(count, 1))))
    return np.asarray(engine.random(2**power)[:count], dtype=np.float64)


def _to_marginals(normal: Array, histogram: Array) -> Array:
    """Each column through the quantile function of its histogram, linear within a bin."""
    levels = ndtr(normal)
    columns = []
    for column, counts in zip(levels.T, histogram, strict=True):
        cumulative = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
        keep = np.concatenate([[True], np.diff(cumulative) > 0]) | np.concatenate([np.diff(cumulative) > 0, [True]])
        columns.append(np.interp(column, cumulative[keep], INPUT_EDGES[keep]))
    return np.stack(columns, axis=1)
