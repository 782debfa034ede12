"""The optimisers: steps of torch, when they stop, bounds."""

import numpy as np
import pytest
import torch

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.optimisers import FREE, AdamState, adam, maximise


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
    limits = [FREE, (None, 2.0)]
    values = maximise(
        lambda: -(x - 3).square().sum() - (y - 3).square().sum(), [x, y], max_evaluations=50, bounds=limits
    )
    assert values[-1] == pytest.approx(-3.0, abs=1e-6)
    assert x.tolist() == pytest.approx([3.0, 3.0], abs=1e-3)
    assert y.tolist() == pytest.approx([2.0, 2.0, 2.0])
