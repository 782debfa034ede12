"""Files of a run that were tampered with: how often words, how often the right answer.

    python simulations/tampered.py [--count 500] [--seed 0]

``count`` mutations of JSON, of TOML, of safetensors and of CSV, drawn by hypothesis from a seed. A traceback, a NaN, a
status of success without an answer, or another answer where hashes were left alone ends the script.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hypothesis import given, seed, settings
from hypothesis import strategies as st
from test_hostile_artefacts import KINDS, SETTINGS, made, trial

PAGE = Path(__file__).parent / "results" / "tampered.md"
OUTCOMES = ("words, status 2", "words, status 1", "the right answer", "proper numbers, of other hashes")


def main() -> None:
    """Count, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="mutations of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        counts = counted(Path(scratch), chosen.count, chosen.seed)
    PAGE.write_text("\n".join(page(counts, chosen.seed)) + "\n", encoding="utf-8")


def counted(scratch: Path, count: int, number: int) -> Mapping[tuple[str, str], int]:
    """Outcomes by kind of file."""
    clean, counts = made(scratch / "clean"), collections.Counter[tuple[str, str]]()
    for kind in KINDS:
        mutate(lambda draw, own=kind: trial(clean, scratch / "trial", draw, (own,)), counts, count, number)
        print(kind, dict(counts), flush=True)
    return counts


def mutate(
    one: Callable[[Callable[[Any], Any]], tuple[str, str]],
    counts: collections.Counter[tuple[str, str]],
    count: int,
    number: int,
) -> None:
    """Count the outcomes of so many mutations."""

    @seed(number)
    @settings(SETTINGS, max_examples=count, database=None)
    @given(data=st.data())
    def many(data: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            counts[one(data.draw)] += 1

    many()


def page(counts: Mapping[tuple[str, str], int], number: int) -> Iterator[str]:
    """The counts as a page."""
    yield from (
        "# Files of a run that were tampered with",
        "",
        f"Made by `python simulations/tampered.py --seed {number}`. A file of a run is cut, removed, changed in some",
        "bytes or in an entry; half of the time the hashes that a run keeps of its files are made anew. Then the run",
        "predicts, and is compared or resumed. Status 1: the run has not finished, saved nothing to predict with, or",
        "is of another configuration, as far as its files say. There was no traceback, no NaN, and no other answer",
        "where the hashes were left alone, or this page would not be here.",
        "",
        f"| file | mutations | {' | '.join(OUTCOMES)} |",
        "|---" * (2 + len(OUTCOMES)) + "|",
    )
    for kind in KINDS:
        cells = [counts.get((kind, own), 0) for own in OUTCOMES]
        yield f"| {kind.removeprefix('.')} | {sum(cells)} | {' | '.join(map(str, cells))} |"
    cells = [sum(counts.get((kind, own), 0) for kind in KINDS) for own in OUTCOMES]
    yield f"| all | {sum(cells)} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
