"""Messages of the plainest models beside every method: the mean of the target, linear and logistic regression."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.messages import Described, ScoreSums


@message("query.moments", summand=True)
class Moments:
    """All that linear regression needs of a site's rows. X̃ = (1, X), P = 1 + D, standardised like y."""

    gram: Float[ndarray, "P P"] = leaves("X̃ᵀX̃, X̃ the standardised inputs beside a column of ones", symmetric=True)
    products: Float[ndarray, " P"] = leaves("X̃ᵀy")
    square: Float[ndarray, ""] = leaves("yᵀy")

    def num_parameters(self) -> int:
        """P."""
        return len(self.products)

    def disagreement(self, described: Described) -> str | None:
        """What shows that the site has other rows than it described, or None."""
        return described.unlike("square", self.square, described.target_square)

    def refusal(self, rows: int) -> str | None:
        """Why this cannot come from so many rows, or None."""
        return None if round(float(self.gram[0, 0])) == rows else f"`gram` is not one of {rows} rows"


@message()
class Coefficients:
    """Intercept and weights, in standardised inputs."""

    values: Float[ndarray, " P"] = leaves("intercept and weights")


@message("query.logistic", summand=True)
class LogisticSums:
    """The log likelihood of a site's classes, log σ(±X̃w), and its derivatives by w."""

    likelihood: Float[ndarray, ""] = leaves("Σ log σ((2y − 1) x̃ᵀw)")
    gradient: Float[ndarray, " P"] = leaves("X̃ᵀ(y − p), p = σ(X̃w)")
    information: Float[ndarray, "P P"] = leaves("X̃ᵀ diag(p (1 − p)) X̃", symmetric=True)

    def num_parameters(self) -> int:
        """P."""
        return len(self.gradient)


@message()
class LinearPredictor:
    """f(x) = intercept + (x − centre)ᵀ weights, in standardised coordinates; what it means depends on the likelihood.

    Gaussian or Student-t: y ~ N(f, variance + ‖spread (x − centre)‖²). Bernoulli: P(y = 1) = σ(f). Poisson: a log rate
    ~ N(f, variance).
    """

    centre: Float[ndarray, " D"] = leaves("means of the training inputs")
    weights: Float[ndarray, " D"] = leaves("regression weights; zero for the mean of the target")
    intercept: float = leaves("prediction at the centre")
    variance: float = leaves("of a new row at the centre")
    spread: Float[ndarray, "D D"] | None = leaves("S, with SᵀS the covariance of the weights", default=None)


@message("query.linear_scores", summand=True)
class LinearScoreSums(ScoreSums):
    """Scores of a linear predictor on a site's held-out rows."""


def with_ones(inputs: ndarray) -> ndarray:
    """X̃ = (1, X), [N, P]."""
    return np.column_stack([np.ones(len(inputs)), inputs])
