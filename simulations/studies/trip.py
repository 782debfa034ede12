"""An exchange with real SuperNodes: Flower's programs and those of `fedgp site serve`.

Imports, each in a new process, medians of nine turns; compiled modules are kept. Then a SuperLink and SuperNodes on
this machine, on which `sgpr` (M = 50, 2000 rows a site) and an app that answers nothing (the same imports, one kernel)
run in turns. A trip is from sending to the last reply; processor seconds are of all processes of the SuperNodes, over
all messages of a run, the first among them, which installs the app and reads the table. Memory is that of a site
between messages; a page that several processes share counts once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from simulations.common import ALONE, Row

PROGRAMS = ("flwr", "fedgp")
LIBRARIES = "flwr.clientapp, torch, gpytorch"
KERNEL = "gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())"
"""The first kernel of a process makes PyTorch load SymPy, to find the shape of a batch."""
OURS = "fedgp_flower.client_app, fedgp_flower.methods.sgpr.client, fedgp_flower.run.registry as r; r.parse_config({})"
IMPORTS = {
    "flwr.clientapp": "flwr.clientapp",
    LIBRARIES: LIBRARIES,
    "ClientApp, client of sgpr, a configuration": OURS,
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


def smooth(rows: int) -> pd.DataFrame:
    """Eight inputs, a smooth function of two of them, noise 0.1."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.uniform(-2, 2, (rows, 8)), columns=[f"x{i}" for i in range(1, 9)])
    return frame.assign(y=np.sin(2 * frame["x1"]) * frame["x2"] + 0.1 * rng.standard_normal(rows))


def import_seconds(what: str) -> float:
    """Processor seconds of an import in a new process."""
    code = f"import time; import {what}; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def imports(turns: int) -> Iterator[Row]:
    """A row for each import."""
    found = pd.DataFrame({name: import_seconds(what) for name, what in IMPORTS.items()} for _ in range(turns))
    shares = found.div(found[LIBRARIES], axis=0).median()
    for name in found:
        row = {"table": "Imports", "import": name, "processor s": found[name].median()}
        yield row | {f"over {LIBRARIES}, within a turn": shares[name]}


def of_sites(token: str) -> Iterator[psutil.Process]:
    """The processes of all SuperNodes."""
    from fedgp_flower.deploy.processes import family

    for one in family(token):
        with suppress(psutil.NoSuchProcess):
            words = [Path(word).name for other in (one, *one.parents()) for word in other.cmdline()]
            if {"supernode", "flower-supernode"} & set(words):
                yield one


def node_seconds(token: str) -> float:
    """Processor seconds so far of all SuperNodes and what they started."""
    total = 0.0
    for one in of_sites(token):
        with suppress(psutil.NoSuchProcess):
            total += sum(one.cpu_times()[:4])
    return total


def node_mebibytes(token: str) -> float:
    """Memory of all SuperNodes now; a page that several processes share counts once."""
    return sum(one.memory_full_info().pss for one in of_sites(token)) / 2**20


def trips(flower: Any, project: Path, config: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds of an exchange after the first round, and exchanges of the whole run."""
    from fedgp_flower.deploy.submission import COMPLETED

    status, details = flower.outcome(flower.submit(project, config))
    assert status == COMPLETED, f"the run ended as {status}: {details}"
    output = Path(str(config["output-dir"]))
    if "method" not in config:
        return median(json.loads(output.read_text())[1:]), int(config["num-server-rounds"])
    course = pd.read_csv(output / str(config["name"]) / "history.csv")
    exchanges = json.loads((output / str(config["name"]) / "metrics.json").read_text())["exchanges"]
    return float((course["seconds"].iloc[1:] / course["exchanges"].diff().iloc[1:]).median()), int(exchanges)


def measured(folder: Path, sites: int, rounds: int, repeats: int) -> Iterator[Row]:
    """A row for each run: seconds of a trip, and processor seconds of a site for it."""
    from fedgp_flower.data.sites import write_partition
    from fedgp_flower.deploy import machines
    from fedgp_flower.deploy.demo import federation
    from fedgp_flower.deploy.submission import project_folder
    from fedgp_flower.run.registry import parse_config

    smooth(2500 * sites).to_csv(folder / "rows.csv", index=False)
    flat: dict[str, Any] = {"method": "sgpr", "dataset": str(folder / "rows.csv"), "num-server-rounds": rounds, **ALONE}
    flat |= {"evaluate-every": 0, "keep-predictions": False, "model.num-inducing": 50, "min-sites": sites}
    flat |= {"output-dir": str(folder / "runs")}
    files = write_partition(parse_config(flat), sites, folder / "data")
    (folder / "empty").mkdir()
    for name, text in (("pyproject.toml", PROJECT), ("empty_client.py", CLIENT), ("empty_server.py", SERVER)):
        (folder / "empty" / name).write_text(text)
    empty = {"output-dir": str(folder / "seconds.json"), "num-server-rounds": 2 * rounds + 3}
    for programs in PROGRAMS:
        with pytest.MonkeyPatch.context() as patch:
            if programs == "flwr":
                patch.setattr(machines.SiteFolder, "command", as_flower_starts_it(machines.SiteFolder.command))
            with federation(folder / programs, files, app="any") as flower:
                token = flower.processes.token
                for repeat in range(repeats):
                    ours = (project_folder(flower.home), flat | {"name": f"{programs}-{repeat}"})
                    for name, (project, config) in {"empty": (folder / "empty", empty), "sgpr": ours}.items():
                        before = node_seconds(token)
                        seconds, count = trips(flower, project, config)
                        spent = (node_seconds(token) - before) / (count * sites)
                        row = {"table": "Trips", "programs": programs, "app": name, "s a trip": seconds}
                        yield {**row, "processor s a message": spent, "trips": count}
                time.sleep(5)
                yield {"table": "Memory", "programs": programs, "MiB a site": node_mebibytes(token) / sites}


def as_flower_starts_it(command: Callable[..., Any]) -> Callable[..., Any]:
    """A SuperNode by Flower's program, without ours around it."""

    def plain(*given: Any) -> Any:
        words, folder, variables = command(*given)
        program = str(Path(sys.executable).with_name("flower-supernode"))
        return [program, *words[4:]], folder, {"PATH": variables["PATH"]}

    return plain


def study(sites: int = 3, rounds: int = 3, repeats: int = 2, turns: int = 9) -> Iterator[Row]:
    """Tables of imports, of trips, and of their ratios; without sites the imports alone."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is set an app is compiled anew for every message
    yield from imports(turns)
    if not sites:
        return
    with tempfile.TemporaryDirectory(prefix="trip-") as scratch:
        rows = list(measured(Path(scratch), sites, rounds, repeats))
    yield from rows
    spent = (
        pd.DataFrame(row for row in rows if row["table"] == "Trips").groupby(["programs", "app"])["s a trip"].median()
    )
    for app in ("empty", "sgpr"):
        ratio = spent["fedgp", app] / spent["flwr", app]
        yield {
            "table": "Medians",
            "what": f"{app}, fedgp over flwr",
            "ratio": ratio,
        }
    over = spent["fedgp", "sgpr"] / spent["flwr", "empty"]
    yield {
        "table": "Medians",
        "what": "sgpr by fedgp over empty by flwr",
        "ratio": over,
    }
