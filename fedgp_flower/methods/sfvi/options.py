"""The table ``sfvi.*``, shared by ``sfvi`` and ``sfvi-avg``: model, variational family, rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import field_validator

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.methods.sfvi.rows import BUILT_IN, GROUP, ModelRow, sections_of
from fedgp_flower.options import POINT_LIKELIHOODS, Count, MethodOptions, NonNegative, PositiveInt, with_installed

SHARED = "inducing.locations"
"""Name of the shared inducing inputs, which are fixed."""
MODELS: Mapping[str, ModelRow] = with_installed(BUILT_IN, ModelRow, "model", GROUP)
"""Models by their name in ``sfvi.model``."""
CONSTANT_SHARE, FINAL_RATE = 0.8, 0.01
"""Fraction of the rounds with the initial learning rate, and ratio of the final to the initial one."""
CATCH_UP_STEPS = 400
"""Steps on q(Z_Lk | Z_G) at a site that joins late or has lost its state."""


class SFVIOptions(MethodOptions):
    """The keys of the built-in models."""

    table: ClassVar[str] = "sfvi"
    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS | {"categorical"}
    averages: ClassVar[bool] = False
    """Whether every round has local steps and an average."""
    variant_key: ClassVar[str] = "model"
    variants: ClassVar[Mapping[str, str]] = {name: row.summary for name, row in MODELS.items()}

    model: str = "gp"
    """The model; sections are those of Hassan et al. (2023)."""
    structure: Literal["diagonal", "full"] = "diagonal"
    """Covariance of q(Z_G); ``full`` sends M²/2 more numbers."""
    initial_scale: NonNegative = 0.0
    """Initial standard deviation of all latents under q; 0: 0.3, networks 0.1."""
    samples: PositiveInt = 4
    """S, draws of Z_G in a gradient; none for ``gp``."""
    importance_samples: PositiveInt = 20
    """R, weighted draws of each unit's latents; 1 is the bound of the paper and of networks. None for ``gp``."""
    learning_rate: NonNegative = 0.0
    """Learning rate of Adam, at server and sites; 0: 0.05, networks 0.02."""
    warm_start_rounds: Count = 0
    """``sfvi``: initial rounds of ``sfvi-avg``."""
    local_steps: PositiveInt = 20
    """``sfvi-avg``: m, steps of a site in a round."""

    unit_column: str = ""
    """``glmm``: numeric feature whose value names the unit that shares random effects."""
    random_slopes: str = ""
    """``glmm``: comma-separated features with a random slope."""
    hidden: PositiveInt = 50
    """``hierarchical-bnn``, ``fedpop``, ``vae``, ``prodlda``: units of a hidden layer."""
    latents: PositiveInt = 2
    """``vae``: latents of a row; ``prodlda``: topics."""

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str) -> str:
        if name not in MODELS:
            raise ValueError(f"expected one of {', '.join(MODELS)}")
        return name

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for a likelihood or key that the model does not support, or a missing key."""
        likelihood = core.model.likelihood
        if likelihood not in self.row.likelihoods:
            allowed = " or ".join(repr(name) for name in self.row.likelihoods)
            raise ConfigError(f"`model.likelihood` = {likelihood!r}: `sfvi.model` = {self.model!r} needs {allowed}")
        if unread := core.optimizer.unread():
            keys = "`sfvi.learning-rate` and `sfvi.local-steps`"
            raise ConfigError(f"{unread}: sfvi takes steps of Adam on all rows of a site; see {keys}")
        core.require_float64_on_cpu()
        averages = self.averages or self.warm_start_rounds
        if core.privacy.secure_aggregation and averages and self.structure == "full":
            raise ConfigError(
                "`sfvi.structure` = 'full': the barycentre of full covariances is not a sum over sites, which masks"
                " need; set it to 'diagonal', or `privacy.secure-aggregation` to false"
            )
        for name in sorted({name for row in MODELS.values() for name in row.fields} - self.row.fields):
            if getattr(self, name) != type(self).model_fields[name].default:
                readers = ", ".join(model for model, row in MODELS.items() if name in row.fields)
                key = f"`sfvi.{name.replace('_', '-')}`"
                raise ConfigError(f"{key}: `sfvi.model` = {self.model!r} ignores it; it is for {readers}")
        if "unit_column" in self.row.fields and not self.unit_column:
            raise ConfigError(f"`sfvi.model` = {self.model!r} needs `sfvi.unit-column`, which names the units")

    @property
    def default_likelihood(self) -> str:
        """``categorical`` if the model has classes."""
        return "categorical" if self.row.classes else "gaussian"

    @property
    def default_rounds(self) -> int:
        """A round of ``sfvi`` is one step of Adam."""
        return super().default_rounds if self.averages else 2000

    def averaging_rounds(self, rounds: int) -> int:
        """Number of initial rounds with local steps and averages."""
        return rounds if self.averages else min(rounds, self.warm_start_rounds)

    @property
    def row(self) -> ModelRow:
        """The row of the model."""
        return MODELS[self.model]

    @property
    def scale(self) -> float:
        """Initial standard deviation of q."""
        return self.initial_scale or self.row.initial_scale

    @property
    def slopes(self) -> tuple[str, ...]:
        """The features with random slopes."""
        return tuple(name.strip() for name in self.random_slopes.split(",") if name.strip())

    def columns(self, names: Sequence[str]) -> list[int]:
        """Indices of the model's columns: all but the unit column, then those with random slopes again."""
        for key, wanted in (("unit-column", (self.unit_column,)), ("random-slopes", self.slopes)):
            if missing := [name for name in wanted if name and name not in names]:
                known = ", ".join(names)
                raise DataError(f"`sfvi.{key}`: {missing[0]!r} is not a numeric feature; there are {known}")
        fixed = [index for index, name in enumerate(names) if name != self.unit_column]
        return fixed + [list(names).index(name) for name in self.slopes]

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of ``step`` of ``steps``, from 0: constant, then falling geometrically to FINAL_RATE."""
        progress = (step / steps - CONSTANT_SHARE) / (1 - CONSTANT_SHARE)
        return float((self.learning_rate or self.row.learning_rate) * FINAL_RATE ** min(max(progress, 0.0), 1.0))


SECTIONS = sections_of(MODELS.values(), SFVIOptions.model_fields)
FOREIGN = frozenset(name for section in SECTIONS for name in section.model_fields)


class SFVIKeys(*SECTIONS, SFVIOptions):  # type: ignore[misc]
    """The table ``sfvi.*`` with the keys of installed models."""

    foreign: ClassVar[frozenset[str]] = FOREIGN


class SFVIAvgKeys(*SECTIONS, SFVIOptions):  # type: ignore[misc]
    """The table ``sfvi.*`` for ``sfvi-avg``."""

    foreign: ClassVar[frozenset[str]] = FOREIGN
    averages: ClassVar[bool] = True
