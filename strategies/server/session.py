"""The sites of a run and their agreement; algorithms ask the sites by :meth:`Session.ask`."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedgp_flower.agreement import Agreement, SiteDescription
from fedgp_flower.config import RunConfig, defaults
from fedgp_flower.errors import ConfigError, FedGPError, ProtocolError
from fedgp_flower.messages import (
    add,
    from_parts,
    is_public,
    is_summand,
    kind_of,
    layout,
    misfit,
    refusal_of,
    shapes_of_terms,
    to_parts,
)
from fedgp_flower.options import SECOND_COLUMN, MethodOptions
from fedgp_flower.outcome import Snapshot
from fedgp_flower.privacy.questions import MEMBERS, length, written_members
from fedgp_flower.records import APART, array_record, arrays_of, bytes_of, packed_record
from fedgp_flower.shared_messages import Described
from fedgp_flower.transforms import TRANSFORMS
from fedgp_flower.typing import NamedArrays
from strategies.server import enrolment
from strategies.server.network import Network, SharedContext, Texts, by_site, claimed_site, echo_of, pause_after
from strategies.server.questions import (
    Asking,
    Doubt,
    Each,
    First,
    Question,
    Refuse,
    Roster,
    S,
    Summed,
    Synchronous,
    Total,
    answered_by,
    requests_of,
)
from strategies.server.shapes import note_ranges
from strategies.server.totals import MaskedContract, Masking

logger = logging.getLogger("fedgp")

SPARE_BYTES = 1 << 16  # allowance for names and shapes of the arrays of a reply
OTHER_ARRAYS = "its arrays are not those that most sites send"
KEPT_BYTES = 1 << 31  # decoded answers to a question that are kept; the others are decoded whenever they are read


class ContradictionError(FedGPError):
    """Sites whose first answers cannot come from the rows they described, with the reason."""

    def __init__(self, sites: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{site}: {reason}" for site, reason in sites.items()))
        self.sites = sites


@dataclass(frozen=True, slots=True)
class Answers(Mapping[str, Any]):
    """The answers of sites, decoded when they are read, so that memory need not hold them all."""

    read: Callable[[Message], Any]
    replies: Mapping[str, Message]

    def __getitem__(self, site: str) -> Any:
        return self.read(self.replies[site])

    def __iter__(self) -> Iterator[str]:
        return iter(self.replies)

    def __len__(self) -> int:
        return len(self.replies)


@dataclass(frozen=True, slots=True)
class Contract:
    """A question with its messages, and the form of an answer: its class, known lengths, each site's number of rows.

    A class may check a single answer (``refusal``) or compare the answers of all sites (``outliers``). Checks that cost
    O(M³) run on the total, and on each site only if the total fails.
    """

    question: Synchronous | First[Any]
    sizes: Mapping[str, int]
    described: Mapping[str, Described]
    requests: Mapping[str, object]
    messages: list[Message]
    enrolling: bool = False
    """Whether a refusal is no failure: before the first round, the other sites agree again without that site."""
    added: bool = False
    """Whether the answers are summands of a total."""
    seen: dict[int, tuple[Message, Any, int]] = field(default_factory=dict)
    """Replies with their answers and the bytes of these, by identity, up to :data:`KEPT_BYTES`."""
    contradicted: dict[str, str] = field(default_factory=dict)
    """Sites whose answers cannot come from the rows they described, with the reason."""

    def refusal(self, reply: Message) -> str | None:
        """Return why a reply cannot be used, or None."""
        site, rows = str(claimed_site(reply)), int(reply.content["metrics"]["num-examples"])  # type: ignore[arg-type]
        described = self.described[site]
        declared = layout(self.question.answer, self.sizes, self.requests[site])
        found = bytes_of(RecordDict({"arrays": reply.content["arrays"]}))
        if declared is not None and found > (most := SPARE_BYTES + 16 * length(declared)):
            lengths = ", ".join(f"{letter} = {length}" for letter, length in self.sizes.items())
            return f"its arrays hold {found} bytes; the requested answer has at most {most} with {lengths}"
        try:
            answer = self.read(reply)
        except ProtocolError as error:
            return str(error)
        reason = described.rows_mismatch("num-examples", rows)
        if reason is None:
            if mismatch := misfit(self.requests[site], answer):
                return mismatch
            reason = refusal_of(answer, replace(described, added=self.added))
        if reason and self.enrolling:
            self.contradicted[site] = reason
        return None if self.enrolling else reason

    def settled(self, replies: Iterable[Message], fail: Callable[[str, str], None]) -> Summed[Any] | Mapping[str, Any]:
        """Return the answers, or their total, without impossible answers, which count as failures."""
        if self.contradicted:
            raise ContradictionError(self.contradicted)
        answers: Mapping[str, Any] = Answers(self.read, by_site(replies))
        answers, described = answers if self.added else dict(answers), self.described
        rows = {site: described[site].rows for site in answers}
        refused = self.of_other_shapes(answers)
        kept = without(answers, refused)
        if (compare := getattr(self.question.answer, "outliers", None)) is not None:
            refused |= (contradicting := compare(kept, {site: rows[site] for site in kept}))
            kept = without(kept, contradicting)
        total = add(kept.values()) if self.added and kept else None
        if total is not None and refusal_of(total, Described(sum(rows[site] for site in kept))):
            found = {site: refusal_of(answer, described[site]) for site, answer in kept.items()}
            refused |= {site: reason for site, reason in found.items() if reason}
            kept = without(kept, refused)
            total = add(kept.values()) if kept else None
        for site, reason in refused.items():
            fail(site, reason)
        return Summed(total, tuple(kept), parts=kept) if self.added else kept

    def of_other_shapes(self, answers: Mapping[str, object]) -> dict[str, str]:
        """Return the sites whose summands cannot be added to those of most sites, where a length was unknown."""
        if not (self.added and answers):
            return {}
        if layout(self.question.answer, self.sizes, next(iter(self.requests.values()))) is not None:
            return {}
        shapes = {site: shapes_of_terms(answer) for site, answer in answers.items()}
        [(usual, _)] = Counter(shapes.values()).most_common(1)
        return {site: OTHER_ARRAYS for site, found in shapes.items() if found != usual}

    def read(self, reply: Message) -> Any:
        """Return the answer in a reply; large answers of many sites are decoded whenever they are read."""
        if id(reply) in self.seen:
            return self.seen[id(reply)][1]
        try:
            numbers, arrays = reply.content["metrics"], arrays_of(reply.content, "arrays")
        except Exception as error:  # any error in decoding foreign bytes is the sender's fault
            raise ProtocolError(f"arrays cannot be decoded ({type(error).__name__})") from error
        answer = from_parts(self.question.answer, arrays, numbers, self.sizes)
        size = sum(getattr(part, "nbytes", 0) for part in vars(answer).values())
        if size + sum(kept for *_, kept in self.seen.values()) <= KEPT_BYTES:
            self.seen[id(reply)] = reply, answer, size
        return answer


def without(answers: Mapping[str, Any], sites: Collection[str]) -> Mapping[str, Any]:
    """Return the answers of the other sites."""
    if isinstance(answers, Answers):
        return Answers(answers.read, without(answers.replies, sites))
    return {site: answer for site, answer in answers.items() if site not in sites}


Asked: TypeAlias = Contract | MaskedContract


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A :class:`First` question to one site that is not answered yet."""

    site: str
    message: Message
    deadline: float
    request: object


class Session:
    """One run's sites."""

    preparation: Agreement

    def __init__(self, network: Network, config: RunConfig, options: type[MethodOptions]) -> None:
        self.network, self.config, self.options = network, config, options
        self.descriptions: Mapping[str, SiteDescription] = {}
        self.masking: Masking | None = None
        self.training_began = network.round > 0
        """Whether the first round has begun; the agreement is then final."""
        self.training = False
        """Whether questions belong to a training round, so that sites that answer took part."""
        self.rounds_in_vain = 0
        """Number of the latest rounds in which every site failed."""
        self.clippable = False
        """Whether arrays are sent unpacked, so that Flower's wrappers can clip them."""
        self.user_settings: dict[str, ConfigRecord] = {}
        """A user's settings for each message of training (``train``) or evaluation (``evaluate``)."""
        self.outstanding: dict[str, Outstanding] = {}
        self.encoded_request: tuple[object, ArrayRecord, Texts] | None = None
        """The latest request with its arrays and settings, which the messages to all sites share."""
        self.doubted: dict[str, str] = {}
        """Sites whose answers contradicted the others', with the reason."""
        self._arrived: list[Message] = []
        network.first_settings = {"configuration": self.configuration()}

    def configuration(self) -> str:
        """Return the configuration that sites receive: the keys that differ from their defaults, as JSON."""
        known = defaults([self.options])
        changed = {key: value for key, value in self.config.flat().items() if known.get(key) != value}
        return json.dumps(changed, sort_keys=True)

    def meet(self, snapshot: Snapshot | None) -> None:
        """Wait for the sites and agree on columns; a resumed run keeps the saved agreement."""
        network = self.network
        if snapshot is not None:
            preparation = enrolment.restored(snapshot)
            enrolment.meet_again(network, self.config, preparation)
            self._set_up_masking("privacy" in snapshot.facts, preparation.simulated)
            self._adopt(preparation)
            return
        self.descriptions = enrolment.meet(network, self.config)
        self.preparation = enrolment.agreed(network, self.config, self.descriptions)
        self._set_up_masking(all(site.trusting for site in self.descriptions.values()), self.preparation.simulated)
        if any(site.bare for site in self.descriptions.values()):
            self._adopt(self.preparation)
            self.preparation = self.run(enrolment.from_totals(network, self.config, self.preparation))

    def begin(self, adjusted: Callable[[Agreement], Agreement], initialise: Callable[[], Asking[S]]) -> S:
        """Fix the scales and return the first state; sites that contradict their descriptions are dismissed."""
        while True:
            preparation, transform = self.preparation, self.config.transform.target
            try:
                self._adopt(preparation)
                if self.config.missing in {"impute", "indicator"}:
                    preparation = self.run(enrolment.related(preparation, self.roster().all_sites))
                if transform in TRANSFORMS:
                    preparation = self.run(enrolment.transformed(preparation, transform, self.roster().all_sites))
                elif SECOND_COLUMN.get(self.config.model.likelihood) == "event":
                    preparation = self.run(enrolment.followed(preparation, self.roster().all_sites))
                elif self.config.model.likelihood == "student-t" and self.config.standardise:
                    preparation = self.run(enrolment.robustly_standardised(preparation, self.roster().all_sites))
                self._adopt(adjusted(preparation))
                return self.run(initialise())
            except ContradictionError as contradiction:
                for site, reason in contradiction.sites.items():
                    self.network.dismiss(site, reason)
                self.network.require(self.config.min_sites)
                logger.warning("standardisation is agreed again without %s", ", ".join(contradiction.sites))
                self.preparation = enrolment.agreed(self.network, self.config, self.descriptions)

    def share(self, constants: NamedArrays) -> None:
        """Send these arrays once to each site, with columns, scales and configuration."""
        texts = {"schema": self.preparation.schema, "configuration": self.configuration()}
        texts |= {} if self.masking is None else {MEMBERS: written_members(list(self.masking.members.values()))}
        self.network.context = SharedContext.of(texts, {**self.preparation.arrays, **constants})

    def _adopt(self, preparation: Agreement) -> None:
        self.preparation = preparation
        self.share({})

    def _set_up_masking(self, trusting: bool, simulated: bool) -> None:
        """Exchange keys if totals are masked: as configured, or because every site has a trust file."""
        privacy = self.config.privacy
        if trusting and not privacy.secure_aggregation:
            logger.info("every site has a trust file: totals use masks")
            privacy = privacy.model_copy(update={"secure_aggregation": True})
            self.config = self.config.model_copy(update={"privacy": privacy})
            self.config.options.check(self.config)
            self.network.first_settings = {"configuration": self.configuration()}
        if privacy.secure_aggregation:
            self.masking = Masking.enrol(self.network, self.configuration(), privacy.min_sites, simulated)
        clear = "the server sees the summand of each site (`privacy.secure-aggregation` = false)"
        logger.info("%s", clear if self.masking is None else self.masking.what_the_server_sees())

    def roster(self) -> Roster:
        """Return the current sites."""
        rows, pending = self.preparation.rows, tuple(asked.site for asked in self.outstanding.values())
        healthy, all_sites = self.network.healthy(), self.network.sites()
        if self.masking is not None:
            healthy, all_sites = self.masking.taking_part(healthy), self.masking.taking_part(all_sites)
        known = {site: rows[site] for site in healthy}
        return Roster(known, tuple(all_sites), pending, self.network.round, self.masking is not None)

    def begin_round(self) -> None:
        """Count a round, admit new and returning sites, and check that there are enough."""
        self.training_began = True
        self.network.end_round()
        self.network.round += 1
        enrolment.admit_new_nodes(self.network, self.preparation)
        self.network.require(self.config.min_sites)

    def warnings(self) -> list[str]:
        """Return warnings on the sites and their data for readers of the results."""
        labels = self.preparation.labels
        found = [
            f"{warning} (from {', '.join(sorted(labels.get(site, site) for site in sites))})"
            for warning, sites in self.network.warned.items()
        ]
        found += [f"site {labels.get(site, site)} contradicts the others: {why}" for site, why in self.doubted.items()]
        if vain := self.rounds_in_vain:
            last = self.network.round - vain
            found += [f"every site failed from round {last + 1} on: the result is that of round {last}"]
        known = self.config.excluded + self.preparation.warnings + self.config.ignored
        return self.network.failed_sites() + known + found + ([] if self.masking is None else self.masking.warnings())

    def ask(self, question: Question) -> Any:
        """Return the answer to a question of an algorithm."""
        match question:
            case Refuse(site, reason):
                return self.network.fail(site, reason)
            case Doubt(reasons):
                return self._doubt(reasons)
            case First():
                return self._first(question)
        asked = self.prepare(question)
        return self.read(asked, self.network.exchange(asked.messages, asked.refusal, retries=question.retries))

    def _doubt(self, reasons: Mapping[str, str]) -> None:
        """Log sites that contradict the others now and did not before; the run's warnings are of the latest comparison.

        Before training, sums of honest sites in distant places may seem to contradict each other.
        """
        for site in (site for site in reasons if site not in self.doubted):
            label = self.preparation.labels.get(site, site)
            logger.warning("round %d: site %s contradicts the others: %s", self.network.round, label, reasons[site])
        self.doubted = dict(reasons)

    def run(self, asking: Asking[S]) -> S:
        """Run a generator outside of a round, such as the one that returns the first state."""
        with self.network.naming_failures():
            return answered_by(asking, self.ask)

    def prepare(self, question: Synchronous) -> Asked:
        """Return the messages of a question: the first half of :meth:`ask`."""
        requests, kind = requests_of(question, self.roster().sites), kind_of(question.answer)
        match question:
            case Each():
                self.require_clear(question.answer)
            case Total() if not is_summand(question.answer):
                raise ProtocolError(f"`Total` of {question.answer.__name__}, which is not a summand")
            case Total() if self.masking is not None:
                masked = self.masking.open(question, list(requests), self.preparation.sizes(question.sizes))
                return self._with_messages(masked)
        online = self.network.nodes  # a site of a resumed run may still be missing
        messages = [self.message(site, kind, request) for site, request in requests.items() if site in online]
        return self._contract(question, requests, messages)

    def _with_messages(self, contract: MaskedContract) -> MaskedContract:
        request, masked, settings = contract.question.request, contract.masked, contract.settings
        messages = [self.message(site, masked.kind, request, settings) for site in masked.sites]
        return replace(contract, messages=messages)

    def read(self, asked: Asked, replies: Iterable[Message]) -> Any:
        """Return the algorithm's answer from valid replies: the second half of :meth:`ask`."""
        if isinstance(asked, MaskedContract):
            reply: Any = self._masked_total(asked, replies)
        else:
            reply = asked.settled(replies, self.network.fail)
        if self.training:
            self.network.took_part.update(reply.sites if isinstance(reply, Summed) else reply)
        if not self.training_began:
            note_ranges(asked.question.answer, reply, self.preparation.columns)
        return reply

    def _masked_total(self, contract: MaskedContract, replies: Iterable[Message]) -> Summed[Any]:
        """Return the total of the sites that answer; if a site is silent, ask the other sites again without it."""
        assert self.masking is not None
        while True:
            answers = by_site(replies)
            usable = self.masking.with_common_layout(contract, answers)
            for site in answers.keys() - usable.keys():
                self.network.fail(site, OTHER_ARRAYS)
            silent = [site for site in contract.masked.sites if site not in usable]
            if not silent:
                rows = sum(self.preparation.rows[site] for site in usable)
                return self.masking.summed(contract, usable, self.preparation.sizes(contract.question.sizes), rows)
            if not usable:
                return Summed(None, ())
            contract = self._with_messages(self.masking.without(contract, silent))
            replies = self.network.exchange(contract.messages, contract.refusal, retries=contract.question.retries)

    def message(self, site: str, kind: str, request: object, masked: Texts | None = None) -> Message:
        """Return a request to one site; messages with the same request share its arrays."""
        if self.encoded_request is None or self.encoded_request[0] is not request:
            arrays, numbers = to_parts(request)
            record = array_record(arrays) if self.clippable else packed_record(arrays)
            self.encoded_request = request, record, {**numbers, APART: True} if self.clippable else {**numbers}
        _, record, settings = self.encoded_request
        user = self.user_settings.get(kind.partition(".")[0], ConfigRecord())
        return self.network.message(site, kind, record, {**user, **settings, **(masked or {})})  # type: ignore[dict-item]

    def require_clear(self, answer: type) -> None:
        """Raise ConfigError if single sites would be asked for an answer that needs masks."""
        if self.masking is not None and not is_public(answer):
            raise ConfigError(
                f"`privacy.secure-aggregation`: method `{self.config.method}` needs `{answer.__name__}` of each site,"
                " not only their sum, so it cannot run under masks; set the key to false, or choose a method that uses"
                " only totals"
            )

    def _contract(
        self, question: Synchronous | First[Any], requests: Mapping[str, object], messages: list[Message]
    ) -> Contract:
        sizes, added = self.preparation.sizes(question.sizes), isinstance(question, Total)
        described = {site: enrolment.described(self.preparation, site) for site in requests}
        return Contract(question, sizes, described, requests, messages, not self.training_began, added)

    def _first(self, question: First[Any]) -> tuple[str, Any]:
        """Send new requests and wait for the first of all outstanding answers."""
        self.require_clear(question.answer)
        network, begun = self.network, time.monotonic()
        unsent = list(question.requests.items())
        while True:
            for site, request in unsent:
                message = self.message(site, kind_of(question.answer), request)
                [pushed] = network.push([message])
                self.outstanding[pushed] = Outstanding(site, message, time.monotonic() + network.timeout, request)
            unsent = []
            self._arrived = self._arrived or network.pull(self.outstanding)
            if self._arrived:
                reply = self._arrived.pop(0)
                answered = self.outstanding.pop(reply.metadata.reply_to_message_id, None)
                if answered is None:
                    continue  # a duplicate
                if network.context.note(reply):
                    unsent = [(answered.site, answered.request)]
                    continue
                contract = self._contract(question, {answered.site: answered.request}, [])
                if not network.accept(answered.site, reply, contract.refusal, echo_of(answered.message)):
                    return answered.site, None
                network.took_part.add(answered.site)
                return answered.site, contract.read(reply)
            lost = self._lost()
            if lost is not None:
                return lost, None
            time.sleep(pause_after(time.monotonic() - begun))

    def _lost(self) -> str | None:
        """Return a site whose answer will not come, because of the timeout or because it moved to another node."""
        for pushed, asked in list(self.outstanding.items()):
            moved = self.network.nodes.get(asked.site) != asked.message.metadata.dst_node_id
            if moved or time.monotonic() > asked.deadline:
                del self.outstanding[pushed]
                self._arrived = [reply for reply in self._arrived if reply.metadata.reply_to_message_id != pushed]
                self.network.fail(asked.site, f"no reply within {self.network.timeout:g} s, or its node is gone")
                return asked.site
        return None
