"""FGPR: federated averaging of an exact GP's hyperparameters; every site predicts from its own rows.

The baseline of Guo et al. (2022), after Yue and Kontar, *Federated Gaussian process* (2021). Nothing about a site's
rows is shared but the hyperparameters fitted to them, and prediction is personal.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.config import CoreConfig, Fraction, MethodOptions, Positive, RunConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.shapes import NamedArrays
from strategies.averaging import Averaging, median_hyperparameters
from strategies.base import Observer, Snapshot
from strategies.closing import Posterior


class FGPROptions(MethodOptions):
    """The table ``fgpr.*``."""

    table: ClassVar[str] = "fgpr"

    fraction: Fraction = 1.0
    """Share ρ of the sites that take part in a round; at least one does."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi"] = "fedavg"
    """Flower's rule that combines the sites' hyperparameters."""
    server_learning_rate: Positive = 0.1
    """Of ``fedadam`` and ``fedyogi``."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood and whole batches."""
        if core.model.likelihood != "gaussian":
            raise ConfigError(f"`model.likelihood` = {core.model.likelihood!r}: fgpr needs 'gaussian'")
        if core.optimizer.batch_size:
            raise ConfigError("`optimizer.batch-size`: the evidence of fgpr takes all rows of a site; set it to 0")


class FGPR(Averaging):
    """Hyperparameters of the kernel and the noise are global; rows, and so predictions, belong to a site."""

    def initialise(self) -> None:
        """Hyperparameters start where the configuration says."""
        self.parameters = median_hyperparameters(self.shapes_of_inputs())

    def predictive(self) -> NamedArrays:
        """The hyperparameters are all a site needs besides its rows."""
        return self.parameters

    def posterior(self) -> Posterior | None:
        """None: to predict takes rows, and they stay at the site."""
        return None


def create(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> FGPR:
    """The Strategy of ``method = "fgpr"``."""
    return FGPR(config, observer, snapshot)
