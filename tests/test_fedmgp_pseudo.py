"""Pseudo-gradients of FedMGP through the real engine: rules, lies, absent units, the exact rounds at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, each, lost, numbers, run
from test_fedmgp import UNITS, consistent, exact, keys, nodes, shared, theta, weights

from fedgp_flower.errors import RunError
from strategies.fedmgp import WATCHED, local_rate
from strategies.server.course import Course

RULES = ("loss-weighted", "norm-clipped", "median", "trimmed-mean", "krum", "multi-krum", "staleness-weighted")


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_merges_pseudo_gradients(tmp_path: Path, rule: str) -> None:
    fault = Fault("b", lost, ("train",), range(2, 3))
    flat = keys(
        fedmgp__update="pseudo-gradient",
        fedmgp__aggregation=rule,
        fedmgp__local_steps=2,
        fedmgp__final_rounds=0,
        fedmgp__weights="examples",
        num_server_rounds=2,
        optimizer__learning_rate=0.01,
    )
    strategy = run(FaultyGrid(flat, nodes(tmp_path), fault))
    first, second = weights(strategy)
    assert set(first) == set(UNITS)
    assert 0 < sum(first.values()) <= 1 + 1e-12
    assert second["b"] == pytest.approx(1 / 7) if rule == "staleness-weighted" else "b" not in second
    assert all(np.isfinite(array).all() for array in theta(strategy).values())


def test_a_run_of_pseudo_gradients_ends_with_exact_rounds(tmp_path: Path) -> None:
    flat = keys(
        fedmgp__update="pseudo-gradient",
        fedmgp__local_steps=5,
        fedmgp__final_rounds=3,
        fedmgp__learn_inducing=True,
        optimizer__batch_size=16,
        optimizer__learning_rate=0.02,
        num_server_rounds=6,
    )
    recorder, grid = Recorder(), FaultyGrid(flat, nodes(tmp_path))
    strategy = run(grid, recorder)
    consistent(grid, strategy)
    assert [("bound" in row) for row in recorder.rows] == [False] * 3 + [True] * 3
    fresh = run(FaultyGrid(keys(num_server_rounds=1), nodes(tmp_path)))
    assert not np.array_equal(shared(fresh)[0].inducing, shared(strategy)[0].inducing)


@pytest.mark.parametrize("rule", ["mean", "loss-weighted"])
@pytest.mark.parametrize(
    "lie",
    [
        numbers(fit=[0.5]),
        numbers(fit=3),
        numbers(fit=None),
        arrays(lambda own: {**own, "fresh": np.array(2.5), "flat": np.array(-1.0)}),
        arrays(lambda own: {**own, "fresh": np.array(1)}),
    ],
)
def test_numbers_that_are_none_end_no_run(tmp_path: Path, lie: Any, rule: str) -> None:
    changes = {"update": "pseudo-gradient", "local_steps": 1, "final_rounds": 1, "aggregation": rule}
    flat = keys(**{f"fedmgp__{name}": value for name, value in changes.items()}, num_server_rounds=2)
    strategy = run(FaultyGrid(flat, nodes(tmp_path), Fault("b", lie, ("train",))))
    assert list(blamed(strategy)) == ["b"]
    assert set(weights(strategy)[0]) == set(UNITS) - {"b"}
    assert all(np.isfinite(own.mean).all() for own in [shared(strategy)[1]])


def test_what_leads_out_of_the_numbers_is_left_out(tmp_path: Path) -> None:
    lie = each(lambda array: array * 0 + 1e308 if array.ndim else array)
    flat = keys(fedmgp__update="pseudo-gradient", fedmgp__local_steps=1, fedmgp__final_rounds=0, num_server_rounds=2)
    fault = Fault("b", lie, ("train",), range(1, 2))
    strategy = run(FaultyGrid(flat, nodes(tmp_path), fault))
    assert list(blamed(strategy)) == ["b"]
    assert [set(own) for own in weights(strategy)] == [set(UNITS) - {"b"}, set(UNITS)]


def test_rounds_that_nobody_answers_keep_their_column(tmp_path: Path) -> None:
    faults = [Fault(site, lost, ("train",), range(2, 3)) for site in UNITS]
    flat = keys(fedmgp__update="pseudo-gradient", fedmgp__local_steps=1, fedmgp__final_rounds=0, num_server_rounds=3)
    strategy = run(FaultyGrid(flat, nodes(tmp_path), *faults))
    assert [len(row) for row in weights(strategy)] == [4, 0, 4]


def test_krum_with_too_few_units_ends_the_run(tmp_path: Path) -> None:
    changes = {"update": "pseudo-gradient", "local_steps": 1, "aggregation": "krum", "malicious": 1, "final_rounds": 0}
    flat = keys(**{f"fedmgp__{name}": value for name, value in changes.items()}, num_server_rounds=2)
    with pytest.raises(RunError, match="needs 5 units in a round"):
        run(FaultyGrid(flat, nodes(tmp_path)))


def test_last_exact_rounds_ask_everyone_until_they_have_answered(tmp_path: Path) -> None:
    changes = {"update": "pseudo-gradient", "local_steps": 1, "final_rounds": 2, "fraction": 0.25}
    flat = keys(**{f"fedmgp__{name}": value for name, value in changes.items()}, num_server_rounds=4)
    grid = FaultyGrid(flat, nodes(tmp_path), Fault("c", lost, ("train.exact",), range(3, 4)))
    strategy = run(grid)
    asked = [{visit.site for visit in grid.visits if visit.round == number} for number in (3, 4)]
    assert asked[0] == set(UNITS)
    assert "c" in asked[1]
    consistent(grid, strategy)


def test_server_adam_learns_and_survives_a_resume(tmp_path: Path) -> None:
    changes = {"update": "pseudo-gradient", "local_steps": 1, "final_rounds": 0, "server_step": 0.02}
    own = {f"fedmgp__{name}": value for name, value in changes.items()}
    flat = keys(**own, fedmgp__server_optimizer="fedadam", num_server_rounds=6, optimizer__learning_rate=0.02)
    sites, recorder, again = nodes(tmp_path, remember=True), Recorder(), Recorder()
    kept: dict[Path, bytes] = {}
    folders = [Path(node["state-dir"]) / "site-state.safetensors" for node in sites]
    recorder.at[3] = lambda: kept.update({path: path.read_bytes() for path in folders})
    whole = run(FaultyGrid(flat, sites), recorder)
    objectives = [row["objective"] for row in recorder.rows]
    assert objectives[-1] > objectives[0]
    assert whole.current.steps == 6
    for path, content in kept.items():
        path.write_bytes(content)
    run(FaultyGrid(flat, sites), again, recorder.snapshots[2])
    assert again.rows[-1]["objective"] == objectives[-1]


@pytest.mark.parametrize(("rule", "trusted"), [("median", True), ("mean", False)])
def test_exact_rounds_after_a_robust_rule_use_agreement(tmp_path: Path, rule: str, trusted: bool) -> None:
    changes = {"update": "pseudo-gradient", "local_steps": 3, "final_rounds": 2, "aggregation": rule}
    flat = keys(**{f"fedmgp__{name}": value for name, value in changes.items()}, num_server_rounds=4)
    strategy = run(FaultyGrid(flat, nodes(tmp_path)))
    assert bool(exact(strategy).trusted) is trusted


@pytest.mark.parametrize("mode", ["natural", "cholesky"])
def test_a_flat_objective_shortens_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Flat after round 4 of 40: the learning rate falls to the same end by round 8, and exact rounds come then."""
    exact = {"cholesky": 2, "natural": 0}[mode]
    own = {"parametrisation": mode, "local_steps": 1, "final_rate": WATCHED**2, "final_rounds": exact}
    own = {"fedmgp__update": "pseudo-gradient"} | {f"fedmgp__{name}": value for name, value in own.items()}
    monkeypatch.setattr(Course, "flat", property(lambda own: len(own.values) >= 4))
    strategy = run(FaultyGrid(keys(**own, num_server_rounds=40 + exact), nodes(tmp_path)))
    assert strategy.course.flat_from == 4
    assert (strategy.round, strategy.converged_now()) == (8 + exact, True)
    first, last = (local_rate(strategy.plan, number) for number in (1, 8))
    assert last == pytest.approx(WATCHED**2 * first)
    monkeypatch.setattr(Course, "flat", property(lambda own: False))
    other = run(FaultyGrid(keys(**own, num_server_rounds=6 + exact), nodes(tmp_path)))
    assert (other.round, other.converged_now(), len(other.course.values)) == (6 + exact, False, 3)
