"""Transformations t = g(y) of a numeric target: what is modelled as Gaussian is t, and everything told is about y.

A density of t becomes one of y by the slope, p(y) = p(t) g'(y); quantiles of y are g⁻¹ of those of t. The power λ of
Yeo and Johnson (2000) is the best of a grid by the likelihood of independent N(m, σ²) values of t,

    −½ N log σ²(λ) + Σ log g'(y; λ),

which needs sums over rows alone. The grid stays in [0, 2], where t takes every value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedgp_flower.typing import Array


@dataclass(frozen=True, slots=True)
class Transform(ABC):
    """An increasing function g of the target, its inverse and its slope."""

    power: float = 1.0
    name: ClassVar[str]
    equation: ClassVar[str]
    powers: ClassVar[tuple[float, ...]] = (1.0,)
    """What ``power`` may be."""
    floor: ClassVar[float] = -math.inf
    """The least value of t; a Gaussian below it is cut off, and what is left is a distribution again."""
    positive: ClassVar[bool] = False
    """Whether g needs y > 0."""

    @abstractmethod
    def forward(self, y: Array) -> Array:
        """T = g(y)."""

    @abstractmethod
    def inverse(self, t: Array) -> Array:
        """Y = g⁻¹(t)."""

    @abstractmethod
    def log_slope(self, y: Array) -> Array:
        """Logarithm of g'(y)."""

    def as_json(self) -> dict[str, Any]:
        """The entry ``transform`` of the target in the agreed schema."""
        return {"name": self.name, "power": self.power, "equation": self.equation}


class Log(Transform):
    """t = log y."""

    name, equation, positive = "log", "t = log(y), y = exp(t)", True

    def forward(self, y: Array) -> Array:  # noqa: D102
        return np.log(y)

    def inverse(self, t: Array) -> Array:  # noqa: D102
        return np.exp(t)

    def log_slope(self, y: Array) -> Array:  # noqa: D102
        return -np.log(y)


class Root(Transform):
    """t = √y."""

    name, equation, positive, floor = "sqrt", "t = sqrt(y) > 0, y = t^2", True, 0.0

    def forward(self, y: Array) -> Array:  # noqa: D102
        return np.sqrt(y)

    def inverse(self, t: Array) -> Array:  # noqa: D102
        return np.square(t)

    def log_slope(self, y: Array) -> Array:  # noqa: D102
        return -np.log(2 * np.sqrt(y))


class YeoJohnson(Transform):
    """t = ((1 + y)^λ − 1)/λ for y ≥ 0, and −((1 − y)^(2−λ) − 1)/(2 − λ) below; λ = 1 changes nothing."""

    name = "yeo-johnson"
    equation = (
        "with L = power: t = ((1 + y)^L - 1) / L for y >= 0 (log(1 + y) where L = 0), else"
        " t = -((1 - y)^(2 - L) - 1) / (2 - L) (-log(1 - y) where L = 2); y is the inverse, on the side of t's sign"
    )
    powers = tuple(np.arange(9) / 4)

    def _side(self, sign: Array) -> Array:
        return np.where(sign >= 0, self.power, 2 - self.power)

    def forward(self, y: Array) -> Array:  # noqa: D102
        power, size = self._side(y), np.log1p(np.abs(y))
        return np.sign(y) * np.where(power == 0, size, np.expm1(power * size) / np.where(power == 0, 1, power))

    def inverse(self, t: Array) -> Array:  # noqa: D102
        power, size = self._side(t), np.abs(t)
        plain = np.log1p(power * size) / np.where(power == 0, 1, power)
        return np.sign(t) * np.expm1(np.where(power == 0, size, plain))

    def log_slope(self, y: Array) -> Array:  # noqa: D102
        return (self.power - 1) * np.sign(y) * np.log1p(np.abs(y))


TRANSFORMS: Mapping[str, type[Transform]] = {family.name: family for family in (Log, Root, YeoJohnson)}
"""By the value of ``transform.target``."""


def transform_of(entry: Mapping[str, Any] | None) -> Transform | None:
    """The inverse of :meth:`Transform.as_json`."""
    return None if entry is None else TRANSFORMS[str(entry["name"])](float(entry["power"]))
