"""What a method supplies, and what it may look at while it computes; nothing here knows Flower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic

from fedgp_flower.config import RunConfig
from fedgp_flower.messages import encode
from fedgp_flower.options import MethodOptions
from fedgp_flower.shared_messages import ScoreSums
from fedgp_flower.typing import Json, NamedArrays
from strategies.server.checkpoint import Course
from strategies.server.enrolment import Enrolment
from strategies.server.network import Network
from strategies.server.questions import Asking, Figures, Predicted, Roster, S
from strategies.server.scoring import Evaluation, Scoring
from strategies.server.session import Session
from strategies.server.totals import Masking


class Algorithm(ABC, Generic[S]):
    """A method: how its state begins, what a round asks, and what a state predicts with.

    A subclass names its ``method``, its ``options_class`` and its ``state_class``, and supplies :meth:`initialise`,
    :meth:`one_round` and :meth:`predictive`. All else has a default.
    """

    method: ClassVar[str]
    options_class: ClassVar[type[MethodOptions]] = MethodOptions
    state_class: ClassVar[type]
    exchanges_a_round: ClassVar[int] = 1
    """Where exchanges are limited."""
    watched: ClassVar[str] = ""
    """The figure whose course tells a stochastic method whether it has converged, in nats a row."""
    score_sums: ClassVar[type[ScoreSums]] = ScoreSums
    """Sites answer with these scores, of predictions or of a model that they fit by themselves."""
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
    """The sites behind the Grid."""
    scoring: Scoring
    course: Course
    """The values of the watched figure so far."""

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
        """The arrays that ``result.arrays`` holds: those that Flower's wrappers clip, disturb and save."""
        return encode(state)

    def adopt(self, state: S, arrays: NamedArrays) -> S:
        """The state with public arrays that come from elsewhere, such as noise added by a wrapper."""
        del arrays
        return state

    def adjusted(self, preparation: Enrolment) -> Enrolment:
        """The agreed standardisation, changed where the model needs another one."""
        return preparation

    def constants(self, state: S) -> NamedArrays:
        """Arrays that sites need besides every message and that no round changes: a site is sent them once."""
        del state
        return {}

    def finished(self, state: S) -> bool:
        """Whether more rounds change nothing."""
        del state
        return False

    def watching(self) -> bool:
        """Whether this round's figure says anything: not where steps are made small on purpose."""
        return True

    def converged(self, state: S) -> bool | None:
        """Whether training had come to its end by itself; None where the method cannot tell."""
        del state
        return self.course.flat if self.watched else None

    def exchanges_to_come(self, state: S) -> int | None:
        """With how many exchanges training ends at the latest, from here on; None where it cannot be said."""
        del state
        return None

    def warnings(self) -> list[str]:
        """What a reader of the results should know of this method's run."""
        return []

    def final(self, state: S, roster: Roster) -> Asking[Json]:
        """Facts for ``metrics.json`` that sites are asked for after training."""
        del state, roster
        yield from ()
        return {}

    # What an algorithm may look at.

    def roster(self) -> Roster:
        """The sites as they are now."""
        return self.session.roster()

    def called(self, sites: Sequence[str]) -> str:
        """What people call these sites, five at most by name."""
        names = ", ".join(self.preparation.labels.get(site, site) for site in sites[:5])
        return names + (f" and {len(sites) - 5} more" if len(sites) > 5 else "")

    @property
    def preparation(self) -> Enrolment:
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
