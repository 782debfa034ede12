"""UCI regression with partitioned variational inference: NLL and RMSE against communications, every variant.

Sets × standard splits × variants, 10 sites, M = 100, as in *Federated learning of sparse Gaussian processes* (Figure
4); ``--partition`` deals the rows unevenly instead. The yardsticks are one analyst with all rows, and every site alone.

    python simulations/pvi_uci.py --data-dir DIR [--sets yacht energy] [--splits 5] [--variants replay CPO] [--jobs 2]

Runs that are complete are not repeated, and a run that was cut off goes on. Table and figure go to
``simulations/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "pvi_uci"
RESULTS = HERE / "results"
SITES = 10
SETS = ("yacht", "energy", "boston", "concrete", "wine", "power", "kin8nm")
YARDSTICKS = ("pooled", "local-only")
PAPER = {"pvi.local-update": "adam", "pvi.alpha": 0.1, "pvi.min-rows-per-pseudo-point": 1}
VARIANTS: dict[str, dict[str, object]] = {
    "replay": {"pvi.min-rows-per-pseudo-point": 1},
    "replay, 2 rows per point": {"pvi.min-rows-per-pseudo-point": 2},
    "replay, 5 rows per point": {},
    "replay, 10 rows per point": {"pvi.min-rows-per-pseudo-point": 10},
    "replay, parallel": {"pvi.min-rows-per-pseudo-point": 1, "pvi.schedule": "synchronous", "num-server-rounds": 4},
    "replay, points": {"pvi.min-rows-per-pseudo-point": 1, "pvi.refit-steps": 0},
    "DPO, tied": PAPER,
    "DPO, free": {**PAPER, "pvi.factor": "free"},
    "CPO": {**PAPER, "pvi.factor": "cpo"},
    "DPO, fixed Z": {**PAPER, "pvi.inducing": "fixed"},
    "DPO, averaged Z": {**PAPER, "pvi.inducing": "average"},
    "DPO, synchronous": {**PAPER, "pvi.schedule": "synchronous"},
    "DPO, asynchronous": {**PAPER, "pvi.schedule": "asynchronous"},
}
PARTITIONS: dict[str, dict[str, object]] = {
    "iid": {"partitioner": "iid"},
    "dirichlet": {"partitioner": "dirichlet", "partition.alpha": 0.1},
    "sizes": {"partitioner": "sizes", "partition.ratio": 10.0},
    "blocks": {"partitioner": "blocks"},
}


def configuration(
    data: str, split: int, variant: str, partition: str, rounds: int, data_dir: Path
) -> dict[str, object]:
    """Keys of one run."""
    keys: dict[str, object] = {
        "dataset": f"uci/{data}",
        "data-dir": str(data_dir),
        "split": split,
        "model.num-inducing": 100,
        "num-server-rounds": rounds,
        "evaluate-every": 5,
        "keep-predictions": False,
        "baselines.local-only": False,
        "baselines.pooled": False,
        "output-dir": str(RUNS),
        "name": f"{data}-{split}-{partition}-{variant}".replace(",", "").replace(" ", "-"),
        **PARTITIONS[partition],
    }
    if variant in YARDSTICKS:
        return keys | {"method": variant}
    if variant.endswith(("synchronous", "parallel")) and "asyn" not in variant:
        keys["evaluate-every"] = 1
    return keys | {"method": "pvi", **VARIANTS[variant]}


def done(keys: dict[str, object]) -> Path | None:
    """The figures of a run that is complete."""
    path = RUNS / str(keys["name"]) / "metrics.json"
    return path if path.exists() else None


def wanted(chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every run, split by split, so that early tables cover all sets."""
    for split in range(chosen.splits):
        for data in chosen.sets:
            for variant in (*YARDSTICKS, *chosen.variants):
                yield configuration(data, split, variant, chosen.partition, chosen.rounds, chosen.data_dir)


def run(keys: dict[str, object]) -> str:
    """One run in this process, resumed where it was cut off."""
    from fedgp_flower.cli import run_in_process

    started = (RUNS / str(keys["name"]) / "config.toml").exists()
    return run_in_process({**keys, "resume": started}, SITES).name


def collect(chosen: argparse.Namespace) -> pd.DataFrame:
    """A row per finished run, figures of the standardised target."""
    rows = []
    for keys in wanted(chosen):
        path = done(keys)
        if path is None:
            continue
        metrics = json.loads(path.read_text())
        method = str(keys["method"])
        name = method if method in YARDSTICKS else _variant_of(keys, chosen)
        own = metrics["test_standardised"]
        visits = sum(metrics["method_details"].get("visits", {}).values())
        near = [site["median"] for site in metrics["method_details"].get("leakage", {}).values() if site]
        rows.append(
            {
                "data": str(keys["dataset"]).removeprefix("uci/"),
                "split": keys["split"],
                "variant": name,
                "nll": own["nll"],
                "rmse": own["rmse"],
                "nll in units": metrics["test"]["nll"],
                "visits": visits,
                "seconds per visit": metrics["seconds"]["sites"] / visits if visits else float("nan"),
                "distance to a row": sum(near) / len(near) if near else float("nan"),
                "run": path.parent.name,
            }
        )
    return pd.DataFrame(rows)


def _variant_of(keys: dict[str, object], chosen: argparse.Namespace) -> str:
    ends = {f"{chosen.partition}-{v}".replace(",", "").replace(" ", "-"): v for v in chosen.variants}
    return next(v for end, v in ends.items() if str(keys["name"]).endswith(f"-{end}"))


def table(frame: pd.DataFrame) -> str:
    """Means over the splits that a variant shares with the pooled yardstick: NLL above pooled, in nats per row."""
    pooled = frame[frame["variant"] == "pooled"].set_index(["data", "split"])["nll"]
    own = frame.join(pooled.rename("pooled"), on=["data", "split"]).dropna(subset=["pooled"])
    own["gap"] = own["nll"] - own["pooled"]
    groups = own.groupby(["variant", "data"], sort=False)
    lines = [
        "| variant | data | splits | visits | NLL (std.) | above pooled | RMSE (std.) | s per visit | spacing |",
        "| --- " * 9 + "|",
    ]
    for (variant, data), part in groups:
        m = part.mean(numeric_only=True)
        figures = f"{m['nll']:.3f} | {m['gap']:+.3f} | {m['rmse']:.3f} | {m['seconds per visit']:.1f}"
        spacing = m["distance to a row"]
        lines.append(f"| {variant} | {data} | {len(part)} | {m['visits']:.0f} | {figures} | {spacing:.2f} |")
    return "\n".join(lines).replace("nan", "")


def draw(frame: pd.DataFrame, path: Path) -> None:
    """NLL in units of the target against visits, averaged over splits, a panel per set; lines are the yardsticks."""
    names = list(dict.fromkeys(frame["data"]))
    figure = Figure(figsize=(4.0 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = frame[frame["data"] == name]
        for yardstick, style in zip(YARDSTICKS, ("-", ":"), strict=True):
            level = own[own["variant"] == yardstick]["nll in units"]
            if len(level):
                axes.axhline(level.mean(), color="black", linestyle=style, label=yardstick)
        for variant in [v for v in VARIANTS if v in set(own["variant"])]:
            curves = [pd.read_csv(RUNS / run / "history.csv") for run in own[own["variant"] == variant]["run"]]
            curve = pd.concat(curves).dropna(subset=["test_nll"]).groupby("visits")["test_nll"].mean()
            axes.plot(curve.index, curve, marker="o", markersize=3, label=variant)
        axes.set(title=name, xlabel="communications (sites visited)", ylabel="NLL per held-out row")
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)


def write(chosen: argparse.Namespace) -> None:
    """Table and figure of what is there."""
    frame = collect(chosen)
    if frame.empty or "pooled" not in set(frame["variant"]):
        return
    RESULTS.mkdir(exist_ok=True)
    stem = f"pvi_uci_{chosen.partition}"
    head = f"# PVI on UCI regression, {SITES} sites, rows dealt by `{chosen.partition}`\n\n"
    note = (
        "NLL and RMSE of the standardised target, means over splits; spacing: median distance of a pseudo-observation"
    )
    note += "\nto the nearest row of its site, in typical distances between rows.\n\n"
    made = f"Made by `python simulations/pvi_uci.py --partition {chosen.partition}`. "
    (RESULTS / f"{stem}.md").write_text(f"{head}{made}{note}{table(frame)}\n\n![NLL]({stem}.png)\n")
    draw(frame, RESULTS / f"{stem}.png")


def main() -> None:
    """Run what is missing, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--partition", choices=list(PARTITIONS), default="iid")
    parser.add_argument("--rounds", type=int, default=10, help="communications of sequential variants")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    chosen = parser.parse_args()
    tasks = [keys for keys in wanted(chosen) if done(keys) is None]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for name in pool.map(run, tasks):
            print("done", name, flush=True)
            write(chosen)
    write(chosen)


if __name__ == "__main__":
    main()
