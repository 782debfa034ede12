"""Differential privacy of FSGP's sums: the worst row, the noise, what it is worth, and what is refused."""

import json
import math

import numpy as np
import pytest
from faults import Fault, FaultyGrid, arrays, blamed, configured, csv_nodes, lost, run, waves
from schedules import METHODS
from scipy.integrate import simpson
from scipy.optimize import minimize
from scipy.stats import norm

from fedgp_flower.errors import ProtocolError, RunError
from fedgp_flower.gp.models import LOCATIONS, LOG_NOISE
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.methods.sgpr.messages import PrivateRequest, PrivateSums
from fedgp_flower.methods.sgpr.private import EDGE, GRID, SENSITIVITY, Budget, cleaned, disturbed, units_of
from fedgp_flower.options import ModelSection
from fedgp_flower.privacy.noise import composed, delta_of, discrete_normal, epsilon_of, mu_of
from fedgp_flower.records import array_record, numpy_arrays
from fedgp_flower.run.registry import client_class
from strategies import private_sgpr
from strategies.pooled_bound import noise_of, posterior_at
from strategies.private_sgpr import AMPLITUDE, evaluated

PRIVATE = METHODS["sgpr-private"] | {"num_server_rounds": 9, "evaluate_every": 1}
SIZE = 6
VALUES = {AMPLITUDE: np.zeros(()), LOG_NOISE: np.zeros(1), LOCATIONS: np.zeros((1, 1))}


def sums_of(a: np.ndarray, y: np.ndarray) -> SparseSums:
    """Of rows with whitened projections a [N, M]."""
    values = (a.T @ a, a.T @ y, y @ y, np.array(float(len(y))), np.array(float(len(y))))
    return SparseSums(*map(np.asarray, values))


def rows_of(count: int, rng: np.random.Generator) -> np.ndarray:
    """Whitened projections of unit length [N, M]."""
    a = rng.standard_normal((count, SIZE))
    return a / np.linalg.norm(a, axis=1, keepdims=True)


def apart(row: np.ndarray, amplitude: float) -> float:
    """How far the sums move when one row is replaced by the other, in their units."""
    a, y = row.reshape(2, -1)[:, :-1], row.reshape(2, -1)[:, -1]
    a = a * math.sqrt(amplitude) / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1)
    one, two = (sums_of(a[[i]], EDGE * np.clip(y[[i]], -1, 1)) for i in (0, 1))
    parts = zip((one.gram - two.gram, one.projection - two.projection, one.target_squares - two.target_squares),
                units_of(amplitude), strict=True)  # fmt: skip
    return math.sqrt(sum(float(np.square(part).sum()) / unit**2 for part, unit in parts))


@pytest.mark.parametrize("amplitude", [1.0, 0.3])
def test_the_worst_neighbour_is_as_far_as_promised_and_no_farther(amplitude):
    starts = np.random.default_rng(0).standard_normal((3, 2 * 3))
    found = [-minimize(lambda row: -apart(row, amplitude), own, method="Nelder-Mead").fun for own in starts]
    assert max(found) == pytest.approx(SENSITIVITY, rel=1e-4)
    assert max(found) <= SENSITIVITY * (1 + 1e-9)


def test_noise_has_the_scale_that_is_paid_for():
    """Of every entry: an off-diagonal one stands for two, so that lengths of symmetric matrices are kept."""
    rng, zeros, noise = np.random.default_rng(1), sums_of(np.zeros((1, SIZE)), np.zeros(1)), 3.0
    draws = [disturbed(zeros, 0.5, noise, rng) for _ in range(1500)]
    gram, projection, squares = units_of(0.5)
    off, on = (np.std([own.gram[entry] for own in draws]) for entry in ((2, 1), (1, 1)))
    assert on == pytest.approx(noise * gram, rel=0.06)
    assert off == pytest.approx(noise * gram / math.sqrt(2), rel=0.06)
    assert np.std([own.projection[0] for own in draws]) == pytest.approx(noise * projection, rel=0.06)
    assert np.std([float(own.target_squares) for own in draws]) == pytest.approx(noise * squares, rel=0.06)
    assert all(np.array_equal(own.gram, own.gram.T) for own in draws[:3])
    steps = draws[0].projection / (GRID * noise * projection)
    assert np.allclose(steps, np.rint(steps))


@pytest.mark.parametrize("deviation", [0.7, 3.0, 2.0**20 / 7])
def test_discrete_noise_is_of_the_discrete_normal(deviation):
    """Its frequencies by the formula, or, where it is wide, its moments; always integers."""
    draws = discrete_normal(deviation, 40_000, np.random.default_rng(4))
    assert draws.dtype == np.int64
    assert len(draws) == 40_000
    if deviation < 10:
        values = np.arange(-40, 41)
        mass = np.exp(-(values**2) / (2 * deviation**2))
        mass /= mass.sum()
        seen = np.array([(draws == value).mean() for value in values])
        assert np.abs(seen - mass).max() < 5 * math.sqrt(0.25 / len(draws))
    else:
        assert np.std(draws) == pytest.approx(deviation, rel=0.02)
        assert abs(np.mean(draws)) < 5 * deviation / math.sqrt(len(draws))
        assert (draws % 2).mean() == pytest.approx(0.5, abs=0.02)


def test_neighbours_with_the_same_noise_are_as_far_apart_as_the_budget_says():
    """The worst pair, a·a' = ½ and opposite targets, is at μ, rounding included."""
    budget, (one, two) = Budget(1.0, 1e-5, 1, SIZE), np.eye(SIZE)[:2]
    pair = [sums_of(a[None], np.array([y])) for a, y in ((one, EDGE), (0.5 * one + math.sqrt(0.75) * two, -EDGE))]
    told = [disturbed(sums, 1.0, budget.noise, np.random.default_rng(7)) for sums in pair]
    parts = zip(("gram", "projection", "target_squares"), units_of(1.0), strict=True)
    squares = [np.square((getattr(told[0], n) - getattr(told[1], n)) / (budget.noise * u)).sum() for n, u in parts]
    assert math.sqrt(sum(squares)) == pytest.approx(budget.mu, rel=1e-5)
    assert math.sqrt(sum(squares)) <= budget.mu


def test_the_accountant_against_quadrature_and_itself():
    """δ(ε) = E (1 − e^(ε − L))₊ over the privacy loss L ~ N(μ²/2, μ²), integrated; composition adds squares."""
    for epsilon, mu in ((0.1, 0.3), (1.0, 0.3), (1.0, 2.0), (5.0, 1.5)):
        x = np.linspace(epsilon, epsilon + 12 * mu + mu**2, 20001)
        integral = simpson(norm.pdf(x, mu**2 / 2, mu) * -np.expm1(epsilon - x), x=x)
        assert delta_of(epsilon, mu) == pytest.approx(integral, rel=1e-6)
        assert epsilon_of(mu_of(epsilon, 1e-5), 1e-5) == pytest.approx(epsilon, rel=1e-9)
    budget = Budget(2.0, 1e-6, 5, SIZE)
    assert composed([budget.mu] * 5) == pytest.approx(mu_of(2.0, 1e-6))
    assert budget.spent(5) == pytest.approx(2.0)
    assert budget.spent(2) < 2.0


def test_sums_without_noise_come_back_and_noise_alone_says_nothing():
    rng = np.random.default_rng(2)
    a = rows_of(400, rng)
    exact = sums_of(a, y := a @ rng.standard_normal(SIZE))
    back, left_out = cleaned(disturbed(exact, 1.0, 1e-9, rng), 400, 1e-9)
    assert left_out == 0
    np.testing.assert_allclose(back.gram, exact.gram, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(back.projection, exact.projection, rtol=1e-6, atol=1e-6)
    assert float(back.target_squares) == pytest.approx(float(y @ y), rel=1e-5)
    _, left_out = cleaned(disturbed(exact, 1.0, 1e4, rng), 400, 1e4)
    assert left_out >= SIZE - 1


def test_what_is_predicted_from_a_noisy_release_is_as_far_off_as_it_says():
    """Held-out rows in units of their sd, over draws: residuals that noise hides are not taken for zero."""
    rng, rows = np.random.default_rng(7), 2000
    for noise in (20.0, 60.0):
        squares = []
        for _ in range(12):
            a, u = rows_of(rows, rng), 0.7 * rng.standard_normal(SIZE)
            y = np.clip(a @ u + 0.3 * rng.standard_normal(rows), -EDGE, EDGE)
            found = evaluated(VALUES, disturbed(sums_of(a, y), 1.0, noise, rng), rows, noise, ModelSection())
            q = posterior_at(found.values, found.totals)
            at = math.exp(found.values[AMPLITUDE] / 2) * rows_of(200, rng)
            off = (at / np.linalg.norm(at, axis=1, keepdims=True)) @ u - at @ q.mean + 0.3 * rng.standard_normal(200)
            squares.append(np.mean(off**2 / (np.einsum("nm,mk,nk->n", at, q.covariance, at) + noise_of(found.values))))
        assert np.mean(squares) < 2


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "masked"])
def private(request):
    grid = FaultyGrid(configured(**PRIVATE, privacy__secure_aggregation=request.param), 4)
    return run(grid), grid


def test_one_entry_without_measure_is_its_sites_failure():
    def spoilt(own):
        own["projection"][-1] = 1e300
        return own

    strategy = run(FaultyGrid(configured(**PRIVATE), 4, Fault("1", arrays(spoilt), ("query.private",))))
    assert blamed(strategy).keys() == {"1"}
    assert "largest entry" in blamed(strategy)["1"][0]
    assert strategy.outcome.metrics["test"]["nll"] < 3


def test_sites_of_one_row_and_of_many_are_no_outliers():
    """Noise is as large for one as for the other."""
    rng, rows = np.random.default_rng(8), {"a": 1, "b": 30_000, "c": 100, "d": 3}
    for noise in (1e-3, 1.0, 1e3):
        told = {}
        for site, count in rows.items():
            a = rows_of(count, rng)
            told[site] = disturbed(sums_of(a, rng.uniform(-EDGE, EDGE, count)), 1.0, noise, rng)
        assert PrivateSums.outliers(told, rows) == {}


def test_a_run_spends_what_it_says_and_nothing_else_of_training_rows_leaves(private):
    """Descriptions follow from the ranges alone; every other message is a noisy sum, a key, or about held-out rows."""
    strategy, grid = private
    metrics = strategy.outcome.metrics
    spent = metrics["method_details"]["differential_privacy"]
    assert (spent["releases"], spent["delta"], len(grid.of("query.private", "0"))) == (1, 1e-5, 1)
    assert spent["epsilon"] == pytest.approx(1.0)
    assert any("ε = 1 at δ = 1e-05" in line for line in metrics["warnings"])
    assert math.isfinite(metrics["test"]["nll"])
    kinds = {kind for _, kind, _ in grid.replies}
    assert kinds <= {"query.describe", "query.keys", "query.private", "evaluate", "query.score_sums"}
    for _, kind, reply in grid.replies if strategy.session.masking else ():
        own = reply.content.array_records["arrays"]
        assert kind in {"query.describe", "query.keys"} or list(own) == ["masked"]
    arrays = strategy.preparation.arrays
    assert (float(arrays["input.mean"][0]), float(arrays["target.mean"])) == pytest.approx((3.0, 0.0))
    assert float(arrays["input.scale"][0]) == pytest.approx(8 / math.sqrt(12))


def test_a_site_refuses_what_is_not_paid_for():
    strategy = run(FaultyGrid(configured(**PRIVATE), 3))
    for kind in ("query.statistics", "query.shape", "query.sketch", "query.moments", "query.local_only"):
        with pytest.raises(ProtocolError, match="more about rows than the budget covers"):
            client_class(strategy.config).request_of(object.__new__(client_class(strategy.config)), kind, {}, {})
    start = {f"values.{name}": own for name, own in strategy.current.start.items()}
    moved = {name: own + 1 for name, own in start.items()}
    for values, sharing, words in ((moved, 1, "budget of 1 release(s) is spent"), (start, 3, "a sum of 1 site")):
        request = strategy.network.message("0", "query.private", array_record(values), {"sharing": sharing})
        assert strategy.network.exchange([request], None) == []
        assert words in strategy.network.failures[-1].reason


@pytest.mark.parametrize(("masked", "seen"), [(False, 1), (True, 3)])
def test_sites_share_the_noise_among_those_in_the_total_alone(masked, seen, monkeypatch, caplog):
    """A server could ask for a thousandth of the noise in its first and only question."""
    monkeypatch.setattr(private_sgpr, "PrivateRequest", lambda values, sharing: PrivateRequest(values, 10**6))
    grid = FaultyGrid(configured(**PRIVATE, privacy__secure_aggregation=masked), 3)
    with pytest.raises(RunError, match="no site sent noisy sums"):
        run(grid)
    assert f"`sharing` = 1000000: the server sees a sum of {seen} site(s)" in caplog.text


def test_a_release_that_got_lost_is_sent_again_and_no_other(tmp_path):
    """Noise is drawn once: a second draw would halve it."""
    nodes = csv_nodes(tmp_path, {site: waves(30, seed)[["x1", "y"]] for seed, site in enumerate("abc")})
    for node in nodes:
        node["state-dir"] = str(tmp_path / node["site"])
    ranges = json.dumps({"x1": [-2.0, 2.0], "y": [-3.0, 3.0]})
    keys = configured(**PRIVATE | {"privacy__ranges": ranges, "round__incomplete": "repeat"})
    grid = FaultyGrid(keys, nodes, Fault("b", lost, ("query.private",), times=1))
    strategy = run(grid)
    assert [failure.site for failure in strategy.network.failures] == ["b"]
    for site in "ac":
        first, again = (numpy_arrays(own.content.array_records["arrays"]) for own in grid.of("query.private", site))
        assert all(np.array_equal(first[name], again[name]) for name in first)
    assert strategy.outcome.metrics["sites"] == 3
