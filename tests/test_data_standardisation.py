import json

import numpy as np
import pandas as pd
import pytest

from fedgp_flower.data.standardisation import (
    Preparation,
    count_unknown_levels,
    describe,
    encode_inputs,
    encode_targets,
    read_inputs,
)
from fedgp_flower.errors import DataError, ProtocolError

SCHEMA = json.dumps(
    {
        "features": [
            {"name": "two", "kind": "categorical", "levels": ["no", "yes"]},
            {"name": "x", "kind": "numeric"},
            {"name": "three", "kind": "categorical", "levels": ["a", "b", "c"]},
        ],
        "target": {"name": "y", "kind": "numeric"},
    }
)
ARRAYS = {
    "input.mean": np.array([0.5, 2.0, 0.2, 0.3, 0.5]),
    "input.scale": np.array([0.5, 4.0, 1.0, 1.0, 1.0]),
    "target.mean": np.array(10.0),
    "target.scale": np.array(5.0),
}


def frame(**columns) -> pd.DataFrame:
    base = {"x": [6.0, 2.0], "three": ["b", "c"], "two": ["yes", "no"], "y": [10.0, 0.0]}
    return pd.DataFrame({**base, **columns})


def test_rows_are_encoded_in_schema_order():
    preparation = Preparation.from_wire(ARRAYS, SCHEMA)
    assert preparation.names == ("two=yes", "x", "three=a", "three=b", "three=c")
    assert preparation.features == ("two", "x", "three")
    expected = [[1.0, 1.0, -0.2, 0.7, -0.5], [-1.0, 0.0, -0.2, -0.3, 0.5]]
    assert encode_inputs(frame(), preparation) == pytest.approx(np.array(expected))
    assert encode_targets(frame()["y"], preparation).tolist() == [0.0, -2.0]
    assert encode_inputs(frame()[:0], preparation).shape == (0, 5)


def test_unknown_levels_have_no_indicator_and_are_counted():
    preparation = Preparation.from_wire(ARRAYS, SCHEMA)
    rows = frame(three=["new", "a"], two=["yes", "maybe"])
    assert count_unknown_levels(rows, preparation) == 2
    encoded = encode_inputs(rows, preparation)
    assert encoded[0, 2:] == pytest.approx([-0.2, -0.3, -0.5])
    assert encoded[1, 0] == -1.0
    assert count_unknown_levels(frame(), preparation) == 0


def test_rows_that_do_not_fit_the_schema_are_refused_by_column():
    preparation = Preparation.from_wire(ARRAYS, SCHEMA)
    with pytest.raises(DataError, match="missing column `x`, `three`; the file has `two`, `y`"):
        encode_inputs(frame().drop(columns=["x", "three"]), preparation)
    with pytest.raises(DataError, match="`x` is categorical here and numeric"):
        encode_inputs(frame(x=["u", "v"]), preparation)
    with pytest.raises(DataError, match="target `y` is categorical"):
        encode_targets(pd.Series(["u", "v"]), preparation)


def test_an_unknown_class_is_refused():
    entries = json.loads(SCHEMA) | {"target": {"name": "y", "kind": "categorical", "levels": ["no", "yes"]}}
    preparation = Preparation.from_wire({**ARRAYS, "target.mean": np.array(0.0)}, json.dumps(entries))
    assert encode_targets(pd.Series(["yes", "no"]), preparation).tolist() == [1.0, 0.0]
    with pytest.raises(DataError, match="not among the 2 agreed") as caught:
        encode_targets(pd.Series(["yes", "perhaps"]), preparation)
    assert "perhaps" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input.mean": np.zeros(4)}, r"`input.mean` has shape \(4,\)"),
        ({"input.scale": np.zeros(5)}, "finite and positive"),
        ({"target.mean": np.array(np.nan)}, "finite"),
        ({"target.scale": np.array(-1.0)}, "finite and positive"),
    ],
)
def test_a_malformed_preparation_is_refused(change, message):
    with pytest.raises(ProtocolError, match=message):
        Preparation.from_wire({**ARRAYS, **change}, SCHEMA)
    with pytest.raises(ProtocolError, match=r"lacks the array `input\.mean`"):
        Preparation.from_wire({}, SCHEMA)


def test_new_rows_are_read_by_the_agreed_kinds(tmp_path):
    """Level codes that look like numbers stay levels, and columns nobody asked for may hold anything."""
    entries = json.loads(SCHEMA)
    entries["features"][2]["levels"] = ["1", "2", "x"]
    preparation = Preparation.from_wire(ARRAYS, json.dumps(entries))
    path = tmp_path / "new.csv"
    path.write_text("note,three,x,two\n,2,6,yes\n,1,2,no\n")
    rows = read_inputs(path, preparation)
    assert rows.columns.tolist() == ["two", "x", "three"]
    assert encode_inputs(rows, preparation)[:, 2:] == pytest.approx(np.array([[-0.2, 0.7, -0.5], [0.8, -0.3, -0.5]]))
    path.write_text("three,x,two\n2,6,yes\n1,two,no\n")
    with pytest.raises(DataError, match=r"new\.csv: column `x`: text in a numeric cell in row 2"):
        read_inputs(path, preparation)
    path.write_text("three,x\n2,6\n")
    with pytest.raises(DataError, match=r"new\.csv: missing column `two`"):
        read_inputs(path, preparation)


def test_a_description_by_hand():
    found = describe(frame(x=[1.0, 4.0]), ("two", "x", "three"), "y")
    assert {name: value.tolist() for name, value in found.arrays.items()} == {
        "features.sum": [5.0],
        "features.residual": [0.0],
        "features.squares": [4.5],
        "target.sum": 10.0,
        "target.residual": 0.0,
        "target.squares": 50.0,
        "levels.two": [1, 1],
        "levels.three": [1, 1],
    }
    assert found.num_examples == 2
    assert json.loads(found.schema) == {
        "features": [
            {"name": "two", "kind": "categorical", "levels": ["no", "yes"]},
            {"name": "x", "kind": "numeric"},
            {"name": "three", "kind": "categorical", "levels": ["b", "c"]},
        ],
        "target": {"name": "y", "kind": "numeric"},
    }
