"""What FSGP with differential privacy asks sites for."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
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
