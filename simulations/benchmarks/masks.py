"""Seconds and bytes of a total under masks: a site, the server, and the message beside a plain one.

    python simulations/benchmarks/masks.py [SITES …]

Processor time of one thread, medians of five. Sizes are those of packed sums of FSGP with M = 100 and 512. Written to
``simulations/results/masks.md``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedgp_flower.privacy import masks
from fedgp_flower.privacy.keys import Identity
from fedgp_flower.privacy.questions import MaskedQuestion, written_members

RESULT = Path(__file__).parent.parent / "results" / "masks.md"
SIZES = {100: 5050, 512: 131328}
REPEATS = 5


def milliseconds(work: Callable[[], object]) -> float:
    """The median of some runs."""
    taken = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - started))
    return statistics.median(taken)


def row(sites: int, inducing: int, length: int) -> str:
    """A line of the table."""
    names = sorted(f"site-{number}" for number in range(sites))
    members = tuple(Identity.simulated(name).member("benchmark", name) for name in names)
    question = MaskedQuestion("benchmark", 1, 1, "query.statistics", "", [["x", [length], "float64"]], members)
    own = Identity.simulated(names[0])
    masks.pair_secret.cache_clear()
    started = time.process_time()
    question.secrets(own, names[0])
    agreed = 1e3 * (time.process_time() - started)
    values = np.random.default_rng(0).standard_normal(length)
    secrets, digest = question.secrets(own, names[0]), bytes.fromhex(question.digest)
    plain = masks.counted(values, sites)
    parts = (
        milliseconds(lambda: masks.counted(values, sites)),
        milliseconds(lambda: sum(len(masks.keystream(key, digest, len(plain))) for key in secrets.values())),
        milliseconds(lambda: question.masked(masks.counted(values, sites), own, names[0])),
    )
    words = question.masked(plain, own, names[0])
    server = milliseconds(lambda: masks.total([words] * sites))
    times = " | ".join(f"{part:.1f}" for part in (agreed, *parts, server))
    sizes = f"{words.nbytes} | {words.nbytes / values.nbytes:.3f} | {len(written_members(members))}"
    return f"| {sites} | {inducing} | {length} | {times} | {sizes} |"


def main() -> None:
    """Print and write the table."""
    counts = [int(word) for word in sys.argv[1:]] or [10, 50, 200]
    lines = [
        "# Totals under masks",
        "",
        "Milliseconds of processor time, one thread; `python simulations/benchmarks/masks.py`. Of a site once in a run"
        " the keys that it shares with the others; then for every question, of which fixed point and the keystreams"
        " of all pairs are shown, and the rest is adding them and looking up keys. The server adds and decodes. Bytes"
        " up are those of the numbers, over those of float64; down comes the roster, with every question.",
        "",
        "| sites | M | numbers | site: keys | fixed point | keystreams | a question | server | bytes up | over plain"
        " | bytes of the roster |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(sites, *size) for sites in counts for size in SIZES.items()]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
