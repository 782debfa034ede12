"""SGPR in few exchanges: the gradient from totals, steps, cells, and whole runs."""

from dataclasses import replace
from functools import cached_property

import faults as kit
import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, csv_nodes, lost, run, waves
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import METHODS

from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.gp import cells
from fedgp_flower.gp.fitc import at_unit_scale, evidence, left_out, weighted_sums
from fedgp_flower.gp.kernels import amplitude_names
from fedgp_flower.gp.linalg import LOG_RANGE
from fedgp_flower.gp.models import LOCATIONS, ExactGP, SparseGP, WhitenedPosterior
from fedgp_flower.gp.optimisers import LOGARITHM, maximise, outlook, pack, rounds_to_come, unpack
from fedgp_flower.gp.placement import Placement
from fedgp_flower.gp.priors import hyperpriors, log_prior
from fedgp_flower.gp.sparse import Whitener, pooled_sums
from fedgp_flower.gp.sums import LEAST_NOISE, collapsed_bound, contradicting, profiled, scaled
from fedgp_flower.messages import weighted
from fedgp_flower.methods.sgpr import client
from fedgp_flower.methods.sgpr.client import SGPRClient, shared
from fedgp_flower.options import ModelSection
from fedgp_flower.run.registry import parse_config
from strategies import sgpr
from strategies.pooled_bound import Problem, disclosure_by_sites, disclosure_by_total, inducing_points, unit_function
from strategies.server.questions import Roster, drive
from strategies.sgpr import SGPRState, bfgs, differentiate, evaluate, logarithms, one_round

D, P = 2, 7


def rows(count: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    x = draw.uniform(-1.7, 1.7, (count, D))
    y = 1.5 * np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] + 0.2 * draw.standard_normal(count)
    return torch.from_numpy(x), torch.from_numpy(y)


def unit_values(kernel: str = "rbf", shift: float = 0.0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    model = SparseGP(ModelSection(kernel=kernel), torch.from_numpy(draw.uniform(-1.5, 1.5, (P, D))))
    values = model.to_arrays()
    names = amplitude_names(ModelSection(kernel=kernel), D)
    for name in names:
        values[name] = values[name] - np.log(len(names))
    moved = {n for n in values if ("scale" in n and "output" not in n) or "warp" in n}
    return {n: a + shift + 0.1 * np.arange(a.size).reshape(a.shape) if n in moved else a for n, a in values.items()}


def test_the_profile_is_the_highest_of_a_fine_grid():
    """No pair (log a, log σ²) around it does better, and it is met by the textbook bound."""
    sums = pooled_sums(SparseGP.from_arrays(ModelSection(), unit_values()), *rows())
    found = profiled(sums)
    at = lambda a, noise: collapsed_bound(scaled(sums, a), noise)  # noqa: E731
    assert at(found.amplitude, found.noise) == pytest.approx(found.value, abs=1e-9)
    moves = np.linspace(-4, 4, 21)
    others = [at(found.amplitude * np.exp(i), found.noise * np.exp(j)) for i in moves for j in moves]
    assert max(others) <= found.value + 1e-9
    step = 1e-4  # and it is stationary in both: between points of the grid of log a/σ² the slope is about 1
    for i, j in ((1, 0), (0, 1)):
        ahead, behind = (at(found.amplitude * np.exp(k * i), found.noise * np.exp(k * j)) for k in (step, -step))
        assert abs(ahead - behind) / (2 * step) < 1e-4
    still = replace(sums, projection=0 * sums.projection, target_squares=np.zeros(()))
    assert profiled(still).noise == LEAST_NOISE


class Site(SGPRClient):
    def __init__(self, kernel: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.config, self.own = parse_config({"model.kernel": kernel}), (x, y)
        self.placement = Placement.of(self.config)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.own


def problem(kernel: str = "rbf") -> Problem:
    return Problem(ModelSection(kernel=kernel))


def federation(parts: list[int], kernel: str = "rbf") -> dict[str, Site]:
    x, y = rows()
    return {str(k): Site(kernel, *pair) for k, pair in enumerate(zip(x.split(parts), y.split(parts), strict=True))}


def roster(sites: dict[str, Site]) -> Roster:
    return Roster({name: len(site.own[1]) for name, site in sites.items()}, tuple(sites), (), 1)


def starting(kernel: str = "rbf") -> SGPRState:
    values = unit_values(kernel)
    size = sum(array.size for array in logarithms(values).values())
    return SGPRState(values, values[LOCATIONS], np.eye(size), exchanges=4)


def differentiated(kernel: str, parts: list[int]) -> SGPRState:
    """The state after the first question and the first gradient."""
    sites = federation(parts, kernel)
    state = drive(evaluate(problem(kernel), starting(kernel), tuple(sites)), sites)
    return drive(differentiate(problem(kernel), state), sites)


def height(kernel: str, values: dict[str, np.ndarray]) -> float:
    """J from the rows: the evidence where kernel and noise are as they are, and the prior."""
    model = SparseGP.from_arrays(ModelSection(kernel=kernel), values)
    named = {name: torch.from_numpy(array) for name, array in values.items()}
    return at_unit_scale(weighted_sums(model, *rows())) + float(log_prior(named, hyperpriors(model.kernel, D)))


@pytest.mark.parametrize("kernel", ["rbf", "rbf + l1", "matern52 + linear", "warp(rbf + l1)"])
def test_the_gradient_is_that_of_the_objective_whatever_the_partition(kernel):
    """Finite differences of the evidence and the prior at the parameters with their best scale."""
    whole = differentiated(kernel, [60])
    other = differentiated(kernel, [1, 9, 15, 35])
    assert other.gradient == pytest.approx(whole.gradient, abs=1e-9 * np.abs(whole.gradient).max())
    assert other.height == pytest.approx(whole.height, abs=1e-9)
    assert whole.height == pytest.approx(height(kernel, whole.values), abs=1e-9)
    slopes, logs = [], sgpr.logarithms(whole.values)
    for step in 1e-5 * np.eye(len(whole.gradient)):
        ends = [height(kernel, whole.values | unpack(pack(logs) + sign * step, logs)) for sign in (1, -1)]
        slopes.append((ends[0] - ends[1]) / 2e-5)
    assert whole.gradient == pytest.approx(np.array(slopes), abs=2e-6 * np.abs(slopes).max())


def test_with_all_pairs_of_a_quadratic_bfgs_knows_its_curvature():
    """n conjugate steps of a quadratic and the changes of its gradient: C is its Hessian, and a step is Newton's."""
    draw = np.random.default_rng(0)
    root = draw.standard_normal((4, 4))
    hessian, gradient = root @ root.T + np.eye(4), draw.standard_normal(4)
    curvature = np.eye(4)
    for step in np.linalg.eigh(hessian)[1].T:
        curvature = bfgs(curvature, step, hessian @ step)
    assert curvature == pytest.approx(hessian, abs=1e-9)
    assert bfgs(curvature, gradient, -gradient) is curvature  # not concave: nothing is learned


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 5.0))
def test_a_restricted_step_is_the_best_of_its_length(seed, radius):
    """Either it is Newton's, or its largest entry is the radius and C s + μ s = ∇J for a μ > 0."""
    draw = np.random.default_rng(seed)
    root, gradient = draw.standard_normal((5, 5)), draw.standard_normal(5)
    curvature = root @ root.T + 0.01 * np.eye(5)
    step = sgpr.restricted(curvature, gradient, radius)
    left = gradient - curvature @ step
    shift = step @ left / (step @ step)
    np.testing.assert_allclose(left, shift * step, atol=1e-9 * np.abs(gradient).max())
    if shift > 1e-9:
        assert np.abs(step).max() == pytest.approx(radius, rel=1e-6)
    else:
        assert np.abs(step).max() <= radius * (1 + 1e-9)


def test_noise_stays_within_its_range():
    """Where the evidence asks for less, the scale stops at the bound, and no step is promised for leaving it."""
    sites, state = federation([25, 35]), starting()
    state, _ = drive(one_round(problem(), state, roster(sites)), sites)
    low = {**state.values, "likelihood.log_noise": np.array([-LOG_RANGE + 0.1])}
    faint = replace(
        state.totals,
        weighted_squares=np.asarray(state.totals.weighted_squares * 1e-9),
        projection=np.zeros_like(state.totals.projection),
    )
    values, sums, _ = sgpr.at_best_scale(low, faint, problem().model)
    assert values["likelihood.log_noise"] == pytest.approx(-LOG_RANGE)
    assert float(sums.log_variances) == pytest.approx(float(faint.log_variances) - 0.1 * float(faint.count))
    theta = np.array([-LOG_RANGE, -LOG_RANGE, LOG_RANGE, LOG_RANGE, 1.0])
    assert list(sgpr.within_range(theta, np.array([-3.0, 3.0, 3.0, -3.0, 3.0]))) == [0.0, 3.0, 0.0, -3.0, 3.0]


def test_a_step_that_lowers_the_objective_is_taken_back_and_the_next_one_is_shorter():
    sites, state = federation([25, 35]), starting()
    state, _ = drive(one_round(problem(), state, roster(sites)), sites)
    state = drive(differentiate(problem(), state), sites)
    wrong = replace(state, gradient=-state.gradient)
    after = drive(sgpr.search(problem(), wrong), sites)
    assert after.height == state.height
    taken = np.abs(sgpr.restricted(wrong.curvature, wrong.gradient, wrong.radius)).max()
    assert 0.1 * taken <= after.radius <= 0.5 * taken
    assert not after.converged


def test_the_outlook_goes_on_as_a_geometric_series_does():
    """Σ of the next terms; where gains do not shrink, as many more of their mean; nothing where nothing is gained."""
    gains = 0.7 ** np.arange(5)
    assert outlook(gains, 6) == pytest.approx((0.7 ** np.arange(5, 11)).sum(), rel=1e-12)
    assert outlook(np.array([1.0, 3.0, 2.0]), 4) == pytest.approx(8.0)
    assert outlook(np.zeros(4), 3) == 0.0
    assert outlook(np.array([2.0, 1.0]), 3) is None
    ends = (k for k in range(99) if (0.7 ** np.arange(5 + k, 11 + k)).sum() < 0.01)
    assert rounds_to_come(gains, 6, 0.01) == next(ends) > 5
    assert rounds_to_come(gains, 6, 9.0) == 0
    assert rounds_to_come(np.ones(4), 6, 0.01) is None


def test_cells_count_every_row_once_and_none_alone():
    draw, anchors = np.random.default_rng(0), np.random.default_rng(1).standard_normal((64, 3))
    parts = [draw.standard_normal((count, 3)) for count in (3, 40, 301)]
    sums = [cells.cells(part, anchors) for part in parts]
    for part, (count, first, second) in zip(parts, sums, strict=True):
        assert count.sum() == len(part)
        assert count[count > 0].min() >= min(cells.LEAST_ROWS, len(part))
        assert first.sum(0) == pytest.approx(part.sum(0))
        assert second.sum(0) == pytest.approx((part**2).sum(0))
    total = [sum(own) for own in zip(*sums, strict=True)]
    draws, everyone = cells.drawn(*total, 4000, np.random.default_rng(0)), np.concatenate(parts)
    assert draws.mean(0) == pytest.approx(everyone.mean(0), abs=0.05)
    assert np.cov(draws.T) == pytest.approx(np.cov(everyone.T), abs=0.1)


def test_values_that_many_rows_have_are_met_and_none_of_one_or_two_rows_is_told():
    """Ages of 3, 7 and 28 days and a continuous column: every cell has three rows, and points have just these ages."""
    draw = np.random.default_rng(0)
    parts = [np.stack([draw.choice([3.0, 7.0, 28.0, n + 100.0], 60, p=[0.3, 0.3, 0.37, 0.03]),
                       draw.standard_normal(60)], 1) for n in range(4)]  # fmt: skip
    everyone = np.concatenate(parts)
    sums = [cells.values_of(part, everyone) for part in parts]
    for count, total in sums:
        assert set(count[count > 0] >= cells.LEAST_ALIKE) == {True}
        assert (total[count == 0] == 0).all()
    rows_in, total = (sum(own) for own in zip(*sums, strict=True))
    for exact in (3.0, 7.0, 28.0):
        slot = np.abs(total[0] / np.maximum(rows_in[0], 1) - exact).argmin()
        assert total[0][slot] == pytest.approx(exact * rows_in[0][slot], rel=1e-12)
        assert rows_in[0][slot] == (everyone[:, 0] == exact).sum()
    points = draw.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], 500)
    moved = cells.with_values(points, rows_in, total)
    assert np.isin(np.round(moved[:, 0], 9), (3.0, 7.0, 28.0)).mean() > 0.95
    found, wanted = (np.quantile(part[:, 1], [0.1, 0.5, 0.9]) for part in (moved, everyone))
    assert found == pytest.approx(wanted, abs=0.15)
    for column in range(2):  # in the order of the points
        assert (np.diff(moved[np.argsort(points[:, column]), column]) >= 0).all()
    assert cells.values_of(everyone[:2], everyone)[0].sum() == 0  # two rows say nothing


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_pairs_of_common_values_are_counted_as_in_all_rows_and_rare_ones_are_not(seed):
    draw = np.random.default_rng(seed)
    inputs, values = draw.integers(0, 4, (40, 3)).astype(float), np.tile([0.0, 1.0, 2.0], (3, 1))
    counts = cells.pair_counts(inputs, values)
    for pair, (i, j) in enumerate([(0, 1), (0, 2), (1, 2)]):
        for a, b in np.ndindex(3, 3):
            rows = ((inputs[:, i] == a) & (inputs[:, j] == b)).sum()
            assert counts[pair, a, b] == (rows if rows >= cells.LEAST_ALIKE else 0)


def test_the_tree_of_dependence_is_that_of_a_chain():
    """x1 → x2 → x3, each a noisy copy, and x4 by itself: the edges with most information are those of the chain."""
    draw = np.random.default_rng(1)
    chain = [draw.integers(0, 4, 4000)]
    for _ in range(2):
        chain.append(np.where(draw.random(4000) < 0.8, chain[-1], draw.integers(0, 4, 4000)))
    order = [2, 0, 3, 1]  # columns are x3, x1, x4, x2
    inputs = np.stack([*chain, draw.integers(0, 4, 4000)], 1)[:, order].astype(float)
    pairs = np.zeros((4, 4, 4, 4))
    pairs[np.triu_indices(4, 1)] = cells.pair_counts(inputs, np.tile(np.arange(4.0), (4, 1)))
    edges = {frozenset(edge) for edge in cells.dependence_tree(pairs, 4000.0)}
    assert {frozenset((0, 3)), frozenset((3, 1))} <= edges
    assert len(edges) == 3


def test_points_have_the_pairs_of_values_that_rows_have_and_keep_each_input():
    """Shape and height of four buildings, and an age: no point has the height of another building."""
    draw = np.random.default_rng(2)
    shape, height = np.array([1.0, 2.0, 3.0, 4.0]), np.array([7.0, 3.5, 3.5, 7.0])
    parts = [np.stack([shape[k], height[k], draw.standard_normal(100)], 1) for k in draw.integers(0, 4, (3, 100))]
    everyone = np.concatenate(parts)
    rows_in, total = (sum(of) for of in zip(*(cells.values_of(part, everyone) for part in parts), strict=True))
    points = draw.standard_normal((2000, 3))
    moved, common = cells.with_values(points, rows_in, total), cells.common_values(rows_in, total)
    counts = sum(cells.pair_counts(part, common) for part in parts)
    joint = cells.with_pairs(points, moved, common, counts, 300.0)
    assert (height[np.searchsorted(shape, joint[:, 0] - 1e-9)] != moved[:, 1]).mean() > 0.3  # by ranks alone
    assert joint[:, 1] == pytest.approx(height[np.searchsorted(shape, joint[:, 0] - 1e-9)])
    assert (joint[:, 2] == moved[:, 2]).all()  # no value of an age is common
    found, wanted = ([(rows[:, 0] == value).mean() for value in shape] for rows in (joint, everyone))
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    few = cells.with_pairs(points, moved, common, counts * 0.5, 300.0)  # half of the rows are in rare pairs
    np.testing.assert_array_equal(few, moved)


def test_the_information_is_the_expected_curvature_of_a_normal():
    """−log N(y | 0, C(θ)) with y yᵀ replaced by its expectation C(θ₀) has the Hessian F at θ₀."""
    x, y = rows(30)
    model = ExactGP(ModelSection(kernel="rbf"), x, y)
    draw = np.random.default_rng(3)
    model.load({name: draw.normal(-0.5, 0.4, p.shape) for name, p in model.wire_parameters().items()})

    def covariance(theta: torch.Tensor) -> torch.Tensor:  # in the order of sorted names
        scaled = x / theta[:D].exp()
        squares = ((scaled[:, None] - scaled) ** 2).sum(-1)
        return theta[D].exp() * (-0.5 * squares).exp() + theta[-1].exp() * torch.eye(len(x), dtype=torch.float64)

    def expected(theta: torch.Tensor) -> torch.Tensor:
        here = covariance(theta)
        return 0.5 * (torch.linalg.solve(here, covariance(known)).trace() + torch.logdet(here))

    known = torch.cat([p.detach().flatten() for _, p in sorted(model.wire_parameters().items())])
    before = model.covariance()
    found = model.information()
    torch.testing.assert_close(found, torch.autograd.functional.hessian(expected, known), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.covariance(), before)


def test_the_first_curvature_is_that_of_as_many_rows_and_the_prior(monkeypatch):
    """Two of six points stand for 60 rows; to which an information of nothing would add only 1/sd² of each prior."""
    state = starting()
    monkeypatch.setattr(sgpr, "INFORMATION_ENTRIES", 4 * state.theta.size)
    sites = federation([25, 35])
    first = drive(evaluate(problem(), replace(state, curvature=np.empty((0, 0))), tuple(sites)), sites)
    model = ExactGP(ModelSection(), torch.from_numpy(state.places[:2]), torch.zeros(2, dtype=torch.float64))
    model.load(first.values)
    priors = hyperpriors(model.kernel, D)
    of_each = [priors[name][1] ** -2 for name, p in sorted(model.wire_parameters().items()) for _ in range(p.numel())]
    np.testing.assert_allclose(first.curvature, 60 / 2 * model.information().numpy() + np.diag(of_each), rtol=1e-9)


@pytest.mark.parametrize(("noise", "level"), [(0.0, -2.5), (3.0, -1.0)])
def test_training_begins_with_the_best_share_of_noise(noise, level):
    """All candidates have the same amplitude before the best scale multiplies kernel and noise alike."""
    x, y = rows(100)
    y = y + noise * torch.from_numpy(np.random.default_rng(5).standard_normal(100))
    sites, begun = {"a": Site("rbf", x, y / y.std())}, starting()
    first = drive(evaluate(problem(), begun, ("a",)), sites)
    ratio, before = (
        float(of["likelihood.log_noise"][0]) - float(of["kernel.log_outputscale"].ravel()[0])
        for of in (first.values, begun.values)
    )
    assert ratio - before == pytest.approx(level - float(begun.values["likelihood.log_noise"][0]))


KEYS = {"method": "sgpr", "sgpr__exchanges": 0, "model__num_inducing": 12}


def test_single_precision_comes_near():
    keys = KEYS | {"sgpr__exchanges": 12}
    double, single = (run(FaultyGrid(configured(**keys, precision=own), 3)) for own in ("float64", "float32"))
    assert not single.network.failures
    assert single.outcome.metrics["test"]["nll"] == pytest.approx(double.outcome.metrics["test"]["nll"], abs=2e-2)


def test_a_target_that_is_constant_at_every_site_is_refused(tmp_path):
    frames = {name: waves(40, seed).assign(y=2.0) for seed, name in enumerate("ab")}
    with pytest.raises(DataError, match="`y` is the same number at every site"):
        run(FaultyGrid(configured(**KEYS), csv_nodes(tmp_path, frames)))


def test_few_exchanges_come_close_to_the_optimum_of_l_bfgs_on_the_rows(monkeypatch):
    monkeypatch.setattr(sgpr, "TOLERANCE", 0.0)
    grid = FaultyGrid(configured(**KEYS | {"sgpr__exchanges": 21}, num_server_rounds=100), 5)
    few = run(grid)
    details, count = few.details(), sum(few.preparation.rows.values())
    model = SparseGP.from_arrays(few.config.model, kit.parameters(few))
    data = kit.rows_of(grid, few, "01234")
    named = {name: p for name, p in model.wire_parameters().items() if name != LOCATIONS}
    priors = hyperpriors(model.kernel, data[0].shape[1])

    def objective() -> torch.Tensor:
        cross = model.project(data[0])
        spread = model.noise + model.kernel(data[0], diag=True) - cross.square().sum(0)
        normal = torch.distributions.LowRankMultivariateNormal(torch.zeros_like(data[1]), cross.mT, spread)
        return normal.log_prob(data[1]) + log_prior(named, priors)

    here = objective().item()
    best = maximise(objective, [*named.values()], max_evaluations=200, bounds=[LOGARITHM] * len(named))
    assert (details["exchanges"], details["num_inducing"]) == (25, 12)
    assert 0 <= details["expected_seconds"] < 60  # the clock of the test stands still between messages
    assert here == pytest.approx(few.current.height, abs=1e-6)
    assert here > best[-1] - 0.02 * count


def test_without_a_round_it_predicts_with_the_best_share_of_noise(monkeypatch):
    """Two exchanges are no round: the last question tries the first candidates, and no curvature is known."""
    flat, evidences = configured(**KEYS | {"sgpr__exchanges": 2}), []
    for levels in ((-1.0,), (-4.0,), (-1.0, -4.0)):
        monkeypatch.setattr(sgpr, "FIRST_NOISE", levels)
        end = run(FaultyGrid(flat, 3))
        assert "relevance" not in end.details()
        evidences.append(end.details()["evidence"])
    assert len(set(evidences)) == 2
    assert evidences[2] >= max(evidences) - 5  # the prior of the noise counts as well


def test_a_finished_run_may_go_on(monkeypatch):
    monkeypatch.setattr(sgpr, "TOLERANCE", 0.0)
    flat, whole = configured(**KEYS | {"sgpr__exchanges": 20}), Recorder()
    end = run(FaultyGrid(flat, 3), whole)
    longer = parse_config(flat | {"sgpr.exchanges": 22, "num-server-rounds": 5})
    assert longer.digest() == parse_config(flat).digest()
    more = run(FaultyGrid(longer.flat(), 3), Recorder(), whole.snapshots[-1])
    assert end.details()["exchanges"] < more.details()["exchanges"] <= 4 + 1 + 5 * 2 + 4
    assert more.current.height >= end.current.height


def test_a_lost_site_is_left_out_and_the_others_go_on(tmp_path):
    """What is known afterwards is the bound of the rows that are left."""
    nodes = csv_nodes(tmp_path, {name: waves(40, seed) for seed, name in enumerate("abc")})
    recorder = Recorder()
    faults = [Fault("b", lost, (phase,), range(2, 9)) for phase in ("query.trials", "train.gradients")]
    keys = KEYS | {"sgpr__exchanges": 12}
    end = run(FaultyGrid(configured(**keys, num_server_rounds=4), nodes, *faults), recorder)
    assert set(blamed(end)) == {"b"}
    assert end.current.sites == ("a", "c")
    assert recorder.rows[-1]["evidence"] >= recorder.rows[2]["evidence"] - 1e-9
    once = Fault("b", lost, ("query.trials",), range(2, 3), 2)
    back = run(FaultyGrid(configured(**keys, num_server_rounds=3), nodes, once))
    assert back.current.sites == ("a", "b", "c")


def test_a_site_predicts_left_out_rows_once_for_each_posterior(monkeypatch):
    asked = []
    monkeypatch.setattr(client, "left_out", lambda *parts: asked.append(parts[3].mean) or left_out(*parts))
    for count in (11, 12):
        run(FaultyGrid(configured(**KEYS | {"model__num_inducing": count, "sgpr__exchanges": 4}), 3))
    assert [len(asked), len({mean.numpy().tobytes() for mean in asked})] == [6, 2]


def test_small_sites_are_named_capped_or_sent_under_masks():
    """Three rows for each of 48 points are 144, and all have 141."""
    rows = {"big": 80, "mid": 40, "low": 21}
    there = Roster(rows, tuple(rows), (), 0)
    for policy, at, points in (("warn", there, 24), ("cap", there, 7), ("masks", replace(there, totals_only=True), 24)):
        assert inducing_points(24, at, policy) == points
    with pytest.raises(ConfigError, match="mid, low have fewer than 3 rows"):
        inducing_points(24, there, "masks")
    [told] = disclosure_by_total(48, rows)
    assert "with 141 rows and sums at 48 inducing points, this model can reveal" in told
    assert "`model.num-inducing` = 47 or less" in told  # 3 × 47 ≤ 141 < 3 × 48
    assert disclosure_by_total(47, rows) == []
    [told] = disclosure_by_sites(27, rows, ", ".join)
    assert told.startswith("the sums of big, mid, low nearly reveal their rows to the server: these sites have fewer")


def test_a_run_says_what_limited_its_points(tmp_path):
    keys = configured(**KEYS | {"model__num_inducing": 24, "num_server_rounds": 1}, sgpr__small_sites="cap")
    end = run(FaultyGrid(keys, csv_nodes(tmp_path, {"mid": waves(50, 1), "low": waves(26, 2)})))
    assert end.details()["num_inducing"] == 7
    assert any("7 inducing points instead of 24" in text and "site low has 21" in text for text in end.warnings())
    assert not any("rows of all sites" in text for text in end.warnings())
    few = {site: waves(40, seed).assign(x1=lambda rows: np.sign(rows["x1"]), x2=1.0) for seed, site in enumerate("ab")}
    end = run(FaultyGrid(configured(**KEYS | {"num_server_rounds": 1}), csv_nodes(tmp_path, few)))
    assert len(end.current.values[LOCATIONS]) == 2  # as many as the rows have different inputs
    assert not any("'cap'" in text for text in end.warnings())


@pytest.mark.parametrize("size", [-1.0, 1.0])
@pytest.mark.parametrize(("method", "points"), [("sgpr", 500), ("sgpr", 6), ("fsgp", 6), ("svgp", 6)])
def test_a_site_whose_projections_are_false_is_named_and_stays(method, points, size, caplog, monkeypatch):
    """Its sums are those of some rows, so nothing refuses them; what the others' rows predict gives them away.

    The sums at the first points show it.
    """
    monkeypatch.setattr("strategies.pooled_bound.COMPARED_POINTS", points)
    keys, recorder = METHODS[method] | {"num_server_rounds": 2, "evaluate_every": 1}, Recorder()
    with kit.false_projections("1", size):
        strategy = run(FaultyGrid(configured(**keys), 3), recorder)
    said = [text for text in strategy.outcome.metrics["warnings"] if "site 1 contradicts the others" in text]
    assert len(said) == (size < 1)
    assert not any("nats" in text for text in said)  # the comparison's criterion is not the evidence of the rows
    assert sum("site 1 contradicts the others" in text for text in caplog.messages) == (size < 1)
    assert set(recorder.snapshots[-1].facts["doubted"]) == ({"1"} if size < 1 else set())
    assert not blamed(strategy)


@pytest.mark.parametrize("kept", [0, 1 << 31])
def test_a_site_that_contradicts_the_others_at_first_only_is_cleared(kept, caplog, monkeypatch):
    """Before training, honest sites may seem to contradict each other; the report is of the latest comparison."""
    monkeypatch.setattr("strategies.server.session.KEPT_BYTES", kept)
    lie = arrays(lambda own: {**own, "projections": -own["projections"]})
    fault = Fault("1", lie, ("query.trials",), range(1, 2))
    strategy = run(FaultyGrid(configured(**KEYS, num_server_rounds=2), 3, fault))
    assert any("site 1 contradicts the others" in text for text in caplog.messages)
    assert not any("contradicts" in text for text in strategy.outcome.metrics["warnings"])


@pytest.mark.parametrize("size", [-1.0, 0.0, 1.0])
def test_sites_with_means_and_noise_of_their_own_do_not_contradict(size):
    """Means far apart outweigh the function that all share; two liars of five are found one after the other."""
    model, draw, parts = SparseGP.from_arrays(ModelSection(), unit_values()), np.random.default_rng(5), {}
    for number, (shift, noise) in enumerate([(3.0, 0.1), (-2.0, 1.0), (0.0, 0.3), (-4.0, 0.1), (1.0, 0.5)]):
        x, y = rows(50 + 30 * number, number)
        parts[str(number)] = pooled_sums(model, x, y + shift + noise * torch.from_numpy(draw.standard_normal(len(y))))
    for liar in ("1", "3"):
        parts[liar] = replace(parts[liar], projection=size * parts[liar].projection)
    factor = Whitener(model).factor.detach()
    level = torch.linalg.solve_triangular(factor, torch.ones_like(factor[:, :1]), upper=False)[:, 0].numpy()
    assert set(contradicting(parts, level)) == ({"1", "3"} if size < 1 else set())
    parts["2"] = replace(parts["2"], projection=0 * parts["2"].projection, target_squares=np.array(0.0))
    assert "2" not in contradicting(parts, level)  # targets that are all equal to the mean


@pytest.mark.parametrize("size", [1, 2, 20])
def test_honest_sites_of_few_or_equal_inputs_do_not_contradict(size):
    """Their predictions have no slope, and what centring leaves of them is rounding."""
    model = SparseGP.from_arrays(ModelSection(), unit_values())
    level = unit_function(model)
    others = {str(number): pooled_sums(model, *rows(60, number)) for number in range(3)}
    for seed in range(20):
        x, y = rows(size, 10 + seed)
        parts = others | {"small": pooled_sums(model, x[:1].expand(size, -1), y)}
        assert not contradicting(parts, level)


def test_copies_of_rows_count_as_one_row():
    """60 rows five times over, at three sites: sums of signs tell Σ c², and Kish's share makes 300 rows 60 again.

    Rows whose targets have few levels are no copies, whatever their inputs.
    """
    x, y = (part.numpy() for part in rows(60))
    assert cells.weight_of(cells.repeats(x, y), 60.0) == 1.0
    five = [np.tile(x, (5, 1)), np.tile(y, 5)]
    mixed = np.random.default_rng(2).permutation(300)
    parts = [cells.repeats(five[0][part], five[1][part]) for part in np.split(mixed, [50, 170])]
    assert sum(parts) == pytest.approx(cells.repeats(*five))
    assert 1 / 5 / 1.6 < cells.weight_of(sum(parts), 300.0) <= 1 / 5
    assert cells.weight_of(cells.repeats(np.sign(five[0]), np.sign(five[1])), 300.0) == 1.0
    model = SparseGP.from_arrays(ModelSection(), unit_values())
    once, often = (weighted_sums(model, *map(torch.from_numpy, data)) for data in ((x, y), five))
    assert evidence(weighted(often, 1 / 5)).value == pytest.approx(evidence(once).value)


def test_copies_do_not_collapse_the_noise(tmp_path):
    """300 rows of 60 distinct ones: the noise, .27 of the target's deviation, vanishes where copies count as rows."""
    copies = pd.concat([waves(60, 1)] * 5).sample(frac=1.0, random_state=0)
    frames = {name: copies[number::3] for number, name in enumerate("abc")}
    keys = KEYS | {"model__num_inducing": 0, "num_server_rounds": 4}
    end = run(FaultyGrid(configured(**keys), csv_nodes(tmp_path, frames)))
    assert end.current.weight < 1 / 4
    assert 0.15 < end.details()["noise_sd_standardised"] < 0.4
    assert any("rows are copies of each other" in text for text in end.warnings())


def test_sites_of_a_process_share_an_equal_posterior_and_no_other():
    mean, covariance = torch.ones(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    known = shared(WhitenedPosterior(mean, covariance))
    assert shared(WhitenedPosterior(mean.clone(), covariance.clone())) is known
    for other in (WhitenedPosterior(mean, 2 * covariance), WhitenedPosterior(mean[:2], covariance[:2, :2])):
        assert shared(other) is other
        assert shared(other) is other
