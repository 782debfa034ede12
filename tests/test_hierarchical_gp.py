"""The hierarchical GP as a federation runs it, and in closed form against dense algebra."""

import itertools
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, csv_nodes, run, run_of_units, waves
from schedules import METHODS
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from structured_problems import gp_sites, shaped_gp

from fedgp_flower.errors import DataError, RunError
from fedgp_flower.gp.error_law import SCALE, TAILS
from fedgp_flower.gp.optimisers import pack
from fedgp_flower.gp.sums import LEAST_NOISE
from fedgp_flower.messages import add
from fedgp_flower.methods.family import GlobalPosterior, initial_global, on_the_wire
from fedgp_flower.methods.hierarchical_gp import newton, rough
from fedgp_flower.methods.hierarchical_gp.messages import Calibration, ExpansionShare
from fedgp_flower.methods.hierarchical_gp.newton import Sums, expansion, flattened, newton_step, posterior, transported
from fedgp_flower.methods.hierarchical_gp.smooth import WIDTHS, SmoothDeviation, inducing_factor
from fedgp_flower.methods.sfvi.gp import HierarchicalModel, linear_terms
from fedgp_flower.methods.sfvi.posterior import panels
from fedgp_flower.options import ModelSection
from fedgp_flower.outcome import AT_SITE
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config
from strategies.hierarchical_gp import USUAL_SITES, HierarchicalGP, first_state, one_round, widened, without_broken
from strategies.server.questions import Roster, Summed, answered_by, drive

POINTS = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
ALIKE = (1e-9, 1e-9, 1e-9)
"""Widths with which all sites have one shape."""


def tiny(**changes):
    return configured(**{"method": "hierarchical-gp", "num_server_rounds": 30, "model__num_inducing": 4, **changes})


def sites(folder, names):
    return csv_nodes(folder, {site: waves(20, seed) for seed, site in enumerate(names)})


class Units:
    """A site with several units, each with a deviation and a noise of its own; it sends their sum."""

    def __init__(self, model, units):
        self.model, self.units = model, units

    def expansion(self, request):
        """As the client does it."""
        self.model.load_theta(request.values)
        q_global = GlobalPosterior.of(request.values)
        return add([unit.derivatives(q_global) for unit in self.units])


@cache
def trajectory(sizes, rounds, **keys):
    """The model, the states of some rounds, and four units dealt to sites of so many; a test loads its own θ."""
    model = shaped_gp(inputs=POINTS, **keys)
    rows = gp_sites(model, torch.Generator().manual_seed(5), sizes=(9, 12, 7, 10))
    units = [SmoothDeviation(model, own.features, own.targets) for own in rows]
    starts = np.cumsum([0, *sizes])
    sites = {str(k): Units(model, units[a:b]) for k, (a, b) in enumerate(pairwise(starts))}
    states = [first_state(on_the_wire(model.theta()), POINTS.numpy(), 7)]
    roster, start = Roster(dict.fromkeys(sites, 1), tuple(sites), (), 1), deepcopy(model)
    for _ in range(rounds):
        states.append(drive(one_round(states[-1], roster, partial(inducing_factor, start)), sites)[0])
    return model, states, units


def test_any_partition_of_units_takes_the_same_steps_within_the_radius():
    _, one, _ = trajectory((4,), 3)
    _, other, _ = trajectory((1, 3), 2)
    for before, after in zip(one, other, strict=False):
        assert after.trial == pytest.approx(before.trial, rel=1e-9, abs=1e-9)
    assert one[-1].value > one[1].value + 1
    lengths = [np.abs(after.trial - pack(after.theta)).max() / after.radius for after in one[1:]]
    assert max(lengths) == pytest.approx(1.0)  # whatever the prior: where it is wide, first steps killed the trend


def test_the_bound_of_a_run_is_that_of_a_dense_gp_at_its_optimum():
    """Without noise offsets nothing lags behind; L-BFGS of the dense bound from there finds no more."""
    model, states, units = trajectory((2, 2), 12, widths=ALIKE)
    state = states[-1]
    model.load_theta(state.parameters)
    value = dense_bound(model, units, torch.zeros(4, 3))
    assert state.bound == pytest.approx(float(value.detach()), abs=1e-8)
    theta = {name: own for name, own in sorted(model.theta().items()) if name != WIDTHS}
    leaves = [*theta.values()]
    slopes = torch.cat([own.flatten() for own in torch.autograd.grad(value, leaves)]).numpy()
    away = np.concatenate([own.detach().numpy().ravel() for own in leaves]) - state.mode
    size = {"theta.deviation.log_outputscale": 0.5, "theta.log_site_slope": 1.0}  # of e^(κθ): P(sd > its first) = .05
    power = np.concatenate([np.full(own.numel(), size.get(n, 0.0)) for n, own in theta.items()])
    prior = away / state.scale**2 + np.log(20) * power * np.exp(power * away)
    assert slopes == pytest.approx(prior, abs=1e-5)  # of F and of the log prior, which are equal at the optimum
    assert state.rise < 1e-6


def test_widths_rest_where_those_of_em_do():
    """At (K + n₀) w² = Σ E(w zₖ)² + n₀ w₀²; if sites differ by more, they grow, and F is another one."""
    state = trajectory((4,), 3)[1][1]
    [(name, now)], squares = state.widths.items(), np.array([6.0, 0.4, 1.0])
    first = now + np.array([0.2, -0.1, 0.0])
    variances = 4 + USUAL_SITES - squares - USUAL_SITES * np.exp(2 * (first - now))  # summed over K = 4 sites
    state = replace(state, rise=0.0, first_widths=first, squares=squares, known=4 - variances)
    assert widened(state) is state
    wider = widened(replace(state, squares=2 * squares))
    assert wider.value is None
    assert (wider.widths[name][1:] > now[1:]).all()
    assert wider.widths[name][0] == now[0]  # that of noise stays
    late = replace(state, squares=2 * squares, rise=2.0)
    assert widened(late) is late


def test_a_run_converges_and_says_so(tmp_path):
    strategy = run(FaultyGrid(tiny(), sites(tmp_path, "ab")), Recorder())
    assert strategy.round < 20
    assert strategy.outcome.metrics["converged"]
    details = strategy.outcome.metrics["method_details"]
    assert details["promised_rise"] < 0.1
    assert set(details["relevance"]) == {"trend", "deviation"}


def test_sums_that_no_rows_have_are_refused(tmp_path):
    lies = {
        "c": (lambda own: {**own, "precision": -own["precision"]}, "not positive semi-definite"),
        "d": (lambda own: {**own, "count": own["count"] + 1}, "the site described"),
        "e": (lambda own: {**own, "precision": 1e9 * own["precision"]}, "its precision per row is"),
    }
    faults = [Fault(site, arrays(change), ("train.expansion",)) for site, (change, _) in lies.items()]
    strategy = run(FaultyGrid(tiny(num_server_rounds=1), sites(tmp_path, "abcde"), *faults))
    assert all(any(reason in said for said in blamed(strategy)[site]) for site, (_, reason) in lies.items())
    assert strategy.current.sites == ("a", "b")


def dense_prediction(unit, others, new):
    """Mean and variance of y at new rows of a unit, from the joint covariance of all rows; noise without offset."""
    model = unit.model
    parts = [*(own.features for own in (*others, unit)), new]
    every, size, last = torch.cat(parts), sum(map(len, parts)) - len(new), len(others)
    owner = torch.cat([torch.full((len(part),), min(k, last)) for k, part in enumerate(parts)])
    shared, left_over = model.shared(every)
    deviation = unit._covariance(every, every, torch.ones(3).double())
    covariance, noise = shared.mT @ shared + deviation * (owner[:, None] == owner), LEAST_NOISE + model.log_noise.exp()
    prior = covariance[:size, :size] + noise * torch.eye(size, dtype=torch.float64)
    gain = torch.linalg.solve(prior, covariance[:size, size:]).mT
    left = covariance[size:, size:] - gain @ covariance[:size, size:]
    targets = torch.cat([own.targets for own in (*others, unit)])
    return gain @ targets, left.diagonal() + left_over[size:] + noise


def test_a_site_predicts_as_a_dense_pooled_gp():
    model, states, units = trajectory((2, 2), 4, widths=ALIKE, jitter=1e-12)
    model.load_theta(states[-1].parameters)
    new = torch.linspace(-2.5, 2.5, 6, dtype=torch.float64)[:, None]
    for dense in (True, False):
        units[1].dense = dense
        with torch.no_grad():
            found, spread = units[1].predict(new, GlobalPosterior.of(states[-1].parameters))
            mean, variance = dense_prediction(units[1], [units[0], *units[2:]], new)
        torch.testing.assert_close((found, spread), (mean, variance), rtol=1e-07, atol=1e-07)


@pytest.mark.parametrize("dense", [True, False])
def test_left_out_errors_are_those_of_a_dense_pooled_gp_of_all_other_rows(dense):
    model, states, units = trajectory((2, 2), 4, widths=ALIKE, jitter=1e-12)
    model.load_theta(states[-1].parameters)
    units[1].dense = dense
    errors, means = (part.numpy() for part in units[1].left_out(posterior_of(model, units)))
    for n, found in enumerate(errors):
        rest = [k for k in range(len(errors)) if k != n]
        kept = SmoothDeviation(model, units[1].features[rest], units[1].targets[rest])
        with torch.no_grad():
            mean, variance = dense_prediction(kept, [units[0], *units[2:]], units[1].features[[n]])
        assert means[n] == pytest.approx(float(mean), rel=1e-6, abs=1e-7)
        assert found == pytest.approx(float((units[1].targets[n] - mean) / variance.sqrt()), rel=1e-6, abs=1e-7)


def test_left_out_errors_include_what_few_anchors_leave_unknown():
    """As the unit predicts the row from its other rows, the same anchors, and a q(Z_G) without the row."""
    model, states, units = trajectory((2, 2), 4, widths=ALIKE, jitter=1e-12)
    model.load_theta(states[-1].parameters)

    def with_rows(at):
        unit = SmoothDeviation(model, units[1].features[at], units[1].targets[at])
        unit.dense, unit.anchors = False, units[1].features[:3]
        return unit

    whole = with_rows(slice(None))
    errors, _ = whole.left_out(posterior_of(model, [units[0], whole, *units[2:]]))
    for n in (0, 5, 11):
        kept = with_rows([k for k in range(12) if k != n])
        mean, variance = kept.predict(whole.features[[n]], posterior_of(model, [units[0], kept, *units[2:]]))
        expected = (whole.targets[n] - mean) / variance.sqrt()
        assert float(errors[n]) == pytest.approx(float(expected), rel=1e-5)


def posterior_of(model, units):
    """q(Z_G) given all rows at this θ, where all sites have one shape."""
    sums = [unit.sums(torch.zeros(3).double()) for unit in units]
    precision, shift = (sum(getattr(own, name).detach() for own in sums) for name in ("precision", "shift"))
    return posterior(precision, shift)[0]


def test_heavy_tails_of_all_rows_give_a_mixture_and_normal_errors_none(tmp_path):
    draw = np.random.default_rng(0)
    for name, errors in {"heavy": draw.standard_t(2, 150), "normal": draw.standard_normal(150)}.items():
        x = draw.uniform(-2, 2, 150)
        y, at = np.sin(x) + 0.2 * errors, np.arange(150) % 3
        tables = {str(k): pd.DataFrame({"x": x[at == k], "y": y[at == k]}) for k in range(3)}
        (tmp_path / name).mkdir()
        lie = Fault("0", arrays(lambda own: {**own, "counts": own["counts"] + 1}), ("query.errors",))
        strategy = run(FaultyGrid(tiny(num_server_rounds=2), csv_nodes(tmp_path / name, tables), lie))
        assert "the site described" in blamed(strategy)["0"][0]
        saved = strategy.outcome.posterior
        assert (AT_SITE + TAILS in saved.arrays) == (name == "heavy")
        if name == "heavy":
            factors, shares = saved.at_site().arrays[TAILS]
            assert shares @ factors**2 == pytest.approx(1)


def test_a_prediction_is_the_mixture_over_shapes():
    """By hand: predictions at each node with its shape in the model itself."""
    model, states, units = trajectory((4,), 3)
    model.load_theta(states[2].parameters)
    q_global, new = GlobalPosterior.of(states[2].parameters), torch.tensor([[0.3], [2.4]], dtype=torch.float64)
    found, variance = units[0].predict(new, q_global)
    offsets, shares = units[0].mixture(q_global)
    plain, parts = shaped_gp(inputs=POINTS, widths=ALIKE), []
    for offset in offsets:
        root, size, stretch = model.log_width.detach().exp() * offset
        theta = {name: own.detach().clone() for name, own in model.theta().items() if name != WIDTHS}
        theta["theta.log_noise"] = (model.noise.detach() * (2 * root).exp() - LEAST_NOISE).log()
        theta["theta.deviation.log_outputscale"] += 2 * size
        theta["theta.deviation.log_lengthscale"] += stretch
        plain.load_theta({**theta, WIDTHS: plain.log_width.detach()})
        unit = SmoothDeviation(plain, units[0].features, units[0].targets)
        unit.mixture = lambda _: (torch.zeros(1, 3).double(), torch.ones(1).double())  # all nodes are one shape there
        parts.append(unit.predict(new, q_global))
    means, variances = map(torch.stack, zip(*parts, strict=True))
    torch.testing.assert_close(found, shares @ means, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(variance, shares @ (variances + (means - found).square()), rtol=1e-9, atol=1e-9)


def test_a_run_predicts_at_a_site_for_a_new_one_and_as_a_model_of_gpytorch(tmp_path):
    draw, x = np.random.default_rng(0), np.linspace(-2, 2, 360)
    errors = 0.2 * np.exp(x / 2) * draw.standard_t(4, 360)
    pd.DataFrame({"x": x, "y": np.sin(x) + np.arange(360) // 120 + errors}).to_csv(tmp_path / "rows.csv", index=False)
    own = {"dataset": str(tmp_path / "rows.csv"), "target": "y", "partitioner": "iid", "test_fraction": 0.3}
    own |= {"keep_predictions": True, "num_server_rounds": 2}
    folder = run_in_process(tiny(**own, output_dir=str(tmp_path), name="run"), 3)
    told = pd.read_csv(folder / "predictions.csv", dtype={"site": str}).query("site == '1'")
    frame = told.rename(columns={"input.x": "x"})[["x"]]
    own, new = Predictor.at_site(folder, "1").predict(frame), Predictor.of(read_run(folder))
    np.testing.assert_allclose(own[["mean", "sd"]], told[["mean", "sd"]], rtol=1e-9)
    np.testing.assert_allclose(own[["q2.5", "q97.5"]], told[["low", "high"]], rtol=1e-6)
    assert {SCALE, TAILS} <= set(read_run(folder).saved.at_site().arrays)
    least, mean, sd = (new.predict(frame)[name] for name in ("q2.5", "mean", "sd"))
    np.testing.assert_allclose((mean - least) / sd, 1.96, rtol=1e-4)  # most is unknown of the deviation, not of errors
    wide, narrow = (told[at]["sd"].mean() for at in (told["input.x"] > 1, told["input.x"] < -1))
    assert wide > 2 * narrow  # e^1.5 / e^-1.5, shrunk
    assert told["trend"].to_numpy() == pytest.approx(new.predict(frame)["mean"].to_numpy(), rel=1e-9)
    assert (told["trend"] + told["deviation"]).to_numpy() == pytest.approx(told["mean"].to_numpy())
    assert np.abs(own["mean"] - new.predict(frame)["mean"]).max() > 1e-3
    exported = new.distribution(frame, noise=True)
    assert exported.mean.numpy() == pytest.approx(new.predict(frame)["mean"].to_numpy(), rel=1e-8)
    assert exported.stddev.numpy() == pytest.approx(new.predict(frame)["sd"].to_numpy(), rel=1e-6)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    model = shaped_gp(inputs=torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None])
    with torch.no_grad():
        model.log_site_slope += torch.tensor([0.2, -0.3], dtype=torch.float64)
    return model, [SmoothDeviation(model, rows.features, rows.targets) for rows in gp_sites(model, generator)]


def total(parts):
    return Sums(*(sum(getattr(own, name) for own in parts) for name in ("precision", "shift", "constant")))


def bound(sums):
    """F with autograd left on: c − ½ log|I + P| + ½ pᵀ(I + P)⁻¹p."""
    precision = torch.eye(len(sums.shift), dtype=torch.float64) + sums.precision
    fit = sums.shift @ torch.linalg.solve(precision, sums.shift)
    return sums.constant - 0.5 * torch.linalg.slogdet(precision)[1] + 0.5 * fit


def dense_bound(model, sites, offsets):
    """Titsias' bound of the pooled rows, from the covariance of all of them, plus the log prior of the offsets z."""
    features, targets = torch.cat([s.features for s in sites]), torch.cat([s.targets for s in sites])
    kzx = model.trend(model.inputs, features).to_dense()
    kzz = model.trend(model.inputs).to_dense()
    kzz = kzz + model.jitter * torch.eye(len(kzz), dtype=torch.float64) * kzz.diagonal().mean()
    nystrom = kzx.mT @ torch.linalg.solve(kzz, kzx)
    trend = nystrom + linear_terms(features).mT @ linear_terms(features)
    own, open_rows, noises = [], [], []
    start = 0
    for site, offset in zip(sites, offsets, strict=True):
        n = len(site.targets)
        slopes = model.log_site_slope.exp()[:, None] * linear_terms(site.features)
        root, size, stretch = (model.log_width.exp() * offset).exp() if len(offset) else torch.ones(3).double()
        noise = (LEAST_NOISE + model.log_noise.exp()) * root**2
        deviation = model.deviation(site.features / stretch).to_dense()
        own.append(size**2 * deviation + slopes.mT @ slopes + noise * torch.eye(n).double())
        prior = model.trend(site.features, diag=True) - nystrom.diagonal()[start : start + n]
        open_rows.append(prior.sum() / noise)
        noises.append(0.5 * offset.square().sum())
        start += n
    covariance = trend + torch.block_diag(*own)
    fit = targets @ torch.linalg.solve(covariance, targets)
    normal = -0.5 * (torch.linalg.slogdet(covariance)[1] + fit + len(targets) * math.log(2 * math.pi))
    return normal - 0.5 * sum(open_rows) - sum(noises)


def at(model, vector):
    start = 0
    with torch.no_grad():
        for own in (own for name, own in sorted(model.theta().items()) if name != WIDTHS):
            own.copy_(vector[start : start + own.numel()].view_as(own))
            start += own.numel()


def theta_of(model):
    return flattened(tuple(own.detach() for name, own in sorted(model.theta().items()) if name != WIDTHS)).clone()


def expanded(sites, q_global):
    """F to second order from the sums that sites would send."""
    return expansion(add([site.derivatives(q_global) for site in sites]))


def test_the_bound_of_low_rank_is_that_of_a_dense_pooled_gp(problem):
    """With the deviation on all rows of a site, UᵀU is K_L up to the jitter of its own K_zz."""
    model, sites = problem
    offsets = torch.tensor([[0.3, -0.5, 0.1], [-0.4, 0.2, 0.6], [0.0, 1.1, -0.7]], dtype=torch.float64)
    model.jitter = 1e-12
    for site in sites:
        site.dense = False
    with torch.no_grad():
        sums = total([site.sums(own) for site, own in zip(sites, offsets, strict=True)])
        expected = dense_bound(model, sites, offsets)
    assert float(bound(sums)) == pytest.approx(float(expected), abs=1e-8)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "low rank"])
def test_a_target_without_noise_has_a_bound_with_derivatives(problem, dense):
    """Noise has a floor: rows that nearly repeat each other have a covariance with a Cholesky factor."""
    model, _ = problem
    features = torch.linspace(-2, 2, 200, dtype=torch.float64)[:, None]
    site = SmoothDeviation(model, features, torch.sin(2 * features[:, 0]))
    site.dense = dense
    found = []
    for log_noise in (-60.0, -80.0):
        with torch.no_grad():
            model.log_noise.fill_(log_noise)
        found.append(bound(site.sums(torch.zeros(3, dtype=torch.float64))))
        assert all(torch.isfinite(slope).all() for slope in torch.autograd.grad(found[-1], [*model.theta().values()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)
    assert float(model.likelihood.noise) > LEAST_NOISE  # at a new site too


def settled(sites):
    """F at the θ of the model, once q(Z_G) and the sites' modes agree."""
    q_global = initial_global(6, scale=1.0, triangular=True)
    for _ in range(8):
        found = expanded(sites, q_global)
        q_global = found.q_global
    return found


def test_gradient_and_hessian_are_those_of_the_dense_bound(problem):
    """Where q(Z_G) has settled: those of F(θ, z(θ)) with z at the mode of J at that q, by central differences.

    Along one line through θ: the gradient by those of the dense bound, the Hessian by those of the gradient.
    """
    model, sites = problem
    found = settled(sites)
    start, h = theta_of(model), 1e-4
    along = torch.randn(len(start), generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def value(step):
        at(model, start + step * along)
        with torch.enable_grad():
            offsets = torch.stack([site.mode(found.q_global)[0] for site in sites])
        return float(dense_bound(model, sites, offsets))

    def gradient(step):
        at(model, start + step * along)
        return expanded(sites, found.q_global).gradient

    with torch.no_grad():
        assert found.value == pytest.approx(value(0.0), abs=1e-8)
        slope = (value(h) - value(-h)) / (2 * h)
    assert float(found.gradient @ along) == pytest.approx(slope, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(found.hessian @ along, (gradient(h) - gradient(-h)) / (2 * h), rtol=1e-4, atol=1e-4)


def test_blocks_of_a_covariance_have_the_derivatives_of_the_whole(problem, monkeypatch):
    """Blocks of two rows, and of four, whose last has fewer; and q(Z_G) whose mean is not zero."""
    _, sites = problem
    q_global = expanded(sites, initial_global(6, scale=1.0, triangular=True)).q_global
    whole = sites[0].derivatives(q_global)
    for rows in (2, 4):
        monkeypatch.setattr(newton, "BLOCK", rows * len(sites[0].targets))
        blocks = sites[0].derivatives(q_global)
        for name in ("slopes", "curvature", "squares", "known"):
            np.testing.assert_allclose(getattr(blocks, name), getattr(whole, name), rtol=1e-8, atol=1e-9)


def test_the_curvature_of_a_shape_is_that_of_its_expected_log_density(problem):
    """H by second differences of J."""
    _, sites = problem
    q_global = expanded(sites, initial_global(6, scale=1.0, triangular=True)).q_global
    offset, curvature = sites[0].mode(q_global)
    steps = 1e-3 * torch.eye(3).double()

    def value(move):
        return float(sites[0].sums(offset + move).expected(q_global).detach())

    rows = [[value(a + b) - value(a - b) - value(b - a) + value(-a - b) for a in steps] for b in steps]
    torch.testing.assert_close(curvature, torch.tensor(rows, dtype=torch.float64) / -4e-6, rtol=1e-5, atol=1e-5)
    found = sites[0].derivatives(q_global)
    np.testing.assert_allclose(found.squares, offset.detach().square(), rtol=1e-9)
    known = 1 - torch.linalg.solve(curvature, torch.eye(3).double()).diagonal()
    np.testing.assert_allclose(found.known, known, rtol=1e-7, atol=1e-7)


def test_a_mixture_is_that_of_a_fine_grid(problem):
    """Its shares sum to one; mean and spread of z_k are roughly those of exp J_k on a grid: there are 27 nodes."""
    _, sites = problem
    q_global = expanded(sites, initial_global(6, scale=1.0, triangular=True)).q_global
    grid = torch.cartesian_prod(*[torch.linspace(-3.6, 3.6, 6, dtype=torch.float64)] * 3)
    offsets, shares = sites[0].mixture(q_global)
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-12)
    with torch.no_grad():
        exact = torch.stack([sites[0].sums(z).expected(q_global) for z in grid]).softmax(0)
    torch.testing.assert_close(shares @ offsets, exact @ grid, rtol=0, atol=0.1)
    torch.testing.assert_close(shares @ offsets.square(), exact @ grid.square(), rtol=0.15, atol=0.0)


def test_a_newton_step_ends_at_the_top_of_a_quadratic_unless_the_radius_is_smaller():
    """f = bᵀx − ½ xᵀAx with eigenvalues of A above 1; its rise is ½ bᵀA⁻¹b."""
    a, b = torch.tensor([[3.0, 1.0], [1.0, 2.0]]).double(), torch.tensor([1.0, -2.0]).double()
    step, rise = newton_step(b, -a, math.inf)
    torch.testing.assert_close(step, torch.linalg.solve(a, b))
    assert rise == pytest.approx(float(0.5 * b @ torch.linalg.solve(a, b)))
    short, less = newton_step(b, -a, 0.1)
    torch.testing.assert_close(short, 0.1 * step / step.abs().max())
    assert less == pytest.approx(float(b @ short - 0.5 * short @ a @ short))


def test_what_rows_say_of_inducing_values_is_transported_exactly():
    """Rows that see u = L v alone, y = Hᵀu + ε, say the same of u whatever L is; so do rows of a linear term."""
    generator = torch.Generator().manual_seed(1)
    rows, y = torch.randn(4, 9, generator=generator).double(), torch.randn(9, generator=generator).double()
    factors = [torch.linalg.cholesky(torch.eye(3).double() + torch.full((3, 3), own)) for own in (0.2, 1.7)]
    weights = (torch.cat([factor.mT @ rows[:3], rows[3:]]) for factor in factors)
    found = [(own @ own.mT, own @ y) for own in weights]
    torch.testing.assert_close(transported(*found[0], *factors), found[1], rtol=1e-12, atol=1e-12)


def test_matern_kernels_have_second_derivatives_between_few_rows():
    """``torch.cdist`` has none up to 25 rows; gradient and curvature along a line are those of differences."""
    generator, section = torch.Generator().manual_seed(3), ModelSection(kernel="matern32")
    x, y = (torch.randn(own, generator=generator, dtype=torch.float64) for own in ((6, 2), (6,)))
    points = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    model = HierarchicalModel(section, points, widths=ALIKE)
    site, q_global = SmoothDeviation(model, x, y), initial_global(model.global_size, scale=0.7, triangular=True)
    start, nothing = theta_of(model), torch.zeros(3, dtype=torch.float64)
    along = torch.randn(len(start), generator=generator, dtype=torch.float64)

    def value(step):
        at(model, start + step * along)
        with torch.no_grad():
            return float(site.sums(nothing).expected(q_global))

    h, curvature = 1e-3, torch.tensor(site.derivatives(q_global).curvature)
    second = (value(h) - 2 * value(0.0) + value(-h)) / h**2
    assert float(along @ curvature @ along) == pytest.approx(second, rel=1e-4)


INDUCING = torch.linspace(0, 1, 6, dtype=torch.float64)


def theta(*, sure=3):
    """Hyperparameters of no particular kind; ``sure``: the one roughness."""
    draw = torch.Generator().manual_seed(1)
    first = rough.first_theta().items()
    own = {name: at + 0.3 * torch.randn(at.shape, generator=draw, dtype=torch.float64) for name, at in first}
    own["noise"] = torch.tensor([math.log(0.1)], dtype=torch.float64)
    if sure is not None:
        own["roughness"] = torch.zeros(len(rough.ROUGHNESS), dtype=torch.float64)
        own["roughness"][sure] = 500.0  # a logit that leaves no other choice
    return own


def units():
    draw, found = np.random.default_rng(4), []
    for rows, gain in ((7, 1.0), (5, 1.3), (6, 0.8)):
        x = np.sort(draw.uniform(0.02, 0.98, rows))
        y = gain * np.sin(4 * x) + 0.1 * draw.standard_normal(rows)
        found.append(rough.RoughDeviation(torch.from_numpy(x), torch.from_numpy(y), INDUCING, {}))
    return found


def at_rest(every, own, sweeps=60):
    """The fixed point of q(u) and the weights of roughness at a θ."""
    q = initial_global(len(INDUCING), scale=1.0, triangular=True)
    for _ in range(sweeps):
        sums = total([replace(unit, theta=own).roughness_sums().sums(q) for unit in every])
        q = posterior(sums.precision, sums.shift)[0]
    return sums, q


def matern(a, b, lengthscale):
    r = np.sqrt(3) * np.abs(a[:, None] - b) / lengthscale
    return (1 + r) * np.exp(-r)


def dense(every, own, chosen, more=None):
    """Covariance of all rows, and of more rows of the first unit, without one line of the code under test."""
    h = {name: np.exp(float(value[0])) for name, value in own.items() if name != "roughness"}
    xs = [unit.x.numpy() for unit in every] + ([] if more is None else [more])
    owner = np.repeat([*range(len(every)), 0][: len(xs)], [len(x) for x in xs])
    x, z = np.concatenate(xs), INDUCING.numpy()
    across = h["amplitude"] * matern(x, z, h["lengthscale"])
    trend = across @ np.linalg.solve(matern(z, z, h["lengthscale"]) + 1e-8 * np.eye(len(z)), across.T)
    walk = np.array([rough.ROUGHNESS[k] for k in chosen])[owner] ** 2
    smooth = h["spread"] ** 2 * matern(x, x, h["spread_lengthscale"])
    deviation = smooth + h["level"] ** 2 + h["slope"] ** 2 * np.outer(x, x) + walk * np.minimum(x[:, None], x)
    return trend + deviation * (owner[:, None] == owner) + h["noise"] ** 2 * np.eye(len(x))


def test_with_one_roughness_the_bound_is_the_dense_evidence():
    every, own = units(), theta()
    total, _ = at_rest(every, own, sweeps=2)
    y = np.concatenate([unit.y.numpy() for unit in every])
    evidence = multivariate_normal(cov=dense(every, own, (3, 3, 3))).logpdf(y)
    assert float(bound(total)) == pytest.approx(evidence, abs=1e-8)


def test_with_several_the_bound_is_below_the_evidence_and_near_it():
    """The evidence sums over all choices of all units; q(u) ∏ q(h_m) leaves out how they depend on one another."""
    every, own = units(), theta(sure=None)
    total, _ = at_rest(every, own)
    y, log_prior = np.concatenate([unit.y.numpy() for unit in every]), own["roughness"].log_softmax(0).numpy()
    choices = itertools.product(range(len(rough.ROUGHNESS)), repeat=len(every))
    terms = [multivariate_normal(cov=dense(every, own, k)).logpdf(y) + log_prior[list(k)].sum() for k in choices]
    evidence = logsumexp(terms)
    assert evidence - 0.1 < float(bound(total)) < evidence


def test_derivatives_for_one_factorisation_are_those_through_the_factor():
    unit, own, q = units()[0], theta(sure=None), initial_global(len(INDUCING), scale=1.0, triangular=True)
    names = sorted(own)
    at = torch.cat([own[name] for name in names])

    def by_roughness(flat):
        parts = flat.split([len(own[name]) for name in names])
        return replace(unit, theta=dict(zip(names, parts, strict=True))).roughness_sums()

    found = replace(unit, theta=own).derivatives(q)
    slopes = torch.autograd.functional.jacobian(lambda flat: by_roughness(flat).sums(q).flat(), at)
    curvature = torch.autograd.functional.hessian(lambda flat: by_roughness(flat).evidence(q).logsumexp(0), at)
    sums = by_roughness(at).sums(q)
    for name in ("precision", "shift", "constant"):
        np.testing.assert_allclose(getattr(found, name), getattr(sums, name), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.slopes, slopes.mT, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.curvature, curvature, rtol=1e-9, atol=1e-9)


def test_derivatives_are_finite_where_a_roughness_is_out_of_the_question():
    start = initial_global(len(INDUCING), scale=1.0, triangular=True)
    sure = replace(units()[0], theta=theta()).derivatives(start)
    impossible = {**theta(), "roughness": torch.tensor([0.0, 0, 0, 0, -2000], dtype=torch.float64)}
    found = replace(units()[0], theta=impossible).derivatives(start)
    assert all(np.isfinite(own.slopes).all() for own in (sure, found))


def test_prediction_is_the_conditional_of_the_joint():
    every, own, new = units(), theta(), np.array([0.3, 0.7, 0.99])
    mean, variance = replace(every[0], theta=own).predict(torch.from_numpy(new), at_rest(every, own, sweeps=2)[1])
    joint, y = dense(every, own, (3, 3, 3), new), np.concatenate([unit.y.numpy() for unit in every])
    gain = np.linalg.solve(joint[: len(y), : len(y)], joint[: len(y), len(y) :]).T
    np.testing.assert_allclose(mean, gain @ y, rtol=1e-7)
    expected = np.diag(joint)[len(y) :] - np.sum(gain * joint[len(y) :, : len(y)], axis=1)
    np.testing.assert_allclose(variance, expected, rtol=1e-7)


def test_a_unit_is_judged_by_its_first_rows_and_the_others_alone():
    """At each cut the histogram is that of the dense conditional on the other units and the rows before the cut."""
    every, own = units(), theta()
    total, q = at_rest(every, own, sweeps=2)
    found = rough.calibration(replace(every[0], theta=own), q, total.precision, total.shift)
    y, x = np.concatenate([unit.y.numpy() for unit in every]), every[0].x.numpy()
    joint = dense(every, own, (3, 3, 3))
    for c, cut in enumerate(rough.CUTS):
        hidden = np.flatnonzero(x > cut)
        if len(hidden) == 0 or len(x) - len(hidden) < 3:
            assert not found.shares[c].any()
            continue
        seen = np.setdiff1d(np.arange(len(y)), hidden)
        gain = np.linalg.solve(joint[np.ix_(seen, seen)], joint[np.ix_(seen, hidden)]).T
        sd = np.sqrt(np.diag(joint)[hidden] - np.sum(gain * joint[np.ix_(hidden, seen)], axis=1))
        z = np.abs(y[hidden] - gain @ y[seen]) / sd
        expected = np.histogram(z, [-1.0, *rough.EDGES, np.inf])[0] / len(hidden)
        np.testing.assert_allclose(found.shares[c], expected, atol=1e-12)


def test_bands_are_widened_by_the_quantile_of_units():
    """Ten thousand units of which .95 are within 3 sd: three over 1.96. Few units: Student's t, and nobody: 1."""
    shares = np.zeros((len(rough.CUTS), len(rough.EDGES) + 1))
    shares[0, np.searchsorted(rough.EDGES, [1.0, 3.0, 9.0])] = 5000, 4600, 400
    shares[1, 0] = 4.0
    by = rough.factors(Calibration(shares, np.ones(len(rough.CUTS))))
    assert by[0] == pytest.approx(3 / 1.96, rel=0.03)
    assert by[1] == pytest.approx(2.776 / 1.96, rel=1e-3)
    assert (by[2:] == 1).all()
    x = np.array([0.1, 0.19, 0.21, 0.9])
    np.testing.assert_allclose(rough.widened(np.ones(4), x, 0.2, by) ** 0.5, [1, 1, by[1], by[1]])


def series(seed=0):
    """Six units, one curve, a random walk and a level of their own; the first is masked beyond the middle."""
    draw, t = np.random.default_rng(seed), np.linspace(0, 10, 25)[1:]
    frames = []
    for unit in "abcdef":
        own = 0.1 * draw.standard_normal() + np.cumsum(0.04 * draw.standard_normal(len(t)))
        y = 1 + np.sin(0.4 * t) + own + 0.02 * draw.standard_normal(len(t))
        split = np.where((unit == "a") & (t > 5), "test", "train")
        frames.append(pd.DataFrame({"t": t, "unit": unit, "y": y, "split": split}))
    return pd.concat(frames)


ROUGH = {"method": "hierarchical-gp", "hierarchical__deviation": "rough", "round_timeout": 60.0}
ROUGH |= {"model__num_inducing": 6, "num_server_rounds": 5}


def test_a_run_covers_what_it_hid_and_a_new_unit_joins(tmp_path):
    frame = series()
    folder = run_of_units(tmp_path, frame.assign(dew=1.0), features="-dew", **ROUGH)
    told = pd.read_csv(folder / "predictions.csv")
    assert read_run(folder).posterior is None
    assert "in Python, `fedgp_flower.run.predict.Predictor.at_site(run.path" in read_run(folder).why_no_posterior
    assert (np.abs(told["mean"] - told["target"]) < 1.96 * told["sd"]).mean() > 0.8
    assert np.sqrt(np.mean((told["mean"] - told["target"]) ** 2)) < 0.3
    details = pd.read_json(folder / "metrics.json", typ="series")["method_details"]
    assert max(details["widened"].values()) > 1
    [figure] = [panel.body for panel in panels(read_run(folder)) if panel.title == "Deviations"]
    assert [own.get_text() for own in figure.axes[-1].get_legend().get_texts()] == ["site a"]
    again = Predictor.at_site(folder, "a").predict(told.rename(columns={"input.t": "t"}))
    np.testing.assert_allclose(again["sd"], told["sd"], rtol=1e-9)
    frame[frame["unit"] == "c"].iloc[:9][["t", "y"]].to_csv(tmp_path / "new.csv", index=False)
    joined = Predictor.joined(folder, "new", tmp_path / "new.csv").predict(frame[frame["unit"] == "c"])
    assert np.abs(joined["mean"].to_numpy() - frame.loc[frame["unit"] == "c", "y"].to_numpy()).max() < 0.6
    frame[frame["unit"].isin(["b", "c"])].to_csv(tmp_path / "two.csv", index=False)
    with pytest.raises(DataError, match=r"two\.csv: the column `unit` names 2 sites; give the rows of one"):
        Predictor.joined(folder, "two", tmp_path / "two.csv")


def test_units_whose_names_are_numbers_are_not_taken_for_ids(tmp_path):
    """Simulated sites have the ids 0, 1, …; unit 2 had the curve of unit 3, whose id is 2."""
    frame, number = series(), dict(zip("abcdef", "312456", strict=True))
    folder = run_of_units(tmp_path, frame.assign(unit=frame["unit"].map(number)), **ROUGH | {"num_server_rounds": 1})
    told = pd.read_csv(folder / "predictions.csv", dtype={"site": str, "label": str})
    assert [set(told["site"]), set(told["label"])] == [{"2"}, {"3"}]
    assert {unit: Predictor.at_site(folder, unit).site.label for unit in "123456"} == {unit: unit for unit in "123456"}
    every, curve = Predictor.of_all(folder), told.rename(columns={"input.t": "t"})
    assert {unit: predictor.site.label for unit, predictor in every.items()} == {unit: unit for unit in "123456"}
    np.testing.assert_allclose(every["3"].predict(curve)["mean"], told["mean"], rtol=1e-9)
    assert Predictor.at_site(folder, "0").site.label == "1"  # an id that is no name
    with pytest.raises(RunError, match=r"'9' is not a simulated site .* whose sites are .*2"):
        Predictor.at_site(folder, "9")


def test_a_broken_unit_is_named_and_changes_no_other_unit(tmp_path):
    """Units share noise and scale: one of noise made errors of the others nine times as large, one in mV a thousand."""
    frame, few = series(), {"model__num_inducing": 4, "num_server_rounds": 2}
    broken, noise = frame["unit"] == "e", 5 * np.random.default_rng(1).normal(size=len(frame))
    faults = {"scaled": 1000 * frame["y"], "noise": noise}
    tables = {name: frame.assign(y=frame["y"].mask(broken, values)) for name, values in faults.items()}
    found = {}
    for name, table in {"without": frame[~broken], **tables}.items():
        (tmp_path / name).mkdir()
        found[name] = read_run(run_of_units(tmp_path / name, table, **ROUGH | few)).metrics
    for name in faults:
        assert found[name].test["crps"] < 1.25 * found["without"].test["crps"]
        [named] = [told for told in found[name].warnings if "contradicts" in told]
        assert named.startswith("site e contradicts the others: its rows are")


def test_a_unit_with_few_rows_or_among_unlike_units_is_not_broken():
    """Two rows ten nats below the others, or distances that all units have, are no fault; a unit returns at half."""

    def left_out(gaps, rows, before=()):
        none, empty = np.zeros(0), np.zeros((0, 0))
        shares = {
            str(k): ExpansionShare(
                np.zeros((1, 1)), np.zeros(1), np.array(-gap * count), empty, empty, count, none, none
            )
            for k, (gap, count) in enumerate(zip(gaps, map(np.array, rows), strict=True))
        }
        asking = without_broken(Summed(add(shares.values()), tuple(shares), parts=shares), before)
        return answered_by(asking, lambda _: None)[1]

    many = np.full(5, 40.0)
    assert left_out([0.0, 0.1, 0.2, 0.3, 6.0], many) == ("4",)
    assert left_out([0.0, 0.1, 0.2, 0.3, 6.0], np.array([40.0, 40, 40, 40, 2])) == ()
    assert left_out([0.0, 1.0, 2.0, 3.0, 8.0], many) == ()
    assert left_out([0.0, 0.1, 0.2, 0.3, 4.0], many) == ()
    assert left_out([0.0, 0.1, 0.2, 0.3, 4.0], many, before=("4",)) == ("4",)


def test_units_calibrate_their_bands_after_the_last_round_of_start(tmp_path):
    three = series().query("unit < 'd'").groupby("unit")
    nodes = csv_nodes(tmp_path, {unit: own[["t", "y"]] for unit, own in three})
    flat = configured(**ROUGH | {"model__num_inducing": 4})
    strategy = HierarchicalGP.from_config(parse_config(flat), Recorder())
    strategy.start(FaultyGrid(flat, nodes), num_rounds=1)
    assert strategy.current.factors is not None


def test_what_rough_deviations_cannot_do_is_refused(tmp_path):
    with pytest.raises(RunError, match="needs one input, but there are 2"):
        run_of_units(tmp_path, series().assign(more=lambda own: own["y"] + np.arange(len(own)) % 7), **ROUGH)


ROWS = (1, 2, 3, 5, 30, 40)


def table():
    draw, x = np.random.default_rng(0), np.linspace(0, 1, 40)
    frames = []
    for number, rows in enumerate(ROWS):
        y = (1 + 0.1 * number) * np.sin(4 * x) + 0.05 * draw.standard_normal(len(x))
        split = np.where(np.arange(len(x)) < rows, "train", "test")
        frames.append(pd.DataFrame({"t": x, "unit": f"u{number}", "y": y, "split": split}))
    return pd.concat(frames)


@pytest.mark.parametrize("method", ["rough", "fedmgp exact", "fedmgp"])
def test_units_of_any_size_take_part(method, tmp_path):
    """Noise that a unit fits to one row is none: its held-out rows then had a negative log density of 80 000."""
    keys = METHODS[method] | {"model__num_inducing": 8, "num_server_rounds": {"fedmgp": 2}.get(method, 3)}
    found = read_run(run_of_units(tmp_path, table(), **keys)).metrics
    assert len(found.per_site) == sum(rows < 40 for rows in ROWS)
    assert found.data["sites"] == len(ROWS)
    assert max(site["nll"] for site in found.per_site) < 4.0
