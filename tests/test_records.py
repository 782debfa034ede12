"""Arrays on the wire: the bytes are Flower's, and what Flower refuses is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, RecordDict

from fedgp_flower.records import array_record, flower_array, numpy_array, numpy_arrays, record_of

ARRAYS = [
    np.array(1.5),
    np.zeros((0, 3)),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(4, dtype=np.int64),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.zeros(3, dtype=">f8"),
    np.float32(2) * np.ones((2, 2), dtype=np.float32),
    np.array(["north", "south"]),
    np.frombuffer(b"[]", dtype=np.uint8),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda own: f"{own.dtype}-{own.shape}")
def test_the_bytes_are_those_that_flower_writes_and_reads(array):
    own, flowers = flower_array(array), Array(np.asarray(array, order="C"))
    assert (own.dtype, own.shape, own.stype, own.data) == (flowers.dtype, flowers.shape, flowers.stype, flowers.data)
    back = numpy_array(flowers)
    assert back.dtype == array.dtype
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_named_arrays_come_back_under_their_names():
    arrays = {"a": np.array(1.0), "b.c": np.eye(2)}
    back = numpy_arrays(array_record(arrays))
    assert list(back) == list(arrays)
    np.testing.assert_array_equal(back["b.c"], np.eye(2))


def test_columns_first_is_read_as_flower_reads_it():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(numpy_array(Array(array)), array)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda data: data[:-1], ValueError),
        (lambda data: b"", EOFError),
        (lambda data: data[:20], ValueError),
        (lambda data: data.replace(b"(3,)", b"(-3,)"), ValueError),
        (lambda data: data.replace(b"(3,)", b"(3!)"), ValueError),
    ],
    ids=["short", "empty", "no-header", "negative", "no-shape"],
)
def test_damaged_bytes_are_refused_as_flower_refuses_them(spoil, error):
    whole = Array(np.arange(3.0))
    array = Array(whole.dtype, whole.shape, whole.stype, spoil(whole.data))
    with pytest.raises(error) as flowers:
        array.numpy()
    with pytest.raises(error, match=re.escape(str(flowers.value))):
        numpy_array(array)


def test_a_record_of_another_kind_is_none():
    records = RecordDict({"arrays": ConfigRecord({"a": 1})})
    assert record_of(records, "arrays", type(array_record({}))) is None
    assert record_of(records, "nothing", ConfigRecord) is None
