"""Sums of a sparse GP with Gaussian noise for differential privacy, and their use.

Neighbouring data sets differ in one row (x, y), which is replaced. Public are the number of rows of each site, the
range to which each column is clipped, the inducing points, drawn in the box of these ranges, and the hyperparameters.

With a = L⁻¹ k(Z, x) and k(x, x) = κ, a row adds a aᵀ, y a and y² to the sums. ‖a‖² ≤ κ, since a projection explains at
most the prior variance, and |y| ≤ C by clipping. In units of κ, C √κ and √2 C² the squared differences of the sums are

    q² + q'² − 2 τ²,    q v² + q' v'² + 2 τ |v v'|,    ½ (v² − v'²)²

at the worst signs, for q = ‖a‖²/κ, τ = |aᵀa'|/κ ≤ √(q q') and v = y/C. Their sum increases in q and q', hence
q = q' = 1, and in the larger of |v| and |v'|, hence v = 1. With w = v'² it is 2 − 2τ² + 1 + w + 2τ√w + ½ (1 − w)². Its
derivative by w, w + τ/√w, is never negative, hence w = 1; 4 + 2τ − 2τ² is largest at τ = ½. So

    Δ² = 9/2,

and noise of standard deviation ν in these units is a Gaussian mechanism with μ = Δ/ν, as in
:mod:`fedgp_flower.privacy.noise`. The coordinates of the symmetric matrix preserve lengths: an off-diagonal entry
stands for two. If the server sees only the total of K sites, each adds 1/√K of the noise. Sums are rounded to a grid
whose step is the share :data:`GRID` of the noise, and the noise is an integer number of steps. Rounding adds at most
one step to the distance of neighbours in each of the M² + M + 1 coordinates, hence

    μ = Δ / ν + GRID √(M² + M + 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedgp_flower.config import RunConfig
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.methods.sgpr.messages import PrivateSums
from fedgp_flower.methods.sgpr.options import SGPROptions
from fedgp_flower.privacy.noise import composed, discrete_normal, epsilon_of, mu_of
from fedgp_flower.typing import Array

SENSITIVITY = math.sqrt(4.5)
"""Δ: largest change of the sums, in their units, if one row is replaced."""
EDGE = math.sqrt(3)
"""Half of a column's range in standard deviations of the uniform distribution over it."""
GRID = 2.0**-24
"""Step of rounding as a share of the noise; without rounding the last bits of a float disclose its summands."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The privacy budget of a run: a number of releases that together are (ε, δ) private."""

    epsilon: float
    delta: float
    releases: int
    inducing: int  # M

    @staticmethod
    def of(config: RunConfig) -> Budget:
        """Return the budget of a configuration, with one release per trial."""
        privacy, trials = config.privacy, cast(SGPROptions, config.options).trials
        return Budget(privacy.epsilon, privacy.delta, trials, config.model.num_inducing)

    @property
    def mu(self) -> float:
        """μ of one release."""
        return mu_of(self.epsilon, self.delta) / math.sqrt(self.releases)

    @property
    def noise(self) -> float:
        """ν, the standard deviation of the noise in a total, in units of the sums."""
        return SENSITIVITY / (self.mu - GRID * math.sqrt(self.inducing**2 + self.inducing + 1))

    def spent(self, releases: int) -> float:
        """Return ε at δ after this number of releases."""
        return epsilon_of(composed([self.mu] * releases), self.delta)


def units_of(amplitude: float) -> tuple[float, float, float]:
    """Return the units of gram, projection and squares, for the ``amplitude`` κ."""
    return amplitude, EDGE * math.sqrt(amplitude), math.sqrt(2) * EDGE**2


def disturbed(sums: SparseSums, amplitude: float, noise: float, rng: np.random.Generator) -> PrivateSums:
    """Return sums over clipped rows with discrete normal noise of this standard deviation, in units of the sums."""
    size = len(sums.projection)
    lower = np.tril_indices(size, -1)
    symmetric = np.diag(discrete_normal(1 / GRID, size, rng))
    symmetric[lower] = symmetric.T[lower] = discrete_normal(1 / (GRID * math.sqrt(2)), len(lower[0]), rng)
    draws = symmetric, discrete_normal(1 / GRID, size, rng), discrete_normal(1 / GRID, 1, rng)[0]
    steps = [GRID * noise * unit for unit in units_of(amplitude)]
    parts = zip((sums.gram, sums.projection, sums.target_squares), draws, steps, strict=True)
    return PrivateSums(*(np.asarray((np.rint(exact / step) + draw) * step) for exact, draw, step in parts))


def cleaned(noisy: PrivateSums, rows: int, noise: float) -> tuple[SparseSums, int]:
    """Return sums that rows can have, and the number of eigenvectors of A left out because noise dominates them.

    The kernel has amplitude 1. The largest eigenvalue of the noise in A is about ν √(2M) (Wigner). Smaller eigenvalues
    of A, and b along their eigenvectors, are set to zero. The residual s − bᵀA⁻¹b is raised to at least the standard
    deviation of its noise, whose variance for u = A⁻¹b is ν² (2C⁴ + 4C²‖u‖² + ‖u‖⁴).
    """
    spectrum, vectors = np.linalg.eigh(noisy.gram)
    kept: Array = vectors[:, spectrum > noise * math.sqrt(2 * len(spectrum))]
    values, weights = spectrum[len(spectrum) - kept.shape[1] :], kept.T @ noisy.projection
    gram, projection = (kept * values) @ kept.T, kept @ weights
    least_squares = weights / values
    size = float(least_squares @ least_squares)
    deviation = noise * math.sqrt(2 * EDGE**4 + 4 * EDGE**2 * size + size**2)
    squares = max(float(noisy.target_squares), float(weights @ least_squares) + deviation)
    prior_variance = max(float(rows), float(np.trace(gram)))
    numbers = map(np.asarray, (squares, prior_variance, float(rows)))
    return SparseSums(gram, projection, *numbers), len(spectrum) - kept.shape[1]
