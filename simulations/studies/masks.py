"""Totals under masks: seconds and bytes.

Milliseconds of processor time, one thread, medians of five; sizes are those of packed sums of `sgpr` with M = 100 and
512. Of a site once in a run the keys that it shares with the others; then for every question, of which fixed point and
the keystreams of all pairs are shown, and the rest is adding them and looking up keys. The server adds and decodes.
Bytes up are those of the numbers, over those of float64; down comes the roster, with every question.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from fedgp_flower.privacy import masks
from fedgp_flower.privacy.keys import Identity
from fedgp_flower.privacy.questions import MaskedQuestion, written_members
from simulations.common import Row

SIZES = {100: 5050, 512: 131328}


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median of some repetitions."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - started))
    return statistics.median(taken)


def measured(sites: int, inducing: int, length: int) -> Row:
    """A row of the table."""
    names = sorted(f"site-{number}" for number in range(sites))
    members = tuple(Identity.simulated(name).member("benchmark", name) for name in names)
    question = MaskedQuestion("benchmark", 1, 1, "query.statistics", "", [["x", [length], "float64"]], members)
    identity, first = Identity.simulated(names[0]), names[0]
    masks.pair_secret.cache_clear()
    row: Row = {"sites": sites, "M": inducing, "numbers": length}
    row["site: keys"] = milliseconds(lambda: question.secrets(identity, first), 1)
    values = np.random.default_rng(0).standard_normal(length)
    secrets, digest = question.secrets(identity, first), bytes.fromhex(question.digest)
    plain = masks.counted(values, sites)
    words = question.masked(plain, identity, first)
    row["fixed point"] = milliseconds(lambda: masks.counted(values, sites))
    row["keystreams"] = milliseconds(
        lambda: sum(len(masks.keystream(key, digest, len(plain))) for key in secrets.values())
    )
    row["a question"] = milliseconds(lambda: question.masked(masks.counted(values, sites), identity, first))
    row["server"] = milliseconds(lambda: masks.total([words] * sites))
    row |= {"bytes up": words.nbytes, "over plain": words.nbytes / values.nbytes}
    return row | {"bytes of the roster": len(written_members(members))}


def study(sites: tuple[int, ...] = (10, 50, 200)) -> Iterator[Row]:
    """A row for each number of sites and M."""
    for count in sites:
        for inducing, length in SIZES.items():
            yield measured(count, inducing, length)
