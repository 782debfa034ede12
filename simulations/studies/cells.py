"""Ten battery cells as a table for docs/units.md.

Writes a table with columns cycle, cell, y and split, the first cell hidden beyond cycle 125, and `grid.csv` with the
cycles beside it. With `--run FOLDER` it says how well a run of that table predicts the cycles that the table leaves
out: within what every cell was seen of, and beyond the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from simulations import common
from simulations.common import Row
from simulations.studies.battery import FAMILIES

CELLS, CUT = 10, 125


def study(output: str = "cells.csv", run: str = "", every: int = 5) -> Iterator[Row]:
    """Write the table, or check a run of it."""
    frame = FAMILIES["tju"].rows(CELLS)
    kept = frame[frame["cycle"] % every == 0]
    masked = (kept["cell"] == frame["cell"].min()) & (kept["cycle"] > CUT)
    kept = kept.assign(split=np.where(masked, "test", "train"))[["cycle", "cell", "y", "split"]]
    if not run:
        if not common.CHECKING:
            kept.to_csv(output, index=False)
            kept[["cycle"]].drop_duplicates().to_csv(Path(output).with_name("grid.csv"), index=False)
        yield {"file": output, "rows": len(kept), "cells": kept["cell"].nunique()}
        return
    yield from check(frame, kept, Path(run))


def check(frame: pd.DataFrame, kept: pd.DataFrame, run: Path) -> Iterator[Row]:
    """Error and coverage at cycles that the table lacks."""
    from fedgp_flower.run.predict import Predictor

    parts = []
    for site, (cell, whole) in enumerate(frame.groupby("cell")):
        seen = kept.loc[(kept["cell"] == cell) & (kept["split"] == "train"), "cycle"]
        rows = whole[~whole["cycle"].isin(kept["cycle"]) & (whole["cycle"] >= seen.min())]
        found = Predictor.at_site(run, str(site)).predict(rows[["cycle"]])
        error = found["mean"].to_numpy() - rows["y"].to_numpy()
        inside = np.abs(error) < found["q97.5"].to_numpy() - found["mean"].to_numpy()
        where = np.where(rows["cycle"] > seen.max(), "beyond", "within")
        parts.append(pd.DataFrame({"where": where, "square": error**2, "inside": inside}))
    for where, found in pd.concat(parts).groupby("where"):
        yield {"where": where, "RMSE": float(found["square"].mean() ** 0.5), "coverage": float(found["inside"].mean())}
