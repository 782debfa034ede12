"""What a server sends a site once: the site keeps it among its own arrays and reads it into later messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from fedgp_flower.clients.base import Request
from fedgp_flower.shapes import NamedArrays

PREFIX = "standing."
FACTS = PREFIX + "facts"
DIGEST, NAMES, LACKS = "standing", "standing-names", "lacks"
"""Config keys of a message that names what stands, and that carries it; metric of a reply by a site that has it not."""


def carried(request: Request) -> NamedArrays:
    """What to keep of a message that carries what stands; nothing of another."""
    if NAMES not in request.settings:
        return {}
    names = json.loads(str(request.settings[NAMES]))
    facts = {
        "digest": request.settings[DIGEST],
        "settings": {name: request.settings[name] for name in names["settings"]},
    }
    arrays = {PREFIX + name: np.array(request.arrays[name]) for name in names["arrays"]}
    return {**arrays, FACTS: np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)}


def completed(request: Request, kept: NamedArrays) -> Request | None:
    """The message as if it carried everything; None where it names what this site has not.

    Args:
        request: As it came.
        kept: The site's arrays, :func:`carried` of some earlier message among them.
    """
    if DIGEST not in request.settings or NAMES in request.settings:
        return request
    facts: dict[str, Any] = json.loads(kept[FACTS].tobytes()) if FACTS in kept else {}
    if facts.get("digest") != request.settings[DIGEST]:
        return None
    arrays = {name.removeprefix(PREFIX): array for name, array in kept.items() if name.startswith(PREFIX)}
    del arrays["facts"]
    return replace(request, arrays={**arrays, **request.arrays}, settings={**facts["settings"], **request.settings})
