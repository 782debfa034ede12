"""Flower's records as numpy arrays and back.

Small neighbours among the arrays of a message travel as one (:func:`packed_record`): Flower moves two objects for each.
Flower's wrappers and mods clip arrays by shape; where they are at work, all travel apart.
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
"""Flower's ``stype`` of an array that holds several of float64."""
SMALL = 2**14
"""Bytes up to which an array travels with those beside it; a larger one gains nothing."""
SCHEMA_VERSION = 2
SHARED, CONSTANTS, LACKS = "context", "constants", "lacks-context"
"""Records of what travels to a site once, the first also the key of its digest, and the key of a reply without it."""
TRUST = "trust-file"
"""Number in the description of a site that has one."""
APART = "apart"
"""Config key of a message whose answer is not packed either."""


def array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named numpy arrays as a Flower record."""
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def packed_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """The same in which neighbours of float64 that are small travel as one array, in the same order."""
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
    """A Flower record, packed or not, as named numpy arrays, which may be written to."""
    found: NamedArrays = {}
    for name, array in record.items():
        part = _unpacked(name, array) if array.stype == PACKED else {name: array.numpy()}
        if not found.keys().isdisjoint(part):
            raise ValueError("two arrays have one name")
        found |= part
    return found


def arrays_of(records: RecordDict, name: str) -> NamedArrays:
    """The arrays of the record of a name; none where there is no such record."""
    record = record_of(records, name, ArrayRecord)
    return {} if record is None else numpy_arrays(record)


def bytes_of(records: RecordDict) -> int:
    """Bytes of everything that a message carries; Flower's count fails where a text or a list is empty."""
    found = 0
    for record in records.values():
        try:
            found += record.count_bytes()
        except (ValueError, IndexError):
            found += len(record.deflate())
    return found


def _layout(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A line ``kept:shape:rest`` for each array: its name is so many letters of the one before, and the rest."""
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
            raise ValueError(f"`{name}` is there twice, or has shape {shape}")
        found[name] = numbers[at : at + prod(shape)].reshape(shape)
        at += prod(shape)
    if at != len(numbers):
        raise ValueError(f"{len(numbers)} numbers for arrays of {at}")
    return found


def record_of(records: RecordDict, name: str, kind: type[R]) -> R | None:
    """The record of a name and kind, or None; Flower's views by kind are built anew at every look."""
    found = records.get(name)
    return found if isinstance(found, kind) else None


def settings_of(message: Message) -> ConfigRecord:
    """The record of a message that says what it is; an empty one where it has none."""
    return record_of(message.content, "config", ConfigRecord) or ConfigRecord()
