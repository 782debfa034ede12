"""``logistic-mixed``, ``glmm``: generalised linear mixed models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.methods.sfvi.rows import ModelRow
from fedgp_flower.options import Count, Positive, Section

if TYPE_CHECKING:
    from fedgp_flower.methods.sfvi.options import CommonKeys
    from fedgp_flower.run.config import CoreConfig


class MixedKeys(Section):
    """Units that share random effects, and priors."""

    unit_column: str = ""
    """``logistic-mixed``, ``glmm``: numeric feature whose value names the unit that shares random effects."""
    prior_scale: Positive = 10.0
    """``logistic-mixed``, ``glmm``: prior standard deviation of the coefficients and of ω."""
    centred: bool = False
    """``logistic-mixed``, ``glmm``: whether the latents are the effects themselves, or standard normal a priori."""
    amortised_units: Count = 0
    """``logistic-mixed``, ``glmm``: hidden units of a network that reads q of a unit's latents off its rows; 0: no
    network."""


class SlopeKeys(MixedKeys):
    """The same with random slopes."""

    random_slopes: str = ""
    """``glmm``: features with a slope for every unit beside its intercept, with commas between them."""

    @property
    def slopes(self) -> tuple[str, ...]:
        """The features with random slopes."""
        return tuple(name.strip() for name in self.random_slopes.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class MixedRow(ModelRow):
    """A model with units."""

    def check(self, options: CommonKeys, core: CoreConfig) -> None:
        """Units have a name."""
        del core
        if not self.units_by(options):
            raise ConfigError(f"`sfvi.model` = {options.model!r} needs `sfvi.unit-column`, which names the units")

    def units_by(self, options: CommonKeys) -> str:
        """The key."""
        return options.of(MixedKeys).unit_column

    def columns(self, options: CommonKeys, names: Sequence[str]) -> list[int]:
        """Features without the one that names units, then those with slopes."""
        keys = options.of(SlopeKeys)
        for key, wanted in (("unit-column", (keys.unit_column,)), ("random-slopes", keys.slopes)):
            if missing := [name for name in wanted if name not in names]:
                known = ", ".join(names)
                raise DataError(f"`sfvi.{key}`: {missing[0]!r} is not a numeric feature; there are {known}")
        fixed = [index for index, name in enumerate(names) if name != keys.unit_column]
        return fixed + [list(names).index(name) for name in keys.slopes]

    def amortised_units(self, options: CommonKeys) -> int:
        """The key."""
        return options.of(MixedKeys).amortised_units


_MODEL = "fedgp_flower.methods.sfvi.mixed:MixedModel"
ROWS = {
    "logistic-mixed": MixedRow(_MODEL, "a random intercept of every unit, Section S3.1", MixedKeys, ("bernoulli",)),
    "glmm": MixedRow(
        _MODEL,
        "generalised linear mixed models, Gaussian, logistic or Poisson",
        SlopeKeys,
        ("gaussian", "bernoulli", "poisson"),
    ),
}
