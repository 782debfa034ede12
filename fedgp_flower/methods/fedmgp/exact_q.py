"""q(u) from sums over units: the optimum of the pooled bound, its value, and the best common amplitudes.

Given all kernels and noises the optimal q(u) is Gaussian, and it needs no more of a unit than
:class:`~fedgp_flower.methods.fedmgp.latents.Statistics`, added over units (EM with an exact E-step).
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from fedgp_flower.errors import NumericsError
from fedgp_flower.methods.fedmgp.latents import Posterior, Statistics
from fedgp_flower.typing import Array

_LOG_SCALE_BOUND = 2.0
"""Largest change of a logarithm of an amplitude in one step."""


def posterior(total: Statistics) -> Posterior:
    """Optimal q(u): V = (I + ΣG)⁻¹, m = V Σb."""
    factor = _factor(total)
    covariance = cho_solve(factor, np.eye(total.shift.size))
    return Posterior(cho_solve(factor, total.shift), covariance)


def shared_evidence(total: Statistics) -> float:
    """½ bᵀP⁻¹b − ½ log|P| with P = I + G: what these statistics say about u, as log evidence."""
    lower, _ = _factor(total)
    z = solve_triangular(lower, total.shift, lower=True)
    return float(0.5 * z @ z - np.log(np.diag(lower)).sum())


def pooled_bound(total: Statistics) -> float:
    """The collapsed evidence lower bound, exact at the optimal q(u)."""
    return total.evidence + float(total.slack.sum()) + shared_evidence(total)


def _factor(total: Statistics) -> tuple[Array, bool]:
    try:
        return cho_factor(total.precision + np.eye(total.shift.size), lower=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: the sum is not finite
        raise NumericsError(
            f"precision of q(u) is not positive definite, shape {total.precision.shape}: a unit sent statistics that "
            "no data can produce. Use `fedmgp.aggregation = 'agreement'`."
        ) from error


def best_scales(total: Statistics, num_latents: int) -> tuple[float, Array]:
    """The common amplitudes a [I] that maximise the bound of rescaled statistics, and that bound.

    Its gradient in log a_i is 2 a_i² slack_i + Σ_{j in i} (m_j² + V_jj) − J. Without this step EM crawls along the
    ridge on which all amplitudes grow and g shrinks.
    """
    J = total.shift.size // num_latents

    def negative(log_a: Array) -> tuple[float, Array]:
        trial = total.rescaled(np.exp(log_a))
        q = posterior(trial)
        moments = (q.mean**2 + np.diag(q.covariance)).reshape(num_latents, J).sum(axis=1)
        return -pooled_bound(trial), J - 2 * trial.slack - moments

    start = np.zeros(num_latents)
    bounds = [(-_LOG_SCALE_BOUND, _LOG_SCALE_BOUND)] * num_latents
    best = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 50, "ftol": 1e-12, "gtol": 1e-7},
    )
    value = negative(start)[0]
    return (-float(best.fun), np.exp(best.x)) if best.fun < value else (-value, np.ones(num_latents))
