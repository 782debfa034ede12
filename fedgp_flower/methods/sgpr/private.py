"""Sums of a sparse GP with noise that hides every single row, and what can be had from them.

Neighbours differ in one row (x, y) that is replaced; how many rows a site has is public, and so are the range that each
column is clipped to, the inducing points, which are drawn in the box of these ranges, and the hyperparameters tried.

With a = L⁻¹ k(Z, x) and k(x, x) = κ a row adds a aᵀ, y a and y² to the sums; ‖a‖² ≤ κ, since a projection explains no
more than there is, and |y| ≤ C by clipping. In units of κ, C √κ and √2 C² the three differences have squares

    q² + q'² − 2 τ²,    q v² + q' v'² + 2 τ |v v'|,    ½ (v² − v'²)²

at the worst signs, for q = ‖a‖²/κ, τ = |aᵀa'|/κ ≤ √(q q') and v = y/C. Their sum grows in q and q', hence q = q' = 1,
and in the larger of |v| and |v'|, hence v = 1; with w = v'² it is 2 − 2τ² + 1 + w + 2τ√w + ½ (1 − w)², whose derivative
by w, w + τ/√w, is never negative, hence w = 1; 4 + 2τ − 2τ² is largest at τ = ½. So

    Δ² = 9/2,

and noise of standard deviation Δ/μ in these units, in coordinates of the symmetric matrix that keep lengths (an
off-diagonal entry stands for two), makes a release that :mod:`fedgp_flower.privacy.noise` accounts for.
Where only the total of K sites is seen, each adds 1/√K of it. Sums are rounded to a grid whose step is the share
:data:`GRID` of the noise, and integers are added. Rounding moves each of the M² + M + 1 coordinates of neighbours apart
by a step at most, which counts:

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
"""Δ: how far the sums move, in their units, when one row is replaced."""
EDGE = math.sqrt(3)
"""A column's range ends so many standard deviations from its middle, those of the uniform distribution over it."""
GRID = 2.0**-24
"""Sums are rounded to this share of their noise's standard deviation: the last bits of a float tell of its parts."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be released: so many sums, together (ε, δ)."""

    epsilon: float
    delta: float
    releases: int
    inducing: int
    """M."""

    @staticmethod
    def of(config: RunConfig) -> Budget:
        """That of a run: as many sums as there are trials."""
        privacy, trials = config.privacy, cast(SGPROptions, config.options).trials
        return Budget(privacy.epsilon, privacy.delta, trials, config.model.num_inducing)

    @property
    def mu(self) -> float:
        """μ of one release."""
        return mu_of(self.epsilon, self.delta) / math.sqrt(self.releases)

    @property
    def noise(self) -> float:
        """ν: standard deviation of the noise in a total, in its units."""
        return SENSITIVITY / (self.mu - GRID * math.sqrt(self.inducing**2 + self.inducing + 1))

    def spent(self, releases: int) -> float:
        """ε at δ after so many of them."""
        return epsilon_of(composed([self.mu] * releases), self.delta)


def units_of(amplitude: float) -> tuple[float, float, float]:
    """What the noise of gram, projection and squares is multiplied by; ``amplitude`` is κ."""
    return amplitude, EDGE * math.sqrt(amplitude), math.sqrt(2) * EDGE**2


def disturbed(sums: SparseSums, amplitude: float, noise: float, rng: np.random.Generator) -> PrivateSums:
    """The sums of clipped rows with discrete noise of this standard deviation, in their units."""
    size = len(sums.projection)
    lower = np.tril_indices(size, -1)
    symmetric = np.diag(discrete_normal(1 / GRID, size, rng))
    symmetric[lower] = symmetric.T[lower] = discrete_normal(1 / (GRID * math.sqrt(2)), len(lower[0]), rng)
    draws = symmetric, discrete_normal(1 / GRID, size, rng), discrete_normal(1 / GRID, 1, rng)[0]
    steps = [GRID * noise * unit for unit in units_of(amplitude)]
    parts = zip((sums.gram, sums.projection, sums.target_squares), draws, steps, strict=True)
    return PrivateSums(*(np.asarray((np.rint(exact / step) + draw) * step) for exact, draw, step in parts))


def cleaned(told: PrivateSums, rows: int, amplitude: float, noise: float) -> tuple[SparseSums, int]:
    """Sums that rows can have, and how many directions were left out because noise alone would look like them.

    The largest eigenvalue of the noise in the gram matrix is about ν κ √(2M) (Wigner); what is not above it is set to
    zero, with what the projection says there. What residuals would be left, s − bᵀA⁻¹b, is at least its standard
    deviation under the noise, which for u = A⁻¹b has the variance ν² (2C⁴ + 4C²κ‖u‖² + κ²‖u‖⁴).
    """
    spectrum, vectors = np.linalg.eigh(told.gram)
    kept: Array = vectors[:, spectrum > noise * amplitude * math.sqrt(2 * len(spectrum))]
    values, weights = spectrum[len(spectrum) - kept.shape[1] :], kept.T @ told.projection
    gram, projection = (kept * values) @ kept.T, kept @ weights
    least_squares = weights / values
    size = amplitude * float(least_squares @ least_squares)
    deviation = noise * math.sqrt(2 * EDGE**4 + 4 * EDGE**2 * size + size**2)
    squares = max(float(told.target_squares), float(weights @ least_squares) + deviation)
    prior_variance = max(rows * amplitude, float(np.trace(gram)))
    numbers = map(np.asarray, (squares, prior_variance, float(rows)))
    return SparseSums(gram, projection, *numbers), len(spectrum) - kept.shape[1]
