"""The table ``fsgp.*``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedgp_flower.errors import ConfigError
from fedgp_flower.options import Fraction, MethodOptions, Positive
from fedgp_flower.run.config import CoreConfig


class FSGPOptions(MethodOptions):
    """The table ``fsgp.*``."""

    table: ClassVar[str] = "fsgp"

    objective: Literal["exact", "average"] = "exact"
    """``exact``: gradient of the pooled bound, L-BFGS or Adam at the server; ``average``: the paper's local steps."""
    fraction: Fraction = 1.0
    """Share ρ of the sites that take part in a round of ``average``; at least one does."""
    server_optimizer: Literal["fedavg", "fedadam", "fedyogi"] = "fedavg"
    """``average``: Flower's rule that combines the sites' parameters."""
    exact_optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    """``exact``: what the server does with the exact gradient."""
    server_learning_rate: Positive = 0.1
    """Of ``fedadam``, ``fedyogi`` and ``adam``."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """``exact``: stop when the bound per row changes less than this, relative to its size."""

    def strategy_for(self, core: CoreConfig) -> str:
        """The Strategy of ``fsgp.objective``; of the dual form where the likelihood is not Gaussian."""
        if core.model.likelihood != "gaussian":
            return "strategies.fsgp_duals:FSGPDuals"
        return "strategies.fsgp_exact:FSGPExact" if self.objective == "exact" else "strategies.fsgp:FSGPAveraging"

    def check(self, core: CoreConfig) -> None:
        """Whole batches, and a Gaussian likelihood for the paper's averages."""
        for key, value in (("objective", self.objective), ("exact-optimizer", self.exact_optimizer)):
            if core.model.likelihood != "gaussian" and value in ("average", "adam"):
                name = core.model.likelihood
                raise ConfigError(f"`model.likelihood` = {name!r}: `fsgp.{key}` = {value!r} needs 'gaussian'")
        if core.optimizer.batch_size:
            raise ConfigError(
                "`optimizer.batch-size`: the collapsed bound of fsgp takes all rows of a site; set it to 0"
            )
        core.require_whole_rosters("fsgp.fraction", self.fraction)
