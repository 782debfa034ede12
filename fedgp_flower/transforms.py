"""Transformations t = g(y) of a numeric target: what is modelled as Gaussian is t, and everything told is about y.

A density of t becomes one of y by the slope, p(y) = p(t) g'(y); quantiles of y are g⁻¹ of those of t. The power λ of
Yeo and Johnson (2000) is the best of a grid by the likelihood of independent N(m, σ²) values of t,

    −½ N log σ²(λ) + Σ log g'(y; λ),

which needs sums over rows alone. The grid stays in [0, 2], where t takes every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedgp_flower.typing import Array, Json


class Family(NamedTuple):
    """Increasing functions of a number and of a power: g, its inverse, and the logarithm of its slope."""

    equation: str
    forward: Callable[[Array, float], Array]
    inverse: Callable[[Array, float], Array]
    log_slope: Callable[[Array, float], Array]
    powers: tuple[float, ...] = (1.0,)
    floor: float = -math.inf
    """The least value of t; a Gaussian below it is cut off, and what is left is a distribution again."""
    positive: bool = False
    """Whether g needs y > 0."""


@dataclass(frozen=True, slots=True)
class Transform:
    """A member of one of the :data:`TRANSFORMS`."""

    name: str
    power: float = 1.0

    @property
    def family(self) -> Family:
        """The functions."""
        return TRANSFORMS[self.name]

    def forward(self, y: Array) -> Array:
        """The transformed target g(y)."""
        return self.family.forward(y, self.power)

    def inverse(self, t: Array) -> Array:
        """The target g⁻¹(t)."""
        return self.family.inverse(t, self.power)

    def log_slope(self, y: Array) -> Array:
        """Logarithm of g'(y)."""
        return self.family.log_slope(y, self.power)

    @property
    def floor(self) -> float:
        """The least value of t."""
        return self.family.floor

    def as_json(self) -> Json:
        """The entry ``transform`` of the target in the agreed schema."""
        return {"name": self.name, "power": self.power, "equation": self.family.equation}


def _yeo_johnson(y: Array, power: float) -> Array:
    side, size = np.where(y >= 0, power, 2 - power), np.log1p(np.abs(y))
    return np.sign(y) * np.where(side == 0, size, np.expm1(side * size) / np.where(side == 0, 1, side))


def _yeo_johnson_inverse(t: Array, power: float) -> Array:
    side, size = np.where(t >= 0, power, 2 - power), np.abs(t)
    plain = np.log1p(side * size) / np.where(side == 0, 1, side)
    return np.sign(t) * np.expm1(np.where(side == 0, size, plain))


TRANSFORMS = {
    "log": Family(
        "t = log(y), y = exp(t)", lambda y, _: np.log(y), lambda t, _: np.exp(t), lambda y, _: -np.log(y), positive=True
    ),
    "sqrt": Family(
        "t = sqrt(y) > 0, y = t^2",
        lambda y, _: np.sqrt(y),
        lambda t, _: np.square(t),
        lambda y, _: -np.log(2 * np.sqrt(y)),
        floor=0.0,
        positive=True,
    ),
    "yeo-johnson": Family(
        "with L = power: t = ((1 + y)^L - 1) / L for y >= 0 (log(1 + y) where L = 0), else"
        " t = -((1 - y)^(2 - L) - 1) / (2 - L) (-log(1 - y) where L = 2); y is the inverse, on the side of t's sign",
        _yeo_johnson,
        _yeo_johnson_inverse,
        lambda y, power: (power - 1) * np.sign(y) * np.log1p(np.abs(y)),
        powers=tuple(np.arange(9) / 4),
    ),
}
"""By the value of ``transform.target``."""
