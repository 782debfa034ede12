"""A row for each model of SFVI: its keys, what it asks of a configuration, and where its class is.

Further rows come from installed packages through the entry-point group ``fedgp_flower.sfvi_models``, by the name of the
entry. Reading them imports no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.options import PositiveInt, Section

if TYPE_CHECKING:
    from fedgp_flower.config import CoreConfig
    from fedgp_flower.methods.sfvi.options import CommonKeys

GROUP = "fedgp_flower.sfvi_models"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """What a model asks of a configuration, and where it is, imported only when it is used."""

    model: str
    """``module:attribute`` of a :class:`~fedgp_flower.methods.sfvi.structured.StructuredModel`."""
    summary: str
    """Behind the name in ``docs/configuration.md``."""
    keys: type[Section] = Section
    """Fields that the model adds to the table ``sfvi.*``; no two models may give one name two meanings."""
    likelihoods: tuple[str, ...] = ("gaussian",)
    classes: bool = False
    """Whether the target holds classes: their numbers, or two by name where ``model.likelihood`` is ``bernoulli``."""
    mean_field: bool = False
    """Whether a site has too many latents for anything but a diagonal q(Z_Lk | Z_G) without C_k, and R = 1."""
    along: bool = True
    """Whether a report shows how predictions change along one input; not where inputs are no free numbers."""
    link: str = "logit"
    """What the distribution of two classes depends on."""
    known_expectations: bool = False
    """Whether it is a :class:`~fedgp_flower.methods.sfvi.structured.ClosedFormModel`, so that no draws travel."""
    inducing: bool = False
    """Whether it has shared inducing inputs."""

    def check(self, options: CommonKeys, core: CoreConfig) -> None:
        """Raise ConfigError where the model cannot work with these keys; any will do here."""

    def units_by(self, options: CommonKeys) -> str:
        """The column whose values name units that share random effects; empty for a model without units."""
        del options
        return ""

    def columns(self, options: CommonKeys, names: Sequence[str]) -> list[int]:
        """The columns that the model sees, of all inputs by name; all of them here.

        Raises:
            DataError: a column is not there.
        """
        del options
        return list(range(len(names)))


class MixedKeys(Section):
    """Units that share random effects."""

    unit_column: str = ""
    """``glmm``: numeric feature whose value names the unit that shares random effects."""
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
        keys = options.of(MixedKeys)
        for key, wanted in (("unit-column", (keys.unit_column,)), ("random-slopes", keys.slopes)):
            if missing := [name for name in wanted if name not in names]:
                known = ", ".join(names)
                raise DataError(f"`sfvi.{key}`: {missing[0]!r} is not a numeric feature; there are {known}")
        fixed = [index for index, name in enumerate(names) if name != keys.unit_column]
        return fixed + [list(names).index(name) for name in keys.slopes]


class ClassKeys(Section):
    """How many classes."""

    classes: Annotated[int, Field(ge=2)] = 10
    """Of models of classes: the target holds the numbers 0 to ``classes`` − 1."""


class HiddenKeys(ClassKeys):
    """A hidden layer."""

    hidden: PositiveInt = 50
    """``hierarchical-bnn``, ``fedpop``, ``vae``, ``prodlda``: units of a hidden layer."""


class LatentKeys(HiddenKeys):
    """Latents of a row."""

    latents: PositiveInt = 2
    """``vae``: latents of a row; ``prodlda``: topics."""


@dataclass(frozen=True, slots=True)
class ClassRow(ModelRow):
    """Class numbers, or two classes by name."""

    keys: type[Section] = ClassKeys
    likelihoods: tuple[str, ...] = ("gaussian", "bernoulli")
    classes: bool = True

    def check(self, options: CommonKeys, core: CoreConfig) -> None:
        """Numbers are read as they are, and two classes are two."""
        if options.numbers_classes(core.model) and core.standardise:
            raise ConfigError(
                f"`sfvi.model` = {options.model!r} reads class numbers off the target: set `standardise` false"
            )
        if core.model.likelihood == "bernoulli" and options.of(ClassKeys).classes != 2:
            raise ConfigError("`model.likelihood` = 'bernoulli' is two classes: set `sfvi.classes` to 2")


_FAMILY = ("gaussian", "bernoulli", "poisson")
_HERE = "fedgp_flower.methods.sfvi"
_NETWORK = "a Bayesian neural network {} at every site, Section 4.1"
BUILT_IN: dict[str, ModelRow] = {
    "gp": ModelRow(
        f"{_HERE}.gp:HierarchicalModel",
        "shared trend + site deviation + site noise",
        likelihoods=_FAMILY,
        link="probit",
        known_expectations=True,
        inducing=True,
    ),
    "glmm": MixedRow(
        f"{_HERE}.mixed:MixedModel",
        "generalised linear mixed models, Gaussian, logistic or Poisson, Section S3.1",
        MixedKeys,
        _FAMILY,
    ),
    "multinomial": ClassRow(f"{_HERE}.classes:Multinomial", "logistic regression of several classes, Section S3.2"),
    "hierarchical-bnn": ClassRow(
        f"{_HERE}.classes:HierarchicalNetwork", _NETWORK.format("with other weights"), HiddenKeys, mean_field=True
    ),
    "fedpop": ClassRow(
        f"{_HERE}.classes:FedPop", _NETWORK.format("with another last layer"), HiddenKeys, mean_field=True
    ),
    "vae": ClassRow(
        f"{_HERE}.amortised:Autoencoder",
        "an autoencoder, one encoder for all sites",
        LatentKeys,
        mean_field=True,
        along=False,
    ),
    "prodlda": ClassRow(
        f"{_HERE}.amortised:TopicModel", "topics of counts of words, likewise", LatentKeys, mean_field=True, along=False
    ),
}


def installed(known: Mapping[str, ModelRow]) -> dict[str, ModelRow]:
    """The rows of installed packages.

    Raises:
        ConfigError: an entry is no row, or has the name of another.
    """
    found: dict[str, ModelRow] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        row = entry.load()
        if not isinstance(row, ModelRow) or entry.name in known:
            words = "another model has that name" if entry.name in known else f"expected a ModelRow, got {row!r}"
            raise ConfigError(f"model {entry.name!r} (entry point {entry.value}): {words}")
        found[entry.name] = row
    return found


def sections_of(rows: Iterable[ModelRow]) -> list[type[Section]]:
    """The sections of keys to extend, without those that others extend already.

    Raises:
        ConfigError: two sections have a field of one name.
    """
    every = list(dict.fromkeys(row.keys for row in rows if row.keys is not Section))
    for name in {name for section in every for name in section.model_fields}:
        owners = {
            next(base for base in reversed(section.__mro__) if name in inspect.get_annotations(base))
            for section in every
            if name in section.model_fields
        }
        if len(owners) > 1:
            modules = ", ".join(sorted(f"{owner.__module__}:{owner.__name__}" for owner in owners))
            raise ConfigError(f"`sfvi.{name.replace('_', '-')}` is a key of two sections: {modules}; rename one")
    return [one for one in every if not any(other is not one and issubclass(other, one) for other in every)]
