"""FedPoly: a federated polynomial that every unit then bends towards its own data.

Reference: Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024), Section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import legendre

from fedgp_flower.shapes import Array

Unit = tuple[Array, Array]
"""Rows [N, D] and targets [N] of one unit."""


def legendre_features(x: Array, degree: int, lower: Array, upper: Array) -> Array:
    """1 and P_1 … P_degree of every input scaled to [−1, 1], without interactions.  [N, 1 + D·degree]."""
    scaled = 2 * (x - lower) / (upper - lower) - 1
    columns = [legendre.legvander(scaled[:, d], degree)[:, 1:] for d in range(x.shape[1])]
    return np.hstack([np.ones((len(x), 1)), *columns])


@dataclass(frozen=True, slots=True)
class PolynomialFit:
    """FedPoly: a federated polynomial and every unit's own coefficients near it."""

    degree: int
    coefficients: Array  # [P]
    personal: Array  # [M, P]
    lower: Array  # [D]
    upper: Array  # [D]

    def predict(self, m: int, x: Array) -> Array:
        """Prediction of unit ``m`` at ``x`` [N, D]; the method has no uncertainty."""
        values: Array = legendre_features(x, self.degree, self.lower, self.upper) @ self.personal[m]
        return values


def fit_polynomial(
    units: Sequence[Unit],
    lower: Array,
    upper: Array,
    *,
    degrees: Sequence[int] = tuple(range(1, 13)),
    penalty: float = 0.1,
    folds: int = 5,
) -> PolynomialFit:
    """FedPoly with the degree chosen by cross-validation; every quantity of the server is a sum over units.

    θ* minimises Σ_m ‖y_m − Φ_m θ‖²; unit m then minimises ‖y_m − Φ_m θ‖²/N_m + penalty ‖θ − θ*‖². (The paper prints
    a minus before the penalty, which would push a unit away from θ*.)
    """
    fold = [np.arange(len(y)) % folds for _, y in units]

    def error(degree: int) -> float:
        total = 0.0
        for k in range(folds):
            train = [
                _moments(x[f != k], y[f != k], degree, lower, upper) for (x, y), f in zip(units, fold, strict=True)
            ]
            theta = _solve(train)
            for (x, y), f, (A, b, _) in zip(units, fold, train, strict=True):
                own = _personal(A, b, int(np.sum(f != k)), theta, penalty)
                total += float(np.sum((y[f == k] - legendre_features(x[f == k], degree, lower, upper) @ own) ** 2))
        return total

    degree = min(degrees, key=error)
    moments = [_moments(x, y, degree, lower, upper) for x, y in units]
    theta = _solve(moments)
    personal = np.stack([_personal(A, b, n, theta, penalty) for A, b, n in moments])
    return PolynomialFit(degree, theta, personal, lower, upper)


def _moments(x: Array, y: Array, degree: int, lower: Array, upper: Array) -> tuple[Array, Array, int]:
    """ΦᵀΦ, Φᵀy and the number of rows: what a unit sends."""
    features = legendre_features(x, degree, lower, upper)
    return features.T @ features, features.T @ y, len(y)


def _solve(moments: Sequence[tuple[Array, Array, int]]) -> Array:
    A, b = sum((m[0] for m in moments), np.zeros(())), sum((m[1] for m in moments), np.zeros(()))
    return np.asarray(np.linalg.lstsq(A, b, rcond=None)[0])


def _personal(A: Array, b: Array, count: int, theta: Array, penalty: float) -> Array:
    return np.asarray(np.linalg.solve(A / count + penalty * np.eye(len(b)), b / count + penalty * theta))
