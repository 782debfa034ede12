"""Arrays on the wire: the bytes are Flower's, and what Flower refuses is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from flwr.app import Array

from fedgp_flower.records import PACKED, array_record, flower_array, numpy_array, numpy_arrays, packed_record

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


@pytest.mark.parametrize("array", ARRAYS, ids=lambda entry: f"{entry.dtype}-{entry.shape}")
def test_the_bytes_are_those_that_flower_writes_and_reads(array):
    ours, flowers = flower_array(array), Array(np.asarray(array, order="C"))
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
        flowers.dtype,
        flowers.shape,
        flowers.stype,
        flowers.data,
    )
    back = numpy_array(flowers)
    assert back.dtype == array.dtype
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


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


PARTS = {
    "count": np.array(3),
    "values.theta.log_noise": np.array(-1.5),
    "values.theta.log_scale": np.arange(6.0).reshape(2, 3).T,
    "values.q.mean": np.zeros((0, 3)),
    "large": np.arange(5000.0),
    "noise": np.ones(2),
    "noise:2": np.array([np.nan]),
    "text": np.frombuffer(b"[]", dtype=np.uint8),
    "alone": np.ones(1),
}


def test_small_neighbours_travel_as_one_and_come_back_as_they_were():
    record = packed_record(PARTS)
    assert [array.stype == PACKED for array in record.values()] == [False, True, False, True, False, False]
    assert [len(array.data) for array in record.values() if array.stype == PACKED] == [7 * 8, 3 * 8]
    back = numpy_arrays(record)
    assert list(back) == list(PARTS)
    for name, array in PARTS.items():
        assert (back[name].dtype, back[name].shape, back[name].flags.writeable) == (array.dtype, array.shape, True)
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        ("0:2:a\n0:1:b", 2),
        ("0:2:a\n0:1:b", 4),
        ("0:2:a\n0:1:a", 3),
        ("0:2:a\n1:1:", 3),
        ("0:-1,-3:a", 3),
        ("0:x:a", 3),
        ("a", 3),
        ("", 0),
        ("0:99999999999,99999999999:a", 3),
    ],
)
def test_a_layout_that_is_none_of_the_numbers_is_refused(layout, numbers):
    record = array_record({})
    record[layout] = Array("float64", (numbers,), PACKED, bytes(8 * numbers))
    with pytest.raises(ValueError):  # noqa: PT011  numpy's words or ours
        numpy_arrays(record)


def test_a_name_both_packed_and_apart_and_half_a_number_are_refused():
    record = packed_record({"a": np.ones(1), "b": np.ones(1)})
    [(layout, both)] = record.items()
    record["a"] = flower_array(np.zeros(1))
    with pytest.raises(ValueError, match="two arrays have one name"):
        numpy_arrays(record)
    half = array_record({})
    half[layout] = Array("float64", (2,), PACKED, both.data[:-1])
    with pytest.raises(ValueError, match="multiple of element size"):
        numpy_arrays(half)
