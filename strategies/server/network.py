"""The sites behind a Flower Grid: who they are, what travels, and what counts as a failure.

Flower's node ids are random; everything here is keyed by the stable site id that a site gives in its first reply. A
reply with wrong names, shapes, types or non-finite numbers is that site's failure, never a part of the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedgp_flower.errors import RunError
from fedgp_flower.messages import ECHOED
from fedgp_flower.records import record_of, settings_of
from strategies.server.wire import (
    SCHEMA_VERSION,
    Answer,
    SharedContext,
    Texts,
    again,
    answer,
    answers,
    arrays_refusal,
    claimed_site,
    content_bytes,
    lacks,
    last_line,
    natural_order,
    numbers_refusal,
)

logger = logging.getLogger("fedgp")


class Judge(Protocol):
    """What an answer must be, where more than shapes is asked of it."""

    def refusal(self, reply: Message) -> str | None:
        """Why a reply cannot be used, or None."""


Expected: TypeAlias = Judge | None
"""None: arrays of any names and shapes, as long as all numbers are finite."""


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
    max_failures: int = 3
    nodes: dict[str, int] = field(default_factory=dict)
    """Site id → node id, of the sites that have introduced themselves."""
    heard: set[int] = field(default_factory=set)
    traffic: Traffic = field(default_factory=Traffic)
    failures: list[Failure] = field(default_factory=list)
    repairs: dict[str, int] = field(default_factory=dict)
    streak: dict[str, int] = field(default_factory=dict)
    """Failed exchanges of a site since its last valid reply."""
    forgiven: dict[str, int] = field(default_factory=dict)
    """The streak that a site's latest valid reply ended; it goes on if the caller refuses that reply."""
    site_seconds: float = 0.0
    """Seconds the sites say they computed, summed."""
    trips: list[float] = field(default_factory=list)
    """Seconds from pushing messages to having their replies, trip by trip."""
    round: int = 0
    context: SharedContext | None = None
    """What every message needs; messages to known sites name it instead of carrying it, once a site has it."""
    accepted: set[str] = field(default_factory=set)
    """Ids of the messages whose replies the latest exchange has judged to be valid."""
    introduction: Texts = field(default_factory=dict)
    """What nodes that are not known yet are told."""
    asked: dict[str, Texts] = field(default_factory=dict)
    """What the latest message made for each site says of itself; see :data:`fedgp_flower.messages.ECHOED`."""
    took_part: set[str] = field(default_factory=set)
    """Sites of whose answers a round made use."""
    warned: dict[str, set[str]] = field(default_factory=dict)
    """What the policies of sites warn of, and which."""

    def sites(self) -> list[str]:
        """Every site known, in the one order that results may depend on."""
        return sorted(self.nodes, key=natural_order)

    def healthy(self) -> list[str]:
        """Sites that have not failed ``max_failures`` times in a row."""
        return [site for site in self.sites() if self.streak.get(site, 0) < self.max_failures]

    def message(self, site: str, kind: str, arrays: ArrayRecord, settings: Texts) -> Message:
        """A message of a kind for one site."""
        message = self._message(self.nodes[site], kind, arrays, settings)
        self.asked[site] = echo_of(message)
        if self.context is not None:
            self.context.attach(message)
        return message

    def _message(self, node: int, kind: str, arrays: ArrayRecord, settings: Texts) -> Message:
        config: dict[str, Any] = {
            **settings,
            "schema-version": SCHEMA_VERSION,
            "run": self.run,
            "round": self.round,
            "communication": self.traffic.communications,
        }
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
        return Message(content, dst_node_id=node, message_type=kind, group_id=str(self.round))

    def exchange(self, messages: Sequence[Message], expected: Expected, *, retries: int = 0) -> list[Message]:
        """Send, wait, and keep what is valid, in site order; everything else becomes a failure of its site.

        A site fails at most once in an exchange, however often it is asked.

        Args:
            messages: At most one for a site.
            expected: What a reply must be.
            retries: How often a message that failed is sent again at once.
        """
        site_of = {node: site for site, node in self.nodes.items()}
        waiting = {site_of[message.metadata.dst_node_id]: message for message in messages}
        self.traffic.exchanges += bool(waiting)
        for site in waiting:
            self.forgiven.pop(site, None)
        kept: dict[str, Message] = {}
        for attempt in range(retries + 1):
            sent = list(waiting.values())
            replies = self.round_trip(sent)
            if self.context is not None:
                replies = self.context.supplied(sent, replies, self.round_trip)
            for site, reply in zip(waiting, replies, strict=True):
                reason = self.refusal(reply, expected, site, echo_of(waiting[site]))
                if reason is None and reply is not None:
                    kept[site] = reply
                    self._note(site, reply)
                elif attempt == 0:
                    self.fail(site, reason or "no reply")
            waiting = {s: again(m) for s, m in waiting.items() if s not in kept}
        self.traffic.communications += len(kept)
        self.accepted = {reply.metadata.reply_to_message_id for reply in kept.values()}
        return _in_order(kept)

    def judged(self, replies: Iterable[Message], expected: Expected) -> list[Message]:
        """The valid ones in site order: those of the latest exchange were judged there, all others are judged here."""
        sites = {node: site for site, node in self.nodes.items()}
        kept: dict[str, Message] = {}
        for reply in replies:
            site = sites.get(reply.metadata.src_node_id)
            known = reply.metadata.reply_to_message_id in self.accepted
            if site is not None and (known or self.accept(site, reply, expected) is not None):
                kept[site] = reply
        return _in_order(kept)

    def site_of(self, message: Message) -> str:
        """The site that sent a reply."""
        return str(settings_of(message)["site"])

    def ask(self, kind: str, settings: Texts, *, retries: int = 0) -> dict[str, Answer]:
        """Ask every site something without arrays, and return the valid answers by site."""
        messages = [self.message(site, kind, ArrayRecord(), settings) for site in self.sites()]
        return answers(self.exchange(messages, None, retries=retries))

    def introduce(self, kind: str) -> dict[str, Answer]:
        """Ask nodes never heard of who they are; a node whose site id is known replaces the node that had it.

        What goes wrong is noted, but not held against a site of the same name that already takes part.
        """
        online = set(self.grid.get_node_ids())
        found: dict[str, Answer] = {}
        for node, reply in self._first_replies(sorted(online - self.heard), kind).items():
            site = claimed_site(reply)
            reason = self.refusal(reply, None)
            if reason is None and site is not None and (site in found or self._taken(site, online, kind)):
                reason = f"two machines say that they are site {site!r}; give each a different `site` in --node-config"
            self.heard.add(node)
            if reason is None and reply is not None and site is not None:
                self.nodes[site] = node
                self.streak.pop(site, None)
                found[site] = answer(reply)
                self._heed(site, reply)
            else:
                self._record(site or f"node {len(self.heard)}", reason or "no reply")
        return dict(sorted(found.items(), key=lambda item: natural_order(item[0])))

    def _first_replies(self, nodes: Sequence[int], kind: str) -> dict[int, Message | None]:
        """Replies of nodes never heard of; one that gets lost is asked for again."""
        replies: dict[int, Message | None] = dict.fromkeys(nodes)
        self.traffic.exchanges += bool(replies)
        for _ in range(2):
            waiting = [node for node, reply in replies.items() if reply is None or reply.has_error()]
            messages = [self._message(node, kind, ArrayRecord(), self.introduction) for node in waiting]
            replies |= dict(zip(waiting, self.round_trip(messages), strict=True))
        return replies

    def _taken(self, site: str, online: set[int], kind: str) -> bool:
        """Whether the node that has a site id still answers: Flower lists one that was killed for some time."""
        node = self.nodes.get(site)
        if node is None or node not in online:
            return False
        [reply] = self.round_trip([self._message(node, kind, ArrayRecord(), self.introduction)])
        return claimed_site(reply) == site

    def round_trip(self, messages: Sequence[Message]) -> list[Message | None]:
        """Push all messages and poll until each has its reply or time is up; None where nothing came."""
        if not messages:
            return []
        self.traffic.bytes_down += sum(content_bytes(message) for message in messages)
        begun = time.monotonic()
        ids = list(self.grid.push_messages(messages))
        replies: dict[str, Message] = {}
        deadline = begun + self.timeout
        while len(replies) < len(ids) and time.monotonic() < deadline:
            waiting = [i for i in ids if i not in replies]
            arrived = [reply for reply in self.grid.pull_messages(waiting) if _answers(reply, waiting)]
            replies |= {reply.metadata.reply_to_message_id: reply for reply in arrived}
            if not arrived:
                time.sleep(pause_after(time.monotonic() - begun))
        self.trips.append(time.monotonic() - begun)
        self.traffic.bytes_up += sum(content_bytes(reply) for reply in replies.values())
        return [replies.get(i) for i in ids]

    def push(self, message: Message) -> str:
        """Send a message without waiting and return its id, for :meth:`pull`."""
        self.traffic.bytes_down += content_bytes(message)
        [message_id] = self.grid.push_messages([message])
        return message_id

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to pushed messages that have arrived by now."""
        waiting = list(message_ids)
        arrived = [reply for reply in self.grid.pull_messages(waiting) if _answers(reply, waiting)]
        self.traffic.bytes_up += sum(content_bytes(reply) for reply in arrived)
        return arrived

    def accept(self, site: str, reply: Message, expected: Expected, asked: Texts | None = None) -> Message | None:
        """The reply to a message, the site's latest unless told, if it is valid; else None and the site's failure."""
        self.forgiven.pop(site, None)
        reason = self.refusal(reply, expected, site, asked or self.asked.get(site))
        if self.context is not None:
            self.context.note(reply)
        if reason is not None:
            self.fail(site, reason)
            return None
        self._note(site, reply)
        self.traffic.communications += 1
        return reply

    def forgot(self, reply: Message) -> bool:
        """Whether a site lost the shared context that it had; the next message to it carries it again."""
        had = self.context is not None and reply.metadata.src_node_id in self.context.nodes
        if self.context is not None:
            self.context.note(reply)
        return had and lacks(reply)

    def refusal(
        self, reply: Message | None, expected: Expected, site: str | None = None, asked: Texts | None = None
    ) -> str | None:
        """Why a reply cannot be used, or None if it can; ``site`` and ``asked`` are who was asked what, where known."""
        if reply is None:
            return f"no reply within {self.timeout:g} s"
        if reply.has_error():
            return f"the site's process failed: {last_line(reply.error.reason)}"
        config = record_of(reply.content, "config", ConfigRecord) or ConfigRecord()
        if "error" in config:
            return str(config["error"])
        wanted: Texts = {"run": self.run} if asked is None else asked
        odd = [name for name in wanted if config.get(name) != wanted[name]]  # an old reply, or one of another run
        reason = _content_refusal(reply, config, site)
        reason = reason or (
            f"the reply is to another question: its {' and '.join(odd)} are not those asked for" if odd else None
        )
        if reason := reason or numbers_refusal(reply):
            return reason
        return arrays_refusal(reply) if expected is None else expected.refusal(reply)

    def _record(self, site: str, reason: str) -> None:
        self.failures.append(Failure(self.round, site, reason))
        logger.warning("round %d: site %s failed: %s", self.round, site, reason)

    def fail(self, site: str, reason: str) -> None:
        """Count a failure of a site and say so; a valid reply that the caller refuses does not end its streak."""
        self._record(site, reason)
        self.streak[site] = self.streak.get(site, 0) + self.forgiven.pop(site, 0) + 1
        if self.streak[site] == self.max_failures:
            logger.warning("site %s failed %d times in a row and is left out of training", site, self.max_failures)

    def require(self, minimum: int) -> None:
        """Raise RunError when fewer than ``minimum`` sites are healthy."""
        if len(self.healthy()) < minimum:
            raise RunError(f"{len(self.healthy())} usable site(s), `min-sites` = {minimum}. {self.latest_failures()}")

    def latest_failures(self) -> str:
        """The end of an error that failures led to."""
        seen = "; ".join(f"{failure.site}: {failure.reason}" for failure in self.failures[-5:])
        return f"Latest failures: {seen or 'none'}"

    def _note(self, site: str, reply: Message) -> None:
        """What a valid reply says besides its answer: seconds and repairs, single numbers and finite; a warning."""
        self.forgiven[site] = self.streak.pop(site, 0)
        self._heed(site, reply)
        for name, value in reply.content["metrics"].items():
            if name == "seconds":
                self.site_seconds += float(value)  # type: ignore[arg-type]
            elif name.startswith("repairs."):
                key = name.removeprefix("repairs.")
                self.repairs[key] = self.repairs.get(key, 0) + int(value)  # type: ignore[arg-type]

    def _heed(self, site: str, reply: Message) -> None:
        """The warning of a valid reply, once for each site."""
        warning = str(settings_of(reply).get("warning", ""))[:300]
        if warning and site not in self.warned.setdefault(warning, set()):
            self.warned[warning].add(site)
            logger.warning("site %s: %s", site, warning)


def pause_after(seconds: float) -> float:
    """Seconds until the next look for replies that have not come for so long: a reply is late by a twentieth."""
    return min(max(seconds / 20, 0.01), 0.5)


def echo_of(message: Message) -> Texts:
    """What the reply to a message must repeat."""
    config = settings_of(message)
    return {name: config[name] for name in ECHOED}  # type: ignore[misc]


def _in_order(kept: Mapping[str, Message]) -> list[Message]:
    return [kept[site] for site in sorted(kept, key=natural_order)]


def _answers(reply: Message, ids: Sequence[str]) -> bool:
    """Whether a reply is to one of these messages: one that comes twice, or late, is to none that is waited for."""
    return reply.metadata.reply_to_message_id in ids


def _content_refusal(reply: Message, config: ConfigRecord, site: str | None) -> str | None:
    if not config.get("site") or record_of(reply.content, "arrays", ArrayRecord) is None:
        return "the reply lacks the records `arrays`, `metrics`, `config`"
    if lacks(reply):
        return "it lacks what it was sent once, and was sent again"
    if config.get("schema-version") != SCHEMA_VERSION:
        return f"message schema {config.get('schema-version')!r}, expected {SCHEMA_VERSION}: other version of the app"
    if site is not None and config["site"] != site:
        return f"site {site!r} was asked, and the reply says that it is from another"
    return None
