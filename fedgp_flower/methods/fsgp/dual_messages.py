"""What a site answers where the likelihood of FSGP is not Gaussian: expectations at the posterior it was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.messages import along, count_parameters, dwarfing
from fedgp_flower.typing import AnyShape

SLACK = 1e-5
"""Of rounding, also in single precision."""


@message("train.expectations", summand=True)
class Expectations:
    """The expected log likelihood of rows under q(v), and its derivatives: value, gradient and step in one exchange."""

    values: Mapping[str, AnyShape] = leaves("Σ ∂/∂w E log p(y | f) at fixed L and q, by parameter", as_sent=True)
    fit: Float[ndarray, ""] = leaves("Σ E log p(y | f), nats")
    slope: Float[ndarray, " M"] = leaves("W α, α = ∂/∂m of E log p(y | f), f ~ N(m, s)")
    curvature: Float[ndarray, "M M"] = leaves("B̄ = W diag(β) Wᵀ, β = −2 ∂/∂s of the same", symmetric=True)

    def num_parameters(self) -> int:
        """M and hyperparameters."""
        return count_parameters(self.values)

    @staticmethod
    def outliers(answers: Mapping[str, Expectations], rows: Mapping[str, int]) -> dict[str, str]:
        """Curvatures and slopes that dwarf those of the other sites."""
        found: dict[str, str] = {}
        for name in ("curvature", "slope"):
            sizes = {site: float(np.abs(getattr(own, name)).max()) / rows[site] for site, own in answers.items()}
            found |= dwarfing(sizes, name)
        return found

    def refusal(self, rows: int) -> str | None:
        """Why this cannot come from rows with labels or counts, or None: log p(y | f) ≤ 0, and it is concave in f.

        Student-t noise, which has parameters of its own, knows neither limit.
        """
        return self._judged(rows, lambda: np.linalg.eigvalsh(self.curvature)[:1])

    def glance(self, rows: int) -> str | None:
        """What of it shows in O(M²); all of it is asked of the total alone."""
        return self._judged(rows, lambda: along(self.curvature)[1])

    def _judged(self, rows: int, bends: Callable[[], ndarray]) -> str | None:
        if any(name.startswith("likelihood.") for name in self.values):
            return None
        if float(self.fit) > SLACK * rows:
            return f"`fit` is {float(self.fit):g}: no probability is above 1"
        least = -SLACK * abs(float(np.trace(self.curvature)))
        return None if (bends() >= least).all() else "`curvature` is not that of concave terms"
