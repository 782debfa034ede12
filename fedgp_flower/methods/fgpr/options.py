"""What fgpr needs of the configuration; its keys are those of ``averaging.*``."""

from __future__ import annotations

from fedgp_flower.methods.sgpr.options import require_gaussian, require_whole_batches
from fedgp_flower.options import MethodOptions
from fedgp_flower.run.config import CoreConfig


class FGPROptions(MethodOptions):
    """No table beside ``averaging.*``."""

    def check(self, core: CoreConfig) -> None:
        """A Gaussian likelihood, whole batches, and under masks all sites in every round."""
        require_gaussian(core, "'svgp'")
        require_whole_batches(core)
        core.require_whole_rosters("averaging.fraction", core.averaging.fraction)
