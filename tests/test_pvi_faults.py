"""What goes wrong with partitioned variational inference: lying sites, starved sites, rounds nobody may block."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, blamed, csv_nodes, run, waves
from faults import arrays as other_arrays
from test_pvi import SITES, quick

from fedgp_flower.errors import RunError
from fedgp_flower.methods.pvi.messages import NaturalParameters, PseudoPoints
from strategies.pvi import forget_site, state_of
from strategies.pvi_state import Contribution, PVIState, factor_strengths

ADAM = {"pvi__local_update": "adam", "pvi__steps": 2}
SYNCHRONOUS = {"pvi__schedule": "synchronous", "pvi__damping": 1.0, "num_server_rounds": 1}


def changed(**values: Any) -> Any:
    """A reply whose arrays of these names (``__`` for a dot) are functions of what they were."""

    def apply(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        new = {name.replace("__", "."): change for name, change in values.items()}
        return {name: new[name](array) if name in new else array for name, array in own.items()}

    return other_arrays(apply)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (changed(values__eta2=lambda a: 500.0 * np.eye(len(a))), "negative eigenvalue"),
        (changed(values__eta2=lambda a: np.diag([1.0, -1.0, -1.0, -1.0, -1.0])), "negative eigenvalue"),
        (changed(values__eta1=lambda a: np.full_like(a, 1e200)), "numbers above"),
        (changed(values__eta2=lambda a: a + np.triu(np.ones_like(a), 1)), "not symmetric"),
    ],
)
def test_a_lying_factor_of_u_ends_no_run(lie: Any, words: str) -> None:
    flat = quick(**ADAM, pvi__factor="cpo")
    strategy = run(FaultyGrid(flat, SITES, Fault("0", lie, ("train",))))
    assert words in blamed(strategy)["0"][0]
    assert set(strategy.current.sites) == {"1", "2"}
    assert strategy.evaluation is not None


def test_a_refused_update_moves_no_averaged_inducing_points() -> None:
    lie = changed(hyper__eta2=lambda a: np.full_like(a, 1e20), inducing__value=lambda a: a + 1e6)
    flat = quick(**ADAM, pvi__inducing="average", **SYNCHRONOUS)
    strategy = run(FaultyGrid(flat, SITES, Fault("1", lie, ("train",))))
    assert "no damping" in blamed(strategy)["1"][0]
    assert np.abs(strategy.current.shared["inducing"].value).max() < 100
    assert strategy.current.record.visits == {"0": 1, "2": 1}


def test_a_round_of_improper_updates_alone_changes_nothing() -> None:
    """And a run of such rounds alone has no result."""
    improper = changed(hyper__eta2=lambda a: np.full_like(a, 1e20))
    lies = [Fault(site, improper, ("train",), range(1, 2)) for site in "012"]
    recorder = Recorder()
    run(FaultyGrid(quick(**ADAM | SYNCHRONOUS | {"num_server_rounds": 2}), SITES, *lies), recorder)
    states = [state_of(snapshot) for snapshot in recorder.snapshots]
    assert (states[0].record.visits, states[0].version) == ({}, 0)
    assert "objective" not in recorder.rows[0]
    assert states[1].record.visits == {"0": 1, "1": 1, "2": 1}
    with pytest.raises(RunError, match="no damping makes its update proper"):
        run(FaultyGrid(quick(**ADAM, **SYNCHRONOUS), SITES, *lies))


def test_visits_of_a_forgotten_site_stay_on_the_abscissa_of_the_history(tmp_path: Path) -> None:
    nodes = csv_nodes(tmp_path, {name: waves(20, seed) for seed, name in enumerate("abc")})
    before, after = Recorder(), Recorder()
    asynchronous = {**ADAM, "pvi__schedule": "asynchronous"}
    whole = run(FaultyGrid(quick(**asynchronous), nodes), before)
    flat = quick(**asynchronous, num_server_rounds=whole.round + 1)
    left = run(FaultyGrid(flat, [nodes[0], nodes[2]]), after, forget_site(before.snapshots[-1], "b"))
    assert after.rows[-1]["visits"] == SITES + 1
    assert sum(left.current.record.visits.values()) == SITES


def test_strengths_of_factors() -> None:
    diagonal = NaturalParameters(np.zeros(2), np.array([-1.0, -2.0]))  # precisions 2 and 4
    full = NaturalParameters(np.zeros(2), -0.5 * np.diag([3.0, 1.0]))
    points = PseudoPoints(np.zeros((3, 1)), np.zeros(3), np.array([1.0, 2.0, 3.0]))
    sites = {
        "a": Contribution({"hyper": diagonal}, points),
        "b": Contribution({"whitened": full}),
        "c": Contribution({"values": full}),
    }
    assert factor_strengths(PVIState({}, sites, rows={"a": 20, "b": 30, "c": 40})) == {
        "a": {"rows": 20, "points": 3, "weight": pytest.approx(14.0), "hyper": pytest.approx(3.0)},
        "b": {"rows": 30, "directions": pytest.approx(0.75 + 0.5)},
        "c": {"rows": 40, "values": pytest.approx(2.0)},
    }
