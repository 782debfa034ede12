"""Weather by country with partitioned variational inference: NLL against communications, and maps.

    python simulations/pvi_weather.py --data-dir DIR [--variants "replay" …]

Least temperature from longitude, latitude and height at the 34 countries with ten stations or more, one site each, as
in *Federated learning of sparse Gaussian processes* (Figures 3 and 5); every fifth station of a country is held out.
Table, curves and maps go to ``simulations/results/``. Complete runs are not repeated, and one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from pvi_runs import complete, ensure
from scipy.spatial import cKDTree
from sfvi_runs import QUIET, RESULTS, RUNS, write_table
from sfvi_weather import table_of

NAME = "pvi_weather"
SITES = 34
INPUTS = ["lon", "lat", "elev"]
GRID_HEIGHT = 150.0
"""Metres: the height of every cell of the map; a grid of true heights is not among the data."""
NEAR = 120.0
"""Kilometres: cells farther from every training station are left white."""
PAPER: dict[str, Any] = {
    "method": "pvi",
    "num-server-rounds": 68,
    "pvi.local-update": "adam",
    "pvi.alpha": 0.1,
    "pvi.min-rows-per-pseudo-point": 1,
    "pvi.first-steps": 150,
    "pvi.steps": 75,
}
REPLAY: dict[str, Any] = {"method": "pvi", "pvi.local-update": "replay", "num-server-rounds": 34}
VARIANTS: dict[str, dict[str, Any]] = {
    "pooled": {"method": "pooled"},
    "local-only": {"method": "local-only"},
    "replay": REPLAY,
    "replay, 1 row per point": {**REPLAY, "pvi.min-rows-per-pseudo-point": 1},
    "DPO": PAPER,
    "CPO": {**PAPER, "pvi.factor": "cpo"},
    "DPO, fixed Z": {**PAPER, "pvi.inducing": "fixed"},
}
COLOURS = dict(zip(VARIANTS, ("0.2", "0.5", "C0", "C9", "C1", "C2", "C3"), strict=True))
MAPPED = ("replay", "DPO", "CPO")
TITLE = "Weather by country: partitioned variational inference"
LINES = (
    "Made by `python simulations/pvi_weather.py`: least temperature from longitude, latitude and height, one site per",
    "country with ten stations or more, every fifth station held out, squared-exponential kernel, M = 100,",
    "M_k ≤ min(0.8 N_k, 100), 20 draws per prediction. One pass is 34 communications. Replay with the default floor",
    "of 5 rows per pseudo-point, and with 1 as the other variants have it; DPO, CPO and fixed Z by Adam with the",
    "settings of the paper but 150 steps at a first visit and 75 later in place of convergence.",
    "NLL and RMSE of the standardised target, means over held-out stations, at the end and after 32 communications.",
    "Seconds and MB are those of one communication: seconds a mean, on a shared machine with one thread, MB the",
    "median. Points: pseudo-observations of all sites in the end.",
)


def stations(data_dir: Path) -> Path:
    """The table with its folds."""
    path = (RUNS / "sfvi_weather" / "data" / "stations.csv").resolve()
    return path if path.with_name("stations.splits.json.gz").exists() else table_of(data_dir)[0]


def keys(path: Path) -> dict[str, Any]:
    """What all variants share."""
    return {
        "dataset": str(path),
        "split": 0,
        "features": ",".join(INPUTS),
        "target": "tmin",
        "partitioner": "natural",
        "partition.column": "country",
        "partition.min-rows": 8,
        "model.num-inducing": 100,
        "pvi.max-points": 100,
        "pvi.prediction-samples": 20,
        "evaluate-every": 8,
    }


def name_of(variant: str) -> str:
    """The folder of a variant's run."""
    return "".join(c for c in variant.replace(" ", "-") if c.isalnum() or c == "-")


def keys_of(path: Path, variant: str) -> dict[str, Any]:
    """Keys of a variant."""
    own = keys(path) | VARIANTS[variant]
    return own if own["method"] == "pvi" else {key: value for key, value in own.items() if not key.startswith("pvi.")}


def run(path: Path, variant: str) -> dict[str, Any]:
    """Figures of a variant, whose run is made if it is missing or was made with other settings."""
    return ensure(NAME, name_of(variant), SITES, keys_of(path, variant))


def curve(run: dict[str, Any]) -> pd.DataFrame:
    """Evaluated rounds and the end: communications and NLL of the standardised target."""
    shift = run["test"]["nll"] - run["test_standardised"]["nll"]
    rows = pd.read_csv(run["folder"] / "history.csv").dropna(subset=["test_nll"])
    visits = [*rows["visits"].astype(int), sum(run["method_details"]["visits"].values())]
    nll = [*(rows["test_nll"] - shift), run["test_standardised"]["nll"]]
    return pd.DataFrame({"visits": visits, "nll": nll})


def table(found: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """A row per variant."""
    rows = []
    for variant, run in found.items():
        row: dict[str, Any] = {"variant": variant}
        if "visits" in run["method_details"]:
            visits = sum(run["method_details"]["visits"].values())
            history = pd.read_csv(run["folder"] / "history.csv")
            row["communications"] = str(visits)
            row["NLL after 32"] = float(curve(run).query("visits <= 32")["nll"].iloc[-1])
        row |= {"NLL": run["test_standardised"]["nll"], "RMSE": run["test_standardised"]["rmse"]}
        row["95 % interval covers"] = run["test"]["coverage_95"]
        if "visits" in run["method_details"]:
            row["seconds"] = run["seconds"]["training"] / visits
            row["MB up"], row["MB down"] = (history[f"bytes_{way}"].median() / 1e6 for way in ("up", "down"))
            row["points"] = str(sum(_points(run)))
        rows.append(row)
    return pd.DataFrame(rows)


def _points(run: dict[str, Any]) -> list[int]:
    from fedgp_flower.run.artefacts import read_posterior

    arrays = read_posterior(run["folder"]).arrays
    return [
        len(array) for name, array in arrays.items() if name.startswith("factor.points") and name.endswith("targets")
    ]


def curves_figure(found: dict[str, dict[str, Any]]) -> Figure:
    """NLL against communications; what needs no rounds as lines."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for variant, run in found.items():
        if "visits" not in run["method_details"]:
            level, style = run["test_standardised"]["nll"], "-" if variant == "pooled" else ":"
            axes.axhline(level, color=COLOURS[variant], linestyle=style, label=variant)
        else:
            own = curve(run)
            axes.plot(own["visits"], own["nll"], marker="o", markersize=3, color=COLOURS[variant], label=variant)
    axes.axvline(34, color="0.85", linewidth=6, zorder=0)
    axes.set(
        xlabel="communications (countries visited; grey: one pass)", ylabel="held-out NLL, standardised (nats per row)"
    )
    axes.legend(frameon=False, fontsize=8)
    return figure


def maps_figure(found: dict[str, dict[str, Any]], frame: pd.DataFrame) -> Figure:
    """Observed, and for each method the mean at the stations and q(Z); for the first also the mean at one height."""
    from fedgp_flower.run.predict import Predictor

    shown = [variant for variant in MAPPED if variant in found]
    figure = Figure(figsize=(4.0 + 3.7 * len(shown), 9.0), layout="constrained")
    top, bottom = figure.subplots(2, 1 + len(shown), sharex=True, sharey=True)
    colours = Normalize(*np.quantile(frame["tmin"], [0.01, 0.99]))
    heights = Normalize(0.0, float(frame["elev"].quantile(0.95)))
    _stations(top[0], frame, frame["tmin"], colours, "observed, all stations")
    for upper, lower, variant in zip(top[1:], bottom[1:], shown, strict=True):
        predictor = Predictor.of_run(found[variant]["folder"])
        mean, _ = predictor(frame[INPUTS].to_numpy(dtype=float))
        _stations(upper, frame, pd.Series(mean), colours, f"{variant}: mean at the stations")
        _inducing(lower, frame, found[variant]["folder"], heights)
        lower.set_title(f"{variant}: q(Z), mean and sd")
    if shown:
        _grid(bottom[0], frame, Predictor.of_run(found[shown[0]]["folder"]), colours)
        bottom[0].set_title(f"{shown[0]}: mean at {GRID_HEIGHT:.0f} m near stations")
    margin = np.array([-1.5, 1.5])
    for axes in (*top, *bottom):
        axes.set_aspect(1 / np.cos(np.radians(56.0)))
        axes.set(xlim=frame["lon"].agg(["min", "max"]) + margin, ylim=frame["lat"].agg(["min", "max"]) + margin)
    for axes in bottom:
        axes.set_xlabel("longitude (° E)")
    for axes in (top[0], bottom[0]):
        axes.set_ylabel("latitude (° N)")
    warmth = ScalarMappable(colours, "coolwarm")
    figure.colorbar(warmth, ax=list(top), label="least temperature (°C)", shrink=0.8)
    figure.colorbar(ScalarMappable(heights, "viridis"), ax=list(bottom), label="height of E[Z] (m)", shrink=0.8)
    return figure


def _stations(axes: Axes, frame: pd.DataFrame, values: pd.Series, colours: Normalize, title: str) -> None:
    axes.scatter(frame["lon"], frame["lat"], c=values, s=7, cmap="coolwarm", norm=colours)
    axes.set_title(title)


def _grid(axes: Axes, frame: pd.DataFrame, predictor: Any, colours: Normalize) -> None:
    """Mean at one height, where a station is near."""
    lon = np.linspace(frame["lon"].min() - 1, frame["lon"].max() + 1, 220)
    lat = np.linspace(frame["lat"].min() - 1, frame["lat"].max() + 1, 160)
    cells = np.stack([a.ravel() for a in np.meshgrid(lon, lat)], axis=1)
    distance = cKDTree(_sphere(frame[["lon", "lat"]].to_numpy(dtype=float))).query(_sphere(cells))[0]
    mean, _ = predictor(np.column_stack([cells, np.full(len(cells), GRID_HEIGHT)]))
    shown = np.where(distance < NEAR, mean, np.nan).reshape(len(lat), len(lon))
    axes.pcolormesh(lon, lat, shown, cmap="coolwarm", norm=colours, shading="nearest")


def _sphere(degrees: np.ndarray) -> np.ndarray:
    """Longitude and latitude as points on a sphere, in kilometres."""
    lon, lat = np.radians(degrees).T
    return 6371.0 * np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)


def _inducing(axes: Axes, frame: pd.DataFrame, run: Path, heights: Normalize) -> None:
    from fedgp_flower.run.artefacts import read_posterior

    arrays = read_posterior(run).arrays
    scale = np.asarray(arrays["input.scale"])
    mean = np.asarray(arrays["inducing.locations.mean"]) * scale + np.asarray(arrays["input.mean"])
    sd = np.asarray(arrays["inducing.locations.scale"]) * scale
    axes.plot(frame["lon"], frame["lat"], ".", color="0.8", markersize=2)
    axes.errorbar(mean[:, 0], mean[:, 1], sd[:, 1], sd[:, 0], fmt="none", ecolor="0.45", linewidth=0.7)
    axes.scatter(mean[:, 0], mean[:, 1], c=mean[:, 2], s=18, cmap="viridis", norm=heights, zorder=3)


def write(found: dict[str, dict[str, Any]], frame: pd.DataFrame) -> None:
    """Page and figures."""
    pictures = [f"![NLL against communications]({NAME}.png)", "", f"![maps]({NAME}_map.png)"]
    lines = [*LINES, "", *pictures, "", *MAP_LINES]
    write_table(RESULTS / f"{NAME}.md", TITLE, lines, table(found))
    curves_figure(found).savefig(RESULTS / f"{NAME}.png", dpi=150)
    maps_figure(found, frame).savefig(RESULTS / f"{NAME}_map.png", dpi=130)


MAP_LINES = (
    "Maps: least temperature as observed and as predicted at the stations, training and held-out ones, each at its own",
    f"height; the mean at {GRID_HEIGHT:.0f} m within {NEAR:.0f} km of a station, as heights between stations are not",
    "in the data; and q(Z) in longitude and latitude with one standard deviation, coloured by the height of the mean,",
    "over the stations in grey. Inducing inputs outside the frame are not shown.",
)


def main() -> None:
    """Run what is missing, then write page and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    chosen = parser.parse_args()
    path = stations(chosen.data_dir)
    for variant in chosen.variants:
        run(path, variant)
    there = [v for v in VARIANTS if complete(RUNS / NAME / name_of(v), QUIET | keys_of(path, v))]
    write({variant: run(path, variant) for variant in there}, pd.read_csv(path))


if __name__ == "__main__":
    main()
