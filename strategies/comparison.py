"""The two yardsticks as methods of their own: ``local-only``, where nothing is shared, and ``pooled``, where all is."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import RunError
from fedgp_flower.shapes import NamedArrays
from strategies.base import GPStrategy, Observer, Snapshot
from strategies.closing import Posterior
from strategies.wire import Specs


class Yardstick(GPStrategy):
    """No rounds: every site, or one process with all rows, fits a GP and scores the held-out rows."""

    predicts = False
    phase = "query.local_only"

    def initialise(self) -> None:
        """Nothing is learned before the closing evaluation."""

    def train(self, num_rounds: int) -> None:
        """One round: the fits happen where the rows are, when the held-out rows are scored."""
        del num_rounds
        if self.round == 0:
            self.begin_round()
            self.complete_round({})

    def chosen(self) -> list[str]:
        """The sites that are asked."""
        return self.network.sites()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No site trains for another."""
        del server_round, arrays, config, grid
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Nothing to aggregate."""
        del server_round, replies
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the fit and its scores in one message."""
        del server_round, arrays, config, grid
        return self.broadcast(self.phase, {}, self.chosen())

    def evaluation_specs(self) -> Specs | None:
        """A fit's reply carries histograms besides its scores."""
        return None

    def predictive(self) -> NamedArrays:
        """Nothing is shared."""
        return {}

    def posterior(self) -> Posterior | None:
        """A GP of a site's rows stays at the site."""
        return None

    def train_specs(self) -> Specs:
        """Nothing comes back."""
        return {}

    def state(self) -> Snapshot:
        """Nothing to keep."""
        return Snapshot({}, {})

    def restore(self, snapshot: Snapshot) -> None:
        """Nothing to undo."""


class Pooled(Yardstick):
    """Simulation only: one process sees the rows of all sites."""

    phase = "query.pooled"

    def chosen(self) -> list[str]:
        """The first site does the work for all.

        Raises:
            RunError: where sites are real machines, whose rows nobody may pool.
        """
        if not self.preparation.simulated:
            raise RunError("`method` = 'pooled' needs simulated sites: real sites do not give their rows away")
        return self.network.healthy()[:1]


def create_local_only(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> Yardstick:
    """The Strategy of ``method = "local-only"``."""
    return Yardstick(config, observer, snapshot)


def create_pooled(config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> Pooled:
    """The Strategy of ``method = "pooled"``."""
    return Pooled(config, observer, snapshot)
