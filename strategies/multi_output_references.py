"""Two reference methods of the FedMGP paper, fitted where all rows are: ModularGP and FedPoly."""

from __future__ import annotations

from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from strategies.fedmgp_shared import require_grid, scaled
from strategies.references import Pooled
from strategies.server.enrolment import Preparation


class FedPoly(Pooled):
    """A polynomial of all units that each bends towards its rows."""

    method = "fed-poly"
    options_class = FedMGPOptions
    options: FedMGPOptions
    kind = "query.polynomial"

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Targets as FedMGP sees them."""
        return scaled(preparation, self.config, self.options)


class ModularGP(FedPoly):
    """Every unit's sparse GP, joined by one multi-output GP (Moreno-Muñoz et al. 2021)."""

    method = "modular-gp"
    kind = "query.modular"

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Also checks that there can be a grid of pseudo-inputs."""
        require_grid(self.config.model.num_inducing, preparation.num_inputs, "or use fewer `features`")
        return super().adjusted(preparation)
