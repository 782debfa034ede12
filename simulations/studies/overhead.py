"""Where the time of a round goes.

Forty rows a site, 8 inputs, M = 50, one thread, over an in-process Grid that also packs every message into Flower's
protobufs and back. Shares of the wall time of a round: local compute is the time inside the sites' apps, serialisation
that of packing, the rest is Flower and the server.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedgp_flower import client_app, server_app
from fedgp_flower.data.sites import simulated_nodes
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.run.in_process import InProcessGrid
from simulations.common import ALONE, Row, kept_table

ROWS_PER_SITE = 40


def smooth(rows: int) -> pd.DataFrame:
    """Eight inputs, a smooth function of two of them, noise 0.1."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.uniform(-2, 2, (rows, 8)), columns=[f"x{i}" for i in range(1, 9)])
    return frame.assign(y=np.sin(2 * frame["x1"]) * frame["x2"] + 0.1 * rng.standard_normal(rows))


class MeteredGrid(InProcessGrid):
    """An in-process Grid that also packs and unpacks every message as Flower's transports do."""

    compute = 0.0
    serialisation = 0.0

    def answer(self, message: Message) -> Message:
        """The reply, with both parts of the time booked."""
        self.pack(message)
        started = time.perf_counter()
        reply = super().answer(message)
        self.compute += time.perf_counter() - started
        self.pack(reply)
        return reply

    def pack(self, message: Message) -> None:
        """Into bytes and back."""
        started = time.perf_counter()
        blob = recorddict_to_proto(message.content).SerializeToString()
        recorddict_from_proto(ProtoRecordDict.FromString(blob))
        self.serialisation += time.perf_counter() - started


def measured(method: str, table: str, sites: int, rounds: int, inducing: int = 50) -> Row:
    """Parts of a round's time; the first round warms caches up and does not count."""
    flat: dict[str, Any] = {"method": method, "dataset": table, "num-server-rounds": rounds + 1, "evaluate-every": 0}
    flat |= {"model.num-inducing": inducing, "test-fraction": 0.0, "keep-predictions": False, **ALONE}
    marks: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        flat |= {"output-dir": folder, "name": "x"}
        grid = MeteredGrid(client_app.app, flat, simulated_nodes(sites))
        server_app.execute(
            grid, flat, lambda row, total: marks.append((time.perf_counter(), grid.compute, grid.serialisation))
        )
    wall, local, packed = (np.array(marks[-1]) - np.array(marks[0])) / max(len(marks) - 1, 1)
    row: Row = {"method": method, "sites": sites, "s a round": float(wall), "local compute": float(local / wall)}
    row |= {"serialisation": float(packed / wall), "Flower and server": float((wall - local - packed) / wall)}
    return row | {"ms a site outside compute": float(1e3 * (wall - local) / sites)}


def study(
    sites: tuple[int, ...] = (5, 50, 500), methods: tuple[str, ...] = ("fsgp", "sgpr"), rounds: int = 10
) -> Iterator[Row]:
    """A row for each number of sites and method."""
    limit_threads(1)
    for count in sites:
        rows = count * ROWS_PER_SITE
        table = kept_table(f"smooth-{rows}", lambda n=rows: smooth(n))
        for method in methods:
            yield measured(method, table, count, rounds)
