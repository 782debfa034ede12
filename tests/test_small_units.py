"""Units with a row or two take part beside larger ones, and their bands are honest."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faults import configured

from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process

ROWS = (1, 2, 3, 5, 30, 30, 15, 40)


def table(folder: Path) -> str:
    draw, x = np.random.default_rng(0), np.linspace(0, 1, 40)
    frames = []
    for number, rows in enumerate(ROWS):
        y = (1 + 0.1 * number) * np.sin(4 * x) + 0.05 * draw.standard_normal(len(x))
        split = np.where(np.arange(len(x)) < rows, "train", "test")
        frames.append(pd.DataFrame({"t": x, "unit": f"u{number}", "y": y, "split": split}))
    pd.concat(frames).to_csv(folder / "units.csv", index=False)
    return str(folder / "units.csv")


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "hierarchical-gp", "hierarchical__deviation": "rough"},
        {"method": "fedmgp-exact"},
        {"method": "fedmgp", "num_server_rounds": 4},
    ],
    ids=lambda keys: str(keys["method"]),
)
def test_units_of_any_size_take_part(keys: dict[str, object], tmp_path: Path) -> None:
    """Noise that a unit fits to one row is none: its held-out rows then had a negative log density of 80 000."""
    natural = {"dataset": table(tmp_path), "target": "y", "partitioner": "natural", "partition__column": "unit"}
    common = {"split": 0, "model__num_inducing": 8, "num_server_rounds": 8, "output_dir": str(tmp_path), "name": "run"}
    found = read_run(run_in_process(configured(**{**natural, **common, **keys}), 0)).metrics
    assert len(found.per_site) == sum(rows < 40 for rows in ROWS)
    assert found.data["sites"] == len(ROWS)
    assert max(site["nll"] for site in found.per_site) < 4.0
