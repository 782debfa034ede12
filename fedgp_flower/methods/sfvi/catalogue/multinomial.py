"""``multinomial``, and what models of classes have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedgp_flower.errors import ConfigError
from fedgp_flower.methods.sfvi.rows import ModelRow
from fedgp_flower.options import Section

if TYPE_CHECKING:
    from fedgp_flower.methods.sfvi.options import CommonKeys
    from fedgp_flower.run.config import CoreConfig


class ClassKeys(Section):
    """How many classes."""

    classes: Annotated[int, Field(ge=2)] = 10
    """Of models of classes: the target holds the numbers 0 to ``classes`` − 1."""


class HiddenKeys(ClassKeys):
    """A hidden layer."""

    hidden: Annotated[int, Field(ge=1)] = 50
    """``hierarchical-bnn``, ``fedpop``, ``vae``, ``prodlda``: units of a hidden layer."""


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


ROWS = {
    "multinomial": ClassRow(
        "fedgp_flower.methods.sfvi.multinomial:Multinomial", "logistic regression of several classes, Section S3.2"
    )
}
