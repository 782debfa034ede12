"""What SFVI's server does with messages: Adam, its rate, and absent sites."""

from __future__ import annotations

import numpy as np
import pytest

from strategies import sfvi_state


def test_learning_rate_is_constant_then_falls_to_its_final_fraction():
    rates = [sfvi_state.learning_rate(step, steps=100, initial=0.2) for step in (0, 50, 75, 100)]
    assert rates == pytest.approx([0.2, 0.2, 0.02, 0.002])


def test_first_step_of_adam_has_the_length_of_the_rate():
    state = sfvi_state.start({"q.mean": np.zeros(3), "theta.noise": np.array(1.0)})
    gradient = {"q.mean": np.array([5.0, -0.1, 2.0]), "theta.noise": np.array(-3.0)}
    for step in (1, 2):
        state = sfvi_state.ascend(state, gradient, rate=0.01)
        expected = step * np.array([0.01, -0.01, 0.01])
        np.testing.assert_allclose(state.parameters["q.mean"], expected, rtol=1e-6)
        np.testing.assert_allclose(state.parameters["theta.noise"], 1 - step * 0.01, rtol=1e-6)
    for values in (state.parameters, state.adam.first, state.adam.second, sfvi_state.total(gradient, [gradient])):
        assert all(isinstance(value, np.ndarray) for value in values.values())  # a scalar parameter too


def test_second_moment_of_adam_remembers():
    """After gradients 1 and 3: m = (0.9·0.1 + 0.1·3)/(1 − 0.9²), v = (0.999·0.001 + 0.001·9)/(1 − 0.999²)."""
    state = sfvi_state.start({"q.mean": np.zeros(1)})
    state = sfvi_state.ascend(state, {"q.mean": np.array([1.0])}, rate=1.0)
    before = state.parameters["q.mean"]
    state = sfvi_state.ascend(state, {"q.mean": np.array([3.0])}, rate=1.0)
    expected = (0.39 / 0.19) / np.sqrt(0.009999 / (1 - 0.999**2))
    np.testing.assert_allclose(state.parameters["q.mean"] - before, expected, rtol=1e-6)


def test_missing_sites_are_made_up_for_by_scale():
    server, message = {"q.mean": np.ones(2)}, {"q.mean": np.array([1.0, 2.0]), "theta.noise": np.array(0.5)}
    found = sfvi_state.total(server, [message, message], scale=1.5)
    np.testing.assert_allclose(found["q.mean"], [4.0, 7.0])
    np.testing.assert_allclose(found["theta.noise"], 1.5)
