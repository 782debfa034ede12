"""The two baselines as methods of their own: ``local-only``, where nothing is shared, and ``pooled``, where all is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.messages import message
from fedgp_flower.methods.messages import LocalScoreSums, Nothing
from strategies.server.network import Expected
from strategies.server.questions import Asking, Figures, Roster
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
    kind = "query.local_only"
    score_sums = LocalScoreSums

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

    def predictive(self, state: NoState, roster: Roster) -> Asking[Nothing]:
        """Nothing is shared."""
        yield from ()
        return Nothing()

    def chosen(self) -> Sequence[str]:
        """The sites that are asked."""
        return self.network.sites()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the fit and its scores in one message."""
        self.enrol(grid)
        if self.masking is not None:
            return super().configure_evaluate(server_round, arrays, config, grid)
        return [self._message(site, self.kind, Nothing()) for site in self.chosen()]

    def evaluation_specs(self) -> Expected:
        """A fit's reply carries histograms besides its scores."""
        return None if self.masking is None else super().evaluation_specs()


class Pooled(LocalOnly):
    """Simulation only: one process sees the rows of all sites."""

    method = "pooled"
    kind = "query.pooled"

    def enrol(self, grid: Grid) -> None:
        """Meet the sites.

        Raises:
            ConfigError: under masks nobody may see rows.
        """
        if self.config.privacy.secure_aggregation:
            raise ConfigError(
                "`method` = 'pooled' sees the rows of all sites; set `privacy.secure-aggregation` to false"
            )
        super().enrol(grid)

    def chosen(self) -> Sequence[str]:
        """The first site does the work for all.

        Raises:
            RunError: where sites are real machines, whose rows nobody may pool.
        """
        if not self.preparation.simulated:
            raise RunError(f"`method` = {self.method!r} needs simulated sites: real sites do not give their rows away")
        return self.network.healthy()[:1]
