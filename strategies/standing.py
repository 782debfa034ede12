"""What travels to a site once: arrays and texts that do not change in a run, kept by the site after its first message.

A message names them by a digest. A site that has lost its memory says so, and is sent them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedgp_flower.shapes import NamedArrays
from strategies.wire import Texts, array_record

DIGEST, NAMES, LACKS = "standing", "standing-names", "lacks"
UNKEPT = "evaluate"
"""The category of messages whose answer changes nothing at a site."""


@dataclass(slots=True)
class Standing:
    """Arrays and texts under names that stand for nothing else in any message of the run."""

    arrays: NamedArrays
    settings: Texts
    digest: str
    told: set[int] = field(default_factory=set)
    """Nodes that keep them."""

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], settings: Texts) -> Standing:
        """Of these arrays and texts."""
        own = {name: np.asarray(array, order="C") for name, array in sorted(arrays.items())}
        whole = hashlib.sha256(json.dumps(dict(sorted(settings.items()))).encode())
        for name, array in own.items():
            whole.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
        return Standing(own, dict(settings), whole.hexdigest()[:12])

    def around(self, node: int, arrays: Mapping[str, np.ndarray], settings: Texts) -> tuple[NamedArrays, Texts]:
        """Content of a message: without what stands for a node that was told, else with all of it."""
        own = {name: array for name, array in arrays.items() if name not in self.arrays}
        texts = {name: value for name, value in settings.items() if name not in self.settings}
        named = {**texts, DIGEST: self.digest}
        return (own, named) if node in self.told else self.joined(own, named)

    def joined(self, arrays: Mapping[str, np.ndarray], settings: Texts) -> tuple[NamedArrays, Texts]:
        """Content together with what stands, and which of it that is."""
        names = json.dumps({"arrays": list(self.arrays), "settings": list(self.settings)})
        return {**self.arrays, **arrays}, {**self.settings, **settings, NAMES: names}

    def again(self, message: Message) -> Message:
        """A message once more, with all of it."""
        config = message.content.config_records["config"]
        arrays, settings = self.joined({}, {})
        record = array_record(arrays)
        record.update(message.content.array_records["arrays"])
        meta = message.metadata
        return Message(
            RecordDict({"arrays": record, "config": ConfigRecord({**settings, **config})}),
            dst_node_id=meta.dst_node_id,
            message_type=meta.message_type,
            group_id=meta.group_id,
        )

    def supplied(
        self,
        messages: Sequence[Message],
        replies: Sequence[Message | None],
        send: Callable[[Sequence[Message]], list[Message | None]],
    ) -> list[Message | None]:
        """Replies after a second message to the sites that lack what stands, which is no failure of theirs."""
        lacking = [index for index, reply in enumerate(replies) if lacks(reply)]
        again = dict(zip(lacking, send([self.again(messages[index]) for index in lacking]), strict=True))
        found = [again.get(index, reply) for index, reply in enumerate(replies)]
        for message, reply in zip(messages, found, strict=True):
            self._note(message, reply)
        return found

    def _note(self, message: Message, reply: Message | None) -> None:
        config, meta = message.content.config_records["config"], message.metadata
        if reply is None or reply.has_error() or DIGEST not in config or meta.message_type == UNKEPT:
            return
        (self.told.discard if lacks(reply) else self.told.add)(meta.dst_node_id)


def lacks(reply: Message | None) -> bool:
    """Whether a site says that it has no memory of what was sent to it once."""
    if reply is None or reply.has_error():
        return False
    return bool(reply.content.metric_records.get("metrics", MetricRecord()).get(LACKS, 0.0))
