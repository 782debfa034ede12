"""Runs that are done once: what is in the ledger is not done again, so that long work can be done in parts."""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def command_line(words: str | None, parts: Sequence[str], page: str) -> argparse.ArgumentParser:
    """Which parts to do, until when, and which ledger and page to write."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(parts), help=f"all of {', '.join(parts)} if none is named")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after so long")
    parser.add_argument("--ledger", type=Path, help="file that keeps what was done")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"{page}.md")
    return parser


def done(
    tasks: Iterable[tuple[str, Callable[[], dict[str, Any]]]], ledger: Path | None, seconds: float
) -> dict[str, dict[str, Any]]:
    """What tasks returned, by name, with their ``seconds``: of the ledger, and of those begun in so many seconds."""
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger and ledger.exists() else ()
    found = {own["what"]: own for own in map(json.loads, lines)}
    begun, now = time.monotonic(), version()
    for what, work in tasks:
        if what in found:
            continue
        if time.monotonic() - begun > seconds:
            break
        started = time.process_time()
        found[what] = {"what": what, "version": now, **work(), "seconds": time.process_time() - started}
        if ledger:
            with ledger.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[what]) + "\n")
    return found


def version() -> str:
    """The commit that runs, with a mark where files differ from it."""
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()


def versions(found: Iterable[dict[str, Any]]) -> str:
    """A sentence for a page: how many runs are of which commit."""
    counts = collections.Counter(str(own.get("version", "earlier versions, not noted")) for own in found)
    return "Runs by version of the code: " + ", ".join(f"{name} {count}" for name, count in counts.items()) + "."
