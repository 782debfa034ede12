"""The messages of a deep-kernel GP besides those of federated averaging."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.shared_messages import Described
from fedgp_flower.typing import AnyShape


@message()
class HeadRequest:
    """At which weights, and for which shares of personal heads, sums are wanted."""

    values: Mapping[str, AnyShape] = leaves("weights of the network")
    shares: Float[ndarray, " J"] = leaves("ρ, to choose from")


@message("query.heads", summand=True)
class Heads:
    """What a site's rows say of the shared head, its personal one integrated out, for each ρ."""

    precision: Float[ndarray, "J C F F"] = leaves(
        "B = (I + ρ G)⁻¹ G, G = Φᵀ D⁻¹ Φ of the features Φ of its rows", symmetric=True
    )
    shift: Float[ndarray, "J C F"] = leaves("b = (I + ρ G)⁻¹ Φᵀ D⁻¹ t")
    constant: Float[ndarray, " J"] = leaves("log density of the rows where the shared head is zero")

    def num_parameters(self) -> int:
        """Entries of a head."""
        return int(np.prod(self.shift.shape[1:]))

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, described: Described) -> str | None:
        """Why these cannot be sums over rows, or None: B is positive semi-definite."""
        del described
        size = max(float(np.abs(self.precision).max()), 1e-300)
        scaled = self.precision / size  # units first: a liar's numbers may be huge
        if np.linalg.eigvalsh(scaled).min() < -1e-6:
            return "`precision` is that of no rows: it is not positive semi-definite"
        return None


@message()
class HeadPosterior:
    """Weights of the network, and the shared head of all rows."""

    values: Mapping[str, AnyShape] = leaves("weights of the network")
    mean: Float[ndarray, "C F"] = leaves("E w_c")
    covariance: Float[ndarray, "C F F"] = leaves("Cov w_c", symmetric=True)
    share: float = leaves("ρ, personal heads' share of the prior variance")
