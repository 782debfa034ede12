"""Starts of exact rounds: first without smoothing, then released; the bound never falls; several starts; collapse."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_exact_q import grid, signals, start
from test_fedmgp import keys

from fedgp_flower.methods.fedmgp.latents import posterior
from fedgp_flower.methods.fedmgp.options import FedMGPExactOptions
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    UnitParameters,
    moved,
    respond,
    starting_parameters,
    statistics,
)
from fedgp_flower.run.registry import parse_config
from strategies.fedmgp_exact import merge, trial_moves
from strategies.fedmgp_shared import SharedLatents, latents_at


def test_smoothing_is_released_without_a_fall_of_the_bound() -> None:
    """Two functions of two inputs: three rounds at the narrowest R, three that search it."""
    W = grid(2)
    data = {str(m): UnitData.build(x, y, W) for m, (x, y) in enumerate(signals(2))}
    latents = latents_at(W, [1.0, 3.0], 1e-8)
    first = statistics(data["0"], latents, starting_parameters(data["0"], latents, SearchOptions()))
    state = replace(start(W, (1.0, 3.0)), posterior=posterior(first), unsmoothed=3)
    known: dict[str, UnitParameters | None] = dict.fromkeys(data)
    bounds, counts, widths = [], [], []
    for _ in range(6):
        options, moves = SearchOptions(released=not state.unsmoothed), trial_moves(state)
        found = {m: respond(own, state.latents, state.posterior, moves, known[m], options) for m, own in data.items()}
        state = merge(state, {m: answers for m, (_, answers) in found.items()}, moves=moves)
        known = {m: moved(data[m], unit, state.reports[m].move)[1] for m, (unit, _) in found.items()}
        bounds.append(state.bound)
        counts.append(len(moves))
        widths.append(max(float(np.max(own.smoothing / data[m].lower)) for m, own in known.items() if own is not None))
    assert counts == [4] * 3 + [6] * 3
    assert widths[:3] == pytest.approx([1.0] * 3)
    assert max(widths[3:]) > 10
    assert min(np.diff(np.array(bounds, dtype=float))) > -1e-6


@pytest.mark.parametrize(
    ("changes", "inputs", "starts", "unsmoothed"),
    [
        ({}, 1, 1, 0),
        ({}, 2, 1, 10),
        ({"fedmgp__latents": 2, "num_server_rounds": 100}, 1, 3, 10),
        ({"fedmgp__latents": 2, "num_server_rounds": 50}, 1, 2, 10),
        ({"fedmgp__latents": 2, "num_server_rounds": 12}, 2, 1, 6),
        ({"fedmgp__latents": 2, "fedmgp__covariance": "lmc", "num_server_rounds": 12}, 2, 1, 0),
    ],
)
def test_how_many_starts_and_rounds_without_smoothing(
    changes: dict[str, Any], inputs: int, starts: int, unsmoothed: int
) -> None:
    config = parse_config(keys(**{"num_server_rounds": 100, **changes}))
    options = config.options
    assert isinstance(options, FedMGPExactOptions)
    assert options.num_starts(config) == starts
    assert options.unsmoothed(config, inputs) == unsmoothed


@pytest.mark.parametrize(("federated", "alone", "worse"), [(1.0, 0.5, True), (0.5, 1.0, False), (1.0, None, False)])
def test_a_run_that_is_worse_than_each_unit_alone_collapsed(federated: float, alone: float | None, worse: bool) -> None:
    known = None if alone is None else {"rmse": alone}
    seen: Any = SimpleNamespace(evaluation={"test": {"rmse": federated}}, local_only=known)
    assert SharedLatents._worse_than_alone(seen) is worse
