"""What a method supplies, and what it may look at while it computes; nothing here knows Flower."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, cast

from fedgp_flower.agreement import Agreement
from fedgp_flower.config import RunConfig
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.messages import encode
from fedgp_flower.options import SEVERAL, MethodOptions
from fedgp_flower.shared_messages import Confusion, Parameters, ScoreSums
from fedgp_flower.typing import Json, NamedArrays
from strategies.server.course import NEAR, Course
from strategies.server.network import Network
from strategies.server.questions import Asking, Figures, Predicted, Roster, S, Total
from strategies.server.scoring import Evaluation, Scoring
from strategies.server.session import Session

BOUND = "bound"
"""What the watched figure is called among distances."""


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
    anneals: ClassVar[float | None] = None
    """Of a rate that falls at the end: the share of the rounds that have long steps."""
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
    course: Course | None
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
        """Whether more rounds change nothing: none train, or it has settled and, for some, the rate has come down."""
        if self.anneals and self.arrived:
            return bool(self.tolerances(state)) or self.round >= self.horizon()
        return not self.trains and self.round > 0

    def horizon(self) -> int:
        """The round in which the rate ends: as planned, or soon after the course has settled."""
        if self.anneals is None or not self.arrived:
            return self.planned_rounds
        return min(self.planned_rounds, math.ceil(self.arrived / self.anneals))

    def watching(self) -> bool:
        """Whether this round's figure says anything: not where steps are made small on purpose."""
        return self.anneals is None or self.round <= self.anneals * self.planned_rounds

    def tolerances(self, state: S) -> NamedArrays:
        """Of parameters that come to rest, by name: lengths such as their posterior standard deviations.

        Where there are any and the rate is constant, training ends when they have, and their mean is the answer.
        """
        return {}

    def follow(self, figures: Figures) -> None:
        """Add a round to the course; once it has settled, go on from its mean."""
        if self.watched not in figures or not self.watching() or (self.anneals and self.arrived):
            return
        units = self.tolerances(self.current)
        places = {name: cast(Any, self.current).parameters[name] for name in units}
        place = pack(places)
        self.course = (self.course or Course.begin(len(place))).after(figures[self.watched], place)
        if self.arrived or self.course.waiting:
            return
        distances = self.distances(self.current)
        if distances is None or max(distances.values()) > NEAR:
            return
        self.course = replace(self.course, arrived=self.round)
        if self.anneals and units:
            parameters = {**cast(Any, self.current).parameters, **unpack(self.course.answer, places)}
            self.current = replace(cast(Any, self.current), parameters=parameters)

    @property
    def arrived(self) -> int:
        """The round after which the course was near its limit for the first time; 0: not yet."""
        return 0 if self.course is None else self.course.arrived

    def distances(self, state: S) -> dict[str, float] | None:
        """How far the bound and each parameter may be from where they are heading, in their units; None too early."""
        units = self.tolerances(state)
        found = None if self.course is None else self.course.distances(pack(units))
        if found is None:
            return None
        farthest = {name: float(array.max()) for name, array in unpack(found[1:], units).items()} if units else {}
        return {BOUND: float(found[0])} | farthest

    def converged(self, state: S) -> bool | None:
        """Whether training had come to its end by itself; None where the method cannot tell."""
        if not self.watched:
            return None
        if self.anneals:
            return bool(self.arrived)
        distances = self.distances(state)
        return distances is not None and max(distances.values()) <= NEAR

    def exchanges_to_come(self, state: S) -> Sequence[tuple[int, float]] | None:
        """How many exchanges there are at most until training ends, and the work of each; None: as many as rounds."""
        return None

    def work(self, before: S, after: S) -> float:
        """Of each exchange between two states, in any unit."""
        return 1.0

    def warnings(self) -> list[str]:
        """What a reader of the results should know of this method's run."""
        return []

    def final(self, state: S, roster: Roster) -> Asking[Json]:
        """Facts for ``metrics.json`` that sites are asked for after training; here which class was taken for which."""
        if self.config.model.likelihood not in SEVERAL:
            return {}
        summed = yield Total(Confusion, self.scoring.predicted.request)
        return {} if summed.total is None else {"confusion": summed.total.counts.tolist()}

    def details(self) -> Json:
        """Facts of the method as ``metrics.json`` has them, those that sites are asked for among them."""
        asked = self.session.run(self.final(self.current, self.roster()))
        facts = {**self.scoring.predicted.details, **self.expected, **asked}
        if self.course is not None and (distances := self.distances(self.current)):
            unsettled = {name: far for name, far in distances.items() if far > NEAR and name != BOUND}
            facts |= {"forecast_per_row": self.course.forecast, "unsettled": unsettled}
        masking = self.session.masking
        return facts if masking is None else facts | {"privacy": masking.facts()}

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
    def evaluation(self) -> Evaluation | None:
        """The latest evaluation."""
        return self.scoring.evaluation
