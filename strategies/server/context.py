"""What every message needs and does not change in a run: the agreed columns and scales, the configuration, constants.

It travels to a site once, as the records ``context`` and ``constants``; later messages name it by a digest. A site that
has lost its memory says so, and is sent it again, which is no failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from fedgp_flower.options import Value
from fedgp_flower.privacy.questions import context_digest
from fedgp_flower.records import array_record, record_of, settings_of
from strategies.server.wire import again

DIGEST, RECORD, LACKS = "context", "context", "lacks-context"
"""Config key with the digest, name of the record, config key of a reply by a site that has it not."""
CONSTANTS = "constants"
"""Name of the record of arrays; left out where there are none."""

Send = Callable[[Sequence[Message]], list[Message | None]]


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
        """Remember of a reply to a message that names the context whether its node keeps it."""
        if lacks(reply):
            self.nodes.discard(reply.metadata.src_node_id)
        elif reply is not None and not reply.has_error():
            self.nodes.add(reply.metadata.src_node_id)


def lacks(reply: Message | None) -> TypeGuard[Message]:
    """Whether a site says that it does not keep the context a message names."""
    if reply is None or reply.has_error():
        return False
    return bool((record_of(reply.content, "config", ConfigRecord) or ConfigRecord()).get(LACKS, False))


def settings_text(flat: Mapping[str, Value], defaults: Mapping[str, Value]) -> str:
    """The keys of a configuration that differ from their defaults, as JSON."""
    return json.dumps({key: value for key, value in flat.items() if defaults.get(key) != value}, sort_keys=True)
