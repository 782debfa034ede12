"""The hierarchical GP as a federation runs it, and in closed form against dense algebra."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, csv_nodes, run, waves
from structured_problems import gp_sites, shaped_gp

from fedgp_flower.messages import add
from fedgp_flower.methods.family import GlobalPosterior, initial_global, on_the_wire
from fedgp_flower.methods.hierarchical_gp import smooth
from fedgp_flower.methods.hierarchical_gp.newton import Sums, expansion, flattened, newton_step, transported
from fedgp_flower.methods.hierarchical_gp.smooth import WIDTHS, SmoothDeviation, inducing_factor
from fedgp_flower.methods.sfvi.gp import HierarchicalModel, linear_terms
from fedgp_flower.options import ModelSection
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from strategies.hierarchical_gp import USUAL_SITES, first_state, one_round, widened
from strategies.server.questions import Roster, drive

POINTS = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
ALIKE = (1e-9, 1e-9, 1e-9)
"""Widths with which all sites have one shape."""


def tiny(**changes):
    return configured(**{"method": "hierarchical-gp", "num_server_rounds": 30, "model__num_inducing": 4, **changes})


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    tables = {site: waves(20, seed) for seed, site in enumerate("abc")}
    return csv_nodes(tmp_path_factory.mktemp("three"), tables)


class Units:
    """A site with several units, each with a deviation and a noise of its own; it sends their sum."""

    def __init__(self, model, units):
        self.model, self.units = model, units

    def expansion(self, request):
        """As the client does it."""
        self.model.load_theta(request.values)
        q_global = GlobalPosterior.of(request.values)
        return add([unit.derivatives(q_global) for unit in self.units])


def trajectory(sizes, rounds, **keys):
    """The model, the states of some rounds, and four units dealt to sites of so many."""
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


def test_any_partition_of_units_takes_the_same_steps():
    _, one, _ = trajectory((4,), 4)
    _, other, _ = trajectory((1, 3), 3)
    for before, after in zip(one, other, strict=False):
        assert after.trial == pytest.approx(before.trial, rel=1e-9, abs=1e-9)
    assert one[-1].value > one[1].value + 1


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
    _, states, _ = trajectory((4,), 1)
    [(name, now)], squares = states[-1].widths.items(), np.array([6.0, 0.4, 1.0])
    first = now + np.array([0.2, -0.1, 0.0])
    variances = 4 + USUAL_SITES - squares - USUAL_SITES * np.exp(2 * (first - now))  # summed over K = 4 sites
    state = replace(states[-1], rise=0.0, first_widths=first, squares=squares, known=4 - variances)
    assert widened(state) is state
    wider = widened(replace(state, squares=2 * squares))
    assert wider.value is None
    assert (wider.widths[name][1:] > now[1:]).all()
    assert wider.widths[name][0] == now[0]  # that of noise stays
    late = replace(state, squares=2 * squares, rise=2.0)
    assert widened(late) is late


def test_a_run_converges_and_says_so(three):
    recorder = Recorder()
    strategy = run(FaultyGrid(tiny(), three), recorder)
    assert strategy.round < 20
    assert strategy.outcome.metrics["converged"]
    details = strategy.outcome.metrics["method_details"]
    assert details["promised_rise"] < 0.1
    assert set(details["relevance"]) == {"trend", "deviation"}
    values = [row["objective"] for row in recorder.rows]
    assert values[-1] > values[0] + 0.3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: {**own, "precision": -own["precision"]}, "not positive semi-definite"),
        (lambda own: {**own, "count": own["count"] + 1}, "rows from a site with"),
        (lambda own: {**own, "precision": 1e9 * own["precision"]}, "its precision per row is"),
    ],
    ids=["indefinite", "other rows", "huge"],
)
def test_sums_that_no_rows_have_are_refused(change, reason, three):
    strategy = run(FaultyGrid(tiny(num_server_rounds=1), three, Fault("c", arrays(change), ("train.expansion",))))
    assert any(reason in said for said in blamed(strategy)["c"])
    assert strategy.current.sites == ("a", "b")


def dense_prediction(unit, others, new):
    """Mean and variance of y at new rows of a unit, from the joint covariance of all rows; noise without offset."""
    model = unit.model
    parts = [*(own.features for own in (*others, unit)), new]
    every, size, last = torch.cat(parts), sum(map(len, parts)) - len(new), len(others)
    owner = torch.cat([torch.full((len(part),), min(k, last)) for k, part in enumerate(parts)])
    shared, left_over = model.shared(every)
    deviation = unit._covariance(every, every, torch.ones(3).double())
    covariance, noise = shared.mT @ shared + deviation * (owner[:, None] == owner), model.log_noise.exp()
    prior = covariance[:size, :size] + noise * torch.eye(size, dtype=torch.float64)
    gain = torch.linalg.solve(prior, covariance[:size, size:]).mT
    left = covariance[size:, size:] - gain @ covariance[:size, size:]
    targets = torch.cat([own.targets for own in (*others, unit)])
    return gain @ targets, left.diagonal() + left_over[size:] + noise


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "low rank"])
def test_a_site_predicts_as_a_dense_pooled_gp(dense):
    model, states, units = trajectory((2, 2), 4, widths=ALIKE, jitter=1e-12)
    model.load_theta(states[-1].parameters)
    new = torch.linspace(-2.5, 2.5, 6, dtype=torch.float64)[:, None]
    for unit in units:
        unit.dense = dense
    with torch.no_grad():
        found, spread = units[1].predict(new, GlobalPosterior.of(states[-1].parameters))
        mean, variance = dense_prediction(units[1], [units[0], *units[2:]], new)
    torch.testing.assert_close((found, spread), (mean, variance), rtol=1e-07, atol=1e-07)


def test_a_prediction_is_the_mixture_over_shapes():
    """By hand: predictions at each node with its shape in the model itself."""
    model, states, units = trajectory((4,), 2)
    model.load_theta(states[-1].parameters)
    q_global, new = GlobalPosterior.of(states[-1].parameters), torch.tensor([[0.3], [2.4]], dtype=torch.float64)
    found, variance = units[0].predict(new, q_global)
    offsets, shares = units[0].mixture(q_global)
    plain, parts = shaped_gp(inputs=POINTS, widths=ALIKE), []
    for offset in offsets:
        root, size, stretch = model.log_width.detach().exp() * offset
        theta = {name: own.detach().clone() for name, own in model.theta().items() if name != WIDTHS}
        theta["theta.log_noise"] += 2 * root
        theta["theta.deviation.log_outputscale"] += 2 * size
        theta["theta.deviation.log_lengthscale"] += stretch
        plain.load_theta({**theta, WIDTHS: plain.log_width.detach()})
        parts.append(SmoothDeviation(plain, units[0].features, units[0].targets).predict(new, q_global))
    means, variances = map(torch.stack, zip(*parts, strict=True))
    torch.testing.assert_close(found, shares @ means, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(variance, shares @ (variances + (means - found).square()), rtol=1e-9, atol=1e-9)


def test_a_run_predicts_at_a_site_for_a_new_one_and_as_a_model_of_gpytorch(tmp_path):
    own = {"partitioner": "blocks", "test_fraction": 0.8, "keep_predictions": True, "num_server_rounds": 3}
    folder = run_in_process(tiny(**own, output_dir=str(tmp_path), name="run"), 3)
    told = pd.read_csv(folder / "predictions.csv", dtype={"site": str}).query("site == '1'")
    frame = told.rename(columns={"input.x": "x"})[["x"]]
    own, new = Predictor.at_site(folder, "1").predict(frame), Predictor.of_run(folder)
    np.testing.assert_allclose(own[["mean", "sd"]], told[["mean", "sd"]], rtol=1e-9)
    assert told["trend"].to_numpy() == pytest.approx(new.predict(frame)["mean"].to_numpy(), rel=1e-9)
    assert (told["trend"] + told["deviation"]).to_numpy() == pytest.approx(told["mean"].to_numpy())
    assert np.abs(own["mean"] - new.predict(frame)["mean"]).max() > 1e-3
    exported = new.distribution(frame, noise=True)
    assert exported.mean.numpy() == pytest.approx(new.predict(frame)["mean"].to_numpy(), rel=1e-8)
    assert exported.stddev.numpy() == pytest.approx(new.predict(frame)["sd"].to_numpy(), rel=1e-6)


FOUR = torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None]


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    model = shaped_gp(inputs=FOUR)
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
        noise, deviation = model.log_noise.exp() * root**2, model.deviation(site.features / stretch).to_dense()
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


def test_the_bound_of_low_rank_is_that_of_a_dense_pooled_gp(problem, monkeypatch):
    """With the deviation on all rows of a site, UᵀU is K_L up to the jitter of its own K_zz."""
    model, sites = problem
    offsets = torch.tensor([[0.3, -0.5, 0.1], [-0.4, 0.2, 0.6], [0.0, 1.1, -0.7]], dtype=torch.float64)
    model.jitter = 1e-12
    for site in sites:
        site.dense = False
    monkeypatch.setattr(smooth, "DENSE_ROWS", 100)
    with torch.no_grad():
        sums = total([site.sums(own) for site, own in zip(sites, offsets, strict=True)])
        expected = dense_bound(model, sites, offsets)
    assert float(bound(sums)) == pytest.approx(float(expected), abs=1e-8)


def settled(sites):
    """F at the θ of the model, once q(Z_G) and the sites' modes agree."""
    q_global = initial_global(6, scale=1.0, triangular=True)
    for _ in range(9):
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
    grid = torch.cartesian_prod(*[torch.linspace(-3.6, 3.6, 7, dtype=torch.float64)] * 3)
    offsets, shares = sites[0].mixture(q_global)
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(shares.min()) > 0
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
