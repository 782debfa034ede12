"""The base of every Strategy: meeting the sites, rounds, evaluation, checkpoints, and the comparisons at the end.

A method supplies ``configure_train`` / ``aggregate_train`` (or its own ``train``), what sites need to predict, and what
is saved. Everything a run must survive — late, failing, lying or returning sites, a kill at any moment — is handled
here and in :mod:`strategies.network`, once.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedgp_flower.config import RunConfig
from fedgp_flower.shapes import NamedArrays
from strategies import closing, meeting
from strategies.closing import Posterior, Summary
from strategies.evaluation import Evaluation, combine
from strategies.network import Network
from strategies.wire import Answer, Specs, answer

logger = logging.getLogger("fedgp")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All a run needs to go on after a kill: arrays, and JSON-able facts about them."""

    arrays: NamedArrays
    facts: dict[str, Any]


class Observer(Protocol):
    """What the run's folder and progress display want to know."""

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        """A round is complete; ``row`` is its line of the history."""

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """Keep this; it replaces the one before."""


@dataclass(slots=True)
class Clock:
    """Seconds spent in the parts of a run, carried over a resume."""

    seconds: dict[str, float] = field(default_factory=lambda: {"setup": 0.0, "training": 0.0, "evaluation": 0.0})
    started: float = field(default_factory=time.perf_counter)
    part: str = "setup"

    def switch(self, part: str) -> str:
        """Book the time so far and go on in another part; returns the part left."""
        now = time.perf_counter()
        self.seconds[self.part] += now - self.started
        self.started, left, self.part = now, self.part, part
        return left


class GPStrategy(Strategy):
    """Seeded rounds over named sites, with evaluation, checkpoints and a closing summary."""

    predicts = True
    """Whether sites can predict single rows with what :meth:`predictive` returns."""

    def __init__(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> None:
        self.config = config
        self.observer = observer
        self.snapshot = snapshot
        self.clock = Clock()
        self.round = 0
        self.booked: dict[str, float] = {}
        self.evaluated_round = -1
        self.evaluation_answers: dict[str, Answer] = {}
        self.predicted_with: NamedArrays = {}
        self.evaluated_sites = 0
        self.evaluation: Evaluation | None = None
        self.network: Network
        self.preparation: meeting.Preparation
        self.outcome: Summary | None = None

    @abstractmethod
    def initialise(self) -> None:
        """Set the method's state before the first round; sites may be asked."""

    @abstractmethod
    def predictive(self) -> NamedArrays:
        """Arrays with which a site predicts by the current global model; sites may be asked for sums."""

    def row_specs(self) -> Specs:
        """Arrays that a simulated site sends for its held-out rows besides target, prediction and inputs."""
        return {}

    @abstractmethod
    def posterior(self) -> Posterior | None:
        """What is saved to predict without any site; None for a personal method."""

    @abstractmethod
    def state(self) -> Snapshot:
        """The method's own part of a checkpoint."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Undo :meth:`state`."""

    @abstractmethod
    def train_specs(self) -> Specs:
        """What the arrays of a training reply must look like."""

    def evaluation_specs(self) -> Specs | None:
        """What the arrays of an evaluation reply must look like: scores are numbers, so there are none."""
        return {}

    def details(self) -> dict[str, Any]:
        """Facts of the method worth keeping in ``metrics.json``."""
        return {}

    def adjusted(self, preparation: meeting.Preparation) -> meeting.Preparation:
        """The agreed standardisation, changed where the model needs another one."""
        return preparation

    def baseline_arrays(self) -> NamedArrays:
        """What sites need for the comparisons besides their rows."""
        return {}

    def personal(self, site: str) -> NamedArrays:
        """Arrays that go to one site alone, with every message of a phase."""
        del site
        return {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run the whole method; :attr:`outcome` holds the summary afterwards.

        Raises:
            RunError: if fewer than ``min-sites`` sites are usable at any time.
        """
        del initial_arrays, train_config, evaluate_config, evaluate_fn  # the configuration says it all
        # Sites keep state under this id: a resumed run goes on under its own, any other run starts afresh.
        run = f"{self.config.digest()}-{secrets.token_hex(4)}" if self.snapshot is None else self.snapshot.facts["run"]
        self.network = Network(grid, run, timeout, self.config.max_failures)
        self.summary()
        self._set_up()
        self.clock.switch("training")
        self.train(num_rounds)
        self.clock.switch("evaluation")
        self.evaluate()
        self.outcome = closing.close(self)
        return Result()

    def _set_up(self) -> None:
        if self.snapshot is None:
            self.preparation = self.adjusted(meeting.meet(self.network, self.config, None))
            self.initialise()
            return
        facts = self.snapshot.facts
        self.round = self.network.round = int(facts["round"])
        self.preparation = meeting.meet(self.network, self.config, meeting.Preparation.from_snapshot(self.snapshot))
        meeting.restore_accounts(self.network, facts)
        self.clock.seconds = dict(facts["seconds"])
        self.booked = {"seconds": sum(facts["seconds"].values())}
        self.booked |= {name: facts["traffic"][name] for name in ("bytes_up", "bytes_down")}
        self.restore(self.snapshot)
        logger.info("resumed after round %d", self.round)

    def train(self, num_rounds: int) -> None:
        """Rounds of ``configure_train``, exchange and ``aggregate_train`` until ``num_rounds`` are complete."""
        while self.round < num_rounds:
            self.begin_round()
            config = ConfigRecord()
            messages = list(self.configure_train(self.round, ArrayRecord(), config, self.network.grid))
            replies = self.network.exchange(messages, self.train_specs())
            _, metrics = self.aggregate_train(self.round, replies)
            self.complete_round({} if metrics is None else {k: float(np.mean(v)) for k, v in metrics.items()})

    def begin_round(self) -> None:
        """Count a round, greet sites that are new or back, and check that there are enough."""
        self.round += 1
        self.network.round = self.round
        meeting.greet(self.network, self.preparation)
        self.network.require(self.config.min_sites)

    def complete_round(self, metrics: Mapping[str, float]) -> None:
        """Record a round, evaluate when it is due, and keep a checkpoint."""
        figures = dict(metrics)
        every = self.config.evaluate_every
        if every and self.round % every == 0:
            figures |= self.evaluate()
        traffic = self.network.traffic
        self.clock.switch(self.clock.part)
        row = {
            "round": self.round,
            "communications": traffic.communications,
            **self.since_last_round(),
            **figures,
            "failures": len(self.network.failures),
            "repairs": sum(self.network.repairs.values()),
        }
        self.observer.on_round(row, self.config.num_server_rounds)
        self.observer.on_checkpoint(self._checkpoint())

    def since_last_round(self) -> dict[str, float]:
        """Seconds and bytes since the round before was complete."""
        traffic = self.network.traffic
        total = {
            "seconds": sum(self.clock.seconds.values()),
            "bytes_up": traffic.bytes_up,
            "bytes_down": traffic.bytes_down,
        }
        spent = {name: value - self.booked.get(name, 0) for name, value in total.items()}
        self.booked = total
        return spent

    def _checkpoint(self) -> Snapshot:
        own = self.state()
        facts = meeting.accounts(self.network) | {"round": self.round, "seconds": self.clock.seconds}
        return Snapshot(
            {**self.preparation.arrays, **own.arrays},
            {**own.facts, **facts, "preparation": self.preparation.facts()},
        )

    def ask(
        self,
        phase: str,
        arrays: Mapping[str, np.ndarray],
        specs: Specs | None,
        sites: Iterable[str] | None = None,
        *,
        retries: int = 0,
    ) -> dict[str, Answer]:
        """Send the same arrays, and the preparation, to some sites (default: all) and return the valid answers."""
        chosen = self.network.sites() if sites is None else sites
        request = {**self.preparation.arrays, **arrays}
        requests = {site: {**request, **self.personal(site)} for site in chosen}
        return self.network.ask(phase, requests, specs, self.preparation.settings, retries=retries)

    def broadcast(self, phase: str, arrays: Mapping[str, np.ndarray], sites: Iterable[str]) -> list[Message]:
        """One message per site with the same arrays and the preparation."""
        request = {**self.preparation.arrays, **arrays}
        settings = self.preparation.settings
        return [self.network.message(site, phase, {**request, **self.personal(site)}, settings) for site in sites]

    def generator(self, purpose: str) -> np.random.Generator:
        """Randomness for a purpose in this round, from the seed of the run."""
        return np.random.default_rng([self.config.seed, self.round, *purpose.encode()])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every site, also one left out of training, to score its held-out rows."""
        del server_round, arrays, config, grid
        self.predicted_with = self.predictive()
        return self.broadcast("evaluate", self.predicted_with, self.network.sites())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Figures over all held-out rows, from the sites' sums; None if nobody has any."""
        del server_round
        answers = {self.network.site_of(reply): answer(self.network.site_of(reply), reply) for reply in replies}
        self.evaluation_answers = closing.usable_scores(self.network, answers)
        if not self.evaluation_answers:
            return None
        sums = {site: closing.sums_of(own) for site, own in self.evaluation_answers.items()}
        self.evaluation = combine(sums, self.preparation.target_scale)
        return MetricRecord({f"test_{name}": value for name, value in self.evaluation["test"].items()})

    def evaluate(self) -> dict[str, float]:
        """Evaluate once per round; later calls in the same round return nothing new."""
        if self.evaluated_round == self.round:
            return {}
        left = self.clock.switch("evaluation")
        self.network.round = self.round
        messages = list(self.configure_evaluate(self.round, ArrayRecord(), ConfigRecord(), self.network.grid))
        replies = self.network.exchange(messages, self.evaluation_specs(), retries=1)
        record = self.aggregate_evaluate(self.round, replies)
        self.evaluated_round = self.round
        self.clock.switch(left)
        self.evaluated_sites = len(replies)
        return {} if record is None else {name: float(np.mean(value)) for name, value in record.items()}

    def summary(self) -> None:
        """Log what is about to run."""
        logger.info("method %s on %s", self.config.method, self.config.dataset)
