"""What lies and lost messages do: a table of sizes of lies, and runs under drawn schedules of faults.

    python simulations/fault_schedules.py [--schedules 500] [--output simulations/results/fault_schedules.md]

One of four sites spoils every reply from the first round on, for each method and each rule that aggregates; then faults
drawn from a seed befall one site, or all. Tiny data, the in-process Grid: a run takes a second or two.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from schedules import METHODS, Ending, Schedule, ended

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "fsgp average, fedmedian": ("fsgp average", {"fsgp__server_optimizer": "fedmedian"}),
    "fsgp average, fedtrimmedavg": ("fsgp average", {"fsgp__server_optimizer": "fedtrimmedavg"}),
    "fgpr, fedmedian": ("fgpr", {"fgpr__server_optimizer": "fedmedian"}),
    "fedmgp, median": ("fedmgp", {"fedmgp__aggregation": "median"}),
    "fedmgp, trimmed-mean": ("fedmgp", {"fedmgp__aggregation": "trimmed-mean"}),
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


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fault_schedules.md")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    page = [HEAD, *table(), ""]
    chosen.output.write_text(
        "\n".join([*page, *(drawn(chosen.schedules) if chosen.schedules else ())]) + "\n", encoding="utf-8"
    )


HEAD = f"""# What lies and lost messages do

Made by `python simulations/fault_schedules.py`; without drawn schedules with `--schedules 0`.

Tiny runs of {ROUNDS} rounds, four sites, test NLL (original units).

## One site of four spoils the real numbers of every reply from round 1 on

*without* is the run in which that site's replies are lost instead. A dash behind a figure: the site was refused by
name. `ends`: the run ended with words, and no result.
"""


def table() -> list[str]:
    """A row for each method and rule."""
    titles = [
        "method, rule",
        "honest",
        "without",
        *(f"{kind} {size:g}" if kind != "flip" else kind for kind, size in LIES),
    ]
    rows = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for name, (method, keys) in RULES.items():
        runs = [ended(method, Schedule(0, rate=0.0), num_server_rounds=ROUNDS, **keys)]
        for kind, size in (("drop", 0.0), *LIES):
            lie = Schedule(0, liar="1", rate=1.0, kinds=(kind,), size=size, first=1)
            runs.append(ended(method, lie, num_server_rounds=ROUNDS, **keys))
        rows.append(f"| {name} | " + " | ".join(map(cell, runs)) + " |")
        print(rows[-1], flush=True)
    return rows


def cell(ending: Ending) -> str:
    """NLL, and whether the liar was named."""
    return "ends" if ending.words else f"{ending.nll:.3f}" + " –" * ("1" in ending.blamed)


def drawn(count: int) -> list[str]:
    """How runs under drawn schedules ended."""
    started, names = time.perf_counter(), tuple(METHODS)
    endings = collections.defaultdict(list)
    for seed in range(count):
        method = names[seed % len(names)]
        endings[method].append(ended(method, Schedule(seed, liar="1" if seed % 2 == 0 else "")))
    rows = [
        f"## {count} schedules",
        "",
        "Every reply is hit with probability .3 by one of: drop, delay, duplicate, out of order, replay, scale, flip,",
        "shift, one entry, NaN, wrong shape, wrong schema, garbage, state lost; factors from 0 to 1e300. Even seeds:",
        "one site, odd ones: all. No run raised anything but its own words, and no posterior held a number that is not",
        "finite.",
        "",
        "| method | runs | completed | ended with words | median NLL of completed | worst |",
        "|---|---|---|---|---|---|",
    ]
    for method, own in endings.items():
        nll = [one.nll for one in own if not one.words]
        figures = f"{np.median(nll):.3f} | {np.max(nll):.3g}" if nll else " | "
        rows.append(f"| {method} | {len(own)} | {len(nll)} | {len(own) - len(nll)} | {figures} |")
    words = collections.Counter(" ".join(one.words.split()[:6]) for own in endings.values() for one in own if one.words)
    rows += ["", "Words: " + "; ".join(f"“{said} …” {times}" for said, times in words.most_common(6)) + ".", ""]
    rows.append(f"{time.perf_counter() - started:.0f} s on one core, beside other work.")
    return rows


if __name__ == "__main__":
    main()
