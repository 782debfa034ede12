"""The two baselines as methods: ``local-only`` shares nothing, ``pooled`` shares all rows.

Rounds do nothing: the models are fitted where the rows are, when held-out rows are scored.
"""

from __future__ import annotations

from typing import ClassVar

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.options import ReferenceOptions
from fedgp_flower.shared_messages import LocalScoreSums, Nothing, Points, PooledScoreSums, ScoreSums
from strategies.server.algorithm import Algorithm
from strategies.server.questions import Asking, Figures, Predicted, Roster
from strategies.server.strategy import FederatedStrategy


def one_round(method: Algorithm[Nothing], state: Nothing, roster: Roster) -> Asking[tuple[Nothing, Figures]]:
    """Do nothing."""
    yield from ()
    return state, {}


def predictive(method: LocalOnly | Pooled, state: Nothing, roster: Roster) -> Asking[Predicted]:
    """Return the request of the class."""
    yield from ()
    return Predicted(method.request)


class LocalOnly(FederatedStrategy[Nothing]):
    """Each site fits a GP of its rows and scores its held-out rows."""

    method = "local-only"
    options_class = ReferenceOptions
    state_class = Nothing
    predicts = trains = False
    score_sums: ClassVar[type[ScoreSums]] = LocalScoreSums
    request = Nothing()
    one_round, predictive = one_round, predictive

    def initialise(self, roster: Roster) -> Asking[Nothing]:
        """Return the empty state."""
        yield from ()
        return Nothing()


class Pooled(FederatedStrategy[Nothing]):
    """A GP of the rows of all sites; only in a simulation."""

    method = "pooled"
    options_class = ReferenceOptions
    state_class = Nothing
    predicts = trains = False
    score_sums: ClassVar[type[ScoreSums]] = PooledScoreSums
    request = Points(0)
    """The configured number of inducing points."""
    one_round, predictive = one_round, predictive

    def initialise(self, roster: Roster) -> Asking[Nothing]:
        """Return the empty state; raise if the rows of all sites must not be seen."""
        yield from ()
        if self.session.masking is not None:
            raise ConfigError(
                "`method` = 'pooled' sees the rows of all sites; set `privacy.secure-aggregation` to false"
            )
        if not self.preparation.simulated:
            raise RunError("`method` = 'pooled' needs simulated sites: real sites do not share their rows")
        return Nothing()
