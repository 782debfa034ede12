"""Kaplan–Meier and a regression of times from sums: against the rows themselves, however they are dealt."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import integrate, optimize
from test_outcomes import TAILS

from fedgp_flower.clients import numpy_client
from fedgp_flower.errors import DataError
from fedgp_flower.follow_up import FollowUp, counted, edges_around, life_table
from fedgp_flower.messages import add
from fedgp_flower.shared_messages import Coefficients, Described, TimeCounts
from strategies.server.questions import drive
from strategies.server.scoring import time_regression


def rows(count=300, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 2))
    time = np.exp(1 + x @ [0.5, -0.3] + 0.6 * np.log(draw.exponential(size=count)))
    ends = 1.5 * time.mean() * draw.exponential(size=count)
    return x, np.minimum(time, ends), (time <= ends).astype(float)


def kaplan_meier(time, seen, at):
    """The product over events until then, of events first among ties."""
    share = 1.0
    for t in np.unique(time[(seen == 1) & (time <= at)]):
        share *= 1 - ((time == t) & (seen == 1)).sum() / (time >= t).sum()
    return share


def test_where_no_bin_mixes_events_and_censoring_the_life_table_is_that_of_kaplan_and_meier():
    _, time, seen = rows()
    edges = np.sort(np.concatenate([time, time * (1 - 1e-12)]))[:-1]
    found = life_table(counted(time, seen, edges), edges)
    exact = [kaplan_meier(time, seen, t) for t in found.times]
    np.testing.assert_allclose(found.survival, exact, rtol=1e-9)
    assert 20 <= len(found.times) <= 41


def test_counts_of_sites_add_up_to_the_curve_of_all_rows():
    _, time, seen = rows(3000)
    edges = edges_around(time.mean())
    parts = [counted(time[k::7], seen[k::7], edges) for k in range(7)]
    whole = life_table(counted(time, seen, edges), edges)
    np.testing.assert_array_equal(life_table(sum(parts), edges).survival, whole.survival)
    exact = np.array([kaplan_meier(time, seen, t) for t in whole.times])
    assert np.abs(whole.survival - exact).max() < 0.004  # of bins in which rows are censored, too
    censored = np.array([kaplan_meier(time, 1 - seen, t) for t in whole.times])
    assert np.abs(whole.censoring - censored)[whole.survival > 0.02].max() < 0.02
    assert np.interp(0.25, [0.25, 0.5, 0.75], np.quantile(time[seen == 1], [0.25, 0.5, 0.75])) == pytest.approx(
        whole.quartiles[0], rel=0.05
    )
    small = TimeCounts(parts[0]).coarse(5)
    assert small.counts.sum(axis=0).tolist() == parts[0].sum(axis=0).tolist()
    assert small.counts[small.counts[:, 0] > 0, 0].min() >= 5
    assert small.refusal(Described(len(time[::7]))) is None
    assert "events among them" in small.refusal(Described(3))
    with pytest.raises(DataError, match="no event was observed"):
        life_table(counted(time, 0 * seen, edges), edges)


def test_the_density_of_a_life_table_is_the_slope_of_its_curve():
    known = FollowUp(np.array([1.0, 2.5, 4.0]), np.array([0.8, 0.5, 0.3]), np.ones(3))
    ends = [0.0, 1.0, 2.5, 4.0, 9.0]
    for low, high in pairwise(ends):
        lost = integrate.quad(lambda t: float(known.hazard(np.array(t)) * known.survived(np.array(t))), low, high)[0]
        first, last = known.survived(np.array([low, high]))
        assert lost == pytest.approx(float(first - last), rel=1e-8)
    assert FollowUp.from_arrays(known.to_arrays()).times.tolist() == [1.0, 2.5, 4.0]
    assert FollowUp.from_arrays({"target.mean": np.zeros(())}) is None


@pytest.mark.parametrize("name", TAILS)
def test_a_regression_of_times_from_sums_is_that_of_all_rows(name):
    x, time, seen = rows()
    density, tail = TAILS[name]

    def value(at):
        z = at[-1] * np.log(time) - at[0] - x @ at[1:3]
        held = np.where(seen == 1, density(z) + math.log(at[-1]) - np.log(time), tail(z))
        return held.sum()

    class Site:
        config = SimpleNamespace(model=SimpleNamespace(likelihood=name))

        def __init__(self, k):
            self.rows = SimpleNamespace(x=x[k::3], y=np.column_stack([time, seen])[k::3])

        def time_regression(self, request):
            return numpy_client.time_regression(self, request)

    sites = {str(k): Site(k) for k in range(3)}
    at = np.array([0.9, 0.4, -0.1, 1.4])
    told = add(site.time_regression(Coefficients(at)) for site in sites.values())
    close = 1e-4 if name == "log-normal" else 1e-6  # E log Φ is a mixture of normal distributions
    assert float(told.likelihood) == pytest.approx(value(at), rel=close)
    slope = optimize.approx_fprime(at, value, 1e-6)
    np.testing.assert_allclose(told.gradient, slope, rtol=2e-3, atol=2e-3)
    steps = [add(s.time_regression(Coefficients(at + e)) for s in sites.values()).gradient for e in 1e-5 * np.eye(4)]
    np.testing.assert_allclose(told.information, (told.gradient - np.array(steps)) / 1e-5, rtol=2e-3, atol=0.2)
    found = drive(time_regression(tuple(sites), 2, float(time.mean())), sites)
    best = optimize.minimize(lambda at: -value(at) + 0.5 * at[1:3] @ at[1:3], [1.0, 0, 0, 1.0], method="BFGS").x
    assert found.variance == pytest.approx(best[-1] ** -2, rel=1e-3)
    np.testing.assert_allclose(
        np.append(found.weights, found.intercept), np.append(best[1:3], best[0]) / best[-1], atol=1e-3
    )
