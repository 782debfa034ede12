"""The one table of methods: a row ties a Flower Strategy to a NumPyClient and its configuration table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedgp_flower.config import FlatConfig, MethodOptions, RunConfig, Value, defaults, parse

COMMON_PHASES = (
    *("query.describe", "query.shape", "query.predictions", "query.local_only", "query.pooled"),
    "evaluate",
)
"""Messages every client answers, whatever the method."""


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the registry. Classes are named ``module:attribute`` and imported only when the method is used."""

    summary: str
    paper: str
    options: str
    strategy: str
    client: str
    phases: tuple[str, ...]
    """Message types of its own: ``train``, ``train.<phase>``, ``query.<what>``."""


METHODS: Mapping[str, Method] = {
    "pvi": Method(
        summary="Partitioned variational inference: a factor per site, refined in turn; sites can be forgotten",
        paper="Ashman et al., Partitioned variational inference (2022); Federated learning of sparse GPs",
        options="strategies.pvi_options:PVIOptions",
        strategy="strategies.pvi:create",
        client="fedgp_flower.clients.pvi:PVIClient",
        phases=("train", "train.distil", "train.refit", "query.free_energy"),
    ),
    "fsgp": Method(
        summary="Federated sparse GP: averaged or exact training, exact posterior from sums",
        paper="Guo et al., Federated sparse Gaussian processes (2022); exact mode: Gal et al. (2014)",
        options="strategies.fsgp:FSGPOptions",
        strategy="strategies.fsgp:create",
        client="fedgp_flower.clients.fsgp:FSGPClient",
        phases=("train", "train.gradient", "query.statistics"),
    ),
    "fgpr": Method(
        summary="Averaged hyperparameters of exact GPs; every site predicts from its own rows",
        paper="Yue and Kontar, Federated Gaussian process (2021); baseline of Guo et al. (2022)",
        options="strategies.fgpr:FGPROptions",
        strategy="strategies.fgpr:create",
        client="fedgp_flower.clients.fgpr:FGPRClient",
        phases=("train",),
    ),
    "sfvi": Method(
        summary="Structured federated VI: shared trend, site deviations that stay at home; one gradient a round",
        paper="Hassan et al., Federated variational inference methods for structured latent variable models (2023)",
        options="strategies.sfvi_options:SFVIOptions",
        strategy="strategies.sfvi:create",
        client="fedgp_flower.clients.sfvi:SFVIClient",
        phases=("train.gradient", "train.average", "query.model"),
    ),
    "sfvi-avg": Method(
        summary="SFVI with local steps: mean of parameters, Wasserstein barycentre of the sites' posteriors",
        paper="Hassan et al., Federated variational inference methods for structured latent variable models (2023)",
        options="strategies.sfvi_options:SFVIOptions",
        strategy="strategies.sfvi:create",
        client="fedgp_flower.clients.sfvi:SFVIClient",
        phases=("train.gradient", "train.average", "query.model"),
    ),
    "fedmgp": Method(
        summary="Federated multi-output GP: units are smoothed, scaled views of shared latent functions",
        paper="Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024)",
        options="strategies.fedmgp_options:FedMGPOptions",
        strategy="strategies.fedmgp:create",
        client="fedgp_flower.clients.fedmgp:FedMGPClient",
        phases=("train", "train.exact", "query.start", "query.curve"),
    ),
    "modular-gp": Method(
        summary="Yardstick, simulation only: every unit's sparse GP, joined by a multi-output GP",
        paper="Moreno-Muñoz et al., Modular Gaussian processes for transfer learning (2021)",
        options="strategies.fedmgp_options:FedMGPOptions",
        strategy="strategies.fedmgp_comparison:create_modular",
        client="fedgp_flower.clients.fedmgp_yardsticks:MultiOutputYardstickClient",
        phases=("query.modular",),
    ),
    "fed-poly": Method(
        summary="Yardstick, simulation only: a federated polynomial that every unit bends to its rows",
        paper="Chung and Al Kontar, Federated multi-output Gaussian processes, Technometrics 66 (2024)",
        options="strategies.fedmgp_options:FedMGPOptions",
        strategy="strategies.fedmgp_comparison:create_polynomial",
        client="fedgp_flower.clients.fedmgp_yardsticks:MultiOutputYardstickClient",
        phases=("query.polynomial",),
    ),
    "local-only": Method(
        summary="Yardstick: every site fits a GP of its own rows, nothing is shared",
        paper="Rasmussen and Williams, Gaussian processes for machine learning (2006)",
        options="fedgp_flower.config:MethodOptions",
        strategy="strategies.comparison:create_local_only",
        client="fedgp_flower.clients.fgpr:YardstickClient",
        phases=(),
    ),
    "pooled": Method(
        summary="Yardstick, simulation only: one sparse GP of the rows of all sites",
        paper="Titsias, Variational learning of inducing variables in sparse GPs (2009)",
        options="fedgp_flower.config:MethodOptions",
        strategy="strategies.comparison:create_pooled",
        client="fedgp_flower.clients.fgpr:YardstickClient",
        phases=(),
    ),
}


def load(reference: str) -> Any:
    """The object a ``module:attribute`` reference names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def option_classes() -> dict[str, type[MethodOptions]]:
    """The options class of every method."""
    return {name: load(method.options) for name, method in METHODS.items()}


def parse_config(flat: FlatConfig) -> RunConfig:
    """Validate a run configuration against the tables of all methods; see :func:`fedgp_flower.config.parse`."""
    return parse(flat, option_classes())


def default_config() -> dict[str, Value]:
    """Every key with its default: what ``[tool.flwr.app.config]`` must hold."""
    return defaults(option_classes().values())


def all_phases() -> tuple[str, ...]:
    """Every message type the ClientApp must answer, for any method."""
    own = (phase for method in METHODS.values() for phase in method.phases)
    return tuple(dict.fromkeys((*COMMON_PHASES, *own)))
