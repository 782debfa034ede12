"""SFVI in closed form against dense algebra, autograd and finite differences, without Flower."""

import math

import numpy as np
import pytest
import torch
from structured_problems import gp_sites, shaped_gp

from fedgp_flower.messages import add
from fedgp_flower.methods.family import initial_global
from fedgp_flower.methods.hierarchical_gp import smooth
from fedgp_flower.methods.hierarchical_gp.newton import Sums, expansion, flattened, newton_step, transported
from fedgp_flower.methods.hierarchical_gp.smooth import WIDTHS, SmoothDeviation
from fedgp_flower.methods.sfvi.gp import HierarchicalModel, linear_terms
from fedgp_flower.options import ModelSection

POINTS = torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None]


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    model = shaped_gp(inputs=POINTS)
    with torch.no_grad():
        model.log_site_slope += torch.tensor([0.2, -0.3], dtype=torch.float64)
    return model, [SmoothDeviation(model, rows.features, rows.targets) for rows in gp_sites(model, generator)]


def total(parts):
    return Sums(
        sum(own.precision for own in parts), sum(own.shift for own in parts), sum(own.constant for own in parts)
    )


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


@pytest.mark.parametrize("rows", [400, 0], ids=["dense", "low rank"])
def test_the_bound_is_that_of_a_dense_pooled_gp(problem, monkeypatch, rows):
    """With the deviation on all rows of a site, UᵀU is K_L up to the jitter of its own K_zz."""
    model, sites = problem
    offsets = torch.tensor([[0.3, -0.5, 0.1], [-0.4, 0.2, 0.6], [0.0, 1.1, -0.7]], dtype=torch.float64)
    if rows == 0:
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
    line = torch.linspace(-3.6, 3.6, 7, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line, line)
    for site in sites[:1]:
        offsets, shares = site.mixture(q_global)
        assert float(shares.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(shares.min()) > 0
        with torch.no_grad():
            exact = torch.stack([site.sums(z).expected(q_global) for z in grid]).softmax(0)
        mean = exact @ grid
        torch.testing.assert_close(shares @ offsets, mean, rtol=0, atol=0.1)
        second, moment = shares @ offsets.square(), exact @ grid.square()
        torch.testing.assert_close(second, moment, rtol=0.15, atol=0.0)


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
    found = []
    for factor in factors:
        weights = torch.cat([factor.mT @ rows[:3], rows[3:]])
        found.append((weights @ weights.mT, weights @ y))
    moved = transported(*found[0], *factors)
    for one, other in zip(moved, found[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_matern_kernels_have_second_derivatives_between_few_rows():
    """``torch.cdist`` has none up to 25 rows; gradient and curvature along a line are those of differences."""
    generator, section = torch.Generator().manual_seed(3), ModelSection(kernel="matern32")
    x, y = (torch.randn(own, generator=generator, dtype=torch.float64) for own in ((6, 2), (6,)))
    points = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    model = HierarchicalModel(section, points, widths=(0.0, 0.0, 0.0))
    site, q_global = SmoothDeviation(model, x, y), initial_global(model.global_size, scale=0.7, triangular=True)
    start, nothing = theta_of(model), torch.zeros(0, dtype=torch.float64)
    along = torch.randn(len(start), generator=generator, dtype=torch.float64)

    def value(step):
        at(model, start + step * along)
        with torch.no_grad():
            return float(site.sums(nothing).expected(q_global))

    h, curvature = 1e-3, torch.tensor(site.derivatives(q_global).curvature)
    second = (value(h) - 2 * value(0.0) + value(-h)) / h**2
    assert float(along @ curvature @ along) == pytest.approx(second, rel=1e-4)
