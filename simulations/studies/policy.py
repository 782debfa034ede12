"""Violations of a policy.

Every rule of a site's policy, violated under a method of each kind: three sites in order, and one for every rule.
*Left*: bytes of arrays and numbers that left the site in the whole run, by message, the refusal itself not counted:
none, except where a rule is about messages and lets others leave. Every run went on with the three sites in order.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from simulations.common import ROOT, Row


def study(methods: tuple[str, ...] = ("",)) -> Iterator[Row]:
    """A row for each rule and method."""
    sys.path.insert(0, str(ROOT / "tests"))
    import violations as tests

    rows = []
    for method in tests.METHODS if methods == ("",) else methods:
        with tempfile.TemporaryDirectory() as folder:
            grid, strategy = tests.violated(method, Path(folder))
        tests.require_others(method, grid, strategy)
        for site, rule in tests.VIOLATIONS.items():
            said = (
                tests.refusal(method, site, grid, strategy) or "not refused: scores of a site's model are no statistics"
            )
            left = ", ".join(f"{kind} {size:,}" for kind, size in grid.left(site).items()) or "0"
            row = {"rule": site, "method": method, "tried": rule.tried, "file": (rule.policy or "").replace("\n", "; ")}
            rows.append(row | {"refusal": said, "left": left})
    yield from sorted(rows, key=lambda row: row["rule"])
