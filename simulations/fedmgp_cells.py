"""Ten battery cells as the table of ``docs/units.md``: cycle, cell, y, split; the first is masked beyond cycle 125.

python simulations/fedmgp_cells.py cells.csv [--data-dir DIR] [--every 5]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from fedmgp_battery import CYCLES, whole_cells

CELLS, CUT = 10, 125


def main() -> None:
    """Write the table, and a grid of cycles beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--every", type=int, default=5, help="keep every n-th cycle")
    chosen = parser.parse_args()
    frame = whole_cells(chosen.data_dir / "battery.csv.gz")
    cells = sorted(frame["cell"].unique())[:CELLS]
    frame = frame[frame["cell"].isin(cells) & (frame["cycle"] % chosen.every == 0)]
    masked = (frame["cell"] == cells[0]) & (frame["cycle"] > CUT)
    frame = frame.assign(split=np.where(masked, "test", "train"))
    frame[["cycle", "cell", "y", "split"]].to_csv(chosen.output, index=False)
    grid = frame[["cycle"]].drop_duplicates().query(f"cycle <= {CYCLES}")
    grid.to_csv(chosen.output.with_name("grid.csv"), index=False)


if __name__ == "__main__":
    main()
