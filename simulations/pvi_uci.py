"""UCI regression with partitioned variational inference: NLL and RMSE against communications, every variant.

Sets × standard splits × variants, 10 sites, M = 100, as in *Federated learning of sparse Gaussian processes* (Figure
4); ``--partition`` deals the rows unevenly instead. The baselines are one analyst with all rows, and every site alone.

    python simulations/pvi_uci.py --data-dir DIR [--sets yacht energy] [--splits 5] [--variants replay CPO] [--jobs 2]

Runs that are complete are not repeated, unless their settings have changed since, and a run that was cut off goes on.
Table and figure go to ``simulations/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter
from pvi_runs import complete, discard_stale

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "pvi_uci"
RESULTS = HERE / "results"
SITES = 10
SETS = ("yacht", "energy", "boston", "concrete", "wine", "power", "kin8nm")
FEWER_SPLITS = {"power": 2, "kin8nm": 2}
BASELINES = ("pooled", "local-only")
MARKS = (5, 10, 20, 30)
"""Communications at which the table looks."""
PAPER = {"pvi.local-update": "adam", "pvi.alpha": 0.1, "pvi.min-rows-per-pseudo-point": 1}
REPLAY = {"pvi.local-update": "replay"}
POOLED = {
    **REPLAY,
    "min-sites": 1,
    "pvi.refit-evaluations": 300,
    "pvi.points-fraction": 1.0,
    "pvi.max-points": 10**6,
    "pvi.min-rows-per-pseudo-point": 1,
}
"""One site with all rows, whose pseudo-observations are its rows: q(Z), q(β) and the bound of an analyst."""
VARIANTS: dict[str, dict[str, object]] = {
    "replay": {**REPLAY, "pvi.min-rows-per-pseudo-point": 1},
    "replay, 2 rows per point": {**REPLAY, "pvi.min-rows-per-pseudo-point": 2},
    "replay, 5 rows per point": REPLAY,
    "replay, 10 rows per point": {**REPLAY, "pvi.min-rows-per-pseudo-point": 10},
    "replay, parallel": {
        **REPLAY,
        "pvi.min-rows-per-pseudo-point": 1,
        "pvi.schedule": "synchronous",
        "num-server-rounds": 4,
    },
    "replay, points": {**REPLAY, "pvi.min-rows-per-pseudo-point": 1, "pvi.refit-steps": 0},
    "DPO, tied": PAPER,
    "DPO, free": {**PAPER, "pvi.factor": "free"},
    "CPO": {**PAPER, "pvi.factor": "cpo"},
    "DPO, fixed Z": {**PAPER, "pvi.inducing": "fixed"},
    "DPO, averaged Z": {**PAPER, "pvi.inducing": "average"},
    "DPO, synchronous": {**PAPER, "pvi.schedule": "synchronous"},
    "DPO, asynchronous": {**PAPER, "pvi.schedule": "asynchronous"},
}
NOTES = (
    "Gap: NLL less that of one analyst with all rows (same model, q(Z) and q(β)), in nats per held-out row, after so",
    "many communications; mean over splits ± its standard error. NLL, RMSE in units of the target at the end of the",
    "runs. s per visit: mean time of a visit by the clock, its messages included, on one thread of a shared machine,",
    "evaluations left out; for pooled a fit to all rows. Spacing: median distance of a pseudo-observation to the",
    "nearest row of its site, in typical distances between rows; AUC: how well it tells the site's rows from others",
    "(½: not at all).",
    "Figure: the pooled run's mean over splits, and every variant's mean distance from it on the splits it ran (bars:",
    "standard error).",
)
PARTITIONS: dict[str, dict[str, object]] = {
    "iid": {"partitioner": "iid"},
    "dirichlet": {"partitioner": "dirichlet", "partition.alpha": 0.1},
    "sizes": {"partitioner": "sizes", "partition.ratio": 10.0},
    "blocks": {"partitioner": "blocks"},
}


def rounds_of(data: str, variant: str, rounds: int) -> int:
    """Communications of a run: more where the aim is set at more."""
    if variant == "DPO, tied" and data == "energy":
        return max(rounds, 30)
    return max(rounds, 20) if variant.startswith("replay") and data == "yacht" else rounds


def configuration(variant: str, data: str, split: int, chosen: argparse.Namespace) -> dict[str, object]:
    """Keys of one run."""
    keys: dict[str, object] = {
        "dataset": f"uci/{data}",
        "data-dir": str(chosen.data_dir),
        "split": split,
        "model.num-inducing": 100,
        "num-server-rounds": rounds_of(data, variant, chosen.rounds),
        "evaluate-every": 5,
        "keep-predictions": False,
        "baselines.linear": False,
        "baselines.local-only": False,
        "baselines.pooled": False,
        "output-dir": str(RUNS),
        "name": f"{data}-{split}-{chosen.partition}-{variant}".replace(",", "").replace(" ", "-"),
        **PARTITIONS[chosen.partition],
    }
    if variant == "local-only":
        return keys | {"method": variant}
    if variant == "pooled":
        return keys | {"method": "pvi", "num-server-rounds": 2, "evaluate-every": 0, **POOLED}
    if variant.endswith(("synchronous", "parallel")) and "asyn" not in variant:
        keys["evaluate-every"] = 1
    return keys | {"method": "pvi", **VARIANTS[variant]}


def wanted(chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, object]]]:
    """Every run, split by split, so that early tables cover all sets."""
    for split in range(chosen.splits):
        for data in chosen.sets:
            for variant in (*BASELINES, *chosen.variants):
                if split < FEWER_SPLITS.get(data, split + 1):
                    yield variant, configuration(variant, data, split, chosen)


def done(keys: dict[str, object]) -> bool:
    """Whether a run with these settings is complete."""
    return complete(RUNS / str(keys["name"]), keys)


def run(task: tuple[str, dict[str, object]]) -> str:
    """One run in this process, resumed where it was cut off."""
    from fedgp_flower.run.in_process import run_in_process

    variant, keys = task
    discard_stale(RUNS / str(keys["name"]), keys)
    started = (RUNS / str(keys["name"]) / "config.toml").exists()
    return run_in_process({**keys, "resume": started}, 1 if variant == "pooled" else SITES).name


def curve(name: str, metrics: dict[str, Any]) -> pd.DataFrame:
    """NLL and RMSE in units of the target, by number of visits; the last row is the end of the run."""
    history = pd.read_csv(RUNS / name / "history.csv")
    if "visits" not in history or "test_nll" not in history:
        history = pd.DataFrame({"visits": [], "test_nll": [], "test_rmse": []})
    found = history.dropna(subset=["visits", "test_nll"])[["visits", "test_nll", "test_rmse"]]
    visits = sum(metrics["method_details"].get("visits", {}).values())
    end = {"visits": [visits], "test_nll": [metrics["test"]["nll"]], "test_rmse": [metrics["test"]["rmse"]]}
    return pd.concat([found[found["visits"] < visits], pd.DataFrame(end)]).set_index("visits")


def collect(chosen: argparse.Namespace) -> pd.DataFrame:
    """A row per finished run and mark: communications (visits), NLL and RMSE in units of the target."""
    rows = []
    for variant, keys in wanted(chosen):
        if not done(keys):
            continue
        name = str(keys["name"])
        metrics = json.loads((RUNS / name / "metrics.json").read_text())
        leakage = [site for site in metrics["method_details"].get("leakage", {}).values() if site]
        found = curve(name, metrics)
        common = {
            "data": str(keys["dataset"]).removeprefix("uci/"),
            "split": keys["split"],
            "variant": variant,
            "seconds": metrics["seconds"]["training"] / found.index[-1] if found.index[-1] else float("nan"),
            "spacing": _mean([site["median"] for site in leakage]),
            "auc": _mean([site["auc"] for site in leakage if "auc" in site]),
        }
        for point in found.reset_index().to_dict("records"):
            rows.append(common | {"visits": point["visits"], "nll": point["test_nll"], "rmse": point["test_rmse"]})
    return pd.DataFrame(rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """The same rows with their distance from the pooled run of their split."""
    pooled = frame[frame["variant"] == "pooled"].set_index(["data", "split"])[["nll", "rmse"]].add_prefix("pooled_")
    own = frame.join(pooled, on=["data", "split"]).dropna(subset=["pooled_nll"])
    return own.assign(gap=own["nll"] - own["pooled_nll"], ratio=own["rmse"] / own["pooled_rmse"])


def table(frame: pd.DataFrame) -> str:
    """Means over splits."""
    heads = ["variant", "data", "splits", *(f"gap @ {m}" for m in MARKS), "NLL", "RMSE", "RMSE / pooled"]
    heads += ["s per visit", "spacing", "AUC"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for names, part in frame.groupby(["variant", "data"], sort=False):
        last = part.sort_values("visits").groupby("split").tail(1).mean(numeric_only=True)
        marks = [_gap(part[part["visits"] == mark]) for mark in MARKS]
        fits = [f"{last[n]:.3f}" for n in ("nll", "rmse", "ratio")]
        costs = [f"{last['seconds']:.1f}", f"{last['spacing']:.2f}", f"{last['auc']:.2f}"]
        cells = [*names, str(part["split"].nunique()), *marks, *fits, *costs]
        lines.append("| " + " | ".join(cells).replace("nan", "") + " |")
    return "\n".join(lines)


def _gap(part: pd.DataFrame) -> str:
    """Mean gap ± standard error over the splits."""
    if part.empty:
        return ""
    error = f" ± {part['gap'].sem():.3f}" if len(part) > 1 else ""
    return f"{part['gap'].mean():+.3f}{error}"


def draw(frame: pd.DataFrame, path: Path) -> None:
    """NLL and RMSE against visits, a column per set: the pooled run's mean, and every variant's distance from it.

    Variants may have run on different splits; distances are taken split by split, so their curves stay comparable.
    """
    names = list(dict.fromkeys(frame["data"]))
    figure = Figure(figsize=(3.4 * len(names), 6.0), layout="constrained")
    grid = figure.subplots(2, len(names), squeeze=False, sharex="col")
    colours = (*colormaps["tab10"].colors, *colormaps["Dark2"].colors)
    for column, name in enumerate(names):
        own = frame[frame["data"] == name]
        pooled = own[own["variant"] == "pooled"]
        for axes, score in zip(grid[:, column], ("nll", "rmse"), strict=True):
            level = pooled[score].mean()
            placed = own.assign(height=level + own["gap"] if score == "nll" else level * own["ratio"])
            for baseline, style in zip(BASELINES, ("-", ":"), strict=True):
                height = placed[placed["variant"] == baseline]["height"].mean()
                axes.axhline(height, color="black", linestyle=style, label=baseline)
            for number, variant in enumerate(VARIANTS):
                spots = placed[placed["variant"] == variant].groupby("visits")["height"]
                look = {"color": colours[number], "marker": "os^Dv"[number % 5], "markersize": 4}
                if len(spots):
                    axes.errorbar(spots.mean().index, spots.mean(), spots.sem(), capsize=2, label=variant, **look)
            axes.set(ylabel=f"{score.upper()} of held-out rows" if column == 0 else "")
            if score == "rmse":
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(MaxNLocator(6))
                axes.yaxis.set_minor_locator(NullLocator())
                axes.yaxis.set_major_formatter(ScalarFormatter())
        grid[0, column].set_title(name)
        grid[1, column].set_xlabel("communications (visits)")
        grid[1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = {t: h for axes in grid.ravel() for h, t in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def write(chosen: argparse.Namespace) -> None:
    """Table and figure of what is there."""
    frame = collect(chosen)
    if frame.empty or "pooled" not in set(frame["variant"]):
        return
    frame = compared(frame)
    RESULTS.mkdir(exist_ok=True)
    stem, partition = f"pvi_uci_{chosen.partition}", f" --partition {chosen.partition}"
    command = f"python simulations/pvi_uci.py --data-dir DIR{partition if chosen.partition != 'iid' else ''}"
    page = [f"# PVI on UCI regression, {SITES} sites, rows dealt by `{chosen.partition}`", ""]
    page += [f"Made by `{command}`.", *NOTES, "", table(frame), "", f"![NLL and RMSE]({stem}.png)", ""]
    (RESULTS / f"{stem}.md").write_text("\n".join(page))
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
    parser.add_argument("--collect", action="store_true", help="run nothing: table and figure of what is complete")
    chosen = parser.parse_args()
    tasks = [] if chosen.collect else [task for task in wanted(chosen) if not done(task[1])]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for name in pool.map(run, tasks):
            print("done", name, flush=True)
            write(chosen)
    write(chosen)


if __name__ == "__main__":
    main()
