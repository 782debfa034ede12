"""The base of all methods, independent of Flower: the functions of a method, and the run that it may read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, cast

from fedgp_flower.agreement import Agreement
from fedgp_flower.config import RunConfig
from fedgp_flower.errors import first_of
from fedgp_flower.gp.optimisers import pack, unpack
from fedgp_flower.messages import encode
from fedgp_flower.options import MULTICLASS, MethodOptions
from fedgp_flower.shared_messages import Confusion, Parameters, ScoreSums
from fedgp_flower.typing import Json, NamedArrays
from strategies.server.course import NEAR, Course
from strategies.server.network import Network
from strategies.server.questions import Asking, Figures, Predicted, Roster, S, Total
from strategies.server.scoring import Evaluation, Scoring
from strategies.server.session import Session

BOUND = "bound"
"""Name of the watched figure among distances."""


class Algorithm(ABC, Generic[S]):
    """A method: its first state, its rounds, and its predictions; all else has a default."""

    method: ClassVar[str]
    options_class: ClassVar[type[MethodOptions]] = MethodOptions
    state_class: ClassVar[type]
    exchanges_a_round: ClassVar[int] = 1
    """Exchanges in a round, if exchanges are limited."""
    watched: ClassVar[str] = ""
    """The figure, in nats per row, by which convergence of a stochastic method is judged."""
    score_sums: ClassVar[type[ScoreSums]] = ScoreSums
    """The scores that sites send, of predictions or of a model that they fit themselves."""
    anneals: ClassVar[float | None] = None
    """Share of the rounds before the learning rate falls; None if it does not fall."""
    predicts = True
    """Whether sites can predict single rows from the result of :meth:`predictive`."""
    trains = True
    """Whether answers of sites change the state."""

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
    """Exchanges and seconds of training, as forecast after the first round."""

    @abstractmethod
    def initialise(self, roster: Roster) -> Asking[S]:
        """Return the state before the first round; it may ask sites."""

    @abstractmethod
    def one_round(self, state: S, roster: Roster) -> Asking[tuple[S, Figures]]:
        """Return the next state and the figures of the round."""

    @abstractmethod
    def predictive(self, state: S, roster: Roster) -> Asking[Predicted]:
        """Return the message from which sites predict, and the posterior to save."""

    def public(self, state: S) -> NamedArrays:
        """Return ``result.arrays``, which Flower's wrappers clip: by default ``parameters`` or ``values``."""
        found = getattr(state, "parameters", getattr(state, "values", None))
        return encode(Parameters(found) if isinstance(found, Mapping) else state)

    def adopt(self, state: S, arrays: NamedArrays) -> S:
        """Return the state with these public arrays, such as those with noise from a wrapper."""
        if not isinstance(getattr(state, "parameters", None), Mapping):
            return state
        given = {name.removeprefix("values."): array for name, array in arrays.items()}
        return replace(cast(Any, state), parameters=given)

    def adjusted(self, preparation: Agreement) -> Agreement:
        """Return the agreed standardisation, changed if the model needs another one."""
        return preparation

    def constants(self, state: S) -> NamedArrays:
        """Return arrays that no round changes; each site receives them once."""
        return {}

    def finished(self, state: S) -> bool:
        """Whether training has ended: it has converged and, if the method anneals, the learning rate has fallen."""
        if self.anneals and self.arrived:
            return bool(self.tolerances(state)) or self.round >= self.horizon()
        return not self.trains and self.round > 0

    def horizon(self) -> int:
        """Return the last round of the rate's schedule: as planned, or earlier if the course has converged."""
        if self.anneals is None or not self.arrived:
            return self.planned_rounds
        return min(self.planned_rounds, math.ceil(self.arrived / self.anneals))

    def watching(self) -> bool:
        """Whether this round's figure is added to the course: only before the rate falls."""
        return self.anneals is None or self.round <= self.anneals * self.planned_rounds

    def tolerances(self, state: S) -> NamedArrays:
        """Return units, such as posterior standard deviations, of the parameters that must converge, by name.

        Parameters with units are replaced by their mean once they have converged.
        """
        return {}

    def follow(self, figures: Figures) -> None:
        """Add a round to the course; once it has converged, continue from its mean."""
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
        """The first round after which the course was near its limit; 0: not yet."""
        return 0 if self.course is None else self.course.arrived

    def distances(self, state: S) -> dict[str, float] | None:
        """Return the largest plausible distances of bound and parameters from their limits; None if too early."""
        units = self.tolerances(state)
        found = None if self.course is None else self.course.distances(pack(units))
        if found is None:
            return None
        farthest = {name: float(array.max()) for name, array in unpack(found[1:], units).items()} if units else {}
        return {BOUND: float(found[0])} | farthest

    def converged(self, state: S) -> bool | None:
        """Whether training converged; None if the method cannot tell."""
        if not self.watched:
            return None
        if self.anneals:
            return bool(self.arrived)
        distances = self.distances(state)
        return distances is not None and max(distances.values()) <= NEAR

    def exchanges_to_come(self, state: S) -> Sequence[tuple[int, float]] | None:
        """Return upper limits of the remaining exchanges, each with its work; None: as many as rounds."""
        return None

    def work(self, before: S, after: S) -> float:
        """Return the work of each exchange between two states, in any unit."""
        return 1.0

    def warnings(self) -> list[str]:
        """Return warnings about this method for readers of the results."""
        return []

    def final(self, state: S, roster: Roster) -> Asking[Json]:
        """Return facts for ``metrics.json`` that need the sites after training; here the confusion matrix."""
        if self.config.model.likelihood not in MULTICLASS:
            return {}
        summed = yield Total(Confusion, self.scoring.predicted.request)
        return {} if summed.total is None else {"confusion": summed.total.counts.tolist()}

    def details(self) -> Json:
        """Return the facts of the method in ``metrics.json``, including those of :meth:`final`."""
        asked = self.session.run(self.final(self.current, self.roster()))
        facts = {**self.scoring.predicted.details, **self.expected, **asked}
        if self.course is not None and (distances := self.distances(self.current)):
            unsettled = {name: far for name, far in distances.items() if far > NEAR and name != BOUND}
            facts |= {"forecast_per_row": self.course.forecast, "unsettled": unsettled}
        masking = self.session.masking
        return facts if masking is None else facts | {"privacy": masking.facts()}

    def roster(self) -> Roster:
        """Return the current sites."""
        return self.session.roster()

    def called(self, sites: Sequence[str]) -> str:
        """Return the labels of these sites, at most five."""
        return first_of([self.preparation.labels.get(site, site) for site in sites])

    @property
    def preparation(self) -> Agreement:
        """The agreed columns and scales."""
        return self.session.preparation

    @property
    def round(self) -> int:
        """The number of the current or latest round; 0 before the first."""
        return self.network.round

    @property
    def evaluation(self) -> Evaluation | None:
        """The latest evaluation."""
        return self.scoring.evaluation
