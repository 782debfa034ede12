"""Transformations t = g(y) of a numeric target: t is modelled as Gaussian, all results are on the scale of y.

The density of y is p(y) = p(t) g'(y); quantiles of y are g⁻¹ of those of t. The power λ of Yeo and Johnson (2000)
maximises, over a grid in [0, 2], where t takes every value, the likelihood of independent N(m, σ²) values of t,

    −½ N log σ²(λ) + Σ log g'(y; λ),

which only needs sums over rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedgp_flower.lazy import special
from fedgp_flower.typing import Array, Json

TRANSFORMS = {
    "log": "t = log(y), y = exp(t)",
    "sqrt": "t = sqrt(y) > 0, y = t^2",
    "yeo-johnson": "with L = power: t = ((1 + y)^L - 1) / L for y >= 0 (log(1 + y) where L = 0), else"
    " t = -((1 - y)^(2 - L) - 1) / (2 - L) (-log(1 - y) where L = 2); y is the inverse, on the side of t's sign",
}
"""Equations by value of ``transform.target``."""


@dataclass(frozen=True, slots=True)
class Transform:
    """An increasing function g of the target, one of the :data:`TRANSFORMS`."""

    name: str
    power: float = 1.0

    @property
    def positive(self) -> bool:
        """Whether g needs y > 0."""
        return self.name != "yeo-johnson"

    @property
    def powers(self) -> tuple[float, ...]:
        """Candidate powers."""
        return (1.0,) if self.positive else tuple(np.arange(9) / 4)

    @property
    def floor(self) -> float:
        """The least value of t, at which its Gaussian is truncated."""
        return 0.0 if self.name == "sqrt" else -math.inf

    def forward(self, y: Array) -> Array:
        """Return the transformed target g(y)."""
        if self.positive:
            return np.log(y) if self.name == "log" else np.sqrt(y)
        return np.sign(y) * special.boxcox1p(np.abs(y), np.where(y >= 0, self.power, 2 - self.power))

    def inverse(self, t: Array) -> Array:
        """Return the target g⁻¹(t)."""
        if self.positive:
            return np.exp(t) if self.name == "log" else np.square(t)
        return np.sign(t) * special.inv_boxcox1p(np.abs(t), np.where(t >= 0, self.power, 2 - self.power))

    def log_slope(self, y: Array) -> Array:
        """Return log g'(y)."""
        if self.positive:
            return -np.log(y) if self.name == "log" else -np.log(2 * np.sqrt(y))
        return (self.power - 1) * np.sign(y) * np.log1p(np.abs(y))

    def as_json(self) -> Json:
        """Return the entry ``transform`` of the target in the agreed schema."""
        return {"name": self.name, "power": self.power, "equation": TRANSFORMS[self.name]}
