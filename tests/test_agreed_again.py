"""A site that lied when it introduced itself takes its share of the standardisation with it when it is refused."""

from pathlib import Path
from typing import Any

import numpy as np
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
    assert "introduced itself with" in reason
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
    with pytest.raises(RunError, match=r"1 usable.*none of the 48 rows it described can lie"):
        finished(tmp_path, ("a", "b"), METHODS[method], fault)


@given(hnp.arrays(np.float64, st.integers(2, 30), elements=st.floats(-50, 50, width=32)), st.integers(1, 5))
def test_rows_lie_where_a_true_description_says(x: np.ndarray, least: int) -> None:
    """Also the outlier of a small site, and after small cells of the histogram were joined."""
    sums = input_shape(x[:, None])
    shape = Shape(sums["input.histogram"], sums["input.products"], np.array(0.0), {}).coarse(least)
    reach = np.sqrt(len(x) - 1) * x.std()
    described = Described(len(x), np.array([x @ x]), 0.0, np.array([x.mean()]), np.array([reach]))
    assert shape.refusal(described) is None
