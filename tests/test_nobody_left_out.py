"""A constant target, a constant input, a single class, fewer rows than inducing points: full members everywhere."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, blamed, configured, csv_nodes, run, waves

from fedgp_flower.errors import DataError

POLICY = "least-cell = 0\nleast-rows = 2"
PVI = {"method": "pvi", "pvi__steps": 10, "num_server_rounds": 5}
METHODS: dict[str, dict[str, Any]] = {
    "fsgp": {"method": "fsgp"},
    "fgpr": {"method": "fgpr"},
    "pvi adam": PVI | {"pvi__local_update": "adam"},
    "sfvi": {"method": "sfvi", "num_server_rounds": 12},
    "hierarchical-gp": {"method": "hierarchical-gp"},
    "fedmgp": {"method": "fedmgp"},
}
"""The first site of a sequential method is the one with the constant target; FSGP by sums: `test_sgpr.py`."""
CLASSES: dict[str, dict[str, Any]] = {
    "svgp": {"method": "svgp"},
    "pvi": PVI | {"pvi__local_update": "adam"},
    "sfvi": {"method": "sfvi"},
}


def landscape() -> dict[str, pd.DataFrame]:
    """Sea, a meridian, an islet of four training rows, and two ordinary sites."""
    sea = waves(40, 9)
    return {
        "atlantic": sea.assign(x1=sea["x1"] + 6, y=-1.0),
        "greenwich": waves(40, 5).assign(x2=0.25),
        "islet": waves(5, 7),
        "north": waves(40, 0),
        "south": waves(40, 1),
    }


def scores(folder: Path, frames: dict[str, pd.DataFrame], **keys: Any) -> dict[str, dict[str, float]]:
    """Scores by site of a run in which nobody fails."""
    usual = {"num_server_rounds": 4, "model__num_inducing": 12, "test_fraction": 0.25, "sites": len(frames)}
    end = run(FaultyGrid(configured(**(usual | keys)), csv_nodes(folder, frames, POLICY)))
    assert (blamed(end), set(end.preparation.rows)) == ({}, set(frames))
    return {row["site"]: row for row in end.outcome.metrics["per_site"]}


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in {"fsgp", "pvi adam", "fedmgp"} else pytest.mark.long) for m in METHODS]
)
def test_every_site_is_a_full_member(method: str, tmp_path: Path) -> None:
    """Nobody fails, and the ordinary sites are not worse off by more than a share of what they know."""
    found = scores(tmp_path, landscape(), **METHODS[method])
    assert set(found) == set(landscape())
    assert all(math.isfinite(own["nll"]) for own in found.values())
    assert max(found["north"]["nll"], found["south"]["nll"]) < 1.1
    assert found["atlantic"]["nll"] < 1.5


@pytest.mark.parametrize("method", ["svgp", pytest.param("pvi", marks=pytest.mark.long), "sfvi"])
def test_a_site_of_one_class_is_a_full_member(method: str, tmp_path: Path) -> None:
    frames = landscape()
    for name, frame in frames.items():
        frame["y"] = np.where((frame["y"] > 0) | (name == "atlantic"), "yes", "no")
    found = scores(tmp_path, frames, model__likelihood="bernoulli", **CLASSES[method])
    assert all(own["nll"] < 1.0 for own in found.values())


def test_only_a_column_constant_over_all_sites_is_an_error(tmp_path: Path) -> None:
    frames = {name: frame.assign(x3=3.0) for name, frame in landscape().items()}
    with pytest.raises(DataError, match=r"constant column `x3`: one value at all sites; leave it out of `features`"):
        scores(tmp_path, frames, **METHODS["fsgp"])
    frames["islet"]["x3"] = 4.0
    assert set(scores(tmp_path, frames, **METHODS["fsgp"])) == set(landscape())
