"""Schedules of partitioned variational inference with one slow site: NLL per communication and per unit of time.

    python simulations/pvi_schedules.py --data-dir DIR [--data energy] [--only "sequential replay" …]

Ten sites; a visit takes one unit of time, five at the slow site, and sites that work at once work side by side. The
arithmetic is the real one, only the clock is simulated: messages are answered in the order in which they would arrive.
Complete runs are not repeated. Table and figure go to ``simulations/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from flwr.app import Message
from matplotlib.figure import Figure

from fedgp_flower import client_app, server_app
from fedgp_flower.run.in_process import InProcessGrid, simulated_nodes

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "pvi_schedules"
RESULTS = HERE / "results"
SITES = 10
SLOW_NODE, SLOWNESS = 3, 5.0
PAPER = {"pvi.local-update": "adam", "pvi.alpha": 0.1}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential replay": {"pvi.local-update": "replay", "num-server-rounds": 30, "evaluate-every": 5},
    "parallel replay": {
        "pvi.local-update": "replay",
        "pvi.schedule": "synchronous",
        "num-server-rounds": 4,
        "evaluate-every": 1,
    },
    "sequential DPO": {**PAPER, "num-server-rounds": 30, "evaluate-every": 5},
    "synchronous DPO, ρ = 1/K": {**PAPER, "pvi.schedule": "synchronous", "num-server-rounds": 4, "evaluate-every": 1},
    "asynchronous DPO": {**PAPER, "pvi.schedule": "asynchronous", "num-server-rounds": 40, "evaluate-every": 5},
}


class TimedGrid(InProcessGrid):
    """Nodes side by side on a simulated clock; only training takes time."""

    clock = 0.0

    def __init__(self, flat: Mapping[str, Any], count: int) -> None:
        super().__init__(client_app.app, dict(flat), simulated_nodes(count))
        self._slow = sorted(self.contexts)[SLOW_NODE]
        self._ready: dict[str, float] = {}

    def duration(self, message: Message) -> float:
        """Units of time that the node of a message takes for it."""
        if not message.metadata.message_type.startswith("train"):
            return 0.0
        return SLOWNESS if message.metadata.dst_node_id == self._slow else 1.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Note when each reply will be there."""
        own = list(messages)
        ids = list(super().push_messages(own))
        self._ready |= {i: self.clock + self.duration(message) for i, message in zip(ids, own, strict=True)}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The reply that arrives first, and the clock goes to that moment."""
        waiting = [i for i in message_ids if i in self._pending]
        if not waiting:
            return []
        first = min(waiting, key=self._ready.__getitem__)
        self.clock = max(self.clock, self._ready.pop(first))
        return super().pull_messages([first])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """All replies, when the slowest is there."""
        own = list(messages)
        self.clock += max(map(self.duration, own), default=0.0)
        return super().send_and_receive(own, timeout=timeout)


def ensure(name: str, data: str, data_dir: Path) -> pd.DataFrame:
    """Visits, simulated time and scores of a schedule; run if it is not there."""
    label = "".join(c if c.isalnum() else "-" for c in f"{data}-{name}")
    path = RUNS / f"{label}.csv"
    if path.exists():
        return pd.read_csv(path)
    shutil.rmtree(RUNS / label, ignore_errors=True)  # the clock of a run that was cut off is lost
    flat = {
        "method": "pvi",
        "dataset": f"uci/{data}",
        "data-dir": str(data_dir),
        "split": 0,
        "model.num-inducing": 100,
        "pvi.min-rows-per-pseudo-point": 1,
        "keep-predictions": False,
        "baselines.linear": False,
        "baselines.local-only": False,
        "output-dir": str(RUNS),
        "name": label,
        **SCHEDULES[name],
    }
    grid, rows = TimedGrid(flat, SITES), []

    def note(row: Mapping[str, Any], total: int) -> None:
        del total
        if "test_nll" in row:
            rows.append({"visits": row["visits"], "time": grid.clock} | {n: row[f"test_{n}"] for n in ("nll", "rmse")})

    folder = server_app.execute(grid, flat, note)
    metrics = json.loads((folder / "metrics.json").read_text())
    frame = pd.DataFrame(rows).assign(pooled=metrics["pooled"]["nll"])
    frame.to_csv(path, index=False)
    return frame


def draw(found: Mapping[str, pd.DataFrame], path: Path) -> None:
    """NLL against visits and against time."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, frame in found.items():
        left.plot(frame["visits"], frame["nll"], marker="o", markersize=3, label=name)
        right.plot(frame["time"], frame["nll"], marker="o", markersize=3, label=name)
    for axes, label in ((left, "communications (visits)"), (right, "time (one ordinary visit = 1)")):
        axes.axhline(next(iter(found.values()))["pooled"][0], color="black", lw=1, label="pooled")
        axes.set(xlabel=label)
    left.set_ylabel("NLL per held-out row")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run what is missing, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--data", default="energy")
    parser.add_argument("--only", nargs="*", choices=list(SCHEDULES), default=list(SCHEDULES))
    chosen = parser.parse_args()
    found = {name: ensure(name, chosen.data, chosen.data_dir) for name in chosen.only}
    rows = []
    for name, frame in found.items():
        for p in frame.to_dict("records"):
            scores = f"{p['nll']:.3f} | {p['nll'] - p['pooled']:+.3f} | {p['rmse']:.3f}"
            rows.append(f"| {name} | {p['visits']:.0f} | {p['time']:.0f} | {scores} |")
    head = ["| schedule | visits | time | NLL | above pooled | RMSE |", "| --- " * 6 + "|"]
    lines = [
        "# Schedules of PVI with one slow site",
        "",
        "Made by `python simulations/pvi_schedules.py --data-dir DIR`:",
    ]
    lines += [
        f"uci/{chosen.data}, split 0, {SITES} sites, one of them {SLOWNESS:.0f} times slower; time in visits.",
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "pvi_schedules.md").write_text("\n".join([*lines, *head, *rows, "", "![NLL](pvi_schedules.png)", ""]))
    draw(found, RESULTS / "pvi_schedules.png")


if __name__ == "__main__":
    main()
