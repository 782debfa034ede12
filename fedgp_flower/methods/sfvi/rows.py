"""Registry of the models of SFVI: their keys, likelihoods and classes.

Installed packages add rows by the entry-point group ``fedgp_flower.sfvi_models``; the name of the entry is that of the
model. Reading the rows imports no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Section

GROUP = "fedgp_flower.sfvi_models"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Requirements of a model, and the path of its class, which is imported on use."""

    model: str
    """``module:attribute`` of a :class:`~fedgp_flower.methods.sfvi.structured.StructuredModel`."""
    summary: str
    """Description in ``docs/configuration.md``."""
    keys: type[Section] = Section
    """Fields that an installed model adds to the table ``sfvi.*``."""
    reads: tuple[str, ...] = ()
    """Fields of the table that only some models read."""
    likelihoods: tuple[str, ...] = ("gaussian",)
    classes: bool = False
    """Whether the target holds classes."""
    mean_field: bool = False
    """Whether q(Z_Lk | Z_G) is diagonal without C_k, and R = 1, as a site has too many latents for more."""
    personal: bool = False
    """Whether the last layer never leaves its site, so that new sites have no prediction."""
    known_expectations: bool = False
    """Whether a site's term of the bound is computed without Monte Carlo draws."""
    inducing: bool = False
    """Whether it has shared inducing inputs."""
    initial_scale: float = 0.3
    learning_rate: float = 0.05
    """Defaults of the configuration; networks need small first steps."""
    untouched: bool = False
    """Whether inputs are not standardised, whatever ``standardise`` says."""

    @property
    def fields(self) -> frozenset[str]:
        """The optional fields that the model reads."""
        return frozenset({*self.reads, *self.keys.model_fields})


_HERE, _FAMILY = "fedgp_flower.methods.sfvi", ("gaussian", "bernoulli", "poisson")
_CLASSES = ModelRow(
    f"{_HERE}.classes:Multinomial",
    "multinomial logistic regression, Section S3.2",
    likelihoods=("categorical", "bernoulli"),
    classes=True,
)
_NETWORK = replace(
    _CLASSES,
    model=f"{_HERE}.classes:PersonalNetwork",
    summary="a Bayesian neural network with different weights at every site, Section 4.1",
    reads=("hidden",),
    mean_field=True,
    personal=True,
    initial_scale=0.1,
    learning_rate=0.02,
)
_AMORTISED = replace(
    _NETWORK,
    personal=False,
    untouched=True,
    model=f"{_HERE}.classes:AmortisedModel",
    summary="an autoencoder, one encoder for all sites",
    reads=("hidden", "latents"),
)
BUILT_IN: dict[str, ModelRow] = {
    "gp": ModelRow(
        f"{_HERE}.gp:HierarchicalModel",
        "shared trend + site deviation + site noise",
        likelihoods=_FAMILY,
        known_expectations=True,
        inducing=True,
    ),
    "glmm": ModelRow(
        f"{_HERE}.mixed:GroupedModel",
        "generalised linear mixed models, Section S3.1",
        reads=("unit_column", "random_slopes"),
        likelihoods=_FAMILY,
    ),
    "multinomial": _CLASSES,
    "hierarchical-bnn": _NETWORK,
    "fedpop": replace(_NETWORK, summary="a Bayesian neural network with a last layer for each site, Section 4.1"),
    "vae": _AMORTISED,
    "prodlda": replace(_AMORTISED, summary="a topic model of word counts, one encoder for all sites"),
}


def sections_of(rows: Iterable[ModelRow], fields: Iterable[str]) -> list[type[Section]]:
    """The sections of keys that installed models add to ``fields``."""
    sections, taken = list(dict.fromkeys(row.keys for row in rows if row.keys is not Section)), set(fields)
    for section in sections:
        if twice := taken & set(section.model_fields):
            key = f"`sfvi.{min(twice).replace('_', '-')}`"
            raise ConfigError(f"{key} of {section.__module__}:{section.__name__} exists already; rename it")
        taken |= set(section.model_fields)
    return sections
