"""Cost of SFVI and SFVI-Avg: processor time of a site's step and of a round, and bytes against what must travel.

    python simulations/benchmarks/sfvi.py --data-dir DIR
    python simulations/benchmarks/sfvi.py --data-dir DIR --average    (SFVI-Avg on weather at its defaults, as a whole)

Three models as their experiments have them: six cities (R = 50, S = 4), MNIST (S = 1) and weather by country. And the
barycentre of full covariances with a condition of 1e10. Written to ``simulations/results/sfvi_benchmark.md``, seconds
of a whole run of SFVI-Avg to ``sfvi_average_seconds.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, Message

from fedgp_flower import client_app
from fedgp_flower.gp.barycentre import barycentre
from fedgp_flower.options import Value
from fedgp_flower.outcome import Snapshot
from fedgp_flower.records import PACKED, array_record, numpy_arrays
from fedgp_flower.run.in_process import InProcessGrid, run_in_process, simulated_nodes
from fedgp_flower.run.registry import METHODS, load, parse_config
from strategies.server.wire import content_bytes
from strategies.sfvi_state import SteppedVI

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import sfvi_mnist
import sfvi_six_cities
import sfvi_weather
from sfvi_runs import QUIET, RESULTS, write_table
from structured_problems import random_factors

ROUNDS = 6
STEPS = 10
BOUND = 1.3
HEADER = 128
"""Bytes that Flower writes before the data of an array."""
SITES, SIZE, CONDITION, REPEATS = 34, 100, 1e10, 3
"""Of the barycentre."""
LINES = (
    "Made by `python simulations/benchmarks/sfvi.py`: one thread, processor time, medians over the messages or rounds",
    f"after the first of {ROUNDS}; SFVI-Avg takes {STEPS} local steps. An answer is decoding, preparation, gradient,",
    "the site's own step and its state; a round is all sites one after the other and the server.",
    "",
    "Bytes are those of a site and round, up and down, once it has what is sent only once. What must travel is",
    "(2 |η_G| + 2 |θ| + S |ε|) × 8; `numbers` is the data of all arrays over that, `all` everything in both messages:",
    f"headers of arrays that travel by themselves, {HEADER} bytes each, names and shapes of arrays, and the rest: the",
    "site, the run, the round and the figures. Apart: `all` if every array travelled by itself, as up to version 0.2.",
    "First: all bytes of the largest message and answer that carry standardisation, schema and shared inputs.",
)


def timed_barycentre() -> str:
    """Processor time and whitened residual, worst of a few draws."""
    rng, seconds, residuals, steps = np.random.default_rng(7), [], [], []
    for _ in range(REPEATS):
        factors = random_factors(rng, SITES, SIZE, CONDITION)
        started = time.process_time()
        found = barycentre(np.zeros((SITES, SIZE)), factors, np.ones(SITES))
        seconds.append(time.process_time() - started)
        residuals.append(found.residual)
        steps.append(found.iterations)
    return (
        f"Barycentre of {SITES} full covariances, n = {SIZE}, condition {CONDITION:.0e}, {REPEATS} draws: at most "
        f"{max(seconds):.1f} s, {max(steps)} iterations, residual ‖F⁻¹(F′ − F)‖ {max(residuals):.1e}."
    )


@dataclass
class Figures:
    """What was seen at the sites: a row per training message."""

    rows: list[dict[str, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """Processor time at the end of every round."""
    first: int = 0
    """Bytes of the largest message and its answer that carry what is sent once."""

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        """Note the time."""
        del row, total
        self.ends.append(time.process_time())

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """Keep nothing: a disk is not what is measured."""


class Meter(InProcessGrid):
    """Times answers and counts bytes."""

    def __init__(self, flat: Mapping[str, Value], sites: int, figures: Figures) -> None:
        super().__init__(client_app.app, flat, simulated_nodes(sites))
        self.figures = figures

    def answer(self, message: Message) -> Message:
        """The reply, after a look at the clock."""
        started = time.process_time()
        reply = super().answer(message)
        seconds = time.process_time() - started
        both = (message, reply)
        if "context" in message.content:
            self.figures.first = max(self.figures.first, sum(content_bytes(m) for m in both))
        if message.metadata.message_type.startswith("train"):
            records = [m.content.array_records["arrays"] for m in both]
            apart = [array_record(numpy_arrays(record)) for record in records]
            number = int(str(message.content.config_records["config"]["round"]))
            row = {"round": number, "seconds": seconds, "bytes": sum(content_bytes(m) for m in both)}
            row["numbers"] = sum(array.nbytes for record in records for array in numpy_arrays(record).values())
            row["headers"] = HEADER * sum(own.stype != PACKED for record in records for own in record.values())
            row["names"] = sum(len(name) for record in records for name in record)
            row["arrays"], row["apart"] = sum(map(len, records)), sum(map(len, apart))
            row["more"] = sum(own.count_bytes() for own in apart) - sum(own.count_bytes() for own in records)
            self.figures.rows.append(row)
        return reply


def measured(flat: dict[str, Any], sites: int) -> tuple[Figures, float, SteppedVI]:
    """What was seen in a short run, seconds of a round, and the strategy."""
    figures, config = Figures(), parse_config(flat)
    strategy: SteppedVI = load(METHODS[config.method].strategy).from_config(config, figures)
    strategy.start(Meter(flat, sites, figures), ArrayRecord(), num_rounds=ROUNDS, timeout=config.round_timeout)
    return figures, float(np.median(np.diff(figures.ends))), strategy


def row_of(name: str, flat: dict[str, Any], sites: int) -> dict[str, Any]:
    """A row of the table."""
    short = {**QUIET, **flat, "num-server-rounds": ROUNDS}
    figures, seconds, strategy = measured({**short, "method": "sfvi"}, sites)
    others, _, _ = measured({**short, "method": "sfvi-avg", "sfvi.local-steps": STEPS}, sites)
    messages, averaged = pd.DataFrame(figures.rows), pd.DataFrame(others.rows)
    parameters = strategy.current.parameters
    eta = sum(array.size for key, array in parameters.items() if key.startswith("q."))
    theta = sum(array.size for key, array in parameters.items() if key.startswith("theta."))
    options = strategy.options
    noise = 0 if options.known_expectations else options.samples * len(parameters["q.mean"])
    must = 8 * (2 * eta + 2 * theta + noise)
    later, own = messages[messages["round"] > 1], averaged[averaged["round"] > 1]
    largest = later.loc[later["bytes"].idxmax()]
    rest = float(largest["bytes"] - largest["numbers"] - largest["headers"] - largest["names"])
    return {
        "model": name,
        "sites": sites,
        "answer, ms": 1e3 * float(later["seconds"].median()),
        "local step of SFVI-Avg, ms": 1e3 * float(own["seconds"].median()) / STEPS,
        "round, s": seconds,
        "η_G": str(eta),
        "θ": str(theta),
        "S ε": str(noise),
        "must travel": str(must),
        "numbers": float(later["numbers"].max()) / must,
        "arrays": f"{largest['arrays']:.0f}",
        "headers, bytes": f"{largest['headers']:.0f}",
        "names, bytes": f"{largest['names']:.0f}",
        "rest, bytes": f"{rest:.0f}",
        "all": float(largest["bytes"]) / must,
        f"all ≤ {BOUND}": "yes" if float(largest["bytes"]) <= BOUND * must else "no",
        "arrays, apart": f"{largest['apart']:.0f}",
        "all, apart": float(largest["bytes"] + largest["more"]) / must,
        "first": str(figures.first),
    }


def cases(data_dir: Path, folder: Path) -> list[tuple[str, dict[str, Any], int]]:
    """Name, configuration and number of sites of every row."""
    sfvi_six_cities.children(data_dir).to_csv(folder / "children.csv", index=False)
    images, (places, stations) = sfvi_mnist.table_of(data_dir), sfvi_weather.table_of(data_dir)
    six = sfvi_six_cities.keys(folder / "children.csv") | {"sfvi.importance-samples": 50}
    weather = sfvi_weather.keys(places, 0) | {"sfvi.objective": "stochastic"}
    return [
        ("six cities", six, 2),
        ("MNIST", sfvi_mnist.keys(images), 25),
        ("MNIST", sfvi_mnist.keys(images), 200),
        ("weather, diagonal L_G", weather, len(stations)),
        ("weather, full L_G", weather | {"sfvi.structure": "full"}, len(stations)),
    ]


def average(data_dir: Path) -> None:
    """Processor time of SFVI-Avg on weather by country at its defaults, without any comparison, and where it goes."""
    places, _ = sfvi_weather.table_of(data_dir)
    keys = {"features": "lon,lat,elev", "target": "tmin", "partitioner": "natural", "partition.column": "country"}
    with tempfile.TemporaryDirectory() as folder:
        flat = {**QUIET, "method": "sfvi-avg", "dataset": str(places), "split": 0, **keys, "output-dir": folder}
        started = time.process_time()
        run = json.loads((run_in_process({**flat, "name": "run"}, 0) / "metrics.json").read_text())
        seconds = time.process_time() - started
    row = {
        "sites": len(run["per_site"]),
        "rounds": run["rounds"],
        "converged": "yes" if run["converged"] else "no",
        "NLL": run["test"]["nll"],
        "processor s": seconds,
        "wall s": run["seconds"]["total"],
        "of these training": run["seconds"]["training"],
        "at sites": run["seconds"]["sites"],
    }
    lines = [
        "Made by `python simulations/benchmarks/sfvi.py --average`: no key but the data and the partition, comparisons",
        "off, all sites in one process of one thread; wall seconds depend on what else the machine did.",
    ]
    write_table(RESULTS / "sfvi_average_seconds.md", "SFVI-Avg on weather: seconds", lines, pd.DataFrame([row]))


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--average", action="store_true", help="a whole run of SFVI-Avg on weather")
    chosen = parser.parse_args()
    if chosen.average:
        average(chosen.data_dir)
        return
    rows, lines = [], [*LINES, "", timed_barycentre()]
    with tempfile.TemporaryDirectory() as folder:
        for name, flat, sites in cases(chosen.data_dir, Path(folder)):
            rows.append(row_of(name, flat, sites))
            write_table(RESULTS / "sfvi_benchmark.md", "SFVI: time and bytes", lines, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
