"""Messages between the server and the units of FedMGP; none contains a unit's parameters φ_m."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message, too_far
from fedgp_flower.methods.fedmgp.latents import PRECISION, SHIFT, LatentFunctions, LatentPosterior, Move, UnitStatistics
from fedgp_flower.methods.fedmgp.trust import possible_start, semidefinite
from fedgp_flower.shared_messages import MOVE, Described
from fedgp_flower.typing import AnyShape

PSEUDO_INPUTS = "pseudo-inputs"
"""Name of the initial W, sent to each site once for the pooled baseline."""


@message()
class Known:
    """The report of a unit that the server uses, which identifies φ_m in the unit's memory."""

    report: int = leaves("round of the report in use, 0 for none")
    move: Move = leaves("the trial move that the server took then")


@message()
class View:
    """Latent functions and q(u) for one unit, which predicts from them and its φ_m."""

    latents: LatentFunctions
    posterior: LatentPosterior
    known: Known


@message()
class FirstLook:
    """Request for first statistics; with a direction, a unit with mᵀdirection < 0 flips the sign of y."""

    latents: LatentFunctions
    direction: Float[ndarray, " L"] | None = None


@message("query.first", summand=True, counts="L")
class FirstStatistics:
    """A unit's statistics at the initial parameters."""

    statistics: UnitStatistics = leaves("of the rows at the starting parameters")

    def refusal(self, described: Described) -> str | None:
        """Return why no rows of the described number could produce this, or None."""
        good = possible_start(self.statistics, described.rows)
        return None if good else "first statistics that its rows cannot produce"


@message("query.directions", summand=True, counts="L")
class Directions:
    """m mᵀ, free of the sign of m; the first eigenvector of the sum is the direction that most units share."""

    outer: Float[ndarray, "L L"] = leaves("m mᵀ, m = (I + G)⁻¹ b of the first statistics", symmetric=True)


@message()
class TrialMoves:
    """Request to improve φ_m for fixed q(u) and return statistics at every trial move."""

    view: View
    moves: tuple[Move, ...]
    smooth: bool = leaves("false in first rounds, which keep R at its minimum", default=True)


@message("train.exact", summand=True, counts="L")
class TrialStatistics:
    """A unit's statistics at C trial moves."""

    precision: Float[ndarray, "C L L"] = leaves("G = Σ_n k_n k_nᵀ / σ², at each move", symmetric=True)
    shift: Float[ndarray, "C L"] = leaves("b = Σ_n k_n y_n / σ², at each move")
    evidence: Float[ndarray, " C"] = leaves("−½ N log 2πσ² − ½ yᵀy / σ², at each move")
    slack: Float[ndarray, "C I"] = leaves("−½ tr(Ω_m) / σ² by latent function, at each move")

    @staticmethod
    def of(statistics: Sequence[UnitStatistics]) -> TrialStatistics:
        """From statistics at every move."""
        parts = zip(*(vars(each).values() for each in statistics), strict=True)
        return TrialStatistics(*(np.stack(part) for part in parts))

    def each(self) -> tuple[UnitStatistics, ...]:
        """The statistics at every move."""
        parts = zip(self.precision, self.shift, self.evidence.tolist(), self.slack, strict=True)
        return tuple(UnitStatistics(*part) for part in parts)

    def refusal(self, _: Described) -> str | None:
        """Return why no rows could produce this, or None; the strategy makes the checks that need the request."""
        good = all(semidefinite(each) for each in self.each())
        return None if good else "statistics that no rows can produce: a precision is not positive semi-definite"


@message()
class Broadcast:
    """θ of Algorithm 2, from which units take local steps."""

    parameters: Mapping[str, AnyShape] = leaves("θ")
    inducing: Float[ndarray, "J D"] = leaves("W")
    known: Known
    learning_rate: float = leaves("of the first local step of this round")
    share: float = leaves("p_m = 1/M, the weight of a unit in the pooled bound")


@message("train", summand=True, counts="parameters")
class PseudoGradient:
    """Change of θ in local steps (Algorithm 2)."""

    parameters: Mapping[str, AnyShape] = leaves("Δ_m = θ − θ_m, under each parameter's name", as_sent=True)
    fit: float = leaves("sum over rows of E_q log p(y | f) after the steps")
    rows: float = leaves("number of rows")

    @staticmethod
    def outliers(answers: Mapping[str, PseudoGradient], _: Mapping[str, int]) -> dict[str, str]:
        """Return the units whose θ moved too far; λ and h grow with the rows and are left to the aggregation rule."""
        return {
            site: f"`parameters.{name}`: {reason}"
            for site, answer in answers.items()
            for name, array in answer.parameters.items()
            if name not in (PRECISION, SHIFT) and (reason := too_far(np.zeros_like(array), array, MOVE))
        }
