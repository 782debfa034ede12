"""Capacity of a battery from its first cycles: do bands beyond the last row cover?

Every cell of a family in turn is the target; its rows beyond the cut are hidden, the other cells' curves are whole.
`hierarchical-gp` with cells as sites: one shared curve and a deviation of each cell. y is the loss of capacity
relative to nominal; 24 cells, every so many cycles; nominal coverage .95.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simulations.common import Row, averaged, data_dir, fit, kept_table


@dataclass(frozen=True)
class Family:
    """Cells of one kind, their nominal capacity, and the cycles that are looked at."""

    dataset: str
    prefix: str
    nominal: float
    cycles: int

    def rows(self, most: int = 24) -> pd.DataFrame:
        """Rows ``cell, cycle, y`` of the first cells that have all cycles."""
        frame = pd.read_csv(data_dir() / "battery.csv.gz")
        frame = frame[(frame["dataset"] == self.dataset) & frame["cell"].str.startswith(self.prefix)]
        frame = frame[frame["cycle"] <= self.cycles]
        sizes = frame.groupby("cell")["cycle"].size()
        kept = sorted(sizes[sizes == self.cycles].index)[:most]
        return frame[frame["cell"].isin(kept)].assign(y=1 - frame["capacity"] / self.nominal)


FAMILIES = {
    "tju": Family("TJU", "1_CY45-05", 3.5, 250),
    "hust": Family("HUST", "", 1.1, 1000),
    "mit": Family("MIT", "2017-05-12", 1.1, 500),
}
CUTS = (0.12, 0.3, 0.5, 0.7)


def target_table(family: str, number: int, cut: float, every: int) -> str:
    """Path of a table whose first site is the target, hidden beyond the cut."""

    def make() -> pd.DataFrame:
        frame = FAMILIES[family].rows()
        frame = frame[frame["cycle"] % every == 0]
        target = frame["cell"] == sorted(frame["cell"].unique())[number]
        hidden = target & (frame["cycle"] > cut * FAMILIES[family].cycles)
        cell = np.where(target, "0 target ", "1 ") + frame["cell"]
        return frame.assign(cell=cell, split=np.where(hidden, "test", "train"))[["cycle", "cell", "y", "split"]]

    return kept_table(f"battery-{family}-{number}-{cut:g}-{every}", make)


KEYS = {
    "method": "hierarchical-gp",
    "hierarchical.deviation": "rough",
    "split": 0,
    "target": "y",
    "partitioner": "natural",
    "partition.column": "cell",
    "partition.min-rows": 2,
    "model.num-inducing": 30,
}


def study(
    family: str = "tju", targets: tuple[int, ...] = tuple(range(24)), cuts: tuple[float, ...] = CUTS, every: int = 5
) -> Iterator[Row]:
    """A row for each cut."""
    for cut in cuts:
        rows = []
        for number in targets:
            run = fit({**KEYS, "dataset": target_table(family, number, cut, every)}, 0)
            rows.append(
                {
                    "cut": f"{cut:.0%}",
                    "MSE × 10⁶": 1e6 * run["test"]["rmse"] ** 2,
                    "coverage": run["test"]["coverage_95"],
                }
            )
        missed = sum(row["coverage"] < 0.5 for row in rows)
        yield averaged(rows, ("cut",))[0] | {"targets covered by less than half": missed}
