"""The optimisers: when they stop, what they refuse, the bounds they keep; asking step by step changes nothing."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, rosen, rosen_der

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.optimisers import (
    FREE,
    LBFGS,
    Adam,
    AdamSettings,
    AdamState,
    Evaluation,
    Minimiser,
    Minimum,
    Trial,
    adam,
    maximise,
)
from fedgp_flower.typing import Array

START = np.array([-1.2, 1.0, 0.7])
BOUNDS = [(-2.0, 0.9), (None, None), (-2.0, 2.0)]
METHODS = {"free": LBFGS(1e-10), "bounded": LBFGS(1e-10, bounds=BOUNDS, memory=4), "adam": Adam(0.05)}


def evaluated(point: Array) -> Evaluation:
    return Evaluation(point.copy(), float(rosen(point)), rosen_der(point))


def driven(
    minimiser: Minimiser, history: list[Evaluation], budget: int = 40
) -> tuple[list[Evaluation], Minimum | None]:
    history = list(history)
    while len(history) < budget:
        answer = minimiser.ask(history)
        if isinstance(answer, Minimum):
            return history, answer
        assert answer.used == len(history)
        history.append(evaluated(answer.point))
    return history, None


def workers() -> int:
    gc.collect()
    deadline = time.monotonic() + 5.0
    while (alive := sum(t.name.startswith("L-BFGS-") for t in threading.enumerate())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


@pytest.mark.parametrize("bounds", [None, BOUNDS])
def test_asking_visits_the_points_that_scipy_visits_and_reports_its_end(bounds):
    """Bit for bit: the same routine is run."""
    visited: list[Array] = []

    def function(point: Array) -> tuple[float, Array]:
        visited.append(point.copy())
        return float(rosen(point)), rosen_der(point)

    options = {"maxcor": 20, "maxiter": 10**6, "maxfun": 10**6, "ftol": 1e-10, "gtol": 1e-6}
    expected = minimize(function, START, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    history, end = driven(Minimiser(START, LBFGS(tolerance=1e-10, bounds=bounds)), [], budget=500)
    assert len(history) > 15
    np.testing.assert_array_equal([e.point for e in history], visited)
    assert end is not None
    assert end.converged
    assert expected.success
    np.testing.assert_array_equal(end.point, expected.x)
    assert (end.value, end.evaluations) == (expected.fun, expected.nfev)
    assert workers() == 0


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("cut", [0, 1, 7, 15])
def test_a_new_minimiser_replays_a_history_and_goes_on_identically(method, cut):
    whole, end = driven(Minimiser(START, method), [], budget=25)
    copies = [Evaluation(e.point.copy(), e.value, e.gradient.copy()) for e in whole[:cut]]
    resumed, resumed_end = driven(Minimiser(START, method), copies, budget=25)
    np.testing.assert_array_equal([e.point for e in resumed], [e.point for e in whole])
    assert (end is None) == (resumed_end is None)
    assert workers() == 0


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_earlier_history_starts_anew_and_another_trajectory_is_dropped(method):
    minimiser = Minimiser(START, method)
    whole, _ = driven(minimiser, [], budget=12)
    back = minimiser.ask(whole[:5])
    assert isinstance(back, Trial)
    np.testing.assert_array_equal(back.point, whole[5].point)
    strange = [*whole[:5], evaluated(np.array([9.0, 9.0, 9.0])), *whole[6:]]
    answer = minimiser.ask(strange)
    assert isinstance(answer, Trial)
    assert answer.used == 5
    np.testing.assert_array_equal(answer.point, whole[5].point)


def test_a_thread_lives_between_calls_and_ends_with_its_minimiser():
    minimiser = Minimiser(START, LBFGS())
    history, _ = driven(minimiser, [], budget=3)
    named = {t.name for t in threading.enumerate() if t.name.startswith("L-BFGS-")}
    minimiser.ask(history)
    assert len(named) == 1
    assert {t.name for t in threading.enumerate() if t.name.startswith("L-BFGS-")} == named
    assert all(t.daemon for t in threading.enumerate() if t.name in named)
    minimiser.close()
    assert workers() == 0
    minimiser.ask(history)
    del minimiser
    assert workers() == 0


def test_an_error_inside_scipy_reaches_the_caller_every_time():
    minimiser = Minimiser(START, LBFGS(bounds=[(1.0, 0.0)] * 3))
    for _ in range(2):
        with pytest.raises(ValueError, match="bound"):
            minimiser.ask([])
    assert workers() == 0


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
    np.testing.assert_allclose(
        np.asarray(point), reference.detach().numpy(), rtol=1e-6 if kind is torch.tensor else 1e-12
    )
    assert state.step == 29


def test_adam_state_counts_steps_for_all_parameters_together():
    _, state = AdamState().update({"a": np.ones(2)}, 0.1)
    moves, state = state.update({"b": np.ones(())}, 0.1)
    np.testing.assert_allclose(moves["b"], 0.1 * (0.1 / (1 - 0.9**2)) / np.sqrt(0.001 / (1 - 0.999**2)), rtol=1e-6)
    np.testing.assert_array_equal(state.first["a"], 0.1 * np.ones(2))
    assert all(isinstance(own, np.ndarray) for own in (moves["b"], state.first["b"], state.second["b"]))


def test_adam_stops_when_windows_no_longer_rise():
    x = torch.zeros(1).double().requires_grad_()
    settings = AdamSettings(steps=1000, learning_rate=0.1, window=20)
    trace = adam(lambda: -(x - 1).square().sum(), [x], settings, 10)
    assert trace.reason == "converged"
    assert len(trace.values) < 1000
    assert x.item() == pytest.approx(1.0, abs=1e-2)
    budget = adam(lambda: -(x - 9).square().sum(), [x], AdamSettings(steps=7, learning_rate=1e-3), 10)
    assert (budget.reason, len(budget.values)) == ("budget", 7)


def test_adam_refuses_a_free_energy_that_is_not_finite():
    x = torch.zeros(1).double().requires_grad_()
    with pytest.raises(NumericsError, match="Lower the learning rate"):
        adam(lambda: x.sum().log(), [x], AdamSettings(steps=3), 1)


def test_lbfgs_steps_back_from_inadmissible_points_and_counts_them():
    """Maximise log(1 − x²) + x, which only exists on (−1, 1): x* = √2 − 1. The first trial step from 0 ends at 1."""
    x = torch.tensor([0.0]).double().requires_grad_()

    def objective() -> torch.Tensor:
        if abs(x.item()) >= 1:
            raise NumericsError("outside")
        return (1 - x.square()).log().sum() + x.sum()

    trace = maximise(objective, [x], max_evaluations=60, tolerance=1e-12)
    assert trace.rejected >= 1
    assert trace.evaluations == len(trace.values) - 1 + trace.rejected
    assert x.item() == pytest.approx(2**0.5 - 1, abs=1e-4)
    with torch.no_grad():
        x.fill_(2.0)
    with pytest.raises(NumericsError, match="outside"):
        maximise(objective, [x], max_evaluations=5)


def test_lbfgs_stays_within_bounds():
    """Maximise −|x − 3|² − |y − 3|² with y ≤ 2."""
    x, y = torch.zeros(2).double().requires_grad_(), torch.zeros(3).double().requires_grad_()
    limits = [FREE, (None, 2.0)]
    trace = maximise(
        lambda: -(x - 3).square().sum() - (y - 3).square().sum(), [x, y], max_evaluations=50, bounds=limits
    )
    assert trace.value == pytest.approx(-3.0, abs=1e-6)
    assert x.tolist() == pytest.approx([3.0, 3.0], abs=1e-3)
    assert y.tolist() == pytest.approx([2.0, 2.0, 2.0])
