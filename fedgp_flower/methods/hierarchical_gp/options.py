"""The table ``hierarchical.*``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import BASIC, POINT_LIKELIHOODS, MethodOptions


class HierarchicalOptions(MethodOptions):
    """The form of deviations from the shared trend."""

    table: ClassVar[str] = "hierarchical"
    likelihoods: ClassVar[frozenset[str]] = POINT_LIKELIHOODS
    default_kernel: ClassVar[str] = "matern52"

    deviation: Annotated[Literal["smooth", "rough"], BASIC] = "smooth"
    """``smooth``: sites, such as countries; each deviates by a GP of all inputs, and has its noise. ``rough``: units,
    such as batteries, that are curves along one input; each deviates by a smooth curve and a Brownian motion, and bands
    are calibrated beyond its last row."""

    @property
    def rough(self) -> bool:
        """Whether sites are units along one input."""
        return self.deviation == "rough"

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError for other likelihoods and for keys that closed forms ignore."""
        if core.model.likelihood != "gaussian":
            raise ConfigError(
                f"`model.likelihood` = {core.model.likelihood!r}: hierarchical-gp needs 'gaussian'; take `method` = "
                "'sfvi', which learns the same model by gradients"
            )
        if unread := core.optimizer.unread():
            raise ConfigError(f"{unread}: hierarchical-gp takes Newton steps on all rows and ignores them")
        core.require_float64_on_cpu()
