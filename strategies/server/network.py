"""The sites of a Flower Grid by site id: their nodes, messages, failures and traffic.

The *context* holds the agreed columns and scales, the configuration and constants. No round changes it. A site receives
the context once; later messages contain only its digest. A site that lost the context reports this and receives it
again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedgp_flower.errors import RunError
from fedgp_flower.messages import ECHOED
from fedgp_flower.privacy.questions import context_digest
from fedgp_flower.records import CONSTANTS, LACKS, SCHEMA_VERSION, SHARED, arrays_of, bytes_of, config_of, packed_record
from fedgp_flower.scores import HISTOGRAM_SHAPES
from fedgp_flower.typing import NamedArrays

logger = logging.getLogger("fedgp")

LONGEST_TEXT, LONGEST_SCHEMA, MOST_NAMES, MOST_BYTES = 4096, 1 << 20, 1000, 1 << 30
"""Limits of a reply: characters of a text and of the JSON of its columns, names in a record other than the arrays, and
bytes in total. A declared answer has its own limit, see :class:`strategies.server.session.Contract`."""
MOST_NAMED = 5
"""Largest number of failed sites in the notes of a run."""

Number: TypeAlias = int | float | Sequence[int] | Sequence[float]
Texts: TypeAlias = Mapping[str, bool | int | float | str]
Check: TypeAlias = Callable[[Message], str | None]
"""Returns why the content of a reply cannot be used, or None."""


def finite_arrays(reply: Message) -> str | None:
    """The check of a reply with arrays of any name and shape: their numbers must be finite."""
    try:
        arrays = arrays_of(reply.content, "arrays")
    except Exception as error:  # any error in decoding foreign bytes is the sender's fault
        return f"arrays cannot be decoded ({type(error).__name__})"
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            return f"array `{name}`: {int((~np.isfinite(array)).sum())} of {array.size} entries are not finite"
    return None


@dataclass(slots=True)
class SharedContext:
    """The records that each node receives once, and the nodes that have them."""

    texts: ConfigRecord
    arrays: ArrayRecord
    digest: str
    """The hash that masks depend on; messages contain its beginning. Empty before the agreement."""
    nodes: set[int] = field(default_factory=set)

    @staticmethod
    def of(texts: Mapping[str, str], arrays: NamedArrays) -> SharedContext:
        """Return the context of these texts and arrays."""
        return SharedContext(ConfigRecord({**texts}), packed_record(arrays), context_digest(texts, arrays))

    def attach(self, message: Message) -> None:
        """Add the context's digest to a message, and the context if the node lacks it."""
        if self.digest:
            config_of(message)[SHARED] = self.digest[:16]
            if message.metadata.dst_node_id not in self.nodes:
                message.content[SHARED], message.content[CONSTANTS] = self.texts, self.arrays

    def note(self, reply: Message | None) -> bool:
        """Update from a reply whether its node has the context; return whether the node has lost it."""
        if reply is None or reply.has_error():
            return False
        node = reply.metadata.src_node_id
        had, lacks = node in self.nodes, bool(config_of(reply).get(LACKS))
        (self.nodes.discard if lacks else self.nodes.add)(node)
        return had and lacks


@dataclass(slots=True)
class Traffic:
    """Bytes, site visits and exchanges so far; an exchange is a question to any number of sites at once."""

    bytes_up: int = 0
    bytes_down: int = 0
    communications: int = 0
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a site in a round, with its reason."""

    round: int
    site: str
    reason: str


@dataclass(slots=True)
class Network:
    """Send messages, return valid replies, and count failures and traffic."""

    grid: Grid
    run: str
    timeout: float
    """Seconds after which a missing reply is a failure."""
    max_failures: int = 3
    nodes: dict[str, int] = field(default_factory=dict)
    """The current node of each site."""
    asked_nodes: set[int] = field(default_factory=set)
    """All nodes that were asked for their site id."""
    traffic: Traffic = field(default_factory=Traffic)
    failures: list[Failure] = field(default_factory=list)
    repairs: dict[str, int] = field(default_factory=dict)
    """Number of repairs of ill-conditioned matrices at sites, by kind."""
    streak: dict[str, int] = field(default_factory=dict)
    """Failures of a site since its last round with answers and without failure."""
    answered: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    site_seconds: float = 0.0
    round_trips: list[float] = field(default_factory=list)
    round: int = 0
    context: SharedContext = field(default_factory=lambda: SharedContext(ConfigRecord(), ArrayRecord(), ""))
    accepted: set[str] = field(default_factory=set)
    """Ids of messages to which the latest exchange received valid replies."""
    first_settings: Texts = field(default_factory=dict)
    asked: dict[str, Texts] = field(default_factory=dict)
    """Fields of the latest message to a site that the reply must repeat, :data:`fedgp_flower.messages.ECHOED`."""
    labels: dict[str, str] = field(default_factory=dict)
    """Names of the sites that described their rows."""
    took_part: set[str] = field(default_factory=set)
    warned: dict[str, set[str]] = field(default_factory=dict)
    """Warnings of sites' policies, with the sites that sent them."""

    def sites(self) -> list[str]:
        """Return all known sites in natural order; results may depend on no other order."""
        return sorted(self.nodes, key=natural_order)

    def healthy(self) -> list[str]:
        """Return the sites with fewer than ``max_failures`` failures since their last clean round."""
        return [site for site in self.sites() if self.streak.get(site, 0) < self.max_failures]

    def end_round(self) -> None:
        """Reset the failures of sites that answered in this round and did not fail."""
        for site in self.answered - self.failed:
            self.streak.pop(site, None)
        self.answered, self.failed = set(), set()

    def message(self, site: str, kind: str, arrays: ArrayRecord, settings: Texts) -> Message:
        """Return a message of a kind to one site, with the context if the site lacks it."""
        message = self._message(self.nodes[site], kind, arrays, settings)
        self.asked[site] = echo_of(message)
        self.context.attach(message)
        return message

    def _message(self, node: int, kind: str, arrays: ArrayRecord, settings: Texts) -> Message:
        stamps: Texts = {"schema-version": SCHEMA_VERSION, "run": self.run, "round": self.round}
        stamps = {**stamps, "communication": self.traffic.communications}
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({**settings, **stamps})})
        return Message(content, dst_node_id=node, message_type=kind, group_id=str(self.round))

    def exchange(self, messages: Sequence[Message], check: Check, *, retries: int = 0) -> list[Message]:
        """Send messages and return the valid replies in site order; retries count as one failure of a site."""
        site_of = {node: site for site, node in self.nodes.items()}
        waiting = {site_of[message.metadata.dst_node_id]: message for message in messages}
        self.traffic.exchanges += bool(waiting)
        kept: dict[str, Message] = {}
        for attempt in range(retries + 1):
            replies = self._replies_with_context(list(waiting.values()))
            for (site, message), reply in zip(waiting.items(), replies, strict=True):
                reason = self.refusal(reply, check, site, echo_of(message))
                if reason is None and reply is not None:
                    kept[site] = reply
                    self._note(site, reply)
                elif attempt == 0:
                    self._record(site, reason or "no reply")
            waiting = {site: _copy(message) for site, message in waiting.items() if site not in kept}
        for site in waiting:
            self._count_failure(site)
        self.accepted = {reply.metadata.reply_to_message_id for reply in kept.values()}
        return [kept[site] for site in sorted(kept, key=natural_order)]

    def _replies_with_context(self, messages: Sequence[Message]) -> list[Message | None]:
        """Return the replies; sites that lack the context receive their message a second time, with it."""
        replies = self.round_trip(messages)
        lacking = [place for place, reply in enumerate(replies) if reply is not None and config_of(reply).get(LACKS)]
        for reply in replies:
            self.context.note(reply)
        second = [_copy(messages[place]) for place in lacking]
        for message in second:
            self.context.attach(message)
        for place, reply in zip(lacking, self.round_trip(second), strict=True):
            self.context.note(reply)
            replies[place] = reply
        return replies

    def valid(self, replies: Iterable[Message], check: Check) -> list[Message]:
        """Return the valid replies in site order; those of the latest exchange are not checked again."""
        site_of = {node: site for site, node in self.nodes.items()}
        found = {site_of.get(reply.metadata.src_node_id, ""): reply for reply in replies}
        return [
            reply
            for site, reply in sorted(found.items(), key=lambda item: natural_order(item[0]))
            if site and (reply.metadata.reply_to_message_id in self.accepted or self.accept(site, reply, check))
        ]

    def ask_new_nodes(self, kind: str) -> dict[str, Message]:
        """Ask new nodes for their site id; return valid replies. A new node replaces the earlier node of its site."""
        online = set(self.grid.get_node_ids())
        replies: dict[int, Message | None] = dict.fromkeys(sorted(online - self.asked_nodes))
        self.traffic.exchanges += bool(replies)
        for _ in range(2):
            replies |= self._ask_nodes([n for n, reply in replies.items() if reply is None or reply.has_error()], kind)
        found: dict[str, Message] = {}
        for node, reply in replies.items():
            site = claimed_site(reply)
            reason = self.refusal(reply, finite_arrays)
            if reason is None and site is not None:
                known = self.nodes.get(site)  # Flower still lists a killed node for some time
                if site in found or (known in online and claimed_site(self._ask_nodes([known], kind)[known]) == site):
                    reason = f"two machines claim to be site {site!r}; give each a different `site` in --node-config"
            self.asked_nodes.add(node)
            if reason is None and reply is not None and site is not None:
                self.nodes[site] = node
                self.streak.pop(site, None)
                found[site] = reply
                self._note_warnings(site, reply)
            else:
                self._record(site or f"node {len(self.asked_nodes)}", reason or "no reply")
        return dict(sorted(found.items(), key=lambda item: natural_order(item[0])))

    def _ask_nodes(self, nodes: Sequence[int], kind: str) -> dict[int, Message | None]:
        messages = [self._message(node, kind, ArrayRecord(), self.first_settings) for node in nodes]
        return dict(zip(nodes, self.round_trip(messages), strict=True))

    def round_trip(self, messages: Sequence[Message]) -> list[Message | None]:
        """Send messages and return their replies; None for each that does not arrive before the timeout."""
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
        self.round_trips.append(time.monotonic() - begun)
        return [replies.get(message_id) for message_id in ids]

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages without waiting and return their ids."""
        self.traffic.bytes_down += sum(map(content_bytes, messages))
        return list(self.grid.push_messages(messages))

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived to these messages; duplicates and late replies are dropped."""
        waiting = list(message_ids)
        arrived = [r for r in self.grid.pull_messages(waiting) if r.metadata.reply_to_message_id in waiting]
        self.traffic.bytes_up += sum(map(content_bytes, arrived))
        return arrived

    def accept(self, site: str, reply: Message, check: Check, asked: Texts | None = None) -> bool:
        """Return whether a reply is valid, by default to the site's latest message; if not, count a failure."""
        reason = self.refusal(reply, check, site, asked or self.asked.get(site))
        self.context.note(reply)
        if reason is None:
            self._note(site, reply)
        else:
            self.fail(site, reason)
        return reason is None

    def refusal(
        self, reply: Message | None, check: Check, site: str | None = None, asked: Texts | None = None
    ) -> str | None:
        """Return why a reply cannot be used, or None; ``asked`` holds the fields that the reply must repeat."""
        if reply is None:
            return f"no reply within {self.timeout:g} s"
        if reply.has_error():
            lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
            foreign = any("function registered" in line for line in lines)
            hint = "; its ClientApp is from another project: create it with `fedgp_flower.make_client_app`" * foreign
            if any("FAB could not be verified" in line for line in lines):
                return "its owner has not approved this version of the app; at the site: fedgp site approve FOLDER"
            return f"the site's process failed: {(lines or ['no reason given'])[-1][:300]}{hint}"
        if reason := _oversized(reply):
            return reason
        config = config_of(reply)
        if "error" in config:
            return str(config["error"])
        repeated: Texts = {"run": self.run} if asked is None else asked
        different = [name for name, value in repeated.items() if config.get(name) != value]
        return (
            _wrong_form(reply, config, site)
            or (f"the reply answers another question: its {' and '.join(different)} differ" if different else None)
            or _wrong_metrics(reply)
            or check(reply)
        )

    def _record(self, site: str, reason: str) -> None:
        reason = "".join(letter if letter.isprintable() else " " for letter in reason[:LONGEST_TEXT])
        self.failures.append(Failure(self.round, site, reason))
        logger.warning("round %d: site %s failed: %s", self.round, self.labels.get(site, site), reason)

    def _count_failure(self, site: str) -> None:
        self.failed.add(site)
        self.streak[site] = self.streak.get(site, 0) + 1
        if self.streak[site] == self.max_failures:
            label = self.labels.get(site, site)
            logger.warning("site %s failed %d times in a row and is left out of training", label, self.max_failures)

    def fail(self, site: str, reason: str) -> None:
        """Count and log a failure of a site."""
        self._record(site, reason)
        self._count_failure(site)

    def dismiss(self, site: str, reason: str) -> None:
        """Exclude a site for the rest of the run."""
        self.fail(site, reason)
        self.nodes.pop(site, None)

    def require(self, minimum: int) -> None:
        """Raise RunError if fewer than ``minimum`` sites are healthy."""
        if len(self.healthy()) < minimum:
            raise RunError(f"{len(self.healthy())} usable site(s), `min-sites` = {minimum}. {self.latest_failures()}")

    def latest_failures(self) -> str:
        """Return the last sentence of an error message: the latest failures, sites with the same reason together."""
        sites: dict[str, list[str]] = {}
        for failure in self.failures[-5:]:
            sites.setdefault(failure.reason, []).append(failure.site)
        latest = "; ".join(f"{', '.join(dict.fromkeys(each))}: {reason}" for reason, each in sites.items())
        return (
            f"Latest failures: {latest}"
            if latest
            else "No site failed; no other site was connected: connect more, or lower `min-sites`."
        )

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Add the latest failures, if any, to a RunError of the algorithm."""
        try:
            yield
        except RunError as error:
            if not self.failures or self.latest_failures() in str(error):
                raise
            raise RunError(f"{error}. {self.latest_failures()}") from error

    def failed_sites(self) -> list[str]:
        """Return a sentence on each site that failed, with its latest reason; only the first few if there are many."""
        reasons = {failure.site: failure.reason[:300] for failure in self.failures}
        found = [
            f"site {self.labels.get(site, site)} {'failed' if site in self.took_part else 'took no part'}: {reason}"
            for site, reason in reasons.items()
        ]
        more = [f"{len(found) - MOST_NAMED} more sites failed; metrics.json has the reasons"]
        return found[:MOST_NAMED] + more * (len(found) > MOST_NAMED)

    def _note(self, site: str, reply: Message) -> None:
        """Count a valid reply and its seconds, repairs and warnings."""
        self.traffic.communications += 1
        self.answered.add(site)
        self._note_warnings(site, reply)
        for name, value in numbers_of(reply).items():
            kind, _, repaired = name.partition(".")
            if kind == "seconds":
                self.site_seconds += float(np.sum(value))
            elif kind == "repairs":
                self.repairs[repaired] = self.repairs.get(repaired, 0) + int(np.sum(value))

    def _note_warnings(self, site: str, reply: Message) -> None:
        """Keep the warnings of a valid reply, one a line, once for each site."""
        for warning in str(config_of(reply).get("warning", "")).splitlines()[:5]:
            if site not in self.warned.setdefault(warning[:300], set()):
                self.warned[warning[:300]].add(site)
                label = config_of(reply).get("label") or self.labels.get(site, site)
                logger.info("site %s: %s", label, warning[:300])  # the run's notes repeat it


def natural_order(site: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts site 2 before site 10."""
    parts = (part for part in re.split(r"([0-9]+)", site) if part)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def pause_after(seconds: float) -> float:
    """Return the pause before the next poll for replies, a twentieth of the seconds waited so far."""
    return min(max(seconds / 20, 0.01), 0.5)


def echo_of(message: Message) -> Texts:
    """Return the fields that the reply to a message must repeat."""
    config = config_of(message)
    return {name: config[name] for name in ECHOED}  # type: ignore[misc]


def content_bytes(message: Message) -> int:
    """Return the bytes of a message's content; 0 for an error."""
    return 0 if message.has_error() else bytes_of(message.content)


def claimed_site(reply: Message | None) -> str | None:
    """Return the site id in a reply, including a reply that reports an error."""
    site = None if reply is None else config_of(reply).get("site")
    return None if site is None else str(site)


def by_site(replies: Iterable[Message]) -> dict[str, Message]:
    """Return valid replies by site."""
    return {str(claimed_site(reply)): reply for reply in replies}


def texts_of(reply: Message) -> dict[str, str]:
    """Return the texts of a reply."""
    return {name: value for name, value in config_of(reply).items() if isinstance(value, str)}


def count_of(reply: Message, name: str) -> int:
    """Return the count ``name``; 0 if the site did not send it or sent a histogram."""
    value = numbers_of(reply).get(name, 0)
    return 0 if isinstance(value, Sequence) else int(value)


def numbers_of(reply: Message) -> Mapping[str, Number]:
    """Return the numbers and histograms of a reply."""
    found = reply.content.get("metrics")
    return found if isinstance(found, MetricRecord) else {}


def _copy(message: Message) -> Message:
    meta = message.metadata
    return Message(
        message.content, dst_node_id=meta.dst_node_id, message_type=meta.message_type, group_id=meta.group_id
    )


def _oversized(reply: Message) -> str | None:
    """Return which part of a reply exceeds the limits of this app, or None; this check comes first."""
    if (found := bytes_of(reply.content)) > MOST_BYTES:
        return f"the reply has {found} bytes; the limit is {MOST_BYTES}"
    for name, record in reply.content.items():
        if len(record) > MOST_NAMES and not isinstance(record, ArrayRecord):
            return f"the record `{name[:40]}` has {len(record)} names; the limit is {MOST_NAMES}"
        for key, value in record.items() if isinstance(record, ConfigRecord) else ():
            most = LONGEST_SCHEMA if key == "schema" else LONGEST_TEXT
            if isinstance(value, str | bytes) and len(value) > most:
                return f"the text `{key[:40]}` has {len(value)} characters; the limit is {most}"
    return None


def _wrong_form(reply: Message, config: ConfigRecord, site: str | None) -> str | None:
    """Return what is wrong with the form of a reply to any question, or None."""
    if not config.get("site") or "arrays" not in reply.content.array_records:
        return "the reply lacks the records `arrays`, `metrics`, `config`"
    if config.get(LACKS):
        return "the site lacks the context although it was sent again"
    if config.get("schema-version") != SCHEMA_VERSION:
        return f"message schema {config.get('schema-version')!r}, expected {SCHEMA_VERSION}: another version of the app"
    if site is not None and config["site"] != site:
        return f"site {site!r} was asked, but the reply claims to be from another site"
    return None


def _wrong_metrics(reply: Message) -> str | None:
    """Return why the metrics of a reply cannot be used, or None."""
    metrics = numbers_of(reply)
    rows = metrics.get("num-examples")
    if not isinstance(rows, int) or rows < 0:
        return "the reply lacks `num-examples`, a count of rows"
    infinite = sorted(name for name, value in metrics.items() if not np.isfinite(value).all())
    if infinite:
        return f"these metrics are not finite: {', '.join(infinite)}"
    lists = sorted(name for name, value in metrics.items() if np.ndim(value) and name not in HISTOGRAM_SHAPES)
    return f"these metrics are lists instead of single numbers: {', '.join(lists)}" if lists else None
