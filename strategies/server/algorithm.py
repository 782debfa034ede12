"""What a method supplies, and what it may look at while it computes; nothing here knows Flower."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, cast

import numpy as np

from fedgp_flower.agreement import Agreement
from fedgp_flower.config import RunConfig
from fedgp_flower.messages import encode
from fedgp_flower.options import MethodOptions
from fedgp_flower.shared_messages import Confusion, Parameters, ScoreSums
from fedgp_flower.typing import Json, NamedArrays
from strategies.server.network import Network
from strategies.server.questions import Asking, Figures, Predicted, Roster, S, Total
from strategies.server.scoring import Evaluation, Scoring
from strategies.server.session import Session
from strategies.server.totals import Masking

LEAST = 10
"""Rounds of a window."""
ERRORS, DEVIATIONS = 3.0, 2.0
NOTHING = 5e-3
"""Nats a row along a window that are no rise."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A straight line through the latest values."""

    slope: float
    error: float
    noise: float
    """Standard deviation of a value around the line."""
    flat: bool
    """Whether the rise along the window, and three standard errors more, is below the noise."""


def rise(values: Sequence[float]) -> Rise | None:
    """The line through the latest half of ``values``, ten at least; None before there are enough."""
    rounds = max(LEAST, len(values) // 2)
    if len(values) < rounds:
        return None
    latest = np.array(values[-rounds:])
    along = np.arange(rounds) - (rounds - 1) / 2
    spread = float(along @ along)
    slope = float(along @ latest) / spread
    residual = latest - latest.mean() - slope * along
    noise = math.sqrt(float(residual @ residual) / (rounds - 2))
    error = noise / math.sqrt(spread)
    return Rise(slope, error, noise, (slope + ERRORS * error) * rounds < max(DEVIATIONS * noise, NOTHING))


@dataclass
class Course:
    """The values of a noisy bound so far, and the round after which they were flat for the first time."""

    values: list[float] = field(default_factory=list)
    flat_from: int | None = None

    @property
    def flat(self) -> bool:
        """Whether the latest values are."""
        line = rise(self.values)
        return line is not None and line.flat

    def add(self, value: float, after: int) -> None:
        """The value after a round."""
        self.values.append(value)
        if self.flat_from is None and self.flat:
            self.flat_from = after


class Algorithm(ABC, Generic[S]):
    """A method: how its state begins, what a round asks, and what a state predicts with; all else has a default."""

    method: ClassVar[str]
    options_class: ClassVar[type[MethodOptions]] = MethodOptions
    state_class: ClassVar[type]
    exchanges_a_round: ClassVar[int] = 1
    """Where exchanges are limited."""
    watched: ClassVar[str] = ""
    """The figure whose course tells a stochastic method whether it has converged, in nats a row."""
    score_sums: ClassVar[type[ScoreSums]] = ScoreSums
    """Sites answer with these scores, of predictions or of a model that they fit by themselves."""
    anneals: ClassVar[tuple[float, float] | None] = None
    """Of a rate that falls at the end: shares of the planned rounds with long steps, and of all rounds until flat."""
    predicts = True
    """Whether sites can predict single rows with what :meth:`predictive` returns."""
    trains = True
    """Whether rounds change the state by what sites answer."""

    config: RunConfig
    options: MethodOptions
    """The method's table of the configuration; a subclass names its class."""
    planned_rounds: int
    session: Session
    network: Network
    scoring: Scoring
    current: S
    """The state; only complete rounds change it."""
    course: Course
    expected: Mapping[str, float]
    """Exchanges and seconds of training, as announced before it."""

    @abstractmethod
    def initialise(self, roster: Roster) -> Asking[S]:
        """The state before the first round; sites may be asked."""

    @abstractmethod
    def one_round(self, state: S, roster: Roster) -> Asking[tuple[S, Figures]]:
        """The next state, and the figures of the round."""

    @abstractmethod
    def predictive(self, state: S, roster: Roster) -> Asking[Predicted]:
        """What a state predicts with."""

    def public(self, state: S) -> NamedArrays:
        """The arrays of ``result.arrays``, which Flower's wrappers clip and disturb: ``parameters`` where there are."""
        found = getattr(state, "parameters", None)
        return encode(Parameters(found) if isinstance(found, Mapping) else state)

    def adopt(self, state: S, arrays: NamedArrays) -> S:
        """The state with public arrays that come from elsewhere, such as noise added by a wrapper."""
        if not isinstance(getattr(state, "parameters", None), Mapping):
            return state
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        return replace(cast(Any, state), parameters=given)

    def adjusted(self, preparation: Agreement) -> Agreement:
        """The agreed standardisation, changed where the model needs another one."""
        return preparation

    def constants(self, state: S) -> NamedArrays:
        """Arrays that sites need besides every message and that no round changes: a site is sent them once."""
        return {}

    def finished(self, state: S) -> bool:
        """Whether more rounds change nothing: none train, or the rate has come down since the figure was flat."""
        if self.anneals and self.course.flat_from is not None:
            return self.round >= self.horizon()
        return not self.trains and self.round > 0

    def horizon(self) -> int:
        """The round in which the rate ends: as planned, or soon after the watched figure was flat."""
        flat = self.course.flat_from
        if flat is None or self.anneals is None:
            return self.planned_rounds
        return min(self.planned_rounds, math.ceil(flat / self.anneals[1]))

    def watching(self) -> bool:
        """Whether this round's figure says anything: not where steps are made small on purpose."""
        return self.anneals is None or self.round <= self.anneals[0] * self.planned_rounds

    def converged(self, state: S) -> bool | None:
        """Whether training had come to its end by itself; None where the method cannot tell."""
        if self.anneals:
            return self.course.flat_from is not None
        return self.course.flat if self.watched else None

    def exchanges_to_come(self, state: S) -> int | None:
        """With how many exchanges training ends at the latest, from here on; None where it cannot be said."""
        return None

    def work_to_come(self, state: S) -> float:
        """How much longer training takes after its first round than that round took."""
        return (self.exchanges_to_come(state) or 0) / self.exchanges_a_round

    def warnings(self) -> list[str]:
        """What a reader of the results should know of this method's run."""
        return []

    def final(self, state: S, roster: Roster) -> Asking[Json]:
        """Facts for ``metrics.json`` that sites are asked for after training; here which class was taken for which."""
        if not self.options.numbers_classes(self.config.model):
            return {}
        summed = yield Total(Confusion, self.scoring.predicted.request)
        return {} if summed.total is None else {"confusion": summed.total.counts.tolist()}

    def details(self) -> Json:
        """Facts of the method as ``metrics.json`` has them, those that sites are asked for among them."""
        asked = self.session.run(self.final(self.current, self.roster()))
        line = rise(self.course.values)
        facts = {**self.scoring.predicted.details, **self.expected, **asked}
        facts |= {} if line is None else {"rise_per_round": line.slope}
        return facts if self.masking is None else facts | {"privacy": self.masking.facts()}

    def roster(self) -> Roster:
        """The sites as they are now."""
        return self.session.roster()

    def called(self, sites: Sequence[str]) -> str:
        """What people call these sites, five at most by name."""
        names = ", ".join(self.preparation.labels.get(site, site) for site in sites[:5])
        return names + (f" and {len(sites) - 5} more" if len(sites) > 5 else "")

    @property
    def preparation(self) -> Agreement:
        """The columns and scales that the sites agreed on."""
        return self.session.preparation

    @property
    def round(self) -> int:
        """The number of the round that runs or has just ended; 0 before the first."""
        return self.network.round

    @property
    def masking(self) -> Masking | None:
        """How totals are masked; None where they are plain."""
        return self.session.masking

    @property
    def evaluation(self) -> Evaluation | None:
        """The latest evaluation."""
        return self.scoring.evaluation
