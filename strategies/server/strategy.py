"""The Flower Strategy of an algorithm: a Flower round is a round of the paper.

The state changes only here, at the end of a complete round; an interrupted round is repeated from the previous state.
"""

from __future__ import annotations

import inspect
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Self, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from pydantic import BaseModel

from fedgp_flower.config import CoreConfig, RunConfig, parse, whole_number
from fedgp_flower.errors import ConfigError, ProtocolError, RunError, similar
from fedgp_flower.messages import decode, is_message, stepped_from
from fedgp_flower.options import MethodOptions, Section, Value, meanings
from fedgp_flower.outcome import Observer, Snapshot, Summary
from fedgp_flower.records import array_record, numpy_arrays
from fedgp_flower.typing import Json, NamedArrays
from strategies.server import checkpoint, enrolment
from strategies.server.algorithm import Algorithm
from strategies.server.course import Course
from strategies.server.network import Network
from strategies.server.questions import Asking, Each, Figures, Question, S, Total, started
from strategies.server.scoring import Scoring
from strategies.server.session import Asked, Contract, Session

logger = logging.getLogger("fedgp")

EXTRAS = ("baselines.linear", "baselines.local-only", "baselines.pooled", "keep-predictions")
IN_A_PROGRAM: Mapping[str, Value] = {**dict.fromkeys(EXTRAS, False), "evaluate-every": 1}
"""Defaults for a Strategy in a program, which writes no run folder and no report."""
Keyword: TypeAlias = Value | dict[str, Sequence[float]]
"""A value of a keyword; a dict stands for its JSON."""
NOT_FOR_A_STRATEGY = (
    {"method", "dataset", "data_dir", "partitioner", "partition", "output_dir", "name", "resume"}
    | {"num_server_rounds", "extra"}  # rounds are an argument of `start`
)


class FederatedStrategy(Algorithm[S], Strategy):
    """The base of every Strategy of this project.

    Keyword arguments are the fields of the configuration. Flower's wrappers need initial arrays, and a method whose
    sites return the run's arrays: ``wrapped.start(grid, initial_arrays=strategy.initial_arrays(grid))``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        known, kind = keys(cls.options_class), inspect.Parameter.KEYWORD_ONLY
        shown = [inspect.Parameter(name, kind, default=default) for name, (_, default, _) in known.items()]
        cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        lines = [f"    {name}: {meaning} (`{key}`, default {value!r})" for name, (key, value, meaning) in known.items()]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])

    def __init__(self, **keywords: Keyword | None) -> None:
        self._set(configured(self.method, self.options_class, keywords), Observer(), None)

    @classmethod
    def from_config(cls, config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> Self:
        """Return the Strategy of a run with an observer of its progress; ``snapshot`` resumes from a checkpoint."""
        strategy = cls.__new__(cls)
        strategy._set(config, observer, snapshot)
        return strategy

    def _set(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None) -> None:
        self.config, self.options, self.observer, self.snapshot = config, config.options, observer, snapshot
        self.timeout, self.planned_rounds = config.round_timeout, config.num_server_rounds
        facts: Json = {} if snapshot is None else snapshot.facts
        course = {} if snapshot is None else checkpoint.arrays_of(snapshot, checkpoint.COURSE)
        self.clock, self.course = checkpoint.Clock(), decode(Course, course) if course else None
        self.latest_round = int(facts.get("round", 0))
        self.merged = bool(facts.get("merged"))
        """Whether answers of sites have ever changed the state."""
        self.asked: Asked | None = None
        self.evaluated = (-1, 0)
        """The round of the latest evaluation and its number of replies."""
        self.expected = {}
        self.round_costs: list[tuple[float, int, float]] = []
        """Seconds, exchanges and work of each round so far."""
        self.outcome: Summary | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the method on the sites of a Grid, with the arguments of Flower's ``start``.

        ``num_rounds`` includes rounds before a resume, or of an earlier call, which this one continues; ``timeout`` is
        by default ``round-timeout``. :attr:`outcome` is the full summary. Raises RunError if fewer than ``min-sites``
        sites are usable, if no site ever contributed, or if an earlier call had another Grid.
        """
        num_rounds = whole_number("num_rounds", num_rounds, 0)
        self.timeout, self.planned_rounds = self.config.round_timeout if timeout is None else timeout, num_rounds
        result = Result()
        begun = hasattr(self, "session")
        if begun and self.network.grid is not grid:
            raise RunError("this strategy holds a run on another Grid: make a new strategy for a new run")
        self.enrol(grid)
        if begun and self.round >= max(num_rounds, 1):
            logger.warning("all %d rounds were done before: nothing is trained", num_rounds)
        self.network.timeout = self.timeout
        self.session.user_settings = {
            "train": train_config or ConfigRecord(),
            "evaluate": evaluate_config or ConfigRecord(),
        }
        self.summary()
        if initial_arrays is not None and self.snapshot is None:
            self._adopt_arrays(initial_arrays)
        self.clock.switch("training")
        if plan := self.exchanges_to_come(self.current):
            logger.info("at most %d exchanges remain", sum(count for count, _ in plan))
        while True:
            metrics = None if evaluate_fn is None else evaluate_fn(self.round, array_record(self.public(self.current)))
            if metrics is not None:
                result.evaluate_metrics_serverapp[self.round] = metrics
            if self.round >= num_rounds or self.finished(self.current):
                break
            self._train_one_round(result)
        self.require_training()
        self.clock.switch("evaluation")
        self._evaluate(result)
        self.outcome = checkpoint.close(self, self.clock, self.evaluated[1])
        result.arrays = array_record(self.public(self.current))
        return result

    def initial_arrays(self, grid: Grid) -> ArrayRecord:
        """Return the public arrays of the first state, for Flower's wrappers."""
        self.enrol(grid)
        arrays = self.public(self.current)
        if self.trains and not arrays:
            require_clippable(type(self).__name__, None, arrays)
        return array_record(arrays)

    def enrol(self, grid: Grid) -> None:
        """Agree with the sites of a Grid on columns and scales, and form the first state; later calls do nothing."""
        if hasattr(self, "session"):
            return
        # Sites keep state under this id; a resumed run keeps its id.
        new = f"{self.config.digest()}-{secrets.token_hex(4)}"
        run = new if self.snapshot is None else self.snapshot.facts.get("run", new)
        self.network = Network(grid, run, self.timeout, self.config.max_failures, round=self.latest_round)
        self.session = Session(self.network, self.config, self.options_class)
        self.scoring = Scoring(self.session)
        self.session.meet(self.snapshot)
        self.config = self.session.config
        if self.snapshot is None:
            self.current = self.session.begin(self.adjusted, self._begin)
        else:
            self._take_classes()
            self.current = checkpoint.restore(self.session, self.snapshot, self.clock, self.state_class)
            logger.info("resumed after round %d", self.round)
        if constants := self.constants(self.current):
            self.session.share(constants)

    def _begin(self) -> Asking[S]:
        """Return the first state, after the agreement on columns and classes."""
        self._take_classes()
        return self.initialise(self.roster())

    def _take_classes(self) -> None:
        self.options = self.config.options.of_classes(len(self.preparation.classes))

    def summary(self) -> None:
        """Log method and data, once the sites are known."""
        logger.info("method %s on %s", self.config.method, checkpoint.dataset_of(self.session))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round's first question; ``arrays``, if any, replace the public ones."""
        self.enrol(grid)
        session = self.session
        if self.latest_round < server_round:
            self.latest_round = server_round
            session.begin_round()
        self._adopt_arrays(arrays)
        session.user_settings["train"] = config
        session.encoded_request, session.clippable, session.training = None, len(arrays) > 0, True
        self.running, self.asked = started(self.one_round(self.current, self.roster())), None
        self._advance(None)
        if isinstance(self.question, Each | Total):
            self.asked = session.prepare(self.question)
        if len(arrays) and self.question is not None:
            require_clippable(type(self).__name__, self.asked, self.public(self.current))
        return [] if self.asked is None else self.asked.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Answer the first question with the replies, ask the round's other questions, and adopt its state."""
        if self.asked is not None:
            self._advance(self.session.read(self.asked, self.network.valid(replies, self.asked.refusal)))
        while self.question is not None:
            self._advance(self.session.ask(self.question))
        self.current, figures = self.complete
        self.merged |= bool(figures)
        return array_record(self.public(self.current)), MetricRecord(dict(figures))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every site to score its held-out rows, including sites left out of training."""
        self.enrol(grid)
        self._adopt_arrays(arrays)
        self.session.user_settings["evaluate"] = ConfigRecord(
            {**self.session.user_settings.get("evaluate", {}), **config}
        )
        return self.scoring.ask(self.score_sums, self.session.run(self.predictive(self.current, self.roster())))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return figures over all held-out rows, from the sites' sums; None if no site has any."""
        found = self.scoring.evaluate(self.network.valid(replies, self.scoring.check))
        return None if found is None else MetricRecord({f"test_{name}": value for name, value in found["test"].items()})

    def require_training(self) -> None:
        """Raise RunError if no round has changed the state."""
        if self.trains and self.round and not self.merged:
            raise RunError(
                f"no answer to training could be used in {self.round} round(s), so the run has no result."
                f" {self.network.latest_failures()}"
            )

    def _train_one_round(self, result: Result) -> None:
        """Run a round, repeat it while required sites fail, then write its row of the history and a checkpoint."""
        number, config = self.round + 1, ConfigRecord(dict(self.session.user_settings["train"]))
        network, missed = self.network, Counter[str]()
        begun, earlier = time.monotonic(), network.traffic.exchanges
        while True:
            before, failed = self.current, len(network.failures)
            messages = list(self.configure_train(number, ArrayRecord(), config, network.grid))
            asked = self.asked
            replies = asked and network.exchange(messages, asked.refusal, retries=asked.question.retries)
            _, metrics = self.aggregate_train(number, replies or [])
            again = self._missing_sites(failed, missed)
            if not again:
                break
            self.current = before
            enrolment.await_sites(network, self.preparation, again)
        lost = {failure.site for failure in network.failures[failed:]}
        in_vain = not metrics and bool(lost) and lost.issuperset(network.healthy())
        self.session.rounds_in_vain = self.session.rounds_in_vain + 1 if in_vain else 0
        figures = floats(metrics)
        self.follow(figures)
        result.train_metrics_clientapp[number] = MetricRecord(dict(figures))
        scorable = self.merged or not self.trains  # nothing has been learned before the first answer
        if scorable and self.config.evaluate_every and number % self.config.evaluate_every == 0:
            figures |= self._evaluate(result)
        row = {"round": number, **self.clock.since_last_round(network.traffic), **figures}
        row |= {"failures": len(network.failures), "repairs": sum(network.repairs.values())}
        exchanges = network.traffic.exchanges - earlier
        rounds_left, row["seconds_to_come"] = self._forecast(before, time.monotonic() - begun, exchanges)
        self.observer.on_round(row, number + rounds_left)
        self.observer.on_checkpoint(checkpoint.checkpoint(self, self.clock, self.merged))

    def _forecast(self, before: S, seconds: float, exchanges: int) -> tuple[int, float]:
        """Return the remaining rounds and seconds after a round; the shortest round trip counts as pure waiting."""
        work, round_trips = self.work(before, self.current), self.network.round_trips
        self.round_costs.append((seconds, exchanges, exchanges * work))
        plan = self.exchanges_to_come(self.current)
        parts = [(exchanges * (self.horizon() - self.round), work)] if plan is None else plan
        most = self.exchanges_a_round * (self.planned_rounds - self.round)
        costs = [cost for number, cost in parts for _ in range(number)][:most]
        left = checkpoint.seconds_to_come(self.round_costs, min(round_trips), len(costs), sum(costs))
        if plan is not None and not self.expected:
            self.expected = {"expected_exchanges": exchanges + len(costs), "expected_seconds": seconds + left}
            trip = np.median(round_trips)
            minutes = float(f"{left / 60:.2g}")  # 120, not 1.2e+02
            logger.info("training takes at most %g more minutes; a round trip takes %.2g s", minutes, trip)
        return -(-len(costs) // self.exchanges_a_round), left

    def _missing_sites(self, failed: int, missed: Counter[str]) -> list[str]:
        """Return the sites for which a round that needs all sites is repeated."""
        if self.config.round.incomplete == "accept" or self.session.outstanding:
            return []
        now = {failure.site for failure in self.network.failures[failed:]} & set(self.network.healthy())
        missed.update(now)
        again = sorted(site for site in now if missed[site] < self.config.max_failures)
        if again:
            logger.warning("round %d is repeated: %s missed it", self.round, ", ".join(again))
        return again

    def _advance(self, reply: Any) -> None:
        """Run the round to its next question or its end."""
        try:
            with self.network.naming_failures():
                self.question: Question | None = self.running.send(reply)
        except StopIteration as done:
            self.question, self.session.training = None, False
            match done.value:
                case (state, dict()) if is_message(type(state)):
                    self.complete: tuple[S, Figures] = done.value
                case other:
                    found = f"{type(self).__name__}.one_round returned {type(other).__name__}"
                    raise ProtocolError(f"{found}, expected a pair of the next state, a message, and figures") from None

    def _evaluate(self, result: Result) -> Figures:
        """Evaluate once a round; later calls in the same round return no figures."""
        if self.evaluated[0] == self.round:
            return {}
        previous = self.clock.switch("evaluation")
        messages = list(self.configure_evaluate(self.round, ArrayRecord(), ConfigRecord(), self.network.grid))
        replies = self.network.exchange(messages, self.scoring.check, retries=1)
        record = self.aggregate_evaluate(self.round, replies)
        self.evaluated = self.round, len(replies)
        self.clock.switch(previous)
        if record is not None:
            result.evaluate_metrics_clientapp[self.round] = record
        return floats(record)

    def _adopt_arrays(self, record: ArrayRecord) -> None:
        """Continue from these public arrays, if they are new; raise ProtocolError if their shapes differ."""
        if not len(record):
            return
        given, known = numpy_arrays(record), self.public(self.current)
        if shapes_of(given) != shapes_of(known):
            shapes = ", ".join(f"`{name}` {shape}" for name, shape in shapes_of(known).items())
            raise ProtocolError(f"arrays to continue from: expected {shapes}; start from `initial_arrays(grid)`")
        arrays = {name: np.asarray(given[name], array.dtype) for name, array in known.items()}
        if not all(np.array_equal(arrays[name], array) for name, array in known.items()):
            self.current = self.adopt(self.current, arrays)


def require_clippable(name: str, asked: Asked | None, known: NamedArrays) -> None:
    """Raise ConfigError in one of Flower's wrappers if sites do not return the run's arrays."""
    back = None
    if isinstance(asked, Contract) and asked.messages:
        back = stepped_from(asked.question.answer, next(iter(asked.requests.values())))
    if back is None or shapes_of(back) != shapes_of(known):
        raise ConfigError(
            f"{name} cannot run inside Flower's wrappers or Flower's loop: they clip and average the arrays that sites"
            f" return, and the sites of {name} do not return the run's arrays. Call its `start`, or choose a method of"
            " federated averaging"
        )


def floats(record: MetricRecord | None) -> Figures:
    """Return Flower's metrics as single numbers."""
    return {name: float(np.mean(value)) for name, value in (record or {}).items()}


def shapes_of(arrays: NamedArrays) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array."""
    return {name: np.shape(array) for name, array in arrays.items()}


@cache
def keys(options: type[MethodOptions]) -> dict[str, tuple[str, object, str]]:
    """Return key, default and meaning of each keyword of a Strategy, prefixed by the section if a name is taken."""
    tables: list[tuple[str, type[BaseModel]]] = [("", CoreConfig)]
    tables += [(section.table, section) for section in (options, options.shared) if section and section.table]
    shared = {n: info.default for n, info in CoreConfig.model_fields.items() if isinstance(info.default, Section)}
    tables += [(name, type(section)) for name, section in shared.items() if name not in NOT_FOR_A_STRATEGY]
    found: dict[str, tuple[str, object, str]] = {}
    for table, section in tables:
        for name, info in section.model_fields.items():
            if not info.exclude and (table or name not in NOT_FOR_A_STRATEGY | shared.keys()):
                key = f"{table}.{name}".removeprefix(".").replace("_", "-")
                default, meaning = IN_A_PROGRAM.get(key, info.default), meanings(section).get(name, "")
                found[f"{table}_{name}" if name in found else name] = key, default, meaning
    return found


def configured(method: str, options: type[MethodOptions], given: Mapping[str, Keyword | None]) -> RunConfig:
    """Return the configuration of the keyword arguments ``given``; raise TypeError for an unknown one."""
    known = keys(options)
    flat: dict[str, Value] = {"method": method, **IN_A_PROGRAM}
    for name, value in given.items():
        if name not in known:
            hint = similar(name, known) or f"allowed: {', '.join(sorted(known))}"
            raise TypeError(f"unexpected keyword argument {name!r}; {hint}")
        if value is not None:  # None: the default
            flat[known[name][0]] = json.dumps(value) if isinstance(value, dict) else value
    return parse(flat, {method: options})
