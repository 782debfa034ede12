"""The papers' other models by every way to run them: command line, resumed, prediction, report, Ray, SuperNodes.

    python simulations/every_way.py [--ways run ray nodes] [--models vae …]

Each is a small run on a table of counts of words made here: whether it goes through, not how good it is. The ledger is
``results/every_way/ledger.jsonl``, the page ``simulations/results/every_way.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ledger import done, versions
from sfvi_runs import RESULTS, RUNS, write_table

from fedgp_flower.data.sites import write_partition
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.user_config import parse_assignments

NAME = "every_way"
WORDS = ["ball", "goal", "disk", "file", "say"]
NETWORK = {"sfvi.classes": 2, "sfvi.hidden": 8, "sfvi.samples": 1, "sfvi.initial-scale": 0.1}
FAST = {**NETWORK, "sfvi.learning-rate": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "pvi-glm": {"method": "pvi-glm", "num-server-rounds": 12},
    "pvi-bnn": {"method": "pvi-bnn", "bnn.classes": 2, "bnn.hidden": 8, "num-server-rounds": 9},
    "glmm": {"method": "sfvi", "sfvi.model": "glmm", "sfvi.unit-column": "unit", "num-server-rounds": 40},
    "hierarchical-bnn": {"method": "sfvi", "sfvi.model": "hierarchical-bnn", **FAST, "num-server-rounds": 40},
    "fedpop": {"method": "sfvi", "sfvi.model": "fedpop", **NETWORK, "num-server-rounds": 40},
    "vae": {"method": "sfvi", "sfvi.model": "vae", **NETWORK, "num-server-rounds": 40},
    "prodlda": {"method": "sfvi", "sfvi.model": "prodlda", **FAST, "num-server-rounds": 40},
    "deep-kernel": {"method": "deep-kernel", "deep.hidden": 8, "deep.features": 4, "num-server-rounds": 9},
}
"""Method and keys."""
PERSONAL = ("hierarchical-bnn", "fedpop")
"""Models that know nothing of classes at a site that nobody has seen: they predict at site 1."""
FEW = 6
"""Rounds with real SuperNodes, where an exchange takes seconds."""
GENERAL = {"Predictions on held-out rows", "Convergence", "Sites", "Data", "Communication and time", "Configuration"}
GENERAL |= {"Failures and numerical repairs", "Saved posterior"}
"""Sections that reports of all methods have."""
LINES = (
    "A made-up table of 150 documents with counts of five words, two themes, three sites; `vae` sees whether a word is",
    "there, `glmm` has a column of ten units. *run*: `fedgp run`, accuracy of held-out rows; *resumed*: the same",
    "killed (SIGKILL) after two rounds and resumed, difference of the held-out NLL; *predict*: `fedgp predict` on the",
    f"table, share of rows given to their theme, for {' and '.join(PERSONAL)} at site 1; *report*: its sections",
    "beside those of all methods (*Calibration* is the reliability diagram); *ray*: `fedgp simulate`, which is",
    "`flwr run` with Flower's simulation engine, difference of the NLL from *run*; *SuperNodes*: the same of",
    "`python -m fedgp_flower.deploy_demo`, a SuperLink with TLS and three SuperNodes with a CSV file each, and as many",
    f"rounds ({FEW}) of `fedgp run`; a real site of `sfvi` draws by a seed that it tells nobody, so that there a",
    "difference is what other draws make. Seconds are wall time on a busy machine. Rows that are in the ledger are not",
    "made again: the versions are those of runs that are there.",
    "",
)


def table_of(model: str) -> Path:
    """Documents of two themes."""
    rng, path = np.random.default_rng(0), (RUNS / NAME / f"{model}.csv").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    theme = np.arange(150) % 2
    rates = np.where(theme[:, None] == 1, [6, 6, 0.2, 0.2, 9], [0.2, 0.2, 6, 6, 9])
    counts = rng.poisson(rates)
    frame = pd.DataFrame(counts > 2 if model == "vae" else counts, columns=WORDS).astype(float)
    units = {"unit": rng.integers(10, size=150)} if model == "glmm" else {}
    frame.assign(**units, theme=np.where(theme == 1, "game", "disk")).to_csv(path, index=False)
    return path


def words_of(model: str, name: str, **changes: int) -> list[str]:
    """Keys of a run, as the command line has them; an earlier one of this name is removed."""
    shutil.rmtree(RUNS / NAME / name, ignore_errors=True)
    keys = {"dataset": table_of(model), "target": "theme", "model.likelihood": "bernoulli", "name": name}
    keys |= {"output-dir": (RUNS / NAME).resolve(), "baselines.local-only": "false", "baselines.pooled": "false"}
    keys |= {"standardise": "false"} if model in ("vae", "prodlda", "glmm") else {}
    changed = {key.replace("_", "-"): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in {**keys, **MODELS[model], **changed}.items()]


def fedgp(*words: str, module: str = "cli") -> float:
    """Seconds of a command that must end well."""
    begun = time.monotonic()
    command = [sys.executable, "-m", f"fedgp_flower.{module}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{module} {' '.join(words)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return time.monotonic() - begun


def metrics(name: str) -> dict[str, Any]:
    """Of a finished run."""
    return dict(json.loads((RUNS / NAME / name / "metrics.json").read_text())["test"])


def by_command(model: str) -> dict[str, Any]:
    """Run, predict, read the report; run again, kill, resume."""
    took = fedgp("run", "--sites", "3", *words_of(model, model))
    folder, table = RUNS / NAME / model, table_of(model)
    where = ("--site", "1") if model in PERSONAL else ()
    fedgp("predict", str(folder), "--input", str(table), "--output", str(folder / "new.csv"), *where)
    new, target = pd.read_csv(folder / "new.csv"), pd.read_csv(table)["theme"]
    right = float(((new["probability of game"] > 0.5) == (target == "game")).mean())
    page = (folder / "report.html").read_text()
    heads = [re.sub("<[^>]+>", "", own).strip() for own in re.findall(r"<h[234][^>]*>(.*?)</h[234]>", page, re.S)]
    told = {"accuracy": metrics(model)["accuracy"], "seconds run": took}
    return {**told, "right": right, "headings": heads, **killed(model)}


def killed(model: str) -> dict[str, Any]:
    """How far a run that was killed and resumed ends from one that was not."""
    name = f"{model}-killed"
    history = RUNS / NAME / name / "history.csv"
    command = ["run", "--sites", "3", *words_of(model, name)]
    whole = [sys.executable, "-m", "fedgp_flower.cli", *command]
    process = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (history.exists() and len(history.read_text().splitlines()) > 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    early = not (RUNS / NAME / name / "metrics.json").exists()
    if early:
        fedgp(*command, "resume=true")
    return {"killed": early, "off": abs(metrics(name)["nll"] - metrics(model)["nll"])}


def by_ray(model: str) -> dict[str, Any]:
    """Flower's simulation engine."""
    took = fedgp("simulate", "--sites", "3", *words_of(model, f"{model}-ray"))
    return {"off ray": abs(metrics(f"{model}-ray")["nll"] - metrics(model)["nll"]), "seconds ray": took}


def by_nodes(model: str) -> dict[str, Any]:
    """A SuperLink and SuperNodes on this machine; files have the sites' names in simulation, for the same draws."""
    words, folder = words_of(model, f"{model}-nodes", num_server_rounds=FEW), RUNS / NAME / f"{model}-files"
    shutil.rmtree(folder, ignore_errors=True)
    files = write_partition(parse_config(parse_assignments(words)), 3, folder)
    for number, file in enumerate(files):
        for path in (file, file.with_suffix(".test.csv")):
            path.rename(folder / path.name.replace(file.stem, str(number)))
    data = [str(folder / f"{number}.csv") for number in range(3)]
    machines = str(RUNS / NAME / "machines")
    took = fedgp(*words, "--folder", machines, "--data", data[0], *data[1:], module="deploy_demo")
    fedgp("run", "--sites", "3", *words_of(model, f"{model}-few", num_server_rounds=FEW))
    off = abs(metrics(f"{model}-nodes")["nll"] - metrics(f"{model}-few")["nll"])
    return {"off nodes": off, "seconds nodes": took}


WAYS = {"run": by_command, "ray": by_ray, "nodes": by_nodes}
ENGINES = {"ray": "ray", "nodes": "SuperNodes"}
"""Ways that should end where ``fedgp run`` does, and their columns."""


def page(found: dict[str, dict[str, Any]]) -> None:
    """A row for each model."""
    table = []
    for model in MODELS:
        own = {key: value for way in WAYS for key, value in found.get(f"{model} {way}", {}).items()}
        if "accuracy" not in own:
            continue
        cells = {"model": model, "run": f"{own['accuracy']:.2f}, {own['seconds run']:.0f} s"}
        cells["resumed"] = f"{own['off']:.1g}" if own["killed"] else "ended before it was killed"
        cells |= {"predict": f"{own['right']:.2f}", "report": ", ".join(h for h in own["headings"] if h not in GENERAL)}
        for way, column in ENGINES.items():
            there = f"off {way}" in own
            cells[column] = f"{own[f'off {way}']:.1g}, {own[f'seconds {way}']:.0f} s" if there else "not run"
        table.append(cells)
    made = [f"Made by `python simulations/{NAME}.py`. {versions(found.values())}", *LINES]
    write_table(RESULTS / f"{NAME}.md", "Every model, by every way to run it", made, pd.DataFrame(table))


def main() -> None:
    """What is asked for and not in the ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    asked, ledger = parser.parse_args(), RUNS / NAME / "ledger.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    for way in asked.ways:
        for model in asked.models:
            found = done([(f"{model} {way}", partial(WAYS[way], model))], ledger, np.inf)
            print(found[f"{model} {way}"], flush=True)
            page(found)


if __name__ == "__main__":
    main()
