"""The configuration keys in words, read from the sections: for ``fedgp run --help`` and ``docs/configuration.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel

from fedgp_flower.config import CoreConfig
from fedgp_flower.options import BASIC, Section, meanings
from fedgp_flower.run.registry import option_classes
from fedgp_flower.typing import Json

SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}


class Key(NamedTuple):
    """A row of the reference: what a key may be and what it means, in Markdown."""

    name: str
    default: str
    allowed: str
    meaning: str
    basic: bool


def reference() -> list[Key]:
    """Every key of a run, those of tables after the others."""
    classes = option_classes().values()
    keys = {key.name: key for key in _keys(CoreConfig, "")}
    for section in classes:
        for key in _keys(section, f"{section.table}.") if section.table else ():
            keys.setdefault(key.name, key)
        for name, meaning in section.variants.items():
            key = keys[f"{section.table}.{section.variant_key}"]
            if f"`{name}`: " not in key.meaning:
                keys[key.name] = key._replace(meaning=f"{key.meaning} `{name}`: {meaning}.")
    return list(keys.values())


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    words, tables = meanings(section), {}
    schema = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        alias = str(field.alias)
        if isinstance(field.default, Section):
            tables[name] = type(field.default)
        elif not field.exclude:
            meaning = words.get(name, "").replace("|", "\\|")
            default, allowed = f"`{json.dumps(field.default, ensure_ascii=False)}`", _allowed(schema[alias])
            yield Key(f"{prefix}{alias}", default, allowed, meaning, BASIC in field.metadata)
    for name, table in tables.items():
        yield from _keys(table, f"{prefix}{name}.")


def _allowed(schema: Json) -> str:
    """Type and range of a key."""
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    limits = [f"{sign} {schema[name]:g}" for name, sign in SIGNS.items() if name in schema]
    return " ".join([KINDS[schema["type"]], ", ".join(limits)]).strip()


def basic_keys() -> str:
    """The basic keys as lines for a terminal, each with the first sentence of its meaning."""
    lines = [
        f"{key.name} = {key.default}   {re.split(r'(?<=[.;]) ', key.meaning)[0].rstrip('.;')}".replace("`", "")
        for key in reference()
        if key.basic
    ]
    return "\n\n".join(["Basic keys; docs/configuration.md lists all of them.", *lines])
