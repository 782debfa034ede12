"""Keyword arguments of a Strategy: the fields of the configuration, documented where they are declared.

``PVI(num_inducing=100, seed=1)`` and the configuration ``model.num-inducing = 100``, ``seed = 1`` are the same thing.
A keyword is the field's name, behind that of its section where the method's table has a field of that name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel

from fedgp_flower.config import CoreConfig, RunConfig, parse
from fedgp_flower.options import MethodOptions, Section, Value, meanings

IN_A_PROGRAM: Mapping[str, Value] = {
    "baselines.linear": False,
    "baselines.local-only": False,
    "baselines.pooled": False,
    "keep-predictions": False,
    "evaluate-every": 1,
}
"""Defaults that differ where no run folder and no report is wanted."""
NOT_FOR_A_STRATEGY = (
    {"method", "dataset", "data_dir", "partitioner", "partition", "output_dir", "name", "resume"}
    | {"num_server_rounds", "extra"}  # rounds are an argument of `start`
)


@dataclass(frozen=True, slots=True)
class Keyword:
    """A keyword argument: its key in the configuration, its default, and what it is."""

    key: str
    default: object
    meaning: str


@cache
def keys(options: type[MethodOptions]) -> dict[str, Keyword]:
    """The keywords for a method's table and the shared sections."""
    tables: list[tuple[str, type[BaseModel]]] = [("", CoreConfig)]
    tables += [(section.table, section) for section in (options, options.shared) if section and section.table]
    shared = {n: info.default for n, info in CoreConfig.model_fields.items() if isinstance(info.default, Section)}
    tables += [(name, type(section)) for name, section in shared.items() if name not in NOT_FOR_A_STRATEGY]
    found: dict[str, Keyword] = {}
    for table, section in tables:
        for name, info in section.model_fields.items():
            if not info.exclude and (table or name not in NOT_FOR_A_STRATEGY | shared.keys()):
                key = f"{table}.{name}".removeprefix(".").replace("_", "-")
                default, meaning = IN_A_PROGRAM.get(key, info.default), meanings(section).get(name, "")
                found[f"{table}_{name}" if name in found else name] = Keyword(key, default, meaning)
    return found


def configured(method: str, options: type[MethodOptions], given: Mapping[str, Value | None]) -> RunConfig:
    """The configuration that the keyword arguments ``given`` stand for."""
    known = keys(options)
    flat: dict[str, Value] = {"method": method, **IN_A_PROGRAM}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; allowed: {', '.join(sorted(known))}"
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
        if value is not None:  # None: the default
            flat[known[name].key] = value
    return parse(flat, {method: options})


def signature(options: type[MethodOptions]) -> inspect.Signature:
    """What an editor shows: every keyword with its default."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(n, kind, default=k.default) for n, k in keys(options).items()])


def documented(doc: str | None, options: type[MethodOptions]) -> str:
    """The docstring of a Strategy with a section of its keywords, from the docstrings of the fields they stand for."""
    lines = [inspect.cleandoc(doc or ""), "", "Args:"]
    for name, keyword in keys(options).items():
        lines.append(f"    {name}: {keyword.meaning} (`{keyword.key}`, default {keyword.default!r})")
    return "\n".join(lines)
