"""Arrays on the wire, small ones packed."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array

from fedgp_flower.records import PACKED, array_record, numpy_arrays, packed_record

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
    record["a"] = Array(np.zeros(1))
    with pytest.raises(ValueError, match="two arrays have one name"):
        numpy_arrays(record)
    half = array_record({})
    half[layout] = Array("float64", (2,), PACKED, both.data[:-1])
    with pytest.raises(ValueError, match="multiple of element size"):
        numpy_arrays(half)
