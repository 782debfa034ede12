"""What the server and the sites of a mixed model say to each other: sums over the groups of a site."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.shared_messages import Described


@message("query.outline", summand=True, counts="E W")
class Outline:
    """What whitens the columns, and where the search starts."""

    gram: Float[ndarray, "E E"] = leaves("XᵀX, columns divided by their size at reference rows", symmetric=True)
    products: Float[ndarray, " E"] = leaves("Xᵀη₀, η₀ a rough linear predictor from each target")
    effects: Float[ndarray, " W"] = leaves("ZᵀZ of every random term, row by row, its columns so divided")
    count: Float[ndarray, ""] = leaves("number of rows")

    def refusal(self, described: Described) -> str | None:
        """Why this cannot come from so many rows, or None."""
        return described.rows_mismatch("count", self.count) or indefinite("gram", self.gram)


@message()
class Trials:
    """Whitened parameters to be tried: θ, Cholesky factors of relative covariances, and log ℓ and a of smooth terms.

    Where noise is not Gaussian, (v, β, θ, log ℓ, a, shape), v the weights of features.
    """

    points: Float[ndarray, "K B"]
    turns: Float[ndarray, "D B"]
    """Short ways from each, then their opposites, that Hessians by v are differentiated along."""


@message("train.restricted", summand=True)
class Restricted:
    """What restricted maximum likelihood needs at each trial: V = I + ZΛΛᵀZᵀ, r = [Φ X y], Φ of smooth terms."""

    values: Float[ndarray, "K Q"] = leaves("log|V|, lower entries of rᵀV⁻¹r row by row, Σ 1 − |φ|² of smooth terms")
    slopes: Float[ndarray, "K T Q"] = leaves("their derivatives by θ and log ℓ")
    curvatures: Float[ndarray, "K H Q"] = leaves("their second derivatives, lower entries row by row")
    count: Float[ndarray, ""] = leaves("number of rows")
    groups: Float[ndarray, " F"] = leaves("number of groups of each factor")

    def num_parameters(self) -> int:
        """Of fixed effects, features, the noise and θ."""
        return len(lower(self.values[0][1:])) + self.slopes.shape[1]

    def refusal(self, described: Described) -> str | None:
        """Why this cannot come from so many rows, or None."""
        return described.rows_mismatch("count", self.count) or next(
            filter(None, (indefinite("values", lower(row[1:])) for row in self.values)), None
        )


@message("train.marginal", summand=True, counts="B")
class MarginalSums:
    """Log marginal likelihoods of groups, summed, at each trial."""

    values: Float[ndarray, " K"] = leaves("log p(y | v, β, θ, log ℓ, a), random effects integrated out")
    gradients: Float[ndarray, "K B"] = leaves("its derivatives by (v, β, θ, log ℓ, a), and by log dispersion")
    hessians: Float[ndarray, "K B B"] = leaves("its second derivatives", symmetric=True)
    bends: Float[ndarray, "K D Q"] = leaves("first, then second derivatives along the ways of the second ones by v")
    count: Float[ndarray, ""] = leaves("number of rows")
    groups: Float[ndarray, " F"] = leaves("number of groups of each factor")

    def refusal(self, described: Described) -> str | None:
        """Why this cannot come from so many rows, or None."""
        above = "`values` are above 0: no counts or classes are so likely" if (self.values > 1e-6).any() else None
        return described.rows_mismatch("count", self.count) or above


@message()
class MixedView:
    """What predicts at a site, together with its rows; all in whitened coordinates."""

    beta: Float[ndarray, " E"]
    """Of features of smooth terms, then of fixed columns."""
    covariance: Float[ndarray, "E E"]
    """Of the estimates of β."""
    theta: Float[ndarray, " T"]
    """Relative covariances, log ℓ, and a of smooth terms."""
    noise: float
    """Variance of the noise; 1 where there is none."""
    shape: Float[ndarray, " S"]
    """Of a likelihood that has one: log dispersion."""


@message("query.site_effect")
class SiteEffect:
    """The random intercept of a site, given its rows and the estimates, in units of the model."""

    mean: Float[ndarray, ""] = leaves("conditional mean of the random intercept of the site")
    variance: Float[ndarray, ""] = leaves("its variance, with that of the fixed effects")

    def refusal(self, described: Described) -> str | None:
        """Why no rows have such an effect, or None."""
        del described
        return None if self.variance > 0 else "`variance` is not above 0"


def indefinite(name: str, matrix: Float[ndarray, "E E"]) -> str | None:
    """Why a matrix is no sum of squares, or None."""
    size = max(float(np.abs(matrix).max(initial=0.0)), 1e-300)
    wrong = len(matrix) and not np.linalg.eigvalsh(matrix / size)[0] >= -1e-6
    return f"`{name}` is not positive semi-definite" if wrong else None


def lower(entries: Float[ndarray, " Q"]) -> Float[ndarray, "R R"]:
    """The symmetric matrix of its lower entries row by row; a few more may follow these."""
    size = int((np.sqrt(8 * len(entries) + 1) - 1) / 2)
    matrix = np.zeros((size, size))
    matrix[np.tril_indices(size)] = entries[: size * (size + 1) // 2]
    return np.tril(matrix, -1).T + matrix


def pieces(arrays: Mapping[str, ndarray], prefix: str) -> list[ndarray]:
    """The arrays whose names begin so, in the order of the numbers that follow."""
    return [arrays[f"{prefix}{k}"] for k in range(sum(name.startswith(prefix) for name in arrays))]
