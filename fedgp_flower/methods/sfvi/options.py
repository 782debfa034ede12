"""The table ``sfvi.*``, shared by ``sfvi`` and ``sfvi-avg``: model, variational family, rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from pydantic import field_validator

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.sfvi.rows import BUILT_IN, ModelRow, installed, sections_of
from fedgp_flower.options import BASIC, Count, MethodOptions, ModelSection, Positive, PositiveInt, Section

K = TypeVar("K", bound=Section)

SHARED = "inducing.locations"
"""Name of the shared inducing inputs, which stay as they are."""
MODELS: Mapping[str, ModelRow] = BUILT_IN | installed(BUILT_IN)
"""By the name in ``sfvi.model``."""
KEYS = sections_of(MODELS.values())
CONSTANT_SHARE, FINAL_RATE = 0.5, 0.01
"""Share of the rounds before the learning rate falls, unless the bound is flat sooner, and where it ends, as a share of
the first rate: half of the rounds find the place, the other half average out the noise."""
CATCH_UP_STEPS = 400
"""Steps on its latents alone by a site that comes late or has lost its state: as many as a usual run takes."""
PREDICTION_DRAWS = 200
"""Draws in a prediction: the Monte Carlo error of a mean is then 7 % of the predictive sd."""


class CommonKeys(MethodOptions):
    """What all models read."""

    table: ClassVar[str] = "sfvi"
    variant_key: ClassVar[str] = "model"
    variants: ClassVar[Mapping[str, str]] = {name: row.summary for name, row in MODELS.items()}
    averages: ClassVar[bool] = False
    """Whether all rounds are averages of local steps."""

    model: Annotated[str, BASIC] = "gp"
    """By name, as in Hassan et al. (2023) where a section is given."""
    structure: Literal["diagonal", "full"] = "diagonal"
    """L_G of q(Z_G). ``full`` sends M²/2 numbers more."""
    initial_scale: Positive = 0.3
    """Initial standard deviation of all latents under q."""
    samples: PositiveInt = 4
    """S, draws of Z_G in a gradient; the expectations of ``gp`` are known and need none."""
    importance_samples: PositiveInt = 20
    """R, draws of the latents of each unit, weighted; 1 is the paper's bound, and that of networks. None for ``gp``.
    """
    learning_rate: Positive = 0.05
    """Of Adam, at the server and at the sites."""
    warm_start_rounds: Count = 0
    """``sfvi``: rounds of ``sfvi-avg`` that come first."""
    local_steps: PositiveInt = 20
    """``sfvi-avg``: m, steps of a site in a round."""

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str) -> str:
        if name not in MODELS:
            raise ValueError(f"expected one of {', '.join(MODELS)}")
        return name

    def check(self, core: CoreConfig) -> None:
        """A likelihood the model has, whole batches, and the keys a model cannot do without."""
        allowed = self.row.likelihoods
        if core.model.likelihood not in allowed:
            raise ConfigError(
                f"`model.likelihood` = {core.model.likelihood!r}: `sfvi.model` = {self.model!r} needs "
                + " or ".join(repr(name) for name in allowed)
            )
        if core.optimizer.batch_size:
            raise ConfigError("`optimizer.batch-size`: sfvi takes all rows of a site; set it to 0")
        if unread := core.optimizer.unread("batch_size"):
            raise ConfigError(f"{unread}: sfvi takes steps of Adam; see `sfvi.learning-rate` and `sfvi.local-steps`")
        if core.device == "cuda" or core.precision != "float64":
            raise ConfigError("`device`, `precision`: sfvi computes on the CPU in float64; its sites have little to do")
        others = {name: field for row in MODELS.values() for name, field in row.keys.model_fields.items()}
        for name in others.keys() - self.row.keys.model_fields.keys():
            if getattr(self, name) != others[name].default:
                readers = ", ".join(model for model, row in MODELS.items() if name in row.keys.model_fields)
                key = f"`sfvi.{name.replace('_', '-')}`"
                raise ConfigError(f"{key}: `sfvi.model` = {self.model!r} does not read it; only {readers}")
        self.row.check(self, core)
        averages = self.averages or self.warm_start_rounds
        if core.privacy.secure_aggregation and averages and self.structure == "full":
            raise ConfigError(
                "`sfvi.structure` = 'full': the barycentre of full covariances is no sum over sites, so it cannot be"
                " formed under masks; set it to 'diagonal', or `privacy.secure-aggregation` to false"
            )

    @property
    def row(self) -> ModelRow:
        """The model."""
        return MODELS[self.model]

    def of(self, section: type[K]) -> K:
        """The same as one of the sections of keys that it extends."""
        assert isinstance(self, section)
        return self

    def numbers_classes(self, section: ModelSection) -> bool:
        """Whether the target holds the numbers of several classes."""
        return self.row.classes and section.likelihood != "bernoulli"

    @property
    def weighted_draws(self) -> int:
        """R."""
        return 1 if self.row.mean_field else self.importance_samples

    @property
    def groups_by(self) -> str:
        """The column whose values name units; empty for a model without units."""
        return self.row.units_by(self)

    def columns(self, names: Sequence[str]) -> list[int]:
        """The columns a model sees, of all inputs by name.

        Raises:
            DataError: a column is not there.
        """
        return self.row.columns(self, names)

    def rate(self, step: int, steps: int, constant: float = CONSTANT_SHARE) -> float:
        """The learning rate of one of ``steps`` rounds or steps, counted from 0: constant, then falling geometrically.

        It ends at :data:`FINAL_RATE` · ``learning-rate``; ``constant`` is the share of steps at the full rate.
        """
        progress = (step / steps - constant) / (1 - constant)
        return float(self.learning_rate * FINAL_RATE ** min(max(progress, 0.0), 1.0))

    def rates(self, rounds: int) -> list[float]:
        """The rate of every step on θ in a whole run."""
        averaging = rounds if self.averages else self.warm_start_rounds
        return [
            self.rate(step, rounds)
            for step in range(rounds)
            for _ in range(self.local_steps if step < averaging else 1)
        ]


if TYPE_CHECKING:

    class SFVIOptions(CommonKeys):
        """The table ``sfvi.*``, with the keys of every model."""

else:

    class SFVIOptions(*KEYS, CommonKeys):
        """The table ``sfvi.*``, with the keys of every model."""

        foreign: ClassVar[frozenset[str]] = frozenset(
            name
            for section in KEYS
            for name in section.model_fields
            if not any(name in row.keys.model_fields for row in BUILT_IN.values())
        )


class SFVIAvgOptions(SFVIOptions):
    """The same table, for ``sfvi-avg``."""

    averages: ClassVar[bool] = True
