"""What a report of SFVI shows: trend, deviations and bound, whatever the number of inputs and the likelihood."""

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


def eight_inputs(folder: Path, likelihood: str) -> dict[str, Any]:
    """Rows with eight inputs, of which only the first two matter."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((150, 8))
    f = x[:, 0] - 0.7 * x[:, 1]
    y = {
        "gaussian": f + 0.2 * draw.standard_normal(150),
        "poisson": draw.poisson(np.exp(f)),
    }
    path = folder / "eight.csv"
    pd.DataFrame(x, columns=[f"x{i}" for i in range(8)]).assign(y=y[likelihood]).to_csv(path, index=False)
    keys = {"dataset": str(path), "target": "y", "model__likelihood": likelihood, "num_server_rounds": 12}
    return tiny(sfvi__learning_rate=0.1, **keys)


@pytest.mark.parametrize("likelihood", ["gaussian", pytest.param("poisson", marks=pytest.mark.long)])
def test_trend_and_deviations_of_many_inputs(tmp_path: Path, likelihood: str) -> None:
    folder = finished(tmp_path, eight_inputs(tmp_path, likelihood))
    run = read_run(folder)
    found = {panel.title: panel for panel in structured_figures.panels(run)}
    axes = [ax for ax in found["A new site"].body.axes if ax.get_visible()]
    assert len(axes) == 6
    assert {"x0", "x1"} <= {ax.get_xlabel() for ax in axes}
    first = next(ax for ax in axes if ax.get_xlabel() == "x0").lines[0].get_ydata()
    assert first[-1] > first[0] + 0.5
    assert first.min() < 0  # not a rate
    rows = run.predictions
    assert set(structured_figures.deviations(rows, ["trend"], "y").axes[0].get_legend_handles_labels()[1]) == {
        "site 0",
        "site 1",
        "site 2",
    }
    assert rows["deviation"].abs().max() > 1e-4
    if likelihood == "gaussian":
        assert (rows["trend"] + rows["deviation"]).to_numpy() == pytest.approx(rows["mean"].to_numpy())
    for name in ("a-new-site", "deviations"):
        assert (folder / "plots" / f"{name}.png").exists()


def test_deviation_of_units_is_their_intercept(tmp_path: Path) -> None:
    """On the scale of the logit it is the same for all rows of a unit."""
    flat = mixed(visits_csv(tmp_path, rows=8), "three", test_fraction=0.4, num_server_rounds=15)
    folder = finished(tmp_path, flat | {"sfvi.learning-rate": 0.2})
    rows = pd.read_csv(folder / "predictions.csv")
    assert {"probability", "trend", "deviation"} <= set(rows.columns)
    assert rows["deviation"].round(9).nunique() < len(rows) - 5
    assert rows["deviation"].abs().max() > 1e-2
    assert (folder / "plots" / "a-new-site.png").exists()


def test_deviations_along_one_input(tmp_path: Path) -> None:
    folder = finished(tmp_path, tiny(partitioner="blocks"))
    run = read_run(folder)
    shift = run.predictions["mean"] - Predictor.of_run(folder)(run.predictions[["input.x"]].to_numpy())[0]
    assert run.predictions["deviation"].to_numpy() == pytest.approx(shift.to_numpy(), abs=1e-8)
    figure = structured_figures.deviations(run.predictions, ["input.x"], "y")
    lines = [line for line in figure.axes[0].lines if line.get_label().startswith("site")]
    assert max(np.abs(line.get_ydata()).max() for line in lines) > 1e-3
    assert lines[0].get_linestyle() == "-"


@pytest.mark.parametrize("warm", [0, 2])
def test_what_sites_take_for_the_bound_is_not_called_the_bound(tmp_path: Path, warm: int) -> None:
    method = "sfvi" if warm else "sfvi-avg"
    folder = finished(tmp_path, tiny(method=method, sfvi__warm_start_rounds=warm, sfvi__local_steps=2))
    run = read_run(folder)
    known = run.history["objective"].notna() if warm else pd.Series(False, index=run.history.index)
    assert known.tolist() == (run.history["round"] > (warm or 4)).tolist()
    assert run.history["site_estimate"].notna().tolist() == (~known).tolist()
    assert ("bound" in run.metrics.method_details) == bool(warm)
    styles = {line.get_label(): line.get_linestyle() for line in structured_figures.bound(run.history).axes[0].lines}
    assert styles == ({"ELBO": "-"} if warm else {}) | {"sites' own estimate": "--"}
    assert (folder / "plots" / "bound-of-all-rows.png").exists()
