"""The table ``fgpr.*``."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Fraction, MethodOptions, Positive
from fedgp_flower.run.config import CoreConfig


class FGPROptions(MethodOptions):
    """The table ``fgpr.*``."""

    table: ClassVar[str] = "fgpr"

    fraction: Fraction = 1.0
    """Share ρ of the sites that take part in a round; at least one does."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi", "fedmedian", "fedtrimmedavg"] = "fedavg"
    """Flower's rule that combines the sites' hyperparameters; the last two withstand a few sites that lie."""
    server_learning_rate: Positive = 0.1
    """Of ``fedadam`` and ``fedyogi``."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood and whole batches."""
        if core.model.likelihood != "gaussian":
            raise ConfigError(f"`model.likelihood` = {core.model.likelihood!r}: fgpr needs 'gaussian'")
        if core.optimizer.batch_size:
            raise ConfigError("`optimizer.batch-size`: the evidence of fgpr takes all rows of a site; set it to 0")
        core.require_whole_rosters("fgpr.fraction", self.fraction)
