"""A row for each model of SFVI: what it asks of a configuration, its keys, and where it is.

Built-in rows are those of the modules in :mod:`fedgp_flower.methods.sfvi.catalogue`, each a mapping ``ROWS``; further
ones come from installed packages through the entry-point group ``fedgp_flower.sfvi_models``, by the entry's name.
Reading them imports no model.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.sfvi import catalogue
from fedgp_flower.options import Section

if TYPE_CHECKING:
    from fedgp_flower.methods.sfvi.options import CommonKeys
    from fedgp_flower.run.config import CoreConfig

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

    def amortised_units(self, options: CommonKeys) -> int:
        """Hidden units of a network that reads q of a unit's latents off its rows; 0: no network."""
        del options
        return 0


def built_in() -> dict[str, ModelRow]:
    """The rows of this project, by name; the first module's first."""
    names = [own.name for own in pkgutil.iter_modules(catalogue.__path__)]
    modules = [importlib.import_module(f"{catalogue.__name__}.{name}") for name in names]
    return {name: row for module in modules for name, row in module.ROWS.items()}


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
    for name in {name for own in every for name in own.model_fields}:
        owners = {
            next(base for base in reversed(own.__mro__) if name in inspect.get_annotations(base))
            for own in every
            if name in own.model_fields
        }
        if len(owners) > 1:
            modules = ", ".join(sorted(f"{own.__module__}:{own.__name__}" for own in owners))
            raise ConfigError(f"`sfvi.{name.replace('_', '-')}` is a key of two sections: {modules}; rename one")
    return [own for own in every if not any(other is not own and issubclass(other, own) for other in every)]
