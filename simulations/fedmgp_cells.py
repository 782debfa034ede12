"""Ten battery cells as the table of ``docs/units.md``: cycle, cell, y, split; the first is masked beyond cycle 125.

    python simulations/fedmgp_cells.py cells.csv [--data-dir DIR] [--every 5]
    python simulations/fedmgp_cells.py cells.csv --check results/cells

The second says how well a run of the table predicts the cycles between those that it kept: within what every cell was
seen of, and beyond the cut.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import pandas as pd
from fedmgp_battery import whole_cells

CELLS, CUT = 10, 125


def write(frame: pd.DataFrame, output: Path, every: int) -> None:
    """The table, and a grid of cycles beside it."""
    kept = frame[frame["cycle"] % every == 0]
    masked = (kept["cell"] == frame["cell"].min()) & (kept["cycle"] > CUT)
    kept.assign(split=np.where(masked, "test", "train"))[["cycle", "cell", "y", "split"]].to_csv(output, index=False)
    kept[["cycle"]].drop_duplicates().to_csv(output.with_name("grid.csv"), index=False)


def check(frame: pd.DataFrame, kept: pd.DataFrame, run: Path) -> None:
    """Print errors and coverage at cycles that the table lacks."""
    from fedgp_flower.run.predict import Predictor

    parts = []
    for site, (cell, rows) in enumerate(frame.groupby("cell")):
        seen = kept.loc[(kept["cell"] == cell) & (kept["split"] == "train"), "cycle"]
        rows = rows[~rows["cycle"].isin(kept["cycle"]) & (rows["cycle"] >= seen.min())]  # noqa: PLW2901
        table = Predictor.at_site(run, str(site)).predict(rows[["cycle"]])
        error = table["mean"].to_numpy() - rows["y"].to_numpy()
        inside = np.abs(error) < table["q97.5"].to_numpy() - table["mean"].to_numpy()
        beyond = (rows["cycle"] > seen.max()).to_numpy()
        parts.append(
            pd.DataFrame({"where": np.where(beyond, "beyond", "within"), "square": error**2, "inside": inside})
        )
    for where, found in pd.concat(parts).groupby("where"):
        error, share = np.sqrt(found["square"].mean()), found["inside"].mean()
        print(f"{where}: RMSE {error:.5f}, coverage {share:.3f}, {len(found)} rows")


def main() -> None:
    """Write the table, or judge a run of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--every", type=int, default=5, help="keep every n-th cycle")
    parser.add_argument("--check", type=Path, help="folder of a run of the table")
    chosen = parser.parse_args()
    frame = whole_cells(chosen.data_dir / "battery.csv.gz")
    frame = frame[frame["cell"].isin(sorted(frame["cell"].unique())[:CELLS])]
    if chosen.check:
        check(frame, pd.read_csv(chosen.table), chosen.check)
    else:
        write(frame, chosen.table, chosen.every)


if __name__ == "__main__":
    main()
