"""What server and units of FedMGP say to each other; what a unit alone knows, φ_m, is in none of it."""

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
"""W as it was at the start, sent to a site once: the pooled baseline has the same."""


@message()
class Known:
    """What the server knows of a unit's memory: which of its parameters are behind the statistics that count."""

    report: int = leaves("round of the last report that counts, 0 for none")
    move: Move = leaves("the trial move that the server took then")


@message()
class View:
    """Latent functions and q(u) as one unit sees them: with what it alone knows, all that predicts."""

    latents: LatentFunctions
    posterior: LatentPosterior
    known: Known


@message()
class FirstLook:
    """Ask for first statistics; with a direction, for those of −y where the unit's m points away from it."""

    latents: LatentFunctions
    direction: Float[ndarray, " L"] | None = None


@message("query.first", summand=True, counts="L")
class FirstStatistics:
    """One unit's first look at g: statistics at the parameters that every unit starts from."""

    statistics: UnitStatistics = leaves("of the rows at the starting parameters")

    def refusal(self, described: Described) -> str | None:
        """Why this cannot come from so many rows, or None."""
        good = possible_start(self.statistics, described.rows)
        return None if good else "first statistics that its rows cannot produce"


@message("query.directions", summand=True, counts="L")
class Directions:
    """Where a unit's first look at g points, whatever its sign: the sum has as first eigenvector what most share."""

    outer: Float[ndarray, "L L"] = leaves("m mᵀ, m = (I + G)⁻¹ b of the first statistics", symmetric=True)


@message()
class TrialMoves:
    """Improve φ_m with q(u) fixed, and answer with statistics at every trial move."""

    view: View
    moves: tuple[Move, ...]
    smooth: bool = leaves("false in first rounds: smoothing R stays as narrow as it can be", default=True)


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
        """UnitStatistics at every move."""
        parts = zip(self.precision, self.shift, self.evidence.tolist(), self.slack, strict=True)
        return tuple(UnitStatistics(*part) for part in parts)

    def refusal(self, _: Described) -> str | None:
        """Why this cannot come from any rows, or None; the algorithm checks what depends on the question."""
        good = all(semidefinite(each) for each in self.each())
        return None if good else "statistics that no rows can produce: a precision is not positive semi-definite"


@message()
class Broadcast:
    """θ as Algorithm 2 broadcasts it: take local steps from here."""

    parameters: Mapping[str, AnyShape] = leaves("θ")
    inducing: Float[ndarray, "J D"] = leaves("W")
    known: Known
    learning_rate: float = leaves("of the first local step of this round")
    share: float = leaves("p_m, the weight of a unit in the pooled bound: 1/M")


@message("train", summand=True, counts="parameters")
class PseudoGradient:
    """What local steps make of θ (Algorithm 2)."""

    parameters: Mapping[str, AnyShape] = leaves("Δ_m = θ − θ_m, under each parameter's name", as_sent=True)
    fit: float = leaves("sum over rows of E_q log p(y | f) after the steps")
    rows: float = leaves("number of rows")

    @staticmethod
    def outliers(answers: Mapping[str, PseudoGradient], _: Mapping[str, int]) -> dict[str, str]:
        """Single units that moved too far; λ and h grow with the rows, so the rules of aggregation judge these."""
        return {
            site: f"`parameters.{name}`: {reason}"
            for site, answer in answers.items()
            for name, array in answer.parameters.items()
            if name not in (PRECISION, SHIFT) and (reason := too_far(np.zeros_like(array), array, MOVE))
        }
