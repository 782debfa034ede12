"""The public Python API: a table in, a finished run out and read back; in the words of scikit-learn and BoTorch too."""

import builtins
import logging
import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import test_predict
import torch
from gpytorch.likelihoods import StudentTLikelihood
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib import pyplot
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

import fedgp_flower as fg
import strategies
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.run.dependence import effects

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


@pytest.mark.parametrize(
    ("data", "keys", "error", "words"),
    [
        ({}, {}, DataError, "`data` holds no table; expected one for each site"),
        (table().rename(columns={"ward": "x"}), {}, DataError, "table: .* named more than once: `x`"),
        (table().assign(x=1j), {}, DataError, "table: expected columns of numbers, text or dates; .*column x"),
        ([table()], {}, DataError, "expected a DataFrame, .*; got list"),
        ({"x": np.arange(9)}, {}, DataError, "x: expected a DataFrame, .*; got ndarray"),
        (table(), {"sites": "3"}, ConfigError, "`sites` = '3': expected a whole number"),
        (table(), {"sites": 2.5}, ConfigError, "`sites` = 2.5: expected a whole number"),
        (
            table(),
            {"target": "yy"},
            DataError,
            "^the table: missing column `yy`; it has `x`, `outcome`, `ward`$",
        ),
        (table()[["x"]], {}, DataError, "no feature column besides the target; name one in `features`; it has `x`"),
        ({"a/b": table(), "a-b": table()}, {}, DataError, "more than one is named `a-b`"),
    ],
)
def test_unusable_tables_and_arguments_are_named(data, keys, error, words, tmp_path):
    with pytest.raises(error, match=words):
        fg.run(data, **keys, options={"output-dir": str(tmp_path)})


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make the folder .*file/data/\w+: Not a directory"):
        fg.run(table(), target="outcome", options={"output-dir": str(tmp_path / "file")})


def test_categories_are_text_whatever_they_and_columns_are_called_and_keys_may_be_numbers_of_numpy(tmp_path):
    frame = table().assign(x=lambda own: pd.cut(own["x"], 3), ward=lambda own: pd.Categorical(own["ward"] + 0.0))
    frame.columns = [0, "outcome", 2]
    options = {key: np.array(value)[()] for key, value in FEW.items()} | {"output-dir": str(tmp_path)}
    posterior = fg.run(frame, target="outcome", sites=np.int64(2), options=options).posterior
    intervals, wards = (column.levels for column in posterior.preparation.columns)
    assert (intervals, wards) == (tuple(sorted(map(str, frame[0].cat.categories))), ("0", "1", "2"))
    found = posterior.predict(frame)
    assert found["mean"].nunique() > 2
    pd.testing.assert_frame_equal(posterior.predict(frame.astype({2: int}).rename(columns=" {} ".format)), found)


def test_tables_of_sites_that_write_differently_are_one_and_their_problems_have_names(tmp_path):
    frames = [rows.drop(columns="ward").assign(day="2024-01-31") for _, rows in table().groupby("ward")]
    frames[1] = frames[1].assign(x=lambda own: own["x"].map(lambda x: str(x).replace(".", ",")), day="31.01.2024")
    frames[2].loc[frames[2].index[4], "x"] = np.nan
    sites, options = dict(zip(["north", "east", "west"], frames, strict=True)), {"output-dir": str(tmp_path)}
    with pytest.raises(DataError) as caught:
        fg.run(sites, target="outcome", options=options)
    told = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in told] == ["north", "east", "west"]
    assert all("`day` holds dates" in line for line in told)
    assert "column `x`: empty or NaN cell in row 5" in told[2]
    keys = {"dates": "days", "missing": "drop", "baselines.local-only": False, "baselines.pooled": False}
    run = fg.run(sites, target="outcome", num_rounds=1, options=options | keys)
    assert (run.metrics.data["rows"], run.metrics.data["dropped"]) == (72 - 1, 1)
    assert set(run.metrics.labels.values()) == set(sites)
    [day] = [column for column in run.metrics.data["columns"] if column["name"] == "days(day)"]
    assert day["sd"] == 0.0  # one day, whichever way it is written: constant, said and kept


def admissions(rows: int = 72) -> pd.DataFrame:
    """Whole numbers, text and real numbers in units far from standard ones."""
    return test_predict.table(rows).drop(columns="sex").astype({"age": int})


SHORT = {"pvi.steps": 4, "pvi.local-update": "adam"}
SAME = {"rtol": 1e-9, "atol": 1e-9}
"""Rounding of the same operations in another order, at values around 300."""


@pytest.fixture(scope="module", params=["fsgp", "pvi"])
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
    with pytest.raises(DataError, match="DataFrame with the columns age, dose, clinic; got ndarray"):
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
    run = fg.run(frame, method="pvi", target="outcome", sites=2, num_rounds=1, options=options)
    posterior, told = run.posterior, run.predictions
    assert told["class"].tolist() == ["high" if target == 0 else "low" for target in told["target"]]
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
    with pytest.raises(RunError, match="`age` cannot be plotted; possible are none, as this is no single Gaussian"):
        site.plot("age")
    with pytest.raises(RunError, match="can predict at a site"):
        run.posterior.predict(pd.DataFrame({"x": [0.0]}), site="ward 1")


def test_new_rows_are_judged_as_a_site_s_are(run):
    whole = run.posterior.predict(pd.DataFrame({"x": [0, 1]}))
    pd.testing.assert_frame_equal(whole, run.posterior.predict(pd.DataFrame({"x": ["0", "1.0"]})))
    with pytest.raises(DataError, match=r"the table: column `x`: empty or NaN cell in row 2"):
        run.posterior.predict(pd.DataFrame({"x": [0.0, np.nan]}))
    with pytest.raises(DataError, match="the table: column names must differ; named more than once: `x`"):
        run.posterior.predict(pd.DataFrame([[0.0, 1.0]], columns=["x", "x"]))
    with pytest.raises(DataError, match=r"the table: missing column `x`; it has `z`$"):
        run.posterior.distribution(pd.DataFrame({"z": [0.0]}))


def test_durations_are_refused_with_a_remedy(tmp_path):
    waited = pd.to_timedelta(np.arange(30), unit="h")
    frame = pd.DataFrame({"waited": waited, "y": np.arange(30.0)})
    with pytest.raises(DataError, match="column `waited`: dates or durations; expected numbers or text, for example"):
        fg.run(frame, target="y", sites=2, options={"output-dir": str(tmp_path)})


def test_the_strategies_are_in_the_namespace():
    assert fg.strategies is strategies


SMALL = {"model.num-inducing": 8, "sgpr.exchanges": 6}


def rows(count=60):
    rng = np.random.default_rng(2)
    x = rng.uniform(-2, 2, (count, 2))
    return x, 50 + 10 * np.sin(1.5 * x[:, 0]) + 3 * x[:, 1] + rng.normal(size=count)


@pytest.fixture(scope="module")
def fitted():
    x, y = rows()
    return fg.FederatedGPRegressor(num_rounds=4, options=SMALL).fit(x, y, groups=np.arange(60) % 3)


def test_it_predicts_in_units_of_the_target_whatever_the_sites(fitted):
    x, y = rows()
    exact = clone(fitted).set_params(options={"model.num-inducing": 60, "method": "sgpr"})
    three, one = (clone(exact).fit(x, y, groups=groups) for groups in (np.arange(60) % 3, np.zeros(60)))
    np.testing.assert_allclose(one.predict(x), three.predict(x), rtol=1e-2)  # inducing points lie elsewhere
    mean, sd = fitted.predict(x, return_std=True)
    assert fitted.score(x, y) > 0.9
    assert np.mean(np.abs(y - mean) < 2 * sd) > 0.85
    assert sd.min() > 0.5


def test_classes_keep_their_names():
    x, y = rows()
    names = np.where(y > 50, "sick", "healthy")
    model = fg.FederatedGPClassifier(sites=2, num_rounds=3, options=SMALL).fit(x, names)
    assert list(model.classes_) == ["healthy", "sick"]
    np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1)
    assert np.mean(model.predict(x) == names) > 0.85
    thirds = np.array(["low", "middle", "high"])[np.digitize(y, (46, 54))]
    model.fit(x, thirds)
    assert list(model.classes_) == ["high", "low", "middle"]
    assert model.predict_proba(x).shape == (60, 3)
    assert np.mean(model.predict(x) == thirds) > 0.8


def test_the_posterior_of_an_estimator_has_the_names_of_its_table_and_its_classes():
    """It would be wrong without a word if `x1` meant the second column of a table whose first is `x1`."""
    x, y = rows()
    table = pd.DataFrame(x, columns=["x1", "x0"])
    logging.getLogger("flwr").setLevel(logging.INFO)
    model = fg.FederatedGPRegressor(sites=2, num_rounds=3, options=SMALL).fit(table, y)
    assert not logging.getLogger("flwr").isEnabledFor(logging.INFO)  # Flower would write of every round
    found = model.posterior_.predict(table[["x0", "x1"]])
    np.testing.assert_array_equal(found["mean"], model.predict(table))
    assert model.posterior_.outside(pd.DataFrame({"x1": [0.0, 9.0], "x0": [-9.0, 0.0]})).tolist() == ["x0", "x1"]
    grades = fg.FederatedGPClassifier(sites=2, num_rounds=3, options=SMALL).fit(table, np.digitize(y, (50,)) + 1)
    shares = grades.posterior_.predict(table)
    assert list(shares) == ["probability of 1", "probability of 2"]
    np.testing.assert_array_equal(shares, grades.predict_proba(table))


def test_groups_sites_and_random_states_of_any_kind(fitted):
    x, y = rows()
    groups = np.array([[1, "b", None][k % 3] for k in range(60)], dtype=object)
    for missing in (groups, np.where(np.arange(60) % 3 == 2, np.nan, 1.0)):
        with pytest.raises(ValueError, match=r"`groups` names no site for row 3$"):
            clone(fitted).fit(x, y, groups=missing)
    with pytest.raises(ValueError, match="`sites` = 0: expected a whole number, at least 1"):
        clone(fitted).set_params(sites=0).fit(x, y)
    few, states = {**SMALL, "sgpr.exchanges": 2}, (np.random.RandomState(3), np.random.RandomState(3))
    mixed = groups.copy()
    mixed[2::3] = 2
    for state in (None, np.int64(1)):
        model = clone(fitted).set_params(options=few, random_state=state).fit(x, y, groups=mixed)
        assert set(model.posterior_.run.metrics.labels) == {"1", "2", "b"}
    one, two = (clone(fitted).set_params(options=few, random_state=state, sites=2).fit(x, y) for state in states)
    np.testing.assert_array_equal(one.predict(x), two.predict(x))


def test_a_wrong_key_is_a_value_error_with_the_projects_own_as_its_cause():
    x, y = rows()
    with pytest.raises(ValueError, match=r"unknown configuration key `model.kernal`") as error:
        fg.FederatedGPRegressor(options={"model.kernal": "rbf"}).fit(x, y)
    assert isinstance(error.value.__cause__, ConfigError)
    for kind in (fg.FederatedGPRegressor, fg.FederatedGPClassifier):
        with pytest.raises(ValueError, match=r"'ordinal': this estimator has \w+, .* here; `fg.run` has all"):
            kind(options={"model.likelihood": "ordinal"}).fit(x, y > 50)


def test_a_formula_names_the_columns_of_an_estimator_as_those_of_an_array():
    x, y = rows()
    table, model = pd.DataFrame(x, columns=["dose", "age"]), fg.FederatedGPRegressor(options={"formula": "y ~ x1"})
    assert np.corrcoef(model.fit(table, y).predict(table), table["age"])[0, 1] == pytest.approx(1)


def test_an_estimator_warns_of_keys_of_another_method():
    x, y = rows()
    options = {**SMALL, "sgpr.exchanges": 2, "pvi.steps": 3}
    with pytest.warns(UserWarning, match="`method` = 'sgpr' does not read `pvi.steps`") as told:
        fg.FederatedGPRegressor("sgpr", sites=2, options=options).fit(x, y)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("method", ["pooled", "fgpr"])
def test_a_method_without_a_posterior_is_named_before_training(method, monkeypatch):
    monkeypatch.delattr("fedgp_flower.estimators.strategy_class")
    with pytest.raises(ValueError, match=f"method '{method}' saves no posterior for new rows; take one that does"):
        fg.FederatedGPRegressor(method).fit(*rows())


@pytest.mark.filterwarnings("ignore")  # BoTorch's own, at import
def test_acquisition_functions_are_optimised_on_a_federated_posterior(fitted):
    acquisition = pytest.importorskip("botorch.acquisition")
    from botorch.optim import optimize_acqf

    model, points = fitted.posterior_.to_botorch(), torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=torch.float64)
    table, found = pd.DataFrame(points.numpy(), columns=["x0", "x1"]), model.posterior(points)
    exact, noisy = (fitted.posterior_.distribution(table, noise=noise) for noise in (False, True))
    torch.testing.assert_close(found.mean[:, 0], exact.mean)
    torch.testing.assert_close(found.distribution.covariance_matrix, exact.covariance_matrix)
    torch.testing.assert_close(model.posterior(points, observation_noise=True).variance[:, 0], noisy.variance)
    assert torch.autograd.gradcheck(lambda x: model.posterior(x).mean, points.clone().requires_grad_())
    bound = acquisition.qUpperConfidenceBound(model, beta=1.0)
    box = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    best, value = optimize_acqf(bound, box, q=1, num_restarts=2, raw_samples=16)
    grid = torch.cartesian_prod(*[torch.linspace(-2, 2, 15).double()] * 2)
    with torch.no_grad():
        assert value >= bound(grid[:, None]).max() - 0.2  # of a spread of 20
    assert best[0, 1] > 1  # the target rises with the second input
    assert model.subset_output([0]) is model
    heavy = type(model)(replace(model.exported, likelihood=StudentTLikelihood()))
    torch.testing.assert_close(heavy.posterior(points).mean, found.mean)
    with pytest.raises(NotImplementedError, match="StudentTLikelihood are not normal: leave `observation_noise` out"):
        heavy.posterior(points, observation_noise=True)
    for look in (
        lambda: acquisition.qKnowledgeGradient(model, num_fantasies=2)(points[None].repeat(1, 2, 1)),
        lambda: acquisition.qNegIntegratedPosteriorVariance(model, mc_points=points)(points[None]),
    ):
        with pytest.raises(NotImplementedError, match=r"has no training rows.*qUpperConfidenceBound"):
            look()
    with pytest.raises(NotImplementedError, match="Conditioning on 2 rows needs a new run"):
        model.condition_on_observations(points, points[:, :1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [fg.FederatedGPRegressor, fg.FederatedGPClassifier])
def test_scikit_learns_own_checks_pass(kind):
    check_estimator(kind(num_rounds=3, sites=2, options={"model.num-inducing": 10, "sgpr.exchanges": 4}))


def test_an_export_is_a_copy_that_learns_nothing_and_is_differentiable_by_its_inputs(fitted):
    saved = deepcopy(fitted.posterior_.standardised)
    [(exported, likelihood)] = saved.export()
    assert not any(p.requires_grad for p in (*exported.parameters(), *likelihood.parameters()))
    assert not exported.training
    assert not likelihood.training
    assert all(p.requires_grad for p in saved.model.parameters())
    x = torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=torch.float64).requires_grad_()
    before = exported(x).mean
    before.sum().backward()
    assert bool((x.grad != 0).any())
    for parameter in saved.model.parameters():
        parameter.data.fill_(0.3)
    torch.testing.assert_close(exported(x).mean, before)
