"""When a noisy bound has stopped rising, on made-up series."""

import numpy as np
import pytest

from strategies.server.algorithm import LEAST, Course, rise

SERIES, ROUNDS = 100, 60


def ends(trend: np.ndarray) -> np.ndarray:
    """Rounds at which series with unit noise around a trend count as flat; nan: not at all."""
    noise = np.random.default_rng(0).standard_normal((SERIES, len(trend)))
    found = np.full(SERIES, np.nan)
    for series in range(SERIES):
        course = Course()
        for after, value in enumerate(trend + noise[series], 1):
            course.add(float(value), after)
        if course.flat_from is not None:
            found[series] = course.flat_from
    return found


@pytest.mark.parametrize("slope", [0.2, 0.5, 2.0])
def test_a_rising_series_is_rarely_taken_for_flat(slope: float) -> None:
    """A rise of two deviations in ten rounds, and faster ones: at most one series in twenty in sixty rounds."""
    assert np.isfinite(ends(slope * np.arange(ROUNDS))).mean() <= 0.05


def test_a_series_that_bends_is_flat_only_after_the_bend() -> None:
    """1000 (1 − e^{−t/10}) has less than one deviation to rise from t = 69 on."""
    found = ends(1000 * (1 - np.exp(-np.arange(300) / 10)))
    assert np.isfinite(found).all()
    assert np.quantile(found, 0.05) > 69
    assert np.median(found) < 200


def test_a_flat_or_falling_series_ends_soon() -> None:
    for slope in (0.0, -0.3):
        found = ends(slope * np.arange(ROUNDS))
        assert np.isfinite(found).all()
        assert np.median(found) <= 3 * LEAST


def test_a_line_is_that_of_least_squares() -> None:
    values = np.random.default_rng(1).standard_normal(30)
    found = rise(values)
    (slope, start), cov = np.polyfit(np.arange(15), values[15:], 1, cov=True)
    assert found is not None
    assert found.slope == pytest.approx(slope)
    assert found.error == pytest.approx(np.sqrt(cov[0, 0]))
    assert found.noise == pytest.approx(np.sqrt(((values[15:] - start - slope * np.arange(15)) ** 2).sum() / 13))
    assert rise(values[: LEAST - 1]) is None
