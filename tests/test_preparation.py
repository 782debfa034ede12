"""The server's agreement equals what one table of all rows would give, whichever way the rows are dealt."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgp_flower.agreement import Agreement, SiteDescription, agree
from fedgp_flower.data.standardisation import Preparation, describe, encode_targets
from fedgp_flower.errors import DataError


def described(frame: pd.DataFrame, features=("x", "job"), target="y") -> SiteDescription:
    return describe(frame, features, target)


def agreed(frame: pd.DataFrame, owner: np.ndarray, **keys) -> Agreement:
    """Deal the rows by ``owner`` and let the sites agree."""
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
    frame = rows(n, seed, offset)
    owner = np.random.default_rng(seed + 1).integers(0, sites, n)
    found = agreed(frame, owner).arrays
    levels = sorted(frame["job"].unique())
    shown = levels[1:] if len(levels) == 2 else levels
    table = np.column_stack([frame["x"], *(frame["job"] == level for level in shown)]).astype(float)
    mean, scale = table.mean(axis=0), table.std(axis=0)
    assert found["input.scale"] == pytest.approx(np.where(scale > 0, scale, 1), rel=1e-12)
    # a mean near 0 is a difference of large numbers: it is exact in units of the spread
    assert found["input.mean"] == pytest.approx(mean, rel=1e-12, abs=1e-12 * scale.max())
    assert found["target.mean"] == pytest.approx(frame["y"].mean(), rel=1e-12, abs=1e-12)
    assert found["target.scale"] == pytest.approx(frame["y"].std(ddof=0), rel=1e-12)


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
    assert abs(value - found.arrays["input.mean"][0]) <= np.spacing(abs(value))


def test_levels_are_the_sorted_union_and_counts_add_up():
    one = rows(4, 0).assign(job=["b", "b", "b", "z"])
    two = rows(6, 1).assign(job=["a", "b", "a", "a", "a", "a"])
    found = agree({"1": described(one), "2": described(two)})
    assert json.loads(found.schema)["features"][1] == {"name": "job", "kind": "categorical", "levels": ["a", "b", "z"]}
    p = np.array([5, 4, 1]) / 10
    assert found.arrays["input.mean"][1:] == pytest.approx(p)
    assert found.arrays["input.scale"][1:] == pytest.approx(np.sqrt(p * (1 - p)))
    assert (found.rows, sum(found.rows.values())) == ({"1": 4, "2": 6}, 10)


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
    assert "has as another kind `x`" in found.refused["3"]
    assert found.names[0] == "x"  # the order of the first accepted site
    assert found.arrays["input.mean"][0] == pytest.approx(frame["x"].mean())


@pytest.mark.parametrize(
    ("changed", "schema", "message"),
    [
        ({"features.sum": np.zeros(2)}, "", "shape"),
        ({"features.squares": np.array([-1.0])}, "", "not negative"),
        ({"features.residual": np.array([1e-9])}, "", "more than rounding"),
        ({"levels.job": np.array([1, 1, 1])}, "", "add up"),
        ({"extra": np.zeros(1)}, "", "extra"),
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
