"""A method, and a model of SFVI, in a package of its own are run, saved, predicted, reported, resumed and compared."""

import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faults import Fault, FaultyGrid, alike, arrays, blamed, configured, crashed
from faults import run as run_in_memory
from safetensors.numpy import load_file
from scipy.linalg import cho_factor, cho_solve

from fedgp_flower import options
from fedgp_flower.agreement import Agreement
from fedgp_flower.clients.numpy_client import handlers
from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.errors import ConfigError, ProtocolError, RunError
from fedgp_flower.methods.sfvi import rows
from fedgp_flower.methods.sfvi.options import MODELS
from fedgp_flower.options import PositiveInt, Section
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.api import load_run
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import default_config, methods, option_classes, parse_config
from fedgp_flower.run.user_config import for_flower, parse_assignments

PACKAGE = Path(__file__).parent / "toy_package"
ROOT = Path(__file__).parent.parent
SITES = 3


def ask(*questions):
    """A function of any arguments that asks and returns None."""

    def asking(*arguments):
        yield from questions

    return asking


def forget_rows() -> None:
    methods.cache_clear()
    option_classes.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def toy():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        forget_rows()
        yield
    forget_rows()
    for name in [name for name in sys.modules if name.startswith("toy_method")]:
        del sys.modules[name]


def keys(folder: Path, *words: str) -> dict[str, object]:
    usual = ["method=toy", "dataset=diabetes", "num-server-rounds=4", "baselines.pooled=false", "name=run"]
    return parse_assignments([*usual, "baselines.local-only=false", f"output-dir={folder}", *words])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_in_process(keys(tmp_path_factory.mktemp("toy"), "toy.noise=0.7"), SITES)


def test_its_figures_are_those_of_all_rows_in_one_place(run):
    """The sums are additive: weights after each step are those of centralised expectation maximisation."""
    config = parse_config(load_run(run).config)
    agreed, arrays = Predictor.of(read_run(run)).preparation, load_run(run).saved.arrays
    sites = [site.encode(agreed) for site in load_all_sites(config, SITES)]
    x = np.vstack([np.hstack([np.ones((len(site.y), 1)), site.x]) for site in sites])
    y, noise = np.concatenate([site.y for site in sites]), 0.7
    for _ in range(4):
        precision = x.T @ x / noise + np.eye(x.shape[1]) / 3.0**2
        covariance = np.linalg.solve(precision, np.eye(x.shape[1]))
        mean = np.linalg.solve(precision, x.T @ y / noise)
        noise = (np.sum((y - x @ mean) ** 2) + np.trace(x @ covariance @ x.T)) / len(y)
    np.testing.assert_allclose(arrays["weights.mean"], mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(arrays["noise"], noise, rtol=1e-9)


def test_it_is_evaluated_saved_and_predicts_what_its_sites_predicted(run):
    read, page = load_run(run), (run / "report.html").read_text()
    assert "Weights of the toy" in page
    assert re.search(r"<td>weights</td><td>11</td>", page)
    assert 40 < read.metrics.test["rmse"] < 70
    rows = pd.read_csv(run / "predictions.csv", dtype={"site": str})
    for site in load_all_sites(parse_config(read.config), SITES):
        again, before = read.posterior.predict(site.test), rows[rows["site"] == site.site]
        np.testing.assert_allclose(again[["mean", "sd"]], before[["mean", "sd"]], rtol=1e-10)


def test_it_goes_on_where_it_was_with_its_keys_in_the_free_form_one(run, tmp_path):
    """Flower refuses keys that pyproject.toml does not list."""
    run_in_process(keys(tmp_path, "toy.noise=0.7", "num-server-rounds=2"), SITES)
    flat = for_flower(keys(tmp_path, "toy.noise=0.7", "resume=true"))
    assert flat.keys() <= default_config().keys()
    assert flat["extra"] == "toy.noise=0.7"
    assert load_run(run_in_process(flat, SITES)).metrics.test == load_run(run).metrics.test


@pytest.mark.parametrize("way", ["", "extra="])
def test_its_keys_are_checked_like_all_others(tmp_path, way):
    classes = "model.likelihood=bernoulli", "`method` = 'toy' needs 'gaussian'"  # its options name no likelihood
    wrong = ("toy.noise=-1", "`toy.noise` = -1"), ("toy.nose=1", "`toy.nose`; did you mean `toy.noise`"), classes
    for word, message in wrong:
        with pytest.raises(ConfigError, match=message):
            parse_config(keys(tmp_path, f"{way}{word}"))


@pytest.mark.parametrize("table", ["", "model"])
def test_keys_without_a_table_or_in_one_of_every_run_are_refused_by_method(monkeypatch, tmp_path, table):
    from toy_method.shared import ToyOptions

    monkeypatch.setattr(ToyOptions, "table", table)
    forget_rows()
    with pytest.raises(ConfigError, match=f"method 'toy': the `table` of its ToyOptions is '{table}'"):
        parse_config(keys(tmp_path))
    forget_rows()


def test_commands_know_it_in_a_process_of_its_own(run, tmp_path):
    """Nothing but the package on the path."""
    code = """
from fedgp_flower.cli import main
from matplotlib.figure import Figure
Figure.savefig = lambda figure, target, **options: None
for words in WORDS:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code
"""
    table = tmp_path / "new.csv"
    load_all_sites(parse_config(load_run(run).config), SITES)[0].test.to_csv(table, index=False)
    words = [["methods"], ["compare", str(run), str(run)]]
    words += [["predict", str(run), "--input", str(table), "--output", str(tmp_path / "out.csv")]]
    model = ["method=sfvi", "sfvi.learning-rate=0.3", "sfvi.model=toy-linear", "sfvi.toy-noise=0.5", "name=model"]
    model += ["sfvi.structure=full", "dataset=diabetes", "features=age,bmi,bp", f"output-dir={tmp_path}"]
    model += [f"baselines.{name}=false" for name in ("linear", "local-only", "pooled")]
    words += [["run", "--sites", str(SITES), *model, "num-server-rounds=60", "evaluate-every=0"]]
    words += [["predict", str(tmp_path / "model"), "--input", str(table), "--output", str(tmp_path / "model.csv")]]
    path = os.pathsep.join([str(PACKAGE), str(ROOT)])
    command = [sys.executable, "-c", code.replace("WORDS", repr(words))]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert "toy" in done.stdout
    assert len(pd.read_csv(tmp_path / "out.csv")) == len(pd.read_csv(table))
    # the model is one file and a line that names it: q(Z_G) is the exact posterior, and its section is reported
    agreed, chosen = Predictor.of(read_run(run)).preparation, ["age", "bmi", "bp"]  # of the same rows
    where = [agreed.names.index(name) for name in chosen]
    sites = [site.encode(agreed) for site in load_all_sites(parse_config(load_run(run).config), SITES)]
    x = np.vstack([np.hstack([np.ones((len(site.y), 1)), site.x[:, where]]) for site in sites])
    factor = cho_factor(x.T @ x / 0.5 + np.eye(x.shape[1]))
    mean = cho_solve(factor, x.T @ np.concatenate([site.y for site in sites]) / 0.5)
    covariance = cho_solve(factor, np.eye(x.shape[1]))
    found = load_file(tmp_path / "model" / "posterior.safetensors")
    assert np.abs(found["q.mean"] - mean).max() < 0.25 * np.sqrt(covariance.diagonal()).min()  # sixty steps of Adam
    new = pd.read_csv(table)
    scaled = (new[chosen] - agreed.input_mean[where]) / agreed.input_scale[where]
    design = np.hstack([np.ones((len(new), 1)), scaled])
    sd = np.sqrt(np.einsum("ni,ij,nj->n", design, covariance, design) + 0.5) * agreed.target_scale
    told = pd.read_csv(tmp_path / "model.csv")
    np.testing.assert_allclose(told["sd"], sd, rtol=0.02)  # mostly of the noise, from the model's key
    assert "Weights of the toy model" in (tmp_path / "model" / "report.html").read_text()


def test_sums_of_a_length_that_only_sites_know_are_those_that_most_of_them_send(monkeypatch):
    monkeypatch.setattr(Agreement, "sizes", lambda agreement, known: dict(known))
    short = arrays(lambda own: own | {"gram": own["gram"][:1, :1], "moment": own["moment"][:1]})
    flat, phases = configured(method="toy", num_server_rounds=1), ("query.products",)
    found, never = (run_in_memory(FaultyGrid(flat, 3, Fault("1", change, phases))) for change in (short, crashed))
    assert blamed(found) == {"1": ["its arrays are not those that most sites send"]}
    alike(vars(found.current), vars(never.current))


@pytest.mark.parametrize(
    ("name", "annotated", "words"),
    [
        ("products", ("request",), "`ToyClient.products`: annotate what it returns"),
        ("predict", ("return",), "`ToyClient.predict`: annotate `request`"),
        ("products", (), "does not answer `query.products`: `ToyClient` has no handler `products` with annotations"),
        ("moments", ("request", "return"), "`ToyClient.moments`: a handler of every method has that name"),
    ],
)
def test_a_handler_that_is_not_found_is_named_with_what_to_do(monkeypatch, name, annotated, words):
    from toy_method.site import ToyClient

    def function(client, request, inputs=None):
        return None

    notes = ToyClient.products.__annotations__
    monkeypatch.setattr(function, "__name__", name)
    monkeypatch.setattr(function, "__annotations__", {part: notes[part] for part in annotated})
    monkeypatch.setattr(ToyClient, name, function, raising=False)
    handlers.cache_clear()
    with pytest.raises(RunError, match=re.escape(words)):
        run_in_memory(FaultyGrid(configured(method="toy", num_server_rounds=1), 3))
    handlers.cache_clear()


def test_a_column_of_means_is_no_table_of_classes(monkeypatch):
    monkeypatch.setattr("toy_method.site.moments", lambda weights, x: (x[:, :1], np.ones(len(x))))
    with pytest.raises(RunError, match=r"`ToyClient.predict` returned a mean of shape \((\d+), 1\), expected \(\1,\)"):
        run_in_memory(FaultyGrid(configured(method="toy", num_server_rounds=1), 3))


@pytest.mark.parametrize(
    ("place", "result", "words"),
    [
        ("site.ToyClient.products", lambda *_: None, "`ToyClient.products` returned NoneType, which is no message"),
        ("site.ToyClient.predict", lambda *_: (0, 1), "`ToyClient.predict` returned tuple, expected Prediction"),
        ("strategy.Toy.initialise", lambda *_: 1, "got int: begin a function that asks nothing with `yield from ()`"),
        ("strategy.Toy.one_round", lambda *_: None, "expected a generator, got NoneType"),
        ("strategy.Toy.one_round", ask(1), "yielded int, which is no question of strategies.server.questions"),
        ("strategy.Toy.one_round", ask(), "Toy.one_round returned NoneType, expected a pair of the next state"),
        ("strategy.Toy.predictive", ask(), "`predictive` returned NoneType, expected Predicted"),
    ],
)
def test_what_a_package_returns_is_checked_and_named(monkeypatch, place, result, words):
    notes = pkgutil.resolve_name(f"toy_method.{place}").__annotations__

    def function(*arguments):
        return result(*arguments)

    monkeypatch.setattr(function, "__annotations__", notes)
    monkeypatch.setattr(f"toy_method.{place}", function)
    handlers.cache_clear()
    with pytest.raises((ProtocolError, RunError), match=re.escape(words)):
        run_in_memory(FaultyGrid(configured(method="toy", num_server_rounds=1), 3))
    handlers.cache_clear()


@pytest.mark.parametrize(
    ("array", "meanings", "words"),
    [
        ({}, {"a": ""}, "`a` is no array of numbers but dict"),
        (np.array([None]), {"a": ""}, "`a` is no array of numbers"),
        (np.ones(1), {}, "`a` needs an entry in `meanings`"),
    ],
)
def test_a_posterior_that_cannot_be_saved_is_refused_where_it_is_made(array, meanings, words):
    with pytest.raises(ProtocolError, match=words):
        Posterior({"a": array}, meanings, {"a": "standardised"}, "", {})


def test_a_key_with_two_meanings_is_refused():
    class Other(Section):
        latents: PositiveInt = 7

    with pytest.raises(ConfigError, match=r"`sfvi.latents` .* exists already"):
        rows.sections_of([rows.ModelRow("m:a", "", Other)], ["latents"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("fsgp", "toy_method:METHOD"), "another method has that name"),
        (("gone", "no_such_package:METHOD"), "cannot be loaded: ModuleNotFoundError"),
        (("odd", "toy_method:__doc__"), "expected a `fedgp_flower.run.registry.Method`, got str"),
    ],
)
def test_a_package_that_brings_no_usable_row_is_named(monkeypatch, entry, message):
    monkeypatch.setattr(options, "entry_points", lambda group: [EntryPoint(*entry, group)])
    with pytest.raises(ConfigError, match=re.escape(message)):
        methods.__wrapped__()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (("glmm", "toy_model:ROW"), "another model has that name"),
        (("odd", "toy_model:ToyKeys"), "expected a .*ModelRow`"),
    ],
)
def test_a_model_that_is_no_row_or_takes_a_name_is_refused(monkeypatch, entry, words):
    monkeypatch.setattr(options, "entry_points", lambda group: [EntryPoint(*entry, group)])
    with pytest.raises(ConfigError, match=words):
        options.with_installed(MODELS, rows.ModelRow, "model", rows.GROUP)


@pytest.mark.parametrize("part", ["toy_method.sites:ToyClient", "toy_method.site:Client"])
def test_a_part_that_cannot_be_loaded_is_named(monkeypatch, part):
    row = replace(methods()["toy"], client=part)
    monkeypatch.setattr("fedgp_flower.run.registry.methods", lambda: methods() | {"toy": row})
    with pytest.raises(RunError, match=f"{part} cannot be loaded: "):
        run_in_memory(FaultyGrid(configured(method="toy", num_server_rounds=1), 3))


def test_runs_of_a_package_that_is_gone_say_what_to_install(run, monkeypatch, fedgp):
    monkeypatch.setattr(options, "entry_points", lambda group: [])
    forget_rows()
    status, _, err = fedgp("report", run)
    assert (status, "is a run of 'toy', which is not installed" in " ".join(err.split())) == (1, True)
    monkeypatch.undo()
    forget_rows()
