"""The user's run configuration, in a TOML file and ``KEY=VALUE`` words, and the reference of the keys."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from fedgp_flower.config import CoreConfig, assignments, defaults, flatten
from fedgp_flower.data.catalogue import data_folder
from fedgp_flower.data.tables import table_stem, tables_in
from fedgp_flower.files import read_toml
from fedgp_flower.options import BASIC, FlatConfig, Section, Value, meanings
from fedgp_flower.run.registry import default_config, option_classes, parse_config
from fedgp_flower.typing import Json

SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def read_config(path: Path) -> dict[str, Value]:
    """Read the flat keys of a TOML file with nested tables. Raise ConfigError if it is missing or invalid."""
    return flatten(read_toml(path))


def parse_assignments(words: Sequence[str]) -> dict[str, Value]:
    """Parse ``KEY=VALUE`` words; see :func:`fedgp_flower.config.assignments`."""
    return assignments(words, defaults(option_classes().values()))


def complete_config(given: FlatConfig, source: str = "") -> dict[str, Value]:
    """Validate keys, make paths absolute, and add a name for the run's folder."""
    config = parse_config(given)
    out = dict(given) | {"output-dir": str(Path(config.output_dir).absolute())}
    if folder := data_folder(config.data_dir):
        out["data-dir"] = str(folder)
    table = Path(config.dataset)
    paths = [table] if table.is_file() else tables_in(config.dataset)
    if paths:
        out["dataset"] = ",".join(str(path.resolve()) for path in paths)
    stem = "-".join(table_stem(path) for path in paths) if len(paths) < 5 else f"{len(paths)}-sites"
    out["name"] = config.run_name(source or stem)
    return out


def for_flower(config: FlatConfig) -> dict[str, Value]:
    """Return the keys for Flower, which only allows those in ``pyproject.toml``; all others go into ``extra``."""
    listed = default_config()
    further = {key: value for key, value in config.items() if key not in listed}
    if not further:
        return dict(config)
    words = [
        shlex.quote(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        for key, value in further.items()
    ]
    kept = {key: value for key, value in config.items() if key in listed}
    return kept | {"extra": " ".join(filter(None, [str(config.get("extra", "")), *words]))}


def run_folder(config: FlatConfig) -> Path:
    """Return the folder of a run with this completed configuration."""
    return Path(str(config["output-dir"])) / str(config["name"])


def reference() -> dict[str, Json]:
    """Return ``default``, ``allowed`` and ``meaning`` of every key, in Markdown, and whether it is ``basic``."""
    keys = dict(_keys(CoreConfig, ""))
    for section in option_classes().values():
        for name, key in _keys(section, f"{section.table}.") if section.table else ():
            keys.setdefault(name, key)
        for name, meaning in section.variants.items():
            key = keys[f"{section.table}.{section.variant_key}"]
            if f"`{name}`: " not in key["meaning"]:
                key["meaning"] += f" `{name}`: {meaning}."
    return keys


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Json]]:
    words, tables = meanings(section), {}
    schemas = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        alias = str(field.alias)
        if isinstance(field.default, Section):
            tables[name] = type(field.default)
        elif not field.exclude:
            meaning = words.get(name, "").replace("|", "\\|")
            schema = schemas[alias]
            limits = ", ".join(f"{sign} {schema[limit]:g}" for limit, sign in SIGNS.items() if limit in schema)
            choices = ", ".join(f"`{choice}`" for choice in schema.get("enum", ()))
            allowed = choices or f"{schema['type'].replace('string', 'text')} {limits}".strip()
            key = {"default": json.dumps(field.default, ensure_ascii=False), "allowed": allowed, "meaning": meaning}
            yield f"{prefix}{alias}", {**key, "basic": BASIC in field.metadata}
    for name, table in tables.items():
        yield from _keys(table, f"{prefix}{name}.")


def table_of(*, basic: bool) -> list[str]:
    """Return the lines of a Markdown table of the basic keys, or of all others."""
    keys = {name: key for name, key in reference().items() if key["basic"] == basic}
    rows = (f"| `{name}={key['default']}` | {key['allowed']} | {key['meaning']} |" for name, key in keys.items())
    return ["| key=default | allowed | meaning |", "|---|---|---|", *rows]


def basic_keys() -> str:
    """Return the basic keys as text for a terminal, each with the first sentence of its meaning."""
    lines = [
        f"{name} = {key['default']}   {re.split(r'(?<=[.;]) ', key['meaning'])[0].rstrip('.;')}".replace("`", "")
        for name, key in reference().items()
        if key["basic"]
    ]
    return "\n\n".join(["Basic keys; `fedgp keys` has all of them.", *lines])
