"""What studies share: runs and results that are made once, tables of data, and rows of figures."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Row: TypeAlias = dict[str, Any]
Keys: TypeAlias = Mapping[str, Any]
Array: TypeAlias = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "simulations" / "results"
RUNS = Path(os.environ.get("FEDGP_STUDIES", ROOT / "results" / "studies"))
"""Runs, tables of data and the ledger; git does not keep them."""
ALONE: Keys = {"baselines.linear": False, "baselines.local-only": False, "baselines.pooled": False}
"""Without the models that a run is compared with."""
CHECKING = False
"""Whether the keys of every run are only checked: no run is made, no table is written, and figures are made up."""
MADE: collections.Counter[str] = collections.Counter()
"""How many runs and results of this process are of which version of the code."""


def data_dir() -> Path:
    """The folder of the data sets."""
    return Path(os.environ.get("FEDGP_DATA", "."))


@cache
def version() -> str:
    """The commit that runs, with a mark where files differ from it."""
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def versions() -> str:
    """A sentence for a page."""
    return "Runs by version of the code: " + ", ".join(f"{n} {c}" for n, c in MADE.items()) + "." if MADE else ""


class Pretended(dict[str, Any]):
    """Made-up figures: what is not there is 1, or a row of one site."""

    def __missing__(self, name: str) -> Any:
        """A list for what is by site, a mapping where one is expected, else 1."""
        if name == "per_site":
            return [Pretended(SCORES, site="0", label="0")]
        if name in {"local_only", "pooled", "linear", "mean"}:
            return Pretended(SCORES)
        return Pretended() if name in {"bytes", "seconds", "method_details"} else 1.0


SCORES = Pretended(nll=1.0, rmse=1.0, accuracy=1.0, coverage_95=1.0, num_examples=1)

# ------------------------------------------------------------------------------------------------ made once


def remembered(study: str, of: Sequence[object], work: Callable[[], Row]) -> Row:
    """What ``work`` returned for these arguments, with its processor seconds; from the ledger where it is there."""
    if CHECKING:
        return Pretended()
    ledger, name = RUNS / f"{study}.jsonl", json.dumps([str(word) for word in of])
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    entry = next((found for found in map(json.loads, lines) if found["name"] == name), None)
    if entry is None:
        begun = time.process_time()
        result = work()
        entry = {"name": name, "version": version(), "row": result, "seconds": time.process_time() - begun}
        ledger.parent.mkdir(parents=True, exist_ok=True)
        with ledger.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    MADE[entry["version"]] += 1
    return {**entry["row"], "seconds": entry["seconds"]}


def fit(keys: Keys, sites: int = 10, grid: Callable[..., Any] | None = None) -> Row:
    """``metrics.json`` of a run in this process, and its ``folder``; made once, and resumed where it was cut off.

    Args:
        keys: Keys of the configuration. There are no baselines and no predictions unless they ask for them.
        sites: Number of simulated sites; 0 takes the natural groups.
        grid: Makes the Grid from ClientApp, keys and nodes where it is not the ordinary one; the keys must tell
            such runs apart, by a ``name`` for instance.
    """
    from fedgp_flower.errors import FedGPError
    from fedgp_flower.run.in_process import run_in_process
    from fedgp_flower.run.registry import parse_config

    flat = {"data-dir": str(data_dir()), "evaluate-every": 0, "keep-predictions": False, **ALONE, **keys}
    known = {key: value for key, value in sorted(flat.items()) if key != "data-dir"}
    if CHECKING:
        try:
            parse_config(flat)
        except FedGPError as error:
            return {"refused": str(error)}
        return Pretended(folder=RUNS, test=SCORES, test_standardised=SCORES, converged=True)
    digest = hashlib.sha256(json.dumps([known, sites], default=str).encode()).hexdigest()[:12]
    name = "-".join(str(flat.get(key, "")) for key in ("method", "name") if flat.get(key)) + f"-{digest}"
    folder = RUNS / "runs" / name
    flat |= {"output-dir": str(folder.parent), "name": name, "resume": (folder / "config.toml").exists()}
    stamp = folder / "made-by.txt"
    if not (folder / "metrics.json").exists():
        try:
            if grid is None:
                run_in_process(flat, sites)
            else:
                _through(grid, flat, sites)
        except FedGPError as error:
            return {"refused": str(error), "folder": folder}
        stamp.write_text(version(), encoding="utf-8")
    MADE[stamp.read_text(encoding="utf-8") if stamp.exists() else "unknown"] += 1
    return {**json.loads((folder / "metrics.json").read_text(encoding="utf-8")), "folder": folder}


def _through(grid: Callable[..., Any], flat: Row, sites: int) -> None:
    """A run over a Grid that is not the ordinary one."""
    from fedgp_flower import client_app, server_app
    from fedgp_flower.data.sites import count_sites, simulated_nodes
    from fedgp_flower.run.registry import parse_config

    nodes = simulated_nodes(count_sites(parse_config(flat), sites))
    server_app.execute(grid(client_app.app, flat, nodes), flat, lambda row, total: None)


def history(run: Row) -> pd.DataFrame:
    """A row per round of a run."""
    if CHECKING:
        return pd.DataFrame({"visits": [5, 10, 20], "test_nll": 1.0})
    return pd.read_csv(run["folder"] / "history.csv")


def posterior_arrays(run: Row) -> dict[str, Array]:
    """The arrays of a run's saved posterior."""
    from fedgp_flower.run.artefacts import read_run

    if CHECKING:
        return {"q.mean": np.zeros(5), "q.log_scale": np.zeros(5)}
    saved = read_run(run["folder"]).saved
    assert saved is not None, f"{run['folder']} saved no posterior"
    return {name: np.array(array) for name, array in saved.arrays.items()}


# ------------------------------------------------------------------------------------------------ figures


def figures(run: Row, beside: Sequence[str] = ()) -> Row:
    """NLL, RMSE or accuracy, and coverage of the held-out rows, with the NLL of the baselines named."""
    if "refused" in run:
        return {"refused": run["refused"].partition("\n")[0][:90]}
    test = run["test"]
    found = {"NLL": test["nll"]} | {key: test[key] for key in ("rmse", "accuracy") if key in test}
    found |= {"coverage": test["coverage_95"]} if "coverage_95" in test else {}
    return found | {name: (run.get(name) or {}).get("nll") for name in beside}


def cost(run: Row) -> Row:
    """Exchanges with every site, and megabytes that a site sends."""
    return {"exchanges": run["exchanges"], "MB up a site": run["bytes"]["up"] / run["sites"] / 1e6}


def averaged(rows: Iterable[Row], by: Sequence[str], worst: Sequence[str] = ()) -> list[Row]:
    """Means of the numbers of rows that agree in ``by``, how many rows there are, and the largest of ``worst``."""
    found = []
    for _, group in pd.DataFrame(list(rows)).groupby(list(by), sort=False, dropna=False):
        row: Row = {name: group[name].iloc[0] for name in by} | {"runs": len(group)}
        numbers = group.drop(columns=list(by)).select_dtypes("number")
        row |= {str(name): float(column.mean()) for name, column in numbers.items()}
        found.append(row | {f"{name}, worst": float(group[name].max()) for name in worst})
    return found


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± standard error."""
    found = np.asarray(list(values), dtype=float)
    mean = f"{found.mean():.{digits}f}"
    return mean if len(found) < 2 else f"{mean} ± {found.std(ddof=1) / math.sqrt(len(found)):.{digits}f}"


def markdown(rows: Sequence[Row]) -> str:
    """A table of rows; a cell that a row lacks is empty."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([_cell(row.get(key)) for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if 0.001 <= abs(value) < 10 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


# ------------------------------------------------------------------------------------------------ data


def kept_table(name: str, make: Callable[[], pd.DataFrame], held_out: Sequence[Sequence[int]] = ()) -> str:
    """Path of a table that is made once; ``held_out`` are the rows that its splits 0, 1, … hold out."""
    path = (RUNS / "data" / f"{name}.parquet").resolve()
    if not path.exists() and not CHECKING:
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = make()
        if held_out:
            listing = {"n": len(frame), "n_splits": len(held_out), "test": [list(map(int, own)) for own in held_out]}
            with gzip.open(path.with_suffix(".splits.json.gz"), "wt") as out:
                json.dump(listing, out)
        frame.to_parquet(path)
    return str(path)


def train_and_test(name: str, make: Callable[[], tuple[pd.DataFrame, pd.DataFrame]]) -> str:
    """Path of a table of training rows and the rows that split 0 holds out."""
    path = RUNS / "data" / f"{name}.parquet"
    if CHECKING or path.exists():
        return str(path.resolve())
    train, test = make()
    rows = range(len(train), len(train) + len(test))
    return kept_table(name, lambda: pd.concat([train, test], ignore_index=True), [rows])


def sampled(name: str, rows: int) -> str:
    """So many rows of a UCI table, drawn at random."""
    whole = data_dir() / "uci" / f"{name}.csv.gz"

    def make() -> pd.DataFrame:
        table = pd.read_csv(whole)
        return table.sample(min(rows, len(table)), random_state=0, ignore_index=True)

    return kept_table(f"{name}-{rows}", make)


def images(part: str, side: int = 28) -> tuple[Array, NDArray[np.uint8]]:
    """MNIST: pixels [N, side²] between 0 and 1, means of squares where the side is 14, and digits."""
    packed = (data_dir() / "mnist" / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    pixels, digits = (gzip.decompress(path.read_bytes()) for path in packed)
    x = np.frombuffer(pixels, np.uint8)[16:].reshape(-1, side, 28 // side, side, 28 // side) / 255.0
    return x.mean((2, 4)).reshape(len(x), -1), np.frombuffer(digits, np.uint8)[8:]


def image_table(name: str, parts: Callable[[], Iterable[tuple[str, Array, Array, Array]]], side: int = 14) -> str:
    """Path of a table of images: of the training and the test images those chosen, their digits and their sites."""

    def make() -> tuple[pd.DataFrame, pd.DataFrame]:
        frames = []
        for part, chosen, digits, site in parts():
            frame = pd.DataFrame(images(part, side)[0][chosen], columns=[f"p{i}" for i in range(side**2)])
            frames.append(frame.assign(silo=[f"silo {k:03d}" for k in site], digit=digits.astype(float)))
        return frames[0], frames[1]

    return train_and_test(name, make)


IMAGES: Keys = {
    "target": "digit",
    "split": 0,
    "standardise": False,
    "partitioner": "natural",
    "partition.column": "silo",
}
"""Keys of a run on a table of images."""


def tuned(x: Array, y: Array, likelihood: str, grid: Mapping[str, Sequence[float]], seed: int = 0) -> Any:
    """Boosting of rows at the setting of a grid with the lowest loss out of its folds."""
    from sklearn.model_selection import ParameterGrid

    from fedgp_flower.clients.boosting import boosted

    found = (boosted(x, y, likelihood, seed, **setting) for setting in ParameterGrid(dict(grid)))
    return min(found, key=lambda own: own.loss)


def sites_of(keys: Keys, sites: int) -> tuple[dict[str, Any], float]:
    """The standardised rows of simulated sites as they agree on them, by site, and the scale of the target."""
    from fedgp_flower.agreement import agree
    from fedgp_flower.data.sites import load_all_sites
    from fedgp_flower.data.standardisation import Preparation
    from fedgp_flower.run.registry import parse_config

    config = parse_config({"data-dir": str(data_dir()), **ALONE, **keys})
    raw = load_all_sites(config, sites)
    told = {own.site: own.describe(config.privacy.bounds if config.privacy.epsilon else None) for own in raw}
    agreed = agree(told, likelihood=config.model.likelihood)
    preparation = Preparation.from_wire(agreed.arrays, agreed.schema)
    return {str(own.site): own.encode(preparation) for own in raw}, float(agreed.arrays["target.scale"])
