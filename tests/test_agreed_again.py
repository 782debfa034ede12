"""Sites that lied take their share along when they are refused; sites unlike the others are full members."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import Fault, FaultyGrid, blamed, configured, csv_nodes, numbers, run, waves
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from schedules import METHODS, scaled

from fedgp_flower.errors import RunError
from fedgp_flower.gp.sums import input_shape
from fedgp_flower.shared_messages import Described, Shape

FORMS = ("sgpr", "fsgp", "fgpr", "pvi", "pvi sums", "pvi-glm", "fedmgp exact", "sfvi")


def finished(folder: Path, sites: tuple[str, ...], keys: dict[str, Any], *faults: Fault) -> tuple[Any, FaultyGrid]:
    frames = {site: waves(60, seed) for seed, site in enumerate(("a", "b", "c")) if site in sites}
    nodes = csv_nodes(folder, frames)
    grid = FaultyGrid(configured(sites=len(sites), num_server_rounds=2, **keys), nodes, *faults)
    return run(grid), grid


GATE = {"fsgp", "pvi sums"}


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in GATE else pytest.mark.long) for m in FORMS])
def test_the_run_is_as_without_the_site_that_lied(method: str, tmp_path: Path) -> None:
    keys = METHODS[method]
    without, _ = finished(tmp_path, ("a", "c"), keys)
    fault = Fault("b", numbers(num_examples=10**9), ("query.describe",))
    strategy, grid = finished(tmp_path, ("a", "b", "c"), keys, fault)
    [(site, [reason])] = blamed(strategy).items()
    assert site == "b"
    assert "the site described" in reason
    assert set(strategy.preparation.rows) == set(strategy.network.sites()) == {"a", "c"}
    assert [visit.phase for visit in grid.visits if visit.site == "b" and visit.round > 0] == []
    for name, array in without.preparation.arrays.items():
        assert np.array_equal(strategy.preparation.arrays[name], array)
    assert strategy.outcome.metrics["test"] == without.outcome.metrics["test"]
    saved, expected = strategy.outcome.posterior, without.outcome.posterior
    assert saved is None or all(np.array_equal(saved.arrays[name], array) for name, array in expected.arrays.items())


@pytest.mark.parametrize("method", ["sgpr", "fgpr"])
def test_of_two_sites_one_cannot_say_that_its_rows_are_where_they_are_not(method: str, tmp_path: Path) -> None:
    """Between the means of two sites that are a billion apart, all squares are those of the mirror image."""
    fault = Fault("b", lambda reply: scaled(reply, 1e9), ("query.describe",))
    with pytest.raises(RunError, match=r"1 usable.*outside the range of the 48 rows that the site described"):
        finished(tmp_path, ("a", "b"), METHODS[method], fault)


@given(hnp.arrays(np.float64, st.integers(2, 30), elements=st.floats(-50, 50, width=32)), st.integers(1, 5))
def test_rows_lie_where_a_true_description_says(x: np.ndarray, least: int) -> None:
    """Also the outlier of a small site, and after small cells of the histogram were joined."""
    sums = input_shape(x[:, None])
    shape = Shape(sums["input.histogram"], sums["input.products"], np.array(0.0), np.array(0.0), {}).coarse(least)
    reach = np.sqrt(len(x) - 1) * x.std()
    described = Described(len(x), np.array([x @ x]), 0.0, np.array([x.mean()]), np.array([reach]))
    assert shape.refusal(described) is None


POLICY = "least-cell = 0\nleast-rows = 2"
PVI = {"method": "pvi", "pvi__steps": 10, "num_server_rounds": 5}
MEMBERS: dict[str, dict[str, Any]] = {
    "sgpr": {"method": "sgpr", "num_server_rounds": 3, "model__num_inducing": 40},
    "pvi adam": PVI | {"pvi__local_update": "adam"},
    "sfvi": {"method": "sfvi", "num_server_rounds": 12},
    **{name: {"method": name} for name in ("fsgp", "fgpr", "hierarchical-gp", "fedmgp")},
}
"""The first site of a sequential method is the one with the constant target."""
CLASSES = {"svgp": {"method": "svgp"}, "pvi": PVI | {"pvi__local_update": "adam"}, "sfvi": {"method": "sfvi"}}


def landscape() -> dict[str, pd.DataFrame]:
    sea = waves(40, 9)
    odd = {"atlantic": sea.assign(x1=sea["x1"] + 6, y=-1.0), "greenwich": waves(40, 5).assign(x2=0.25)}
    return odd | {"islet": waves(5, 7), "north": waves(40, 0), "south": waves(40, 1)}


def scores(folder: Path, frames: dict[str, pd.DataFrame], **keys: Any) -> dict[str, dict[str, float]]:
    usual = {"num_server_rounds": 4, "model__num_inducing": 12, "test_fraction": 0.25, "sites": len(frames)}
    end = run(FaultyGrid(configured(**(usual | keys)), csv_nodes(folder, frames, POLICY)))
    assert (blamed(end), set(end.preparation.rows)) == ({}, set(frames))
    return {row["site"]: row for row in end.outcome.metrics["per_site"]}


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in {"sgpr", "pvi adam", "fedmgp"} else pytest.mark.long) for m in MEMBERS]
)
def test_every_site_is_a_full_member(method: str, tmp_path: Path) -> None:
    """Nobody fails, and the ordinary sites are not worse off by more than a share of what they know."""
    found = scores(tmp_path, landscape(), **MEMBERS[method])
    assert set(found) == set(landscape())
    assert all(math.isfinite(own["nll"]) for own in found.values())
    assert max(found["north"]["nll"], found["south"]["nll"]) < 1.1
    assert found["atlantic"]["nll"] < 1.5
    assert method != "sgpr" or found["atlantic"]["rmse"] < 0.25  # the posterior is right there


@pytest.mark.parametrize("method", ["svgp", pytest.param("pvi", marks=pytest.mark.long), "sfvi"])
def test_a_site_of_one_class_is_a_full_member(method: str, tmp_path: Path) -> None:
    frames = landscape()
    for name, frame in frames.items():
        frame["y"] = np.where((frame["y"] > 0) | (name == "atlantic"), "yes", "no")
    found = scores(tmp_path, frames, model__likelihood="bernoulli", **CLASSES[method])
    assert all(own["nll"] < 1.0 for own in found.values())


def test_a_column_that_never_varies_is_said_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = {name: frame.assign(x3=3.0) for name, frame in landscape().items()}
    assert set(scores(tmp_path, frames, **MEMBERS["fsgp"])) == set(landscape())
    assert "columns that are constant at every site are ignored: x3" in caplog.messages
    caplog.clear()
    frames["islet"]["x3"] = 4.0
    assert set(scores(tmp_path, frames, **MEMBERS["fsgp"])) == set(landscape())
    assert not any("that are constant" in message for message in caplog.messages)
