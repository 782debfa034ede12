"""What fgpr needs of the configuration; its keys are those of ``averaging.*``."""

from __future__ import annotations

from fedgp_flower.config import CoreConfig
from fedgp_flower.options import MethodOptions


class FGPROptions(MethodOptions):
    """No table beside ``averaging.*``."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood, whole batches, and under masks all sites in every round."""
        core.require_gaussian()
        core.require_whole_batches()
        core.require_whole_rosters("averaging.fraction", core.averaging.fraction)
