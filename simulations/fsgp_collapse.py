"""Whether a run of FSGP ever collapses: many splits of the sets on which sparse GPs are known to break.

    python simulations/fsgp_collapse.py --data-dir DIR [--sets naval power wine] [--splits 20]

A published comparison gives GPyTorch's SGPR a negative log predictive density of 3784 on naval; GPy breaks on power.
Runs are shared with ``fsgp_exchanges.py``; complete ones are not repeated, and the page is written after every case;
its rows of other sets stay.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pandas as pd
from fsgp_exchanges import NAME, SITES, keys_of, write_sets
from pvi_runs import ensure
from sfvi_runs import RESULTS

from fedgp_flower.gp.placement import limit_threads

SETS = ("naval", "power", "wine")
ARMS = ("FSGP", "local-only")
LINES = (
    "Ten sites, rows dealt at random, all keys at their defaults, totals in the clear, 20 exchanges. Local-only: a GP",
    "of each site's rows. Noise: its lowest sd over that of the target; the lowest allowed is .001.",
)


def case(data: str, split: int, data_dir: Path) -> dict[str, Any]:
    """Figures of one split."""
    row: dict[str, Any] = {"data": data, "split": split}
    for arm in ARMS:
        metrics = ensure(NAME, f"{data}-{split}-{arm}", SITES, keys_of(data, split, arm, data_dir))
        row |= {arm: metrics["test"]["nll"], f"{arm} coverage": metrics["test"]["coverage_95"]}
        row |= {f"{arm} {key}": value for key, value in metrics["method_details"].items()}
    return row


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The worst of each set."""
    rows = []
    for data, own in frame.groupby("data", sort=False):
        coverage, behind = own["FSGP coverage"], own["FSGP"] - own["local-only"]
        rows.append(
            {
                "set": data,
                "splits": f"{own['split'].min()} to {own['split'].max()}",
                "NLL, mean / worst": f"{own['FSGP'].mean():.3f} / {own['FSGP'].max():.3f}",
                "above local-only, worst": f"{behind.max():+.3f}",
                "splits above local-only": str(int((behind > 0).sum())),
                "coverage of 95 %, lowest / mean / highest": " / ".join(
                    f"{100 * value:.1f} %" for value in (coverage.min(), coverage.mean(), coverage.max())
                ),
                "noise": f"{own['FSGP noise_sd_standardised'].min():.2g}",
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    """Run what is missing, split by split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", type=int, default=20, help="0 to one less")
    chosen = parser.parse_args()
    limit_threads(1)
    rows: list[dict[str, Any]] = []
    for split in range(chosen.splits):
        for data in chosen.sets:
            rows.append(case(data, split, chosen.data_dir))
            print(rows[-1], flush=True)
            frame = pd.DataFrame(rows).sort_values(["data", "split"])
            made = "Made by `python simulations/fsgp_collapse.py --data-dir DIR`, some sets at a time, here last"
            made += f" `--sets {' '.join(chosen.sets)} --splits {chosen.splits}`."
            write_sets(RESULTS / "fsgp_collapse.md", "FSGP where others collapse", [made, *LINES], table(frame))


if __name__ == "__main__":
    main()
