"""Weather by country: shared trend and deviations, against each country alone.

Least temperature from longitude, latitude and height at the 34 countries with ten stations or more; five folds, each
of which holds out every fifth station of every country. Scores of the standardised target over all folds. *Countries
better* are those whose held-out rows of all folds have a lower sum of NLL than under local-only, a Gaussian process of
the country's own rows; small countries have fewer than 30 stations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Row, data_dir, fit, kept_table

LEAST, MANY = 10, 30
KEYS: dict[str, Any] = {
    "features": "lon,lat,elev",
    "target": "tmin",
    "partitioner": "natural",
    "partition.column": "country",
    "partition.min-rows": 8,
}
MODEL: dict[str, Any] = {"model.kernel": "matern52", "model.num-inducing": 60, "model.noise": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    "hierarchical-gp": {"method": "hierarchical-gp", "baselines.local-only": True},
    "sfvi": {"method": "sfvi", "num-server-rounds": 300, **MODEL},
    "sfvi-avg": {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 20, **MODEL},
    "sgpr": {"method": "sgpr"},
}
ALONE = "local-only"


def stations() -> str:
    """Path of the table of stations with its five folds."""
    frame = pd.read_csv(data_dir() / "weather.csv.gz")
    count = frame["country"].value_counts()
    frame = frame[frame["country"].isin(count[count >= LEAST].index)].reset_index(drop=True)
    rng, fold = np.random.default_rng(0), np.empty(len(frame), dtype=int)
    for country in sorted(frame["country"].unique()):
        rows = rng.permutation(np.flatnonzero(frame["country"] == country))
        fold[rows] = np.arange(len(rows)) % 5
    return kept_table("stations", lambda: frame, [np.flatnonzero(fold == k).tolist() for k in range(5)])


def sums(run: Row, scores: Row) -> pd.DataFrame:
    """Rows, NLL and squared error (standardised) by country, as sums over its held-out rows."""
    shift = run["test"]["nll"] - run["test_standardised"]["nll"]
    scale = run["test"]["rmse"] / run["test_standardised"]["rmse"]
    frame, labels = pd.DataFrame(scores["per_site"]), {row["site"]: row["label"] for row in run["per_site"]}
    count = frame["num_examples"].astype(float)
    found = {"rows": count, "nll": (frame["nll"] - shift) * count, "squares": (frame["rmse"] / scale) ** 2 * count}
    return pd.DataFrame(found).set_axis([labels[site] for site in frame["site"]])


def study(methods: tuple[str, ...] = tuple(METHODS), folds: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Iterator[Row]:
    """A row for each method."""
    path = stations()
    large = pd.read_csv(data_dir() / "weather.csv.gz")["country"].value_counts() >= MANY
    total: dict[str, pd.DataFrame] = {}
    for method in methods:
        for fold in folds:
            run = fit({**KEYS, "dataset": path, "split": fold, **METHODS[method]}, 0)
            arms = {method: run} | ({ALONE: run["local_only"]} if run["local_only"] else {})
            for arm, scores in arms.items():
                part = sums(run, {"per_site": scores["per_site"]})
                total[arm] = total[arm] + part if arm in total else part
    for arm, found in total.items():
        rows = found["rows"].sum()
        row: Row = {"method": arm, "folds": len(folds), "NLL": found["nll"].sum() / rows}
        row["RMSE"] = math.sqrt(found["squares"].sum() / rows)
        if ALONE in total and arm != ALONE:
            better = found["nll"] < total[ALONE]["nll"].reindex(found.index)
            small = ~large.reindex(found.index, fill_value=False).to_numpy()
            row["countries better"] = f"{better.sum()} of {len(better)}"
            row["small countries better"] = f"{better[small].sum()} of {small.sum()}"
        yield row
