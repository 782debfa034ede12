"""One declaration gives encoding, decoding with words, sums and tables."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from numpy import ndarray

from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.fitc import WeightedSums
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.messages import add, decode, encode, from_parts, layout, leaves, message, misfit, packed, to_parts
from fedgp_flower.methods.sgpr.messages import Expectations, TrialSums
from fedgp_flower.records import PACKED, array_record, numpy_arrays, packed_record
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import AnyShape


@message()
class Part:
    eta: Float[ndarray, " M"] = leaves("η")
    name: str = leaves("what it is of")


@message("query.stacks", summand=True)
class Stacks:
    grams: Float[ndarray, "J C M M"] = leaves("A", symmetric=True)


@message("query.sums", summand=True)
class Sums:
    gram: Float[ndarray, "M M"] = leaves("A", symmetric=True)
    counts: Int[ndarray, " B"] = leaves("rows")
    total: Float[ndarray, ""] = leaves("Σ y")
    values: Mapping[str, AnyShape] = leaves("any")
    fresh: int = leaves("how many", default=1)


@message("train")
class Back:
    values: Mapping[str, AnyShape] = leaves("parameters after a step", as_sent=True)


@message("query.moved", counts="W width")
class Moved:
    weights: Float[ndarray, " W"] = leaves("weights after a step", as_sent=True, within=2.0)


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


def low_rank(rows: int, size: int = 12) -> SparseSums:
    weights = np.random.default_rng(0).standard_normal((size, rows))
    return SparseSums(weights @ weights.T, weights.sum(1), *map(np.asarray, (1.0 * rows, 1.0, float(rows))))


def test_matrices_of_few_rows_travel_as_their_factors():
    parts = to_parts(few := low_rank(5))
    assert parts[0]["gram"].shape == (5, 12)
    back = from_parts(SparseSums, *parts, {"M": 12})
    assert np.allclose(back.gram, few.gram, rtol=0, atol=1e-13)
    assert to_parts(low_rank(6))[0]["gram"].shape == (78,)
    with pytest.raises(ProtocolError, match=r"gram: shape \(12, 12\), expected 'M M' with M = 11"):
        from_parts(SparseSums, *parts, {"M": 11})
    with pytest.raises(ProtocolError, match="gram: the matrix of this factor is not finite"):
        from_parts(SparseSums, {**parts[0], "gram": np.full((5, 12), 1e200)}, parts[1], {"M": 12})
    several = few, low_rank(4)
    trials = TrialSums.of([WeightedSums(s.gram, s.projection, *(np.asarray(1.0),) * 3, s.count) for s in several])
    parts = to_parts(trials)
    assert parts[0]["grams"].shape == (2, 5, 12)
    assert np.allclose(from_parts(TrialSums, *parts, {"M": 12}).grams, trials.grams, rtol=0, atol=1e-13)


@pytest.mark.parametrize("functions", [(), (2,), (3,)])
def test_one_matrix_and_one_of_each_function_travel_as_factors(functions):
    curvature = np.broadcast_to(low_rank(3).gram, (*functions, 12, 12)) + 0.0
    sent = Expectations({}, np.array(-1.0), np.zeros((*functions, 12)), curvature, np.array(3.0))
    parts = to_parts(sent)
    assert parts[0]["curvature"].shape[-2:] == (3, 12)
    sizes = {"M": 12, "C": functions[0]} if functions else {"M": 12}
    back = from_parts(Expectations, *parts, sizes)
    assert back.curvature.shape == curvature.shape
    assert np.allclose(back.curvature, curvature, rtol=0, atol=1e-13)


@pytest.mark.parametrize("gram", [-low_rank(5).gram, low_rank(7).gram, np.full((12, 12), np.nan)])
def test_a_matrix_that_has_no_factor_of_its_rows_travels_as_it_is(gram):
    assert np.array_equal(to_parts(replace(low_rank(5), gram=gram))[0]["gram"], packed(gram), equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text("aé.:/\n 0", min_size=1, max_size=8), unique=True, max_size=4), st.integers(-5, 10**12))
def test_a_state_survives_the_codec(names, rows):
    parts = {name: Part(np.arange(2.0) + index, name) for index, name in enumerate(names)}
    state = State(parts, tuple(parts.values()), rows, {"a": [1, 2]}, next(iter(parts.values()), None))
    back = decode(State, sent := encode(state))
    assert list(again := encode(back)) == list(sent)
    assert all(np.array_equal(array, again[name]) for name, array in sent.items())
    assert list(back.parts) == names
    assert (back.best is None) == (not names)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**70), 2**70).map(lambda k: k * 2.0**-40), min_size=1, max_size=12), st.randoms())
def test_a_sum_is_the_nearest_number_whatever_the_order(values, random):
    random.shuffle(values)
    total = add(replace(sums(), total=np.array(value), values={"a": np.full(3, value)}) for value in values)
    assert total.total == math.fsum(values)
    assert list(total.values["a"]) == [math.fsum(values)] * 3
    np.testing.assert_allclose(total.gram, len(values) * sums().gram)
    assert np.array_equal(total.counts, len(values) * sums().counts)
    assert total.fresh == len(values)
    assert type(total.fresh) is int


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


@pytest.mark.parametrize("fresh", [False, True])
def test_numbers_travel_apart_from_arrays_and_truths_as_numbers_that_metrics_take(fresh):
    arrays, numbers = to_parts(Lost(fresh))
    assert (arrays, {name: type(number) for name, number in numbers.items()}) == ({}, {"fresh": int})
    assert from_parts(Lost, arrays, numbers | {"seconds": 1.0}) == Lost(fresh)
    with pytest.raises(ProtocolError, match=r"Lost\.fresh: expected a single bool"):
        from_parts(Lost, arrays, {"fresh": 2})


def test_named_arrays_that_come_back_have_the_names_and_shapes_that_were_sent():
    sent = Parameters({"a": np.zeros(2), "b": np.zeros(())})
    assert misfit(sent, Back({"a": np.ones(2), "b": np.ones(())})) is None
    for back, words in (({"a": np.ones(2)}, "`values.b`"), ({"a": np.ones(3), "b": np.ones(())}, r"expected \(2,\)")):
        assert re.search(words, misfit(sent, Back(back)) or "")


def test_an_array_that_comes_back_has_the_shape_that_was_sent_and_lies_near_it():
    @message()
    class Sent:
        weights: Float[ndarray, " W"]

    sent = Sent(np.zeros(3))
    assert misfit(sent, Moved(np.full(3, 2.0))) is None
    assert layout(Moved, {}, sent) == [["weights", [3], "float64"]]
    for back, words in ((np.ones(2), r"`weights`: expected \(3,\)"), (np.full(3, 2.1), "`weights`: moved by 2.1")):
        assert re.search(words, misfit(sent, Moved(back)) or "")


def test_a_mistake_in_a_declaration_is_named():
    @message()
    class Shapeless:
        weights: ndarray

    with pytest.raises(ProtocolError, match=r"Moved: `counts` = 'W width': 'width' is none of \['W'\]"):
        Moved(np.zeros(3)).num_parameters()
    with pytest.raises(ProtocolError, match=r"Shapeless.weights: .*ndarray.* cannot be sent; an array has a shape"):
        encode(Shapeless(np.zeros(3)))


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


WRONG = ["0:2:a\n0:1:a", "0:2:a\n1:1:", "0:-1,-3:a", "0:x:a", "a", "0:99999999999,99999999999:a"]
"""Layouts of three numbers that are none."""


@pytest.mark.parametrize(
    ("layout", "numbers"), [("0:2:a\n0:1:b", 2), ("0:2:a\n0:1:b", 4), ("", 0), *((own, 3) for own in WRONG)]
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
