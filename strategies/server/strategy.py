"""One Strategy drives any algorithm: a Flower round is a round of the paper.

An algorithm supplies ``initialise``, ``one_round`` and ``predictive`` as computations that ask
(:mod:`strategies.server.questions`). This class puts their questions to the sites through a Flower Grid, judges what
comes back by the declaration of the message that was asked for, and is the only place where the state changes: once a
round, when the round is complete. So a killed round is repeated from the last state, and Flower's own ``start``, its
wrappers and its mods work.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedgp_flower.errors import ConfigError, ProtocolError
from fedgp_flower.messages import add, decode, encode, is_public, is_summand, kind_of, split
from fedgp_flower.methods.linear import LinearScoreSums
from fedgp_flower.methods.messages import LocalScoreSums, Nothing, ScoreSums
from fedgp_flower.options import MethodOptions
from fedgp_flower.records import APART, array_record, numpy_arrays, packed_record
from fedgp_flower.run.artefacts import Snapshot
from fedgp_flower.run.config import RunConfig, defaults
from fedgp_flower.transforms import TRANSFORMS
from fedgp_flower.typing import NamedArrays
from strategies import linear
from strategies.server import enrolment, target
from strategies.server.base import BaseStrategy, Observer
from strategies.server.context import SharedContext, settings_text
from strategies.server.contract import Contract, ContradictionError
from strategies.server.course import Course, rise
from strategies.server.evaluation import Evaluation, of_all
from strategies.server.finalise import Posterior, Predicted
from strategies.server.keywords import configured, documented, signature
from strategies.server.masking import MEMBERS, TRUST, MaskedContract, Masking
from strategies.server.network import Expected, Network, echo_of, pause_after
from strategies.server.questions import (
    Asking,
    Each,
    Figures,
    First,
    Question,
    Refuse,
    Roster,
    Summed,
    Total,
    answered_by,
)
from strategies.server.shapes import note_ranges
from strategies.server.wire import Answer, Specs, Texts, answers

logger = logging.getLogger("fedgp")

S = TypeVar("S")
STATE = "state."


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A question that is not waited for."""

    site: str
    node: int
    deadline: float
    request: Any
    echo: Texts
    """What its reply must repeat."""


class FederatedStrategy(BaseStrategy, Generic[S]):
    """The base of every Strategy of this project.

    A subclass names its ``method``, its ``options`` and its ``state_class``, and supplies :meth:`initialise`,
    :meth:`one_round` and :meth:`predictive`. Keyword arguments are the fields of the configuration, see
    :mod:`strategies.server.keywords`.
    """

    method: ClassVar[str]
    options_class: ClassVar[type[MethodOptions]] = MethodOptions
    state_class: ClassVar[type]
    implied: ClassVar[Mapping[str, Any]] = {}
    """Keywords that the class stands for."""
    exchanges_a_round: ClassVar[int] = 1
    """Where exchanges are limited."""
    watched: ClassVar[str] = ""
    """The figure whose course tells a stochastic method whether it has converged, in nats a row."""
    options: MethodOptions
    """The method's own table; a subclass says of which class."""
    current: S
    contract: Contract | MaskedContract
    predicted: Predicted
    """What sites predicted with in the latest evaluation."""
    scoring: Any
    """The question for scores under masks."""
    score_sums: ClassVar[type[ScoreSums]] = ScoreSums

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.__signature__ = signature(cls.options_class, cls.implied)  # type: ignore[attr-defined]
        cls.__doc__ = documented(cls.__doc__, cls.options_class, cls.implied)

    def __init__(self, **keywords: Any) -> None:
        config = configured(self.method, self.options_class, self.implied, keywords)
        self._set(config, Observer(), None)

    @classmethod
    def from_config(cls, config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> Self:
        """The Strategy of a run: its configuration, who watches, and the checkpoint it goes on from."""
        own = cls.__new__(cls)
        own._set(config, observer, snapshot)
        return own

    def _set(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None) -> None:
        super().__init__(config, observer, snapshot)
        self.options = config.options
        self.sizes: dict[str, int] = {"M": config.model.num_inducing}
        self.train_config = ConfigRecord()
        self.evaluate_config = ConfigRecord()
        self.timeout = config.round_timeout
        self.planned_rounds = config.num_server_rounds
        self.masking: Masking | None = None
        """Whether and how totals are masked."""
        self.packed: tuple[Any, ArrayRecord, Mapping[str, Any]] | None = None
        """The latest request with its arrays and numbers, which the messages to all sites share."""
        self.apart = False
        """Whether arrays travel each by itself, since Flower's wrappers, which bring arrays, clip those of replies."""
        self.course = Course()
        """What a noisy bound did so far."""
        self.begun = 0
        self.running: Asking[tuple[S, Figures]] | None = None
        self.question: Question | None = None
        self.complete: tuple[S, Figures] | None = None
        self.outstanding: dict[str, Outstanding] = {}
        """By message id."""
        self.expected: dict[str, float] = {}
        """Exchanges and seconds of training, as announced before it."""
        self.arrived: list[Message] = []
        """Replies that came together with an earlier one."""

    # What an algorithm supplies.

    @abstractmethod
    def initialise(self, roster: Roster) -> Asking[S]:
        """The state before the first round; sites may be asked."""

    def resumed(self, state: S, roster: Roster) -> Asking[S]:
        """The state with which a resumed run goes on; sites may be asked, for a state that was changed in between."""
        del roster
        yield from ()
        return state

    @abstractmethod
    def one_round(self, state: S, roster: Roster) -> Asking[tuple[S, Figures]]:
        """The next state, and the figures of the round."""

    @abstractmethod
    def predictive(self, state: S, roster: Roster) -> Asking[Any]:
        """What a state predicts with, as :class:`~strategies.server.finalise.Predicted`."""

    def public(self, state: S) -> NamedArrays:
        """The arrays that ``result.arrays`` holds: those that Flower's wrappers clip, disturb and save."""
        return encode(state)

    def adopt(self, state: S, arrays: NamedArrays) -> S:
        """The state with public arrays that come from elsewhere, such as noise added by a wrapper."""
        del arrays
        return state

    def finished(self, state: S) -> bool:
        """Whether more rounds change nothing."""
        del state
        return False

    def posterior_of(self, state: S) -> Posterior | None:
        """What is saved to predict without any site; None for a personal method."""
        del state
        return None

    def details_of(self, state: S) -> dict[str, Any]:
        """Facts of the method worth keeping in ``metrics.json``."""
        del state
        return {}

    def constants(self, state: S) -> NamedArrays:
        """Arrays that sites need besides every message and that no round changes: a site is sent them once."""
        del state
        return {}

    def exchanges_to_come(self, state: S) -> int | None:
        """With how many exchanges training ends at the latest, from here on; None where it cannot be said."""
        del state
        return None

    def final(self, state: S, roster: Roster) -> Asking[dict[str, Any]]:
        """Facts for ``metrics.json`` that sites are asked for after training."""
        del state, roster
        yield from ()
        return {}

    # A run.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the method on the sites of a Grid.

        Args:
            grid: Where the sites are.
            initial_arrays: Public arrays to start from instead of the method's own first state.
            num_rounds: Rounds, those before a resume among them.
            timeout: Seconds after which a missing reply is its site's failure.
            train_config: Sent with every training message.
            evaluate_config: Sent with every evaluation message.
            evaluate_fn: Called with (round, public arrays) before the first round and after each one.

        Returns:
            The public arrays at the end and the metrics of every round; :attr:`outcome` holds the full summary.

        Raises:
            RunError: if fewer than ``min-sites`` sites are usable at any time, or no site ever contributed.
        """
        self.train_config = train_config or ConfigRecord()
        self.evaluate_config = evaluate_config or ConfigRecord()
        self.timeout = timeout
        self.planned_rounds = num_rounds
        self.result = Result()
        self.enrol(grid)
        self.summary()
        if initial_arrays is not None and self.snapshot is None:
            self._take(initial_arrays)
        self.clock.switch("training")
        self._announce()
        self._evaluate_at_server(evaluate_fn)
        while self.round < num_rounds and not self.finished(self.current):
            self._train_one_round(grid)
            self._evaluate_at_server(evaluate_fn)
        self.require_training()
        self.clock.switch("evaluation")
        self.evaluate()
        self.outcome = self.close()
        logger.info("%s", self.what_the_server_sees())
        self.result.arrays = array_record(self.public(self.current))
        return self.result

    @property
    def most_rounds(self) -> int:
        """As configured, or as many as exchanges are left for."""
        left, most = self.exchanges_to_come(self.current), self.config.num_server_rounds
        return most if left is None else min(most, self.round + left // self.exchanges_a_round)

    def _announce(self) -> None:
        """Say how long training will take, by the trips made so far."""
        count = self.exchanges_to_come(self.current)
        if count:
            trip = float(np.median(self.network.trips))
            self.expected = {"expected_exchanges": count, "expected_seconds": count * trip}
            logger.info("about %d exchanges to come, %.2g minutes at %.2g s a trip", count, count * trip / 60, trip)

    def _train_one_round(self, grid: Grid) -> None:
        number, config = self.round + 1, ConfigRecord(dict(self.train_config))
        missed = Counter[str]()
        while True:
            before, failed = self.current, len(self.network.failures)
            messages = list(self.configure_train(number, ArrayRecord(), config, grid))
            retries = self.question.retries if isinstance(self.question, Each | Total) else 0
            replies = self.network.exchange(messages, self.contract, retries=retries) if messages else []
            _, metrics = self.aggregate_train(number, replies)
            again = self._to_be_awaited(failed, missed)
            if not again:
                break
            self.current = before
            enrolment.reunite(self.network, self.preparation, again)
        figures = {} if metrics is None else {name: float(np.mean(value)) for name, value in metrics.items()}
        self.merged |= bool(figures)
        if self.watched in figures and self.watching():
            self.course.add(figures[self.watched], number)
        self.result.train_metrics_clientapp[number] = MetricRecord(dict(figures))
        self.complete_round(figures)

    def _to_be_awaited(self, failed: int, missed: Counter[str]) -> list[str]:
        """Sites that still take part and failed in a round that is to have them all, and not too often in it."""
        if self.config.round.incomplete == "accept" or self.outstanding:
            return []
        now = {failure.site for failure in self.network.failures[failed:]} & set(self.network.healthy())
        missed.update(now)
        again = sorted(site for site in now if missed[site] < self.config.max_failures)
        if again:
            logger.warning("round %d is repeated: %s missed it", self.round, ", ".join(again))
        return again

    def _evaluate_at_server(self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None) -> None:
        if evaluate_fn is not None:
            metrics = evaluate_fn(self.round, array_record(self.public(self.current)))
            if metrics is not None:
                self.result.evaluate_metrics_serverapp[self.round] = metrics

    def initial_arrays(self, grid: Grid) -> ArrayRecord:
        """The public arrays of the first state, for Flower's wrappers, whose ``start`` wants them."""
        self.enrol(grid)
        return array_record(self.public(self.current))

    def enrol(self, grid: Grid) -> None:
        """Meet the sites of a Grid, agree on columns and scales, and form the first state; once."""
        if getattr(self, "network", None) is not None:
            return
        facts = {} if self.snapshot is None else self.snapshot.facts
        # Sites keep state under this id: a resumed run goes on under its own, any other run starts afresh.
        run = facts.get("run", f"{self.config.digest()}-{secrets.token_hex(4)}")
        network = Network(grid, run, self.timeout, self.config.max_failures)
        self.round = self.begun = network.round = int(facts.get("round", 0))
        network.introduction = {"configuration": self._settings()}
        self.network = network
        self._set_up()

    def _settings(self) -> str:
        return settings_text(self.config.flat(), defaults([self.options_class]))

    def _set_up(self) -> None:
        if self.snapshot is not None:
            saved = enrolment.Preparation.from_snapshot(self.snapshot)
            met = enrolment.meet_again(self.network, self.config, saved)
            self._mask("privacy" in self.snapshot.facts)
            self._exchange_keys(met.simulated)
            self._agreed(met)
            self._resume(self.snapshot)
            self._share(self.constants(self.current))
            return
        self.enrolment = enrolment.meet(self.network, self.config)
        self._mask(all(own.number(TRUST) for own in self.enrolment.described.values()))
        preparation = self.enrolment.preparation
        self._exchange_keys(preparation.simulated)
        if any(own.number(enrolment.BARE) for own in self.enrolment.described.values()):
            self._agreed(preparation)
            self.enrolment = self.ask_through(enrolment.from_totals(self.enrolment, self.network))
            preparation = self.enrolment.preparation
        while True:
            try:
                self._agreed(self.adjusted(self._transformed(preparation)))
                self.current = answered_by(self.initialise(self.roster()), self._ask_noting_ranges)
            except ContradictionError as contradiction:
                self.agree_without(contradiction.sites)
                preparation = self.enrolment.preparation
            else:
                self._share(self.constants(self.current))
                return

    def _transformed(self, preparation: enrolment.Preparation) -> enrolment.Preparation:
        """The preparation with the target that ``transform.target`` makes of the sites'."""
        family = TRANSFORMS.get(self.config.transform.target)
        if family is None:
            return preparation
        self._agreed(preparation)
        everyone = self.roster().everyone
        return self.ask_through(target.transformed(preparation, family, everyone))

    def _agreed(self, preparation: enrolment.Preparation) -> None:
        """Take columns and scales; every later message names them."""
        self.preparation = preparation
        self.sizes |= {"D": preparation.num_inputs, "P": 1 + preparation.num_inputs}
        self.network.context = None
        self._share({})

    def _share(self, constants: NamedArrays) -> None:
        if constants or self.network.context is None:
            texts = {"schema": self.preparation.schema, "configuration": self._settings()}
            texts |= {} if self.masking is None else {MEMBERS: self.masking.text}
            self.network.context = SharedContext.of(self.preparation.arrays, texts, constants)

    def _resume(self, snapshot: Snapshot) -> None:
        facts = snapshot.facts
        enrolment.restore_accounts(self.network, facts)
        self.merged = bool(facts["merged"])
        self.clock.seconds = dict(facts["seconds"])
        self.course = Course(**facts.get("course", {}))
        self.booked = {"seconds": sum(facts["seconds"].values())}
        self.booked |= {name: facts["traffic"][name] for name in ("bytes_up", "bytes_down")}
        arrays = {name.removeprefix(STATE): a for name, a in snapshot.arrays.items() if name.startswith(STATE)}
        if self.masking is not None:
            self.masking.restore(facts["privacy"])
        logger.info("resumed after round %d", self.round)
        self.current = self.ask_through(self.resumed(decode(self.state_class, arrays), self.roster()))

    def roster(self) -> Roster:
        """The sites as they are now."""
        rows, busy = self.preparation.rows, tuple(own.site for own in self.outstanding.values())
        healthy, everyone = self.network.healthy(), self.network.sites()
        if self.masking is not None:
            healthy, everyone = self.masking.taking_part(healthy), self.masking.taking_part(everyone)
        return Roster({s: rows[s] for s in healthy}, tuple(everyone), busy, self.round, self.masking is not None)

    def called(self, sites: Sequence[str]) -> str:
        """What people call these sites, five at most by name."""
        names = ", ".join(self.preparation.labels.get(site, site) for site in sites[:5])
        return names + (f" and {len(sites) - 5} more" if len(sites) > 5 else "")

    def _take(self, arrays: ArrayRecord) -> None:
        """Go on from public arrays that come from elsewhere; none change nothing.

        Raises:
            ProtocolError: their names or shapes are not those of the method's own.
        """
        if not len(arrays):
            return
        given, own = numpy_arrays(arrays), self.public(self.current)
        if {name: array.shape for name, array in given.items()} != {name: array.shape for name, array in own.items()}:
            shapes = ", ".join(f"`{name}` {array.shape}" for name, array in own.items())
            raise ProtocolError(f"arrays to go on from: expected {shapes}; start from `initial_arrays(grid)`")
        self.current = self.adopt(self.current, {name: np.asarray(given[name], own[name].dtype) for name in own})

    # A round, in Flower's two halves.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the round's first question; ``arrays``, where there are any, replace the public ones."""
        self.enrol(grid)
        if self.begun < server_round:
            self.begun = server_round
            self.begin_round()
        self._take(arrays)
        self.train_config = config
        self.packed, self.apart = None, len(arrays) > 0
        self.complete = None
        self.running = self.one_round(self.current, self.roster())
        self._advance(None)
        if not isinstance(self.question, Each | Total):
            return []
        self.contract = self._contract(self.question)
        return self._messages(self.question, self.contract)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Answer the first question with the replies, ask what else the round asks, and take its state."""
        del server_round
        first = self.question
        if isinstance(first, Each | Total):
            self._advance(self._answer_of(first, self.network.judged(replies, self.contract), self.contract))
        while self.question is not None:
            self._advance(self._ask(self.question))
        assert self.complete is not None
        self.current, figures = self.complete
        self.merged |= bool(figures)
        return array_record(self.public(self.current)), MetricRecord(dict(figures))

    def _advance(self, reply: Any) -> None:
        """Run the algorithm to its next question to a site; failures it declares are counted on the way."""
        assert self.running is not None
        try:
            question = self.running.send(reply)
            while isinstance(question, Refuse):
                self.network.fail(question.site, question.reason)
                question = self.running.send(None)
        except StopIteration as done:
            self.question, self.running, self.complete = None, None, done.value
        else:
            self.question = question

    def ask_through(self, asking: Asking[Any]) -> Any:
        """Run a computation outside of a round, such as the first state or what a site needs to predict."""
        return answered_by(asking, self._ask)

    def _ask_noting_ranges(self, question: Question) -> Any:
        reply = self._ask(question)
        note_ranges(question, reply, self.preparation.columns)
        return reply

    def _ask(self, question: Question) -> Any:
        if isinstance(question, Refuse):
            self.network.fail(question.site, question.reason)
            return None
        if isinstance(question, First):
            return self._first(question)
        contract = self._contract(question)
        messages = self._messages(question, contract)
        replies = self.network.exchange(messages, contract, retries=question.retries)
        if isinstance(contract, Contract) and contract.contradicted and contract.enrolling:
            raise ContradictionError(contract.contradicted)
        return self._answer_of(question, replies, contract)

    def _contract(self, question: Each[Any] | Total[Any]) -> Contract | MaskedContract:
        self.sizes |= question.sizes
        if isinstance(question, Total) and self.masking is not None:
            return self.masking.open(question, list(self._requests(question)), self.sizes)
        return self._plain_contract(question.answer, self._requests(question), isinstance(question, Total))

    def _plain_contract(self, answer: type, requests: Mapping[str, Any], added: bool = False) -> Contract:
        known = {site: own for site in requests if (own := self.preparation.described(site)) is not None}
        rows = self.preparation.rows
        return Contract(answer, self.sizes, rows, requests, known, enrolling=not self.begun, added=added)

    def _requests(self, question: Each[Any] | Total[Any]) -> Mapping[str, Any]:
        if isinstance(question, Each):
            self._require_clear(question.answer)
            return question.requests
        if not is_summand(question.answer):
            raise ProtocolError(f"a total of {question.answer.__name__} was asked for, which is no summand")
        return dict.fromkeys(self.roster().sites if question.sites is None else question.sites, question.request)

    def _messages(self, question: Each[Any] | Total[Any], contract: Contract | MaskedContract) -> list[Message]:
        kind = kind_of(question.answer)
        if isinstance(contract, MaskedContract):
            request, settings = contract.total.request, contract.settings
            return [self._message(site, kind, request, settings) for site in contract.question.sites]
        there = self.network.nodes  # a site of a resumed run may not be back
        return [self._message(site, kind, own) for site, own in self._requests(question).items() if site in there]

    def _message(self, site: str, kind: str, request: Any, masked: Mapping[str, str] | None = None) -> Message:
        given = {"train": self.train_config, "evaluate": self.evaluate_config}
        settings = given.get(kind.partition(".")[0], ConfigRecord())
        if self.packed is None or self.packed[0] is not request:
            arrays, numbers = split(type(request), encode(request))
            record = (array_record if self.apart else packed_record)(arrays)
            self.packed = request, record, {**numbers, **({APART: True} if self.apart else {})}
        _, record, said = self.packed
        return self.network.message(site, kind, record, {**settings, **said, **(masked or {})})  # type: ignore[dict-item]

    def _answer_of(
        self, question: Each[Any] | Total[Any], replies: Iterable[Message], contract: Contract | MaskedContract
    ) -> Any:
        """What an algorithm is sent, from valid replies."""
        if isinstance(contract, MaskedContract):
            return self._total_under_masks(question.retries, replies, contract)
        answers = {self.network.site_of(reply): contract.read(reply) for reply in replies}
        judge: Callable[[Any, Mapping[str, int]], dict[str, str]] | None = getattr(question.answer, "outliers", None)
        odd = {} if judge is None else judge(answers, self.preparation.rows)
        self._without(answers, odd)
        total = add(answers.values()) if answers and isinstance(question, Total) else None
        if total is not None and (unfit := contract.unfit(answers, total)):
            self._without(answers, unfit)
            total = add(answers.values()) if answers else None
        if self.running is not None:
            self.network.took_part |= answers.keys()
        return answers if isinstance(question, Each) else Summed(total, tuple(answers))

    def _without(self, answers: dict[str, Any], odd: Mapping[str, str]) -> None:
        """Leave out answers of sites that failed by them."""
        for site, reason in odd.items():
            self.network.fail(site, reason)
            del answers[site]

    # Totals under masks.

    def _mask(self, wanted: bool) -> None:
        """Set ``privacy.secure-aggregation`` where every site has a trust file, and so answers under masks alone.

        Raises:
            ConfigError: as configured, the method works with more than totals.
        """
        if wanted and not self.config.privacy.secure_aggregation:
            logger.info("every site has a trust file: totals are asked under masks")
            privacy = self.config.privacy.model_copy(update={"secure_aggregation": True})
            self.config = self.config.model_copy(update={"privacy": privacy})
            self.options.check(self.config)
            self.network.introduction = {"configuration": self._settings()}

    def _exchange_keys(self, simulated: bool) -> None:
        """Agree who takes part in totals, where they are masked, and say what the server will see."""
        privacy = self.config.privacy
        if privacy.secure_aggregation:
            self.masking = Masking.enrol(self.network, self._settings(), privacy.min_sites, simulated)
        logger.info("%s", self.what_the_server_sees())

    def what_the_server_sees(self) -> str:
        """One sentence, the first and the last of a run."""
        if self.masking is None:
            return "the server sees what every site adds to a total (`privacy.secure-aggregation` = false)"
        return self.masking.words()

    def _require_clear(self, answer: type) -> None:
        """Refuse to ask single sites for what belongs under masks.

        Raises:
            ConfigError: the algorithm needs more than totals.
        """
        if self.masking is not None and not is_public(answer):
            raise ConfigError(
                f"`privacy.secure-aggregation`: method `{self.config.method}` asks each site for its own"
                f" `{answer.__name__}` and works with more than their sum, so it cannot run under masks; set the key to"
                " false, or choose a method of totals"
            )

    def _total_under_masks(self, retries: int, replies: Iterable[Message], contract: MaskedContract) -> Summed[Any]:
        """The total of the sites that answer: those that stay silent are left out, and the others asked again."""
        assert self.masking is not None
        while True:
            answers = {self.network.site_of(reply): reply for reply in replies}
            usable = self.masking.usual(contract, answers)
            for site in answers.keys() - usable.keys():
                self.network.fail(site, "its arrays are not those that most sites send")
            silent = [site for site in contract.question.sites if site not in usable]
            if not silent:
                if self.running is not None:
                    self.network.took_part |= usable.keys()
                rows = sum(self.preparation.rows[site] for site in usable)
                return self.masking.summed(contract, usable, self.sizes, rows)
            if not usable:
                return Summed(None, ())
            contract = self.masking.without(contract, silent)
            replies = self.network.exchange(self._messages(contract.total, contract), contract, retries=retries)

    def _first(self, question: First[Any]) -> tuple[str, Any]:
        """Send what is new, and wait for the first answer of all that are outstanding."""
        self._require_clear(question.answer)
        self.sizes |= question.sizes
        for site, request in question.requests.items():
            self._push(site, question.answer, request)
        begun = time.monotonic()
        while True:
            self.arrived = self.arrived or self.network.pull(self.outstanding)
            if self.arrived:
                reply = self.arrived.pop(0)
                asked = self.outstanding.pop(reply.metadata.reply_to_message_id, None)
                if asked is None:
                    continue  # it came twice
                if self.network.forgot(reply):
                    self._push(asked.site, question.answer, asked.request)
                    continue
                contract = self._plain_contract(question.answer, {asked.site: asked.request})
                kept = self.network.accept(asked.site, reply, contract, asked.echo)
                self.network.took_part |= set() if kept is None else {asked.site}
                return asked.site, None if kept is None else contract.read(kept)
            lost = self._lost()
            if lost is not None:
                return lost, None
            time.sleep(pause_after(time.monotonic() - begun))

    def _push(self, site: str, answer: type, request: Any) -> None:
        message = self._message(site, kind_of(answer), request)
        deadline = time.monotonic() + self.network.timeout
        own = Outstanding(site, self.network.nodes[site], deadline, request, echo_of(message))
        self.outstanding[self.network.push(message)] = own

    def _lost(self) -> str | None:
        """A site whose answer will not come: its time is up, or it is back under another node."""
        for pushed, asked in list(self.outstanding.items()):
            if time.monotonic() > asked.deadline or self.network.nodes.get(asked.site) != asked.node:
                del self.outstanding[pushed]
                self.arrived = [own for own in self.arrived if own.metadata.reply_to_message_id != pushed]
                self.network.fail(asked.site, f"no reply within {self.network.timeout:g} s, or its node is gone")
                return asked.site
        return None

    # Evaluation and what is kept.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every site, also one left out of training, to score its held-out rows."""
        del server_round
        self.enrol(grid)
        self._take(arrays)
        self.evaluate_config = ConfigRecord({**self.evaluate_config, **config})
        found = self.ask_through(self.predictive(self.current, self.roster()))
        self.predicted = found if isinstance(found, Predicted) else Predicted(found)
        self.predicted_with = self.predicted.request
        if self.masking is not None:
            if isinstance(self.predicted_with, Mapping):
                self._require_clear(type(next(iter(self.predicted_with.values()))))
            self.scoring = self._contract(Total(self.score_sums, self.predicted_with, self.roster().everyone))
            return self._messages(self.scoring.total, self.scoring)
        return [self._message(site, "evaluate", self._predicting(site)) for site in self.network.sites()]

    def _predicting(self, site: str) -> Any:
        return self.predicted_with[site] if isinstance(self.predicted_with, Mapping) else self.predicted_with

    def ask_rows(self, kind: str, specs: Specs | None, sites: Iterable[str]) -> dict[str, Answer]:
        """Answers that are no messages: rows of a simulation, and the scores of baselines."""
        requests = {site: self._predicting(site) if kind == "query.predictions" else Nothing() for site in sites}
        messages = [self._message(site, kind, request) for site, request in requests.items()]
        return answers(self.network.exchange(messages, specs, retries=1))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Figures over all held-out rows, from the sites' sums; None if nobody has any."""
        judged = self.network.judged(replies, self.evaluation_specs())
        if self.masking is None:
            record = super().aggregate_evaluate(server_round, judged)
        else:
            record = self._take_scores(self._answer_of(self.scoring.total, judged, self.scoring))
        if record is not None and hasattr(self, "result"):
            self.result.evaluate_metrics_clientapp[self.round] = record
        return record

    def evaluation_specs(self) -> Expected:
        """Scores are numbers of a site, or a total."""
        return super().evaluation_specs() if self.masking is None else self.scoring

    def _take_scores(self, summed: Summed[ScoreSums]) -> MetricRecord | None:
        """The figures of a total of scores."""
        if summed.total is None:
            return None
        scores = summed.total.scores()
        self.evaluation, self.calibrated = of_all(scores, self.preparation.target_scale), [scores.arrays]
        if self.evaluation is None:
            return None
        return MetricRecord({f"test_{name}": value for name, value in self.evaluation["test"].items()})

    def compared(self, phase: str, sites: list[str]) -> Evaluation | None:
        """The scores of a baseline; under masks those of all sites together."""
        if self.masking is None or phase != "query.local_only":
            return super().compared(phase, sites)
        summed: Summed[ScoreSums] = self._ask(Total(LocalScoreSums, Nothing(), self.roster().everyone))
        return None if summed.total is None else of_all(summed.total.scores(), self.preparation.target_scale)

    def scored(self, answer: type[ScoreSums], request: Any) -> Evaluation | None:
        """The scores of one prediction at all sites, site by site where totals are plain; None if no site has any."""
        everyone, scale = self.roster().everyone, self.preparation.target_scale
        if self.masking is not None:
            summed: Summed[ScoreSums] = self._ask(Total(answer, request, everyone))
            return None if summed.total is None else of_all(summed.total.scores(), scale)
        answers: dict[str, ScoreSums] = self._ask(Each(answer, dict.fromkeys(everyone, request), retries=1))
        flat = {site: own.scores().flat() for site, own in answers.items()}
        return self.combined({site: Answer(site, {}, own, {}) for site, own in flat.items() if own["count"]})

    def simple_baselines(self) -> tuple[Evaluation | None, Evaluation | None]:
        """The scores of the mean of the target, and of linear or logistic regression; see :mod:`strategies.linear`."""
        preparation, likelihood = self.preparation, self.config.model.likelihood
        everyone, inputs = self.roster().everyone, preparation.num_inputs
        rows = sum(preparation.rows.values())
        mean = linear.constant(preparation.modelled_target, rows, inputs, likelihood, preparation.standardisation)
        line = self.ask_through(linear.linear_fit(everyone, likelihood, inputs))
        return self.scored(LinearScoreSums, mean), line and self.scored(LinearScoreSums, line)

    def watching(self) -> bool:
        """Whether this round's figure says anything: not where steps are made small on purpose."""
        return True

    def converged(self, state: S) -> bool | None:
        """Whether training had come to its end by itself; None where the method cannot tell."""
        del state
        return self.course.flat if self.watched else None

    def converged_now(self) -> bool | None:
        """Whether the state at the end is where training ends by itself."""
        return self.converged(self.current)

    def warnings(self) -> list[str]:
        """What a reader of the results should know."""
        return super().warnings() + ([] if self.masking is None else self.masking.warnings())

    def posterior(self) -> Posterior | None:
        """What is saved."""
        return self.predicted.posterior or self.posterior_of(self.current)

    def details(self) -> dict[str, Any]:
        """Facts of the method, those that sites are asked for among them."""
        asked = self.ask_through(self.final(self.current, self.roster()))
        facts = {**self.predicted.details, **self.details_of(self.current)} | self.expected | asked
        if (line := rise(self.course.values)) is not None:
            facts["rise_per_round"] = line.slope
        return facts if self.masking is None else facts | {"privacy": self.masking.facts()}

    def state(self) -> Snapshot:
        """The state as a message is encoded: the same codec serves wire and checkpoint."""
        arrays = {f"{STATE}{name}": array for name, array in encode(self.current).items()}
        facts: dict[str, Any] = {} if self.masking is None else {"privacy": self.masking.facts()}
        return Snapshot(arrays, facts | {"course": asdict(self.course)})
