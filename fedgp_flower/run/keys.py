"""The configuration keys in words, read from the sections: for ``fedgp run --help`` and ``docs/configuration.md``."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from fedgp_flower.config import CoreConfig, defaults
from fedgp_flower.options import Basic, Section, Value
from fedgp_flower.run.registry import option_classes

SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
KINDS: Mapping[object, str] = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}


class Key(NamedTuple):
    """A row of the reference: what a key may be and what it means, in Markdown."""

    name: str
    default: str
    allowed: str
    meaning: str
    basic: bool


def docstrings(section: type[Section]) -> dict[str, str]:
    """The docstring below each field of a section and of the sections that it extends."""
    found: dict[str, str] = {}
    for parent in reversed([parent for parent in section.__mro__ if issubclass(parent, Section)]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                words = " ".join(str(ast.literal_eval(below.value)).replace("``", "`").split())
                found[field.target.id] = words.replace("|", "\\|")
    return found


def reference() -> list[Key]:
    """Every key of a run, those of tables after the others."""
    classes = option_classes().values()
    known = defaults(classes)
    sections = {"": CoreConfig} | {f"{section.table}.": section for section in classes if section.table}
    keys = {}
    for prefix, section in sections.items():
        for name, field, words in _fields(section, prefix):
            basic = any(isinstance(mark, Basic) for mark in field.metadata)
            keys[name] = Key(name, _written(known[name]), _allowed(field), words, basic)
    for section in classes:
        for name, meaning in section.variants.items():
            key = keys[f"{section.table}.{section.variant_key}"]
            if f"`{name}`: " not in key.meaning:
                keys[key.name] = key._replace(meaning=f"{key.meaning} `{name}`: {meaning}.")
    return list(keys.values())


def _fields(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo, str]]:
    words, tables = docstrings(section), {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            tables[name] = field.annotation
        elif not field.exclude:
            yield f"{prefix}{field.alias}", field, words.get(name, "")
    for name, table in tables.items():
        yield from _fields(table, f"{prefix}{name}.")


def _allowed(field: FieldInfo) -> str:
    """Type and range of a field."""
    if choices := get_args(field.annotation):
        return ", ".join(f"`{choice}`" for choice in choices)
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for kind, (name, sign) in SIGNS.items()
        if isinstance(limit, kind)
    ]
    return " ".join([KINDS[field.annotation], ", ".join(limits)]).strip()


def _written(value: Value) -> str:
    """A default as TOML has it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def basic_keys() -> str:
    """The basic keys as lines for a terminal, each with the first sentence of its meaning."""
    lines = [
        f"{key.name} = {key.default}   {re.split(r'(?<=[.;]) ', key.meaning)[0].rstrip('.;')}".replace("`", "")
        for key in reference()
        if key.basic
    ]
    return "\n\n".join(["Basic keys; docs/configuration.md lists all of them.", *lines])
