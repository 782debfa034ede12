"""FedMGP through the engine: what changes a run besides its data, other likelihoods, and the baselines beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, csv_nodes, run
from flwr.serverapp.strategy import Result
from scipy import stats
from test_fedmgp import UNITS, keys, known, memory, shared, wave

from fedgp_flower.methods.fedmgp.posterior import panels
from fedgp_flower.methods.fedmgp.unit import predict
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process

Z = np.linspace(-8, 8, 4001)[:, None]
WEIGHT = np.exp(-0.5 * Z**2) / np.exp(-0.5 * Z**2).sum()
"""A fine sum over a standard normal variable."""


def pseudo(**changes: Any) -> dict[str, Any]:
    """Pseudo-gradients alone."""
    return keys(**({"method": "fedmgp", "optimizer__learning_rate": 0.02} | changes))


def counts() -> dict[str, pd.DataFrame]:
    """Counts whose log rates are scaled views of one function, about an offset that units share."""
    draw, found = np.random.default_rng(1), {}
    for index, unit in enumerate(UNITS):
        x = np.linspace(-1.7, 1.7, 60)
        found[unit] = pd.DataFrame({"x": x, "y": draw.poisson(np.exp((1 + 0.3 * index) * (1.2 + np.sin(2 * x))))})
    return found


def heavy() -> dict[str, pd.DataFrame]:
    """Waves of which one row in ten is far off."""
    draw, found = np.random.default_rng(5), {}
    for index, unit in enumerate(UNITS):
        frame = wave(index, 60)
        off = draw.random(60) < 0.1
        found[unit] = frame.assign(y=frame["y"] + np.where(off, 4 * draw.standard_normal(60), 0))
    return found


def trained(folder: Path, frames: dict[str, pd.DataFrame], **changes: Any) -> tuple[FaultyGrid, Any]:
    changes = {"fedmgp__local_steps": 15, "num_server_rounds": 5, "optimizer__learning_rate": 0.05} | changes
    grid = FaultyGrid(pseudo(**changes), csv_nodes(folder, frames))
    return grid, run(grid)


def held_out(grid: FaultyGrid, strategy: Any) -> Any:
    """Latent mean and variance, parameters and targets of every unit's held-out rows."""
    latents, q = shared(strategy)
    for site in UNITS:
        phi, _, rows = known(grid, strategy, site)
        assert phi is not None
        yield phi, *predict(rows.x_test, latents, q, phi), rows.y_test


def test_counts_are_trained_and_scored_as_counts(tmp_path: Path) -> None:
    """The score is −log ∫ Poisson(y | e^f) q(f) df, here by a fine sum; far better than a constant rate."""
    grid, strategy = trained(tmp_path, counts(), model__likelihood="poisson")
    total = plain = rows = 0.0
    for _, mean, variance, y in held_out(grid, strategy):
        rate = np.exp(mean + np.sqrt(variance) * Z)
        total -= np.log((WEIGHT * stats.poisson.pmf(y, rate)).sum(0)).sum()
        plain -= stats.poisson.logpmf(y, y.mean()).sum()
        rows += len(y)
    found = strategy.evaluation["test"]
    assert found["nll"] == pytest.approx(total / rows, rel=1e-6)
    assert found["nll"] < 0.6 * plain / rows
    assert found["coverage_95"] > 0.85


def test_heavy_tails_are_learned_and_kept_at_the_site(tmp_path: Path) -> None:
    """Two likelihood parameters stay in the unit's memory and move."""
    grid, strategy = trained(tmp_path, heavy(), model__likelihood="student-t")
    remembered = memory(grid, strategy, "b")
    assert remembered is not None
    kept = remembered.proposed.likelihood
    assert len(kept) == 2
    scale = float(strategy.preparation.arrays["target.scale"])
    assert 0.05 < np.exp(kept[0]) * scale < 0.4  # noise 0.1; with the outliers the residuals have 1.3
    assert not any("likelihood" in name for name in strategy.current.parameters)
    total = rows = 0.0
    for phi, mean, variance, y in held_out(grid, strategy):
        log_scale, log_excess = phi.likelihood
        t = stats.t(2 + np.exp(log_excess), mean + np.sqrt(variance) * Z, np.exp(log_scale))
        total -= (np.log((WEIGHT * t.pdf(y)).sum(0)) - np.log(scale)).sum()
        rows += len(y)
    found = strategy.evaluation["test"]
    assert found["nll"] == pytest.approx(total / rows, rel=1e-2)


def test_classes_are_predicted_also_by_a_unit_that_joins_late(tmp_path: Path) -> None:
    frames = {unit: frame.assign(y=np.where(frame["y"] > 3, "many", "few")) for unit, frame in counts().items()}
    every = csv_nodes(tmp_path, frames)
    grid = FaultyGrid(pseudo(model__likelihood="bernoulli", fedmgp__local_steps=5, num_server_rounds=3), every[:3])
    strategy = run(grid)
    assert strategy.evaluation["test"]["accuracy"] > 0.8
    grid.join(every[3])
    strategy.session.begin_round()
    strategy._evaluate(Result())
    [late] = [row for row in strategy.evaluation["per_site"] if row["site"] == "d"]
    assert late["accuracy"] > 0.8


def test_the_pooled_model_beside_has_the_same_functions(tmp_path: Path) -> None:
    """With all rows in one place it is no worse than three rounds; the page shows units and what they share."""
    flat = keys(dataset="convolved-signals", partitioner="natural", partition__column="unit", split=0)
    del flat["test-fraction"]
    flat |= {"baselines.max-evaluations": 15, "baselines.pooled": True, "num-server-rounds": 3, "round-timeout": 120.0}
    flat |= {"keep-predictions": True, "output-dir": str(tmp_path), "name": "run"}
    found = read_run(run_in_process(flat, 5))
    assert 0.05 < found.metrics.pooled["rmse"] < found.metrics.test["rmse"] + 0.05
    units, shared = panels(found)
    assert (units.title, shared.title) == ("Units", "Shared latent functions")
    band, seen, held = units.body.axes[0].lines
    assert (len(band.get_xdata()), len(seen.get_xdata()), len(held.get_xdata())) == (161, 100, 100)
    saved = found.posterior.arrays
    [line] = shared.body.axes[0].lines
    assert np.array_equal(line.get_ydata(), saved["latents.mean"])
