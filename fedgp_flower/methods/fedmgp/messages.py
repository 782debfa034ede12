"""What server and units of FedMGP say to each other; what a unit alone knows, φ_m, is in none of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message, too_far
from fedgp_flower.methods.fedmgp.latents import PRECISION, SHIFT, Latents, Move, Posterior, Statistics
from fedgp_flower.methods.fedmgp.trust import possible_start, semidefinite
from fedgp_flower.shared_messages import MOVE, count_parameters
from fedgp_flower.typing import AnyShape

PSEUDO_INPUTS = "pseudo-inputs"
"""W as it was at the start, sent to a site once: the pooled baseline has the same."""


@message()
class Known:
    """What the server knows of a unit's memory: which of its parameters are behind the statistics that count."""

    start: int = leaves("number of the start that is being worked on")
    report: int = leaves("round of the last report that counts, 0 for none")
    move: Move = leaves("the trial move that the server took then")

    def written(self) -> dict[str, Any]:
        """In JSON's types, for ``posterior.json``."""
        move = {"offset": self.move.offset.tolist(), "stretch": self.move.stretch, "hold": self.move.hold}
        return {"start": self.start, "report": self.report, "move": move}

    @staticmethod
    def read(told: Mapping[str, Any]) -> Known:
        """From what :meth:`written` returned."""
        move = told["move"]
        offset = np.array(move["offset"], dtype=np.float64)
        return Known(told["start"], told["report"], Move(offset, move["stretch"], move["hold"]))


@message()
class View:
    """Latent functions and q(u) as one unit sees them: with what it alone knows, all that predicts."""

    latents: Latents
    posterior: Posterior
    known: Known


@message("query.first")
class FirstStatistics:
    """One unit's first look at g: statistics at the parameters that every unit starts from."""

    statistics: Statistics = leaves("of the rows at the starting parameters")

    def num_parameters(self) -> int:
        """L, inducing values of all latent functions."""
        return len(self.statistics.shift)

    def refusal(self, rows: int) -> str | None:
        """Why this cannot come from so many rows, or None."""
        return None if possible_start(self.statistics, rows) else "first statistics that its rows cannot produce"


@message("query.directions", summand=True)
class Directions:
    """Where a unit's first look at g points, whatever its sign: the sum has as first eigenvector what most share."""

    outer: Float[ndarray, "L L"] = leaves("m mᵀ, m = (I + G)⁻¹ b of the first statistics", symmetric=True)

    def num_parameters(self) -> int:
        """L, inducing values of all latent functions."""
        return len(self.outer)


@message()
class Towards:
    """First statistics are wanted with the sign that agrees with a direction."""

    latents: Latents
    direction: Float[ndarray, " L"]


@message("query.aligned", summand=True)
class AlignedStatistics(FirstStatistics):
    """:class:`FirstStatistics`, of −y where the unit's m points away from the direction: these can be added."""


@message()
class Trials:
    """Improve φ_m with q(u) fixed, and answer with statistics at every trial move."""

    view: View
    moves: tuple[Move, ...]
    smooth: bool = leaves("false in first rounds: smoothing R stays as narrow as it can be", default=True)


@message("train.exact", summand=True)
class TrialStatistics:
    """A unit's statistics at C trial moves, of each symmetric G the lower triangle."""

    precision: Float[ndarray, "C T"] = leaves("G = Σ_n k_n k_nᵀ / σ², packed, at each move")
    shift: Float[ndarray, "C L"] = leaves("b = Σ_n k_n y_n / σ², at each move")
    evidence: Float[ndarray, " C"] = leaves("−½ N log 2πσ² − ½ yᵀy / σ², at each move")
    slack: Float[ndarray, "C I"] = leaves("−½ tr(Ω_m) / σ² by latent function, at each move")
    flat: Float[ndarray, ""] = leaves("1 where noise explains nearly all of the signal")
    fresh: Float[ndarray, ""] = leaves("1 where the unit had no memory to go on from")

    def num_parameters(self) -> int:
        """L, inducing values of all latent functions."""
        return self.shift.shape[1]

    @staticmethod
    def of(statistics: Sequence[Statistics], *, flat: bool, fresh: bool) -> TrialStatistics:
        """From statistics at every move."""
        rows, columns = np.tril_indices(statistics[0].shift.size)
        return TrialStatistics(
            np.stack([own.precision[rows, columns] for own in statistics]),
            np.stack([own.shift for own in statistics]),
            np.array([own.evidence for own in statistics]),
            np.stack([own.slack for own in statistics]),
            np.array(float(flat)),
            np.array(float(fresh)),
        )

    def each(self) -> tuple[Statistics, ...]:
        """Statistics at every move."""
        rows, columns = np.tril_indices(self.shift.shape[1])
        precision = np.zeros((len(self.shift), self.shift.shape[1], self.shift.shape[1]))
        precision[:, rows, columns] = precision[:, columns, rows] = self.precision
        parts = zip(precision, self.shift, self.evidence.tolist(), self.slack, strict=True)
        return tuple(Statistics(*own) for own in parts)

    def fits(self, num_moves: int, latents: Latents) -> bool:
        """Whether these are statistics of so many moves for such latent functions."""
        return self.shift.shape == (num_moves, latents.size) and self.slack.shape[1] == len(latents.amplitudes)

    def refusal(self, rows: int) -> str | None:
        """Why this cannot come from any rows, or None; what depends on the question, the algorithm judges."""
        del rows
        size = self.shift.shape[1]
        if self.precision.shape[1] != size * (size + 1) // 2:
            return f"`precision`: {self.precision.shape[1]} numbers are no triangle of {size} rows"
        if not all(semidefinite(own) for own in self.each()):
            return "statistics that no rows can produce: a precision is not positive semi-definite"
        return None

    @staticmethod
    def outliers(answers: Mapping[str, TrialStatistics], rows: Mapping[str, int]) -> dict[str, str]:
        """Flags of single units that are none; a total counts them."""
        del rows
        return {site: why for site, own in answers.items() if (why := _no_flag(own.flat, own.fresh))}


@message()
class Broadcast:
    """θ as Algorithm 2 broadcasts it: take local steps from here."""

    parameters: Mapping[str, AnyShape] = leaves("θ")
    inducing: Float[ndarray, "J D"] = leaves("W")
    known: Known
    learning_rate: float = leaves("of the first local step of this round")
    share: float = leaves("p_m, the weight of a unit in the pooled bound: 1/M")


@message("train")
class PseudoGradient:
    """What local steps make of θ (Algorithm 2)."""

    parameters: Mapping[str, AnyShape] = leaves("Δ_m = θ − θ_m, under each parameter's name", as_sent=True)
    fit: float = leaves("mean over rows of E_q log p(y | f) after the steps")
    fresh: Float[ndarray, ""] = leaves("1 where the unit had no memory to go on from")
    flat: Float[ndarray, ""] | None = leaves("1 where noise explains nearly all of the signal", default=None)

    def num_parameters(self) -> int:
        """Entries of θ; matrices by their rows."""
        return count_parameters(self.parameters)

    def refusal(self, rows: int) -> str | None:
        """Why this cannot be what a unit says of itself, or None."""
        del rows
        for name, array in self.parameters.items():
            if name in (PRECISION, SHIFT):  # they grow with the rows
                continue
            if reason := too_far(np.zeros_like(array), array, MOVE):
                return f"`parameters.{name}`: {reason}"
        return _no_flag(self.fresh, *([] if self.flat is None else [self.flat]))


@message("train.pseudo_sum", summand=True)
class PseudoGradientSum:
    """The summand of a mean of :class:`PseudoGradient`."""

    parameters: Mapping[str, AnyShape] = leaves("Δ_m", as_sent=True)
    fit: Float[ndarray, ""] = leaves("sum over rows of E_q log p(y | f) after the steps")
    rows: Float[ndarray, ""] = leaves("number of rows")
    fresh: Float[ndarray, ""] = leaves("1 where the unit had no memory to go on from")
    flat: Float[ndarray, ""] = leaves("1 where noise explains nearly all of the signal")

    def num_parameters(self) -> int:
        """Entries of θ; matrices by their rows."""
        return count_parameters(self.parameters)

    @staticmethod
    def of(update: PseudoGradient, rows: int) -> PseudoGradientSum:
        """A unit's summand."""
        flat = 0.0 if update.flat is None else update.flat
        parts = map(np.asarray, (rows * update.fit, float(rows), update.fresh, flat))
        return PseudoGradientSum(update.parameters, *parts)

    def mean(self, units: int) -> PseudoGradient:
        """The mean Δ of a total over so many units."""
        update = {name: np.asarray(array / units) for name, array in self.parameters.items()}
        fresh, flat = np.asarray(self.fresh > 0, float), np.asarray(self.flat / units)
        return PseudoGradient(update, float(self.fit / self.rows), fresh, flat)


def _no_flag(*values: ndarray) -> str | None:
    return None if all(float(value) in (0, 1) for value in values) else "`flat` and `fresh` are 0 or 1"


@message()
class CurveRequest:
    """Predict along the one input."""

    view: View
    grid: Float[ndarray, "G 1"] = leaves("standardised inputs")


@message("query.curve")
class Curve:
    """What a simulated unit shows of itself, in original units; real units refuse."""

    mean: Float[ndarray, " G"] = leaves("of an observation")
    sd: Float[ndarray, " G"] = leaves("of an observation")
    alone_mean: Float[ndarray, " G"] = leaves("by a GP of the unit's rows alone")
    alone_sd: Float[ndarray, " G"] = leaves("by a GP of the unit's rows alone")
    x: Float[ndarray, " R"] = leaves("inputs of training rows")
    y: Float[ndarray, " R"] = leaves("targets of training rows")
