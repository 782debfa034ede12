"""What FSGP with differential privacy asks sites for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.messages import dwarfing
from fedgp_flower.typing import AnyShape


@message()
class PrivateRequest:
    """Where noisy sums are wanted."""

    values: Mapping[str, AnyShape] = leaves("parameters in unconstrained coordinates")
    sharing: int = leaves("how many sites add up to the noise of one total; 1 where sites are seen by themselves")


@message("query.private", summand=True)
class PrivateSums:
    """Sums of clipped rows with Gaussian noise; see :mod:`fedgp_flower.methods.fsgp.private`."""

    gram: Float[ndarray, "M M"] = leaves("A = W Wᵀ and noise, W = L⁻¹ k(Z, X)", symmetric=True)
    projection: Float[ndarray, " M"] = leaves("b = W y and noise")
    target_squares: Float[ndarray, ""] = leaves("s = yᵀ y and noise")

    def num_parameters(self) -> int:
        """M."""
        return len(self.projection)

    @staticmethod
    def outliers(answers: Mapping[str, PrivateSums], rows: Mapping[str, int]) -> dict[str, str]:
        """Sums that dwarf those of the other sites; noise is that of any number of rows."""
        usual = float(np.median([rows[site] for site in answers] or [0]))
        parts = {site: (own.gram, own.projection, own.target_squares) for site, own in answers.items()}
        largest = {site: max(float(np.abs(part).max()) for part in own) for site, own in parts.items()}
        return dwarfing({site: size / (rows[site] + usual) for site, size in largest.items()}, "largest entry")
