"""Capacity of a battery from its first cycles: do bands beyond the last row cover?

Every cell of a family in turn is the target; its rows beyond the cut are hidden, the other cells' curves are whole.
`hierarchical-gp` with cells as sites: one shared curve and a deviation of each cell. y is the loss of capacity
relative to nominal; 24 cells, every so many cycles; nominal coverage .95. With `--together 10` ten cells are targets
of one run, with `--stride 2` every other one; `--first 24` leaves out the first 24 cells of the family. A cut of 3 or
more is a number of rows: the first ones, or with `--anywhere` any.
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

    def rows(self, first: int = 0, most: int = 24) -> pd.DataFrame:
        """Rows ``cell, cycle, y`` of cells that have all cycles, from the number ``first`` on."""
        frame = pd.read_csv(data_dir() / "battery.csv.gz")
        frame = frame[(frame["dataset"] == self.dataset) & frame["cell"].str.startswith(self.prefix)]
        frame = frame[frame["cycle"] <= self.cycles]
        sizes = frame.groupby("cell")["cycle"].size()
        kept = sorted(sizes[sizes == self.cycles].index)[first : first + most]
        return frame[frame["cell"].isin(kept)].assign(y=1 - frame["capacity"] / self.nominal)


FAMILIES = {
    "tju": Family("TJU", "1_CY45-05", 3.5, 250),
    "hust": Family("HUST", "", 1.1, 1000),
    "mit": Family("MIT", "2017-05-12", 1.1, 500),
}
CUTS = (0.12, 0.3, 0.5, 0.7)


def target_table(family: str, numbers: range, cut: float, every: int, first: int, anywhere: bool) -> str:
    """Path of a table whose first sites are the targets, hidden beyond the cut."""

    def make() -> pd.DataFrame:
        frame = FAMILIES[family].rows(first)
        frame = frame[frame["cycle"] % every == 0]
        target = frame["cell"].isin([sorted(frame["cell"].unique())[number] for number in numbers])
        count = cut if cut > 1 else cut * FAMILIES[family].cycles // every
        order = np.random.default_rng(0).random(len(frame)) if anywhere else frame["cycle"]
        hidden = target & (pd.Series(order, frame.index).groupby(frame["cell"]).rank() > count)
        cell = np.where(target, "0 target ", "1 ") + frame["cell"]
        return frame.assign(cell=cell, split=np.where(hidden, "test", "train"))[["cycle", "cell", "y", "split"]]

    step = [] if numbers.step == 1 else [numbers.step]
    called = "-".join(map(str, (first + numbers.start, first + numbers.stop, *step)))
    return kept_table(f"battery-{family}-{called}-{cut:g}-{every}{'-anywhere' * anywhere}", make)


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
    family: str = "tju",
    targets: int = 24,
    cuts: tuple[float, ...] = CUTS,
    every: int = 5,
    first: int = 0,
    together: int = 1,
    stride: int = 1,
    anywhere: bool = False,
) -> Iterator[Row]:
    """A row for each cut."""
    for cut in cuts:
        rows = []
        for start in range(0, targets, together):
            numbers = range(start, start + together * stride, stride)
            table = target_table(family, numbers, cut, every, first, anywhere)
            run = fit({**KEYS, "dataset": table}, 0)
            cells = [site["coverage_95"] for site in run["per_site"] if site["num_examples"]]
            rows.append(
                {
                    "cut": f"{cut:g} rows" if cut > 1 else f"{cut:.0%}",
                    "MSE × 10⁶": 1e6 * run["test"]["rmse"] ** 2,
                    "CRPS × 10³": 1e3 * run["test"]["crps"],
                    "coverage": run["test"]["coverage_95"],
                    "targets covered by less than half": sum(share < 0.5 for share in cells),
                }
            )
        missed = sum(row.pop("targets covered by less than half") for row in rows)
        yield averaged(rows, ("cut",))[0] | {"targets covered by less than half": missed}
