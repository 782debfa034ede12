"""What goes wrong with partitioned variational inference: lying sites, starved sites, rounds nobody may block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, blamed, csv_nodes, numbers, run, waves
from faults import arrays as other_arrays
from test_pvi import SITES, assert_exact, fixed, keys, quick, rows_of, simulated, standard, whitened

from fedgp_flower.errors import RunError
from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.methods.pvi.linear import LinearSite, fixed_point_update, gradient_update, linear_site
from fedgp_flower.methods.pvi.messages import FreeEnergyShare, Marginal, NaturalParameters, PseudoPoints
from fedgp_flower.methods.pvi.model import Data, sparse_model
from fedgp_flower.methods.pvi.state import Contribution, posterior
from strategies.pvi import factor_strengths, forget_site, free_energy, state_of
from strategies.pvi_updates import PVIState, marginals

ADAM = {"pvi__local_update": "adam", "pvi__steps": 2}
GRADIENT = {"pvi__local_update": "gradient", "pvi__learning_rate": 1e-3}
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


def test_an_update_that_nothing_makes_proper_is_its_sites_failure_alone() -> None:
    """A gradient step may overshoot, so that a negative precision is no lie by itself."""
    lie = changed(whitened__eta2=lambda a: 1e15 * np.eye(len(a)))
    strategy = run(FaultyGrid(keys(**GRADIENT, **SYNCHRONOUS), SITES, Fault("1", lie, ("train",))))
    assert blamed(strategy) == {"1": ["no damping makes its update proper"]}
    assert strategy.current.record.visits == {"0": 1, "2": 1}
    assert (strategy.current.record.refused, strategy.current.record.halvings) == (1, 0)


def test_a_refused_update_moves_no_averaged_inducing_points() -> None:
    lie = changed(hyper__eta2=lambda a: np.full_like(a, 1e20), inducing__value=lambda a: a + 1e6)
    flat = quick(**ADAM, pvi__inducing="average", **SYNCHRONOUS)
    strategy = run(FaultyGrid(flat, SITES, Fault("1", lie, ("train",))))
    assert "no damping" in blamed(strategy)["1"][0]
    assert np.abs(strategy.current.shared["inducing"].value).max() < 100
    assert strategy.current.record.visits == {"0": 1, "2": 1}


def test_a_round_of_improper_updates_alone_changes_nothing() -> None:
    """And a run of such rounds alone has no result."""
    improper = changed(whitened__eta2=lambda a: 1e15 * np.eye(len(a)))
    lies = [Fault(site, improper, ("train",), range(1, 2)) for site in "012"]
    recorder = Recorder()
    run(FaultyGrid(keys(**GRADIENT | SYNCHRONOUS | {"num_server_rounds": 2}), SITES, *lies), recorder)
    states = [state_of(snapshot) for snapshot in recorder.snapshots]
    assert states[0].record.visits == {}
    assert states[0].version == 0
    assert "objective" not in recorder.rows[0]
    assert states[1].record.visits == {"0": 1, "1": 1, "2": 1}
    with pytest.raises(RunError, match="no damping makes its update proper"):
        run(FaultyGrid(keys(**GRADIENT, **SYNCHRONOUS), SITES, *lies))


@pytest.mark.parametrize(
    "form",
    [
        {**ADAM, "pvi__inducing": "fixed"},
        {**ADAM, "pvi__inducing": "fixed", "pvi__factor": "cpo"},
    ],
    ids=str,
)
def test_the_order_of_residuals_starves_no_site_whose_residual_is_unknown(form: dict[str, Any]) -> None:
    strategy = run(FaultyGrid(quick(pvi__order="residual", num_server_rounds=9, **form), SITES))
    assert strategy.current.record.visits == {"0": 3, "1": 3, "2": 3}


def test_visits_of_a_forgotten_site_stay_on_the_abscissa_of_the_history(tmp_path: Path) -> None:
    nodes = csv_nodes(tmp_path, {name: waves(20, seed) for seed, name in enumerate("abc")})
    before, after = Recorder(), Recorder()
    asynchronous = {**ADAM, "pvi__schedule": "asynchronous"}
    whole = run(FaultyGrid(quick(**asynchronous), nodes), before)
    flat = quick(**asynchronous, num_server_rounds=whole.round + 1)
    left = run(FaultyGrid(flat, [nodes[0], nodes[2]]), after, forget_site(before.snapshots[-1], "b"))
    assert after.rows[-1]["visits"] == SITES + 1
    assert sum(left.current.record.visits.values()) == SITES


def test_what_optimisers_had_to_do_is_added_up_and_lies_about_it_are_not() -> None:
    lies = {"1": {"rejected": [1.0, 2.0]}, "2": {"halvings": -5}}
    faults = [
        Fault("0", numbers(rejected=3, halvings=2), ("train",)),
        Fault("4", numbers(rejected=0, halvings=1), ("train",)),
    ]
    faults += [Fault(site, numbers(**lie), ("train",)) for site, lie in lies.items()]
    strategy = run(FaultyGrid(fixed(num_server_rounds=5), 5, *faults))
    assert strategy.current.record.local == {"rejected": 3, "halvings": 3}
    assert blamed(strategy).keys() == lies.keys()


def test_free_energy_weighs_its_parts() -> None:
    """KL(N(0, s²) ‖ N(0, 1)) = ½(s² − 1) − log s, by entry."""
    answers = {"a": FreeEnergyShare(-10.0, 2.0), "b": FreeEnergyShare(-30.0, 2.0)}
    shared = {"inducing": Marginal(np.zeros(3), np.full(3, -2.0)), "hyper": Marginal(np.zeros(2), np.full(2, -0.125))}
    sites = {site: Contribution({}) for site in "ab"}
    found = free_energy(PVIState({}, sites, shared), answers, alpha=0.1)
    kl = {"inducing": 3 * (-0.375 + math.log(2)), "hyper": 2 * (1.5 - math.log(2))}
    assert found is not None
    assert found["total"] == pytest.approx(-40.0 - 2.0 - 0.1 * kl["inducing"] - kl["hyper"])
    assert (found["kl_inducing"], found["kl_hyper"]) == (pytest.approx(kl["inducing"]), pytest.approx(kl["hyper"]))
    assert free_energy(PVIState({}, {"a": sites["a"], "c": sites["b"]}, shared), answers, alpha=0.1) is None


def test_strengths_of_factors() -> None:
    diagonal = NaturalParameters(np.zeros(2), np.array([-1.0, -2.0]))  # precisions 2 and 4
    full = NaturalParameters(np.zeros(2), -0.5 * np.diag([3.0, 1.0]))
    points = PseudoPoints(np.zeros((3, 1)), np.zeros(3), np.array([1.0, 2.0, 3.0]))
    sites = {
        "a": Contribution({"hyper": diagonal}, points, 20),
        "b": Contribution({"whitened": full}, None, 30),
        "c": Contribution({"values": full}, None, 40),
    }
    assert factor_strengths(PVIState({}, sites)) == {
        "a": {"rows": 20, "points": 3, "weight": pytest.approx(14.0), "hyper": pytest.approx(3.0)},
        "b": {"rows": 30, "directions": pytest.approx(0.75 + 0.5)},
        "c": {"rows": 40, "values": pytest.approx(2.0)},
    }


def bernoulli_nodes(folder: Path) -> list[dict[str, str]]:
    frames = {name: waves(rows, seed) for seed, (name, rows) in enumerate({"a": 25, "b": 45, "c": 35}.items())}
    for frame in frames.values():
        frame["y"] = np.where(frame["y"] > 0, 1, 0)
    return csv_nodes(folder, frames)


def linear(strategy: Any, nodes: list[dict[str, str]]) -> LinearSite:
    """The rows of some sites at the fixed Z and β."""
    model = sparse_model(strategy.config.model, 2)
    latents = marginals(strategy.current).latents()
    data: Data = rows_of(strategy, nodes)
    return linear_site(model, data, latents)


def by_hand(preset: str, sites: list[LinearSite], prior: Any) -> Gaussian:
    """q(v) of a one-pass special case, from its definition."""
    if preset in {"vcl", "streaming-vb"}:  # each posterior is the next one's prior
        q = prior
        for site in sites:
            q = q * fixed_point_update(site, q, q.flat()).factor
        return q
    rows = [len(site.targets) for site in sites]
    shares = [count / sum(rows) if preset == "bcm-split" else 1.0 for count in rows]
    q = prior
    for site, share in zip(sites, shares, strict=True):
        q = q * fixed_point_update(site, prior**share, prior.flat()).factor
    return q


def test_presets_without_conjugacy_are_what_they_are_called(tmp_path: Path) -> None:
    nodes = bernoulli_nodes(tmp_path)
    means = {}
    for preset in ("vcl", "streaming-vb", "bcm-same", "bcm-split"):
        changes = {"pvi__local_update": "natural-gradient", "model__likelihood": "bernoulli", "pvi__preset": preset}
        strategy = run(FaultyGrid(fixed(**changes), nodes))
        prior = standard(strategy.config.model.num_inducing)
        expected = by_hand(preset, [linear(strategy, [node]) for node in nodes], prior).moments()
        for found, wanted in zip(whitened(strategy), expected, strict=True):
            assert found == pytest.approx(wanted.numpy(), rel=1e-6, abs=1e-7), preset
        means[preset] = whitened(strategy)[0]
    assert np.abs(means["bcm-same"] - means["vcl"]).max() > 1e-2
    assert np.abs(means["bcm-split"] - means["bcm-same"]).max() > 1e-2


def test_global_vi_without_conjugacy_is_pooled_gradient_ascent(tmp_path: Path) -> None:
    nodes, step = bernoulli_nodes(tmp_path), 1e-2
    changes = {"pvi__preset": "global-vi", "pvi__learning_rate": step}
    strategy = run(FaultyGrid(fixed(**changes, model__likelihood="bernoulli", num_server_rounds=3), nodes))
    prior = standard(strategy.config.model.num_inducing)
    pooled, factor = linear(strategy, nodes), prior.flat()
    for _ in range(3):
        factor = gradient_update(pooled, prior * factor, prior, factor, step=step)
    found = posterior(strategy.current)["whitened"]
    assert found.eta1.numpy() == pytest.approx((prior * factor).eta1.numpy(), rel=1e-7, abs=1e-9)
    assert found.eta2.numpy() == pytest.approx((prior * factor).eta2.numpy(), rel=1e-7, abs=1e-9)
    assert np.abs(found.eta1.numpy()).max() > 1e-2


def test_an_indefinite_factor_of_v_is_refused() -> None:
    lie = changed(whitened__eta2=lambda a: a + np.diag([2.0, 0, 0, 0, 0]) * np.abs(a).max())
    strategy = run(FaultyGrid(fixed(**SYNCHRONOUS), SITES, Fault("1", lie, ("train",))))
    assert blamed(strategy)["1"] == ["`whitened.eta2`: its precision has a negative eigenvalue"]
    assert_exact(strategy, [simulated()[0], simulated()[2]])
