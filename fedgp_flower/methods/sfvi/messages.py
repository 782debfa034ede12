"""Messages of SFVI and SFVI-Avg; none contains q(Z_Lk | Z_G).

θ and η_G are arrays under names: ``theta.*``, and ``q.mean``, ``q.log_scale`` and, unless q(Z_G) is diagonal,
``q.lower``, with Z_G = μ + σ ⊙ (L ε) and L's strictly lower entries row by row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import count_parameters, leaves, message
from fedgp_flower.shared_messages import MOVE, Described, max_abs, oversized
from fedgp_flower.typing import AnyShape, NamedArrays

SCALE = "q.log_scale"


class _Values:
    """Arrays under the names of θ and η_G."""

    values: Mapping[str, ndarray]

    def num_parameters(self) -> int:
        """Size of θ plus that of Z_G."""
        scales = (SCALE, "q.lower")
        return count_parameters({name: array for name, array in self.values.items() if name not in scales})


@message()
class GradientRequest:
    """SFVI: request for a gradient."""

    values: Mapping[str, AnyShape] = leaves("θ and η_G")
    learning_rate: float = leaves("of the site's step on its latents")
    noise: Float[ndarray, "S G"] | None = leaves("ε_G, for Monte Carlo expectations", default=None)


@message("train.gradient", summand=True)
class GradientShare(_Values):
    """The site's term of the bound and its gradient, to be summed over sites."""

    values: Mapping[str, AnyShape] = leaves(
        "∂/∂θ and ∂/∂η_G of E log p(y, Z_L | Z_G) − E log q(Z_L | Z_G)", as_sent=True
    )
    objective: float = leaves("the term itself")
    fresh: int = leaves("1 if the site had no memory and caught up")

    @staticmethod
    def outliers(answers: Mapping[str, GradientShare], rows: Mapping[str, int]) -> dict[str, str]:
        """Return sites whose gradients dwarf those of the others; this needs at least three sites."""
        return oversized(answers, rows, "gradient", lambda share: max_abs(*share.values.values()))


@message()
class LocalStepsRequest:
    """SFVI-Avg: request for local steps."""

    values: Mapping[str, AnyShape] = leaves("θ and η_G")
    learning_rate: float = leaves("of the steps")
    total_rows: float = leaves("N, the rows of all sites")
    reach: float = leaves("largest plausible change by local steps", default=MOVE)


@message("train.average")
class LocalEnd(_Values):
    """θ and η_G after a site's local steps; a barycentre needs them of each site."""

    values: Mapping[str, AnyShape] = leaves("θ and η_G", as_sent=True, within="reach")
    objective: float = leaves("the site's estimate of the bound of all rows, mean over its steps")
    fresh: bool = leaves("whether the site had no memory and caught up")


@message("train.average_sum", summand=True)
class LocalEndSum(_Values):
    """Summand of the average of :class:`LocalEnd`; the barycentre of diagonal Gaussians averages μ and σ."""

    values: Mapping[str, AnyShape] = leaves("w θ and w μ_G, and under `q.log_scale` w σ_G", as_sent=True)
    weight: Float[ndarray, ""] = leaves("w, the rows of the site")
    objective: Float[ndarray, ""] = leaves("w times the site's estimate of the bound of all rows")
    fresh: int = leaves("1 if the site had no memory and caught up")

    @staticmethod
    def of(end: LocalEnd, weight: float) -> LocalEndSum:
        """A site's summand."""
        natural = {**end.values, SCALE: np.exp(end.values[SCALE])}
        values = {name: np.asarray(weight * array) for name, array in natural.items()}
        return LocalEndSum(values, np.array(weight), np.array(weight * end.objective), int(end.fresh))

    def mean(self) -> NamedArrays:
        """The averaged θ and η_G of a total."""
        values = {name: np.asarray(array / self.weight) for name, array in self.values.items()}
        return values | {SCALE: np.log(values[SCALE])}

    def refusal(self, _: Described) -> str | None:
        """Return why this is no weighted Gaussian, or None."""
        return (
            None if self.weight > 0 and (self.values[SCALE] > 0).all() else "`weight` or `q.log_scale` is not positive"
        )
