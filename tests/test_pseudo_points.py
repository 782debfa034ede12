"""Pseudo-points keep the floor and the sums of the rows, and their distance to them is told."""

import pytest
import torch
from test_pvi_updates import exact, generator, sine

from fedgp_flower.methods.pvi import pseudo_points
from fedgp_flower.methods.pvi.hierarchical import (
    Data,
)
from fedgp_flower.methods.pvi.pseudo_points import MERGED_ROWS, distance_report, microaggregate


@pytest.mark.parametrize("floor", [1, 3])
def test_many_rows_are_cut_and_not_merged_one_by_one(floor, monkeypatch):
    """Merging keeps a distance for every pair of rows; cutting keeps the same sums and sizes that differ by one."""
    rows = MERGED_ROWS + 1
    many = Data(torch.randn(rows, 2, generator=generator(), dtype=torch.float64), torch.ones(rows).double())
    monkeypatch.setattr(pseudo_points, "linkage", None)
    own = microaggregate(many, 400, floor)
    weights = own.root.square()
    assert len(weights) == 400
    assert float(weights.max() - weights.min()) <= 2
    torch.testing.assert_close(weights @ own.inputs, many.inputs.sum(0))
    assert len(microaggregate(many, rows, 1).targets) == rows


@pytest.mark.parametrize(("points", "floor"), [(20, 1), (20, 3), (60, 1), (12, 5), (100, 5), (100, 7)])
def test_microaggregation_keeps_the_floor_and_the_sums(points, floor):
    data = sine()
    own = microaggregate(data, points, floor)
    weights = own.root.square()
    assert float(weights.min()) >= floor - 1e-9
    assert len(weights) == min(points, 60 // floor)
    assert float(weights.sum()) == pytest.approx(60)
    torch.testing.assert_close(weights @ own.targets, data.targets.sum())
    torch.testing.assert_close(weights @ own.inputs, data.inputs.sum(0))
    within = data.targets.square().sum() - weights @ own.targets.square()
    torch.testing.assert_close(own.residual, within)


def test_fewer_rows_than_the_floor_are_one_point():
    data = sine(3)
    own = microaggregate(data, 2, 5)
    torch.testing.assert_close(own.inputs, data.inputs.mean(0, keepdim=True))
    torch.testing.assert_close(own.targets, data.targets.mean()[None])
    assert float(own.root[0]) == pytest.approx(3**0.5)
    assert float(own.residual) == pytest.approx(float((data.targets - data.targets.mean()).square().sum()))


def test_distance_report_sees_copies_of_rows():
    data = sine()
    near = distance_report(exact(data), data)
    assert near.share_near == 1.0
    assert near.quantiles == (0.0, 0.0, 0.0)
    far = distance_report(microaggregate(data, 6, 10), data)
    assert far.share_near < 0.5
    assert far.quantiles[1] > 0
    spread = Data(torch.arange(5.0).double()[:, None], torch.zeros(5).double())
    assert distance_report(exact(spread), spread).spacing == pytest.approx(1.0)
