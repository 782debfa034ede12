"""Counts with exposure and trials, times to an event, grades: expectations, limits, what is summed, whole runs."""

import itertools
import math
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
from faults import ALONE
from lifelines import KaplanMeierFitter
from scipy import integrate, optimize, stats
from scipy.special import expit, gammaln
from test_linear import dealt

import fedgp_flower as fg
from fedgp_flower import count_scores
from fedgp_flower.agreement import Agreement, agree
from fedgp_flower.clients import numpy_client
from fedgp_flower.data.standardisation import describe
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.follow_up import FollowUp, counted, edges_around, life_table, multiples, unit_of
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.likelihoods.grades import edges_of
from fedgp_flower.gp.likelihoods.numbers import freedom_of
from fedgp_flower.messages import add
from fedgp_flower.run.registry import parse_config
from fedgp_flower.scores import TargetUnits, time_scores
from fedgp_flower.shared_messages import Described, OneArray, TimeCounts
from strategies.server import enrolment
from strategies.server.questions import drive
from strategies.server.scoring import time_regression

ALPHA = 0.4


def negative_binomial(y, e, f):
    """Log mass as SciPy has it, but for means that are zero to rounding."""
    r, mu = 1 / ALPHA, e * math.exp(f)
    ways = gammaln(y + r) - gammaln(r) - gammaln(y + 1)
    return ways + y * (math.log(mu) - math.log(r + mu)) - r * math.log1p(mu / r)


SIGMA = 0.6
TAILS = {
    "time-to-event": (lambda z: z - np.exp(z), lambda z: -np.exp(z)),
    "log-logistic": (lambda z: z - 2 * np.logaddexp(0, z), lambda z: -np.logaddexp(0, z)),
    "log-normal": (stats.norm.logpdf, stats.norm.logsf),
}
"""Log density and log survival of ε."""


def of_time(name, t, seen, f):
    z, (density, tail) = (math.log(t) - f) / SIGMA, TAILS[name]
    return density(z) - math.log(SIGMA * t) if seen else tail(z)


CASES = {
    "poisson": (4.0, 2.5, [], lambda y, e, f: y * (f + math.log(e)) - e * math.exp(f) - gammaln(y + 1)),
    "negative-binomial": (4.0, 2.5, [math.log(ALPHA)], negative_binomial),
    "binomial": (
        3.0,
        7.0,
        [],
        lambda y, n, f: math.log(math.comb(7, 3)) - y * np.logaddexp(0, -f) - (n - y) * np.logaddexp(0, f),
    ),
}


GAPS = [0.7, 0.3, 1.9]
CUTS = np.concatenate([[-np.inf, 0.0], np.cumsum(GAPS), [np.inf]])


def log_mass(grade, _, f):
    """Log of the mass between two cut points, of the smaller tails."""
    low, high = CUTS[int(grade)] - f, CUTS[int(grade) + 1] - f
    low, high = (low, high) if low + high < 0 else (-high, -low)
    return stats.norm.logcdf(high) + math.log(-math.expm1(stats.norm.logcdf(low) - stats.norm.logcdf(high)))


HEAVY = [0.9, -1.6]
FREEDOM = float(freedom_of(torch.tensor(HEAVY, dtype=torch.float64)))
CASES |= {f"ordinal, {grade}": (float(grade), None, list(np.log(GAPS)), log_mass) for grade in range(5)}
CASES |= {
    f"student-t, {y:g}": (y, None, HEAVY, lambda y, _, f: stats.t.logpdf(y, FREEDOM, f, math.exp(HEAVY[1])))
    for y in (0.0, 4.0)
}
CASES |= {"gaussian": (1.3, None, [-0.7], lambda y, _, f: stats.norm.logpdf(y, f, math.exp(-0.7)))}
CASES |= {name: (2.0, 1.0, [math.log(SIGMA)], partial(of_time, name)) for name in TAILS}
CASES |= {f"{name}, censored": (2.0, 0.0, [math.log(SIGMA)], partial(of_time, name)) for name in TAILS}


@pytest.mark.parametrize(("mean", "variance"), [(0.8, 1e-4), (-1.5, 0.1), (0.8, 1.0), (-1.5, 25.0), (0.8, 25.0)])
@pytest.mark.parametrize("name", CASES)
def test_expectations_and_their_derivatives_are_those_of_quadrature(name, mean, variance):
    """By m it is E z g / s, by s² it is E (z² − 1) g / 2s²: no derivative of g is needed."""
    y, beside, hyper, log_density = CASES[name]
    sd = math.sqrt(variance)

    @cache
    def weighted(z):
        return log_density(y, beside, mean + sd * z) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

    def expected(weight):
        ends = (-18.0, -8.0, -4.0, 0.0, 4.0, 18.0)  # of e^(f/σ), f ~ N(m, 25), most is around 8 sd
        near = {"epsabs": 1e-11, "epsrel": 1e-11, "limit": 400}
        return sum(integrate.quad(lambda z: weight(z) * weighted(z), *pair, **near)[0] for pair in pairwise(ends))

    likelihood = build_point_likelihood(name.partition(",")[0])
    at = [torch.tensor(part, dtype=torch.float64) for part in ([mean], [variance], hyper)]
    target = torch.tensor([y] if beside is None else [[y, beside]], dtype=torch.float64)
    if name.startswith("ordinal"):  # constant noise
        at[:2] = torch.stack([at[0], 0 * at[0]]), torch.stack([at[1], 1e-12 + 0 * at[1]])
    value, alpha, beta, by_hyper = likelihood.slopes(target, *at)
    alpha, beta = alpha.flatten()[0], beta.flatten()[0]
    mixed = name == "log-normal, censored"  # E log Φ is a mixture that is as wrong as for labels
    assert float(value) == pytest.approx(expected(lambda z: 1.0), rel=1e-6, abs=3e-6 if mixed else 1e-6)
    assert float(alpha) == pytest.approx(expected(lambda z: z) / sd, rel=1e-6, abs=2e-5 if mixed else 1e-6)
    by_variance = expected(lambda z: z * z - 1) / (2 * variance)
    if variance > 1e-3:  # below, the difference of nearly equal numbers is rounding
        assert float(beta) == pytest.approx(-2 * by_variance, rel=1e-5, abs=1e-3 if mixed else 1e-6)
    assert beta >= 0 or name.startswith("student-t")
    for place, step in enumerate(1e-5 * torch.eye(len(hyper), dtype=torch.float64)):
        ends = [likelihood.expected(target, *at[:2], at[2] + sign * step).sum() for sign in (1, -1)]
        assert float(by_hyper[place]) == pytest.approx(float(ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8)
    exact = log_density(y, beside, mean)  # E log(1 + eᶠ) is a mixture of normals
    assert float(likelihood.log_density(target, at[0], at[2])) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(
    ("name", "target", "frozen"),
    [
        ("negative-binomial", 4.0, lambda f: stats.nbinom(1 / ALPHA, 1 / (1 + ALPHA * np.exp(f)))),
        ("binomial", [4.0, 9.0], lambda f: stats.binom(9, expit(f))),
    ],
)
def test_scores_of_counts_are_those_of_scipy(name, target, frozen):
    point, hyper = build_point_likelihood(name), torch.tensor([math.log(ALPHA)]).double()
    f, certain, steps = np.array([0.6]), np.array([1e-12]), np.arange(400)
    found = point.scores(f, certain, np.array([target]), hyper, TargetUnits(0.0, 1.0))
    exact = np.sum((frozen(0.6).cdf(steps) - (steps >= 4)) ** 2)
    assert found.sums["crps"] == pytest.approx(exact, rel=5e-3)  # F between the integers that are looked at
    assert found.sums["nll"] == pytest.approx(-frozen(0.6).logpmf(4), rel=1e-5)
    assert found.sums["squared-error"] == pytest.approx((frozen(0.6).mean() - 4) ** 2, rel=1e-5)
    if name == "negative-binomial":
        levels = (0.1, 0.5, 0.9)
        assert (point.quantiles(f, certain, hyper, levels)[:, 0] == frozen(0.6).ppf(levels)).all()


def counts_of(rows=400):
    draw = np.random.default_rng(1)
    x, years = draw.uniform(-2, 2, rows), draw.uniform(20, 2000, rows)
    rate = 0.02 * np.exp(np.sin(2 * x))
    cases = draw.negative_binomial(1 / ALPHA, 1 / (1 + ALPHA * rate * years))
    treated = draw.integers(1, 30, rows)
    cured = draw.binomial(treated, expit(np.sin(2 * x)))
    return pd.DataFrame({"x": x, "cases": cases, "years": years, "cured": cured, "treated": treated}), rate


QUICK = {"model.num-inducing": 8, "sgpr.exchanges": 14, "evaluate-every": 0}
QUICK |= {"baselines.pooled": False, "baselines.local-only": False}


def test_a_rate_is_learned_from_counts_with_exposure(tmp_path, monkeypatch):
    monkeypatch.setattr(count_scores, "COUNT_STEPS", 40)  # the CRPS is no matter here
    frame, rate = counts_of()
    options = QUICK | {"output-dir": str(tmp_path), "features": "x", "model.likelihood": "negative-binomial"}
    found = fg.run(frame, target="cases, years", sites=3, options=options)
    with pytest.warns(UserWarning, match="`years` is not used: counts for an exposure of 1"):
        table = found.posterior.predict(frame[:80])
    assert np.log(table["mean"] / rate[:80]).std() < 0.15
    assert found.saved.arrays["likelihood.parameters"] == pytest.approx(ALPHA, rel=0.3)
    assert "years" not in found.posterior.preparation.features
    plain = options | ALONE | {"model.likelihood": "poisson"}
    poisson = fg.run(frame, target="cases, years", sites=3, options=plain)
    m = found.metrics
    assert m.test["nll"] < m.linear["nll"] < m.mean["nll"]  # a sine of x has a slope
    assert m.test["nll"] < poisson.metrics.test["nll"] - 0.2
    assert "negative binomial regression" in (found.path / "report.html").read_text()
    assert abs(found.metrics.test["coverage_95"] - 0.95) < abs(poisson.metrics.test["coverage_95"] - 0.95)


def test_a_probability_is_learned_from_successes_among_trials(tmp_path):
    frame, _ = counts_of()
    options = QUICK | {"output-dir": str(tmp_path), "features": "x", "model.likelihood": "binomial"}
    posterior = fg.run(frame, target="cured,treated", sites=3, options=options).posterior
    with pytest.warns(UserWarning, match="`treated` is not used: probabilities of success in a trial"):
        table = posterior.predict(frame)
    assert np.abs(table["mean"] - expit(np.sin(2 * frame["x"]))).max() < 0.12
    assert ((table["q2.5"] < table["mean"]) & (table["mean"] < table["q97.5"])).all()


def test_what_stands_beside_the_target_is_checked(tmp_path):
    frame, _ = counts_of(40)
    options = QUICK | {"output-dir": str(tmp_path), "features": "x"}
    wrong = frame.assign(years=np.where(np.arange(40) == 7, 0.0, frame["years"]))
    with pytest.raises(DataError, match=r"`years`: expected numbers above zero.*row 8"):
        fg.run(wrong, target="cases,years", options=options | {"model.likelihood": "poisson"})
    with pytest.raises(DataError, match=r"`cases`: expected whole numbers, at least as large"):
        fg.run(frame, target="treated,cases", options=options | {"model.likelihood": "binomial"})
    cured = frame.assign(cured=frame["treated"])
    with pytest.raises(DataError, match="every trial succeeded at every site"):
        fg.run(cured, target="cured,treated", sites=3, options=options | {"model.likelihood": "binomial"})
    with pytest.raises(ConfigError, match=r"needs the trials .*: `target` = 'cured,treated'"):
        fg.run(frame, target="cured", sites=3, options=options | {"model.likelihood": "binomial"})
    with pytest.raises(ConfigError, match=r"needs the event .*: `target` = 'days,died'"):
        parse_config({"target": "days", "model.likelihood": "log-normal"})
    timed, options["model.likelihood"] = followed(40), "time-to-event"
    with pytest.raises(DataError, match="1 where the event was seen"):
        fg.run(timed.assign(died=2 * timed["died"]), target="days,died", sites=3, options=options)
    with pytest.raises(DataError, match="times above zero"):
        fg.run(timed.assign(days=timed["days"] - 30), target="days,died", options=options)
    with pytest.raises(DataError, match=r"above zero; .*\. Where 0 is a rounded time, write half of its unit"):
        fg.run(timed.assign(days=timed["days"] - timed["days"].min()), target="days,died", options=options)
    with pytest.raises(ConfigError, match="does not read"):
        fg.run(frame, target="cases,years", method="pvi", options=options | {"model.likelihood": "poisson"})
    with pytest.raises(ConfigError, match="take 'svgp'"):
        fg.run(frame, target="cases", method="pvi", options=options | {"model.likelihood": "negative-binomial"})


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("time-to-event", lambda f: stats.weibull_min(1 / SIGMA, scale=math.exp(f))),
        ("log-logistic", lambda f: stats.fisk(1 / SIGMA, scale=math.exp(f))),
        ("log-normal", lambda f: stats.lognorm(SIGMA, scale=math.exp(f))),
    ],
)
def test_times_are_those_of_scipy_and_of_what_is_exported(name, law):
    """At a certain f; draws of the likelihood of GPyTorch have the same median within five standard errors."""
    likelihood, hyper, f = build_point_likelihood(name), torch.tensor([math.log(SIGMA)]).double(), 0.7
    moments = torch.tensor([f]).double(), torch.tensor([1e-14]).double()
    for t in (0.3, 2.0, 9.0):
        tail = likelihood.survival(torch.tensor([t]).double(), *moments, hyper)
        assert float(tail) == pytest.approx(law(f).sf(t), rel=1e-6)
        density = likelihood.log_predictive(torch.tensor([[t, 1.0]]).double(), *moments, hyper)
        assert float(density) == pytest.approx(law(f).logpdf(t), rel=1e-6)
    levels = (0.025, 0.5, 0.9)
    found = likelihood.quantiles(np.array([f]), np.array([1e-14]), hyper, levels)[:, 0]
    np.testing.assert_allclose(found, law(f).ppf(levels), rtol=1e-6)
    torch.manual_seed(0)
    drawn = likelihood.to_gpytorch(hyper)(torch.full((20_000,), f).double()).sample()
    assert float((drawn < law(f).median()).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(20_000))


def test_scores_of_times():
    """Five pairs are known, of which one is predicted the wrong way round and one a tie."""
    target = np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [2.5, 1.0]])
    order, reached = np.array([0.0, 1.0, 0.5, 0.5]), np.array([0.2, 0.4, 0.97, 0.5])
    known = FollowUp(np.array([1.0, 3.0]), np.array([0.75, 0.25]), np.array([1.0, 0.5]))
    found = time_scores(order, reached, np.zeros(4), target, known, lambda times: np.exp(-times - 0 * order))
    assert (found.sums["concordant"], found.sums["comparable"], found.sums["events"]) == (3.5, 4.0, 3.0)
    # what is censored where F = 0.4 lies above with the share (0.975 − 0.4) / 0.6 below the upper end
    assert found.sums["inside-95"] == pytest.approx(1 + 0.575 / 0.6 + 1 + 1)
    assert found.arrays["evaluation.pit"].sum() == pytest.approx(4.0)
    wanted = 0.0
    for (time, seen), grid in itertools.product(target, known.grid):
        weight = 1 / float(known.followed(np.array(grid))) if time > grid else 0.0
        wanted += weight * (1 - math.exp(-grid)) ** 2 / 20
        if time <= grid and seen:
            wanted += math.exp(-grid) ** 2 / float(known.followed(np.array(time))) / 20
    assert found.sums["ibs"] == pytest.approx(wanted)
    rows, predicted, observed = found.arrays["evaluation.survival"].sum(axis=1).T
    assert rows.tolist() == [4.0, 4.0, 4.0]
    np.testing.assert_allclose(predicted, 4 * np.exp(-known.quartiles))
    late = (target[:, 0] > known.quartiles[:, None]).sum(axis=1)
    np.testing.assert_allclose(observed, late / known.followed(known.quartiles))


def followed(rows=400):
    draw = np.random.default_rng(2)
    x = draw.uniform(-2, 2, rows)
    time = np.exp(3 + np.sin(2 * x) + SIGMA * np.log(draw.exponential(size=rows)))
    ends = np.exp(3.6 + draw.normal(size=rows))
    return pd.DataFrame({"x": x, "days": np.minimum(time, ends), "died": (time <= ends).astype(int)})


def test_times_to_an_event_are_learned_under_masks_though_many_are_censored(tmp_path):
    frame = followed()
    options = QUICK | {"output-dir": str(tmp_path), "model.likelihood": "time-to-event"}
    options |= {"privacy.secure-aggregation": True}
    found = fg.run(frame, target="days,died", sites=3, options=options)
    assert found.saved.arrays["likelihood.parameters"] == pytest.approx(SIGMA, rel=0.2)
    assert found.metrics.test["concordance"] > found.metrics.linear["concordance"] + 0.1
    assert found.metrics.mean["concordance"] == pytest.approx(0.5)
    assert found.metrics.test["nll"] < min(found.metrics.linear["nll"], found.metrics.mean["nll"])
    assert found.metrics.test["ibs"] < min(found.metrics.linear["ibs"], found.metrics.mean["ibs"])
    assert found.metrics.test["survival_error"] < 0.12
    table = found.posterior.predict(frame, times=(10.0, 40.0))
    median = np.exp(3 + np.sin(2 * frame["x"]) + SIGMA * math.log(math.log(2)))
    assert np.log(table["q50"] / median).std() < 0.2
    assert (table["survival at 10"] > table["survival at 40"]).all()
    with pytest.raises(RunError, match="expected times above zero"):
        found.posterior.predict(frame, times=(-10.0,))  # was NaN in every row


def rows(count=300, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 2))
    time = np.exp(1 + x @ [0.5, -0.3] + 0.6 * np.log(draw.exponential(size=count)))
    ends = 1.5 * time.mean() * draw.exponential(size=count)
    return x, np.minimum(time, ends), (time <= ends).astype(float)


def kaplan_meier(time, seen, at):
    """P(T > t) and P(C > t) of all rows by lifelines, with events before censoring at the same time."""
    first = KaplanMeierFitter().fit(time, seen).predict(at).to_numpy()
    return first, KaplanMeierFitter().fit(time - 1e-9 * seen, 1 - seen).predict(at).to_numpy()


class Timed(SimpleNamespace):
    """A site that answers questions on times, and merges cells of fewer than three rows."""

    def follow_up(self, request):
        return numpy_client.follow_up(self, request).coarse(3)


def agreed_table(time, seen):
    """The life table of rows of three sites."""
    parts = {str(k): np.column_stack([time, seen])[k::3] for k in range(3)}
    sites = {name: Timed(rows=SimpleNamespace(y=part)) for name, part in parts.items()}
    agreement = Agreement({}, "{}", ("x",), {}, {}, True, {"mean": float(time.mean())})
    return FollowUp.from_arrays(drive(enrolment.followed(agreement, tuple(sites)), sites).arrays)


ROUNDED = {"none": lambda t: t, "months": np.ceil, "half months": lambda t: np.ceil(2 * t) / 2}


@pytest.mark.parametrize("name", ROUNDED)
def test_curves_from_counts_of_sites_are_those_of_all_rows(name):
    """Where times are continuous, the error is that of straight lines between the ends of bins."""
    _, time, seen = rows(6000)
    time = ROUNDED[name](3 * time)
    found = agreed_table(time, seen)
    at = np.unique(time[time <= found.grid[-1]])
    close = 0.006 if name == "none" else 1e-9
    for curve, exact in zip((found.survived, found.followed), kaplan_meier(time, seen, at), strict=True):
        np.testing.assert_allclose(curve(at), exact, atol=close)
        np.testing.assert_allclose(curve(at + 0.1 * found.unit), exact, atol=close)
    before = kaplan_meier(time, seen, at - 1e-6)[1]
    np.testing.assert_allclose(found.still_followed(at), before, atol=close)
    again = FollowUp.from_arrays(found.to_arrays())
    assert again.unit == found.unit == {"none": 0.0, "months": 1.0, "half months": 0.5}[name]
    assert np.quantile(time[seen == 1], 0.25) == pytest.approx(found.quartiles[0], rel=0.05)


@pytest.mark.parametrize("name", ROUNDED)
def test_the_brier_score_has_the_weights_of_all_rows(name):
    _, time, seen = rows(3000)
    time = ROUNDED[name](3 * time)
    target, found = np.column_stack([time, seen]), agreed_table(time, seen)
    grid = found.grid[:, None]
    predicted = np.exp(-grid / time.mean()) + 0 * time
    scores = time_scores(0 * time, 0 * time, 0 * time, target, found, lambda at: np.exp(-at / time.mean()) + 0 * time)
    late = (time > grid) / kaplan_meier(time, seen, grid[:, 0])[1][:, None]
    early = (time <= grid) * seen / kaplan_meier(time, seen, np.minimum(time, grid[-1]) - 1e-6)[1]
    exact = (early * predicted**2 + late * (1 - predicted) ** 2).mean(axis=0).sum()
    assert scores.sums["ibs"] == pytest.approx(exact, rel=0.002 if name == "none" else 1e-9)


def test_counts_of_times_are_merged_where_rows_are_few():
    _, time, seen = rows(3000)
    edges = edges_around(time.mean())
    parts = [counted(time[k::7], seen[k::7], edges) for k in range(7)]
    whole = life_table(counted(time, seen, edges), edges)
    np.testing.assert_array_equal(life_table(sum(parts), edges).survival, whole.survival)
    assert 20 <= len(whole.smooth().times) <= 40
    shared = multiples(time[::7])
    small = TimeCounts(parts[0], shared).coarse(5)
    assert small.counts.sum(axis=0).tolist() == parts[0].sum(axis=0).tolist()
    assert small.counts[small.counts[:, 0] > 0, 0].min() >= 5
    assert small.refusal(Described(len(time[::7]))) is None
    assert "events among them" in small.refusal(Described(3))
    assert "events among them" in TimeCounts(parts[0], shared + 1e4).refusal(Described(len(time[::7])))
    with pytest.raises(DataError, match="no event was observed"):
        life_table(counted(time, 0 * seen, edges), edges)


@pytest.mark.parametrize(("times", "unit"), [([14, 21, 700], 0.0), ([14, 21], 7.0), ([1, 3.25], 0.25), ([0.3, 1], 0.1)])
def test_the_unit_of_rounded_times_is_the_largest_of_few(times, unit):
    times = np.array(times, dtype=float)
    assert unit_of(multiples(times), len(times), times.mean()) == unit
    assert unit_of(multiples(times), len(times) + 1, times.mean()) == 0.0  # those of another site are none


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
        return np.where(seen == 1, density(z) + math.log(at[-1]) - np.log(time), tail(z)).sum()

    sites = dealt(x, np.column_stack([time, seen]), [90, 200], name)
    at = np.array([0.9, 0.4, -0.1, 1.4])
    told = add(site.time_regression(OneArray(at)) for site in sites.values())
    close = 1e-4 if name == "log-normal" else 1e-6  # E log Φ is a mixture of normal distributions
    assert float(told.likelihood) == pytest.approx(value(at), rel=close)
    slope = optimize.approx_fprime(at, value, 1e-6)
    np.testing.assert_allclose(told.gradient, slope, rtol=2e-3, atol=2e-3)
    near = [OneArray(at + step) for step in 1e-5 * np.eye(4)]
    steps = [add(site.time_regression(asked) for site in sites.values()).gradient for asked in near]
    np.testing.assert_allclose(told.information, (told.gradient - np.array(steps)) / 1e-5, rtol=2e-3, atol=0.2)
    found = drive(time_regression(tuple(sites), 2, float(time.mean())), sites)
    best = optimize.minimize(lambda at: -value(at) + 0.5 * at[1:3] @ at[1:3], [1.0, 0, 0, 1.0], method="BFGS").x
    assert found.variance == pytest.approx(best[-1] ** -2, rel=1e-3)
    np.testing.assert_allclose([found.intercept, *found.weights], best[:3] / best[-1], atol=1e-3)


HYPER = torch.tensor(GAPS, dtype=torch.float64).log()
GRADES = build_point_likelihood("ordinal")


def certain(part):
    """Of a function of grades, beside noise that is known to be 1."""
    return torch.stack([part, torch.zeros_like(part)], -2)


def test_two_grades_with_constant_noise_are_two_classes():
    probit, none = build_point_likelihood("bernoulli"), torch.zeros(0).double()
    labels = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    of_f = [torch.tensor(part).double() for part in ([0.4, -2.0, 1.0], [0.1, 3.0, 25.0])]
    at = *map(certain, of_f), none
    torch.testing.assert_close(GRADES.log_predictive(labels, *at), probit.log_predictive(labels, *of_f, none))
    torch.testing.assert_close(GRADES.moments(*at)[0][:, 1], probit.moments(*of_f, none)[0])
    assert GRADES.start({"share": 0.3}, 1.0)[:, 0] == pytest.approx([probit.start({"share": 0.3}, 1.0), 0])
    assert GRADES.start_parameters({"share": 0.3}).numel() == 0


def test_without_inputs_grades_have_the_shares_that_they_start_from():
    known = {f"share of {level}": share for level, share in zip("abcd", (0.1, 0.4, 0.3, 0.2), strict=True)}
    f, hyper = torch.from_numpy(GRADES.start(known, 1.0)), GRADES.start_parameters(known)
    for shares in (GRADES.moments(f, torch.zeros(2, 1), hyper)[0], GRADES.to_gpytorch(hyper)(f).probs):
        assert shares[0].tolist() == pytest.approx(list(known.values()))
    samples = torch.stack([HYPER, HYPER + 0.1])
    assert edges_of(samples).shape == (2, 6)
    at = torch.arange(5.0), torch.zeros(2, 2, 5).double(), torch.ones(2, 2, 5).double()
    assert GRADES.expected(*at, samples).shape == (2, 5)


@pytest.mark.parametrize("variance", [0.01, 0.3, 4.0])
@pytest.mark.parametrize("centre", [-2.0, 0.7])
def test_noise_of_grades_that_varies_is_what_quadrature_finds(centre, variance):
    """E over g of what is known of f, of its products with z / sd and (1 − z²) / variance, and of the masses."""
    grades, sd = torch.arange(5.0), math.sqrt(variance)
    f = torch.tensor([[-0.5, 0.1, 0.8, 2.0, 1.0], [0.01, 0.3, 0.5, 1.0, 2.0]]).double()

    def at(g, spread):
        both = torch.broadcast_tensors(f[0], g), torch.broadcast_tensors(f[1], torch.full_like(g, spread))
        return *(torch.stack(pair, -2) for pair in both), HYPER

    def over_noise(of):
        z, width = (9 * part for part in np.polynomial.legendre.leggauss(100))
        weights = np.stack([1 + 0 * z, z / sd, (1 - z * z) / variance]) * width * stats.norm.pdf(z)
        return np.tensordot(weights, of(at(centre + sd * torch.from_numpy(z)[:, None], 1e-30)), 1)

    here = at(torch.full((1,), centre).double(), variance)
    value, alpha, beta = over_noise(lambda given: GRADES.expected(grades, *given).numpy())
    _, *found, by_hyper = GRADES.slopes(grades, *here)
    np.testing.assert_allclose(GRADES.expected(grades, *here), value, atol=1e-6)
    np.testing.assert_allclose(found[0][1], alpha, atol=1e-6)
    np.testing.assert_allclose(found[1][1], beta, atol=1e-6)
    for place, step in enumerate(1e-5 * torch.eye(3, dtype=torch.float64)):
        ends = [GRADES.expected(grades, *here[:2], HYPER + sign * step).sum() for sign in (1, -1)]
        assert float(by_hyper[place]) == pytest.approx(float(ends[0] - ends[1]) / 2e-5, rel=1e-6)
    shares, _ = GRADES.moments(*here)
    np.testing.assert_allclose(shares, over_noise(lambda given: GRADES.moments(*given)[0].numpy())[0], atol=1e-6)
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(GRADES.log_predictive(grades, *here), shares.diagonal().log())


def test_far_from_its_grade_a_density_is_small_but_not_zero():
    grades, f = [0.0, 2.0, 4.0], [60.0, -70.0, -90.0]
    found = GRADES.log_density(torch.tensor(grades), certain(torch.tensor(f).double()), HYPER)
    assert found.tolist() == pytest.approx([log_mass(g, None, at) for g, at in zip(grades, f, strict=True)], rel=1e-9)


def test_grades_are_agreed_in_their_order():
    frames = [pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": grades}) for grades in (["2", "10", "2"], ["10", "9", "9"])]
    told = {str(site): describe(frame, ["x"], "y") for site, frame in enumerate(frames)}
    found = agree(told, likelihood="ordinal")
    assert list(found.training_target) == ["share of 2", "share of 9", "share of 10"]
    assert not found.refused
    np.testing.assert_allclose(found.sums["0"][-1], [2.0, 0.0, 4.0 - 4.0 / 3])  # of numbers 0, 2, 0
    turned = agree(told, likelihood="ordinal", order=("9", "10", "2"))
    assert list(turned.training_target) == ["share of 9", "share of 10", "share of 2"]
    assert not turned.refused
    other = agree(told, likelihood="ordinal", order=("2", "10"))  # the second site has a grade of its own
    assert list(other.refused) == ["1"]
    assert "`y` has a grade that is not in the order" in other.refused["1"]


def graded(rows=300):
    draw = np.random.default_rng(3)
    x = draw.uniform(-2, 2, rows)
    f = 2 * np.sin(2 * x) + draw.normal(size=rows)
    return pd.DataFrame({"x": x, "grade": 3 + np.digitize(f, [-1.5, 0.0, 1.2])})


def test_grades_are_learned_under_masks(tmp_path):
    frame = graded()
    options = QUICK | {"output-dir": str(tmp_path), "model.likelihood": "ordinal", "privacy.secure-aggregation": True}
    found = fg.run(frame, target="grade", sites=3, options=options)
    table = found.posterior.predict(frame)
    assert list(table)[:4] == [f"probability of {grade}" for grade in (3, 4, 5, 6)]
    np.testing.assert_allclose(table.iloc[:, :4].sum(axis=1), 1)
    latent = 2 * np.sin(2 * frame["x"])
    right = np.diff(stats.norm.cdf(np.array([-np.inf, -1.5, 0, 1.2, np.inf]) - latent.to_numpy()[:, None]), axis=1)
    assert np.abs(table.iloc[:, :4].to_numpy() - right).mean() < 0.05
    np.testing.assert_allclose(table["mean"], table.iloc[:, :4] @ [3, 4, 5, 6])
    assert set(table["median"]) <= {3.0, 4.0, 5.0, 6.0}
    model, likelihood = found.posterior.to_gpytorch()
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(2000):
        drawn = likelihood(model(found.posterior.inputs(frame))).probs.mean(0)
    np.testing.assert_allclose(table.iloc[:, :4], drawn, atol=0.03)


def test_grades_that_are_words_need_their_order(tmp_path):
    frame = graded().assign(grade=lambda f: f["grade"].map({3: "none", 4: "mild", 5: "severe", 6: "worst"}))
    options = QUICK | {"output-dir": str(tmp_path), "model.likelihood": "ordinal"}
    options |= {"baselines.local-only": True, "baselines.max-evaluations": 10}
    with pytest.raises(DataError, match=r"whole numbers.*`target` = 'grade,low<middle<high'"):
        fg.run(frame, target="grade", sites=3, options=options)
    with pytest.raises(DataError, match="another grade in row"):
        fg.run(frame, target="grade,none<mild<severe", sites=3, options=options)
    found = fg.run(frame, target="grade,none<mild<severe<worst", sites=3, options=options)
    table = found.posterior.predict(frame)
    assert list(table) == [f"probability of {grade}" for grade in ("none", "mild", "severe", "worst")] + ["median"]
    assert found.metrics.test["accuracy"] > 0.4
    assert found.metrics.local_only["nll"] > found.metrics.test["nll"]
