"""What an exchange with real SuperNodes costs beside that of an empty app with the same imports.

    python simulations/benchmarks/trip.py [--sites 3] [--rounds 3] [--repeats 2]     (--sites 0: imports alone)

A SuperLink and SuperNodes are started here. On them run in turns `fsgp` (objective `exact`, M = 50, 2000 rows a site)
and an app that imports Flower, torch and GPyTorch, makes one kernel and answers nothing. The page is
``simulations/results/trip.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import psutil
from common import make_table, table, training_alone, write_page

from fedgp_flower.data.sites import write_partition
from fedgp_flower.deploy.credentials import create_node_key
from fedgp_flower.deploy.demo import connect, create_sites, start_superlink, start_supernode, wait_online
from fedgp_flower.deploy.launch import HOST
from fedgp_flower.deploy.processes import Processes, belonging, free_ports, interruptible, snapshot
from fedgp_flower.deploy.submission import COMPLETED, Flower, environment, project_folder
from fedgp_flower.errors import RunError
from fedgp_flower.run.registry import parse_config

LIBRARIES = "flwr.clientapp, torch, gpytorch"
KERNEL = "gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())"
"""The first kernel of a process makes PyTorch load SymPy, to find the shape of a batch."""
OURS = "fedgp_flower.client_app, fedgp_flower.methods.sgpr.client, fedgp_flower.run.registry as r; r.parse_config({})"
TURNS = 9
IMPORTS = {
    "flwr.clientapp": "flwr.clientapp",
    LIBRARIES: LIBRARIES,
    "ClientApp, client of fsgp, a configuration": OURS,
    "the same and pandas": f"pandas, {OURS}",
}
PROJECT = """
[project]
name = "empty"
version = "1.0.0"
description = "Answers nothing"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "benchmark"
fab-include = ["*.py"]
[tool.flwr.app.components]
serverapp = "empty_server:app"
clientapp = "empty_client:app"
[tool.flwr.app.config]
output-dir = ""
num-server-rounds = 1
"""
CLIENT = f"""
import {LIBRARIES}
from flwr.app import Message, RecordDict
{KERNEL}
app = flwr.clientapp.ClientApp()

@app.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)
"""
SERVER = """
import json, time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    nodes, seconds = list(grid.get_node_ids()), []
    for _ in range(context.run_config["num-server-rounds"]):
        begun, pause = time.monotonic(), 0.01
        waiting = set(grid.push_messages([Message(RecordDict(), dst_node_id=n, message_type="query") for n in nodes]))
        while waiting:
            arrived = {m.metadata.reply_to_message_id for m in grid.pull_messages(list(waiting))}
            waiting -= arrived
            if not arrived:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.5)
        seconds.append(time.monotonic() - begun)
    Path(context.run_config["output-dir"]).write_text(json.dumps(seconds))
"""


def import_seconds(what: str) -> float:
    """Processor seconds of an import in a new process."""
    code = f"import time; import {what}; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def empty_app(folder: Path) -> Path:
    """The app that answers nothing."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "empty_client.py").write_text(CLIENT)
    (folder / "empty_server.py").write_text(SERVER)
    return folder


def node_seconds(processes: Processes) -> float:
    """Processor seconds so far of all SuperNodes and what they started."""
    total = 0.0
    for pid in belonging(snapshot(processes.token), {}):
        with suppress(psutil.NoSuchProcess):
            one = psutil.Process(pid)
            chain = [one, *one.parents()]
            if any("flower-supernode" in " ".join(other.cmdline()) for other in chain):
                total += sum(one.cpu_times()[:4])
    return total


def complete(flower: Flower, project: Path, config: Mapping[str, Any]) -> None:
    """Submit and wait for the end.

    Raises:
        RunError: the run did not complete.
    """
    status, details = flower.outcome(flower.submit(project, config))
    if status != COMPLETED:
        raise RunError(f"the run ended as {status}: {details}")


def trips_of_ours(flower: Flower, project: Path, config: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds of an exchange after the first round, and exchanges of the whole run."""
    complete(flower, project, config)
    run = Path(str(config["output-dir"])) / str(config["name"])
    history = pd.read_csv(run / "history.csv")
    exchanges = history["exchanges"].diff().iloc[1:]
    whole = json.loads((run / "metrics.json").read_text())["exchanges"]  # one more: scores after the last round
    return float((history["seconds"].iloc[1:] / exchanges).median()), int(whole)


def trips_of_empty(flower: Flower, project: Path, scratch: Path, count: int) -> tuple[float, int]:
    """The same of an app that answers nothing."""
    complete(flower, project, {"output-dir": str(scratch), "num-server-rounds": count})
    return median(json.loads(scratch.read_text())[1:]), count


def measured(folder: Path, sites: int, rounds: int, repeats: int) -> list[dict[str, float | str]]:
    """A row for each run: seconds of a trip, and processor seconds of a site for it."""
    flat = training_alone(make_table(folder, 2500 * sites), "exact", rounds, folder / "runs", "x")
    flat |= {"model.num-inducing": 50, "min-sites": sites}
    files = write_partition(parse_config(flat), sites, folder / "data")
    nodes, found = create_sites(folder, files), []
    for node in nodes:
        (node.folder / "state").mkdir(parents=True)
    (folder / "server").mkdir()
    port, *ports = free_ports(1 + sites)
    with Processes(environment(folder / "operator"), folder / "logs") as processes:
        authority = start_superlink(processes, folder, port).authority
        flower = connect(processes, folder, port, authority)
        flower.wait_until_ready(f"https://{HOST}:{port}", trust=authority)
        for node, own in zip(nodes, ports, strict=True):
            flower.json("supernode", "register", str(create_node_key(node.key)), flower.connection, "--name", node.name)
            start_supernode(processes, node, port, own, authority)
        wait_online(flower, sites)
        empty, app = empty_app(folder / "empty"), project_folder(folder)
        for repeat in range(repeats):
            for name in ("empty", "ours"):
                before = node_seconds(processes)
                if name == "ours":
                    seconds, trips = trips_of_ours(flower, app, flat | {"name": f"run-{repeat}"})
                else:
                    seconds, trips = trips_of_empty(flower, empty, folder / "seconds.json", 2 * rounds + 3)
                spent = (node_seconds(processes) - before) / (trips * sites)
                found.append({"app": name, "s a trip": seconds, "processor s a message": spent, "trips": str(trips)})
                print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    chosen = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is set an app is compiled anew for every message
    turns = pd.DataFrame({name: import_seconds(what) for name, what in IMPORTS.items()} for _ in range(TURNS))
    print(turns.to_string(), flush=True)
    shares = turns.div(turns[LIBRARIES], axis=0).median()
    imports = [
        {"import": n, "processor s": turns[n].median(), f"over {LIBRARIES}, within a turn": shares[n]} for n in turns
    ]
    command = f"python simulations/benchmarks/trip.py --sites {chosen.sites} --rounds {chosen.rounds}"
    page = [
        "# An exchange with real SuperNodes, beside an empty app with the same imports and one kernel",
        f"`{command} --repeats {chosen.repeats}`. Imports, each in a new process, medians of {TURNS} turns;"
        " compiled modules are kept, as Python does unless told otherwise by `PYTHONDONTWRITEBYTECODE`:",
        table(imports),
    ]
    if chosen.sites:
        with interruptible(), tempfile.TemporaryDirectory(prefix="trip-") as scratch:
            rows = measured(Path(scratch), chosen.sites, chosen.rounds, chosen.repeats)
        by = {name: [row for row in rows if row["app"] == name] for name in ("ours", "empty")}
        ratios = {
            part: median(float(row[part]) for row in by["ours"]) / median(float(row[part]) for row in by["empty"])
            for part in ("s a trip", "processor s a message")
        }
        page += [
            f"{chosen.sites} SuperNodes on this machine, 2000 training rows each; runs in the order shown. A trip"
            " is from sending to the last reply; processor seconds are of all processes of the SuperNodes, over all"
            " messages of a run, the first among them, which installs the app and reads the table.",
            table(rows),
            "Ours over empty, medians: " + ", ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items()) + ".",
        ]
    write_page("trip", page)


if __name__ == "__main__":
    main()
