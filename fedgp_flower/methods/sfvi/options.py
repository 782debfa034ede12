"""The table ``sfvi.*``, shared by ``sfvi`` and ``sfvi-avg``: model, variational family, rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator

from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.sfvi.catalogue.gp import GPKeys
from fedgp_flower.methods.sfvi.rows import ModelRow, built_in, installed, sections_of
from fedgp_flower.options import BASIC, Count, Fraction, MethodOptions, ModelSection, Positive, PositiveInt, Section
from fedgp_flower.run.config import CoreConfig

K = TypeVar("K", bound=Section)

SHARED, LEARNED = "inducing.locations", "theta.inputs"
"""Names of the shared inducing inputs of ``gp``: constant, or part of θ."""
BUILT_IN = built_in()
MODELS: Mapping[str, ModelRow] = BUILT_IN | installed(BUILT_IN)
"""By the name in ``sfvi.model``."""
KEYS = sections_of(MODELS.values())
CLOSED_FORM = {"objective", "tolerance", "model", "shared_inputs"}
CLOSED_FORM |= {"deviation", "site_inducing", "site_noise", "site_amplitude", "site_lengthscale", "site_slope"}
"""Fields that SFVI in closed form reads."""


class CommonKeys(MethodOptions):
    """What all models read."""

    table: ClassVar[str] = "sfvi"
    variant_key: ClassVar[str] = "model"
    variants: ClassVar[Mapping[str, str]] = {name: row.summary for name, row in MODELS.items()}
    other_clients: ClassVar[tuple[str, ...]] = (
        "fedgp_flower.methods.sfvi.closed_client:ClosedFormClient",
        "fedgp_flower.methods.sfvi.dual_client:DualSFVIClient",
    )
    averages: ClassVar[bool] = False
    """Whether all rounds are averages of local steps."""

    model: Annotated[str, BASIC] = "gp"
    """By name, as in Hassan et al. (2023) where a section is given."""
    objective: Literal["auto", "closed-form", "stochastic"] = "auto"
    """``sfvi``: ``closed-form``, for ``gp``, has both q at their optimum, keeps deviations exact and takes Newton steps
    on θ until they promise no more, for labels and counts by pseudo-observations; ``stochastic`` is the paper's
    gradient of θ and q(Z_G); ``auto`` is the first for ``gp`` with Gaussian noise.
    """
    tolerance: Positive = 0.1
    """``closed-form``: stop when the next step promises a smaller rise of the bound, in nats of all rows together."""
    structure: Literal["diagonal", "full"] = "diagonal"
    """L_G of q(Z_G). ``full`` sends M²/2 numbers more; ``gp`` gains from it where sites do not deviate."""
    local_structure: Literal["diagonal", "full"] = "full"
    """L_k of q(Z_Lk | Z_G); networks have ``diagonal`` whatever is said here."""
    coupling: bool = True
    """C_k: whether q(Z_Lk | Z_G) depends on Z_G; that of networks never does."""
    initial_scale: Positive = 0.3
    """Initial standard deviation of Z_G under q."""
    initial_local_scale: Positive = 0.3
    """Initial standard deviation of Z_Lk under q."""
    samples: PositiveInt = 4
    """S, draws of Z_G in a gradient; the expectations of ``gp`` are known and need none."""
    importance_samples: PositiveInt = 20
    """R, draws of the latents of each unit, weighted; 1 is the paper's bound, and that of networks. None for ``gp``.
    """

    learning_rate: Positive = 0.05
    """Of Adam, at the server and at the sites."""
    constant_share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the rounds before the learning rate falls, unless the bound is flat sooner."""
    final_rate: Fraction = 0.01
    """Learning rate after the last round, as a share of the first."""
    fraction: Fraction = 1.0
    """Share of the sites that take part in a round; at least one does."""
    catch_up_steps: Count = 400
    """Steps on its own latents alone, at a rate that falls like that of a run, by a site that comes late or has lost
    its state."""

    own_steps: PositiveInt = 1
    """``sfvi``: steps of a site on its own latents in a round; the gradient of the last one is sent."""
    warm_start_rounds: Count = 0
    """``sfvi``: rounds of ``sfvi-avg`` that come first."""
    local_steps: PositiveInt = 20
    """``sfvi-avg``: m, steps of a site in a round."""
    keep_moments: bool = True
    """``sfvi-avg``: whether the sites' Adam goes on from round to round or starts anew."""
    weights: Literal["rows", "equal"] = "rows"
    """``sfvi-avg``: weights of the sites in the average."""
    scaling: Literal["whole", "likelihood"] = "whole"
    """``sfvi-avg``: what N / N_k multiplies; ``likelihood`` is the paper's letter and makes q(Z_Lk | Z_G) too sharp."""

    prediction_draws: PositiveInt = 200
    """Draws in a prediction; ``gp`` needs none."""

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str) -> str:
        if name not in MODELS:
            raise ValueError(f"expected one of {', '.join(MODELS)}")
        return name

    def in_closed_form(self, section: ModelSection) -> bool:
        """Whether a run takes Newton steps."""
        able = self.model == "gp" and section.likelihood == "gaussian"
        return not self.averages and self.objective != "stochastic" and (able or self.objective == "closed-form")

    def strategy_for(self, core: CoreConfig) -> str:
        """The Strategy of ``sfvi.objective``."""
        if not self.in_closed_form(core.model):
            return ""
        gaussian = core.model.likelihood == "gaussian"
        return "strategies.sfvi_closed:SFVIClosedForm" if gaussian else "strategies.sfvi_duals:SFVIDuals"

    def client_for(self, core: CoreConfig) -> str:
        """The site's half of ``sfvi.objective``."""
        exact, dual = self.other_clients
        return (exact if core.model.likelihood == "gaussian" else dual) if self.in_closed_form(core.model) else ""

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
        self._check_keys()
        self.row.check(self, core)
        self._check_totals(core)
        if self.in_closed_form(core.model):
            self._check_closed_form(core)

    def _check_keys(self) -> None:
        """Keys of other models are as they were."""
        others = {name: field for row in MODELS.values() for name, field in row.keys.model_fields.items()}
        for name in others.keys() - self.row.keys.model_fields.keys():
            if getattr(self, name) != others[name].default:
                readers = ", ".join(model for model, row in MODELS.items() if name in row.keys.model_fields)
                key = f"`sfvi.{name.replace('_', '-')}`"
                raise ConfigError(f"{key}: `sfvi.model` = {self.model!r} does not read it; only {readers}")

    def _check_totals(self, core: CoreConfig) -> None:
        core.require_whole_rosters("sfvi.fraction", self.fraction)
        averages = (self.averages or self.warm_start_rounds) and not self.in_closed_form(core.model)
        if core.privacy.secure_aggregation and averages and self.structure == "full":
            raise ConfigError(
                "`sfvi.structure` = 'full': the barycentre of full covariances is no sum over sites, so it cannot be"
                " formed under masks; set it to 'diagonal', or `privacy.secure-aggregation` to false"
            )

    def _check_closed_form(self, core: CoreConfig) -> None:
        if self.model != "gp":
            raise ConfigError("`sfvi.objective` = 'closed-form' needs `sfvi.model` = 'gp'; set it to 'stochastic'")
        usual = type(self)()
        names = [name for name in type(self).model_fields if name not in CLOSED_FORM]
        if unread := [name for name in names if getattr(self, name) != getattr(usual, name)]:
            keys = ", ".join(f"`sfvi.{name.replace('_', '-')}`" for name in unread)
            raise ConfigError(f"{keys}: not read in closed form; set `sfvi.objective` to 'stochastic'")

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
    def coupled(self) -> bool:
        """Whether q(Z_Lk | Z_G) has C_k."""
        return self.coupling and not self.row.mean_field

    @property
    def triangular(self) -> bool:
        """Whether q(Z_Lk | Z_G) has L_k."""
        return self.local_structure == "full" and not self.row.mean_field

    @property
    def weighted_draws(self) -> int:
        """R."""
        return 1 if self.row.mean_field else self.importance_samples

    @property
    def known_expectations(self) -> bool:
        """Whether the model's expectations are known, so that no draws travel."""
        return self.row.known_expectations

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

    def rate(self, step: int, steps: int, share: float | None = None) -> float:
        """The learning rate of one of ``steps`` rounds or steps, counted from 0: constant, then falling geometrically.

        It ends at ``final-rate`` · ``learning-rate``; ``share`` is ``constant-share`` if not given.
        """
        constant = self.constant_share if share is None else share
        progress = (step / steps - constant) / (1 - constant)
        return float(self.learning_rate * self.final_rate ** min(max(progress, 0.0), 1.0))

    def catch_up_rates(self) -> list[float]:
        """The rate of every step of a site that comes late: the whole way from the first to the last."""
        return [self.rate(step, self.catch_up_steps) for step in range(self.catch_up_steps)]

    def rates(self, rounds: int) -> list[float]:
        """The rate of every step on θ in a whole run."""
        averaging = rounds if self.averages else self.warm_start_rounds
        return [
            self.rate(step, rounds)
            for step in range(rounds)
            for _ in range(self.local_steps if step < averaging else 1)
        ]


if TYPE_CHECKING:

    class SFVIOptions(GPKeys, CommonKeys):
        """The table ``sfvi.*``, with the keys of every model."""

else:

    class SFVIOptions(*KEYS, CommonKeys):
        """The table ``sfvi.*``, with the keys of every model."""

        foreign: ClassVar[frozenset[str]] = frozenset(
            name
            for own in KEYS
            for name in own.model_fields
            if not any(name in r.keys.model_fields for r in BUILT_IN.values())
        )


class SFVIAvgOptions(SFVIOptions):
    """The same table, for ``sfvi-avg``."""

    averages: ClassVar[bool] = True
