"""Two yardsticks of the FedMGP paper as methods of their own: ModularGP and FedPoly, fitted where all rows are."""

from __future__ import annotations

from typing import cast

from fedgp_flower.config import RunConfig
from strategies.base import Observer, Snapshot
from strategies.comparison import Pooled
from strategies.fedmgp_options import FedMGPOptions
from strategies.fedmgp_start import require_grid, scaled
from strategies.meeting import Preparation


class FedPoly(Pooled):
    """A polynomial of all units that each bends towards its own rows."""

    phase = "query.polynomial"

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Targets as FedMGP sees them."""
        return scaled(preparation, self.config, cast(FedMGPOptions, self.config.options))


class ModularGP(FedPoly):
    """Every unit's own sparse GP, joined by one multi-output GP."""

    phase = "query.modular"

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Also checks that there can be a grid of pseudo-inputs."""
        require_grid(self.config.model.num_inducing, preparation.num_inputs, "or use fewer `features`")
        return super().adjusted(preparation)


def create_modular(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> ModularGP:
    """The Strategy of ``method = "modular-gp"``."""
    return ModularGP(config, observer, snapshot)


def create_polynomial(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> FedPoly:
    """The Strategy of ``method = "fed-poly"``."""
    return FedPoly(config, observer, snapshot)
