"""Flower's wrappers around every Strategy: they run, or are refused in words."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from faults import FaultyGrid, Recorder, no_waiting
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Result,
)
from schedules import METHODS, keys_of

from fedgp_flower.errors import ConfigError
from fedgp_flower.records import numpy_arrays
from fedgp_flower.run.registry import parse_config, strategy_class
from strategies.server.fedavg import AveragingState


def wrapped(form: str, wrapper: Any, *settings: float) -> tuple[Any, Result]:
    """One round inside a wrapper."""
    flat = keys_of(form, num_server_rounds=1)
    grid = FaultyGrid(flat, 3)
    strategy = strategy_class(parse_config(flat)).from_config(parse_config(flat), Recorder())
    with no_waiting():
        start = strategy.initial_arrays(grid)
        return strategy, wrapper(strategy, *settings, num_sampled_clients=3).start(
            grid, initial_arrays=start, num_rounds=1
        )


GATE = {"sgpr", "fsgp", "pvi", "sfvi-avg"}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form in GATE else pytest.mark.long) for form in METHODS]
)
def test_a_wrapper_runs_or_is_refused_in_words(form: str) -> None:
    if strategy_class(parse_config(keys_of(form))).state_class is not AveragingState:
        with contextlib.suppress(ConfigError):
            wrapped(form, DifferentialPrivacyServerSideFixedClipping, 0.0, 1.0)
        return
    strategy, result = wrapped(form, DifferentialPrivacyServerSideFixedClipping, 0.0, 1.0)
    assert strategy.network.failures == []
    assert result.train_metrics_clientapp[1]
    assert result.evaluate_metrics_clientapp[1]
    assert all(np.isfinite(array).all() for array in numpy_arrays(result.arrays).values())


def test_adaptive_clipping_runs_around_averages() -> None:
    strategy, result = wrapped("fgpr", DifferentialPrivacyServerSideAdaptiveClipping, 0.2)
    assert strategy.network.failures == []
    assert result.train_metrics_clientapp[1]
