"""Where the time of a round goes, and exact mode against pooled SGPR at the same number of evaluations.

    python simulations/benchmarks/overhead.py [--sites 5 50 500] [--rounds 10] [--ray 5 50]

Everything is measured in one run and written, with ratios, to ``simulations/results/overhead.md``: the speed of the
machine cancels in the ratios. "Local compute" is the time inside the sites' handlers; "serialisation" is packing the
round's messages into Flower's protobufs and bytes and back; "Flower and server" is what remains of the wall time.
``--ray`` adds the wall time of the same rounds through `flwr run`, where Flower polls every 0.1 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import make_table, table, training_alone, write_page
from flwr.app import Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedgp_flower import client_app, server_app
from fedgp_flower.clients.baselines import fit
from fedgp_flower.data.agreement import SiteDescription, agree
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import SparseGP, pooled_bound
from fedgp_flower.run import in_process as engine
from fedgp_flower.run.registry import parse_config

ROWS_PER_SITE = 40


class MeteredGrid(engine.InProcessGrid):
    """An in-process Grid that also packs and unpacks every message as Flower's transports do."""

    compute = 0.0
    serialisation = 0.0

    def answer(self, message: Message) -> Message:
        """The reply, with both parts of the time booked."""
        self._pack(message)
        started = time.perf_counter()
        reply = super().answer(message)
        self.compute += time.perf_counter() - started
        self._pack(reply)
        return reply

    def _pack(self, message: Message) -> None:
        started = time.perf_counter()
        blob = recorddict_to_proto(message.content).SerializeToString()
        recorddict_from_proto(ProtoRecordDict.FromString(blob))
        self.serialisation += time.perf_counter() - started


def training_seconds(run: Path) -> tuple[float, int]:
    """Seconds of the training part, and rounds."""
    metrics = json.loads((run / "metrics.json").read_text())
    return metrics["seconds"]["training"], metrics["rounds"]


def in_process(sites: int, objective: str, rounds: int, folder: Path) -> dict[str, float | str]:
    """Parts of a round's time over an in-process Grid."""
    flat = training_alone(make_table(folder, sites * ROWS_PER_SITE), objective, rounds, folder, f"{objective}-{sites}")
    grid = MeteredGrid(client_app.app, flat, engine.simulated_nodes(sites))
    marks: list[tuple[float, float, float]] = []

    def mark(row: object, total: int) -> None:
        del row, total
        marks.append((time.perf_counter(), grid.compute, grid.serialisation))

    server_app.execute(grid, flat, mark)
    (start, compute, packing), (end, compute_end, packing_end) = marks[0], marks[-1]
    count = len(marks) - 1  # the first round warms caches up
    wall, local, packed = (end - start) / count, (compute_end - compute) / count, (packing_end - packing) / count
    rest = wall - local - packed
    return {
        "objective": objective,
        "sites": sites,
        "s per round": wall,
        "local compute": local / wall,
        "serialisation": packed / wall,
        "Flower and server": rest / wall,
        "ms per site visit outside compute": 1e3 * (wall - local) / sites,
    }


def on_ray(sites: int, rounds: int, folder: Path) -> float:
    """Seconds per round of the same exact run through `flwr run`, from its history."""
    rows, name = folder / f"rows-{sites * ROWS_PER_SITE}.csv", f"ray-{sites}"
    words = [f"{key}={value}" for key, value in training_alone(rows, "exact", rounds, folder, name).items()]
    words = [word.replace("=True", "=true").replace("=False", "=false") for word in words]
    command = [sys.executable, "-m", "fedgp_flower.launch", "--sites", str(sites), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    history = pd.read_csv(folder / name / "history.csv")
    return float(history["seconds"].iloc[1:].mean())


def exact_against_pooled(rows: int, rounds: int, folder: Path) -> dict[str, float | str]:
    """Exact mode at ten sites against L-BFGS on the pooled rows, M = 100, the same number of evaluations."""
    sites = 10
    flat = training_alone(make_table(folder, rows), "exact", rounds, folder, f"against-pooled-{rows}") | {
        "model.num-inducing": 100
    }
    grid = engine.InProcessGrid(client_app.app, flat, engine.simulated_nodes(sites))
    run = server_app.execute(grid, flat, lambda row, total: None)
    federated, evaluations = training_seconds(run)
    config = parse_config(flat)
    all_sites = load_all_sites(config, sites)
    described = {own.site: own.describe() for own in all_sites}
    agreed = agree({k: SiteDescription(d.arrays, d.schema, d.num_examples) for k, d in described.items()})
    encoded = [own.encode(Preparation.from_wire(agreed.arrays, agreed.schema)) for own in all_sites]
    inputs = torch.from_numpy(np.concatenate([data.x for data in encoded]))
    targets = torch.from_numpy(np.concatenate([data.y for data in encoded]))
    model = SparseGP(config.model, inputs[:100])
    started = time.perf_counter()
    used = fit(model, lambda: pooled_bound(model, inputs, targets) / len(targets), evaluations, tolerance=0.0)
    pooled = time.perf_counter() - started
    return {
        "rows": rows,
        "evaluations": f"{evaluations} / {used}",
        "exact, ten sites, ms per evaluation": 1e3 * federated / evaluations,
        "pooled, ms per evaluation": 1e3 * pooled / used,
        "ratio": (federated / evaluations) / (pooled / used),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="*", default=[5, 50, 500])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ray", type=int, nargs="*", default=[])
    chosen = parser.parse_args()
    limit_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parts = [in_process(k, o, chosen.rounds, folder) for k in chosen.sites for o in ("average", "exact")]
        against = [exact_against_pooled(rows, 30, folder) for rows in (1000, 10_000)]
        seconds = {row["sites"]: float(row["s per round"]) for row in parts if row["objective"] == "exact"}
        ray: list[dict[str, float | str]] = []
        for sites in chosen.ray:
            wall = on_ray(sites, chosen.rounds, folder)
            ray.append({"sites": sites, "s per round on Ray": wall, "over in-process": wall / seconds[sites]})
    ray_words = " --ray " + " ".join(map(str, chosen.ray)) if ray else ""
    parts_of_page = [
        "# Where the time of a round goes",
        f"Made by `python simulations/benchmarks/overhead.py{ray_words}`:"
        f" {ROWS_PER_SITE} rows a site, 8 inputs, M = 50, one thread, in process. Shares of the wall time of a round.",
        table(parts),
        "Exact mode against L-BFGS on the pooled rows, M = 100, the same number of evaluations, one thread:",
        table(against),
    ]
    if ray:
        words = "The same exact rounds through `flwr run` on Ray (two exchanges a round, 0.1 s floor each):"
        parts_of_page += [words, table(ray)]
    write_page("overhead", parts_of_page)


if __name__ == "__main__":
    main()
