"""What a round of SFVI carries: once a site has what does not change, the numbers of the method and little else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, run
from flwr.app import Message, RecordDict

from fedgp_flower.clients.base import Request
from fedgp_flower.clients.standing import FACTS, carried, completed
from strategies.standing import Standing

PREPARED = {"input.mean", "input.scale", "target.mean", "target.scale"}


class Watched(FaultyGrid):
    """Keeps what every message carries, as the site gets it, and the reply's arrays."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.down: list[tuple[str, int, dict[str, np.ndarray]]] = []
        self.up: list[dict[str, np.ndarray]] = []

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        record, config = message.content.array_records["arrays"], message.content.config_records["config"]
        carries = {name: array.numpy() for name, array in record.items()}
        self.down.append((message.metadata.message_type, int(str(config["round"])), carries))
        self.up.append({name: array.numpy() for name, array in reply.content.array_records["arrays"].items()})
        return reply

    def forget(self, site: str) -> None:
        """The site loses its memory and keeps its node id."""
        self.contexts[self.node_of(site)].state = RecordDict()


def classes_csv(folder: Path) -> Path:
    """Three classes, a hundred inputs of which one tells them apart."""
    draw = np.random.default_rng(2)
    label = draw.integers(0, 3, 120)
    x = draw.standard_normal((120, 100))
    x[:, 0] += label
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(100)]).assign(y=label)
    frame.to_csv(folder / "classes.csv", index=False)
    return folder / "classes.csv"


def multinomial(folder: Path, **changes: Any) -> dict[str, Any]:
    """Multinomial regression: no local latents, so that a site that forgets owes nothing but what was sent once."""
    own = {
        "method": "sfvi",
        "dataset": str(classes_csv(folder)),
        "target": "y",
        "standardise": False,
        "sfvi__model": "multinomial",
        "sfvi__classes": 3,
        "sfvi__samples": 2,
        "sfvi__learning_rate": 0.1,
    }
    return configured(**{**own, **changes})


def gaussian_process(structure: str) -> dict[str, Any]:
    """The default model."""
    return configured(method="sfvi", sfvi__site_inducing=4, sfvi__structure=structure)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_a_later_round_carries_the_numbers_of_the_method_and_no_others(structure: str) -> None:
    """θ and η_G down, their gradients up; the closed-form model needs no draws."""
    grid = Watched(gaussian_process(structure), 3)
    strategy = run(grid)
    numbers = sum(array.size for array in strategy.parameters.values())
    assert "inducing.locations" in strategy.predictive()
    for (phase, number, down), up in zip(grid.down, grid.up, strict=True):
        if phase != "train.gradient":
            continue
        first = number == 1
        assert set(down) - set(strategy.parameters) == (PREPARED | {"inducing.locations"} if first else set())
        assert set(up) == set(strategy.parameters)
        assert first or sum(array.nbytes for array in (*down.values(), *up.values())) == 2 * numbers * 8


def test_bytes_of_a_round_keep_to_the_bound(tmp_path: Path) -> None:
    """1.1 · (2 |η_G| + 2 |θ| + S |ε|) · 8 for a site, everything included that crosses the wire."""
    grid = Watched(multinomial(tmp_path), 3)
    strategy = run(grid)
    numbers = sum(array.size for array in strategy.parameters.values())
    draws = 2 * len(strategy.parameters["q.mean"])
    visits = [visit for visit in grid.visits if visit.phase == "train.gradient"]
    later = [visit.down + visit.up for visit in visits if visit.round > 1]
    assert len(later) == 9
    assert max(later) <= 1.1 * (2 * numbers + draws) * 8
    assert min(visit.down + visit.up for visit in visits if visit.round == 1) > max(later)


@pytest.mark.parametrize("every", [0, 1])
def test_a_site_that_forgot_is_told_again_and_nothing_changes(tmp_path: Path, every: int) -> None:
    flat = multinomial(tmp_path, evaluate_every=every)
    calm = run(FaultyGrid(flat, 3))
    grid, recorder = Watched(flat, 3), Recorder()
    recorder.at[2] = lambda: grid.forget("1")
    strategy = run(grid, recorder)
    assert not blamed(strategy)
    for name, array in calm.parameters.items():
        assert np.array_equal(strategy.parameters[name], array), name
    assert strategy.evaluation["test"] == calm.evaluation["test"]
    asked = [(visit.round, visit.site) for visit in grid.visits if visit.phase == "train.gradient"]
    assert {key for key in asked if asked.count(key) > 1} == {(3, "1")}


def test_a_site_that_forgot_is_told_again_for_an_evaluation(tmp_path: Path) -> None:
    """It scores its rows; as it keeps nothing of an evaluation, the next training round tells it once more."""
    flat = multinomial(tmp_path, evaluate_every=2, num_server_rounds=3)
    grid = Watched(flat, 3)
    forgetful = Fault("2", forgetting(grid), ("train.gradient",), range(2, 3))
    grid.faults.append(forgetful)
    strategy = run(grid)
    assert not blamed(strategy)
    assert len(strategy.evaluation["per_site"]) == 3
    evaluated = [visit for visit in grid.visits if visit.phase == "evaluate" and visit.round == 2]
    assert [visit.site for visit in evaluated].count("2") == 2
    asked = [(visit.round, visit.site) for visit in grid.visits if visit.phase == "train.gradient"]
    assert asked.count((3, "2")) == 2


def forgetting(grid: Watched) -> Any:
    """The site loses its memory as soon as it has answered."""

    def change(reply: Message) -> Message:
        grid.forget("2")
        return reply

    return change


def test_a_site_that_claims_to_forget_for_ever_fails(tmp_path: Path) -> None:
    flat = multinomial(tmp_path, num_server_rounds=2)
    grid = FaultyGrid(flat, 3, Fault("1", claiming, ("train.gradient",)))
    strategy = run(grid)
    reasons = blamed(strategy)
    assert set(reasons) == {"1"}
    assert len(reasons["1"]) == 2
    assert all("sent once" in reason for reason in reasons["1"])


def claiming(reply: Message) -> Message:
    """A site that says it lacks what it was sent."""
    reply = arrays(lambda own: {})(reply) or reply
    reply.content.metric_records["metrics"]["lacks"] = 1.0
    return reply


def test_another_run_s_memory_is_not_taken_for_this_one_s() -> None:
    """What a site keeps has a digest: a message that names another is not read with it."""
    kept_arrays = {"scale": np.array([2.0, 3.0])}
    standing = Standing.of(kept_arrays, {"schema": "a"})
    assert standing.digest != Standing.of({"scale": np.array([2.0, 3.5])}, {"schema": "a"}).digest
    assert standing.digest != Standing.of(kept_arrays, {"schema": "b"}).digest
    told = request(*standing.around(1, {"noise": np.zeros(2)}, {"rate": 0.1}))
    kept = carried(told)
    standing.told.add(1)
    later = request(*standing.around(1, {"noise": np.ones(2), **kept_arrays}, {"rate": 0.2, "schema": "a"}))
    assert set(later.arrays) == {"noise"}
    assert "schema" not in later.settings
    whole = completed(later, kept)
    assert whole is not None
    assert np.array_equal(whole.arrays["scale"], [2.0, 3.0])
    assert np.array_equal(whole.arrays["noise"], [1.0, 1.0])
    assert (whole.settings["schema"], whole.settings["rate"]) == ("a", 0.2)
    assert completed(later, {}) is None
    other = Standing.of({"scale": np.ones(2)}, {"schema": "a"})
    other.told.add(1)
    assert completed(request(*other.around(1, {}, {})), kept) is None
    assert FACTS in kept


def request(own: Any, settings: Any) -> Request:
    """As a site sees it."""
    return Request("train.gradient", own, 1, 0, settings)
