"""Sites that differ in shape: SFVI in closed form with and without, against each country alone; five folds.

    python simulations/sfvi_shapes.py --data-dir DIR [--folds 0 1 2 3 4] [--seeds 0 1 2 3 4] [--only "own shapes"]
    python simulations/sfvi_shapes.py --page

Weather by country as in ``sfvi_weather.py``. Written down before any run: (1) own shapes are below local-only in NLL
over all countries, (2) over those of fewer than 30 stations, (3) over the others, each with a 95 % interval from
resampled countries below zero; (4) own shapes are below one shape over all countries, and (5) not above it by more than
.01 over either group. On diabetes, rows dealt at random, nothing is to be gained; own shapes are the default if nothing
is lost there. Settings other than shapes are the defaults. Complete runs are not repeated;
``--page`` writes ``simulations/results/sfvi_shapes.md`` from those there are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sfvi_runs import RESULTS, RUNS, ensure, write_table
from sfvi_weather import MANY_STATIONS, RESAMPLES, folder_of, keys, sums, table_of

NAME = "sfvi_shapes"
DIABETES: dict[str, Any] = {"dataset": "diabetes", "model.kernel": "matern52", "model.num-inducing": 50}
"""As in ``sfvi_closed.py``."""
OWN, ONE, ALONE = "own shapes", "one shape", "local-only"
ARMS: dict[str, dict[str, Any]] = {
    OWN: {"method": "sfvi", "sfvi.site-amplitude": 0.5, "sfvi.site-lengthscale": 0.3},
    ONE: {"method": "sfvi", "sfvi.site-amplitude": 0, "sfvi.site-lengthscale": 0},
    ALONE: {"method": "local-only"},
}
LINES = (
    "Made by `python simulations/sfvi_shapes.py`. Standardised target; one shape: sites differ in noise, not in",
    f"amplitude and lengthscale of their deviation. Small countries have fewer than {MANY_STATIONS} stations.",
)


def found(arm: str, folds: list[int]) -> dict[int, tuple[pd.DataFrame, dict[str, Any]]]:
    """Sums by country and the figures of each complete run."""
    runs = {}
    for fold in folds:
        path = RUNS / NAME / folder_of(arm, fold) / "metrics.json"
        if not path.exists():
            continue
        run = json.loads(path.read_text())
        shift = run["test"]["nll"] - run["test_standardised"]["nll"]
        scale = run["test"]["rmse"] / run["test_standardised"]["rmse"]
        runs[fold] = sums(run["per_site"], {row["site"]: row["label"] for row in run["per_site"]}, shift, scale), run
    return runs


def difference(left: pd.DataFrame, right: pd.DataFrame) -> str:
    """NLL per row of one less that of the other, its interval from resampled countries, and wins."""
    gap, rows = (left["nll"] - right["nll"]).to_numpy(), left["rows"].to_numpy()
    chosen = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    low, high = np.quantile(gap[chosen].sum(axis=1) / rows[chosen].sum(axis=1), [0.025, 0.975])
    return f"{gap.sum() / rows.sum():+.3f} ({low:+.3f} to {high:+.3f}), {int((gap < 0).sum())} of {len(gap)}"


def diabetes(arm: str, seeds: list[int]) -> pd.Series:
    """Standardised NLL of complete runs, by seed."""
    paths = {seed: RUNS / NAME / folder_of(f"{arm}-diabetes", seed) / "metrics.json" for seed in seeds}
    read = {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}
    return pd.Series({seed: run["test_standardised"]["nll"] for seed, run in read.items()}, dtype=float)


def page(stations: dict[str, int], folds: list[int], seeds: list[int]) -> None:
    """Write the page from complete runs."""
    runs = {arm: own for arm in ARMS if (own := found(arm, folds))}
    rows = []
    for arm, own in runs.items():
        total = sum(frame for frame, _ in own.values())
        exchanges = [len(pd.read_csv(RUNS / NAME / folder_of(arm, fold) / "history.csv")) for fold in own]
        rows.append(
            {
                "model": arm,
                "folds": ", ".join(map(str, own)),
                "NLL": total["nll"].sum() / total["rows"].sum(),
                "RMSE": math.sqrt(total["squares"].sum() / total["rows"].sum()),
                "exchanges": ", ".join(map(str, exchanges)),
                "converged": ", ".join("yes" if run["converged"] else "no" for _, run in own.values()),
            }
        )
    lines = [*LINES, "", "NLL per row less that of the other, 95 % interval from resampled countries, and wins:", ""]
    for left, right in ((OWN, ALONE), (OWN, ONE), (ONE, ALONE)):
        both = sorted(set(runs.get(left, {})) & set(runs.get(right, {})))
        if not both:
            continue
        one, other = (sum(runs[arm][fold][0] for fold in both) for arm in (left, right))
        small = np.array([stations[country] < MANY_STATIONS for country in one.index])
        other = other.loc[one.index]
        for name, chosen in (("all", small | ~small), ("small", small), ("large", ~small)):
            text = difference(one[chosen], other[chosen])
            lines.append(f"- {left} against {right}, {name} countries, folds {', '.join(map(str, both))}: {text}")
    gap = (diabetes(OWN, seeds) - diabetes(ONE, seeds)).dropna()
    if len(gap):
        lines.append(
            f"- {OWN} against {ONE}, diabetes at five sites, seeds {', '.join(map(str, gap.index))}: {gap.mean():+.4f} "
            f"({gap.min():+.4f} to {gap.max():+.4f})"
        )
    write_table(RESULTS / f"{NAME}.md", "Sites that differ in shape", lines, pd.DataFrame(rows))


def main() -> None:
    """Run what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--folds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)), help="of diabetes")
    parser.add_argument("--only", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--page", action="store_true", help="only write the page")
    chosen = parser.parse_args()
    path, stations = table_of(chosen.data_dir)
    for arm, fold in () if chosen.page else ((arm, fold) for arm in chosen.only for fold in chosen.folds):
        ensure(NAME, folder_of(arm, fold), len(stations), keys(path, fold) | ARMS[arm] | {"evaluate-every": 0})
    for arm, seed in () if chosen.page else ((arm, seed) for arm in chosen.only[:2] for seed in chosen.seeds):
        own = DIABETES | ARMS[arm] | {"seed": seed, "evaluate-every": 0}
        ensure(NAME, folder_of(f"{arm}-diabetes", seed), 5, own)
    page(stations, chosen.folds, chosen.seeds)


if __name__ == "__main__":
    main()
