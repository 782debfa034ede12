"""The two baselines as methods: ``local-only``, where nothing is shared, and ``pooled``, where all is.

Nothing is learned in rounds: the fits happen where the rows are, when the held-out rows are scored.
"""

from __future__ import annotations

from typing import ClassVar

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.messages import message
from fedgp_flower.shared_messages import LocalScoreSums, Nothing, Points, PooledScoreSums, ScoreSums
from strategies.server.algorithm import Algorithm
from strategies.server.questions import Asking, Figures, Predicted, Roster
from strategies.server.strategy import FederatedStrategy


@message()
class NoState:
    """Nothing is learned before the closing evaluation."""


def one_round(method: Algorithm[NoState], state: NoState, roster: Roster) -> Asking[tuple[NoState, Figures]]:
    """Nothing."""
    yield from ()
    return state, {}


def predictive(method: Algorithm[NoState], state: NoState, roster: Roster) -> Asking[Predicted]:
    """Nothing is shared."""
    yield from ()
    return Predicted(Nothing())


class LocalOnly(FederatedStrategy[NoState]):
    """No rounds: every site fits a GP of its rows and scores its held-out rows."""

    method = "local-only"
    state_class = NoState
    predicts = trains = False
    score_sums: ClassVar[type[ScoreSums]] = LocalScoreSums
    one_round, predictive = one_round, predictive

    def initialise(self, roster: Roster) -> Asking[NoState]:
        """Nothing."""
        yield from ()
        return NoState()


class Pooled(FederatedStrategy[NoState]):
    """Simulation only: one process sees the rows of all sites."""

    method = "pooled"
    state_class = NoState
    predicts = trains = False
    score_sums: ClassVar[type[ScoreSums]] = PooledScoreSums
    one_round = one_round

    def predictive(self, state: NoState, roster: Roster) -> Asking[Predicted]:
        """As many inducing points as configured."""
        yield from ()
        return Predicted(Points(0))

    def initialise(self, roster: Roster) -> Asking[NoState]:
        """Nothing, where the rows of all sites may be seen."""
        yield from ()
        if self.session.masking is not None:
            raise ConfigError(
                "`method` = 'pooled' sees the rows of all sites; set `privacy.secure-aggregation` to false"
            )
        if not self.preparation.simulated:
            raise RunError("`method` = 'pooled' needs simulated sites: real sites do not give their rows away")
        return NoState()
