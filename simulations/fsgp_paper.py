"""The experiments of Guo et al., *Federated sparse Gaussian processes* (2022): RMSE against inducing points.

Three data sets (paper §4): a sine (Eq. 18; 5 sites, 2 a round), a plane wave (Eq. 19; 10 sites, 5 a round), and
KIN40K with 10 000 training and 30 000 test rows (10 sites, 5 a round), sites of uneven size as in the paper. Four
methods: FSGP by averaging (3 local steps, rate 0.1 decayed), FSGP exact, FGPR, and pooled SGPR.

    python simulations/fsgp_paper.py --data-dir DIR [--only sine plane-wave kin40k] [--inducing 16 32] [--jobs 2]

Runs that are complete are not repeated. Table and figure go to ``simulations/results/``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "fsgp_paper"
RESULTS = HERE / "results"
METHODS = {
    "FSGP, averaging": "C0",
    "FSGP, exact": "C1",
    "FGPR": "C2",
    "pooled SGPR": "black",
}


@dataclass(frozen=True)
class Experiment:
    """A data set with the paper's sites, and the numbers of inducing points."""

    dataset: str
    sites: int
    fraction: float
    ratio: float  # largest over smallest site, from the paper's difference of sizes
    inducing: tuple[int, ...]
    rounds: int  # of averaging; the rate falls from 0.1 to 0.001 over them
    evaluations: int  # of the pooled bound, for exact mode and pooled SGPR


EXPERIMENTS = {
    "sine": Experiment("sine", 5, 0.4, 1.84, (4, 6, 8, 12, 16, 24), 300, 300),
    "plane-wave": Experiment("plane-wave", 10, 0.5, 4.7, (4, 8, 16, 32, 64), 300, 300),
    "kin40k": Experiment("kin40k-10000", 10, 0.5, 4.7, (16, 32, 64, 128, 256, 512), 100, 150),
}


def configuration(experiment: Experiment, method: str, inducing: int, data_dir: Path) -> dict[str, object]:
    """Keys of one run; everything that is not the paper's is the default."""
    common: dict[str, object] = {
        "dataset": experiment.dataset,
        **({"data-dir": str(data_dir)} if experiment.dataset not in {"sine", "plane-wave"} else {}),
        "split": 0,
        "partitioner": "sizes",
        "partition.ratio": experiment.ratio,
        "evaluate-every": 0,
        "model.num-inducing": inducing,
        "model.noise": 0.01,  # σ = 0.1
        "baselines.linear": False,
        "baselines.local-only": False,
        "baselines.pooled": False,
        "baselines.max-evaluations": experiment.evaluations,
        "keep-predictions": False,
        "output-dir": str(RUNS),
        "name": f"{experiment.dataset}-{method}-{inducing}".replace(", ", "-").replace(" ", "-"),
    }
    steps = {"optimizer.steps": 3, "optimizer.learning-rate": 0.1, "optimizer.name": "adam"}
    own: dict[str, dict[str, object]] = {
        "FSGP, averaging": {
            "method": "fsgp",
            "fsgp.objective": "average",
            "fsgp.fraction": experiment.fraction,
            "num-server-rounds": experiment.rounds,
            "optimizer.decay": round(0.01 ** (1 / experiment.rounds), 3),
            **steps,
        },
        "FSGP, exact": {"method": "fsgp", "fsgp.objective": "exact", "num-server-rounds": experiment.evaluations},
        "FGPR": {
            "method": "fgpr",
            "fgpr.fraction": experiment.fraction,
            "num-server-rounds": 60,
            "optimizer.decay": 0.93,
            **steps,
        },
        "pooled SGPR": {"method": "pooled"},
    }
    return common | own[method]


def wanted(names: list[str], data_dir: Path, only: list[int]) -> Iterator[tuple[dict[str, object], int]]:
    """Configurations of the runs that are not complete, cheap ones first."""
    for name in names:
        experiment = EXPERIMENTS[name]
        for inducing in (m for m in experiment.inducing if not only or m in only):
            for method in METHODS:
                if method == "FGPR" and inducing != experiment.inducing[0]:
                    continue  # it has no inducing points
                keys = configuration(experiment, method, inducing, data_dir)
                if not (RUNS / str(keys["name"]) / "metrics.json").exists():
                    yield keys, experiment.sites


def run(task: tuple[dict[str, object], int]) -> str:
    """One run in this process, resumed where it was cut off."""
    from fedgp_flower.run.in_process import run_in_process

    keys, sites = task
    started = (RUNS / str(keys["name"]) / "config.toml").exists()
    folder = run_in_process({**keys, "resume": started}, sites)
    return folder.name


def kin40k_subset(data_dir: Path) -> Path:
    """A folder with 10 000 training and 30 000 test rows of KIN40K, as in the paper; which rows is our draw."""
    folder = RUNS / "data"
    folder.mkdir(parents=True, exist_ok=True)
    frame = pd.read_csv(data_dir / "kin40k.csv.gz")
    frame.to_parquet(folder / "kin40k-10000.parquet")
    test = np.sort(np.random.default_rng(0).permutation(len(frame))[10_000:])
    with gzip.open(folder / "kin40k-10000.splits.json.gz", "wt") as out:
        json.dump({"n": len(frame), "n_splits": 1, "test": [test.tolist()]}, out)
    return folder


def table(names: list[str]) -> pd.DataFrame:
    """A row per finished run."""
    rows = []
    for name in names:
        experiment = EXPERIMENTS[name]
        for method in METHODS:
            for inducing in experiment.inducing:
                source = experiment.inducing[0] if method == "FGPR" else inducing
                keys = configuration(experiment, method, source, Path())
                path = RUNS / str(keys["name"]) / "metrics.json"
                if path.exists():
                    metrics = json.loads(path.read_text())
                    figures = {key: metrics["test"][key] for key in ("rmse", "nll", "coverage_95")}
                    seconds = metrics["seconds"]["total"]
                    rows.append({"data": name, "method": method, "M": inducing, **figures, "seconds": seconds})
    return pd.DataFrame(rows)


def write(frame: pd.DataFrame) -> None:
    """Markdown table and figure of what is there."""
    RESULTS.mkdir(exist_ok=True)
    names = list(dict.fromkeys(frame["data"]))
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = frame[frame["data"] == name]
        for method, colour in METHODS.items():
            line = own[own["method"] == method].sort_values("M")
            style = {"linestyle": "--", "marker": ""} if method == "FGPR" else {"linestyle": "-", "marker": "o"}
            axes.plot(line["M"], line["rmse"], color=colour, label=method, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("inducing points M")
        axes.set_ylabel("RMSE on held-out rows (units of y)")
        axes.set_title(name)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "fsgp_paper.png", dpi=150)
    lines = [
        "# FSGP: RMSE against the number of inducing points",
        "",
        "Made by `python simulations/fsgp_paper.py`.",
        "",
    ]
    for name in names:
        own = frame[frame["data"] == name]
        for figure_name, digits in (("rmse", 4), ("nll", 3)):
            wide = own.pivot(index="method", columns="M", values=figure_name).reindex(list(METHODS)).round(digits)
            lines += [f"## {name}: {figure_name.upper()} of {EXPERIMENTS[name].sites} sites", "", markdown(wide), ""]
    lines += ["![RMSE against M](fsgp_paper.png)", ""]
    (RESULTS / "fsgp_paper.md").write_text("\n".join(lines))


def markdown(wide: pd.DataFrame) -> str:
    """A pivot table as Markdown; what is missing stays empty."""
    head = ["method", *(f"M = {column}" for column in wide.columns)]
    rows = [
        [str(name), *("" if pd.isna(v) else f"{v:g}" for v in row)]
        for name, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def main() -> None:
    """Run what is missing, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--inducing", type=int, nargs="*", default=[], help="only these numbers of inducing points")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    chosen = parser.parse_args()
    data_dir = kin40k_subset(chosen.data_dir) if "kin40k" in chosen.only else chosen.data_dir
    tasks = list(wanted(chosen.only, data_dir, chosen.inducing))
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for name in pool.map(run, tasks):
            print("done", name, flush=True)
            write(table(chosen.only))
    write(table(chosen.only))


if __name__ == "__main__":
    main()
