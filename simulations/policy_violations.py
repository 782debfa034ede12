"""What a site refuses by its policy, rule by rule and method by method.

    python simulations/policy_violations.py

Runs of ``tests/violations.py`` on drawn rows, in one process, held to the same by the tests: three sites in order, and
one site for every rule that is violated. Written to ``simulations/results/policy_violations.md``.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import pandas as pd
from sfvi_runs import RESULTS, write_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from violations import METHODS, VIOLATIONS, refusal, require_others, violated


def main() -> None:
    """Make the runs and write the page."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows = []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            grid, strategy = violated(method, Path(folder))
        require_others(method, grid, strategy)
        for site, own in VIOLATIONS.items():
            said = refusal(method, site, grid, strategy) or "not refused: scores of a site's model are no statistics"
            left = ", ".join(f"{kind} {size:,}" for kind, size in grid.left(site).items()) or "0"
            policy = "" if not own.policy else own.policy.replace("\n", "; ")
            rows.append([site, method, own.tried, policy, said.replace("|", "\\|"), left])
        print(method, flush=True)
    usual = sum(not own.policy for own in VIOLATIONS.values()) * len(METHODS)
    lines = [
        "`python simulations/policy_violations.py`",
        "",
        f"{len(rows)} violations; the {usual} without a file are of the default policy. *left*: bytes of arrays and"
        " numbers that left the site in the whole run, by message, the refusal itself not counted: none, except where a"
        " rule is about messages and lets others leave. Every run went on with the three sites that were in order.",
    ]
    table = pd.DataFrame(rows, columns=["rule", "method", "tried", "file", "refusal", "left"])
    write_table(
        RESULTS / "policy_violations.md", "Violations of a policy", lines, table.sort_values("rule", kind="stable")
    )


if __name__ == "__main__":
    main()
