"""Expectations of likelihoods against quadrature; counts with exposure and trials, times to an event: limits, runs."""

import itertools
import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, stats
from scipy.special import expit, gammaln

import fedgp_flower as fg
from fedgp_flower.count_scores import BinomialLaw, NegativeBinomialLaw, count_quantiles, count_scores
from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.follow_up import FollowUp
from fedgp_flower.gp.likelihoods import build_point_likelihood
from fedgp_flower.gp.likelihoods.numbers import freedom_of
from fedgp_flower.scores import time_scores

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


def of_time(name):
    def log_density(t, seen, f):
        z, (density, tail) = (math.log(t) - f) / SIGMA, TAILS[name]
        return density(z) - math.log(SIGMA * t) if seen else tail(z)

    return log_density


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
CASES |= {name: (2.0, 1.0, [math.log(SIGMA)], of_time(name)) for name in TAILS}
CASES |= {f"{name}, censored": (2.0, 0.0, [math.log(SIGMA)], of_time(name)) for name in TAILS}


def targets_of(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("variance", [1e-4, 0.1, 1.0, 25.0])
@pytest.mark.parametrize("mean", [-1.5, 0.8])
@pytest.mark.parametrize("name", CASES)
def test_expectations_and_their_derivatives_are_those_of_quadrature(name, mean, variance):
    """By m it is E z g / s, by s² it is E (z² − 1) g / 2s²: no derivative of g is needed."""
    y, beside, hyper, log_density = CASES[name]
    sd = math.sqrt(variance)

    def expected(weight):
        def integrand(z):
            return weight(z) * log_density(y, beside, mean + sd * z) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

        ends = (-18.0, -8.0, -4.0, 0.0, 4.0, 18.0)  # of e^(f/σ), f ~ N(m, 25), most is around 8 sd
        found = (integrate.quad(integrand, *pair, epsabs=1e-11, epsrel=1e-11, limit=400) for pair in pairwise(ends))
        return sum(part for part, _ in found)

    likelihood = build_point_likelihood(name.partition(",")[0])
    at = [torch.tensor(part, dtype=torch.float64) for part in ([mean], [variance], hyper)]
    target = torch.tensor([y], dtype=torch.float64) if beside is None else targets_of([y, beside])
    value, alpha, beta, by_hyper = likelihood.slopes(target, *at)
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
    ("law", "frozen"),
    [
        (NegativeBinomialLaw(ALPHA), lambda f: stats.nbinom(1 / ALPHA, 1 / (1 + ALPHA * np.exp(f)))),
        (BinomialLaw(np.array([9.0])), lambda f: stats.binom(9, expit(f))),
    ],
)
def test_laws_of_counts_are_those_of_scipy(law, frozen):
    count, f, certain = np.arange(10.0), np.array(0.6), np.array([1e-12])
    np.testing.assert_allclose(law.log_mass(count, f), frozen(0.6).logpmf(count), rtol=1e-10)
    np.testing.assert_allclose(law.cumulative(count, f), frozen(0.6).cdf(count), rtol=1e-10)
    assert law.mean(np.array([0.6]), certain) == pytest.approx(frozen(0.6).mean(), rel=1e-5)
    found = count_scores(np.array([0.6]), certain, np.array([4.0]), law)
    steps = np.arange(400)
    exact = np.sum((frozen(0.6).cdf(steps) - (steps >= 4)) ** 2)
    assert found.sums["crps"] == pytest.approx(exact, rel=5e-3)  # F between the integers that are looked at
    levels = (0.1, 0.5, 0.9)
    assert (count_quantiles(np.array([0.6]), certain, levels, law)[:, 0] == frozen(0.6).ppf(levels)).all()


def test_right_intervals_of_counts_hold_what_they_say():
    """Of counts that are drawn from the law itself; an interval of whole numbers alone would hold more."""
    draw = np.random.default_rng(0)
    counts = draw.poisson(0.7, 8_000).astype(float)
    sums = count_scores(np.full(8_000, math.log(0.7)), np.full(8_000, 1e-12), counts).sums
    for level in (50, 90, 95):  # four standard errors
        share = level / 100
        assert sums[f"inside-{level}"] / 8_000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 8_000))


def counts_of(rows=400):
    draw = np.random.default_rng(1)
    x, years = draw.uniform(-2, 2, rows), draw.uniform(20, 2000, rows)
    rate = 0.02 * np.exp(np.sin(2 * x))
    cases = draw.negative_binomial(1 / ALPHA, 1 / (1 + ALPHA * rate * years))
    treated = draw.integers(1, 30, rows)
    cured = draw.binomial(treated, expit(np.sin(2 * x)))
    return pd.DataFrame({"x": x, "cases": cases, "years": years, "cured": cured, "treated": treated}), rate


QUICK = {
    "model.num-inducing": 12,
    "sgpr.exchanges": 20,
    "baselines.pooled": False,
    "baselines.max-evaluations": 20,
    "evaluate-every": 0,
}


def test_a_rate_is_learned_from_counts_with_exposure(tmp_path):
    frame, rate = counts_of()
    options = QUICK | {"output-dir": str(tmp_path), "features": "x", "model.likelihood": "negative-binomial"}
    found = fg.run(frame, target="cases, years", sites=3, options=options)
    assert np.log(found.posterior.predict(frame)["mean"] / rate).std() < 0.15
    assert found.saved.arrays["likelihood.parameters"] == pytest.approx(ALPHA, rel=0.3)
    assert "years" not in found.posterior.preparation.features
    poisson = fg.run(frame, target="cases, years", sites=3, options=options | {"model.likelihood": "poisson"})
    assert found.metrics.test["nll"] < poisson.metrics.test["nll"] - 0.2
    assert abs(found.metrics.test["coverage_95"] - 0.95) < abs(poisson.metrics.test["coverage_95"] - 0.95)


def test_a_probability_is_learned_from_successes_among_trials(tmp_path):
    frame, _ = counts_of()
    options = QUICK | {"output-dir": str(tmp_path), "features": "x", "model.likelihood": "binomial"}
    table = fg.run(frame, target="cured,treated", sites=3, options=options).posterior.predict(frame)
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
        density = likelihood.log_predictive(targets_of([t, 1.0]), *moments, hyper)
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


@pytest.mark.parametrize("masks", [False, True])
def test_times_to_an_event_are_learned_though_many_are_censored(tmp_path, masks):
    frame = followed()
    options = QUICK | {"output-dir": str(tmp_path), "model.likelihood": "time-to-event"}
    options |= {"privacy.secure-aggregation": masks, "name": f"masks-{masks}"}
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
    wrong = frame.assign(died=2 * frame["died"])
    with pytest.raises(DataError, match="1 where the event was seen"):
        fg.run(wrong, target="days,died", sites=3, options=options | {"name": ""})
    with pytest.raises(DataError, match="times above zero"):
        fg.run(frame.assign(days=frame["days"] - 30), target="days,died", options=options | {"name": ""})
