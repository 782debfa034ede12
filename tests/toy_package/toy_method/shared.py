"""What both halves read: the table ``toy.*`` and the messages."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.options import MethodOptions, Positive


class ToyOptions(MethodOptions):
    """The table ``toy.*``."""

    table: ClassVar[str] = "toy"

    prior_scale: Positive = 3.0
    """Prior standard deviation of every weight."""
    noise: Positive = 1.0
    """Noise variance to start from."""


@message("query.products", summand=True)
class Products:
    """Sums of a site's rows φ = (1, x), standardised."""

    gram: Float[ndarray, "P P"] = leaves("Σ φ φᵀ")
    moment: Float[ndarray, " P"] = leaves("Σ φ y")
    squares: Float[ndarray, ""] = leaves("Σ y²")
    count: Float[ndarray, ""] = leaves("number of rows")


@message()
class Weights:
    """N(mean, covariance) of the weights, and the noise variance: the state, and all that predicts."""

    mean: Float[ndarray, " P"]
    covariance: Float[ndarray, "P P"]
    noise: float


def with_intercept(inputs: ndarray) -> ndarray:
    """The features φ of inputs [N, D]."""
    return np.hstack([np.ones((len(inputs), 1)), inputs])
