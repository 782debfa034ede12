"""FedMGP through the real engine: the server holds what the units say; other likelihoods, the report, predictions."""

import contextlib
import math
from types import SimpleNamespace

import faults as kit
import numpy as np
import pandas as pd
import pytest
import torch
from faults import Fault, FaultyGrid, Recorder, arrays, blamed, configured, crashed, csv_nodes, lost, run
from flwr.serverapp.strategy import Result
from scipy import stats

from fedgp_flower.clients.state import load_state
from fedgp_flower.data.sites import load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import RunError
from fedgp_flower.gp.likelihoods.numbers import freedom_of
from fedgp_flower.messages import add, decode
from fedgp_flower.methods.fedmgp import unit as one_unit
from fedgp_flower.methods.fedmgp.joining import AMPLITUDES, DECAY, SPREAD, WIDEST, predict_joining
from fedgp_flower.methods.fedmgp.latents import LatentFunctions, LatentPosterior, pooled_bound, posterior
from fedgp_flower.methods.fedmgp.posterior import panels
from fedgp_flower.methods.fedmgp.unit import UnitData, UnitParameters, UnitState, predict, statistics
from fedgp_flower.outcome import COLLAPSE
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process, simulated_nodes
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config
from strategies.fedmgp_exact import FedMGPExact
from strategies.fedmgp_shared import EVERYONE, collapse

UNITS = ("a", "b", "c", "d")


def wave(seed, rows=40, low=-1.7, high=1.7):
    draw = np.random.default_rng(seed)
    x = np.linspace(low, high, rows) if seed else np.linspace(low, 0.4, rows)
    gain = (-1) ** seed * (0.6 + 0.4 * seed)
    f = np.sin(3 * x) + 0.5 * np.cos(5 * x)
    return pd.DataFrame({"x": x, "y": gain * f + 0.1 * draw.standard_normal(rows)})


def nodes(folder, units=UNITS, *, remember=False):
    """A CSV per unit; with ``remember`` each has a folder for its memory."""
    found = csv_nodes(folder, {unit: wave(index) for index, unit in enumerate(units)})
    return [{**node, "state-dir": str(folder / f"state-{node['site']}")} for node in found] if remember else found


def keys(**changes):
    usual = {"method": "fedmgp-exact", "model__num_inducing": 14, "num_server_rounds": 5, "test_fraction": 0.2}
    return configured(**(usual | changes))


def shared(strategy):
    view = strategy.current.view("")
    return view.latents, view.posterior


def memory(grid, strategy, site):
    arrays = load_state(grid.contexts[grid.node_of(site)], strategy.network.run).arrays
    return decode(UnitState, arrays) if arrays else None


def known(grid, strategy, site):
    """A unit's parameters behind the server's last report, read from its memory; its rows."""
    latents, _ = shared(strategy)
    context = grid.contexts[grid.node_of(site)]
    prepared = Preparation.from_wire(strategy.preparation.arrays, strategy.preparation.schema)
    rows = load_site(strategy.config, context.node_config).encode(prepared)
    data = UnitData.build(rows.x, rows.y, latents.inducing)
    kept = memory(grid, strategy, site)
    phi = None if kept is None else kept.accepted(data, strategy.current.known(site))
    return phi, data, rows


def consistent(grid, strategy, sites=UNITS):
    """Asserts that bound and q(u) are those of the units' rows at the parameters of the units; returns the bound."""
    latents, q = shared(strategy)
    parts = []
    for site in sites:
        phi, data, _ = known(grid, strategy, site)
        parts.append(statistics(data, latents, phi))
    total = add(parts)
    assert strategy.current.bound == pytest.approx(pooled_bound(total), rel=1e-9)
    np.testing.assert_allclose(posterior(total).mean, q.mean, rtol=1e-6, atol=1e-8)
    return pooled_bound(total)


def test_a_unit_predicts_with_what_it_alone_knows(tmp_path):
    """Scores of the run are those of the unit's parameters; nearly the truth where the unit saw nothing."""
    grid = FaultyGrid(keys(), nodes(tmp_path))
    strategy = run(grid)
    consistent(grid, strategy)
    assert (strategy.warnings(), strategy.current.counted) == ([], UNITS)
    latents, q = shared(strategy)
    squares = count = 0.0
    for site in UNITS:
        phi, _, rows = known(grid, strategy, site)
        mean, _ = predict(rows.x_test, latents, q, phi)
        squares, count = squares + float(np.sum((mean - rows.y_test) ** 2)), count + len(mean)
    assert strategy.evaluation["test_standardised"]["rmse"] == pytest.approx(math.sqrt(squares / count), rel=1e-9)
    prepared = strategy.preparation.arrays
    phi, _, _ = known(grid, strategy, "a")
    x = np.linspace(0.5, 1.6, 30)
    mean, variance = predict(((x - prepared["input.mean"]) / prepared["input.scale"])[:, None], latents, q, phi)
    truth = 0.6 * (np.sin(3 * x) + 0.5 * np.cos(5 * x)) / float(prepared["target.scale"])
    assert np.abs(mean - truth).max() < 0.15
    assert (np.abs(mean - truth) < 4 * np.sqrt(variance + phi.noise)).all()
    y = np.concatenate([wave(index)["y"] for index in range(4)])
    assert float(prepared["target.mean"]) == 0  # divided by the root mean square, of 4 of 5 rows
    assert float(prepared["target.scale"]) == pytest.approx(math.sqrt(np.mean(y**2)), rel=0.15)


@pytest.mark.parametrize("times", [2, 0], ids=["crashed twice", "its memory lost"])
def test_a_unit_whose_replies_get_lost_goes_back_to_its_last_report(tmp_path, times):
    """One that lost its memory starts afresh and replaces its report."""
    faults = [Fault("b", crashed, ("train.exact",), range(2, 2 + times), times=times)] if times else []
    recorder, grid = Recorder(), FaultyGrid(keys(num_server_rounds=4), nodes(tmp_path), *faults)
    if not times:
        recorder.at[2] = lambda: grid.restart("b")
    strategy = run(grid, recorder)
    assert len(blamed(strategy).get("b", [])) == times
    consistent(grid, strategy)
    assert sorted(strategy.current.reports) == list(UNITS)
    assert recorder.rows[-1]["bound"] > recorder.rows[1]["bound"]


def test_a_reply_lost_in_the_last_round_leaves_the_report_before(tmp_path):
    """The unit has gone on and the server has not: predictions use the parameters that the server counts."""
    grid = FaultyGrid(keys(num_server_rounds=3), nodes(tmp_path), Fault("b", lost, ("train.exact",), range(3, 4)))
    strategy = run(grid)
    kept = memory(grid, strategy, "b")
    assert (kept.round, kept.based_on) == (3, 2)
    phi, _, _ = known(grid, strategy, "b")
    assert np.array_equal(phi.smoothing, kept.before.smoothing)
    assert phi.noise == kept.before.noise != kept.proposed.noise


STATISTICS = ("precision", "shift", "evidence", "slack")


def test_statistics_that_no_rows_can_produce_are_refused(tmp_path):
    """Larger ones, and five trials of six."""
    lies, faults = {"c": lambda told: 100 * told, "d": lambda told: told[:5]}, []
    for site, lie in lies.items():
        change = arrays(lambda sent, lie=lie: sent | {name: lie(sent[name]) for name in STATISTICS})
        faults.append(Fault(site, change, ("train.exact",)))
    grid = FaultyGrid(keys(num_server_rounds=3), nodes(tmp_path), *faults)
    strategy = run(grid)
    consistent(grid, strategy, ("a", "b"))
    assert min(len(blamed(strategy)[site]) for site in lies) >= 3
    assert not {*lies} & {*strategy.current.reports}


def test_a_unit_that_joins_late_takes_part_and_one_that_comes_after_fits_alone(tmp_path):
    every = nodes(tmp_path)
    recorder, grid = Recorder(), FaultyGrid(keys(), every[:2])
    recorder.at[2] = lambda: grid.join(every[2])
    recorder.at[5] = lambda: grid.join(every[3])
    strategy = run(grid, recorder)
    consistent(grid, strategy, UNITS[:3])
    strategy.session.begin_round()
    before = shared(strategy)[1].mean.copy()
    strategy._evaluate(Result())
    [late] = [row for row in strategy.evaluation["per_site"] if row["site"] == "d"]
    assert late["rmse"] < 0.35  # noise 0.1 on a signal of sd 1.4
    assert np.array_equal(shared(strategy)[1].mean, before)
    assert known(grid, strategy, "d")[0] is None


@pytest.mark.parametrize("method", ["fedmgp-exact", "fedmgp"])
def test_rounds_of_the_sum_alone_are_rounds_of_the_individuals(tmp_path, method):
    """With all units present, as under masks; the server then keeps nothing of one unit."""
    flat, objectives = keys(method=method, num_server_rounds=3, fedmgp__local_steps=3), []
    for asked in (contextlib.nullcontext(), kit.totals_only(1)):
        recorder = Recorder()
        with asked:
            strategy = run(FaultyGrid(flat, nodes(tmp_path)), recorder)
        objectives.append([row["objective"] for row in recorder.rows])
    np.testing.assert_allclose(*objectives, rtol=1e-7)
    assert list(strategy.current.reports) == [EVERYONE]
    assert strategy.current.counted == UNITS


def test_units_smooth_in_half_of_the_rounds_given_to_start(tmp_path):
    flat = keys(fedmgp__latents=2, num_server_rounds=20)
    strategy = FedMGPExact.from_config(parse_config(flat), Recorder())
    strategy.start(FaultyGrid(flat, nodes(tmp_path)), num_rounds=2)
    assert strategy.current.unsmoothed == 0


def test_one_unit_cannot_end_a_run_with_its_first_look(tmp_path):
    lie = arrays(lambda sent: {**sent, "statistics.precision": sent["statistics.precision"] * 0 + 1e16})
    strategy = run(FaultyGrid(keys(num_server_rounds=2), nodes(tmp_path), Fault("a", lie, ("query.first",))))
    assert blamed(strategy) == {"a": ["first statistics that its rows cannot produce"]}


@pytest.mark.parametrize(
    ("error", "alone", "collapsed"), [(0.6, 0.5, True), (0.5, 0.6, False), (0.99, 2.0, True), (0.9, None, False)]
)
def test_a_run_has_collapsed_where_units_alone_or_nothing_do_as_well(error, alone, collapsed):
    scores = {"test": {"rmse": error}, "test_standardised": {"rmse": error}}
    local = SimpleNamespace(local_only=None if alone is None else {"rmse": alone})
    found = collapse(SimpleNamespace(evaluation=scores, scoring=local))
    assert [told.startswith(COLLAPSE) and "hierarchical-gp" in told for told in found] == [True] * collapsed


Z = np.linspace(-8, 8, 4001)[:, None]
WEIGHT = np.exp(-0.5 * Z**2) / np.exp(-0.5 * Z**2).sum()
"""A fine sum over a standard normal variable."""


def pseudo(**changes):
    return keys(**({"method": "fedmgp", "optimizer__learning_rate": 0.02} | changes))


def counts():
    """Counts whose log rates are scaled views of one function, about an offset that units share."""
    draw, found = np.random.default_rng(1), {}
    for index, unit in enumerate(UNITS):
        x = np.linspace(-1.7, 1.7, 60)
        found[unit] = pd.DataFrame({"x": x, "y": draw.poisson(np.exp((1 + 0.3 * index) * (1.2 + np.sin(2 * x))))})
    return found


def heavy():
    """Waves of which one row in ten is far off."""
    draw, found = np.random.default_rng(5), {}
    for index, unit in enumerate(UNITS):
        frame = wave(index, 60)
        off = draw.random(60) < 0.1
        found[unit] = frame.assign(y=frame["y"] + np.where(off, 4 * draw.standard_normal(60), 0))
    return found


def trained(folder, frames, **changes):
    changes = {"fedmgp__local_steps": 15, "num_server_rounds": 3, "optimizer__learning_rate": 0.05} | changes
    grid = FaultyGrid(pseudo(**changes), csv_nodes(folder, frames))
    return grid, run(grid)


def held_out(grid, strategy):
    """Latent mean and variance, parameters and targets of every unit's held-out rows."""
    latents, q = shared(strategy)
    for site in UNITS:
        phi, _, rows = known(grid, strategy, site)
        yield phi, *predict(rows.x_test, latents, q, phi), rows.y_test


def test_counts_are_trained_and_scored_as_counts(tmp_path):
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


def test_heavy_tails_are_learned_and_kept_at_the_site(tmp_path):
    """The scale stays in the unit's memory and moves."""
    grid, strategy = trained(tmp_path, heavy(), model__likelihood="student-t")
    kept = memory(grid, strategy, "b").proposed.likelihood
    assert len(kept) == 2
    scale = float(strategy.preparation.arrays["target.scale"])
    assert 0.05 < np.exp(kept[1]) * scale < 0.4  # noise 0.1; with the outliers the residuals have 1.3
    assert not any("likelihood" in name for name in strategy.current.parameters)
    total = rows = 0.0
    for phi, mean, variance, y in held_out(grid, strategy):
        freedom = float(freedom_of(torch.tensor(phi.likelihood)))
        t = stats.t(freedom, mean + np.sqrt(variance) * Z, np.exp(phi.likelihood[1]))
        total -= (np.log((WEIGHT * t.pdf(y)).sum(0)) - np.log(scale)).sum()
        rows += len(y)
    assert strategy.evaluation["test"]["nll"] == pytest.approx(total / rows, rel=1e-2)


def test_classes_are_predicted_also_by_a_unit_that_joins_late(tmp_path):
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


def test_the_pooled_model_beside_has_the_same_functions(tmp_path):
    """With all rows in one place it is no worse than three rounds; the page shows units and what they share."""
    natural = {"dataset": "convolved-signals", "partitioner": "natural", "partition__column": "unit", "split": 0}
    pooled = {"baselines__max_evaluations": 15, "baselines__pooled": True, "round_timeout": 120.0}
    kept = {"num_server_rounds": 3, "keep_predictions": True, "output_dir": str(tmp_path), "name": "run"}
    found = read_run(run_in_process(keys(**natural, **pooled, **kept), 5))
    assert 0.05 < found.metrics.pooled["rmse"] < found.metrics.test["rmse"] + 0.05
    units, shared = panels(found)
    assert (units.title, shared.title) == ("Units", "Shared latent functions")
    band, seen, held = units.body.axes[0].lines
    assert (len(band.get_xdata()), len(seen.get_xdata()), len(held.get_xdata())) == (161, 100, 100)
    saved = found.saved.arrays
    [line] = shared.body.axes[0].lines
    assert np.array_equal(line.get_ydata(), saved["latents.mean"])


NOISE = 0.05
SHORT = {"method": "fedmgp-exact", "model__num_inducing": 12, "num_server_rounds": 4}


def shape(x):
    return np.sin(3 * x) + 0.5 * np.cos(5 * x)


def signals():
    draw, x = np.random.default_rng(2), np.linspace(-1.7, 1.7, 40)
    frames = []
    for unit, gain in zip("abcd", (0.6, -1.0, 1.4, 2.0), strict=True):
        y = gain * shape(x) + NOISE * draw.standard_normal(len(x))
        split = np.where((unit == "a") & (x > 0.4), "test", "train")
        frames.append(pd.DataFrame({"x": x, "unit": unit, "y": y, "split": split}))
    return pd.concat(frames)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a masked range: the rows that the column ``split`` calls ``test``."""
    return kit.run_of_units(tmp_path_factory.mktemp("finished"), signals(), **SHORT)


def test_a_simulated_unit_predicts_new_rows_as_it_did_its_masked_ones(finished):
    told = pd.read_csv(finished / "predictions.csv")
    assert len(told) == int((signals()["split"] == "test").sum())
    frame = told.rename(columns={"input.x": "x"})[["x"]]
    table = Predictor.at_site(finished, "a").predict(frame)
    np.testing.assert_allclose(table[["mean", "sd"]], told[["mean", "sd"]], rtol=1e-9)
    assert np.abs(table["mean"] - 0.6 * shape(frame["x"])).max() < 0.25
    kept = finished / "sites" / "1" / "site-state.safetensors"
    content = kept.read_bytes()
    kept.unlink()
    with pytest.raises(RunError, match="is missing, damaged"):
        Predictor.at_site(finished, "b")
    kept.write_bytes(content)


def test_units_of_a_run_without_one_of_them_still_predict_and_are_drawn(tmp_path):
    """The rows are dealt to all simulated units, also if one took no part."""
    strict = tmp_path / "strict.toml"
    strict.write_text("least-rows = 1000\n")
    signals().to_csv(tmp_path / "signals.csv", index=False)
    dealt = {"partitioner": "natural", "partition__column": "unit", "split": 0, "keep_predictions": True}
    flat = keys(**SHORT, **dealt, dataset=str(tmp_path / "signals.csv"), target="y")
    flat |= {"output-dir": str(tmp_path), "name": "run"}
    *present, absent = simulated_nodes(4)
    found = read_run(run_in_process(flat, nodes=[*present, {**absent, "policy": str(strict)}]))
    assert (found.metrics.sites, found.metrics.nodes) == (3, 4)
    assert list(Predictor.of_all(found.path)) == ["a", "b", "c"]
    assert [panel.title for panel in panels(found)] == ["Units", "Shared latent functions"]


def test_all_simulated_units_are_written_and_drawn_without_a_name(finished, tmp_path, fedgp):
    pd.DataFrame({"x": np.linspace(-1.7, 1.7, 9)}).to_csv(tmp_path / "grid.csv", index=False)
    words = ["--input", tmp_path / "grid.csv", "--output", tmp_path / "curves.csv"]
    assert fedgp("predict", finished, *words, "--picture", tmp_path / "curves.png")[0] == 0
    curves = pd.read_csv(tmp_path / "curves.csv")
    assert curves["site"].tolist() == [unit for unit in "abcd" for _ in range(9)]
    assert (curves["q2.5"] < curves["mean"]).all()
    assert (curves["mean"] < curves["q97.5"]).all()
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert fedgp("predict", finished, "--site", "c", *words)[0] == 0
    alone = pd.read_csv(tmp_path / "curves.csv")
    np.testing.assert_allclose(alone["mean"], curves.loc[curves["site"] == "c", "mean"])


def test_a_new_unit_joins_from_eight_rows(finished, tmp_path):
    """It sees the half where g is; the rest comes from the others; the run's folder does not change."""
    x = np.linspace(-1.7, 0.0, 8)
    noisy = -3 * shape(x) + NOISE * np.random.default_rng(5).standard_normal(8)
    pd.DataFrame({"x": x, "y": noisy}).to_csv(tmp_path / "new.csv", index=False)
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    new = Predictor.joined(finished, "new", tmp_path / "new.csv")
    ahead = pd.DataFrame({"x": np.linspace(0.2, 1.6, 20)})
    table = new.predict(ahead)
    assert np.sqrt(np.mean((table["mean"] + 3 * shape(ahead["x"].to_numpy())) ** 2)) < 0.6  # of a signal of sd 2.4
    assert len(new.site.train) == 8
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before
    with pytest.raises(RunError, match="took part"):
        Predictor.joined(finished, "b", tmp_path / "new.csv")


AT = np.array([[-0.9], [0.05], [0.6]])


@pytest.fixture(scope="module")
def known_g():
    """One latent function, its values known where units saw it, and less at the right."""
    inducing = np.linspace(-1, 1, 8)[:, None]
    draw = np.random.default_rng(1).standard_normal(8)
    sd = np.where(inducing[:, 0] > 0.3, 0.5, 0.1)
    return LatentFunctions(inducing, np.array([[0.09]]), np.array([1.3]), 1e-8), LatentPosterior(draw, np.diag(sd**2))


def rows(count, known_g):
    """Rows of a unit with s = .8, R = .05 and σ = .1."""
    rng = np.random.default_rng(count)
    x = rng.uniform(-1, 1, (count, 1))
    f, _ = predict(x, *known_g, UnitParameters(np.array([[0.05]]), np.array([0.8]), 0.01))
    return x, f + 0.1 * rng.standard_normal(count)


def by_hand(x, y, known_g):
    """Mean and variance of f, and the mean of σ², by sums over an even grid of ρ, log σ and s."""
    latents, q = known_g
    [factor], [a], scale, n = latents.whitening(), latents.amplitudes, latents.scales[0], len(y)
    power = max(np.mean(y**2), (y @ y + 1) / (n + 1))
    logs, means, seconds, noises, s = [], [], [], [], np.linspace(-3, 3, 41)[:, None, None]
    for rho in WIDEST * (np.arange(25) + 0.5) / 25:
        both = np.concatenate([x, AT])
        A = one_unit.feature(
            one_unit.squared_gaps(both, latents.inducing), scale, float(a), factor, scale * (math.exp(rho) - 1) / 2
        )
        B = A @ q.covariance @ A.T + np.diag(a**2 - (A**2).sum(1))
        for log_sd in 0.5 * math.log(0.09 * power) + np.linspace(-4.5, 4.5, 15):
            C = s**2 * B + math.exp(2 * log_sd) * np.diag([1.0] * n + [0.0] * len(AT))
            prior = -0.5 * s[:, 0, 0] ** 2 * a**2 / (AMPLITUDES * power) - DECAY * rho
            prior -= 0.5 * ((log_sd - 0.5 * math.log(0.09 * power)) / SPREAD) ** 2
            m = s * (A @ q.mean)[:, None]
            left, gain = y[:, None] - m[:, :n], np.linalg.solve(C[:, :n, :n], C[:, :n, n:]).mT
            fit = (left * np.linalg.solve(C[:, :n, :n], left)).sum((1, 2))
            logs.append(prior - 0.5 * (np.linalg.slogdet(2 * np.pi * C[:, :n, :n])[1] + fit))
            means.append((m[:, n:] + gain @ left)[..., 0])
            seconds.append(np.diagonal(C[:, n:, n:] - gain @ C[:, :n, n:], axis1=1, axis2=2) + means[-1] ** 2)
            noises.append(np.full(len(s), math.exp(2 * log_sd)))
    logs, means, seconds, noises = map(np.concatenate, (logs, means, seconds, noises))
    w = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    return w @ means, w @ seconds - (w @ means) ** 2, float(w @ noises)


def test_it_is_the_posterior_mixture_over_all_parameters(known_g):
    """Three rows: both sums are within a few per cent of the integral, which spans orders of magnitude of σ."""
    x, y = rows(3, known_g)
    mean, variance, noise = predict_joining((x, y), AT, *known_g)
    expected = by_hand(x, y, known_g)
    np.testing.assert_allclose(mean, expected[0], atol=0.04 * np.sqrt(expected[1]).max())
    np.testing.assert_allclose(variance, expected[1], rtol=0.08)
    assert noise == pytest.approx(expected[2], rel=0.1)


def test_with_many_rows_it_is_what_the_true_parameters_predict_and_the_rows_are_used(known_g):
    x, y = rows(150, known_g)
    truth = UnitParameters(np.array([[0.05]]), np.array([0.8]), 0.01)
    mean, variance, noise = predict_joining((x, y), AT, *known_g)
    told, known = predict(AT, *known_g, truth)
    assert noise == pytest.approx(0.01, rel=0.4)
    assert np.all(np.abs(mean - told) < 3 * np.sqrt(variance + known))
    assert np.all(variance < known)  # 150 rows say more of f than q(u) alone
