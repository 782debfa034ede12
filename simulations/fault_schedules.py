"""What lies and lost messages do: a table of sizes of lies, and runs under drawn schedules of faults.

    python simulations/fault_schedules.py [lies] [schedules] [--count 500] [--seconds 1e9] [--ledger LEDGER.jsonl]

``lies``: one of four sites spoils every reply from the first round on, for each method and each rule that aggregates.
``schedules``: faults drawn from a seed befall one site, or all. Tiny data, the in-process Grid: a run takes a second.
What is done stands in the ledger, and is not done again; the page says all of it.
"""

from __future__ import annotations

import collections
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ledger import command_line, done, versions
from schedules import METHODS, Schedule, drawn, ended

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "fsgp average, fedmedian": ("fsgp average", {"fsgp__server_optimizer": "fedmedian"}),
    "fsgp average, fedtrimmedavg": ("fsgp average", {"fsgp__server_optimizer": "fedtrimmedavg"}),
    "fgpr, fedmedian": ("fgpr", {"fgpr__server_optimizer": "fedmedian"}),
    "fedmgp exact, agreement": ("fedmgp exact", {"fedmgp__aggregation": "agreement"}),
    "fedmgp, median": ("fedmgp", {"fedmgp__aggregation": "median"}),
    "fedmgp, trimmed-mean": ("fedmgp", {"fedmgp__aggregation": "trimmed-mean"}),
    "fedmgp, norm-clipped": ("fedmgp", {"fedmgp__aggregation": "norm-clipped"}),
}
LIES = (
    ("scale", 1.1),
    ("scale", 2.0),
    ("scale", 10.0),
    ("scale", 1e3),
    ("flip", -1.0),
    ("entry", 3.0),
    ("entry", 1e300),
)
ROUNDS = 4
"""Three failures in a row leave a site out."""
COLUMNS = ("honest", "without", *(f"{kind} {size:g}" if kind != "flip" else kind for kind, size in LIES))
SUMS = (
    "Σ y² is that of its description, Σ k(x, x) that of most sites per row, tr A ≤ Σ k(x, x); A ⪰ 0 and |A⁻½b|² ≤ Σ y²"
    " along drawn directions, altogether where the total's do not hold"
)
STEPS = "local steps move nothing by more than 10 (logarithms and standardised units)"
FACTOR = "symmetric, precision not negative, numbers below 1e8, the product of all proper"
LARGE = "numbers are at most 300 times the median site's per row, where there are three"
BOUNDS = (
    ("fsgp profiled, exact", SUMS, "–"),
    ("fsgp average", f"{STEPS}; the closing sums as above", "`fsgp.server-optimizer` = fedmedian, fedtrimmedavg"),
    ("fsgp classes", f"log p ≤ 0, curvature ⪰ 0; {LARGE}", "–"),
    ("fgpr", STEPS, "`fgpr.server-optimizer` = fedmedian, fedtrimmedavg"),
    ("pvi", f"pseudo-rows no more than rows, {FACTOR}; Σ y² as above where sums are asked", "–"),
    ("pvi-glm, pvi-bnn", FACTOR, "–"),
    ("fedmgp exact", "precisions ⪰ 0, y'y that of its rows", "`fedmgp.aggregation` = agreement"),
    ("fedmgp, fedmgp natural", STEPS, "`fedmgp.aggregation` = norm-clipped, median, trimmed-mean, krum, multi-krum"),
    ("sfvi, sfvi closed", f"{LARGE}; curvature ⪰ 0, counts those of its rows", "–"),
    ("sfvi-avg", "steps end where Adam's can, scales positive", "–"),
    ("fsgp private", "entries are at most 300 times the median site's, by rows, where there are three", "–"),
    ("masked totals", "the total alone is judged, as the sum of one site; nobody can be named", "–"),
)


def main() -> None:
    """Do what is asked, and write the page."""
    parser = command_line(__doc__, ("lies", "schedules"), "fault_schedules")
    parser.add_argument("--count", type=int, default=500, help="schedules")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = done(tasks(chosen.parts, chosen.count), chosen.ledger, chosen.seconds)
    chosen.output.write_text("\n".join(page(found)) + "\n", encoding="utf-8")


def tasks(parts: list[str], count: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names of runs, and what makes them."""
    if "lies" in parts:
        for rule in RULES:
            for kind, size in (("honest", 0.0), ("drop", 0.0), *LIES):
                yield f"{rule} | {kind} {size:g}", lambda r=rule, k=kind, s=size: lied(r, k, s)
    if "schedules" in parts:
        for seed in range(count):
            yield f"{seed}", lambda s=seed: scheduled(s)


def lied(rule: str, kind: str, size: float) -> dict[str, Any]:
    """One site of four spoils the real numbers of every reply from round 1 on."""
    method, keys = RULES[rule]
    lie = Schedule(0, liar="1", rate=float(kind != "honest"), kinds=(kind,), size=size, first=1)
    ending = ended(method, lie, num_server_rounds=ROUNDS, **keys)
    return {"cell": "ends" if ending.words else f"{ending.nll:.3f}" + " –" * ("1" in ending.blamed)}


def scheduled(seed: int) -> dict[str, Any]:
    """A run under a drawn schedule."""
    method = tuple(METHODS)[seed % len(METHODS)]
    try:
        ending = drawn(seed)
    except Exception as error:
        return {"method": method, "nll": None, "words": "", "failed": repr(error)}
    return {"method": method, "nll": None if ending.words else ending.nll, "words": ending.words, "failed": ""}


def page(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What was done, as a page."""
    lies = {what: own["cell"] for what, own in found.items() if "cell" in own}
    yield from (
        "# What lies and lost messages do",
        "",
        "Made by `python simulations/fault_schedules.py`.",
        "",
        f"Tiny runs of {ROUNDS} rounds, four sites, test NLL (original units).",
        "",
        "## One site of four spoils the real numbers of every reply from round 1 on",
        "",
        "*without* is the run in which that site's replies are lost instead. A dash behind a figure: the site was",
        "refused by name. `ends`: the run ended with words, and no result."
        f" {len(lies)} of {len(RULES) * len(COLUMNS)} cells are done.",
        "",
        f"| method, rule | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    )
    for rule in RULES:
        cells = [lies.get(f"{rule} | {kind} {size:g}", "") for kind, size in (("honest", 0), ("drop", 0), *LIES)]
        yield f"| {rule} | {' | '.join(cells)} |"
    yield from (
        "",
        "## What bounds a lie that is not refused",
        "",
        "| method | an answer is refused unless | rules that withstand a few liars |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in BOUNDS),
        "",
    )
    yield from schedules_of([own for own in found.values() if "words" in own])
    yield f"{sum(own['seconds'] for own in found.values()):.0f} s of one core. {versions(found.values())}"


def schedules_of(runs: list[dict[str, Any]]) -> Iterator[str]:
    """How runs under drawn schedules ended."""
    yield from (
        f"## {len(runs)} schedules, spread evenly over the methods",
        "",
        "Every reply is hit with probability .3 by one of: drop, delay, duplicate, out of order, replay, scale, flip,",
        "shift, one entry, NaN, wrong shape, wrong schema, garbage, state lost; factors from 0 to 1e300; of one site,",
        "or every other time of all. A run *fails* where it raises anything but its own words, where its posterior",
        "holds a number that is not finite, or where one site was spoilt and another is blamed.",
        "",
        "| method | runs | completed | ended with words | failed | median NLL of completed | worst |",
        "|---|---|---|---|---|---|---|",
    )
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        nll = [run["nll"] for run in own if run["nll"] is not None]
        failed = sum(bool(run["failed"]) for run in own)
        figures = f"{np.median(nll):.3f} | {np.max(nll):.3g}" if nll else " | "
        yield f"| {method} | {len(own)} | {len(nll)} | {len(own) - len(nll) - failed} | {failed} | {figures} |"
    words = collections.Counter(" ".join(run["words"].split()[:6]) for run in runs if run["words"])
    yield from ("", "Words: " + "; ".join(f"“{said} …” {times}" for said, times in words.most_common(6)) + ".", "")


if __name__ == "__main__":
    main()
