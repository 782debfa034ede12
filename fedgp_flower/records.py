"""Convert Flower's records to numpy arrays and back.

Consecutive small arrays of a message are packed into one (:func:`packed_record`), because Flower sends two objects for
each array. Flower's wrappers and mods clip arrays by shape; with them no array is packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, takewhile
from math import prod
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedgp_flower.typing import NamedArrays

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)

PACKED = "fedgp.packed"
"""Flower's ``stype`` of packed arrays."""
SMALL = 2**14
"""Largest array that is packed, in bytes."""
SCHEMA_VERSION = 3
SHARED, CONSTANTS, LACKS = "context", "constants", "lacks-context"
"""Records of data that a site caches, the first also the key of their digest; key of a reply of a site without them."""
TRUST = "trust-file"
"""Key in the description of a site with a trust file."""
APART = "apart"
"""Config key of a message whose answer must not be packed."""


def array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Convert named numpy arrays to a Flower record."""
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def packed_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Convert named arrays to a record in which consecutive small float64 arrays are packed."""
    record = ArrayRecord()
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    for small, group in groupby(whole.items(), lambda entry: entry[1].dtype == np.float64 and entry[1].nbytes <= SMALL):
        part = dict(group)
        if small and len(part) > 1:
            numbers = np.concatenate([array.ravel() for array in part.values()])
            data = numbers.astype("<f8", copy=False).tobytes()
            record[_layout(part)] = Array(dtype="float64", shape=numbers.shape, stype=PACKED, data=data)
        else:
            record.update(array_record(part))
    return record


def numpy_arrays(record: ArrayRecord) -> NamedArrays:
    """Convert a Flower record, packed or not, to named, writable numpy arrays."""
    found: NamedArrays = {}
    for name, array in record.items():
        part = _unpacked(name, array) if array.stype == PACKED else {name: array.numpy()}
        if not found.keys().isdisjoint(part):
            raise ValueError("two arrays have one name")
        found |= part
    return found


def arrays_of(records: RecordDict, name: str) -> NamedArrays:
    """Return the arrays of a named record; none if there is no such record."""
    record = record_of(records, name, ArrayRecord)
    return {} if record is None else numpy_arrays(record)


def bytes_of(records: RecordDict) -> int:
    """Return the bytes of a message; Flower's count fails for empty texts and lists."""
    found = 0
    for record in records.values():
        try:
            found += record.count_bytes()
        except (ValueError, IndexError):
            found += len(record.deflate())
    return found


def _layout(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a line ``kept:shape:rest`` for each array: its name is ``kept`` letters of the last name and ``rest``."""
    lines, before = [], ""
    for name, array in arrays.items():
        kept = len([*takewhile(lambda pair: pair[0] == pair[1], zip(before, name, strict=False))])
        lines.append(f"{kept}:{','.join(map(str, array.shape))}:{name[kept:]}")
        before = name
    return "\n".join(lines)


def _unpacked(layout: str, array: Array) -> NamedArrays:
    numbers = np.frombuffer(array.data, "<f8").astype(np.float64)
    found: NamedArrays = {}
    name, at = "", 0
    for line in layout.split("\n"):
        kept, sizes, rest = line.split(":", 2)
        name, shape = name[: int(kept)] + rest, tuple(int(size) for size in sizes.split(",") if size)
        if name in found or min(shape, default=0) < 0:
            raise ValueError(f"`{name}` occurs twice, or has shape {shape}")
        found[name] = numbers[at : at + prod(shape)].reshape(shape)
        at += prod(shape)
    if at != len(numbers):
        raise ValueError(f"{len(numbers)} numbers for arrays of {at}")
    return found


def record_of(records: RecordDict, name: str, kind: type[R]) -> R | None:
    """Return the record of a name and kind, or None; faster than Flower's views by kind."""
    found = records.get(name)
    return found if isinstance(found, kind) else None


def config_of(message: Message) -> ConfigRecord:
    """Return the configuration record of a message; an empty one if it has none, or for an error."""
    return (None if message.has_error() else record_of(message.content, "config", ConfigRecord)) or ConfigRecord()
