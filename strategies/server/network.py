"""The sites behind a Flower Grid, by site id: who they are, what travels, and what counts as a failure.

What every message needs and no round changes is a context: the agreed columns and scales, the configuration, constants.
It travels to a site once; later messages name it by a digest. A site that has lost it says so, and is sent it again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedgp_flower.errors import RunError
from fedgp_flower.messages import ECHOED
from fedgp_flower.privacy.questions import context_digest
from fedgp_flower.records import CONSTANTS, LACKS, SCHEMA_VERSION, SHARED, array_record, arrays_of, bytes_of
from fedgp_flower.shared_messages import HISTOGRAM_SHAPES
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

LONGEST_TEXT, LONGEST_SCHEMA, MOST_NAMES, MOST_BYTES = 4096, 1 << 20, 1000, 1 << 30
"""Of a reply: characters of a text, and of the JSON that describes its columns; names in a record beside the arrays;
bytes of all of it. A declared answer has a limit of its kind, see :class:`strategies.server.session.Contract`."""

Number: TypeAlias = int | float | Sequence[int] | Sequence[float]
Texts: TypeAlias = Mapping[str, bool | int | float | str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A valid reply, unpacked."""

    arrays: NamedArrays
    metrics: Mapping[str, Number]
    texts: Mapping[str, str]

    def number(self, name: str) -> int:
        """The count ``name``; 0 if the site did not send it, or sent a histogram."""
        value = self.metrics.get(name, 0)
        return 0 if isinstance(value, Sequence) else int(value)


class Expected:
    """What the content of a reply must be: here arrays of any names and shapes, as long as all numbers are finite."""

    def refusal(self, reply: Message) -> str | None:
        """Why a reply cannot be used, or None."""
        try:
            arrays = arrays_of(reply.content, "arrays")
        except Exception as error:  # whatever decoding of foreign bytes raises, it is the sender's fault
            return f"arrays cannot be decoded ({type(error).__name__})"
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
                return f"array `{name}`: {int((~np.isfinite(array)).sum())} of {array.size} entries are not finite"
        return None


ANYTHING = Expected()


@dataclass(slots=True)
class SharedContext:
    """The records that travel to each node once, and the nodes that keep them."""

    record: ConfigRecord
    constants: ArrayRecord
    whole: str
    """The hash to which masks are bound; messages name its beginning. Empty before anything is agreed on."""
    nodes: set[int] = field(default_factory=set)

    @staticmethod
    def of(
        arrays: Mapping[str, np.ndarray], texts: Mapping[str, str], constants: Mapping[str, np.ndarray] | None = None
    ) -> SharedContext:
        """Of arrays of float64, which travel as lists of numbers, texts, and arrays of any kind."""
        content: dict[str, list[float] | str] = {name: np.ravel(array).tolist() for name, array in arrays.items()}
        content |= texts
        whole = context_digest(content, constants or {})
        return SharedContext(ConfigRecord(dict(content)), array_record(constants or {}), whole)

    def attach(self, message: Message) -> None:
        """Name the context in a message, and put it in for a node that does not keep it."""
        if self.whole:
            _said(message)[SHARED] = self.whole[:16]
            if message.metadata.dst_node_id not in self.nodes:
                message.content[SHARED] = self.record
                if self.constants:
                    message.content[CONSTANTS] = self.constants

    def note(self, reply: Message | None) -> bool:
        """Remember from a reply whether its node keeps the context; whether the node had kept it and does no more."""
        if reply is None or reply.has_error():
            return False
        node = reply.metadata.src_node_id
        had, lacks = node in self.nodes, bool(_said(reply).get(LACKS))
        (self.nodes.discard if lacks else self.nodes.add)(node)
        return had and lacks


@dataclass(slots=True)
class Traffic:
    """Bytes, visits and exchanges so far; an exchange is a question to any number of sites at once."""

    bytes_up: int = 0
    bytes_down: int = 0
    communications: int = 0
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Something a site did wrong in some round."""

    round: int
    site: str
    reason: str


@dataclass(slots=True)
class Network:
    """Messages out, valid answers in; failures and bytes are accounted on the way."""

    grid: Grid
    run: str
    timeout: float
    """Seconds after which a missing reply is a failure."""
    max_failures: int = 3
    nodes: dict[str, int] = field(default_factory=dict)
    """Site → the node it runs on now."""
    heard: set[int] = field(default_factory=set)
    traffic: Traffic = field(default_factory=Traffic)
    failures: list[Failure] = field(default_factory=list)
    repairs: dict[str, int] = field(default_factory=dict)
    """How often sites had to repair ill-conditioned matrices, by kind of repair."""
    streak: dict[str, int] = field(default_factory=dict)
    """Failures of a site since the last round in which it answered and never failed."""
    answered: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    site_seconds: float = 0.0
    trips: list[float] = field(default_factory=list)
    round: int = 0
    context: SharedContext = field(default_factory=lambda: SharedContext(ConfigRecord(), ArrayRecord(), ""))
    accepted: set[str] = field(default_factory=set)
    """Ids of the messages whose replies the latest exchange has judged to be valid."""
    introduction: Texts = field(default_factory=dict)
    asked: dict[str, Texts] = field(default_factory=dict)
    """What the latest message made for each site says of itself; see :data:`fedgp_flower.messages.ECHOED`."""
    took_part: set[str] = field(default_factory=set)
    warned: dict[str, set[str]] = field(default_factory=dict)
    """What the policies of sites warn of, and which."""

    def sites(self) -> list[str]:
        """Every site known, in the one order that results may depend on."""
        return sorted(self.nodes, key=natural_order)

    def healthy(self) -> list[str]:
        """Sites that have not failed ``max_failures`` times without a clean round between."""
        return [site for site in self.sites() if self.streak.get(site, 0) < self.max_failures]

    def forgive(self) -> None:
        """End a round: the failures of a site that answered in it and never failed count no more."""
        for site in self.answered - self.failed:
            self.streak.pop(site, None)
        self.answered, self.failed = set(), set()

    def message(self, site: str, kind: str, arrays: ArrayRecord, settings: Texts) -> Message:
        """A message of a kind for one site."""
        message = self._message(self.nodes[site], kind, arrays, settings)
        self.asked[site] = echo_of(message)
        self.context.attach(message)
        return message

    def _message(self, node: int, kind: str, arrays: ArrayRecord, settings: Texts) -> Message:
        stamps: Texts = {"schema-version": SCHEMA_VERSION, "run": self.run, "round": self.round}
        stamps = {**stamps, "communication": self.traffic.communications}
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({**settings, **stamps})})
        return Message(content, dst_node_id=node, message_type=kind, group_id=str(self.round))

    def exchange(self, messages: Sequence[Message], expected: Expected, *, retries: int = 0) -> list[Message]:
        """Send, wait, and keep what is valid, in site order; what fails is asked again, and failed but once."""
        site_of = {node: site for site, node in self.nodes.items()}
        waiting = {site_of[message.metadata.dst_node_id]: message for message in messages}
        self.traffic.exchanges += bool(waiting)
        kept: dict[str, Message] = {}
        for attempt in range(retries + 1):
            for (site, message), reply in zip(waiting.items(), self._supplied(list(waiting.values())), strict=True):
                reason = self.refusal(reply, expected, site, echo_of(message))
                if reason is None and reply is not None:
                    kept[site] = reply
                    self._note(site, reply)
                elif attempt == 0:
                    self._record(site, reason or "no reply")
            waiting = {site: _again(message) for site, message in waiting.items() if site not in kept}
        for site in waiting:
            self._blame(site)
        self.accepted = {reply.metadata.reply_to_message_id for reply in kept.values()}
        return [kept[site] for site in sorted(kept, key=natural_order)]

    def _supplied(self, messages: Sequence[Message]) -> list[Message | None]:
        """Replies, those after a second message among them, to the sites that lack the context."""
        replies = self.round_trip(messages)
        lacking = [place for place, reply in enumerate(replies) if reply is not None and _said(reply).get(LACKS)]
        for reply in replies:
            self.context.note(reply)
        second = [_again(messages[place]) for place in lacking]
        for message in second:
            self.context.attach(message)
        for place, reply in zip(lacking, self.round_trip(second), strict=True):
            self.context.note(reply)
            replies[place] = reply
        return replies

    def judged(self, replies: Iterable[Message], expected: Expected) -> list[Message]:
        """The valid ones in site order: those of the latest exchange were judged there, all others are judged here."""
        site_of = {node: site for site, node in self.nodes.items()}
        come = {site_of.get(reply.metadata.src_node_id, ""): reply for reply in replies}
        return [
            reply
            for site, reply in sorted(come.items(), key=lambda item: natural_order(item[0]))
            if site and (reply.metadata.reply_to_message_id in self.accepted or self.accept(site, reply, expected))
        ]

    def introduce(self, kind: str) -> dict[str, Answer]:
        """Ask nodes never heard of who they are; a node whose site id is known replaces the node that had it."""
        online = set(self.grid.get_node_ids())
        replies: dict[int, Message | None] = dict.fromkeys(sorted(online - self.heard))
        self.traffic.exchanges += bool(replies)
        for _ in range(2):
            replies |= self._introduced([n for n, reply in replies.items() if reply is None or reply.has_error()], kind)
        found: dict[str, Answer] = {}
        for node, reply in replies.items():
            site = claimed_site(reply)
            reason = self.refusal(reply, ANYTHING)
            if reason is None and site is not None:
                known = self.nodes.get(site)  # Flower lists a node that was killed for some time
                if site in found or (known in online and claimed_site(self._introduced([known], kind)[known]) == site):
                    reason = (
                        f"two machines say that they are site {site!r}; give each a different `site` in --node-config"
                    )
            self.heard.add(node)
            if reason is None and reply is not None and site is not None:
                self.nodes[site] = node
                self.streak.pop(site, None)
                found[site] = _answer(reply)
                self._heed(site, reply)
            else:
                self._record(site or f"node {len(self.heard)}", reason or "no reply")
        return dict(sorted(found.items(), key=lambda item: natural_order(item[0])))

    def _introduced(self, nodes: Sequence[int], kind: str) -> dict[int, Message | None]:
        messages = [self._message(node, kind, ArrayRecord(), self.introduction) for node in nodes]
        return dict(zip(nodes, self.round_trip(messages), strict=True))

    def round_trip(self, messages: Sequence[Message]) -> list[Message | None]:
        """Push all messages and poll until each has its reply or time is up; None where nothing came."""
        if not messages:
            return []
        begun = time.monotonic()
        ids = self.push(messages)
        replies: dict[str, Message] = {}
        while len(replies) < len(ids) and time.monotonic() < begun + self.timeout:
            arrived = self.pull([message_id for message_id in ids if message_id not in replies])
            replies |= {reply.metadata.reply_to_message_id: reply for reply in arrived}
            if not arrived:
                time.sleep(pause_after(time.monotonic() - begun))
        self.trips.append(time.monotonic() - begun)
        return [replies.get(message_id) for message_id in ids]

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages without waiting, and return their ids."""
        self.traffic.bytes_down += sum(map(content_bytes, messages))
        return list(self.grid.push_messages(messages))

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to pushed messages that have arrived by now; one that comes twice, or late, is to none."""
        waiting = list(message_ids)
        arrived = [r for r in self.grid.pull_messages(waiting) if r.metadata.reply_to_message_id in waiting]
        self.traffic.bytes_up += sum(map(content_bytes, arrived))
        return arrived

    def accept(self, site: str, reply: Message, expected: Expected, asked: Texts | None = None) -> bool:
        """Whether the reply to a message, the site's latest unless told, is valid; if not, it is the site's failure."""
        reason = self.refusal(reply, expected, site, asked or self.asked.get(site))
        self.context.note(reply)
        if reason is None:
            self._note(site, reply)
        else:
            self.fail(site, reason)
        return reason is None

    def refusal(
        self, reply: Message | None, expected: Expected, site: str | None = None, asked: Texts | None = None
    ) -> str | None:
        """Why a reply cannot be used, or None if it can; ``site`` and ``asked`` are who was asked what, where known."""
        if reply is None:
            return f"no reply within {self.timeout:g} s"
        if reply.has_error():
            lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
            foreign = any("function registered" in line for line in lines)
            hint = "; its ClientApp is not of this project: make it with `fedgp_flower.make_client_app`" * foreign
            return f"the site's process failed: {(lines or ['no reason given'])[-1][:300]}{hint}"
        if reason := _oversized(reply):
            return reason
        said = _said(reply)
        if "error" in said:
            return str(said["error"])
        wanted: Texts = {"run": self.run} if asked is None else asked
        odd = [name for name in wanted if said.get(name) != wanted[name]]  # an old reply, or one of another run
        return (
            _misfit(reply, said, site)
            or (f"the reply is to another question: its {' and '.join(odd)} are not those asked for" if odd else None)
            or _odd_numbers(reply)
            or expected.refusal(reply)
        )

    def _record(self, site: str, reason: str) -> None:
        reason = "".join(letter if letter.isprintable() else " " for letter in reason[:LONGEST_TEXT])
        self.failures.append(Failure(self.round, site, reason))
        logger.warning("round %d: site %s failed: %s", self.round, site, reason)

    def _blame(self, site: str) -> None:
        self.failed.add(site)
        self.streak[site] = self.streak.get(site, 0) + 1
        if self.streak[site] == self.max_failures:
            logger.warning("site %s failed %d times in a row and is left out of training", site, self.max_failures)

    def fail(self, site: str, reason: str) -> None:
        """Count a failure of a site and say so."""
        self._record(site, reason)
        self._blame(site)

    def dismiss(self, site: str, reason: str) -> None:
        """Leave a site out for good and say why."""
        self.fail(site, reason)
        self.nodes.pop(site, None)

    def require(self, minimum: int) -> None:
        """Raise RunError when fewer than ``minimum`` sites are healthy."""
        if len(self.healthy()) < minimum:
            raise RunError(f"{len(self.healthy())} usable site(s), `min-sites` = {minimum}. {self.latest_failures()}")

    def latest_failures(self) -> str:
        """The end of an error that failures led to."""
        seen = "; ".join(f"{failure.site}: {failure.reason}" for failure in self.failures[-5:])
        return f"Latest failures: {seen}" if seen else "No site failed: more were not there."

    def _note(self, site: str, reply: Message) -> None:
        """Count a valid reply, and the seconds, repairs and warning that it brings."""
        self.traffic.communications += 1
        self.answered.add(site)
        self._heed(site, reply)
        for name, value in _numbers(reply).items():
            kind, _, repaired = name.partition(".")
            if kind == "seconds":
                self.site_seconds += float(np.sum(value))
            elif kind == "repairs":
                self.repairs[repaired] = self.repairs.get(repaired, 0) + int(np.sum(value))

    def _heed(self, site: str, reply: Message) -> None:
        """The warnings of a valid reply, a line each, once for each site."""
        for warning in str(_said(reply).get("warning", "")).splitlines()[:5]:
            if site not in self.warned.setdefault(warning[:300], set()):
                self.warned[warning[:300]].add(site)
                logger.info("site %s: %s", site, warning[:300])  # the run's notes tell people


def natural_order(site: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts site 2 before site 10."""
    parts = (part for part in re.split(r"([0-9]+)", site) if part)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def pause_after(seconds: float) -> float:
    """Seconds until the next look for replies after so many: a reply is late by a twentieth."""
    return min(max(seconds / 20, 0.01), 0.5)


def echo_of(message: Message) -> Texts:
    """What the reply to a message must repeat."""
    config = _said(message)
    return {name: config[name] for name in ECHOED}  # type: ignore[misc]


def content_bytes(message: Message) -> int:
    """Bytes of everything a message carries; nothing for an error."""
    return 0 if message.has_error() else bytes_of(message.content)


def claimed_site(reply: Message | None) -> str | None:
    """The site id in a reply, also in one that reports an error."""
    site = None if reply is None else _said(reply).get("site")
    return None if site is None else str(site)


def answers(replies: Iterable[Message]) -> dict[str, Answer]:
    """Valid replies unpacked, by site."""
    return {str(claimed_site(reply)): _answer(reply) for reply in replies}


def _answer(reply: Message) -> Answer:
    texts = {name: value for name, value in _said(reply).items() if isinstance(value, str)}
    return Answer(arrays_of(reply.content, "arrays"), _numbers(reply), texts)


def _said(reply: Message) -> ConfigRecord:
    """What a message says of itself; nothing where it is an error or has no such record."""
    found = None if reply.has_error() else reply.content.get("config")
    return found if isinstance(found, ConfigRecord) else ConfigRecord()


def _numbers(reply: Message) -> Mapping[str, Number]:
    found = reply.content.get("metrics")
    return found if isinstance(found, MetricRecord) else {}


def _again(message: Message) -> Message:
    meta = message.metadata
    return Message(
        message.content, dst_node_id=meta.dst_node_id, message_type=meta.message_type, group_id=meta.group_id
    )


def _oversized(reply: Message) -> str | None:
    """What of a reply is longer than any site of this app makes it; looked at before anything else of it."""
    if (found := bytes_of(reply.content)) > MOST_BYTES:
        return f"the reply has {found} bytes; at most {MOST_BYTES} are read"
    for name, record in reply.content.items():
        if len(record) > MOST_NAMES and not isinstance(record, ArrayRecord):
            return f"the record `{name[:40]}` has {len(record)} names; at most {MOST_NAMES} are read"
        for key, value in record.items() if isinstance(record, ConfigRecord) else ():
            most = LONGEST_SCHEMA if key == "schema" else LONGEST_TEXT
            if isinstance(value, str | bytes) and len(value) > most:
                return f"the text `{key[:40]}` has {len(value)} characters; at most {most} are read"
    return None


def _misfit(reply: Message, said: ConfigRecord, site: str | None) -> str | None:
    """What of a reply's form is wrong, whatever was asked."""
    if not said.get("site") or "arrays" not in reply.content.array_records:
        return "the reply lacks the records `arrays`, `metrics`, `config`"
    if said.get(LACKS):
        return "it lacks what it was sent once, and was sent again"
    if said.get("schema-version") != SCHEMA_VERSION:
        return f"message schema {said.get('schema-version')!r}, expected {SCHEMA_VERSION}: other version of the app"
    if site is not None and said["site"] != site:
        return f"site {site!r} was asked, and the reply says that it is from another"
    return None


def _odd_numbers(reply: Message) -> str | None:
    """Why the metrics of a reply cannot be used, or None."""
    metrics = _numbers(reply)
    rows = metrics.get("num-examples")
    if not isinstance(rows, int) or rows < 0:
        return "the reply does not say its `num-examples`, a count of rows"
    odd = sorted(name for name, value in metrics.items() if not np.isfinite(value).all())
    if odd:
        return f"metrics that are not finite: {', '.join(odd)}"
    lists = sorted(name for name, value in metrics.items() if np.ndim(value) and name not in HISTOGRAM_SHAPES)
    return f"lists where single numbers belong: {', '.join(lists)}" if lists else None
