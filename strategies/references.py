"""The two baselines as methods: ``local-only``, where nothing is shared, and ``pooled``, where all is."""

from __future__ import annotations

from typing import ClassVar

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.messages import message
from fedgp_flower.shared_messages import LocalScoreSums, Nothing, PooledScoreSums, ScoreSums
from strategies.server.questions import Asking, Figures, Predicted, Roster
from strategies.server.strategy import FederatedStrategy


@message()
class NoState:
    """Nothing is learned before the closing evaluation."""


class LocalOnly(FederatedStrategy[NoState]):
    """No rounds: every site fits a GP of its rows and scores its held-out rows."""

    method = "local-only"
    state_class = NoState
    predicts = False
    trains = False
    score_sums: ClassVar[type[ScoreSums]] = LocalScoreSums

    def initialise(self, roster: Roster) -> Asking[NoState]:
        """Nothing."""
        yield from ()
        return NoState()

    def one_round(self, state: NoState, roster: Roster) -> Asking[tuple[NoState, Figures]]:
        """The fits happen where the rows are, when the held-out rows are scored."""
        yield from ()
        return state, {}

    def finished(self, state: NoState) -> bool:
        """One round says all."""
        return self.round > 0

    def predictive(self, state: NoState, roster: Roster) -> Asking[Predicted]:
        """Nothing is shared."""
        yield from ()
        return Predicted(Nothing())


class Pooled(LocalOnly):
    """Simulation only: one process sees the rows of all sites."""

    method = "pooled"
    score_sums = PooledScoreSums

    def initialise(self, roster: Roster) -> Asking[NoState]:
        """Nothing."""
        if self.masking is not None:
            raise ConfigError(
                "`method` = 'pooled' sees the rows of all sites; set `privacy.secure-aggregation` to false"
            )
        if not self.preparation.simulated:
            raise RunError("`method` = 'pooled' needs simulated sites: real sites do not give their rows away")
        return (yield from super().initialise(roster))
