"""Many sites and many rounds: memory, seconds and whether all took part.

    python simulations/load.py [rounds] [sites] [ray] [--seconds 1e9] [--ledger LEDGER.jsonl]

``rounds``: 100 sites, 200 rounds in process. ``sites``: 1000 sites, two rounds of every form of a
Strategy. ``ray``: 200 sites, two rounds through Flower's SuperLink and Ray. What is done stands in the ledger, and is
not done again.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ledger import command_line, done, versions
from schedules import METHODS, keys_of

from fedgp_flower.deploy.launch import simulate
from fedgp_flower.deploy.processes import ProcessEntry, belonging, snapshot
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.user_config import complete_config

ROWS = 5
"""Of a site."""
SYNCHRONOUS = {"pvi-glm": "glm.schedule", "pvi-bnn": "bnn.schedule", "pvi classes": "pvi.schedule"}
"""Forms that visit one site a round, and the key by which they visit all; of ``pvi`` that is a form of its own."""
RANGES = {"x1": [-2, 2], "x2": [-2, 2], "y": [-3, 3]}
"""Public, for ``fsgp private``."""


def main() -> None:
    """Do what is asked, and write the page."""
    chosen = command_line(__doc__, ("rounds", "sites", "ray"), "load").parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        found = done(tasks(chosen.parts, Path(scratch)), chosen.ledger, chosen.seconds)
    chosen.output.write_text("\n".join(page(found)) + "\n", encoding="utf-8")


def tasks(parts: list[str], scratch: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names of runs, and what makes them."""
    if "rounds" in parts:
        for method in ("fsgp average", "pvi-glm"):
            yield f"rounds | {method}", lambda m=method: watched(keys(m, 200, 100, scratch), 100)
    if "sites" in parts:
        for method in METHODS:
            yield f"sites | {method}", lambda m=method: watched(keys(m, 2, 1000, scratch), 1000)
    if "ray" in parts:
        yield "ray | fsgp average", lambda: on_ray(keys("fsgp average", 2, 200, scratch), 200)


def keys(method: str, rounds: int, sites: int, scratch: Path) -> dict[str, Any]:
    """A tiny configuration of a method, on rows of a smooth function, its sign for classes."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-1.7, 1.7, (ROWS * sites, 2))
    y = np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] + 0.2 * draw.standard_normal(len(x))
    table = scratch / f"rows{sites}.csv"
    pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y, "positive": (y > 0).astype(int)}).to_csv(table, index=False)
    flat = {key: value for key, value in keys_of(method, num_server_rounds=rounds).items() if key != "round-timeout"}
    target = "positive" if flat.get("model.likelihood") == "bernoulli" else "y"
    inputs = "x1" if flat.get("fedmgp.covariance") == "deviations" else "x1,x2"
    flat |= {"dataset": str(table), "target": target, "features": inputs, "test-fraction": 0.2, "wait-seconds": 300.0}
    flat |= {SYNCHRONOUS[method]: "synchronous"} if method in SYNCHRONOUS else {}
    flat |= {"privacy.ranges": json.dumps(RANGES)} if "privacy.ranges" in flat else {}
    return complete_config(flat | {"output-dir": str(scratch), "name": f"run-{time.monotonic_ns()}"}, Path.cwd())


def watched(flat: dict[str, Any], sites: int) -> dict[str, Any]:
    """A run in process, and the memory of the process after every round."""
    memory: list[float] = []
    started = time.perf_counter()
    folder = run_in_process(
        flat, sites, progress=lambda row, total: memory.append(psutil.Process().memory_info().rss / 2**20)
    )
    return told(folder, started) | {"memory": memory}


def on_ray(flat: dict[str, Any], sites: int) -> dict[str, Any]:
    """A run through SuperLink and Ray, and the memory of all its processes, pages that they share counted once."""
    started = time.perf_counter()
    with memory_of_all() as memory:
        simulate(flat, sites)
    return told(Path(str(flat["output-dir"])) / str(flat["name"]), started) | {"memory": memory}


@contextmanager
def memory_of_all() -> Iterator[list[float]]:
    """MiB of this process and all that descend from it, every other second until the end."""
    memory: list[float] = []
    over = threading.Event()

    def look() -> None:
        own = {pid: entry for pid, entry in snapshot("").items() if pid == psutil.Process().pid}
        seen: dict[int, ProcessEntry] = own
        while not over.wait(2.0):
            seen = belonging(snapshot(""), seen)
            memory.append(sum(map(proportional, seen)) / 2**20)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield memory
    finally:
        over.set()
        watcher.join()


def proportional(pid: int) -> int:
    """Bytes of a process, its share of those it shares; 0 where it has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_full_info().pss)
    return 0


def told(folder: Path, started: float) -> dict[str, Any]:
    """What a run says of itself."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    failures = len(metrics["failures"])
    return {
        "sites": metrics["sites"],
        "failures": failures,
        "nll": metrics["test"]["nll"],
        "wall": time.perf_counter() - started,
    }


def over_rounds(own: dict[str, Any]) -> tuple[str, ...]:
    """Memory at the start, in the middle and at the end, and how far the second half spreads."""
    memory = own["memory"]
    half = len(memory) // 2
    late = max(memory[half:]) / min(memory[half:]) - 1
    return f"{memory[0]:.0f}", f"{memory[half - 1]:.0f}", f"{memory[-1]:.0f}", f"{late:+.1%}"


def lines(
    found: dict[str, dict[str, Any]], part: str, figures: Callable[[dict[str, Any]], tuple[str, ...]]
) -> Iterator[str]:
    """A line of a table for every run of a part."""
    for what, own in found.items():
        if what.startswith(part):
            cells = (
                what.split(" | ")[1],
                str(own["sites"]),
                str(own["failures"]),
                *figures(own),
                f"{own['seconds']:.0f}",
            )
            yield f"| {' | '.join(cells)} |"


def page(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What was done, as a page."""
    yield from (
        "# Many sites and many rounds",
        "",
        f"Made by `python simulations/load.py`; {ROWS} rows a site. `pvi` and `pvi asynchronous` visit one site a",
        f"round; {', '.join(f'`{own}`' for own in SYNCHRONOUS)} have a synchronous schedule here and visit all.",
        "",
        "## 100 sites, 200 rounds, one process",
        "",
        "| method | sites | failures | MiB after round 1 | 100 | 200 | most of the last 100 over least | processor s |",
        "|---|---|---|---|---|---|---|---|",
    )
    yield from lines(found, "rounds", over_rounds)
    yield from (
        "",
        "## 1000 sites, two rounds, one process",
        "",
        "| method | sites | failures | test NLL | MiB after round 2 | processor s |",
        "|---|---|---|---|---|---|",
    )
    yield from lines(found, "sites", lambda own: (f"{own['nll']:.3f}", f"{own['memory'][-1]:.0f}"))
    yield ""
    yield "Under masks one process computes the masks of all pairs here, a site its own alone."
    if missing := [method for method in METHODS if f"sites | {method}" not in found]:
        yield from ("", f"Not run with 1000 sites: {'; '.join(missing)}.")
    for what, own in found.items():
        if what.startswith("ray"):
            yield from ("", "## 200 sites through SuperLink and Ray, two rounds", "")
            said = f"{own['sites']} sites, {own['failures']} failures, test NLL {own['nll']:.3f}, {own['wall']:.0f} s"
            said += f" of a machine with {psutil.cpu_count()} cores; the SuperLink, Ray and the sites took up to"
            yield f"{what.split(' | ')[1]}: {said} {max(own['memory']):.0f} MiB together."
    yield from ("", versions(found.values()))


if __name__ == "__main__":
    main()
