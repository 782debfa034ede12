"""One declaration gives encoding, decoding with words, sums and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.errors import ProtocolError
from fedgp_flower.messages import add, decode, encode, from_parts, kind_of, leaves, message, misfit, table, to_parts
from fedgp_flower.typing import AnyShape


@message()
class Part:
    eta: Float[ndarray, " M"] = leaves("η")
    name: str = leaves("what it is of")


@message("query.sums", summand=True)
class Sums:
    gram: Float[ndarray, "M M"] = leaves("A", symmetric=True)
    counts: Int[ndarray, " B"] = leaves("rows")
    total: Float[ndarray, ""] = leaves("Σ y")
    values: Mapping[str, AnyShape] = leaves("any")
    fresh: int = leaves("how many", default=1)


@message()
class Sent:
    values: Mapping[str, AnyShape] = leaves("parameters")


@message("train")
class Back:
    values: Mapping[str, AnyShape] = leaves("parameters after a step", as_sent=True)


@message("query.lost")
class Lost:
    fresh: bool = leaves("began anew")


@message()
class State:
    parts: Mapping[str, Part] = leaves("factors")
    several: tuple[Part, ...] = leaves("ragged")
    rows: int = leaves("rows")
    facts: Mapping[str, list[int]] = leaves("JSON")
    best: Part | None = leaves("the best", default=None)


def sums(seed: int = 0) -> Sums:
    rng = np.random.default_rng(seed)
    gram = rng.standard_normal((3, 3))
    return Sums(gram + gram.T, rng.integers(0, 5, 4), np.array(rng.standard_normal()), {"a.b": rng.standard_normal(2)})


@message("query.stacks", summand=True)
class Stacks:
    grams: Float[ndarray, "J C M M"] = leaves("A", symmetric=True)


def same(one: object, other: object) -> bool:
    mine, others = encode(one), encode(other)
    return list(mine) == list(others) and all(np.array_equal(mine[name], others[name]) for name in mine)


def test_symmetric_matrices_travel_packed_and_come_back_bit_by_bit():
    """The masks of a question are bound to its bytes, and a site has them from what it decoded: −0 is not 0."""
    stack = np.random.default_rng(0).standard_normal((4, 2, 3, 3))
    entry = Stacks(stack + stack.swapaxes(-1, -2))
    entry.grams[..., [0, 1], [1, 0]] = -0.0
    arrays = encode(entry)
    assert arrays["grams"].shape == (4, 2, 6)
    assert decode(Stacks, arrays, {"J": 4, "M": 3}).grams.tobytes() == entry.grams.tobytes()
    with pytest.raises(ProtocolError, match=r"shape \(4, 12\) is no packed symmetric matrix"):
        decode(Stacks, {"grams": arrays["grams"].reshape(4, 12)})


@settings(max_examples=20, deadline=None)
@given(names=st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=4), rows=st.integers(-5, 10**12))
def test_a_state_survives_the_codec(names, rows):
    parts = {name: Part(np.arange(2.0) + index, name) for index, name in enumerate(names)}
    state = State(parts, tuple(parts.values()), rows, {"a": [1, 2]}, next(iter(parts.values()), None))
    back = decode(State, encode(state))
    assert same(state, back)
    assert list(back.parts) == names
    assert (back.best is None) == (not names)


def test_sums_add_every_field_once():
    one, two = sums(1), sums(2)
    total = add([one, two])
    assert np.allclose(total.gram, one.gram + two.gram)
    assert np.array_equal(total.counts, one.counts + two.counts)
    assert total.fresh == 2
    assert total.values["a.b"] == pytest.approx(one.values["a.b"] + two.values["a.b"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"values.z": np.array([np.nan])}, r"Sums\.values\.z: 1 of 1 entries are not finite"),
        (lambda a: a | {"extra": np.zeros(1)}, "unknown arrays extra"),
        (lambda a: {n: v for n, v in a.items() if n != "total"}, r"Sums\.total: is missing"),
        (lambda a: a | {"total": np.zeros(2)}, r"Sums\.total: shape \(2,\), expected 'a single number'"),
        (lambda a: a | {"counts": np.zeros(4)}, r"Sums\.counts: type float64"),
        (lambda a: a | {"gram": np.zeros(5)}, r"Sums\.gram: shape \(5,\) is no packed symmetric matrix"),
        (lambda a: a | {"gram": np.zeros(10)}, r"gram: shape \(4, 4\), expected 'M M' with M = 3"),
    ],
)
def test_what_is_wrong_is_said_in_words(change, words):
    with pytest.raises(ProtocolError, match=words):
        decode(Sums, change(encode(sums())), {"M": 3})


def test_numbers_travel_apart_from_arrays():
    state = State({}, (), 7, {})
    arrays, numbers = to_parts(state)
    assert numbers == {"rows": 7}
    assert "rows" not in arrays
    assert same(from_parts(State, arrays, numbers | {"seconds": 1.0}), state)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_truth_travels_as_a_number_that_flower_s_metrics_take(fresh):
    arrays, numbers = to_parts(Lost(fresh))
    assert {name: type(number) for name, number in numbers.items()} == {"fresh": int}
    assert from_parts(Lost, arrays, numbers) == Lost(fresh)
    with pytest.raises(ProtocolError, match=r"Lost\.fresh: expected a single bool"):
        from_parts(Lost, arrays, {"fresh": 2})


def test_named_arrays_that_come_back_have_the_names_and_shapes_that_were_sent():
    sent = Sent({"a": np.zeros(2), "b": np.zeros(())})
    assert misfit(sent, Back({"a": np.ones(2), "b": np.ones(())})) is None
    for back, words in (({"a": np.ones(2)}, "`values.b`"), ({"a": np.ones(3), "b": np.ones(())}, r"expected \(2,\)")):
        assert re.search(words, misfit(sent, Back(back)) or "")


def test_the_table_says_what_leaves_a_site():
    assert kind_of(Sums) == "query.sums"
    assert ("gram", "[M, M]", "A") in list(table(Sums))
    assert ("parts.*.eta", "[M]", "η") in list(table(State))
