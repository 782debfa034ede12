"""SFVI and SFVI-Avg as a federation runs them, and what the server does with answers by heart."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from faults import Fault, FaultyGrid, alike, arrays, blamed, configured, each, lost, parameters, run
from structured_problems import plan_of

from fedgp_flower.clients.state import ARRAYS
from fedgp_flower.gp.optimisers import AdamState
from fedgp_flower.messages import decode
from fedgp_flower.methods.sfvi.learner import SiteMemory
from fedgp_flower.methods.sfvi.messages import GradientShare, LocalEnd
from fedgp_flower.methods.sfvi.options import SFVIOptions
from strategies import sfvi
from strategies.server.course import Course
from strategies.server.questions import Roster, drive
from strategies.sfvi import LONGEST, Prior, SFVIState, plus, server_term


def tiny(**changes):
    return configured(**{"method": "sfvi", "sfvi__learning_rate": 0.03, **changes})


def memories(grid):
    """What the sites keep, by the name of their node."""
    found = {}
    for context in grid.contexts.values():
        own = {name: array.numpy() for name, array in context.state.array_records[ARRAYS].items()}
        name = context.node_config.get("site", context.node_config.get("partition-id"))
        found[str(name)] = decode(SiteMemory, own).latest
    return found


def visits_csv(folder, rows=3):
    """Children with a random intercept: `unit`, two inputs, an answer; dealt to one or to three sites."""
    draw = np.random.default_rng(0)
    unit = np.repeat(np.arange(12) + 100, rows)
    x = draw.standard_normal((len(unit), 2))
    y = np.where(draw.uniform(size=len(unit)) < 0.5, "no", "yes")
    frame = pd.DataFrame({"unit": unit, "a": x[:, 0], "b": x[:, 1], "y": y})
    frame["one"], frame["three"] = "all", np.array(["p", "q", "r"])[(unit // 3 + unit) % 3]
    path = folder / "visits.csv"
    frame.to_csv(path, index=False)
    return path


def mixed(path, column, **changes):
    table = {"dataset": str(path), "features": "unit,a,b", "target": "y", "test_fraction": 0.0, "standardise": False}
    sites = {"partitioner": "natural", "partition__column": column, "partition__min_rows": 2, "min_sites": 1}
    model = {"model__likelihood": "bernoulli", "sfvi__model": "glmm", "sfvi__unit_column": "unit"}
    return tiny(**table | sites | model | {"sfvi__structure": "full", "sfvi__samples": 2} | changes)


def test_the_result_is_the_same_for_any_partition(tmp_path):
    """Draws are keyed by unit, so the sum of the sites' gradients is that of one site with all rows."""
    path = visits_csv(tmp_path)
    one, three = (mixed(path, column, sfvi__importance_samples=5) for column in ("one", "three"))
    whole, dealt = (parameters(run(FaultyGrid(keys, sites))) for keys, sites in ((one, 1), (three, 3)))
    alike(dealt, whole, rtol=1e-10, atol=1e-12)
    assert np.abs(whole["q.lower"]).max() > 1e-3


def test_one_site_and_one_step_make_both_methods_the_same():
    """The site's Adam on the whole bound is the server's on the sum of two gradients; nothing is left to average."""
    keys = {"min_sites": 1, "sfvi__structure": "full", "sfvi__local_steps": 1}
    by_gradient = parameters(run(FaultyGrid(tiny(**keys), 1)))
    by_average = parameters(run(FaultyGrid(tiny(method="sfvi-avg", **keys), 1)))
    alike(by_average, by_gradient, rtol=1e-9, atol=1e-10)


def test_absent_sites_are_stood_in_for():
    """With one of three equal sites missing the gradient of the other two counts 3/2."""
    sent = {}

    def keep(site):
        return Fault(site, arrays(lambda own: sent.setdefault(site, own)), ("train.gradient",))

    faults = [keep("0"), keep("1"), Fault("2", lost, ("train.gradient",))]
    strategy = run(FaultyGrid(tiny(num_server_rounds=1), 3, *faults))
    start = run(FaultyGrid(tiny(num_server_rounds=0), 3))
    rows, before = start.preparation.rows, start.current
    scale = sum(rows.values()) / (rows["0"] + rows["1"])
    _, own = server_term(before.parameters, before.prior, None)
    shares = {name: sum(sent[site][f"values.{name}"] for site in "01") for name in before.parameters}
    moves, _ = before.adam.update(plus(own, shares, scale=scale), 0.03)
    wanted = {name: array + moves[name] for name, array in before.parameters.items()}
    alike(parameters(strategy), wanted, rtol=1e-12, atol=1e-12)
    assert len(blamed(strategy)["2"]) == 1


@pytest.mark.parametrize(
    ("method", "size", "words"),
    [("sfvi", 1e40, "times the median over sites"), ("sfvi-avg", 2.0, "local steps move nothing by more than")],
)
def test_a_site_that_lies_changes_nothing(method, size, words):
    """The others' result is what it would have been had the site not answered."""
    phases = ("train.gradient", "train.average")
    keys = {"method": method, "num_server_rounds": 2, "sfvi__local_steps": 2}
    liar = run(FaultyGrid(tiny(**keys), 4, Fault("1", each(lambda array: array + size), phases)))
    absent = run(FaultyGrid(tiny(**keys), 4, Fault("1", lost, phases)))
    assert all(words in reason for reason in blamed(liar)["1"])
    alike(parameters(liar), parameters(absent))


def test_a_warm_start_averages_first():
    grid = FaultyGrid(tiny(sfvi__warm_start_rounds=2, sfvi__local_steps=1), 2)
    run(grid)
    phases = {visit.round: visit.phase for visit in grid.visits if visit.phase.startswith("train")}
    assert phases == {1: "train.average", 2: "train.average", 3: "train.gradient", 4: "train.gradient"}


def test_local_steps_leave_moments_that_a_gradient_of_the_sites_own_term_fits():
    """One local step on N / N_k times the term leaves Adam's moments of the term itself: 0.1 g and 0.001 g²."""

    def moments(**keys):
        grid = FaultyGrid(tiny(num_server_rounds=1, sfvi__local_steps=1, **keys), 3)
        run(grid)
        return [memory.moments for memory in memories(grid).values()]

    for averaged, plain in zip(moments(method="sfvi-avg"), moments(method="sfvi"), strict=True):
        for name, value in plain.first.items():
            assert averaged.first[name].numpy() == pytest.approx(value.numpy(), rel=1e-9, abs=1e-12), name
            assert averaged.second[name].numpy() == pytest.approx(plain.second[name].numpy(), rel=1e-9, abs=1e-12)


def test_no_gradient_carries_adam_beyond_its_limit():
    """The refusal of far moves cannot hit an honest site, and the worst gradients come near the limit."""
    draw = np.random.default_rng(0)
    farthest = 0.0
    for power in (0.0, 1.0, 3.0, 10.0):
        gradients = draw.standard_normal((400, 50)) * 10 ** (power * draw.standard_normal((400, 50)))
        gradients[:, 0] = (0.9 / 0.999) ** -np.arange(400.0)  # what Cauchy-Schwarz is tight for
        state = AdamState()
        for gradient in gradients:
            moves, state = state.update({"a": gradient}, 0.1)
            farthest = max(farthest, float(np.abs(moves["a"]).max()))
    assert 0.4 * LONGEST < farthest / 0.1 <= LONGEST


def test_learning_rate_is_constant_then_falls_to_its_final_fraction():
    options = SFVIOptions.model_validate({"learning-rate": 0.2})
    assert [options.rate(step, 100) for step in (0, 80, 90, 100)] == pytest.approx([0.2, 0.2, 0.02, 0.002])


def test_a_settled_run_ends_at_its_mean():
    """Parameters that scatter around a point: the answer is their mean. Networks anneal instead, in proportion."""
    strategy, draw = sfvi.SFVI(learning_rate=0.2), np.random.default_rng(0)
    strategy.planned_rounds, strategy.current, places = 1000, start(), []
    while not strategy.arrived:
        places.append(1 + 0.1 * draw.standard_normal(2))
        strategy.current = replace(strategy.current, parameters={**start().parameters, "q.mean": places[-1]})
        strategy.network = SimpleNamespace(round=len(places))
        assert not strategy.finished(strategy.current)
        strategy.follow({"objective": 1e-3 * draw.standard_normal()})
    count = strategy.course.size * len(strategy.course.window)
    np.testing.assert_allclose(strategy.current.parameters["q.mean"], np.mean(places[-count:], 0))
    assert strategy.finished(strategy.current)
    assert strategy.converged(strategy.current)
    network = sfvi.SFVI(model="fedpop", standardise=False)
    network.planned_rounds, network.network = 1000, SimpleNamespace(round=100)
    network.course = replace(Course.begin(0), arrived=100)
    assert [network.horizon(), network.finished(start()), network.converged(start())] == [125, False, True]
    assert [network.options.rate(n, 125) for n in (100, 125)] == pytest.approx([0.02, 0.0002])


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
    return sfvi.gradient_round(state, ROSTER, *plan_of())


def by_averages(state):
    options, _, rate = plan_of()
    return sfvi.averaging_round(state, ROSTER, options, rate)


@pytest.mark.parametrize("algorithm", [by_gradients, by_averages])
def test_who_began_anew_is_counted(algorithm):
    """b is new, and c comes back without its state."""
    sites = {"a": Site(), "b": Site(fresh=True), "c": Site(fresh=True)}
    state, _ = drive(algorithm(start(fresh=1)), sites)
    assert state.fresh == 3


def test_a_round_of_averages_weighs_by_rows_and_is_no_step_of_adam():
    sites = {"a": Site(move=0.01), "b": Site(move=0.03), "c": Site(move=0.05)}
    averaged, figures = drive(by_averages(start(steps=1, bound=-7.0)), sites)
    mean = (3 * 0.01 + 0.03 + 2 * 0.05) / 6
    np.testing.assert_allclose(averaged.parameters["theta.noise"], 1.0 + mean, rtol=1e-6)
    assert (averaged.steps, averaged.bound) == (1, -7.0)
    assert figures["site_estimate"] == pytest.approx(-2.0 / 6)


def test_gradients_that_dwarf_the_others_are_outliers_where_three_can_be_compared():
    sizes, rows = {"a": 1.0, "b": 1e9, "c": 1.0}, dict.fromkeys("abc", 10)
    shares = {name: GradientShare({"q.mean": np.full(2, size)}, 0.0, 0) for name, size in sizes.items()}
    assert set(GradientShare.outliers(shares, rows)) == {"b"}
    assert GradientShare.outliers({name: shares[name] for name in "ab"}, rows) == {}
