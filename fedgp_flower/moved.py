"""Names of earlier versions with their replacements, for errors on old configurations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path


@cache
def moved() -> tuple[dict[str, str], dict[str, str]]:
    """Return old values of ``method`` and old keys, each with its replacement as the end of a sentence."""
    table = json.loads(Path(__file__).with_name("moved.json").read_text(encoding="utf-8"))
    return table["methods"], {key: words for words, keys in table["keys"].items() for key in keys.split()}
