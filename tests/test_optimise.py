"""The optimisers of a visit: when they stop, what they refuse, the bounds they keep."""

import numpy as np
import pytest
import torch

from fedgp_flower.errors import NumericsError
from fedgp_flower.models.optimise import AdamSettings, adam, lbfgs


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
    with pytest.raises(NumericsError, match="learning-rate"):
        adam(lambda: x.sum().log(), [x], AdamSettings(steps=3), 1)


def test_lbfgs_steps_back_from_inadmissible_points_and_counts_them():
    """Maximise log(1 − x²) + x, which only exists on (−1, 1): x* = √2 − 1. The first trial step from 0 ends at 1."""
    x = torch.tensor([0.0]).double().requires_grad_()

    def objective() -> torch.Tensor:
        if abs(x.item()) >= 1:
            raise NumericsError("outside")
        return (1 - x.square()).log().sum() + x.sum()

    trace = lbfgs(objective, [x], max_evaluations=60, tolerance=1e-9)
    assert trace.rejected >= 1
    assert x.item() == pytest.approx(2**0.5 - 1, abs=1e-4)
    with torch.no_grad():
        x.fill_(2.0)
    with pytest.raises(NumericsError, match="outside"):
        lbfgs(objective, [x], max_evaluations=5)


def test_lbfgs_stays_below_upper_bounds():
    """Maximise −|x − 3|² − |y − 3|² with y ≤ 2."""
    x, y = torch.zeros(2).double().requires_grad_(), torch.zeros(3).double().requires_grad_()
    lbfgs(lambda: -(x - 3).square().sum() - (y - 3).square().sum(), [x, y], max_evaluations=50, upper=(np.inf, 2.0))
    assert x.tolist() == pytest.approx([3.0, 3.0], abs=1e-3)
    assert y.tolist() == pytest.approx([2.0, 2.0, 2.0])
