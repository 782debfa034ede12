"""FITC from sums against its textbook density; more inducing points after training: order, how many pay, runs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from faults import FaultyGrid, Recorder, alike, configured, csv_nodes, run, waves
from scipy.stats import multivariate_normal, norm, t
from test_sgpr import rows, unit_values

from fedgp_flower.gp import error_law
from fedgp_flower.gp.fitc import WeightedSums, evidence, left_out, weighted_sums
from fedgp_flower.gp.models import LOCATIONS, ExactGP, SparseGP
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.messages import add
from fedgp_flower.options import ModelSection
from fedgp_flower.records import array_record, numpy_arrays
from fedgp_flower.run.registry import parse_config
from fedgp_flower.scores import Prediction, TargetUnits
from strategies import enlarging, sgpr
from strategies.enlarging import doubling_gain, ordered, points_per_message, predictive_loss, sufficient_points


def at(places: torch.Tensor, kernel: str = "rbf") -> SparseGP:
    values = unit_values(kernel) | {LOCATIONS: places.numpy()}
    return SparseGP.from_arrays(ModelSection(kernel=kernel), values)


def test_points_come_in_the_order_of_what_is_left_of_them():
    """Each is the one of the largest variance given those before it; one that is met again is left out."""
    places = rows()[0][:20]
    places = torch.cat([places, places[:3]])
    values = ordered(unit_values() | {LOCATIONS: places.numpy()}, ModelSection())
    covariance = at(places).kernel(places).to_dense().detach().numpy()
    taken = [int(np.flatnonzero((places.numpy() == point).all(1))[0]) for point in values[LOCATIONS]]
    assert sorted(taken) == list(range(20))
    for count in range(1, 6):
        s = taken[:count]
        left = covariance.diagonal() - (covariance[s] * np.linalg.solve(covariance[s][:, s], covariance[s])).sum(0)
        assert left[taken[count]] == pytest.approx(left.max(), abs=1e-9)


def test_a_curve_says_how_many_points_are_needed_and_what_more_would_bring():
    curve = 1 - 0.1 * 0.5 ** np.log2(np.arange(1, 65))  # each doubling brings half of the one before
    assert doubling_gain(curve) == pytest.approx((curve[63] - curve[31]) / 2)
    count = sufficient_points(curve, np.zeros(64))
    assert curve[count - 1] >= curve[-1] - enlarging.TOLERATED_LOSS > curve[count - 2]
    assert sufficient_points(np.zeros(9), np.zeros(9)) == 1
    assert sufficient_points(np.zeros(9), np.linspace(0.9, 0.0, 9)) == 9  # too few would make predictions too wide
    assert (points_per_message(64) >= 4000, points_per_message(0)) == (True, 0)


def test_few_points_widen_predictions_by_the_variance_that_they_leave():
    values = ordered(unit_values() | {LOCATIONS: rows()[0][:12].numpy()}, ModelSection())
    found, places = predictive_loss(values, ModelSection(), 0.1), torch.as_tensor(values[LOCATIONS])
    covariance = at(places).kernel(places).to_dense().detach().numpy()
    for count in (1, 5, 11, 12):
        part = covariance[:count]
        left = covariance.diagonal() - (part * np.linalg.solve(part[:, :count], part)).sum(0)
        assert found[count - 1] == pytest.approx(np.log1p(left.clip(0) / 0.1).mean() / 2, abs=1e-4)


def test_the_room_is_the_methods_unless_points_are_set():
    room = lambda **keys: parse_config({"method": "sgpr", **keys}).model.max_megabytes  # noqa: E731
    assert (room(), room(**{"model.num-inducing": 300}), room(**{"model.max-megabytes": 300})) == (64, 0, 300)
    resolved = parse_config({"method": "sgpr"}).flat()
    assert parse_config(resolved).flat() == resolved
    assert parse_config({"method": "fsgp"}).model.max_megabytes == 0


KEYS = {"method": "sgpr", "sgpr__exchanges": 8, "num_server_rounds": 20, "model__num_inducing": 6, "evaluate_every": 0}
LARGE = KEYS | {"model__max_megabytes": 1, "sgpr__exchanges": 12}


def on_a_curve(**now) -> sgpr.SGPRState:
    """A state whose evidence per row at the first m of four points is −½ log s_m, s_m = (s − b₁² − … − b_m²)/N."""
    scales = np.exp(-2 * np.array([0.1, 0.3, 0.4, 0.5]))  # from two to four points .2 nats, as from one to two
    parts = np.zeros((4, 4)), np.sqrt(-100 * np.diff(scales, prepend=1.0)), 100.0, 0.0, 100.0, 100.0
    totals = WeightedSums(*map(np.asarray, parts))
    state = sgpr.SGPRState({LOCATIONS: np.empty((4, 1))}, np.empty((0, 0)), np.empty((0, 0)), totals)
    assert doubling_gain(state.evidence_curve) == pytest.approx(0.2)
    return replace(state, **now)


def test_training_goes_on_at_the_first_size_where_twice_as_many_may_follow():
    first, problem = sgpr.FIRST_SIZE, sgpr.Problem(ModelSection(), exchanges=51)
    settled = lambda **now: sgpr.settled(problem, on_a_curve(**{"most": 2 * first, "asked": first} | now))  # noqa: E731
    assert (settled(exchanges=31), settled(exchanges=32), settled(converged=True)) == (False, True, True)  # 3/5 of 55
    assert (settled(asked=2 * first, rounds=1), settled(asked=2 * first)) == (True, False)
    assert settled(most=2 * first - 1, rounds=1)


def test_few_points_suffice_when_rounds_gain_little_beside_a_doubling():
    first = sgpr.FIRST_SIZE
    outpaced = lambda gains, **now: on_a_curve(**{"most": 2 * first, "gains": np.array(gains)} | now).outpaced  # noqa: E731
    assert (outpaced([0.1, 0.009, 0.0]), outpaced([0.1, 0.011, 0.0])) == (True, False)  # less than .05 x .2, or not
    assert not outpaced([0.0])
    assert not outpaced([0.0, 0.0], most=2 * first - 1)
    assert not outpaced([0.0, 0.0], asked=first)


def nodes(tmp_path):
    return csv_nodes(tmp_path, {name: waves(60, seed) for seed, name in enumerate("abc")})


def test_points_of_a_run_have_the_pairs_of_values_that_rows_have(tmp_path):
    draw, tables = np.random.default_rng(5), {}
    for site in "abc":
        shape = draw.integers(0, 4, 80)
        height = np.array([7.0, 3.5, 3.5, 7.0])[shape]
        others = {name: draw.standard_normal(80) for name in ("u", "v", "w", "y")}
        tables[site] = pd.DataFrame({"shape": shape, "height": height} | others)
    flat = configured(**KEYS | {"num_server_rounds": 1, "model__num_inducing": 60})
    strategy = run(FaultyGrid(flat, csv_nodes(tmp_path, tables)))
    assert len(np.unique(strategy.current.places[:, :2].round(6), axis=0)) == 4


def test_a_run_ends_with_more_points_and_predicts_better(tmp_path, monkeypatch):
    monkeypatch.setattr(sgpr, "FIRST_SIZE", 12)
    monkeypatch.setattr(enlarging, "TOLERATED_LOSS", 1e-6)
    monkeypatch.setattr(enlarging, "MINIMUM_GAIN", 1e-4)
    small = run(FaultyGrid(configured(**KEYS), nodes(tmp_path)))
    recorder = Recorder()
    large = run(FaultyGrid(configured(**LARGE), nodes(tmp_path)), recorder)
    state, asked = large.current, [row["points"] for row in recorder.rows]
    assert asked[0] == 6 and asked[-1] > 12  # noqa: PT018
    assert large.details()["num_inducing"] <= state.asked
    assert min(recorder.totals) >= recorder.totals[-1] == len(asked)  # rounds at more points are announced
    assert large.outcome.metrics["test"]["nll"] < small.outcome.metrics["test"]["nll"]
    again = run(FaultyGrid(configured(**LARGE), nodes(tmp_path)), Recorder(), recorder.snapshots[-2])
    assert again.details()["evidence"] == pytest.approx(large.details()["evidence"], abs=1e-9)


def test_a_run_from_given_arrays_counts_copies_once_and_ends_with_more_points(tmp_path, monkeypatch):
    monkeypatch.setattr(sgpr, "FIRST_SIZE", 12)
    monkeypatch.setattr(enlarging, "MINIMUM_GAIN", 1e-4)
    copies = pd.concat([waves(60, 1)] * 5).sample(frac=1.0, random_state=0)
    grid = FaultyGrid(configured(**LARGE), csv_nodes(tmp_path, {name: copies[k::3] for k, name in enumerate("abc")}))
    strategy = sgpr.SGPR.from_config(parse_config(grid.flat), Recorder())
    arrays = numpy_arrays(strategy.initial_arrays(grid))
    before = strategy.current
    arrays["values.likelihood.log_noise"] = arrays["values.likelihood.log_noise"] + 0.1
    strategy.start(grid, array_record(arrays), num_rounds=20)
    assert strategy.current.weight == before.weight < 1
    assert strategy.current.asked >= 12
    assert np.array_equal(strategy.current.places, before.places)


def test_masked_points_and_evidence_are_the_plain_ones():
    plain, masked = (run(FaultyGrid(configured(**LARGE, privacy__secure_aggregation=on), 3)) for on in (False, True))
    assert masked.current.asked == plain.current.asked
    assert np.array_equal(masked.current.theta, plain.current.theta)
    assert masked.details()["evidence"] == pytest.approx(plain.details()["evidence"], rel=1e-9)


KERNELS = ("rbf", "rbf + l1", "matern52 + linear", "warp(rbf + l1)")


def model_of(kernel: str, shift: float = 0.0) -> SparseGP:
    return SparseGP.from_arrays(ModelSection(kernel=kernel), unit_values(kernel, shift))


def textbook(model: SparseGP, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Q + diag(K − Q) + σ²I of the rows, and Q between inducing points and rows' functions, by inverses."""
    z, kernel = model.inducing_points, model.kernel
    kzz, kzx, kxx = (k.to_dense().detach().numpy() for k in (kernel(z), kernel(z, x), kernel(x)))
    kzz = kzz + model.jitter * kzz.diagonal().mean() * np.eye(len(kzz))
    q = kzx.T @ np.linalg.solve(kzz, kzx)
    return q + np.diag(kxx.diagonal() - q.diagonal()) + float(model.noise.detach()) * np.eye(len(x)), q


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_evidence_and_its_best_scale_are_those_of_the_textbook_density(kernel):
    """N(y | 0, τ² C), C = Q + diag(K − Q) + σ²I; at half and double τ² it is lower."""
    (x, y), model = rows(), model_of(kernel)
    sums = weighted_sums(model, x, y)
    found, (covariance, _) = evidence(sums), textbook(model, x)
    at = lambda scale: multivariate_normal(np.zeros(len(x)), scale * covariance).logpdf(y.numpy())  # noqa: E731
    assert found.value == pytest.approx(at(found.scale), abs=1e-8)
    assert max(at(0.5 * found.scale), at(2 * found.scale)) < found.value
    assert found.at(0.5, float(len(x))) == pytest.approx(at(0.5), abs=1e-8)
    folded = evidence(sums.scaled(found.scale))
    assert (folded.value, folded.scale) == (pytest.approx(found.value), pytest.approx(1.0))


def test_sums_of_parts_are_those_of_all_and_hold_those_of_the_first_points():
    (x, y), model = rows(), model_of("rbf + l1")
    whole, parts = weighted_sums(model, x, y), zip(x.split([7, 53]), y.split([7, 53]), strict=True)
    alike(vars(add(weighted_sums(model, *part) for part in parts)), vars(whole), rtol=1e-12)
    curve, values = evidence(whole).curve, model.to_arrays()
    for count in (1, 4, 7):
        assert curve[count - 1] == pytest.approx(evidence(whole.leading(count)).value)
        first = SparseGP.from_arrays(ModelSection(kernel="rbf + l1"), {**values, LOCATIONS: values[LOCATIONS][:count]})
        alike(vars(pooled_sums(model, x, y).leading(count)), vars(pooled_sums(first, x, y)), rtol=1e-6)


def test_the_posterior_predicts_what_the_textbook_joint_does():
    """E[f* | y] = Q_*x C⁻¹ y and its variance, at the inducing points and elsewhere."""
    (x, y), model = rows(), model_of("rbf + l1")
    places = torch.cat([model.inducing_points.detach(), rows(9, 5)[0]])
    covariance, _ = textbook(model, x)
    cross = textbook(model, torch.cat([places, x]))[1][: len(places), len(places) :]
    with torch.no_grad():
        mean, variance = model.predict(places, weighted_sums(model, x, y).posterior())
        prior = model.kernel(places, diag=True)
    assert mean.numpy() == pytest.approx(cross @ np.linalg.solve(covariance, y.numpy()), abs=1e-8)
    expected = prior.numpy() - np.sum(cross.T * np.linalg.solve(covariance, cross.T), 0) + float(model.noise.detach())
    assert variance.numpy() == pytest.approx(expected, abs=1e-8)


def test_errors_of_rows_left_out_are_those_of_predictions_from_all_others():
    """For any inducing points by predictions without each row; with all rows as inducing points by the exact GP."""
    (x, y), model = rows(), model_of("rbf + l1")
    found, means = left_out(model, x, y, weighted_sums(model, x, y).posterior()).numpy()
    for row in (0, 13, 59):
        others = torch.arange(len(x)) != row
        with torch.no_grad():
            mean, variance = model.predict(x[[row]], weighted_sums(model, x[others], y[others]).posterior())
        assert found[row] == pytest.approx(float((y[row] - mean) / variance.sqrt()), abs=1e-9)
        assert means[row] == pytest.approx(float(mean), abs=1e-9)
    exact = ExactGP(ModelSection(kernel="rbf + l1"), x, y)
    exact.load({name: array for name, array in model.to_arrays().items() if name != LOCATIONS})
    everywhere = SparseGP.from_arrays(ModelSection(kernel="rbf + l1"), {**model.to_arrays(), LOCATIONS: x.numpy()})
    q = weighted_sums(everywhere, x, y).posterior()
    assert exact.left_out().numpy() == pytest.approx(left_out(everywhere, x, y, q).numpy(), abs=1e-5)


def test_the_mixture_of_errors_has_the_coverage_of_their_distribution_and_normal_errors_need_none():
    draw = np.random.default_rng(0)
    constant = lambda errors: error_law.best_strength(*error_law.by_strength(errors, 0 * errors))  # noqa: E731
    assert sum(constant(draw.standard_normal(400))[1] is None for _ in range(20)) >= 18
    errors = draw.standard_t(3, 20_000)
    mixture, variance = error_law.unit_variance(constant(errors)[1])
    assert variance == pytest.approx(errors.var(), rel=0.05)
    assert mixture[1] @ mixture[0] ** 2 == pytest.approx(1.0)
    unit = Prediction(np.zeros(1), np.array([variance]), mixture)
    levels = (0.75, 0.95, 0.975)
    found = TargetUnits(0.0, 1.0).quantiles(unit.mean, np.sqrt(unit.variance), levels, mixture)[:, 0]
    assert found == pytest.approx(t.ppf(levels, 3), rel=0.03)
    score = TargetUnits(0.0, 1.0).gaussian_scores(unit, np.array([6.0]))
    by_hand = mixture[1] @ norm.pdf(6.0, 0.0, mixture[0] * np.sqrt(variance))
    assert score.sums["nll"] == pytest.approx(-np.log(by_hand))


def of_scale(count=400, width=6):
    """Features, the first of them 1, errors z whose log variance is linear in them, and the coefficients."""
    draw = np.random.default_rng(4)
    features = np.column_stack([np.ones(count), draw.standard_normal((count, width - 1)) + 0.5])
    slopes = draw.normal(0, 0.5, width)
    return features, draw.standard_normal(count) * np.exp(features @ slopes / 2), slopes


def test_the_scale_of_errors_is_the_ridge_regression_of_highest_evidence():
    """Against dense algebra: t ~ N(b₀, τ² (I + ΦΦᵀ/λ)) of rows with a flat b₀, for every λ of the grid."""
    features, z, slopes = of_scale()
    t = error_law.log_squares(z, 0 * z)
    b, precision = error_law.regression(features.T @ features, features.T @ t, t @ t)
    penalty = precision[1, 1] - features[:, 1] @ features[:, 1]
    centred, rest = features[:, 1:] - features[:, 1:].mean(0), t - t.mean()

    def evidence_of(by: float) -> float:
        covariance = np.eye(len(t)) + centred @ centred.T / by
        fit = rest @ np.linalg.solve(covariance, rest)
        return -((len(t) - 1) * np.log(fit) + np.linalg.slogdet(covariance)[1]) / 2

    assert penalty == pytest.approx(max(np.exp(error_law.LOG_PENALTIES), key=evidence_of))
    by_hand = np.linalg.solve(centred.T @ centred + penalty * np.eye(len(slopes) - 1), centred.T @ rest)
    np.testing.assert_allclose(b[1:], by_hand, atol=1e-10)
    assert features.mean(0) @ b == pytest.approx(t.mean())
    assert np.corrcoef(features @ b, features @ slopes)[0, 1] > 0.95  # and a positive slope means more noise
    kept = np.arange(len(t)) != 7
    cut = features[kept]
    left = np.linalg.solve(cut.T @ cut + np.diag([0.0, *[penalty] * (len(slopes) - 1)]), cut.T @ t[kept])
    assert error_law.left_out_scale(features, b, precision, t)[7] == pytest.approx(features[7] @ left)


def test_the_strength_of_the_scale_follows_the_likelihood_and_constant_errors_have_none():
    features, z, slopes = of_scale(4000)
    draw = np.random.default_rng(1)
    for errors, varies in ((z, True), (draw.standard_normal(4000), False), (draw.standard_t(3, 4000), False)):
        b = np.zeros(6)
        for _ in range(error_law.REGRESSIONS):
            t = error_law.log_squares(errors, features @ b)
            b, precision = error_law.regression(features.T @ features, features.T @ t, t @ t)
        eta = error_law.left_out_scale(features, b, precision, t)
        strength, mixture = error_law.best_strength(*error_law.by_strength(errors, eta))
        assert bool(strength) is varies
        if varies:
            found = strength * (features @ b)
            assert np.polyfit(features @ slopes, found, 1)[0] == pytest.approx(1.0, abs=0.15)
    assert mixture is not None
    halves = [error_law.by_strength(z[part], (features @ b)[part]) for part in (slice(1500), slice(1500, None))]
    whole = error_law.by_strength(z, features @ b)
    for index in range(2):
        np.testing.assert_allclose(halves[0][index] + halves[1][index], whole[index])


def test_the_log_likelihood_of_a_histogram_is_that_of_its_errors():
    """Fine bins, so that Σ log p(z e^−η/2) − ½η of each row is close to what the histogram tells."""
    features, z, slopes = of_scale(4000)
    counts, logs = error_law.by_strength(z, features @ slopes)
    exact = norm.logpdf(z, 0, np.exp(features @ slopes / 2)).sum()
    full = list(error_law.STRENGTHS).index(1.0)
    half_normal = len(z) * np.log(2)
    assert error_law.fitted(counts[full])[1] - logs[full] - half_normal == pytest.approx(exact, abs=4000 * 0.005)
    assert error_law.fitted(counts[0])[1] - half_normal < exact - 100


def test_features_of_the_scale_are_whitened_correlations_and_vanish_far_away():
    (x, _), model = rows(), model_of("rbf + l1")
    with torch.no_grad():
        found = model.scale_features(x, torch.zeros(len(x), dtype=torch.float64)).numpy()
        points = model.inducing_points / 2
        variance = model.kernel(points, diag=True)[0]
        own = (model.kernel(points).to_dense() / variance).numpy()
        cross = (model.kernel(points, x / 2).to_dense() / variance).numpy()
        far = model.scale_features(x[:1] + 1e6, torch.zeros(1, dtype=torch.float64)).numpy()
    np.testing.assert_array_equal(found[:, :3], np.tile([1.0, 0.0, -1.0], (len(x), 1)))
    np.testing.assert_allclose(found[:, 3:] @ found[:, 3:].T, cross.T @ np.linalg.solve(own, cross), atol=1e-5)
    np.testing.assert_allclose(far[0, 3:], 0.0, atol=1e-10)
