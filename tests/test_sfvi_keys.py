"""Keys of `sfvi.*` that change what a site keeps or what is shared: each is seen to do so in a federated run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, blamed, csv_nodes, parameters, run, waves
from scipy.special import ndtr
from test_sfvi import memories, tiny

from fedgp_flower.methods.sfvi.memory import Memory


def memory_of(**keys: Any) -> Memory:
    """What a site keeps after two rounds."""
    grid = FaultyGrid(tiny(num_server_rounds=2, **keys), 2)
    strategy = run(grid)
    assert not blamed(strategy)
    return memories(grid)["0"]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, 2),
        ({"sfvi__own_steps": 3}, 6),
        ({"method": "sfvi-avg", "sfvi__local_steps": 3}, 6),
        ({"method": "sfvi-avg", "sfvi__local_steps": 3, "sfvi__keep_moments": False}, 3),
    ],
    ids=["one", "own-steps", "kept", "anew"],
)
def test_steps_and_moments(keys: dict[str, Any], steps: int) -> None:
    assert memory_of(**keys).steps == steps


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_family_of_local_latents(coupled: bool, structure: str) -> None:
    local = memory_of(sfvi__coupling=coupled, sfvi__local_structure=structure).local
    assert set(local) == {"mean", "log_scale"} | ({"coupling"} if coupled else set()) | (
        {"lower"} if structure == "full" else set()
    )


def test_own_noise_and_own_inputs_are_latents_of_the_site() -> None:
    """Four values of the deviation, intercept and slope, noise offset."""
    assert memory_of().local["mean"].shape == (1, 4 + 2 + 1)
    assert memory_of(sfvi__site_noise=0.0).local["mean"].shape == (1, 4 + 2)
    assert memory_of(sfvi__site_inducing=0).local["mean"].shape == (1, 1)


def test_initial_scales_and_variances() -> None:
    strategy = run(FaultyGrid(tiny(num_server_rounds=0, sfvi__deviation=0.2, sfvi__site_slope=0.4), 2))
    assert np.exp(parameters(strategy)["theta.log_site_slope"]) == pytest.approx([0.4, 0.4])
    assert float(np.exp(parameters(strategy)["theta.deviation.log_outputscale"]).item()) == pytest.approx(0.2)
    wide = run(FaultyGrid(tiny(num_server_rounds=0, sfvi__initial_scale=0.7), 2))
    assert np.exp(parameters(wide)["q.log_scale"]) == pytest.approx(np.full(7, 0.7))
    local = np.exp(memory_of(sfvi__initial_local_scale=0.8, sfvi__learning_rate=1e-9).local["log_scale"])
    assert local == pytest.approx(np.full(local.shape, 0.8))


def test_shared_inputs_move_where_they_are_learned() -> None:
    start, end = (run(FaultyGrid(tiny(num_server_rounds=n, sfvi__learn_inputs=True), 2)) for n in (0, 2))
    assert not end.current.shared
    moved = np.abs(parameters(end)["theta.inputs"] - parameters(start)["theta.inputs"])
    assert 0 < moved.max() < 0.1
    assert "theta.inputs" not in parameters(run(FaultyGrid(tiny(num_server_rounds=0), 2)))


def test_shared_inputs_fill_the_box_or_follow_the_rows(tmp_path: Path) -> None:
    """Nearly all rows lie in a corner of the box."""
    frames = {name: waves(80, seed) for seed, name in enumerate("ab")}
    for frame in frames.values():
        frame.loc[4:, ["x1", "x2"]] = 0.02 * frame.loc[4:, ["x1", "x2"]] - 1.5
    nodes = csv_nodes(tmp_path, frames)

    def far(kind: str) -> int:
        flat = tiny(num_server_rounds=0, sfvi__shared_inputs=kind, model__num_inducing=20)
        points = run(FaultyGrid(flat, nodes)).current.shared["inducing.locations"]
        return int((np.abs(points) > 1.5).any(axis=1).sum())

    assert far("box") > 10
    assert far("copula") < 5


def test_classes_with_a_hierarchical_gp(tmp_path: Path) -> None:
    """Two sites whose classes differ in frequency: better than knowing the frequencies of both together."""
    draw, frames = np.random.default_rng(0), {}
    for name, shift in (("a", 0.8), ("b", -0.8)):
        x = draw.uniform(-1.7, 1.7, (120, 2))
        chance = ndtr(2.0 * x[:, 0] + shift)
        y = np.where(draw.uniform(size=120) < chance, "yes", "no")
        frames[name] = pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "y": y})
    flat = tiny(num_server_rounds=25, model__likelihood="bernoulli", sfvi__learning_rate=0.1)
    strategy = run(FaultyGrid(flat, csv_nodes(tmp_path, frames)))
    assert strategy.evaluation["test"]["nll"] < np.log(2) - 0.15
    assert not blamed(strategy)
