"""One exchange of a Newton step on the bound of all rows, where a site's own part is integrated out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.messages import dwarfing
from fedgp_flower.typing import AnyShape


@message()
class ExpansionRequest:
    """SFVI in closed form: where sums and their derivatives are wanted."""

    values: Mapping[str, AnyShape] = leaves("θ, and η_G of the best θ so far")


@message("train.expansion", summand=True)
class ExpansionShare:
    """What Z_G sees of a site's rows once its deviation is integrated out, and how it changes with θ; only sums count.

    Derivatives are total ones: the site's shape z follows θ.
    """

    precision: Float[ndarray, "G G"] = leaves("P = Φ R⁻¹ Φᵀ", symmetric=True)
    shift: Float[ndarray, " G"] = leaves("p = Φ R⁻¹ y")
    constant: Float[ndarray, ""] = leaves("c = log N(y | 0, R) − what inducing values leave open − ½|z|²")
    slopes: Float[ndarray, "T Q"] = leaves("derivatives by θ of lower entries of P, of p, of c")
    curvature: Float[ndarray, "T T"] = leaves("second derivatives of c − ½ tr[(S + mmᵀ)P] + mᵀp", symmetric=True)
    count: Float[ndarray, ""] = leaves("number of rows")
    squares: Float[ndarray, " W"] = leaves("z² of each entry of the site's shape, at its mode")
    known: Float[ndarray, " W"] = leaves("1 less the variance of each entry")

    def num_parameters(self) -> int:
        """Z_G, entries of θ, and widths of shapes."""
        return len(self.shift) + len(self.curvature) + len(self.squares)

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, rows: int) -> str | None:
        """Why sums cannot come from so many rows, or None."""
        if float(self.count) != rows:
            return f"sums of {float(self.count):g} rows, introduced itself with {rows}"
        if (self.squares < 0).any() or (self.known > rows).any():  # holds of a total too: a site has a row or more
            return "`squares` or `known` are those of no shape"
        size = max(float(np.abs(self.precision).max()), 1e-300)
        if not np.linalg.eigvalsh(self.precision / size)[0] >= -1e-6:
            return "`precision` is not positive semi-definite"
        return None

    @staticmethod
    def outliers(answers: Mapping[str, ExpansionShare], rows: Mapping[str, int]) -> dict[str, str]:
        """Precisions that dwarf those of the other sites."""
        sizes = {site: float(np.trace(own.precision)) / rows[site] for site, own in answers.items()}
        return dwarfing(sizes, "precision")
