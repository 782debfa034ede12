"""The optimisers: steps of torch, when they stop, bounds; when a stochastic method has arrived."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.optimisers import FREE, AdamState, adam, maximise
from fedgp_flower.messages import decode, encode
from strategies.server.course import MAX_BATCHES, MAX_PHI, MIN_BATCHES, NEAR, Course, limits


@pytest.mark.parametrize(("kind", "tolerance"), [(np.array, 1e-12), (torch.tensor, 1e-6)], ids=["array", "float32"])
def test_adam_state_takes_the_steps_of_torch(kind, tolerance):
    reference = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([reference], lr=0.05, maximize=True)
    point, state = kind([1.0, -2.0, 0.5]), AdamState()
    for step in range(1, 30):
        gradient = [np.sin(step), step - 10.0, 1e-9]
        reference.grad = torch.tensor(gradient, dtype=torch.float64)
        optimiser.step()
        moves, state = state.update({"x": kind(gradient)}, 0.05)
        point = point + moves["x"]
    np.testing.assert_allclose(np.asarray(point), reference.detach().numpy(), rtol=tolerance)
    assert state.step == 29


def test_adam_stops_when_windows_no_longer_rise():
    x = torch.zeros(1).double().requires_grad_()
    assert len(adam(lambda: -(x - 1).square().sum(), [x], 10, 1000, 0.1)) < 1000
    assert x.item() == pytest.approx(1.0, abs=1e-2)
    assert len(adam(lambda: -(x - 9).square().sum(), [x], 10, 7, 1e-3)) == 7


def test_lbfgs_steps_back_from_inadmissible_points_and_counts_them():
    """Maximise log(1 − x²) + x, which only exists on (−1, 1): x* = √2 − 1. The first trial step from 0 ends at 1."""
    x, calls = torch.tensor([0.0]).double().requires_grad_(), []

    def objective() -> torch.Tensor:
        calls.append(x.item())
        if abs(x.item()) >= 1:
            raise NumericsError("outside")
        return (1 - x.square()).log().sum() + x.sum()

    values = maximise(objective, [x], max_evaluations=60, tolerance=1e-12)
    assert len(calls) > len(values) - 1
    assert x.item() == pytest.approx(2**0.5 - 1, abs=1e-4)
    with torch.no_grad():
        x.fill_(2.0)
    with pytest.raises(NumericsError, match="outside"):
        maximise(objective, [x], max_evaluations=5)


def test_lbfgs_stays_within_bounds():
    """Maximise −|x − 3|² − |y − 3|² with y ≤ 2."""
    x, y = torch.zeros(2).double().requires_grad_(), torch.zeros(3).double().requires_grad_()
    bounds, height = [FREE, (None, 2.0)], lambda: -(x - 3).square().sum() - (y - 3).square().sum()
    values = maximise(height, [x, y], max_evaluations=50, bounds=bounds)
    assert values[-1] == pytest.approx(-3.0, abs=1e-6)
    assert x.tolist() == pytest.approx([3.0, 3.0], abs=1e-3)
    assert y.tolist() == pytest.approx([2.0, 2.0, 2.0])


RUNS, ROUNDS = 100, 1200


def test_the_limit_is_that_of_the_regression_on_the_batch_before() -> None:
    """b_{i+1} = c + φ b_i by least squares; μ and its standard error at φ + (1 + 3φ)/(n − 1)."""
    batches = np.random.default_rng(0).standard_normal((15, 2)).cumsum(0) * 0.1
    limit, error, _ = limits(batches)
    for k, series in enumerate(batches.T):
        (slope, start), residual, *_ = np.polyfit(series[:-1], series[1:], 1, full=True)
        raised = min(max(slope + (1 + 3 * slope) / 14, 0.0), MAX_PHI)
        ends = series[1:].mean(), series[:-1].mean()
        assert start == pytest.approx(ends[0] - slope * ends[1])
        assert limit[k] == pytest.approx(ends[0] + raised / (1 - raised) * (ends[0] - ends[1]))
        assert error[k] == pytest.approx(np.sqrt(residual[0] / 12 / 14) / (1 - raised))


def test_batches_are_means_of_equal_numbers_of_rounds() -> None:
    course, values = Course.begin(1), np.random.default_rng(1).standard_normal((107, 2))
    for value, place in values:
        course = course.after(value, np.array([place]))
    assert [course.size, course.waiting, len(course.batches)] == [4, 3, 26]
    np.testing.assert_allclose(course.batches, values[:104].reshape(26, 4, 2).mean(1))
    np.testing.assert_allclose(course.answer, values[52:104, 1].mean())
    again = decode(Course, encode(course))
    np.testing.assert_array_equal(again.after(1.0, np.ones(1)).batches, course.after(1.0, np.ones(1)).batches)
    assert replace(again, batches=again.batches[: MIN_BATCHES - 1]).distances(np.ones(1)) is None
    assert MAX_BATCHES == 2 * MIN_BATCHES


@pytest.mark.parametrize(("rate", "far"), [(0.0, False), (1e-3, True), (1.0, True)])
def test_a_trend_is_no_limit(rate: float, far: bool) -> None:
    course, noise = Course.begin(1), np.random.default_rng(2).standard_normal((800, 2))
    for number, (value, place) in enumerate(0.1 * noise):
        course = course.after(1e-3 * value, np.array([place + rate * number]))
    value, place = course.distances(np.ones(1))
    assert (place > NEAR) == far
    assert value < NEAR


@pytest.mark.parametrize(("decay", "resolved"), [(0.7, True), (0.98, False)])
def test_a_forecast_is_told_only_where_the_limit_is_known(decay: float, resolved: bool) -> None:
    """The bound −decay^round: its limit is reached, or 100 rounds show a trend, to gain .13 that looks like 1.7."""
    course = Course.begin(0)
    for number in range(100):
        course = course.after(-(decay**number), np.zeros(0))
    assert (course.forecast is not None) == resolved
    assert course.forecast == (pytest.approx(0.0, abs=1e-3) if resolved else None)


def drawn(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A random precision with correlations of condition 30, and its covariance; scales from .03 to 3."""
    basis, variances = np.linalg.qr(generator.standard_normal((size, size)))[0], np.logspace(0, -1.5, size)
    shape = basis * variances @ basis.T
    scale = np.exp(generator.uniform(np.log(0.03), np.log(3), size)) / np.sqrt(np.diag(shape))
    return basis / variances @ basis.T / scale[:, None] / scale, shape * scale[:, None] * scale


def test_what_has_arrived_is_at_the_optimum() -> None:
    """Adam on F(x) = −½ xᵀHx, gradients with noise of covariance H: |z| ≤ .3 for 95 % of the runs that arrive."""
    generator, size = np.random.default_rng(3), 4
    precisions, covariances = map(np.array, zip(*(drawn(generator, size) for _ in range(RUNS)), strict=True))
    factor, sd = np.linalg.cholesky(precisions), np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    x = sd * generator.standard_normal((RUNS, size)) * 20 ** generator.uniform(-1, 1, (RUNS, size))
    adam, course, found = AdamState[np.ndarray](), Course.begin(x.size), np.full(RUNS, np.nan)
    for _ in range(ROUNDS):
        noise = generator.standard_normal((RUNS, size))
        slope = (factor @ noise[..., None] - precisions @ x[..., None])[..., 0]
        moves, adam = adam.update({"x": slope}, 0.05)
        x = x + moves["x"]
        course = course.after(0.0, x.ravel())
        if course.waiting == 0 and (distances := course.distances(sd.ravel())) is not None:
            near = distances[1:].reshape(RUNS, size).max(1) <= NEAR
            there = np.abs(course.answer.reshape(RUNS, size) / sd).max(1)
            found = np.where(near & np.isnan(found), there, found)
    assert np.isfinite(found).mean() >= 0.5
    assert np.mean(found[np.isfinite(found)] <= NEAR) >= 0.95
