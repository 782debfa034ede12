"""What a report of SFVI shows of deviations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid
from test_sfvi import mixed, tiny, visits_csv

from fedgp_flower import server_app
from fedgp_flower.methods.sfvi import panels as structured_figures
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.predict import Predictor

pytestmark = pytest.mark.drawn


def finished(folder: Path, flat: dict[str, Any]) -> Path:
    """The folder of a run over three sites."""
    told = {**flat, "output-dir": str(folder), "name": "run", "keep-predictions": True}
    return server_app.execute(FaultyGrid(told, 3), told, lambda row, total: None)


def test_deviation_of_units_is_their_intercept(tmp_path: Path) -> None:
    """On the scale of the logit it is the same for all rows of a unit."""
    flat = mixed(visits_csv(tmp_path, rows=8), "three", test_fraction=0.4, num_server_rounds=15)
    folder = finished(tmp_path, flat | {"sfvi.learning-rate": 0.2})
    rows = pd.read_csv(folder / "predictions.csv")
    assert {"probability", "trend", "deviation"} <= set(rows.columns)
    assert rows["deviation"].round(9).nunique() < len(rows) - 5
    assert rows["deviation"].abs().max() > 1e-2


def test_deviations_along_one_input(tmp_path: Path) -> None:
    folder = finished(tmp_path, tiny(partitioner="blocks"))
    run = read_run(folder)
    shift = run.predictions["mean"] - Predictor.of_run(folder)(run.predictions[["input.x"]].to_numpy())[0]
    assert run.predictions["deviation"].to_numpy() == pytest.approx(shift.to_numpy(), abs=1e-8)
    figure = structured_figures.deviations(run.predictions, ["input.x"], "y")
    lines = [line for line in figure.axes[0].lines if line.get_label().startswith("site")]
    assert max(np.abs(line.get_ydata()).max() for line in lines) > 1e-3
    assert lines[0].get_linestyle() == "-"
