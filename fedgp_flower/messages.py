"""A message is a frozen dataclass; its annotations are the contract.

From one declaration come the encoding as named arrays, the decoding with words, the checkpoint of a state, the sum over
sites, and the table of what leaves a site::

    @message("query.statistics", summand=True)
    class Statistics:
        gram: Float[ndarray, "M M"] = leaves("W Wᵀ, W = L⁻¹ k(Z, X)", symmetric=True)
        moment: Float[ndarray, "M"] = leaves("W y")

A field is an array with a shape, another message, ``tuple[Message, ...]``, ``Mapping[str, Message]``,
``Mapping[str, ndarray]``, a number, one of these ``| None`` (None is absent), or anything that JSON can hold. Arrays
travel under ``field`` or ``outer.field``, the numbers of a request or an answer among Flower's configuration or metrics
(:func:`split`); all else is JSON text in one array of bytes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedgp_flower.errors import ProtocolError
from fedgp_flower.typing import NamedArrays

M = TypeVar("M")

ECHOED = ("run", "round", "communication")
"""Config keys of a question that its reply repeats. A reply that repeats others answers another question."""

_NUMBERS: Mapping[Any, str] = {float: "f", int: "iu", bool: "b"}
"""Python's numbers, and the kinds of array that may hold them."""
_KEYS = TypeAdapter(list[str])
_KIND, _SUMMAND, _PUBLIC = "__message_kind__", "__message_summand__", "__message_public__"

Layout: TypeAlias = list[list[Any]]
"""Arrays of a summand: name, shape and ``int64`` or ``float64`` of each."""


def leaves(
    meaning: str,
    *,
    symmetric: bool = False,
    as_sent: bool = False,
    within: float | str = np.inf,
    default: Any = dataclasses.MISSING,
) -> Any:
    """A field of a message: what it is, in words that a site's owner reads.

    Args:
        meaning: The words.
        symmetric: A symmetric matrix, or a stack of them, which travels packed.
        as_sent: Named arrays of an answer with the names and shapes of the request's field of this name.
        within: How far an entry of arrays ``as_sent`` may be from the one sent, of points beyond the farthest; or the
            number of the request that says so.
        default: Of a field that may be left out.
    """
    facts = {"meaning": meaning, "symmetric": symmetric, "as_sent": as_sent, "within": within}
    return dataclasses.field(default=default, metadata=facts)


@dataclass_transform(frozen_default=True, field_specifiers=(leaves, dataclasses.field))
def message(kind: str = "", *, summand: bool = False, public: bool = False) -> Callable[[type[M]], type[M]]:
    """Declare a message.

    Args:
        kind: For what a site answers: the Flower message type it answers, such as ``train`` or ``query.statistics``.
            Requests, parts of messages and states have none.
        summand: The server needs only the sum over sites: every field is an array of fixed shape or a number.
        public: Each site may send it in the clear where all else is masked.
    """

    def declare(cls: type[M]) -> type[M]:
        frozen = dataclasses.dataclass(frozen=True)(cls)
        setattr(frozen, _KIND, kind)
        setattr(frozen, _SUMMAND, summand)
        setattr(frozen, _PUBLIC, public)
        return frozen

    return declare


def is_message(cls: Any) -> bool:
    """Whether a class was declared by :func:`message`."""
    return isinstance(cls, type) and _KIND in cls.__dict__


def kind_of(cls: type) -> str:
    """The Flower message type that a class of answers belongs to."""
    return str(getattr(cls, _KIND))


def is_summand(cls: type) -> bool:
    """Whether answers of a class may be added without looking at any of them."""
    return bool(getattr(cls, _SUMMAND))


def is_public(cls: Any) -> bool:
    """Whether each site may send an answer of this class in the clear where all else is masked."""
    return bool(getattr(cls, _PUBLIC, False))


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field, its annotation taken apart."""

    name: str
    form: str
    """``array``, ``number``, ``message``, ``messages`` (tuple), ``mapping`` (of messages), ``arrays`` or ``json``."""
    inner: Any
    optional: bool
    has_default: bool
    letters: tuple[str, ...]
    """Of the shape of an array."""
    dtypes: frozenset[str]
    """Names of the types that an array may have, of floating-point ones float64 alone."""
    meaning: str = ""
    symmetric: bool = False
    as_sent: bool = False
    within: float | str = np.inf


@cache
def _fields(cls: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_field(spec, hints[spec.name]) for spec in dataclasses.fields(cls))


def _field(spec: dataclasses.Field[Any], hint: Any) -> _Field:
    arguments = typing.get_args(hint)
    optional = isinstance(hint, types.UnionType) and type(None) in arguments
    if optional:
        [hint] = [argument for argument in arguments if argument is not type(None)]
    form, inner = _form(hint)
    has_default = spec.default is not dataclasses.MISSING or spec.default_factory is not dataclasses.MISSING
    shaped = form in ("array", "arrays")
    return _Field(
        name=spec.name,
        form=form,
        inner=inner,
        optional=optional,
        has_default=has_default,
        letters=tuple(inner.dim_str.split()) if shaped else (),
        dtypes=frozenset(name for name in inner.dtypes if name == "float64" or "float" not in name)
        if shaped
        else frozenset(),
        **spec.metadata,
    )


def _form(hint: Any) -> tuple[str, Any]:
    plain = "array" if hasattr(hint, "dim_str") else "number" if hint in _NUMBERS else ""
    if plain or is_message(hint):
        return plain or "message", hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and is_message(arguments[0]):
        return "messages", arguments[0]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if hasattr(arguments[1], "dim_str"):
            return "arrays", arguments[1]
        if is_message(arguments[1]):
            return "mapping", arguments[1]
    return "json", TypeAdapter(hint)


def encode(value: Any) -> NamedArrays:
    """A message as named arrays.

    >>> @message()
    ... class Pair:
    ...     rows: int
    ...     label: str
    >>> sorted(encode(Pair(3, "north")))
    ['label', 'rows']
    """
    arrays: NamedArrays = {}
    cls: Any = type(value)
    for spec in _fields(cls):
        content = getattr(value, spec.name)
        if content is not None or not spec.optional:
            arrays |= _encoded(spec, content)
    return arrays


def _encoded(spec: _Field, content: Any) -> NamedArrays:
    match spec.form:
        case "array":
            return {spec.name: packed(np.asarray(content)) if spec.symmetric else np.asarray(content)}
        case "number":
            return {spec.name: np.array(spec.inner(content))}
        case "json":
            return {spec.name: _text(spec.inner.dump_json(content))}
        case "message":
            return _under(spec.name, encode(content))
        case "arrays":
            return _under(spec.name, {key: np.asarray(item) for key, item in content.items()})
    # A count or the keys under the field's name, and each part under its number.
    keyed = spec.form == "mapping"
    arrays: NamedArrays = {spec.name: _text(_KEYS.dump_json(list(content))) if keyed else np.array(len(content))}
    for index, item in enumerate(content.values() if keyed else content):
        arrays |= _under(f"{spec.name}.{index}", encode(item))
    return arrays


def decode(cls: type[M], arrays: Mapping[str, NDArray[Any]], sizes: Mapping[str, int] | None = None) -> M:
    """The inverse of :func:`encode`, for arrays that may come from anywhere.

    ``sizes`` are lengths that letters of shapes must have, as ``{"M": 50}``; others are bound by first use.
    """
    reader = _Reader(cls.__name__, dict(sizes or {}))
    spec = reader.read(cls, arrays, "")
    unknown = sorted(set(arrays) - reader.seen)
    if unknown:
        raise ProtocolError(f"{cls.__name__}: unknown arrays {', '.join(unknown[:5])}")
    return typing.cast(M, spec)


def split(cls: Any, arrays: Mapping[str, NDArray[Any]]) -> tuple[NamedArrays, dict[str, float | int]]:
    """What travels as arrays, and the numbers that travel as Flower's metrics, which know no bool, or configuration."""
    numbers = {spec.name: spec.inner for spec in _fields(cls) if spec.form == "number" and spec.name in arrays}
    rest = {name: array for name, array in arrays.items() if name not in numbers}
    return rest, {name: (int if number is bool else number)(arrays[name]) for name, number in numbers.items()}


def join(cls: Any, arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, Any]) -> NamedArrays:
    """The inverse of :func:`split`; numbers that the message does not declare are left out."""
    declared = {spec.name: spec.inner for spec in _fields(cls) if spec.form == "number" and spec.name in numbers}
    found = {name: np.asarray(numbers[name]) for name in declared}
    truths = {name: array == 1 for name, array in found.items() if declared[name] is bool and array in (0, 1)}
    return {**arrays, **found, **truths}


class _Reader:
    """Decoding of one message: which names were read, and which letter of a shape stands for which length."""

    def __init__(self, title: str, sizes: dict[str, int]) -> None:
        self.title, self.sizes, self.seen = title, sizes, set[str]()

    def read(self, cls: type, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Any:
        values = {}
        for spec in _fields(cls):
            name = f"{prefix}{spec.name}"
            there = name in arrays or any(key.startswith(f"{name}.") for key in arrays)
            if there or (spec.form == "arrays" and not spec.optional):
                values[spec.name] = self._value(spec, name, arrays)
            elif spec.optional:
                values[spec.name] = None
            elif not spec.has_default:
                raise self._error(name, "is missing")
        return cls(**values)

    def _value(self, spec: _Field, name: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
        if spec.form == "message":
            return self.read(spec.inner, arrays, f"{name}.")
        if spec.form == "arrays":
            keys = [key for key in arrays if key.startswith(f"{name}.")]
            return {key.removeprefix(f"{name}."): self._array(spec, key, arrays[key]) for key in keys}
        if name not in arrays:
            raise self._error(name, "is missing")
        self.seen.add(name)
        value = np.asarray(arrays[name])
        match spec.form:
            case "array":
                found: Any = self._array(spec, name, value)
            case "number":
                found = self._number(spec.inner, name, value)
            case "json":
                found = self._text(spec.inner, name, value)
            case "mapping":
                keys = self._text(_KEYS, name, value)
                found = {key: self.read(spec.inner, arrays, f"{name}.{place}.") for place, key in enumerate(keys)}
            case _:
                count = self._number(int, name, value)
                if not 0 <= count <= len(arrays):
                    raise self._error(name, "is not a count of parts")
                found = tuple(self.read(spec.inner, arrays, f"{name}.{place}.") for place in range(count))
        return found

    def _text(self, adapter: TypeAdapter[Any], name: str, value: NDArray[Any]) -> Any:
        try:
            return adapter.validate_json(np.asarray(value, dtype=np.uint8).tobytes())
        except (ValidationError, ValueError, TypeError) as error:
            raise self._error(name, "is not the JSON that was expected") from error

    def _number(self, kind: Any, name: str, value: NDArray[Any]) -> Any:
        if value.shape != () or value.dtype.kind not in _NUMBERS[kind]:
            raise self._error(name, f"expected a single {kind.__name__}")
        if not np.isfinite(value):
            raise self._error(name, "is not finite")
        return kind(value)

    def _array(self, spec: _Field, name: str, array: NDArray[Any]) -> NDArray[Any]:
        self.seen.add(name)
        shape, size = array.shape, 0
        if spec.symmetric:
            length = shape[-1] if array.ndim == len(spec.letters) - 1 else -1
            size = int((np.sqrt(8 * max(length, 0) + 1) - 1) / 2)
            if size * (size + 1) // 2 != length:
                raise self._error(name, f"shape {shape} is no packed symmetric matrix")
            shape = (*shape[:-1], size, size)
        if _name(array.dtype) not in spec.dtypes:
            wanted = [dtype for dtype in spec.inner.dtypes if dtype in spec.dtypes]
            raise self._error(name, f"type {array.dtype}, expected {' or '.join(wanted)}")
        if spec.letters != ("*_",):
            self._match(name, shape, spec.letters)
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise self._error(name, f"{int((~np.isfinite(array)).sum())} of {array.size} entries are not finite")
        return unpacked(array, size) if spec.symmetric else array

    def _match(self, name: str, shape: tuple[int, ...], letters: tuple[str, ...]) -> None:
        fits = len(shape) == len(letters)
        for letter, length in zip(letters, shape, strict=False):
            known = int(letter) if letter.isdigit() else self.sizes.setdefault(letter, length)
            fits = fits and (letter == "_" or known == length)
        if not fits:
            sizes = ", ".join(f"{one} = {self.sizes[one]}" for one in dict.fromkeys(letters) if one in self.sizes)
            wanted = " ".join(letters) or "a single number"
            raise self._error(name, f"shape {shape}, expected {wanted!r}{' with ' if sizes else ''}{sizes}")

    def _error(self, name: str, what: str) -> ProtocolError:
        return ProtocolError(f"{self.title}.{name}: {what}")


def add(parts: Iterable[M]) -> M:
    """The sum of summands, in the order given so that the last digit is reproducible."""
    summands = list(parts)
    if not summands:
        raise ProtocolError("a total over no site")
    first = summands[0]
    totals: dict[str, Any] = {}
    cls: Any = type(first)
    for spec in _fields(cls):
        values = [getattr(summand, spec.name) for summand in summands]
        if spec.form == "message":
            totals[spec.name] = add(values)
        elif spec.form == "number":
            totals[spec.name] = spec.inner(sum(values))
        elif spec.form == "arrays":
            totals[spec.name] = {key: _sum([value[key] for value in values]) for key in values[0]}
        else:
            totals[spec.name] = _sum(values)
    return type(first)(**totals)


def _sum(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    total = np.array(values[0])
    for value in values[1:]:
        np.add(total, value, out=total)
    return total


def layout(cls: type, sizes: Mapping[str, int], request: Any) -> Layout | None:
    """The arrays of an answer before there is one; None where a length or a name is not known.

    Arrays of the request that are sent back have the shapes they came with.
    """
    cells: Layout = []
    for spec in _fields(cls):
        inner: Layout | None = None
        if spec.form == "array" and not spec.optional:
            inner = _cell(spec, sizes)
        elif spec.form == "number" and spec.inner is not bool:
            inner = [[spec.name, [], "float64" if spec.inner is float else "int64"]]
        elif spec.form == "message":
            nested = layout(spec.inner, sizes, request)
            inner = nested and [[f"{spec.name}.{name}", shape, dtype] for name, shape, dtype in nested]
        elif spec.form == "arrays" and spec.as_sent:
            sent = getattr(request, spec.name)
            inner = [[f"{spec.name}.{key}", list(np.shape(array)), "float64"] for key, array in sent.items()]
        if inner is None:
            return None
        cells += inner
    return cells


def _cell(spec: _Field, sizes: Mapping[str, int]) -> Layout | None:
    shape = [int(letter) if letter.isdigit() else sizes.get(letter, -1) for letter in spec.letters]
    if -1 in shape:
        return None
    shape = [*shape[:-2], shape[-1] * (shape[-1] + 1) // 2] if spec.symmetric else shape
    return [[spec.name, shape, "float64" if "float64" in spec.dtypes else "int64"]]


def misfit(request: Any, answer: Any) -> str | None:
    """In what the arrays that an answer sends back differ from those of the request: names, shapes, or too far."""
    cls: Any = type(answer)
    for name, within in [(spec.name, spec.within) for spec in _fields(cls) if spec.as_sent]:
        sent, back = (
            {key: np.shape(array) for key, array in getattr(spec, name).items()} for spec in (request, answer)
        )
        odd = sorted(key for key in {**sent, **back} if sent.get(key) != back.get(key))
        if odd:
            shapes = [str(spec.get(odd[0], "nothing")) for spec in (sent, back)]
            return f"`{name}.{odd[0]}`: expected {shapes[0]}, the shape that was sent, found {shapes[1]}"
        reach = getattr(request, within) if isinstance(within, str) else within
        for key, array in getattr(answer, name).items():
            reason = None if np.isinf(reach) else too_far(getattr(request, name)[key], array, reach)
            if reason:
                return f"`{name}.{key}`: {reason}"
    return None


def stepped_from(answer: type, request: Any) -> NamedArrays | None:
    """The arrays of a request that its answer sends back after local steps; None where an answer holds others."""
    fields = [field for field in _fields(answer) if field.form != "number"]
    if not fields or not all(field.as_sent and field.within != np.inf for field in fields):
        return None
    sent = {field.name: getattr(request, field.name) for field in fields}
    return {f"{name}.{key}": array for name, arrays in sent.items() for key, array in arrays.items()}


def too_far(sent: NDArray[Any], back: NDArray[Any], within: float) -> str | None:
    """Why local steps from an array do not end at another, or None; points may be as far off as the farthest is."""
    reach = within + float(np.abs(sent).max(initial=0.0)) * (np.ndim(sent) > 1)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = float(np.abs(back - sent).max(initial=0.0))
    return None if moved <= reach else f"moved by {moved:.3g}, and local steps move nothing by more than {reach:.3g}"


def refusal_of(answer: Any, described: Any) -> str | None:
    """Why an answer cannot come from rows described so, or None; an answer without this method can be anything."""
    judge: Callable[[Any], str | None] | None = getattr(answer, "refusal", None)
    return None if judge is None else judge(described)


def table(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Rows (name, shape, meaning) of what a message holds: the page *what leaves a site* is made of them."""
    for spec in _fields(cls):
        name = f"{prefix}{spec.name}"
        if spec.form in ("message", "messages", "mapping"):
            yield from table(spec.inner, f"{name}." if spec.form == "message" else f"{name}.*.")
        else:
            shape = (
                f"[{', '.join(spec.letters)}]"
                if spec.form in ("array", "arrays")
                else spec.form.replace("json", "text")
            )
            yield f"{name}.*" if spec.form == "arrays" else name, shape, spec.meaning


def _under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> NamedArrays:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def packed(matrix: NDArray[Any]) -> NDArray[Any]:
    """The lower triangles [..., M (M + 1) / 2], row by row, of symmetric matrices [..., M, M]."""
    return np.asarray(matrix.reshape(*matrix.shape[:-2], -1)[..., _places(matrix.shape[-1])[0]])


def unpacked(lower: NDArray[Any], size: int) -> NDArray[Any]:
    """The inverse of :func:`packed`, where M is ``size``."""
    return np.asarray(lower.take(_places(size)[1], axis=-1))


@lru_cache(maxsize=4)
def _places(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the lower triangle of a matrix stands in its rows, one after another; and each entry in the triangle."""
    rows, columns = np.tril_indices(size)
    packed = np.empty((size, size), dtype=np.intp)
    packed[rows, columns] = packed[columns, rows] = np.arange(len(rows))
    return rows * size + columns, packed


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype)


def _text(content: bytes) -> NDArray[Any]:
    return np.frombuffer(content, dtype=np.uint8)
