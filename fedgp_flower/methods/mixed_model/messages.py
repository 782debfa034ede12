"""Messages of mixed models: trial parameters to the sites, sums over the groups of a site to the server."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message, unpacked
from fedgp_flower.shared_messages import Described, indefinite


@message("query.outline", summand=True, counts="E W")
class Outline:
    """Cross-products of the design matrices, for the whitening and the initial fixed effects."""

    gram: Float[ndarray, "E E"] = leaves("XᵀX, columns divided by their size at reference rows", symmetric=True)
    products: Float[ndarray, " E"] = leaves("Xᵀη₀, η₀ an initial linear predictor from the target of each row")
    effects: Float[ndarray, " W"] = leaves("ZᵀZ of each random term, row by row, columns divided in the same way")
    count: Float[ndarray, ""] = leaves("number of rows")

    def refusal(self, described: Described) -> str | None:
        """Why the described rows cannot give this sum, or None."""
        return described.rows_mismatch("count", self.count) or indefinite("gram", self.gram)


@message()
class Trials:
    """Trial parameters [K, B], whitened.

    Gaussian: (θ, log ℓ, a), with θ the Cholesky factors of relative covariances, and ℓ and a of smooth terms. Other
    likelihoods: (v, β, θ, log ℓ, a, shape), with v the weights of features.
    """

    points: Float[ndarray, "K B"]
    turns: Float[ndarray, "D B"]
    """Displacements for finite differences of the Hessian by v: D/2 directions, then their negatives."""


@message("train.restricted", summand=True)
class Restricted:
    """Sums for the restricted likelihood at each trial: V = I + ZΛΛᵀZᵀ, r = [Φ X y], Φ the features of smooth terms."""

    values: Float[ndarray, "K Q"] = leaves(
        "log|V|, the lower triangle of rᵀV⁻¹r row by row, Σ 1 − |φ|² of each smooth term"
    )
    slopes: Float[ndarray, "K T Q"] = leaves("derivatives of `values` by θ and log ℓ")
    curvatures: Float[ndarray, "K H Q"] = leaves("second derivatives of `values`, lower triangle row by row")
    count: Float[ndarray, ""] = leaves("number of rows")
    groups: Float[ndarray, " F"] = leaves("number of groups of each factor")

    def num_parameters(self) -> int:
        """The number of fixed effects, features, noise and covariance parameters."""
        return len(lower(self.values[0][1:])) + self.slopes.shape[1]

    def refusal(self, described: Described) -> str | None:
        """Why the described rows cannot give this sum, or None."""
        return described.rows_mismatch("count", self.count) or next(
            filter(None, (indefinite("values", lower(row[1:])) for row in self.values)), None
        )


@message("train.marginal", summand=True, counts="B")
class MarginalSums:
    """The log marginal likelihood of a site at each trial, summed over its groups."""

    values: Float[ndarray, " K"] = leaves("log p(y | v, β, θ, log ℓ, a), random effects integrated out")
    gradients: Float[ndarray, "K B"] = leaves("derivatives of `values` by (v, β, θ, log ℓ, a) and log dispersion")
    hessians: Float[ndarray, "K B B"] = leaves("second derivatives of `values`", symmetric=True)
    bends: Float[ndarray, "K D Q"] = leaves("first and second derivatives of the Hessian by v along each direction")
    count: Float[ndarray, ""] = leaves("number of rows")
    groups: Float[ndarray, " F"] = leaves("number of groups of each factor")

    def refusal(self, described: Described) -> str | None:
        """Why the described rows cannot give this sum, or None."""
        if reason := described.rows_mismatch("count", self.count):
            return reason
        above = (self.values > 1e-6).any()
        return "`values` are above 0, which no log probability of counts or classes is" if above else None


@message()
class MixedView:
    """Estimates for predictions at a site, in whitened coordinates."""

    beta: Float[ndarray, " E"]
    """Weights of the features of smooth terms, then fixed effects."""
    covariance: Float[ndarray, "E E"]
    """Covariance of the estimates ``beta``."""
    theta: Float[ndarray, " T"]
    """Cholesky factors of relative covariances, then log ℓ and a of smooth terms."""
    noise: float
    """Noise variance; 1 unless the likelihood is Gaussian."""
    shape: Float[ndarray, " S"]
    """Log dispersion of negative binomial counts; empty otherwise."""


@message("query.site_effect")
class SiteEffect:
    """The conditional random intercept of a site, in standardised units."""

    mean: Float[ndarray, ""] = leaves("conditional mean of the random intercept of the site")
    variance: Float[ndarray, ""] = leaves("variance of that intercept, including the uncertainty of the fixed effects")

    def refusal(self, described: Described) -> str | None:
        """Why no rows can give this variance, or None."""
        return None if self.variance > 0 else "`variance` is not above 0"


def lower(entries: Float[ndarray, " Q"]) -> Float[ndarray, "R R"]:
    """The symmetric matrix with the lower triangle ``entries``, row by row; further entries are ignored."""
    size = int((np.sqrt(8 * len(entries) + 1) - 1) / 2)
    return unpacked(entries[: size * (size + 1) // 2], size)


def pieces(arrays: Mapping[str, ndarray], prefix: str) -> list[ndarray]:
    """The arrays named ``prefix`` and a number, in the order of the numbers."""
    return [arrays[f"{prefix}{k}"] for k in range(sum(name.startswith(prefix) for name in arrays))]
