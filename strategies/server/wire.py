"""What a message holds on the server's side: arrays, numbers, texts, and the context that travels to a site once.

The context holds what every message needs and no round changes: the agreed columns and scales, the configuration,
constants. Later messages name it by a digest. A site that has lost its memory says so, and is sent it again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from fedgp_flower.privacy.questions import context_digest
from fedgp_flower.records import array_record, numpy_arrays, record_of, settings_of
from fedgp_flower.shared_messages import HISTOGRAM_SHAPES
from fedgp_flower.typing import NamedArrays

SCHEMA_VERSION = 2
DIGEST, RECORD, LACKS = "context", "context", "lacks-context"
"""Config key with the digest, name of the record, config key of a reply by a site that has it not."""
CONSTANTS = "constants"
"""Name of the record of arrays; left out where there are none."""

Texts = Mapping[str, bool | int | float | str]
Send = Callable[[Sequence[Message]], list[Message | None]]


def natural_order(site: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts site 2 before site 10."""
    parts = (part for part in re.split(r"([0-9]+)", site) if part)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """A valid reply, unpacked."""

    site: str
    arrays: NamedArrays
    metrics: Mapping[str, float | list[float]]
    texts: Mapping[str, str]

    @property
    def num_examples(self) -> int:
        """Rows behind the reply."""
        return int(self.number("num-examples"))

    def number(self, name: str) -> float:
        """The metric ``name``, a single number; 0 if the site did not send it, NaN for a histogram."""
        value = self.metrics.get(name, 0.0)
        return float("nan") if isinstance(value, list) else float(value)


def arrays_refusal(reply: Message) -> str | None:
    """Why the arrays of a reply cannot be used, whatever they are, or None."""
    try:
        arrays = numpy_arrays(record_of(reply.content, "arrays", ArrayRecord) or ArrayRecord())
    except Exception as error:  # whatever decoding of foreign bytes raises, it is the sender's fault
        return f"arrays cannot be decoded ({type(error).__name__})"
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            return f"array `{name}`: {int((~np.isfinite(array)).sum())} of {array.size} entries are not finite"
    return None


def numbers_refusal(reply: Message) -> str | None:
    """Why the metrics of a reply cannot be used, or None."""
    metrics = record_of(reply.content, "metrics", MetricRecord) or MetricRecord()
    rows = metrics.get("num-examples")
    if not isinstance(rows, int) or rows < 0:
        return "the reply does not say its `num-examples`, a count of rows"
    odd = sorted(name for name, value in metrics.items() if not _is_finite(value))
    if odd:
        return f"metrics that are not finite: {', '.join(odd)}"
    lists = sorted(name for name, value in metrics.items() if isinstance(value, list) and name not in HISTOGRAM_SHAPES)
    return f"lists where single numbers belong: {', '.join(lists)}" if lists else None


def _is_finite(value: float | Sequence[float]) -> bool:
    return all(map(math.isfinite, value)) if isinstance(value, list) else math.isfinite(value)  # type: ignore[arg-type]


def again(message: Message) -> Message:
    """The same message once more, under another id."""
    meta = message.metadata
    return Message(
        message.content, dst_node_id=meta.dst_node_id, message_type=meta.message_type, group_id=meta.group_id
    )


def answer(reply: Message) -> Answer:
    """The content of a valid reply."""
    content = reply.content
    metrics: dict[str, float | list[float]] = {}
    for name, value in (record_of(content, "metrics", MetricRecord) or MetricRecord()).items():
        metrics[name] = [float(v) for v in value] if isinstance(value, list) else float(value)
    config, arrays = settings_of(reply), record_of(content, "arrays", ArrayRecord)
    texts = {k: v for k, v in config.items() if isinstance(v, str)}
    return Answer(str(config["site"]), numpy_arrays(arrays or ArrayRecord()), metrics, texts)


def answers(replies: Iterable[Message]) -> dict[str, Answer]:
    """Valid replies unpacked, by site."""
    return {found.site: found for found in map(answer, replies)}


def claimed_site(reply: Message | None) -> str | None:
    """The site id in a reply, also in one that reports an error."""
    if reply is None or reply.has_error():
        return None
    site = (record_of(reply.content, "config", ConfigRecord) or ConfigRecord()).get("site")
    return None if site is None else str(site)


def content_bytes(message: Message) -> int:
    """Bytes of everything a message carries; nothing for an error."""
    if message.has_error():
        return 0
    return sum(record.count_bytes() for record in message.content.values())


def last_line(text: str | None) -> str:
    """The last line of a traceback: the one that says what went wrong."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return (lines or ["no reason given"])[-1][:300]


@dataclass(slots=True)
class SharedContext:
    """The records, their digest, and the nodes that keep them."""

    record: ConfigRecord
    constants: ArrayRecord
    digest: str
    """Under which messages name it."""
    whole: str
    """The hash to which masks are bound."""
    nodes: set[int] = field(default_factory=set)

    @staticmethod
    def of(
        arrays: Mapping[str, np.ndarray], texts: Mapping[str, str], constants: Mapping[str, np.ndarray] | None = None
    ) -> SharedContext:
        """Of arrays of float64, which travel as lists of numbers, texts, and arrays of any kind."""
        content: dict[str, list[float] | str] = {name: np.ravel(array).tolist() for name, array in arrays.items()}
        content |= texts
        digest = context_digest(content, constants or {})
        return SharedContext(ConfigRecord(dict(content)), array_record(constants or {}), digest[:16], digest)

    def attach(self, message: Message) -> None:
        """Name the context in a message, and put it in for a node that does not keep it."""
        settings_of(message)[DIGEST] = self.digest
        if message.metadata.dst_node_id not in self.nodes:
            self._put_in(message)

    def _put_in(self, message: Message) -> None:
        message.content[RECORD] = self.record
        if self.constants:
            message.content[CONSTANTS] = self.constants

    def supplied(
        self, messages: Sequence[Message], replies: Sequence[Message | None], send: Send
    ) -> list[Message | None]:
        """Replies after a second message to the sites that lack the context."""
        lacking = [index for index, reply in enumerate(replies) if lacks(reply)]
        for index in lacking:
            self.nodes.discard(messages[index].metadata.dst_node_id)
            self._put_in(messages[index])
        second = dict(zip(lacking, send([again(messages[index]) for index in lacking]), strict=True))
        found = [second.get(index, reply) for index, reply in enumerate(replies)]
        for reply in found:
            self.note(reply)
        return found

    def note(self, reply: Message | None) -> None:
        """Remember from a reply to a message that names the context whether its node keeps it."""
        if lacks(reply):
            self.nodes.discard(reply.metadata.src_node_id)
        elif reply is not None and not reply.has_error():
            self.nodes.add(reply.metadata.src_node_id)


def lacks(reply: Message | None) -> TypeGuard[Message]:
    """Whether a site says that it does not keep the context a message names."""
    if reply is None or reply.has_error():
        return False
    return bool((record_of(reply.content, "config", ConfigRecord) or ConfigRecord()).get(LACKS, False))
