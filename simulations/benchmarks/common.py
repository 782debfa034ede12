"""What the benchmarks share: a generated table, repetitions in turn, and tables in Markdown."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.options import Value

RESULTS = Path(__file__).parent.parent / "results"


def make_table(folder: Path, rows: int) -> Path:
    """Eight inputs, a smooth function of two of them, noise 0.1."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.uniform(-2, 2, (rows, 8)), columns=[f"x{i}" for i in range(1, 9)])
    frame["y"] = np.sin(2 * frame["x1"]) * frame["x2"] + 0.1 * rng.standard_normal(rows)
    path = folder / f"rows-{rows}.csv"
    frame.to_csv(path, index=False)
    return path


def training_alone(table: Path, objective: str, rounds: int, output: Path, name: str) -> dict[str, Value]:
    """The keys of a run of FSGP without evaluations or comparisons."""
    return {
        "dataset": str(table),
        "fsgp.objective": objective,
        "num-server-rounds": rounds,
        "fsgp.tolerance": 0.0,
        "evaluate-every": 0,
        "baselines.linear": False,
        "baselines.local-only": False,
        "baselines.pooled": False,
        "keep-predictions": False,
        "output-dir": str(output),
        "name": name,
    }


def least(actions: Mapping[str, Callable[[], object]], rounds: int = 12) -> dict[str, float]:
    """Processor seconds of the cheapest repetition of each; they take turns, so that other load treats them alike."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            started = time.process_time()
            action()
            best[name] = min(best[name], time.process_time() - started)
    return best


def repeats_asked(words: str | None) -> int:
    """``--repeats`` of the command line, for a benchmark that has no other option; from here on one thread computes."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats: int = parser.parse_args().repeats
    limit_threads(1)
    return repeats


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as Markdown; numbers to three digits."""
    head = list(rows[0])
    body = [[f"{own:.3g}" if isinstance(own, float) else str(own) for own in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def write_page(name: str, parts: Sequence[str]) -> None:
    """A page of the results from its paragraphs and tables, printed as well."""
    page = "\n\n".join(parts) + "\n"
    (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)
