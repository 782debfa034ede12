"""What SFVI's server does with messages: its rate, absent sites, sites that began anew, and a state that survives."""

from types import SimpleNamespace

import numpy as np
import pytest
from structured_problems import plan_of

from fedgp_flower.methods.sfvi.messages import GradientShare, LocalEnd
from fedgp_flower.methods.sfvi.options import SFVIOptions
from strategies import sfvi, sfvi_avg
from strategies.server.algorithm import Course
from strategies.server.questions import Roster, drive
from strategies.sfvi_avg import Prior, SFVIState


def test_learning_rate_is_constant_then_falls_to_its_final_fraction():
    options = SFVIOptions.model_validate({"learning-rate": 0.2})
    assert [options.rate(step, 100) for step in (0, 50, 75, 100)] == pytest.approx([0.2, 0.2, 0.02, 0.002])


def test_a_flat_bound_ends_the_run_in_proportion():
    """Flat after 20 rounds: the rate falls from there and ends in round 25."""
    strategy = sfvi.SFVI(learning_rate=0.2)
    strategy.planned_rounds = 100

    def at(number, course):
        strategy.network, strategy.course = SimpleNamespace(round=number), course
        return strategy

    early, flat = at(20, Course()), Course([0.0] * 20, 20)
    assert [early.horizon(), early.finished(start())] == [100, False]
    assert early.converged(start()) is False
    assert [at(20, flat).horizon(), strategy.finished(start())] == [25, False]
    rates = [strategy.options.rate(step, 25, flat=True) for step in (20, 25)]
    assert rates == pytest.approx([0.2, 0.002])
    assert at(25, flat).finished(start())
    assert strategy.converged(start())
    assert at(90, Course([0.0] * 90, 90)).horizon() == 100


def start(**known):
    parameters = {"q.mean": np.zeros(2), "q.log_scale": np.zeros(2), "theta.noise": np.array(1.0)}
    return SFVIState(parameters, Prior(np.zeros(2), np.zeros(0, np.int64)), {}, **known)


class Site:
    def __init__(self, *, fresh=False, move=0.0):
        self.fresh, self.move = fresh, move

    def gradient(self, request):
        slopes = {name: np.ones_like(array) for name, array in request.values.items()}
        return GradientShare(slopes, -2.0, int(self.fresh))

    def average(self, request):
        values = {name: array + self.move for name, array in request.values.items()}
        return LocalEnd(values, -2.0, self.fresh)


ROSTER = Roster({"a": 3, "b": 1, "c": 2}, ("a", "b", "c"), (), 4)


def by_gradients(state):
    return sfvi.one_round(state, ROSTER, *plan_of())


def by_averages(state):
    options, _, rate = plan_of()
    return sfvi_avg.one_round(state, ROSTER, options, rate)


@pytest.mark.parametrize("algorithm", [by_gradients, by_averages])
def test_who_began_anew_is_counted_where_it_had_taken_part(algorithm):
    """b is new, and c comes back without its state."""
    sites = {"a": Site(), "b": Site(fresh=True), "c": Site(fresh=True)}
    state, _ = drive(algorithm(start(trained=("a", "c"))), sites)
    assert state.trained == ("a", "b", "c")
    assert state.fresh == 1


def test_a_round_of_gradients_is_a_step_of_adam_and_one_of_averages_is_none():
    sites = {name: Site(move=0.01) for name in "abc"}
    stepped, figures = drive(by_gradients(start()), sites)
    np.testing.assert_allclose(stepped.parameters["q.mean"], [0.05, 0.05], rtol=1e-6)  # the rate, whatever the slope
    assert stepped.steps == 1
    assert figures == {
        "objective": pytest.approx((-6.0 + sfvi.server_term(start().parameters, start().prior, None)[0]) / 6)
    }
    sites = {"a": Site(move=0.01), "b": Site(move=0.03), "c": Site(move=0.05)}
    averaged, figures = drive(by_averages(stepped), sites)
    mean = (3 * 0.01 + 0.03 + 2 * 0.05) / 6  # weighted by rows
    np.testing.assert_allclose(averaged.parameters["theta.noise"], 1.05 + mean, rtol=1e-6)
    assert (averaged.steps, averaged.bound) == (1, stepped.bound)
    assert figures["site_estimate"] == pytest.approx(-2.0 / 6)
    for state in (stepped, averaged):
        assert all(isinstance(v, np.ndarray) for part in (state.parameters, state.first) for v in part.values())


def test_gradients_that_dwarf_the_others_are_outliers_where_three_can_be_compared():
    shares = {name: share(1.0) for name in "abc"}
    shares["b"] = share(1e9)
    rows = dict.fromkeys("abc", 10)
    assert set(GradientShare.outliers(shares, rows)) == {"b"}
    assert GradientShare.outliers({name: shares[name] for name in "ab"}, rows) == {}


def share(size):
    return GradientShare({"q.mean": np.full(2, size)}, 0.0, 0)
