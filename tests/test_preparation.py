"""Rows are encoded as agreed, and the agreement is that of one table of all rows."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgp_flower.agreement import Agreement, SiteDescription, agree
from fedgp_flower.data import standardisation
from fedgp_flower.data.standardisation import Preparation, describe, encode_inputs, encode_targets
from fedgp_flower.errors import DataError, ProtocolError

SHORT = 2.0**-29
"""Twice what an agreed mean or scale may be rounded by, in units of the scale."""


def described(frame: pd.DataFrame, features=("x", "job"), target="y") -> SiteDescription:
    return describe(frame, features, target)


def agreed(frame: pd.DataFrame, owner: np.ndarray, **keys) -> Agreement:
    return agree({f"s{k}": described(frame[owner == k]) for k in np.unique(owner)}, **keys)


def rows(n: int, seed: int, offset: float = 0.0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    x = offset + draw.normal(size=n)
    return pd.DataFrame({"x": x, "job": draw.choice(["a", "b", "c"], n), "y": -offset + 3 * draw.normal(size=n)})


@settings(max_examples=25)
@given(
    n=st.integers(6, 120),
    seed=st.integers(0, 999),
    sites=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1.0, -1e3, 1e8]),
)
def test_agreement_of_any_partition_is_the_pooled_mean_and_spread(n, seed, sites, offset):
    frame, owner = rows(n, seed, offset), np.random.default_rng(seed + 1).integers(0, sites, n)
    agreement = agreed(frame, owner)
    found, levels = agreement.arrays, sorted(frame["job"].unique())
    assert agreement.rows == {f"s{k}": (owner == k).sum() for k in np.unique(owner)}
    assert json.loads(agreement.schema)["features"][1]["levels"] == levels
    shown = levels[1:] if len(levels) == 2 else levels
    table = np.column_stack([frame["x"], *(frame["job"] == level for level in shown)]).astype(float)
    mean, scale = table.mean(axis=0), table.std(axis=0)
    assert found["input.scale"] == pytest.approx(np.where(scale > 0, scale, 1), rel=SHORT)
    # a mean near 0 is a difference of large numbers: it is exact in units of the spread
    assert found["input.mean"] == pytest.approx(mean, rel=1e-12, abs=SHORT * scale.max())
    assert found["target.mean"] == pytest.approx(frame["y"].mean(), rel=1e-12, abs=SHORT * frame["y"].std())
    assert found["target.scale"] == pytest.approx(frame["y"].std(ddof=0), rel=SHORT)


@settings(max_examples=25)
@given(
    value=st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-9),
    n=st.integers(2, 200),
    sites=st.integers(1, 9),
)
def test_a_constant_column_is_found_exactly_and_becomes_zero(value, n, sites):
    found = agreed(rows(n, 0).assign(x=value), np.arange(n) % sites)
    assert "x" in found.constant
    assert found.arrays["input.scale"][0] == 1.0
    assert found.columns[0]["sd"] == 0.0
    assert abs(value - found.arrays["input.mean"][0]) <= np.spacing(abs(value))


def test_without_standardisation_and_for_counts_units_stay():
    frame = rows(20, 0, offset=5.0)
    raw = agreed(frame, np.arange(20) % 2, standardise=False).arrays
    assert [raw["input.mean"].sum(), raw["target.mean"], raw["target.scale"]] == [0, 0, 1]
    assert (raw["input.scale"] == 1).all()
    counts = agreed(frame, np.arange(20) % 2, likelihood="poisson").arrays
    assert (counts["target.mean"], counts["target.scale"]) == (0, 1)
    assert counts["input.mean"][0] == pytest.approx(frame["x"].mean())


def test_classes_are_indices_of_the_agreed_levels():
    frame = rows(8, 0).assign(y=["yes"] * 4 + ["no"] * 4)
    found = agreed(frame, np.arange(8) // 4)
    preparation = Preparation.from_wire(found.arrays, found.schema)
    assert encode_targets(frame["y"], preparation).tolist() == [1.0] * 4 + [0.0] * 4
    assert (found.arrays["target.mean"], found.arrays["target.scale"]) == (0, 1)
    with pytest.raises(DataError, match="not among the 2 agreed") as caught:
        encode_targets(pd.Series(["yes", "perhaps"]), preparation)
    assert "perhaps" not in str(caught.value)
    with pytest.raises(DataError, match="same class at every site"):
        agree({"1": described(frame[:4]), "2": described(frame[:4])})


def test_a_site_with_a_third_class_is_refused():
    frame = rows(8, 0).assign(y=["yes", "no"] * 4)
    odd = rows(2, 1).assign(y=["yes", "Yes"])
    found = agree({"a": described(odd), "b": described(frame), "c": described(frame)})
    assert list(found.refused) == ["a"]
    assert "`y`" in found.refused["a"]
    assert "Yes" not in found.refused["a"]
    assert sum(found.rows.values()) == 16


def test_sites_that_differ_from_most_are_refused_by_column():
    frame = rows(10, 0)
    sites = {
        "0": described(frame.assign(z=frame["x"]), ("x", "z")),
        "1": described(frame),
        "2": described(frame[["job", "y", "x"]], ("job", "x")),
        "3": described(frame.assign(x=["u", "v"] * 5)),
        "4": described(frame.assign(z=1.0), target="z"),
    }
    found = agree(sites)
    assert set(found.refused) == {"0", "3", "4"}
    assert "has as target `z`" in found.refused["4"]
    assert "lacks the column `job`" in found.refused["0"]
    assert "has the extra column `z`" in found.refused["0"]
    assert "has another kind (number, or text like 01) of `x`" in found.refused["3"]
    assert found.names[0] == "x"  # the order of the first accepted site
    assert found.arrays["input.mean"][0] == pytest.approx(frame["x"].mean())


@pytest.mark.parametrize(
    ("changed", "schema", "message"),
    [
        ({"sums": np.zeros((1, 3))}, "", "shape"),
        ({"sums": np.array([[0.0, 0.0, -1.0], [0.0, 0.0, 9.0]])}, "", "not be negative"),
        ({"sums": np.array([[5.0, 1e-9, 1.0], [0.0, 0.0, 9.0]])}, "", "more than rounding"),
        ({"levels": np.array([1, 1, 1])}, "", "add up"),
        ({"extra": np.zeros(1)}, "", "extra"),
        ({"missing": np.array([400, 0, 0])}, "", "counts more than the"),
        ({"missing": np.array([0, 1, 0])}, "", "`y` has missing cells"),
        ({}, "{", ""),
        ({}, '{"features": [], "target": {"name": "y"}}', ""),
        ({}, '{"features": [{"name": "y", "kind": "numeric"}], "target": {"name": "y", "kind": "numeric"}}', ""),
        ({}, '{"features": [{"name": "x", "kind": "odd"}], "target": {"name": "y", "kind": "numeric"}}', ""),
    ],
)
def test_a_malformed_description_is_refused_and_the_others_go_on(changed, schema, message):
    good = described(rows(10, 0).assign(job=list("abcabcabca")))
    bad = SiteDescription({**good.arrays, **changed}, schema or good.schema, good.num_examples)
    found = agree({"bad": bad, "good": good})
    assert list(found.refused) == ["bad"]
    assert message in found.refused["bad"]
    assert sum(found.rows.values()) == 10


COLUMNS = [
    {"name": "two", "kind": "categorical", "levels": ["no", "yes"]},
    {"name": "x", "kind": "numeric"},
    {"name": "three", "kind": "categorical", "levels": ["a", "b", "c"]},
]
SCHEMA = json.dumps({"features": COLUMNS, "target": {"name": "y", "kind": "numeric"}})
ARRAYS = {"input.mean": np.array([0.5, 2.0, 0.2, 0.3, 0.5]), "input.scale": np.array([0.5, 4.0, 1.0, 1.0, 1.0])}
ARRAYS |= {"target.mean": np.array(10.0), "target.scale": np.array(5.0)}


def frame(**columns) -> pd.DataFrame:
    base = {"x": [6.0, 2.0], "three": ["b", "c"], "two": ["yes", "no"], "y": [10.0, 0.0]}
    return pd.DataFrame({**base, **columns})


def test_rows_are_encoded_in_schema_order_and_unknown_levels_are_counted():
    """The indicators of a level that no site had are at their means."""
    preparation = Preparation.from_wire(ARRAYS, SCHEMA)
    assert preparation.names == ("two=yes", "x", "three=a", "three=b", "three=c")
    assert preparation.features == ("two", "x", "three")
    expected = [[1.0, 1.0, -0.2, 0.7, -0.5], [-1.0, 0.0, -0.2, -0.3, 0.5]]
    assert encode_inputs(frame(), preparation) == pytest.approx(np.array(expected))
    assert encode_targets(frame()["y"], preparation).tolist() == [0.0, -2.0]
    assert encode_inputs(frame()[:0], preparation).shape == (0, 5)
    rows = frame(three=["new", "a"], two=["yes", "maybe"])
    assert standardisation.unknown_levels(rows, preparation).to_numpy().tolist() == [[False, True], [True, False]]
    encoded = encode_inputs(rows, preparation)
    assert (encoded[0, 2:] == 0).all()
    assert encoded[1, 0] == 0
    assert not standardisation.unknown_levels(frame(), preparation).to_numpy().any()


def test_rows_that_do_not_fit_the_schema_are_refused_by_column():
    preparation = Preparation.from_wire(ARRAYS, SCHEMA)
    with pytest.raises(DataError, match="missing column `x`, `three`; it has `two`, `y`"):
        encode_inputs(frame().drop(columns=["x", "three"]), preparation)
    with pytest.raises(DataError, match="`x` is categorical here and numeric"):
        encode_inputs(frame(x=["u", "v"]), preparation)
    with pytest.raises(DataError, match="target `y` is categorical"):
        encode_targets(pd.Series(["u", "v"]), preparation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input.mean": np.zeros(4)}, r"`input.mean` has shape \(4,\)"),
        ({"input.scale": np.zeros(5)}, "finite, and positive"),
        ({"target.mean": np.array(np.nan)}, "finite"),
        ({"target.scale": np.array(-1.0)}, "finite, and positive"),
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
    rows = standardisation.read_inputs(path, preparation)
    assert rows.columns.tolist() == ["two", "x", "three"]
    assert encode_inputs(rows, preparation)[:, 2:] == pytest.approx(np.array([[-0.2, 0.7, -0.5], [0.8, -0.3, -0.5]]))
    path.write_text("three,x,two\n2,6,yes\n1,two,no\n")
    with pytest.raises(DataError, match=r"new\.csv: column `x`: text in a numeric cell in row 2"):
        standardisation.read_inputs(path, preparation)
    path.write_text("three,x\n2,6\n")
    with pytest.raises(DataError, match=r"new\.csv: missing column `two`"):
        standardisation.read_inputs(path, preparation)
