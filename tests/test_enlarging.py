"""More inducing points after training: sums that hold those of fewer points, where points lie, and whole runs."""

import numpy as np
import pytest
import torch
from faults import FaultyGrid, Recorder, configured, csv_nodes, run, waves
from scipy.stats import multivariate_normal
from test_sgpr import rows, unit_values

from fedgp_flower.gp.cells import LEAST_IN_CELL, neighbours, relocated
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.gp.sums import collapsed_bound, leading, nested, profiled, scaled
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config
from strategies import enlarging, sgpr
from strategies.enlarging import by_size, fewest, most_points, ordered, profiled_near, promised, spread_out
from strategies.pooled_bound import LOCATIONS


def at(places: torch.Tensor, kernel: str = "rbf") -> SparseGP:
    values = unit_values(kernel) | {LOCATIONS: places.numpy()}
    return SparseGP.from_arrays(ModelSection(kernel=kernel), values)


@pytest.mark.parametrize("kernel", ["rbf", "matern32"])
def test_the_sums_of_all_points_hold_those_of_the_first(kernel):
    x, y = rows()
    places = x[torch.randperm(60, generator=torch.Generator().manual_seed(0))[:30]]
    whole = pooled_sums(at(places, kernel), x, y)
    ratio = np.log(20.0)
    curve = nested(whole, ratio)[1]
    for count in (1, 7, 30):
        few, own = leading(whole, count), pooled_sums(at(places[:count], kernel), x, y)
        for name, array in vars(own).items():
            np.testing.assert_allclose(getattr(few, name), array, rtol=0, atol=1e-9 * max(1, np.abs(array).max()))
        found = [collapsed_bound(scaled(own, 20.0 * noise), noise) for noise in np.exp(np.linspace(-6, 1, 141))]
        assert curve[count - 1] >= max(found) - 1e-9  # at the best noise
        assert curve[count - 1] == pytest.approx(max(found), abs=0.05)
        best = profiled(own)
        near = profiled_near(few, ratio)
        assert near.value == pytest.approx(best.value, abs=1e-5)
        assert (near.amplitude, near.noise) == pytest.approx((best.amplitude, best.noise), rel=2e-2)
        assert collapsed_bound(scaled(own, near.amplitude), near.noise) == pytest.approx(near.value, abs=1e-8)
        assert by_size(whole, ratio)[0][count - 1] <= best.value / len(y) + 1e-9
    assert by_size(whole, ratio)[0][-1] == pytest.approx(best.value / len(y), abs=1e-5)


def test_with_a_point_at_every_row_the_bound_is_the_evidence():
    """Against the textbook density N(y | 0, K + σ²I)."""
    x, y = rows()
    model, noise = at(x, "matern32"), 0.07
    covariance = model.kernel(x).to_dense().detach().numpy() + noise * np.eye(len(x))
    expected = multivariate_normal(np.zeros(len(x)), covariance).logpdf(y.numpy())
    assert collapsed_bound(pooled_sums(model, x, y), noise) == pytest.approx(expected, abs=1e-4)  # jitter 1e-8


def test_lloyd_sums_of_ten_sites_are_those_of_one_and_no_cell_has_one_or_two_rows():
    draw = np.random.default_rng(0)
    x, anchors = draw.standard_normal((300, 3)), draw.standard_normal((40, 3))
    whole = neighbours(x, anchors, 1)
    distances = ((x[:, None] - anchors) ** 2).sum(-1)
    assert whole[0] == pytest.approx(np.bincount(distances.argmin(1), minlength=40))
    parts = [neighbours(part, anchors, 1) for part in np.array_split(x, 10)]
    for total, one in zip((sum(each) for each in zip(*parts, strict=True)), whole, strict=True):
        assert total == pytest.approx(one, abs=1e-12)
    for part in (x[:30], x[:2]):
        count, first = neighbours(part, anchors, LEAST_IN_CELL)
        assert count.sum() == len(part)
        assert first.sum(0) == pytest.approx(part.sum(0))
        assert count[count > 0].min() >= min(LEAST_IN_CELL, len(part))


def test_a_lloyd_step_moves_points_to_the_means_of_heavy_cells():
    draw = np.random.default_rng(0)
    x, anchors = draw.standard_normal((200, 2)) * [1, 0.1], draw.standard_normal((30, 2))
    count, first = neighbours(x, anchors, LEAST_IN_CELL)
    moved = relocated(count, first, anchors, 20, draw)
    kept = count >= LEAST_IN_CELL
    means = first[kept] / count[kept, None]
    assert moved.shape == (20, 2)
    assert {tuple(mean) for mean in means} <= {tuple(point) for point in moved}
    error = lambda points: ((x[:, None] - points) ** 2).sum(-1).min(1).mean()  # noqa: E731
    assert error(moved) < error(anchors[:20])


def test_points_come_in_the_order_of_what_is_left_of_them():
    """Each is the one of the largest variance given those before it; one that is met again is left out."""
    places = rows()[0][:20]
    places = torch.cat([places, places[:3]])
    values = ordered(unit_values() | {LOCATIONS: places.numpy()}, ModelSection())
    model = at(places)
    covariance = model.kernel(places).to_dense().detach().numpy()
    taken = [int(np.flatnonzero((places.numpy() == point).all(1))[0]) for point in values[LOCATIONS]]
    assert sorted(taken) == list(range(20))
    for count in range(1, 6):
        s = taken[:count]
        left = covariance.diagonal() - (covariance[s] * np.linalg.solve(covariance[s][:, s], covariance[s])).sum(0)
        assert left[taken[count]] == pytest.approx(left.max(), abs=1e-9)
    assert len(spread_out(np.ones((4, 4)), 1e-7)) == 1


def test_a_curve_says_how_many_points_are_needed_and_what_more_would_bring():
    curve = 1 - 0.1 * 0.5 ** np.log2(np.arange(1, 65))  # each doubling brings half of the one before
    assert promised(curve) == pytest.approx((curve[63] - curve[31]) / 2)
    assert curve[fewest(curve) - 1] >= curve[-1] - enlarging.NEGLIGIBLE > curve[fewest(curve) - 2]
    assert fewest(np.zeros(9)) == 1
    assert (most_points(64) >= 4000, most_points(64, 3) >= 2000, most_points(0)) == (True, True, 0)


def test_the_room_is_the_methods_unless_points_are_set():
    room = lambda **keys: parse_config({"method": "sgpr", **keys}).model.max_megabytes  # noqa: E731
    assert (room(), room(**{"model.num-inducing": 300}), room(**{"model.max-megabytes": 300})) == (64, 0, 300)
    resolved = parse_config({"method": "sgpr"}).flat()
    assert parse_config(resolved).flat() == resolved
    assert parse_config({"method": "fsgp"}).model.max_megabytes == 0


KEYS = {"method": "sgpr", "sgpr__exchanges": 8, "num_server_rounds": 20, "model__num_inducing": 6, "evaluate_every": 0}
LARGE = KEYS | {"model__max_megabytes": 1}


def nodes(tmp_path):
    return csv_nodes(tmp_path, {name: waves(60, seed) for seed, name in enumerate("abc")})


def test_a_run_ends_with_more_points_and_a_higher_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(sgpr, "FIRST_SIZE", 12)
    monkeypatch.setattr(enlarging, "NEGLIGIBLE", 1e-6)
    monkeypatch.setattr(enlarging, "PAYS", 1e-4)
    small = run(FaultyGrid(configured(**KEYS), nodes(tmp_path)))
    recorder = Recorder()
    large = run(FaultyGrid(configured(**LARGE), nodes(tmp_path)), recorder)
    known, asked = large.current.large, [row["points"] for row in recorder.rows]
    assert large.details()["bound"] > small.details()["bound"]
    assert asked[0] == 6 and asked[-1] > 12  # noqa: PT018
    assert known.factor in sgpr.FACTORS
    assert large.details()["num_inducing"] == len(known.values[LOCATIONS]) == len(known.totals.gram)
    assert large.outcome.metrics["test"]["nll"] <= small.outcome.metrics["test"]["nll"] + 0.02
    again = run(FaultyGrid(configured(**LARGE), nodes(tmp_path)), Recorder(), recorder.snapshots[-2])
    assert again.details()["bound"] == pytest.approx(large.details()["bound"], abs=1e-9)


def test_masked_points_and_bound_are_the_plain_ones():
    plain, masked = (run(FaultyGrid(configured(**LARGE, privacy__secure_aggregation=on), 3)) for on in (False, True))
    assert masked.current.large.asked == plain.current.large.asked
    assert masked.details()["bound"] == pytest.approx(plain.details()["bound"], rel=1e-6)
