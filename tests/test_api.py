"""The public Python API: a table in, a finished run out, and the same run read back."""

import builtins
import importlib
import inspect
import pydoc
import re

import numpy as np
import pandas as pd
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib import pyplot

import fedgp_flower as fg
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.run.dependence import effects
from fedgp_flower.run.registry import BUILT_IN

FEW = {"model.num-inducing": 6, "baselines.local-only": False, "baselines.pooled": False, "evaluate-every": 0}


def table(rows: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    x = rng.uniform(-3, 3, rows)
    return pd.DataFrame({"x": x, "outcome": np.sin(x) + 0.1 * rng.normal(size=rows), "ward": np.arange(rows) % 3})


SEEN: list[tuple[int, int]] = []
"""Rounds that the observer of the first run heard of."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    options = FEW | {"output-dir": str(tmp_path_factory.mktemp("api")), "name": "first"}
    frame = table().assign(ward=lambda frame: frame["ward"].map("ward {}".format))
    hear = lambda row, total: SEEN.append((row["round"], total))  # noqa: E731
    return fg.run(frame, target="outcome", site="ward", num_rounds=8, options=options, on_round=hear)


def test_a_table_becomes_a_run_with_figures_and_a_posterior(run, capsys):
    rounds = len(run.history)
    assert (run.metrics.sites, run.config["num-server-rounds"]) == (3, 8)
    assert 1 < rounds <= 8  # it ends where more exchanges promise nothing
    assert run.report_path.is_file()
    assert [number for number, _ in SEEN] == [*range(1, rounds + 1)]
    assert [total for _, total in SEEN[:2]] == [8, 8]  # too few gains to tell
    assert all(number <= total <= 2 * rounds for number, total in SEEN[2:])
    fg.print_round(run.history.iloc[0].to_dict(), 8)
    assert "round 1 of at most 8" in capsys.readouterr().out
    x = np.linspace(-2, 2, 20)
    predicted = run.posterior.predict(pd.DataFrame({"x": x}))
    assert np.abs(predicted["mean"] - np.sin(x)).max() < 0.3
    assert list(predicted) == ["mean", "sd", "q2.5", "q25", "q50", "q75", "q97.5"]


def test_a_notebook_shows_a_bar_below_its_cell_until_the_run_ends(tmp_path, monkeypatch):
    shell = type("ZMQInteractiveShell", (InteractiveShell,), {}).instance()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    with capture_output() as cell:
        fg.run(table(), sites=2, num_rounds=2, options=FEW | {"output-dir": str(tmp_path)})
    shell.clear_instance()
    shown = [output.data["text/html"] for output in cell.outputs]
    assert "<progress value=" in shown[2]
    assert re.search(r"</progress> round 2 of at most 2  at most 0:00:00 left  \d+ exchanges", shown[2])
    assert [shown[0], *shown[3:]] == ["", ""]


def test_the_signature_and_the_help_of_run_are_those_of_the_function():
    signature = inspect.signature(fg.run)
    assert {"data", "target", "site", "sites", "method", "options"} <= set(signature.parameters)
    assert "site: Column that names the site of a row" in pydoc.render_doc(fg.run)


def test_a_notebook_shows_the_answer_and_draws_on_axes(run):
    assert "Typical error of outcome" in run._repr_html_()
    assert "<td>x</td><td>numeric</td>" in run.posterior._repr_html_()
    observed, residuals = run.plot()
    assert (observed.get_ylabel(), residuals.get_xlabel()) == ("observed outcome", "predicted outcome")
    ax = run.posterior.plot("x")
    drawn = ax.lines[0].get_xdata(), ax.lines[0].get_ydata()
    np.testing.assert_allclose(drawn[1], run.posterior.predict(pd.DataFrame({"x": drawn[0]}))["mean"], atol=1e-9)
    assert {observed.figure.number, ax.figure.number} <= set(pyplot.get_fignums())  # a notebook shows them
    pyplot.close("all")
    with pytest.raises(RunError, match="the effect of `z` cannot be plotted; possible are x"):
        run.posterior.plot("z")


def test_draws_have_the_moments_of_f(run):
    new = pd.DataFrame({"x": [-1.0, 0.5]})
    draws, f = run.posterior.sample(new, 4000, noise=False, seed=3), run.posterior.distribution(new)
    np.testing.assert_allclose(draws.mean(axis=0), f.mean.numpy(), atol=4 * float(f.stddev.max()) / 60)
    np.testing.assert_allclose(np.cov(draws.T), f.covariance_matrix.numpy(), atol=0.1 * float(f.variance.max()))
    assert (draws == run.posterior.sample(new, 4000, noise=False, seed=3)).all()


def test_any_number_of_draws_of_a_mixture(run, monkeypatch):
    """One draw comes from one component alone, so that the others give none."""
    parts, new, counts = run.posterior.to_gpytorch_draws(), pd.DataFrame({"x": [-1.0, 0.5]}), (0, 1, 4, 9, 10, 11, 12)
    for copies in (1, 3):
        monkeypatch.setattr(type(run.posterior), "to_gpytorch_draws", lambda _, many=copies: parts * many)
        assert [run.posterior.sample(new, count).shape for count in counts] == [(count, 2) for count in counts]


def test_a_table_per_site_is_that_site_s_rows(run, tmp_path):
    frames = {f"ward {ward}": rows.drop(columns="ward") for ward, rows in table().groupby("ward")}
    again = fg.run(frames, target="outcome", num_rounds=8, options=FEW | {"output-dir": str(tmp_path)})
    assert set(again.metrics.labels.values()) == set(run.metrics.labels.values()) == set(frames)
    assert again.metrics.data["rows"] == run.metrics.data["rows"] == 72
    assert again.metrics.test["rmse"] == pytest.approx(run.metrics.test["rmse"], rel=0.3)  # other rows are held out
    with pytest.raises(ConfigError, match="leave `site` out"):
        fg.run(frames, target="outcome", site="x")


def test_tables_of_sites_that_write_differently_are_one_and_their_problems_have_names(tmp_path):
    frames = [rows.drop(columns="ward").assign(day="2024-01-31") for _, rows in table().groupby("ward")]
    frames[1] = frames[1].assign(x=lambda own: own["x"].map(lambda x: str(x).replace(".", ",")), day="31.01.2024")
    frames[2].loc[frames[2].index[4], "x"] = np.nan
    sites, options = dict(zip(["north", "east", "west"], frames, strict=True)), {"output-dir": str(tmp_path)}
    with pytest.raises(DataError) as caught:
        fg.run(sites, target="outcome", options=options)
    told = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in told] == ["north.parquet", "east.parquet", "west.parquet"]
    assert all("`day` holds dates" in line for line in told)
    assert "column `x`: empty or NaN cell in row 5" in told[2]
    keys = {"dates": "days", "missing": "drop", "baselines.local-only": False, "baselines.pooled": False}
    run = fg.run(sites, target="outcome", num_rounds=1, options=options | keys)
    assert (run.metrics.data["rows"], run.metrics.data["dropped"]) == (72 - 1, 1)
    assert set(run.metrics.labels.values()) == set(sites)
    [day] = [column for column in run.metrics.data["columns"] if column["name"] == "days(day)"]
    assert day["sd"] == 1.0  # one day, whichever way it is written: constant, said and kept


def admissions(rows: int = 72) -> pd.DataFrame:
    """Whole numbers, text and real numbers in units far from standard ones."""
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"age": rng.integers(20, 80, rows), "clinic": rng.choice(["north", "south", "west"], rows)})
    frame["dose"] = rng.lognormal(3, 0.5, rows)
    effect = frame["clinic"].map({"north": 0.0, "south": 8.0, "west": -5.0})
    frame["outcome"] = 300 + frame["age"] + 9 * np.sin(frame["dose"] / 9) + effect + rng.normal(0, 3, rows)
    return frame


SHORT = {"pvi.steps": 4, "pvi.local-update": "adam"}
SAME = {"rtol": 1e-9, "atol": 1e-9}
"""Rounding of the same operations in another order, at values around 300."""


@pytest.fixture(scope="module", params=["fsgp", "pvi", "hierarchical-gp"])
def finished(request, tmp_path_factory):
    options = FEW | SHORT | {"output-dir": str(tmp_path_factory.mktemp("posterior")), "name": "run"}
    return fg.run(admissions(), method=request.param, target="outcome", sites=2, num_rounds=2, options=options)


def test_effects_are_the_posterior_of_f_along_one_column(finished):
    posterior = finished.posterior
    found = effects(posterior)
    if len(posterior.to_gpytorch_draws()) > 1:
        assert found == []
        return
    means = dict(zip(posterior.preparation.names, posterior.preparation.input_mean, strict=True))
    [clinic] = [own for own in found if own.levels]
    assert not any(own.dates for own in found)
    f = posterior.distribution(pd.DataFrame({"age": means["age"], "dose": means["dose"], "clinic": clinic.levels}))
    np.testing.assert_allclose(clinic.median, f.mean, **SAME)
    for half in (clinic.high - clinic.median, clinic.median - clinic.low):
        np.testing.assert_allclose(half, 1.959963984540054 * f.stddev, **SAME)
    spreads = [np.ptp(own.median) for own in found]
    assert spreads == sorted(spreads, reverse=True)
    [age] = [own for own in found if own.name == "age"]
    assert (np.abs(age.values - means["age"]) < 2.001 * 18).all()
    assert age.values[0] < means["age"] < age.values[-1]
    if finished.config["method"] == "fsgp":
        assert (admissions()["age"].min() <= age.values).all()


def test_no_column_is_moved_beyond_its_rows(tmp_path):
    """Skewed, of counts, of zeros and ones, and nearly always zero: mean ± 2 sd would leave the data."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({
        "crp": draw.lognormal(3, 1, 300), "visits": draw.poisson(0.8, 300), "diabetes": draw.integers(0, 2, 300),
        "dialyses": np.where(draw.random(300) < 0.02, 40 + draw.random(300), 0.0), "age": draw.normal(60, 15, 300),
        "site": np.arange(300) % 3,
    })  # fmt: skip
    frame["days"] = np.log(frame["crp"]) + 0.5 * frame["visits"] + frame["diabetes"] + 0.1 * draw.standard_normal(300)
    options = FEW | {"output-dir": str(tmp_path), "sgpr.exchanges": 6}
    run = fg.run(frame.astype({"site": str}), target="days", site="site", options=options)
    found = {own.name: own for own in effects(run.posterior)}
    assert found["diabetes"].levels == ("0", "1")
    for name in ("crp", "visits", "age"):
        shown, seen = found[name].values, frame[name].to_numpy()
        bin_width = 0.3 * seen.std()
        assert seen.min() <= shown[0] <= np.quantile(seen, 0.1) + bin_width, name
        assert np.quantile(seen, 0.9) - bin_width <= shown[-1] <= seen.max(), name
    assert "dialyses" not in found  # of 98 % of the rows it says nothing


def test_the_joint_distribution_is_in_original_units(finished):
    posterior, new = finished.posterior, admissions(12)
    with pytest.raises(DataError, match="DataFrame with the columns age, clinic, dose; got ndarray"):
        posterior.distribution(np.zeros((2, 3)))
    table, latent = posterior.predict(new), posterior.distribution(new)
    observed = posterior.distribution(new, noise=True)
    assert table["mean"].std() > 1  # a prediction of something
    np.testing.assert_allclose(latent.mean, table["mean"], **SAME)
    np.testing.assert_allclose(observed.mean, table["mean"], **SAME)
    np.testing.assert_allclose(observed.stddev, table["sd"], **SAME)
    noise = observed.covariance_matrix - latent.covariance_matrix
    torch.testing.assert_close(noise, noise[0, 0] * torch.eye(12).double(), rtol=1e-9, atol=1e-8)
    assert noise[0, 0] > 0
    assert torch.linalg.eigvalsh(latent.covariance_matrix).min() > -1e-8


def test_classes_are_no_single_mixture_but_f_is(tmp_path):
    frame = admissions()
    frame["outcome"] = np.where(frame["outcome"] > frame["outcome"].median(), "high", "low")
    options = FEW | SHORT | {"output-dir": str(tmp_path), "model.likelihood": "bernoulli"}
    posterior = fg.run(frame, method="pvi", target="outcome", sites=2, num_rounds=1, options=options).posterior
    table = posterior.predict(frame)
    draws, inputs = posterior.to_gpytorch_draws(), posterior.inputs(frame)
    low = torch.stack([likelihood(model(inputs)).mean for model, likelihood in draws]).mean(0)
    np.testing.assert_allclose(table["probability of low"], low, rtol=1e-7)
    wanted = torch.stack([model(inputs).mean for model, _ in draws]).mean(0)
    torch.testing.assert_close(posterior.distribution(frame).mean, wanted)
    with pytest.raises(RunError, match=r"mixture of 100 models.*`to_gpytorch_draws\(\)`"):
        posterior.to_gpytorch()
    with pytest.raises(RunError, match="not normal"):
        posterior.distribution(frame, noise=True)


def test_a_posterior_predicts_at_a_site_where_the_site_keeps_something(tmp_path, run):
    options = FEW | {"output-dir": str(tmp_path)}
    frame = admissions().assign(ward=lambda frame: (frame["age"] > 50).map({True: "old", False: "young"}))
    finished = fg.run(frame, method="sfvi", target="outcome", site="ward", num_rounds=2, options=options)
    there, anywhere = finished.posterior.predict(frame, site="old"), finished.posterior.predict(frame)
    pd.testing.assert_frame_equal(there, fg.load_run(finished.path).posterior.predict(frame, site="old"))
    assert (there["sd"] < anywhere["sd"]).all()  # what the site knows of its deviation is no longer open
    site = finished.posterior.at_site(finished.path, "old")
    with pytest.raises(RunError, match="no sparse Gaussian process that can be exported"):
        site.to_gpytorch()
    with pytest.raises(RunError, match="can predict at a site"):
        run.posterior.predict(pd.DataFrame({"x": [0.0]}), site="ward 1")


def test_new_rows_are_judged_as_a_site_s_are(run):
    whole = run.posterior.predict(pd.DataFrame({"x": [0, 1]}))
    pd.testing.assert_frame_equal(whole, run.posterior.predict(pd.DataFrame({"x": ["0", "1.0"]})))
    with pytest.raises(DataError, match=r"the table: column `x`: empty or NaN cell in row 2"):
        run.posterior.predict(pd.DataFrame({"x": [0.0, np.nan]}))
    with pytest.raises(DataError, match=r"the table.*`x`"):
        run.posterior.distribution(pd.DataFrame({"z": [0.0]}))


def test_every_strategy_is_in_the_namespace_and_the_same_class():
    rows = [row.strategy.partition(":") for row in BUILT_IN.values()]
    assert dir(fg.strategies) == sorted({name for _, _, name in rows})
    for module, _, name in rows:
        assert getattr(fg.strategies, name) is getattr(importlib.import_module(module), name)
