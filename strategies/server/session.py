"""One run's sites: who is there, what they agreed on, and the only door to them, :meth:`Session.ask`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message

from fedgp_flower.config import RunConfig, defaults
from fedgp_flower.errors import ConfigError, ProtocolError
from fedgp_flower.messages import add, encode, is_public, is_summand, kind_of, split, stepped_from
from fedgp_flower.options import MethodOptions
from fedgp_flower.outcome import Snapshot
from fedgp_flower.records import APART, array_record, packed_record
from fedgp_flower.transforms import TRANSFORMS
from fedgp_flower.typing import NamedArrays
from strategies.server import enrolment
from strategies.server.contract import Contract, ContradictionError
from strategies.server.course import Course
from strategies.server.enrolment import Enrolment, Preparation
from strategies.server.network import Network, echo_of, pause_after
from strategies.server.questions import Asking, Each, First, Question, Refuse, Roster, S, Summed, Total, answered_by
from strategies.server.shapes import note_ranges
from strategies.server.totals import MEMBERS, TRUST, MaskedContract, Masking
from strategies.server.wire import SharedContext, Texts

logger = logging.getLogger("fedgp")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to several sites as messages, and what their replies must be."""

    question: Each[Any] | Total[Any]
    contract: Contract | MaskedContract
    messages: list[Message]

    def sent_back(self) -> NamedArrays | None:
        """The parameters that sites are sent and send back after local steps; None where they answer otherwise."""
        question = self.question
        if isinstance(self.contract, MaskedContract) or not self.messages:
            return None
        request = question.request if isinstance(question, Total) else next(iter(question.requests.values()))
        return stepped_from(question.answer, request)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A question to one site that nobody waits for yet."""

    site: str
    node: int
    deadline: float
    request: Any
    echo: Texts
    """What its reply must repeat."""


class Session:
    """One run's sites.

    Args:
        network: The Grid and who is behind it.
        config: Of the run.
        options: The class of the method's table.
    """

    def __init__(self, network: Network, config: RunConfig, options: type[MethodOptions]) -> None:
        self.network = network
        self.config = config
        self.options = options
        self.enrolment: Enrolment
        self.preparation: Preparation
        self.masking: Masking | None = None
        self.course = Course()
        self.began = network.round > 0
        """Whether a first round has begun, after which nobody agrees again."""
        self.training = False
        """Whether the answers are those of a round, so that their sites took part."""
        self.apart = False
        """Whether each array travels by itself, since Flower's wrappers, which bring arrays, clip those of replies."""
        self.given: dict[str, ConfigRecord] = {}
        """What a user sends with every message of training or evaluation, by ``train`` and ``evaluate``."""
        self.outstanding: dict[str, Outstanding] = {}
        """By message id."""
        self.packed: tuple[Any, ArrayRecord, Mapping[str, Any]] | None = None
        """The latest request with its arrays and numbers, which the messages to all sites share."""
        self._arrived: list[Message] = []
        network.introduction = {"configuration": self.configuration()}

    # Who is there, and what they agree on.

    def configuration(self) -> str:
        """The keys of the configuration that differ from their defaults, as JSON: what sites are sent of it."""
        known = defaults([self.options])
        changed = {key: value for key, value in self.config.flat().items() if known.get(key) != value}
        return json.dumps(changed, sort_keys=True)

    def meet(self, snapshot: Snapshot | None) -> None:
        """Wait for the sites and hear how they describe their columns; in a resumed run they agreed long ago."""
        if snapshot is not None:
            saved = Preparation.from_snapshot(snapshot)
            met = enrolment.meet_again(self.network, self.config, saved)
            self._mask("privacy" in snapshot.facts, met.simulated)
            self._agreed(met)
            return
        self.enrolment = enrolment.meet(self.network, self.config)
        described = self.enrolment.described.values()
        self._mask(all(answer.number(TRUST) for answer in described), self.enrolment.preparation.simulated)
        if any(answer.number(enrolment.BARE) for answer in described):
            self._agreed(self.enrolment.preparation)
            self.enrolment = self.run(enrolment.from_totals(self.enrolment, self.network))

    def agree(self, adjusted: Callable[[Preparation], Preparation]) -> None:
        """Settle columns, scales and the transformation of the target."""
        preparation = self.enrolment.preparation
        family = TRANSFORMS.get(self.config.transform.target)
        if family is not None:
            self._agreed(preparation)
            preparation = self.run(enrolment.transformed(preparation, family, self.roster().everyone))
        self._agreed(adjusted(preparation))

    def agree_without(self, contradicted: Mapping[str, str]) -> None:
        """Dismiss sites whose first answers contradict their descriptions; the others agree again without them."""
        self.enrolment = enrolment.agree_again(self.network, self.enrolment, contradicted)

    def share(self, constants: NamedArrays) -> None:
        """Send these arrays to every site once, beside columns, scales and configuration."""
        if constants or self.network.context is None:
            texts = {"schema": self.preparation.schema, "configuration": self.configuration()}
            texts |= {} if self.masking is None else {MEMBERS: self.masking.text}
            self.network.context = SharedContext.of(self.preparation.arrays, texts, constants)

    def roster(self) -> Roster:
        """The sites as they are now."""
        rows, busy = self.preparation.rows, tuple(asked.site for asked in self.outstanding.values())
        healthy, everyone = self.network.healthy(), self.network.sites()
        if self.masking is not None:
            healthy, everyone = self.masking.taking_part(healthy), self.masking.taking_part(everyone)
        known = {site: rows[site] for site in healthy}
        return Roster(known, tuple(everyone), busy, self.network.round, self.masking is not None)

    def begin_round(self) -> None:
        """Count a round, greet sites that are new or back, and check that there are enough."""
        self.began = True
        self.network.round += 1
        enrolment.greet(self.network, self.preparation)
        self.network.require(self.config.min_sites)

    def what_the_server_sees(self) -> str:
        """One sentence, the first and the last of a run."""
        if self.masking is None:
            return "the server sees what every site adds to a total (`privacy.secure-aggregation` = false)"
        return self.masking.words()

    def warnings(self) -> list[str]:
        """What a reader of the results should know of the sites and their data."""
        labels = self.preparation.labels
        told = [
            f"{warning} (sites {', '.join(sorted(labels.get(site, site) for site in sites))})"
            for warning, sites in self.network.warned.items()
        ]
        return self.preparation.warnings + told + ([] if self.masking is None else self.masking.warnings())

    def _agreed(self, preparation: Preparation) -> None:
        """Take columns and scales; every later message names them."""
        self.preparation = preparation
        self.network.context = None
        self.share({})

    def _mask(self, wanted: bool, simulated: bool) -> None:
        """Exchange keys where totals are masked: as configured, or because every site has a trust file."""
        if wanted and not self.config.privacy.secure_aggregation:
            logger.info("every site has a trust file: totals are asked under masks")
            privacy = self.config.privacy.model_copy(update={"secure_aggregation": True})
            self.config = self.config.model_copy(update={"privacy": privacy})
            self.config.options.check(self.config)
            self.network.introduction = {"configuration": self.configuration()}
        if self.config.privacy.secure_aggregation:
            least = self.config.privacy.min_sites
            self.masking = Masking.enrol(self.network, self.configuration(), least, simulated)
        logger.info("%s", self.what_the_server_sees())

    # Questions.

    def ask(self, question: Question) -> Any:
        """The answer of the sites to a question of an algorithm."""
        if isinstance(question, Refuse):
            self.network.fail(question.site, question.reason)
            return None
        if isinstance(question, First):
            return self._first(question)
        asked = self.put(question)
        return self.read(asked, self.network.exchange(asked.messages, asked.contract, retries=question.retries))

    def run(self, asking: Asking[S]) -> S:
        """Run a computation outside of a round, such as the first state or what a site needs to predict."""
        return answered_by(asking, self.ask)

    def put(self, question: Each[Any] | Total[Any], masked: MaskedContract | None = None) -> Asked:
        """A question as messages: the first half of :meth:`ask`; ``masked`` is the contract of one that is repeated."""
        kind, total = kind_of(question.answer), isinstance(question, Total)
        if isinstance(question, Each):
            self.require_clear(question.answer)
            requests = question.requests
        elif not is_summand(question.answer):
            raise ProtocolError(f"a total of {question.answer.__name__} was asked for, which is no summand")
        else:
            sites = self.roster().sites if question.sites is None else question.sites
            requests = dict.fromkeys(sites, question.request)
        if isinstance(question, Total) and self.masking is not None:
            masked = masked or self.masking.open(question, list(requests), self._sizes(question))
            asked = masked.question.sites
            return Asked(question, masked, [self.message(s, kind, question.request, masked.settings) for s in asked])
        contract = self._contract(question, requests, added=total)
        there = self.network.nodes  # a site of a resumed run may not be back
        messages = [self.message(site, kind, request) for site, request in requests.items() if site in there]
        return Asked(question, contract, messages)

    def read(self, asked: Asked, replies: Iterable[Message]) -> Any:
        """The answer that an algorithm is sent, from valid replies: the second half of :meth:`ask`."""
        question, contract = asked.question, asked.contract
        reply: Any
        if isinstance(contract, MaskedContract):
            reply = self._masked_total(asked, contract, replies)
        else:
            if contract.contradicted:
                raise ContradictionError(contract.contradicted)
            reply = answers = {self.network.site_of(reply): contract.read(reply) for reply in replies}
            self._leave_out(answers, contract.refused(answers))
            if isinstance(question, Total):
                total = add(answers.values()) if answers else None
                if total is not None and self._leave_out(answers, contract.refused(answers, total)):
                    total = add(answers.values()) if answers else None
                reply = Summed(total, tuple(answers))
            if self.training:
                self.network.took_part |= answers.keys()
        if not self.began:
            note_ranges(question, reply, self.preparation.columns)
        return reply

    def message(self, site: str, kind: str, request: Any, masked: Mapping[str, str] | None = None) -> Message:
        """A request to one site; the sites that are sent the same share its arrays."""
        if self.packed is None or self.packed[0] is not request:
            arrays, numbers = split(type(request), encode(request))
            record = (array_record if self.apart else packed_record)(arrays)
            self.packed = request, record, {**numbers, **({APART: True} if self.apart else {})}
        _, record, numbers_and_form = self.packed
        given = self.given.get(kind.partition(".")[0], ConfigRecord())
        settings: Mapping[str, Any] = {**given, **numbers_and_form, **(masked or {})}
        return self.network.message(site, kind, record, settings)

    def require_clear(self, answer: type) -> None:
        """Refuse to ask single sites for what belongs under masks."""
        if self.masking is not None and not is_public(answer):
            raise ConfigError(
                f"`privacy.secure-aggregation`: method `{self.config.method}` asks each site for `{answer.__name__}`"
                " and works with more than their sum, so it cannot run under masks; set the key to false, or choose a"
                " method of totals"
            )

    def _sizes(self, question: Each[Any] | Total[Any] | First[Any]) -> dict[str, int]:
        """Lengths of the answer's dimensions, as far as they are known."""
        inputs = self.preparation.num_inputs
        return {"D": inputs, "P": 1 + inputs, **question.sizes}

    def _contract(
        self, question: Each[Any] | Total[Any] | First[Any], requests: Mapping[str, Any], added: bool = False
    ) -> Contract:
        described = {site: self.preparation.described(site) for site in requests}
        return Contract(question.answer, self._sizes(question), described, requests, not self.began, added)

    def _leave_out(self, answers: dict[str, Any], refused: Mapping[str, str]) -> bool:
        """Drop answers that are refused, which are failures of their sites; whether there were any."""
        for site, reason in refused.items():
            self.network.fail(site, reason)
            del answers[site]
        return bool(refused)

    def _masked_total(self, asked: Asked, contract: MaskedContract, replies: Iterable[Message]) -> Summed[Any]:
        """The total of the sites that answer: those that stay silent are left out, and the others asked again."""
        assert self.masking is not None
        while True:
            answers = {self.network.site_of(reply): reply for reply in replies}
            usable = self.masking.usual(contract, answers)
            for site in answers.keys() - usable.keys():
                self.network.fail(site, "its arrays are not those that most sites send")
            silent = [site for site in contract.question.sites if site not in usable]
            if not silent:
                if self.training:
                    self.network.took_part |= usable.keys()
                rows = sum(self.preparation.rows[site] for site in usable)
                return self.masking.summed(contract, usable, self._sizes(asked.question), rows)
            if not usable:
                return Summed(None, ())
            contract = self.masking.without(contract, silent)
            messages = self.put(asked.question, contract).messages
            replies = self.network.exchange(messages, contract, retries=asked.question.retries)

    # Questions that nobody waits for.

    def _first(self, question: First[Any]) -> tuple[str, Any]:
        """Send what is new, and wait for the first answer of all that are outstanding."""
        self.require_clear(question.answer)
        for site, request in question.requests.items():
            self._push(site, question.answer, request)
        begun = time.monotonic()
        while True:
            self._arrived = self._arrived or self.network.pull(self.outstanding)
            if self._arrived:
                reply = self._arrived.pop(0)
                asked = self.outstanding.pop(reply.metadata.reply_to_message_id, None)
                if asked is None:
                    continue  # it came twice
                if self.network.forgot(reply):
                    self._push(asked.site, question.answer, asked.request)
                    continue
                contract = self._contract(question, {asked.site: asked.request})
                kept = self.network.accept(asked.site, reply, contract, asked.echo)
                self.network.took_part |= set() if kept is None else {asked.site}
                return asked.site, None if kept is None else contract.read(kept)
            lost = self._lost()
            if lost is not None:
                return lost, None
            time.sleep(pause_after(time.monotonic() - begun))

    def _push(self, site: str, answer: type, request: Any) -> None:
        message = self.message(site, kind_of(answer), request)
        deadline = time.monotonic() + self.network.timeout
        asked = Outstanding(site, self.network.nodes[site], deadline, request, echo_of(message))
        self.outstanding[self.network.push(message)] = asked

    def _lost(self) -> str | None:
        """A site whose answer will not come: its time is up, or it is back under another node."""
        for pushed, asked in list(self.outstanding.items()):
            if time.monotonic() > asked.deadline or self.network.nodes.get(asked.site) != asked.node:
                del self.outstanding[pushed]
                self._arrived = [reply for reply in self._arrived if reply.metadata.reply_to_message_id != pushed]
                self.network.fail(asked.site, f"no reply within {self.network.timeout:g} s, or its node is gone")
                return asked.site
        return None
