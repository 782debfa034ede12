"""What a message holds on the server's side: named arrays with a shape to keep to, numbers, texts, bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from fedgp_flower.records import numpy_arrays, record_of, settings_of
from fedgp_flower.typing import NamedArrays
from strategies.server.evaluation import HISTOGRAMS

SCHEMA_VERSION = 2
Texts = Mapping[str, bool | int | float | str]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array of a reply must look like; ``None`` in a shape stands for any length."""

    shape: tuple[int | None, ...]
    dtype: str = "float64"

    def refusal(self, array: np.ndarray) -> str | None:
        """Why the array does not fit, or None."""
        fits = len(array.shape) == len(self.shape) and all(
            want is None or want == have for want, have in zip(self.shape, array.shape, strict=True)
        )
        if not fits:
            return f"expected shape {self.shape}, found {array.shape}"
        if array.dtype != np.dtype(self.dtype):
            return f"expected {self.dtype}, found {array.dtype}"
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            return f"{int((~np.isfinite(array)).sum())} of {array.size} entries are not finite"
        return None


Specs = Mapping[str, ArraySpec]


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


def arrays_refusal(reply: Message, specs: Specs | None) -> str | None:
    """Why the arrays of a reply cannot be read or do not match what was asked for, or None.

    Without ``specs`` any names, shapes and types will do, as long as all numbers are finite.
    """
    try:
        arrays = numpy_arrays(record_of(reply.content, "arrays", ArrayRecord) or ArrayRecord())
    except Exception as error:  # whatever decoding of foreign bytes raises, it is the sender's fault
        return f"arrays cannot be decoded ({type(error).__name__})"
    if specs is not None and set(arrays) != set(specs):
        missing, extra = sorted(set(specs) - set(arrays)), sorted(set(arrays) - set(specs))
        return f"arrays missing: {missing or 'none'}, unexpected: {extra or 'none'}"
    for name, array in arrays.items():
        spec = ArraySpec((None,) * array.ndim, str(array.dtype)) if specs is None else specs[name]
        reason = spec.refusal(array)
        if reason:
            return f"array `{name}`: {reason}"
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
    lists = sorted(name for name, value in metrics.items() if isinstance(value, list) and name not in HISTOGRAMS)
    return f"lists where single numbers belong: {', '.join(lists)}" if lists else None


def _is_finite(value: float | Sequence[float]) -> bool:
    return all(map(math.isfinite, value)) if isinstance(value, list) else math.isfinite(value)  # type: ignore[arg-type]


def again(message: Message) -> Message:
    """The same message once more, under an id of its own."""
    meta = message.metadata
    return Message(
        message.content, dst_node_id=meta.dst_node_id, message_type=meta.message_type, group_id=meta.group_id
    )


def answers(replies: Iterable[Message]) -> dict[str, Answer]:
    """Valid replies unpacked, by site."""
    return {found.site: found for found in map(answer, replies)}


def answer(reply: Message) -> Answer:
    """The content of a valid reply."""
    content = reply.content
    metrics: dict[str, float | list[float]] = {}
    for name, value in (record_of(content, "metrics", MetricRecord) or MetricRecord()).items():
        metrics[name] = [float(v) for v in value] if isinstance(value, list) else float(value)
    config, arrays = settings_of(reply), record_of(content, "arrays", ArrayRecord)
    texts = {k: v for k, v in config.items() if isinstance(v, str)}
    return Answer(str(config["site"]), numpy_arrays(arrays or ArrayRecord()), metrics, texts)


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
    lines: Iterable[str] = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return ([*lines] or ["no reason given"])[-1][:300]
