"""Mixed models: restricted likelihoods by dense algebra, quadrature by another rule, and lme4's figures from sums."""

import json
import math
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from faults import ALONE
from scipy.integrate import quad
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import multivariate_normal, nbinom, norm, poisson
from torch.func import grad, hessian

import fedgp_flower as fg
from fedgp_flower.errors import ConfigError, DataError, FedGPError
from fedgp_flower.formula import parse
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.gp.sparse import pooled_sums
from fedgp_flower.gp.sums import collapsed_bound
from fedgp_flower.methods.mixed_model import effects, posterior, profile
from fedgp_flower.methods.mixed_model.design import Columns
from fedgp_flower.methods.mixed_model.effects import FAMILIES, Crossed, Factor, Terms, derivatives
from fedgp_flower.methods.mixed_model.estimates import (
    Estimates,
    Expansion,
    Totals,
    expanded,
    of_marginal,
    of_restricted,
)
from fedgp_flower.methods.mixed_model.messages import MarginalSums
from fedgp_flower.methods.mixed_model.smooth import Smooth, Smooths, spread_out
from fedgp_flower.options import ModelSection
from fedgp_flower.run import summary
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.registry import parse_config
from simulations.studies import mixed_models
from strategies.mixed_model import Fitting, MixedModel, MixedState, around, estimated, one_round, profiled
from strategies.server.questions import Roster, Summed, answered_by

DRAW = np.random.default_rng(5)


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def crossed_rows(y=None, count=24):
    """Slopes of six groups, correlated, and an intercept of three levels across them; and their dense Z Λ."""
    x = np.column_stack([np.ones(count), DRAW.normal(size=count)])
    groups = (np.arange(count) % 6, 6, x), (np.arange(count) // 8, 3, np.ones((count, 1)))
    factors = [Factor(torch.tensor(level), n, torch.tensor(e), (k,)) for k, (level, n, e) in enumerate(groups)]
    y = DRAW.normal(size=count) if y is None else y
    rows = Crossed(Terms((2, 1)), torch.tensor(x), torch.zeros(count).double(), torch.tensor(y), factors)
    hot = [torch.nn.functional.one_hot(f.level, f.count).double() for f in factors]
    dense = torch.cat([(h[:, :, None] * f.effects[:, None]).flatten(1) for h, f in zip(hot, factors, strict=True)], 1)
    return rows, dense


THETA = numbers([1.3, -0.4, 0.7, 0.9])


def spread(theta):
    """Λ of all levels."""
    slopes = numbers([[theta[0], 0.0], [theta[1], theta[2]]])
    return torch.block_diag(*[slopes] * 6, *[theta[3].reshape(1, 1)] * 3).double()


def normal_contrasts(rows, root, sd):
    """The density of contrasts Aᵀy that have no fixed effects, A orthonormal, less ½ log|XᵀX| (Harville 1974).

    y has covariance sd² (I + root rootᵀ).
    """
    v = (sd**2 * (root @ root.T + torch.eye(len(root)))).numpy()
    x = rows.fixed.numpy()
    contrasts = np.linalg.svd(x)[0][:, x.shape[1] :]
    value = multivariate_normal.logpdf(contrasts.T @ rows.y.numpy(), cov=contrasts.T @ v @ contrasts)
    return float(value - 0.5 * np.linalg.slogdet(x.T @ x)[1])


def totals(rows, theta):
    values, slopes, curvature = (part.numpy() for part in effects.restricted_sums(rows, theta))
    return Totals(values, slopes, curvature[np.tril_indices(len(theta))], float(len(rows.y)))


SMOOTH = Smooth(("age",), np.zeros(1), np.ones(1), spread_out(1))
AGES = torch.tensor(DRAW.uniform(-2, 2, (24, 1)))
LENGTH, AMPLITUDE, NOISE = 0.7, 1.2, 0.4


def smoothed(rows, theta):
    """With a smooth term, at (Λ, log ℓ, a)."""
    found = effects.restricted_sums(rows, theta[:-1], partial(Smooths((SMOOTH,)).features, [AGES]))
    values, slopes, curvature = (part.numpy() for part in found)
    lower = np.tril_indices(len(slopes))
    return Totals(values, slopes, curvature[lower], float(len(rows.y)), theta[-1:].numpy(), (len(SMOOTH.points),))


def test_smooth_terms_beside_groups_are_one_normal():
    """Less what the features leave of the prior variance; without groups and fixed effects the bound of `sgpr`."""
    point = torch.cat([THETA, numbers([math.log(LENGTH), AMPLITUDE])])
    rows, dense = crossed_rows()
    phi = SMOOTH.features(AGES, numbers([math.log(LENGTH)]))
    left = float((1 - phi.square().sum(1)).sum())
    wide = torch.cat([dense @ spread(THETA), AMPLITUDE * phi], dim=1)
    found = smoothed(rows, point).restricted(torch.zeros(6).double(), numbers(math.log(NOISE)))
    assert float(found) == pytest.approx(normal_contrasts(rows, wide, NOISE) - 0.5 * AMPLITUDE**2 * left, abs=1e-8)
    line = numbers([0.5, -0.3, 0.4, 0.6, -0.2, 0.3])
    here, up, down = (smoothed(rows, point + step * line).expansion() for step in (0, 1e-5, -1e-5))
    assert here.gradient @ line.numpy() == pytest.approx((up.value - down.value) / 2e-5, abs=1e-7)
    np.testing.assert_allclose(here.hessian @ line.numpy(), (up.gradient - down.gradient) / 2e-5, atol=1e-3)

    alone = Crossed(Terms(()), rows.fixed[:, :0], rows.offset, rows.y, ())
    gp = SparseGP(ModelSection(noise=NOISE**2, lengthscale=LENGTH), torch.tensor(SMOOTH.points))
    gp.kernel.outputscale = (AMPLITUDE * NOISE) ** 2
    sums = pooled_sums(gp, AGES, rows.y)
    bound = smoothed(alone, point[4:]).restricted(torch.zeros(2).double(), numbers(math.log(NOISE)))
    assert float(bound) == pytest.approx(collapsed_bound(sums, NOISE**2), abs=1e-7)


COARSE = Smooth(("age",), np.zeros(1), np.ones(1), np.linspace(-2, 2, 6)[:, None])
Parts = list[tuple[Crossed, torch.Tensor]]


def fitting(rows, family):
    names = tuple(("effect",) * q for q in rows.terms.widths)
    columns = Columns(rows.fixed.numpy(), ("x",) * rows.fixed.shape[1], np.zeros(len(rows.y)), (), names)
    return Fitting(parse("y ~ s(age)"), family, columns, Smooths((COARSE,)))


def told(problem, parts, points, turns):
    """What sites tell, added."""
    at, ways = torch.tensor(points), torch.tensor(turns)
    found = [derivatives(rows, FAMILIES[problem.family], at, problem.smooth, [x], ways) for rows, x in parts]
    sums = [sum(part.numpy() for part in parts) for parts in zip(*found, strict=True)]
    return MarginalSums(*sums, np.array(float(sum(len(rows.y) for rows, _ in parts))), np.zeros(0))


def searched(problem, parts, point):
    """As the server finds the maximum."""
    width = len(point)
    near = Expansion(0.0, np.zeros(width), -np.eye(width))
    nothing = np.zeros(width), near, {}, 0.3, 0.0, np.zeros(0), (), 0
    state = MixedState({}, point[None], *nothing, np.empty((0, width)), 6)
    while not state.converged:
        exchange = one_round(problem, state, Roster({"a": 1}, ("a",), (), 0))
        next(exchange)
        with pytest.raises(StopIteration) as done:
            exchange.send(Summed(told(problem, parts, state.trials, state.turns), ("a",)))
        state = done.value.value[0]
        assert state.exchanges <= 25
    return state


def test_smooth_terms_beside_a_likelihood_are_the_same_where_it_is_gaussian():
    """Beside groups, at σ = 1: the likelihood and its slopes by θ, log ℓ and a, as restricted sums have them."""
    rows, _ = crossed_rows()
    theta = torch.cat([THETA, numbers([math.log(LENGTH), AMPLITUDE])])
    found = effects.restricted_sums(rows, theta[:-1], partial(Smooths((COARSE,)).features, [AGES]))
    values, slopes, curvature = (part.numpy() for part in found)
    sums = Totals(values, slopes, curvature[np.tril_indices(5)], 24.0, theta[-1:].numpy(), (6,))
    deviance = sums.deviance(theta.numpy(), None)
    exact = expanded(lambda at: 12 * effects.LOG_2PI - 0.5 * deviance(torch.cat([at, at.new_zeros(1)])), theta)
    problem, point, turns = fitting(rows, "gaussian"), np.append(np.zeros(8), theta.numpy()), np.empty((0, 14))
    for _ in range(2):
        near = around(problem, told(problem, [(rows, AGES)], point[None], turns), 0, point)
        assert isinstance(near, Expansion)
        step = np.linalg.solve(-near.hessian[:8, :8], near.gradient[:8])
        point, turns = point + np.pad(step, (0, 6)), problem.turns(point, near)
    assert np.abs(step).max() < 1e-8
    assert near.value == pytest.approx(exact.value, abs=1e-8)
    np.testing.assert_allclose(near.gradient[8:], exact.gradient, atol=1e-6)


@pytest.mark.parametrize("family", ["bernoulli", pytest.param("negative-binomial", marks=pytest.mark.long)])
def test_without_groups_smooth_terms_are_laplace_of_all_rows(family):
    """And of three sites as of one: least where the search ends, with the mode of weights by Newton's method."""
    x, fixed, none = torch.tensor(DRAW.uniform(-2, 2, (90, 1))), torch.ones(90, 1).double(), torch.zeros(90).double()
    odds = np.exp(1.5 * np.sin(2 * x[:, 0].numpy()))
    draws = {"bernoulli": (1, odds / (1 + odds)), "negative-binomial": (3, 3 / (3 + odds))}[family]
    y = torch.tensor((DRAW.binomial if family == "bernoulli" else DRAW.negative_binomial)(*draws)).double()

    def part(k, end):
        return Crossed(Terms(()), fixed[k:end], none[k:end], y[k:end], ()), x[k:end]

    problem = fitting(part(0, 90)[0], family)
    start = np.append(np.zeros(6), [0.0, 0.0, 1.0, -1.0][: 3 if family == "bernoulli" else 4])
    state = searched(problem, [part(0, 90)], start)
    best = state.point + state.step
    asked = best[None], problem.turns(best, state.near)
    one, three = (told(problem, parts, *asked) for parts in ([part(0, 90)], [part(0, 30), part(30, 90)]))
    np.testing.assert_allclose(*(around(problem, sums, 0, best).gradient for sums in (one, three)), atol=1e-8)

    def lost(psi):
        phi, a, here = COARSE.features(x, numbers([psi[1]])), psi[2], FAMILIES[family](numbers(psi[3:]))

        def fit(v):
            at = psi[0] + a * phi @ v
            left = 0.5 * a**2 * (1 - phi.square().sum(1)) * here.weight(y, at)
            return 0.5 * v.square().sum() - (here.log_density(y, at) - left).sum()

        v = torch.zeros(6).double()
        for _ in range(8):
            v = v - torch.linalg.solve(hessian(fit)(v), grad(fit)(v))
        return float(fit(v) + 0.5 * torch.logdet(hessian(fit)(v)))

    least = lost(best[6:])
    assert -state.near.value == pytest.approx(least, abs=1e-8)
    for axis in np.eye(len(best) - 6):
        left, below, above, right = (lost(best[6:] + step * axis) for step in (-0.05, -1e-4, 1e-4, 0.05))
        assert (above - below) / 2e-4 == pytest.approx(0, abs=2e-5)
        assert min(left, right) > least
    wild = np.array([[*start[:7], -1.5, 8.0, *start[9:]]])  # the features explain little there: weights have no mode
    assert around(problem, told(problem, [part(0, 90)], wild, asked[1][:0]), 0, wild[0]).value == -math.inf


def test_held_out_rows_are_predicted_as_by_all_rows_in_one_normal():
    """With a flat prior on β (Henderson's equations): known groups, a new group, a new level across."""
    rows, dense = crossed_rows()
    x = numbers([[1.0, 0.3], [1.0, -2.0], [1.0, 0.5]])
    at = [torch.tensor([2, -1, 4]), torch.tensor([1, 2, -1])]
    parts = zip(at, [rows.inner, *rows.others], [x, torch.ones(3, 1).double()], strict=True)
    asked = [Factor(level, factor.count, effect, factor.terms) for level, factor, effect in parts]
    known = of_restricted(totals(rows, THETA), THETA.numpy(), np.zeros(4))
    noise = math.exp(2 * known.log_noise)
    covariance = torch.tensor(known.covariance)
    factors, beta = [asked[rows.order.index(k)] for k in range(2)], torch.tensor(known.beta)
    mean, spread_of, slopes = effects.Marginal(rows, effects.GAUSSIAN).conditional(beta, THETA, x, factors)
    variance = noise * spread_of + torch.einsum("ne,ef,nf->n", slopes, covariance, slopes)
    wide = torch.zeros(3, 18).double()  # levels of the new ones are columns of zeros beside those with rows
    wide[0, 4:6], wide[0, 13], wide[1, 14], wide[2, 8:10] = x[0], 1.0, 1.0, x[2]
    root, there = dense @ spread(THETA), wide[:, :15] @ spread(THETA)
    flat = 1e8
    prior, cross = (flat * a @ rows.fixed.T + noise * c @ root.T for a, c in ((rows.fixed, root), (x, there)))
    gain = torch.linalg.solve(prior + noise * torch.eye(len(root)), cross.T).T
    torch.testing.assert_close(mean, gain @ rows.y, atol=1e-5, rtol=1e-5)
    fresh = torch.stack([torch.zeros(()), (x[1] @ spread(THETA)[:2, :2]).square().sum(), THETA[3] ** 2]).double()
    whole = flat * (x**2).sum(1) + noise * (there.square().sum(1) + fresh) - (gain * cross).sum(1)
    torch.testing.assert_close(variance, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["poisson", "negative-binomial"])
def test_quadrature_is_the_integral_of_each_group(name):
    y, level = np.array([3.0, 0.0, 2.0, 7.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    fixed = torch.ones(5, 1).double()
    rows = Crossed(Terms((1,)), fixed, torch.zeros(5).double(), torch.tensor(y), [Factor(level, 2, fixed, (0,))])
    point = np.array([0.4, 0.8, -0.7])[: 3 if name != "poisson" else 2]
    value, gradient, hessian, _ = (part[0] for part in derivatives(rows, FAMILIES[name], torch.tensor(point[None])))

    def mass(count, rate, shape):
        r = np.exp(-shape)
        return nbinom.pmf(count, r, r / (r + rate)) if len(shape) else poisson.pmf(count, rate)

    def whole(at):
        each = lambda u, part: norm.pdf(u) * mass(part, math.exp(at[0] + at[1] * u), at[2:]).prod()  # noqa: E731
        return sum(math.log(quad(each, -9, 9, part, epsabs=1e-14)[0]) for part in ((y[:3],), (y[3:],)))

    assert float(value) == pytest.approx(whole(point), abs=1e-8)
    for k, step in enumerate(1e-4 * np.eye(len(point))):
        up, down = whole(point + step), whole(point - step)
        assert float(gradient[k]) == pytest.approx((up - down) / 2e-4, abs=1e-6)
        assert float(hessian[k, k]) == pytest.approx((up - 2 * whole(point) + down) / 1e-8, abs=1e-4)


def test_laplace_has_exact_derivatives():
    rows, _ = crossed_rows((DRAW.random(24) < 0.5).astype(float))
    family, point = FAMILIES["bernoulli"], torch.cat([numbers([0.3, -0.5]), THETA])
    _, gradient, hessian, _ = (part[0] for part in derivatives(rows, family, point[None]))
    for entry, step in enumerate(1e-5 * torch.eye(6).double()):
        (up, down), (right, left), *_ = derivatives(rows, family, torch.stack([point + step, point - step]))
        assert float(gradient[entry]) == pytest.approx(float(up - down) / 2e-5, abs=1e-7)
        torch.testing.assert_close(hessian[entry], (right - left).detach() / 2e-5, atol=1e-6, rtol=0)


KNOWN = json.loads(mixed_models.LME4.read_text(encoding="utf-8"))


def fitted(name, folder, most=2, **more):
    make, *_, sites = mixed_models.SETS[name]
    keys = mixed_models.keys(name) | ALONE | {"output-dir": str(folder), **more}
    return fg.run(make(), sites=min(sites, most), options=keys)


@pytest.fixture
def without_profiles(monkeypatch):
    """Most of a small run's time goes into the ends of its intervals."""

    def none(*_):
        yield from ()
        return {}

    monkeypatch.setattr(MixedModel, "with_profiles", none)


LONG = ("nested", "slopes", "independent slopes", "crossed", "counts, nested")


@pytest.mark.parametrize("name", ["counts", *(pytest.param(n, marks=pytest.mark.long) for n in LONG)])
def test_estimates_are_those_of_lme4(name, tmp_path):
    as_lme4(name, fitted(name, tmp_path))


def as_lme4(name, run):
    details = run.metrics.method_details
    found = mixed_models.apart(details, KNOWN[name])
    assert details["exchanges"] <= 12
    exact = mixed_models.SETS[name][2] == "gaussian"
    assert max(found["effects"], found["standard errors"], found["sd"]) < (1e-6 if exact else 1e-4)
    assert found["profile"] < (1e-5 if exact else 2e-4)  # lme4 interpolates between points of a profile
    if exact:
        assert details["aic"] == pytest.approx(KNOWN[name]["aic"], abs=1e-6)


def test_masks_change_nothing_and_the_table_is_kept(tmp_path):
    run = fitted("slopes", tmp_path, 3, **{"privacy.secure-aggregation": True})
    as_lme4("slopes", run)
    shown = run.summary()
    assert list(shown["effect"]) == ["intercept", "days", "intercept", "days", "intercept, days", ""]
    compared = {name: cells for name, *cells in summary.side_by_side([run, run])}
    low, high = (summary.show(shown.loc[1, f"profile_{end}"]) for end in ("low", "high"))
    assert compared["days"] == 2 * [f"{summary.show(shown.loc[1, 'estimate'])} ({low} to {high})"]
    assert compared["AIC (REML)"] == 2 * [f"{KNOWN['slopes']['aic']:.2f}"]
    assert (run.path / "effects.csv").read_text(encoding="utf-8").startswith("group,kind,effect,estimate,se")
    page = run.report_path.read_text(encoding="utf-8")
    assert "REML estimates in units of the table" in page
    assert "groups of <code>subject</code> (a group" in page
    share = run.metrics.method_details["icc"]["subject"]
    assert f"Intraclass correlation where every column with a random slope is 0: {share:.3f} for" in page
    only = {
        **run.metrics.method_details,
        "random": [row for row in shown.to_dict("records") if row["effect"] != "days"],
    }
    assert posterior._random_caption(only).startswith("Intraclass correlation: ")
    details = {**run.metrics.method_details, "log_likelihood": -3.5}
    assert "log likelihood (REML) −3.50, AIC" in posterior.caption(details)
    saved = read_run(run.path)
    lost = replace(saved.metrics, sites=saved.metrics.sites - 1, method_details={**details, "rows": 100})
    several = replace(saved, metrics=replace(saved.metrics, dataset="a.csv,b.csv"))
    one = replace(saved, metrics=replace(saved.metrics, dataset="c.csv"))
    assert summary.comparison_warnings([several, one]) == ["their data sets differ: a, b; c"]
    assert summary.comparison_warnings([saved, saved]) == []
    [doubt] = summary.comparison_warnings([saved, replace(saved, metrics=lost)])
    assert doubt.endswith(f"rows {details['rows']}, 100; lost sites 0, 1")
    fewer = replace(saved.metrics, method_details={**details, "effects": details["effects"][:1]})
    [doubt] = summary.comparison_warnings([saved, replace(saved, metrics=fewer)])
    assert doubt == "AIC, BIC and log likelihood by REML compare models with the same fixed effects; theirs differ"
    assert "Figures by REML compare models with the same fixed effects only." in page
    assert "a group with rows at several sites counts as another group at each" in page
    new = run.posterior.predict(pd.DataFrame({"days": [0.0, 9.0]}))
    first, residual = (shown.loc[shown["group"] == group, "estimate"].iloc[0] for group in ("subject", "residual"))
    assert new["sd"][0] == pytest.approx(math.hypot(first, residual, shown.loc[0, "se"]), rel=1e-6)


def test_a_search_that_ends_where_the_likelihood_is_convex_in_a_deviation_has_effects_given_it():
    around_end = Expansion(0.0, np.zeros(3), -np.array([[4.0, 1.0, 0.5], [1.0, 2.0, 0.3], [0.5, 0.3, -1.0]]))
    fit = of_marginal(np.array([1.0, 2.0, 0.1]), around_end, np.zeros(3), Smooths(()), (2, 3))
    assert fit.covariance == pytest.approx(np.array([[2.0, -1.0], [-1.0, 4.0]]) / 7)
    assert np.isnan(fit.spread[0, 0])


def test_a_saddle_point_is_left(tmp_path, without_profiles):
    """A step may end where a slope has no variance of its own: by symmetry the gradient is 0 there, at no maximum."""
    draw = np.random.default_rng(3)
    patient, week = np.repeat(np.arange(90), 6), np.tile(np.arange(6.0), 90)
    effects = draw.multivariate_normal([0, 0], [[1, 0.2], [0.2, 0.16]], size=90)[patient]
    y = 5 + 0.3 * week + effects[:, 0] + effects[:, 1] * week + draw.normal(0, 0.8, 540)
    table = pd.DataFrame({"patient": patient.astype(str), "week": week, "y": y, "clinic": patient % 2})
    keys = ALONE | {"output-dir": str(tmp_path), "test-fraction": 0.0}
    run = fg.run(table, site="clinic", options={"formula": "y ~ week + (1 + week | patient)", **keys})
    x = np.column_stack([np.ones(6), np.arange(6.0)])
    rows = np.dstack([np.tile(x, (90, 1, 1)), y.reshape(90, 6)])

    def deviance(at):
        """−2 log of the restricted likelihood; the patients have the same weeks."""
        root = x @ np.array([[at[0], 0.0], [at[1], at[2]]])
        v = root @ root.T + math.exp(2 * at[3]) * np.eye(6)
        products = (rows.mT @ np.linalg.solve(v, rows)).sum(0)
        logs = 90 * np.linalg.slogdet(v)[1] + np.linalg.slogdet(products[:2, :2])[1] + 538 * math.log(2 * math.pi)
        return logs + products[2, 2] - products[2, :2] @ np.linalg.solve(products[:2, :2], products[:2, 2])

    best = minimize(deviance, [1.0, 0.2, 0.3, 0.0])
    details = run.metrics.method_details
    assert details["log_likelihood"] == pytest.approx(-0.5 * best.fun, abs=1e-6)
    assert details["exchanges"] <= 16
    assert not details["singular"]


def test_outcomes_that_an_effect_separates_have_a_note_and_a_report(tmp_path):
    """No one died in arm b: the likelihood rises without end, and ends of intervals of ratios exceed any number."""
    table = pd.DataFrame({"died": [1, 0, 0, 1, 0, 0, 0, 0] * 10, "arm": list("aaaabbbb") * 10})
    keys = {"formula": "died ~ arm", "model.likelihood": "bernoulli", "test-fraction": 0.0, **ALONE}
    run = fg.run(table, sites=2, options={**keys, "output-dir": str(tmp_path)})
    (words,) = [words for words in summary.notes(run.metrics) if "no finite estimate" in words]
    assert words.startswith("The rows separate the outcomes along `arm[T.b]`:")
    assert words in run.report_path.read_text(encoding="utf-8").replace("<code>", "`").replace("</code>", "`")


def test_figures_that_are_unknown_are_dashes():
    assert [summary.show(None), summary.show(math.inf), posterior.probability(None)] == 3 * ["–"]


def test_parameters_that_rows_cannot_tell_apart_have_no_interval_and_a_note(tmp_path):
    """Of a slope that is constant within groups, only the variance of each group's sum is identified."""
    draw, child = np.random.default_rng(3), np.repeat(np.arange(60), 5)
    sex = child % 2
    y = 3 + draw.normal(0, 1, 60)[child] * (1 + 0.5 * sex) + draw.normal(0, 0.7, 300)
    table = pd.DataFrame({"child": child.astype(str), "sex": sex, "y": y, "clinic": child // 30})
    keys = {"formula": "y ~ 1 + (sex | child)", "test-fraction": 0.0, "output-dir": str(tmp_path), **ALONE}
    run = fg.run(table, site="clinic", options=keys)
    shown = run.summary().set_index(["group", "effect"])
    assert shown.loc[("child", "sex"), ["low", "high", "profile_low", "profile_high"]].isna().all()
    for known in (("", "intercept"), ("residual", "")):
        assert shown.loc[known, "profile_low"] < shown.loc[known, "estimate"] < shown.loc[known, "profile_high"]
    (words,) = run.metrics.method_details["notes"]
    assert "random effects of `child` apart" in words


def test_an_end_of_an_interval_at_which_the_equations_are_not_solved_is_unknown(monkeypatch):
    """The deviance stays below 3 along the first parameter, as along a correlation whose slopes may be zero."""
    bounded = Mock(Expansion)
    bounded.deviance.return_value = lambda at: 3 * at[0] ** 2 / (1 + at[0] ** 2) + at[1] ** 2
    monkeypatch.setattr("strategies.mixed_model.around", lambda *_: bounded)
    problem = Mock(Fitting, around_best=lambda state: bounded, gaussian=False)
    state, answer = Mock(MixedState, point=np.zeros(2), sites=()), Mock(Summed, total=0, silent=(), sites=())
    asking = profiled(problem, state, Mock(Estimates, log_noise=0.0), [(profile.entry(k), None) for k in range(2)])
    first, second = answered_by(asking, lambda _: answer)
    assert np.isnan(first).all()
    assert second == pytest.approx((-math.sqrt(profile.LEVEL), math.sqrt(profile.LEVEL)), abs=1e-9)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_a_model_without_inputs_is_compared_with_the_mean_alone(family, tmp_path, without_profiles):
    """A GP of no inputs does not exist; the null model is usual, since its intraclass correlation is of interest."""
    draw, child = np.random.default_rng(8), np.arange(60) // 4
    y = draw.normal(size=15)[child] + draw.normal(size=60)
    table = pd.DataFrame({"y": y if family == "gaussian" else np.where(y > 0, "yes", "no"), "child": child})
    keys = {"formula": "y ~ 1 + (1 | child)", "model.likelihood": family, "output-dir": str(tmp_path)}
    metrics = fg.run(table, sites=3, options=keys).metrics
    assert metrics.failures == []
    assert metrics.mean is not None
    assert metrics.local_only is metrics.pooled is metrics.boosting is None


def test_a_step_on_which_the_expansion_of_the_sums_fails_is_not_taken():
    """Along the lengthscale of an input without effect a step may be long and promise little."""
    totals = Totals(np.array([0.0, 1.0, 0.5, 2.0]), np.zeros((1, 4)), np.array([[0.0, -2.0, 0.0, 0.0]]), 10.0)
    problem = Mock(Fitting, around_best=lambda state: totals)
    found = estimated(problem, Mock(MixedState, step=np.array([2.0]), promised=1e-3, point=np.array([0.3])))
    assert (found.theta, found.beta) == (0.3, 0.5)


def test_an_end_of_an_interval_that_is_known_is_shown_beside_one_that_is_not():
    row = {"low": 1.0, "high": 2.0, "profile_low": math.nan, "profile_high": -3.0}
    assert summary.interval(row) == "unknown to −3.000"
    assert summary.interval(row | {"profile_high": math.nan}) == "–"
    ratio = {"effect": "x", "estimate": 0.0, "ratio": 1.0, "ratio_low": math.nan, "ratio_high": 2.0}
    facts = {"effects": [row | ratio], "random": []}
    assert summary.quoted(Mock(method_details=facts))["x (ratio)"] == "1.000 (unknown to 2.000)"


CLOSE_TO_ZERO = [("gaussian", 0, 0.25, True), ("gaussian", 0, 0.7, False), ("bernoulli", 1, 0.25, True)]


@pytest.mark.parametrize(("family", "seed", "sd", "zero"), CLOSE_TO_ZERO)
def test_the_interval_of_a_small_standard_deviation_begins_at_zero(family, seed, sd, zero, tmp_path):
    """It does where 0 costs less than 3.84 of the deviance, that of a regression without groups at 0."""
    draw, child = np.random.default_rng(seed), np.repeat(np.arange(30), 5)
    x = draw.normal(size=150)
    eta = 0.5 * x + sd * draw.normal(0, 1, 30)[child]
    y = eta + draw.normal(size=150) if family == "gaussian" else (draw.random(150) < expit(eta)).astype(int)
    table = pd.DataFrame({"child": child.astype(str), "x": x, "y": y, "clinic": child % 2})
    keys = {"formula": "y ~ x + (1 | child)", "test-fraction": 0.0, "output-dir": str(tmp_path), **ALONE}
    run = fg.run(table, site="clinic", options={**keys, "model.likelihood": family})
    assert not run.metrics.method_details["notes"]
    row = run.summary().set_index(["group", "effect"]).loc[("child", "intercept")]
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    density = norm.logpdf if family == "gaussian" else lambda y, eta, _: -np.logaddexp(0, (1 - 2 * y) * eta)

    def deviance(at, sd):
        """−2 log likelihood of the intercept, the slope and the logarithm of the noise, by quadrature over groups."""
        eta = at[0] + at[1] * x[:, None] + sd * nodes
        logs = density(y[:, None], eta, np.exp(at[2])).reshape(30, 5, -1).sum(1)
        return -2 * np.log(np.exp(logs) @ weights / weights.sum()).sum()

    best = minimize(lambda at: deviance(at, at[3]), [0, 0.5, 0, sd]).fun
    cost = minimize(deviance, [0, 0.5, 0], (0.0,)).fun - best
    assert (cost < profile.LEVEL) == zero
    assert (row["profile_low"] == 0.0) == zero
    end = minimize(deviance, [0, 0.5, 0], (row["profile_low"],)).fun - best
    assert zero or end == pytest.approx(profile.LEVEL, abs=0.01)
    assert row["profile_low"] < row["estimate"] < row["profile_high"]


def test_groups_with_rows_at_several_sites_have_a_warning(tmp_path, without_profiles):
    draw = np.random.default_rng(2)
    clinic = np.arange(90) % 3
    ward = np.where(draw.random(90) < 0.5, 10 + clinic, draw.integers(0, 2, 90))  # wards 0 and 1 are everywhere
    table = pd.DataFrame({"clinic": clinic, "ward": ward, "room": 10 * clinic + ward % 2, "y": draw.normal(size=90)})
    keys = {"formula": "y ~ (1 | ward) + (1 | room)", "test-fraction": 0.0, "output-dir": str(tmp_path), **ALONE}
    run = fg.run(table, site="clinic", options=keys)
    (told,) = [words for words in run.metrics.warnings if "groups of" in words]
    assert "groups of `ward` with rows at several sites count as other groups there: 2" in told


@pytest.mark.long
def test_the_site_is_a_group(tmp_path):
    keys = {**mixed_models.keys("nested"), "formula": "score ~ kind * hours + (1 | site) + (1 | school:room)"}
    run = fg.run(mixed_models.schools(), site="school", options={**keys, **ALONE, "output-dir": str(tmp_path)})
    as_lme4("nested", run)


def test_effects_of_sites_are_those_of_all_rows_in_one_normal(tmp_path, without_profiles):
    """E b = G Zᵀ V⁻¹ (y − X β̂) and Var (b − E b) = G − G Zᵀ P Z G, P = V⁻¹ − V⁻¹ X (Xᵀ V⁻¹ X)⁻¹ Xᵀ V⁻¹."""
    draw, site = np.random.default_rng(8), np.repeat(np.arange(4), (12, 11, 14, 10))
    x = draw.normal(size=len(site))
    y = 70 + 3 * x + np.array([4.0, -5.0, 1.0, 0.5])[site] + draw.normal(size=len(site))
    tables = {f"s{k}": pd.DataFrame({"x": x, "y": y})[site == k] for k in range(4)}  # as real sites, with a policy
    keys = {"formula": "y ~ x + (1 | site)", "output-dir": str(tmp_path), "test-fraction": 0.0, **ALONE}
    run = fg.run(tables, options=keys)
    shown = run.summary()
    between, within = shown["estimate"].iloc[2:4]
    z, design = np.eye(4)[site], np.column_stack([np.ones_like(x), x])
    inverse = cho_solve(cho_factor(between**2 * z @ z.T + within**2 * np.eye(len(site))), np.eye(len(site)))
    middle = inverse @ design @ np.linalg.solve(design.T @ inverse @ design, design.T @ inverse)
    mean = between**2 * z.T @ (inverse - middle) @ y
    variance = between**2 - between**4 * np.diag(z.T @ (inverse - middle) @ z)
    found = shown.iloc[4:]
    assert list(found["effect"]) == [f"s{k}" for k in np.argsort(mean)]
    np.testing.assert_allclose(found["estimate"], np.sort(mean), rtol=1e-5)
    np.testing.assert_allclose(found["high"], np.sort(mean) + 1.959964 * np.sqrt(variance[np.argsort(mean)]), rtol=1e-5)
    assert (run.path / "plots" / "effects-of-sites.png").exists()


def test_counts_that_vary_more_are_as_glm_nb_has_them(tmp_path, without_profiles):
    """Figures of ``MASS::glm.nb``, which holds no group; its estimate of the dispersion is 1/theta."""
    draw, ward = np.random.default_rng(6), np.repeat(np.arange(60), 6)
    beds, drug = draw.uniform(5, 60, 360), draw.integers(0, 2, 360)
    rate = beds * np.exp(-2 + 0.4 * drug + draw.normal(0, 0.5, 60)[ward])
    table = pd.DataFrame({"drug": drug, "beds": beds, "falls": draw.negative_binomial(3.0, 3 / (3 + rate))})
    keys = {"model.likelihood": "negative-binomial", "test-fraction": 0.0, "output-dir": str(tmp_path), **ALONE}
    run = fg.run(table, sites=2, options={"formula": "falls ~ drug + offset(log(beds))", **keys})
    assert list(run.summary()["estimate"]) == pytest.approx([-1.9155328747, 0.4481397022, 0.5460538192], rel=1e-6)
    assert run.metrics.method_details["log_likelihood"] == pytest.approx(-980.747477513, abs=1e-7)
    new = run.posterior.predict(table.head(3))
    assert (new["q2.5"] >= 0).all()
    assert (new["q97.5"] > new["mean"] + 2 * new["mean"] ** 0.5).all()


def test_a_smooth_term_under_masks_predicts_as_the_exact_process_of_all_rows(tmp_path):
    draw, group = np.random.default_rng(3), np.repeat(np.arange(12), 10)
    age, dose = draw.uniform(20, 90, 120), draw.integers(0, 2, 120)
    y = 40 + 5 * dose + 9 * np.sin(age / 15) + draw.normal(0, 3, 12)[group] + draw.normal(0, 2, 120)
    table = pd.DataFrame({"dose": dose, "age": age, "ward": [f"w{g}" for g in group], "y": y})
    keys = {"formula": "y ~ dose + s(age) + (1 | ward)", "test-fraction": 0.0, "output-dir": str(tmp_path)}
    run = fg.run(table, sites=3, options={**keys, **ALONE, "privacy.secure-aggregation": True})
    between, within, amplitude, length = run.summary()["estimate"].iloc[2:]
    new = pd.DataFrame({"dose": [0, 1, 1], "age": [25.0, 55.0, 80.0]})

    def smooth(a, b):
        return amplitude**2 * np.exp(-0.5 * ((a[:, None] - b) / length) ** 2)

    x, there = (np.column_stack([np.ones(len(d)), d]) for d in (dose, new["dose"]))
    ages, same = new["age"].to_numpy(), group[:, None] == group
    covariance = smooth(age, age) + between**2 * same + within**2 * np.eye(120) + 1e6 * x @ x.T
    gain = np.linalg.solve(covariance, smooth(age, ages) + 1e6 * x @ there.T).T
    prior = 1e6 * (there**2).sum(1) + amplitude**2 + between**2 + within**2
    variance = prior - (gain * (smooth(ages, age) + 1e6 * there @ x.T)).sum(1)
    found = run.posterior.predict(new)
    np.testing.assert_allclose(found["mean"], gain @ y, rtol=1e-4)
    np.testing.assert_allclose(found["sd"], np.sqrt(variance), rtol=1e-3)
    assert run.metrics.method_details["exchanges"] <= 15
    assert (run.path / "plots" / "smooth-terms.png").exists()


@pytest.mark.long
def test_a_smooth_term_of_counts_in_groups_finds_their_rate_under_masks(tmp_path):
    draw, ward = np.random.default_rng(3), np.repeat(np.arange(20), 8)
    age, dose = draw.uniform(20, 90, 160), draw.integers(0, 2, 160)
    rate = np.exp(0.5 + 0.4 * dose + np.sin(age / 15) + draw.normal(0, 0.4, 20)[ward])
    table = pd.DataFrame({"dose": dose, "age": age, "ward": [f"w{w}" for w in ward], "falls": draw.poisson(rate)})
    keys = {"formula": "falls ~ dose + s(age) + (1 | ward)", "model.likelihood": "poisson", "test-fraction": 0.0}
    masked = {"output-dir": str(tmp_path), "privacy.secure-aggregation": True, **ALONE}
    run = fg.run(table, sites=3, options={**keys, **masked})
    assert run.metrics.method_details["promised_rise"] < 1e-8
    assert run.metrics.method_details["exchanges"] <= 25
    assert list(run.summary()["kind"]) == ["fixed", "fixed", "sd", "sd", "lengthscale"]
    ages = np.array([25.0, 45.0, 70.0])
    new = run.posterior.predict(pd.DataFrame({"dose": [0, 1, 0], "age": ages}))
    typical = np.exp(0.5 + 0.4 * np.array([0, 1, 0]) + np.sin(ages / 15) + 0.5 * 0.4**2)
    np.testing.assert_allclose(new["mean"], typical, rtol=0.35)
    assert "95 % band, in log rate" in run.report_path.read_text(encoding="utf-8")


def test_the_site_is_an_effect(tmp_path, without_profiles):
    keys = {"formula": "score ~ hours + school", "output-dir": str(tmp_path), "test-fraction": 0.0, **ALONE}
    pupils = mixed_models.schools()[:120]  # of three schools
    run = fg.run(pupils, site="school", options=keys)
    assert len(run.summary()) == 1 + 2 + 1 + 1


def test_formulas_are_taken_apart_and_call_little():
    found = parse("y ~ x * C(`a b`, Treatment('n')) + offset(log(t)) + (1 + x || s / r) + s(age, bmi)")
    assert found.inputs == ("x", "a b", "t", "age", "bmi")
    terms = [(part, group) for group in (("s",), ("s", "r")) for part in ("1", "0 + x")]
    assert [(term.effects, term.group) for term in found.random] == terms
    assert (found.categories, found.groups, found.offset) == (("a b",), ("s", "r"), "(log(t))")
    for right in ("~ eval(x)", "~ x.real", "~ x | g", "~ (1 | g", "", "~ [x]", "~ `a`.b", "~ __import__('os')"):
        with pytest.raises(ConfigError, match="formula"):
            parse_config({"formula": f"y {right}"})
    with pytest.raises(ConfigError, match="leave out `target`"):
        parse_config({"formula": "y ~ x", "target": "y"})
    with pytest.raises(ConfigError, match="does not read `formula`"):
        parse_config({"formula": "y ~ x", "method": "sgpr"})


def test_groups_that_hang_together_are_not_dealt_apart(tmp_path):
    options = {"formula": mixed_models.SETS["crossed"][1], "output-dir": str(tmp_path)}
    with pytest.raises(DataError, match="at most 1"):
        fg.run(mixed_models.crossed(), sites=3, options=options)


def test_a_level_that_no_site_had_has_no_effect_and_is_refused(tmp_path, without_profiles):
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"arm": ["a", "b"] * 10, "y": draw.normal(size=20)})
    keys = ALONE | {"output-dir": str(tmp_path), "test-fraction": 0.0, "formula": "y ~ arm"}
    posterior = fg.run(table, sites=2, options=keys).posterior
    assert len(posterior.predict(table[:3])) == 3
    with pytest.raises(DataError, match=r"levels that no site had, .*`arm`: 'c'"):
        posterior.predict(table[:3].assign(arm=["a", "c", "b"]))


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (
            "arm + offset(log(beds))",
            r"b: `formula`: offset\(log\(beds\)\) is not finite in row 4; correct the cells",
        ),
        ("beds * C(arm, Treatment(0))", r"Treatment\(0\) is no level of arm; its levels are 'a', 'b'"),
        ("C(arm, Treatment('A'))", r"Treatment\('A'\) is no level of arm; its levels are 'a', 'b'"),
    ],
)
def test_a_run_says_what_a_formula_cannot_be_computed_from(tmp_path, terms, words):
    """One bad cell stops a simulated run before it trains, so that no site is lost unseen."""
    draw = np.random.default_rng(1)
    tables = {
        site: pd.DataFrame({"arm": ["a", "b"] * 15, "beds": draw.uniform(1, 9, 30), "falls": draw.poisson(2, 30)})
        for site in ("a", "b", "c")
    }
    tables["b"].loc[3, "beds"] = 0.0
    keys = {"model.likelihood": "poisson", "test-fraction": 0.0, "output-dir": str(tmp_path), **ALONE}
    with pytest.raises(FedGPError, match=words):
        fg.run(tables, options={"formula": f"falls ~ {terms}", **keys})


@pytest.mark.parametrize("left", ["log(fev1)", "1 - fev1", "-fev1", "(fev1)"])
def test_a_formula_takes_its_target_as_it_is(left):
    with pytest.raises(ValueError, match="takes a column as it is"):
        parse(f"{left} ~ age")
    assert parse("`fev 1` ~ age").target == "fev 1"


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ("x + (1 | a*b)", "a group is a column, a:b or a/b"),
        ("x + (1 | a+b)", "a group is a column, a:b or a/b"),
        ("x - offset(z)", "only fixed effects can be taken out"),
        ("x - (1 | g)", "only fixed effects can be taken out"),
        ("x + (1 - x || g)", "only the intercept can be taken out"),
        ("x + I(z^2)", "inside I"),
        ("age.v", "a name with a dot needs backquotes"),
        ("x + `age [years]`", r"; `age \[years\]`: a name in backquotes has only letters"),
        ("log(`age )` + `x.y(z)`", r"; `age \)`: a name in backquotes has only letters"),
    ],
)
def test_a_formula_that_would_be_read_as_another_is_refused(terms, words):
    with pytest.raises(ValueError, match=words):
        parse(f"y ~ {terms}")


def test_a_name_in_backquotes_may_have_blanks_and_brackets(tmp_path):
    draw, keys = np.random.default_rng(1), {"num-server-rounds": 2, "output-dir": str(tmp_path), **ALONE}
    plain = pd.DataFrame({"age": draw.uniform(20, 60, 60), "dose": draw.uniform(1, 9, 60), "ward": list("abcd") * 15})
    plain["y"] = np.sin(plain["age"] / 9) + np.log(plain["dose"]) + 0.1 * draw.normal(size=60)
    odd = plain.rename(columns={"age": "age (years)", "dose": "dose (mg/day)", "ward": "ward (no.)"})
    formula = "y ~ C({2}) + I(log({1})**2) + s({0}) + (1 | {2})"
    names = ("age", "dose", "ward"), ("`age (years)`", "`dose (mg/day)`", "`ward (no.)`")
    one, two = (
        fg.run({"a": table[:30], "b": table[30:]}, options={"formula": formula.format(*quoted), **keys})
        for table, quoted in zip((plain, odd), names, strict=True)
    )
    np.testing.assert_allclose(one.summary()["estimate"], two.summary()["estimate"])
    np.testing.assert_array_equal(one.posterior.predict(plain), two.posterior.predict(odd))


@pytest.mark.parametrize("effects", ["-1 + x", "x - 1", "0 + x"])
def test_an_intercept_that_is_taken_out_is_no_random_effect(effects):
    assert [term.effects for term in parse(f"y ~ x + ({effects} || g)").random] == ["0 + x"]
    assert [term.called for term in parse("y ~ x + (1 | `a b`/c) + (1 | a:b)").random] == ["a b", "a b:c", "a:b"]
