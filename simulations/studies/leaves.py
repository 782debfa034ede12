"""What leaves a site, message by message, as the code declares it.

`[M, D]` are lengths of an array, M inducing points and D inputs. Under masks the server sees of a message only the
*total* over sites, or each site's answer *as it is*, or the message is *never* sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fedgp_flower.messages import is_message, is_public, is_summand, kind_of, table
from fedgp_flower.run.leaves import WORDS, answers
from fedgp_flower.run.registry import BUILT_IN
from simulations.common import Row

SIMULATED = frozenset({"query.pooled", "query.boosted", "query.predictions"})
"""Kinds that no real site answers."""


def study() -> Iterator[Row]:
    """A row for each message and each of its answers."""
    methods: dict[tuple[str, Any], list[str]] = {}
    for name in BUILT_IN:
        for found in answers(name):
            methods.setdefault(found, []).append(name)
    everyone = {tuple(BUILT_IN): "all", tuple(n for n in BUILT_IN if BUILT_IN[n].federated): "all but baselines"}
    for (kind, answer), names in sorted(methods.items(), key=lambda item: (item[0][0], item[1])):
        yield {
            "message": f"`{kind}`",
            "methods": everyone.get(tuple(names)) or ", ".join(f"`{name}`" for name in names),
            "under masks": _under_masks(kind, answer),
            "what leaves": ("simulation only: " if kind in SIMULATED else "") + _content(kind, answer),
        }


def _under_masks(kind: str, answer: Any) -> str:
    if kind in {"query.keys", "query.describe"} or (answer is not None and is_public(answer)):
        return "as it is"
    return "total" if answer is not None and is_summand(answer) else "never"


def _content(kind: str, answer: Any) -> str:
    if answer is None:
        return WORDS[kind]
    if is_message(answer.__base__) and kind_of(answer.__base__):
        return f"what `{kind_of(answer.__base__)}` holds"
    fields: dict[str, list[str]] = {}
    for name, shape, words in table(answer):
        known = f"{shape} " if re.fullmatch(r"\[\w+(, \w+)*\]", shape) else ""
        fields.setdefault(f"{known}{words}", []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)} {words}" for words, names in fields.items())
