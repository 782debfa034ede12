"""Messages: frozen dataclasses whose annotations define their encoding.

One declaration gives the encoding as named arrays, the decoding with checks, the checkpoint of a state, the sum over
sites, and the table of the data that a site sends::

    @message("query.statistics", summand=True)
    class Statistics:
        gram: Float[ndarray, "M M"] = leaves("W Wᵀ, W = L⁻¹ k(Z, X)", symmetric=True)
        moment: Float[ndarray, "M"] = leaves("W y")

A field is an array with a shape (a first axis ``*C`` is optional), another message, ``tuple[Message, ...]``,
``Mapping[str, Message]``, ``Mapping[str, ndarray]``, a number, one of these ``| None`` (None is not sent), or JSON.
Arrays are sent as ``field`` or ``outer.field``, numbers in Flower's configuration or metrics (:func:`to_parts`), and
JSON as text in an array of bytes.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from fedgp_flower import compensated_sums
from fedgp_flower.errors import ProtocolError, first_of
from fedgp_flower.lazy import lapack
from fedgp_flower.typing import Facts, NamedArrays

M = TypeVar("M")

ECHOED = ("run", "round", "communication")
"""Config keys of a question that its reply must repeat."""

_NUMBERS: Mapping[Any, str] = {float: "f", int: "iu", bool: "b"}
_KEYS = TypeAdapter(list[str])
_KIND, _SUMMAND, _PUBLIC = "__message_kind__", "__message_summand__", "__message_public__"
_COUNTED = "num_parameters"

ROUNDING = 1e-14
"""Share of the largest entry of a matrix, for each of its rows, that its factor may lose."""

Layout: TypeAlias = list[list[Any]]
"""Name, shape and type (``int64`` or ``float64``) of each array of a summand."""


def leaves(
    meaning: str,
    *,
    symmetric: bool = False,
    rank: str = "",
    as_sent: bool = False,
    within: float | str = np.inf,
    default: Any = dataclasses.MISSING,
) -> Any:
    """Declare a field of a message; the owner of a site reads its ``meaning``.

    ``symmetric`` matrices are sent packed. Without a mask, a positive semi-definite one whose ``rank`` is at most the
    named number of rows is sent as its factor if that is smaller. Arrays ``as_sent`` have the names and shapes of the
    request's field and differ from it by at most ``within``, a number or the name of a number in the request.
    """
    facts = {"meaning": meaning, "symmetric": symmetric, "rank": rank, "as_sent": as_sent, "within": within}
    return dataclasses.field(default=default, metadata=facts)


@dataclass_transform(frozen_default=True, field_specifiers=(leaves, dataclasses.field))
def message(
    kind: str = "", *, summand: bool = False, public: bool = False, counts: str = ""
) -> Callable[[type[M]], type[M]]:
    """Declare a message. ``kind`` is the Flower message type that it answers; requests, parts and states have none.

    The server uses only the sum of a ``summand`` over sites. A ``public`` message may be sent without a mask.
    ``counts`` is its number of parameters: a sum of letters of shapes, fields of named arrays and constants.
    """

    def declare(cls: type[M]) -> type[M]:
        frozen = dataclasses.dataclass(frozen=True)(cls)
        setattr(frozen, _KIND, kind)
        setattr(frozen, _SUMMAND, summand)
        setattr(frozen, _PUBLIC, public)
        if counts:
            setattr(frozen, _COUNTED, lambda answer: _counted(answer, counts))
        return frozen

    return declare


def is_message(cls: object) -> bool:
    """Return whether a class was declared by :func:`message`."""
    return isinstance(cls, type) and _KIND in cls.__dict__


def count_parameters(values: Mapping[str, NDArray[Any]]) -> int:
    """Count parameters: M points [M, D] count as M, other arrays by their size."""
    return sum(len(array) if array.ndim > 1 and len(array) > 1 else array.size for array in values.values())


def _counted(answer: object, counts: str) -> int:
    """Return the sum of the lengths, numbers of parameters and constants in ``counts``."""
    named = {spec.name: getattr(answer, spec.name) for spec in _fields(type(answer)) if spec.form == "arrays"}
    known = _lengths(answer) | {name: count_parameters(arrays) for name, arrays in named.items()}
    parts = counts.split()
    if unknown := [part for part in parts if not part.isdigit() and part not in known]:
        raise ProtocolError(
            f"{type(answer).__name__}: `counts` = {counts!r}: {unknown[0]!r} is none of {sorted(known)}"
        )
    return sum(int(part) if part.isdigit() else known[part] for part in parts)


def _lengths(value: object) -> dict[str, int]:
    """Return the length of each letter in the shapes of a message."""
    found: dict[str, int] = {}
    for spec in _fields(type(value)):
        content = getattr(value, spec.name)
        if spec.form == "array" and content is not None:
            found |= zip(spec.letters, spec.lengths(np.shape(content)), strict=False)
        elif spec.form == "message" and content is not None:
            found |= _lengths(content)
    return found


def kind_of(cls: type) -> str:
    """Return the Flower message type of a class of answers."""
    return str(getattr(cls, _KIND))


def is_summand(cls: type) -> bool:
    """Return whether answers of a class are summed over sites."""
    return bool(getattr(cls, _SUMMAND))


def is_public(cls: object) -> bool:
    """Return whether answers of this class may be sent without a mask."""
    return bool(getattr(cls, _PUBLIC, False))


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a message with its parsed annotation."""

    name: str
    form: str
    """``array``, ``number``, ``message``, ``messages`` (tuple), ``mapping`` (of messages), ``arrays`` or ``json``."""
    inner: Any
    optional: bool
    has_default: bool
    meaning: str = ""
    symmetric: bool = False
    rank: str = ""
    as_sent: bool = False
    within: float | str = np.inf

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """Letters of the shape of an array."""
        return tuple(self.inner.dim_str.removeprefix("*").split())

    @property
    def open(self) -> bool:
        """Whether the first axis may be missing, with length 0."""
        return bool(self.inner.dim_str.startswith("*"))

    def lengths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the letters for a shape."""
        return (0, *shape) if self.open and len(shape) < len(self.letters) else shape

    @cached_property
    def dtypes(self) -> list[str]:
        """Allowed types of an array; the only floating-point type is float64."""
        return [name for name in self.inner.dtypes if name == "float64" or "float" not in name]


def _parsed_fields(cls: type) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for spec in dataclasses.fields(cls):
        hint, optional = hints[spec.name], type(None) in typing.get_args(hints[spec.name])
        if optional:
            [hint] = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        has_default = (spec.default, spec.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        try:
            form = _form(hint)
        except PydanticSchemaGenerationError as error:
            example = "an array has a shape, Float[ndarray, 'N D']"
            raise ProtocolError(f"{cls.__name__}.{spec.name}: {hint} cannot be sent; {example}") from error
        found.append(_Field(spec.name, *form, optional, has_default, **spec.metadata))
    return tuple(found)


_fields: Callable[[type], tuple[_Field, ...]] = cache(_parsed_fields)


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


def encode(value: object) -> NamedArrays:
    """Encode a message as named arrays."""
    arrays: NamedArrays = {}
    for spec in _fields(type(value)):
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
    # The field's name holds the count or the keys; each part is under its number.
    keyed = spec.form == "mapping"
    arrays: NamedArrays = {spec.name: _text(_KEYS.dump_json(list(content))) if keyed else np.array(len(content))}
    for index, item in enumerate(content.values() if keyed else content):
        arrays |= _under(f"{spec.name}.{index}", encode(item))
    return arrays


def _named(spec: _Field, content: Any) -> NamedArrays:
    """Return the array or the named arrays of a field under their names in a message."""
    return {spec.name: content} if spec.form == "array" else _under(spec.name, content)


def _under(prefix: str, arrays: NamedArrays) -> NamedArrays:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def _text(content: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(content, dtype=np.uint8)


def decode(cls: type[M], arrays: NamedArrays, sizes: Mapping[str, int] | None = None) -> M:
    """Decode named arrays; ``sizes`` are known lengths, as ``{"M": 50}``. Raise ProtocolError for other arrays."""
    reader = _Reader(cls.__name__, dict(sizes or {}), arrays)
    found = reader.read(cls, "")
    unknown = sorted(set(arrays) - reader.seen)
    if unknown:
        raise ProtocolError(f"{cls.__name__}: unknown arrays {first_of(unknown)}")
    return found


def to_parts(value: object) -> tuple[NamedArrays, dict[str, float | int]]:
    """Split a message into arrays and numbers for Flower's configuration or metrics; a bool becomes an integer.

    Matrices of low rank become factors, which :func:`decode` reads as well.
    """
    arrays = encode(value)
    numbers = {spec.name: spec.inner for spec in _fields(type(value)) if spec.form == "number" and spec.name in arrays}
    for spec in (spec for spec in _fields(type(value)) if spec.rank):
        matrices, rows = getattr(value, spec.name), int(np.max(getattr(value, spec.rank)))
        if 2 * rows < matrices.shape[-1] and (factors := low_rank_factors(matrices, rows)) is not None:
            arrays[spec.name] = factors if factors.ndim == len(spec.letters) else factors[None]
    rest = {name: array for name, array in arrays.items() if name not in numbers}
    return rest, {name: (int if number is bool else number)(arrays[name]) for name, number in numbers.items()}


def from_parts(cls: type[M], arrays: NamedArrays, numbers: Facts, sizes: Mapping[str, int] | None = None) -> M:
    """Decode the parts of :func:`to_parts`; undeclared numbers are ignored."""
    declared = {spec.name: spec.inner for spec in _fields(cls) if spec.form == "number" and spec.name in numbers}
    found = {name: np.asarray(numbers[name]) for name in declared}
    truths = {name: array == 1 for name, array in found.items() if declared[name] is bool and array in (0, 1)}
    return decode(cls, {**arrays, **found, **truths}, sizes)


@dataclasses.dataclass
class _Reader:
    """Decoder of a message; it records the names it has read and the length of each letter."""

    title: str
    sizes: dict[str, int]
    arrays: NamedArrays
    seen: set[str] = dataclasses.field(default_factory=set)

    def read(self, cls: type[M], prefix: str) -> M:
        values = {}
        for spec in _fields(cls):
            name = f"{prefix}{spec.name}"
            is_sent = name in self.arrays or any(key.startswith(f"{name}.") for key in self.arrays)
            if is_sent or (spec.form == "arrays" and not spec.optional):
                values[spec.name] = self._value(spec, name)
            elif spec.optional:
                values[spec.name] = None
            elif not spec.has_default:
                raise self._error(name, "is missing")
        return cls(**values)

    def _value(self, spec: _Field, name: str) -> object:
        if spec.form == "message":
            return self.read(spec.inner, f"{name}.")
        if spec.form == "arrays":
            keys = [key for key in self.arrays if key.startswith(f"{name}.")]
            return {key.removeprefix(f"{name}."): self._array(spec, key) for key in keys}
        if name not in self.arrays:
            raise self._error(name, "is missing")
        match spec.form:
            case "array":
                found: object = self._array(spec, name)
            case "number":
                found = self._number(spec.inner, name)
            case "json":
                found = self._text(spec.inner, name)
            case "mapping":
                keys = self._text(_KEYS, name)
                found = {key: self.read(spec.inner, f"{name}.{place}.") for place, key in enumerate(keys)}
            case _:
                count = int(self._number(int, name))
                if not 0 <= count <= len(self.arrays):
                    raise self._error(name, "is not a count of parts")
                found = tuple(self.read(spec.inner, f"{name}.{place}.") for place in range(count))
        return found

    def _text(self, adapter: TypeAdapter[M], name: str) -> M:
        self.seen.add(name)
        try:
            return adapter.validate_json(np.asarray(self.arrays[name], dtype=np.uint8).tobytes())
        except (ValidationError, ValueError, TypeError) as error:
            raise self._error(name, "is not the expected JSON") from error

    def _number(self, kind: type[float], name: str) -> float:
        self.seen.add(name)
        value = np.asarray(self.arrays[name])
        if value.shape != () or value.dtype.kind not in _NUMBERS[kind]:
            raise self._error(name, f"expected a single {kind.__name__}")
        if not np.isfinite(value):
            raise self._error(name, "is not finite")
        return kind(value)

    def _array(self, spec: _Field, name: str) -> NDArray[Any]:
        self.seen.add(name)
        array, size = np.asarray(self.arrays[name]), 0
        shape = array.shape
        factored = bool(spec.rank) and array.ndim == len(spec.letters)
        if factored:
            lone = int(spec.open and len(array) == 1)
            shape = (*shape[lone:-2], shape[-1], shape[-1])
        elif spec.symmetric:
            axes = len(spec.letters) - 1
            length = shape[-1] if axes - spec.open <= array.ndim <= axes else -1
            size = int((np.sqrt(8 * max(length, 0) + 1) - 1) / 2)
            if size * (size + 1) // 2 != length:
                raise self._error(name, f"shape {shape} is no packed symmetric matrix")
            shape = (*shape[:-1], size, size)
        if str(array.dtype) not in spec.dtypes:
            raise self._error(name, f"type {array.dtype}, expected {' or '.join(spec.dtypes)}")
        if spec.letters != ("_",):
            self._match(name, spec.lengths(shape), spec.letters)
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise self._error(name, f"{int((~np.isfinite(array)).sum())} of {array.size} entries are not finite")
        if factored:
            with np.errstate(over="ignore", invalid="ignore"):
                found = (array.mT @ array).reshape(shape)
            if not np.isfinite(found).all():
                raise self._error(name, "the matrix of this factor is not finite")
            return found
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
    """Return the sum of summands, the same in each order and under masks; reads one at a time."""
    sums: list[NDArray[Any]] = []
    last: M | None = None
    for last in parts:
        terms = (array for _, array in _entries(last))
        sums = list(map(compensated_sums.plus, sums, terms)) if sums else list(map(compensated_sums.start, terms))
    if last is None:
        raise ProtocolError("a total needs at least one site")
    return _filled(last, map(compensated_sums.rounded, sums))


def weighted(summand: M, weight: float) -> M:
    """Return the summand with this weight of every row."""
    return _filled(summand, (np.asarray(weight * array) for _, array in _entries(summand)))


def shapes_of_terms(value: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return name and shape of all that :func:`add` adds; the same for all summands of a total."""
    return tuple((name, array.shape) for name, array in _entries(value))


def _entries(value: object) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays and numbers of a message with their names."""
    for spec in _fields(type(value)):
        content = getattr(value, spec.name)
        if spec.form == "message":
            yield from _entries(content)
        elif spec.form == "arrays":
            yield from ((f"{spec.name}.{key}", np.asarray(content[key])) for key in sorted(content))
        else:
            yield spec.name, np.asarray(content)


def _filled(value: M, entries: Iterator[NDArray[Any]]) -> M:
    """Return a message like ``value`` with the arrays and numbers of other :func:`_entries`."""
    found: dict[str, Any] = {}
    for spec in _fields(type(value)):
        content = getattr(value, spec.name)
        if spec.form == "message":
            found[spec.name] = _filled(content, entries)
        elif spec.form == "arrays":
            found[spec.name] = {key: next(entries) for key in sorted(content)}
        else:
            found[spec.name] = spec.inner(next(entries)) if spec.form == "number" else next(entries)
    return type(value)(**found)


def layout(cls: type, sizes: Mapping[str, int], request: object) -> Layout | None:
    """Return the arrays of an answer to a request before it arrives; None if a length is unknown."""
    cells: Layout = []
    for spec in _fields(cls):
        if spec.as_sent and not spec.symmetric:
            sent = _named(spec, getattr(request, spec.name))
            cells += [[name, list(np.shape(array)), "float64"] for name, array in sent.items()]
        elif spec.form == "array" and not spec.optional:
            shape = [int(letter) if letter.isdigit() else sizes.get(letter, -1) for letter in spec.letters]
            shape = shape[1:] if spec.open and shape[0] <= 0 else shape
            if -1 in shape:
                return None
            shape = [*shape[:-2], shape[-1] * (shape[-1] + 1) // 2] if spec.symmetric else shape
            cells.append([spec.name, shape, "float64" if "float64" in spec.dtypes else "int64"])
        elif spec.form == "number" and spec.inner is not bool:
            cells.append([spec.name, [], "float64" if spec.inner is float else "int64"])
        elif spec.form == "message" and (nested := layout(spec.inner, sizes, request)) is not None:
            cells += [[f"{spec.name}.{name}", shape, dtype] for name, shape, dtype in nested]
        else:
            return None
    return cells


def misfit(request: object, answer: object) -> str | None:
    """Return how the arrays ``as_sent`` of an answer differ from the request in names, shapes or distance, or None."""
    for spec in (spec for spec in _fields(type(answer)) if spec.as_sent):
        sent, back = (_named(spec, getattr(part, spec.name)) for part in (request, answer))
        for name in sorted({**sent, **back}):
            shapes = [str(np.shape(arrays[name])) if name in arrays else "nothing" for arrays in (sent, back)]
            if shapes[0] != shapes[1]:
                return f"`{name}`: expected {shapes[0]}, the shape that was sent, found {shapes[1]}"
        reach = getattr(request, spec.within) if isinstance(spec.within, str) else spec.within
        for name, array in back.items():
            if np.isfinite(reach) and (reason := too_far(sent[name], array, reach)):
                return f"`{name}`: {reason}"
    return None


def stepped_from(answer: type, request: object) -> NamedArrays | None:
    """Return the arrays of a request that its answer returns after local steps; None if it has other arrays."""
    fields = [spec for spec in _fields(answer) if spec.form != "number"]
    if not fields or not all(spec.form == "arrays" and spec.as_sent and spec.within != np.inf for spec in fields):
        return None
    return {name: array for spec in fields for name, array in _under(spec.name, getattr(request, spec.name)).items()}


def too_far(sent: NDArray[Any], back: NDArray[Any], within: float) -> str | None:
    """Return why local steps cannot lead from ``sent`` to ``back``, or None; points may also move by their range."""
    reach = within + float(np.abs(sent).max(initial=0.0)) * (np.ndim(sent) > 1)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = float(np.abs(back - sent).max(initial=0.0))
    return None if moved <= reach else f"moved by {moved:.3g}, and local steps move nothing by more than {reach:.3g}"


def refusal_of(answer: object, described: object) -> str | None:
    """Return why an answer contradicts the description of the rows, or None; some messages cannot be checked."""
    judge = getattr(answer, "refusal", None)
    return None if judge is None else judge(described)


def table(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (name, shape, meaning) of each field of a message, for the page *what leaves a site*."""
    for spec in _fields(cls):
        name = f"{prefix}{spec.name}"
        if spec.form in ("message", "messages", "mapping"):
            yield from table(spec.inner, f"{name}." if spec.form == "message" else f"{name}.*.")
        else:
            shaped = spec.form in ("array", "arrays")
            axes = "*" if shaped and spec.letters == ("_",) else ", ".join(spec.letters) if shaped else ""
            shape = f"[{axes}]" if shaped else spec.form.replace("json", "text")
            yield f"{name}.*" if spec.form == "arrays" else name, shape, spec.meaning


def packed(matrix: NDArray[Any]) -> NDArray[Any]:
    """Return the lower triangles [..., M (M + 1) / 2], row by row, of symmetric matrices [..., M, M]."""
    return np.asarray(matrix.reshape(*matrix.shape[:-2], -1)[..., _places(matrix.shape[-1])[0]])


def unpacked(lower: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the matrices of :func:`packed` triangles, with M = ``size``."""
    return np.asarray(lower.take(_places(size)[1], axis=-1))


def low_rank_factors(matrices: NDArray[Any], rank: int) -> NDArray[Any] | None:
    """Return R [..., r, M] with Rᵀ R = A for positive semi-definite matrices A [..., M, M] of at most this rank r.

    R is the pivoted Cholesky factor of A and holds nothing that A does not. None for other matrices, by the diagonal.
    """
    size = matrices.shape[-1]
    factors = np.zeros((math.prod(matrices.shape[:-2]), rank, size))
    for factor, matrix in zip(factors, matrices.reshape(-1, size, size), strict=True):
        diagonal = np.diagonal(matrix)
        lower, pivots, found, _ = lapack.dpstrf(matrix, lower=1, tol=np.finfo(float).eps * float(diagonal.max()))
        found = min(found, rank)
        factor[:found, pivots - 1] = np.tril(lower[:, :found]).T
        left = np.abs(diagonal - np.square(factor).sum(0)).max()
        if not left <= ROUNDING * size * float(diagonal.max()):  # also if it is NaN
            return None
    return factors.reshape(*matrices.shape[:-2], rank, size)


@lru_cache(maxsize=4)
def _places(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return flat indices of the lower triangle in a matrix, and of each entry of the matrix in the triangle."""
    rows, columns = np.tril_indices(size)
    packed = np.empty((size, size), dtype=np.intp)
    packed[rows, columns] = packed[columns, rows] = np.arange(len(rows))
    return rows * size + columns, packed
