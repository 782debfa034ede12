import gzip
import json
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest

from fedgp_flower.config import CoreConfig
from fedgp_flower.data.catalogue import BUILTINS, catalogue
from fedgp_flower.data.datasets import Table, load_table
from fedgp_flower.data.synthetic import convolved_signals, five_blocks, plane_wave, sine
from fedgp_flower.errors import DataError


def table(dataset: str, **keys) -> Table:
    return load_table(CoreConfig.model_validate({"dataset": dataset, **keys}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    (tmp_path / "lab").mkdir()
    frame = pd.DataFrame({"a": draw.normal(size=12), "b": draw.normal(size=12), "y": draw.normal(size=12)})
    frame.to_csv(tmp_path / "lab" / "salt.csv.gz", index=False)
    write_splits(tmp_path, {"n": 12, "n_splits": 2, "test": [[1, 3], [11, 0, 5]]})
    return tmp_path


def write_splits(folder: Path, content: object) -> None:
    with gzip.open(folder / "lab" / "salt.splits.json.gz", "wt") as text:
        json.dump(content, text)


@pytest.mark.parametrize("name", BUILTINS)
def test_builtins_are_as_large_as_the_catalogue_says(name, monkeypatch):
    monkeypatch.delenv("FEDGP_DATA", raising=False)
    likelihood = "bernoulli" if name == "breast-cancer" else "gaussian"
    found = table(name, model={"likelihood": likelihood})
    entry = next(entry for entry in catalogue() if entry.name == name)
    assert (len(found.frame), len(found.features), len(found.splits)) == (entry.rows, entry.inputs, entry.splits)
    assert found.target not in found.features
    assert entry.natural not in found.features


def test_sine_is_eq_18():
    frame, (test,) = sine(0)
    train = np.setdiff1d(np.arange(800), test)
    for rows, count in ((train, 500), (test, 300)):
        x = frame["x"].to_numpy()[rows]
        assert np.diff(x) == pytest.approx(np.full(count - 1, 20 / (count - 1)))
    residual = frame["y"] - 3 * np.sin(2 * np.pi * frame["x"] / 20)
    assert residual.std() == pytest.approx(0.5, rel=0.1)  # 4 standard errors of a spread from 800 draws
    assert abs(residual.mean()) < 4 * 0.5 / np.sqrt(800)


def test_plane_wave_is_eq_19():
    frame, (test,) = plane_wave(0)
    assert len(frame) - test.size == 70 * 70
    assert test.size == 30 * 30
    grid = frame.iloc[test]
    assert grid["x1"].nunique() == grid["x2"].nunique() == 30
    residual = frame["y"] - 2.5 * np.sin(2 * np.pi * (frame["x1"] + frame["x2"]) / 90)
    assert residual.std() == pytest.approx(0.4, rel=0.04)


def test_five_blocks_are_five_separate_sites_of_one_function():
    frame, (test,) = five_blocks(0)
    spans = frame.groupby("site")["x"].agg(["min", "max"]).sort_values("min")
    assert (spans["min"].to_numpy()[1:] - spans["max"].to_numpy()[:-1] > 0.8 - 1e-12).all()
    assert frame.iloc[test].groupby("site").size().tolist() == [20] * 5
    draws = [five_blocks(seed)[0] for seed in range(100)]
    assert np.mean([draw["y"] ** 2 for draw in draws]) == pytest.approx(1.01, rel=0.15)  # about 100 × 6 independent
    products = []
    for draw in draws:
        x, y = draw["x"].to_numpy(), draw["y"].to_numpy()
        products.append(np.outer(y, y)[np.abs(np.abs(x[:, None] - x) - 1) < 0.05].mean())
    assert np.mean(products) == pytest.approx(np.exp(-0.5), abs=0.1)  # one lengthscale apart


def test_convolved_signals_are_eq_19_of_the_fedmgp_paper():
    frame, (test,) = convolved_signals(3)
    first = frame[frame["unit"] == "unit-0"].reset_index()
    assert test.tolist() == first.loc[first["x"] > 0, "index"].tolist()
    assert frame.groupby("unit").size().tolist() == [200] * 5
    assert np.unique(frame["x"]) == pytest.approx(np.linspace(-1, 1, 200))
    # a curve smoothed over two steps or more is straight over three points: second differences are noise, sd √6 σ
    bends = np.concatenate(
        [np.diff(part["y"], 2) for seed in range(8) for _, part in convolved_signals(seed)[0].groupby("unit")]
    )
    assert np.std(bends) == pytest.approx(0.1 * np.sqrt(6), rel=0.06)
    # smoothing a GP of lengthscale ℓ by width λ leaves the variance ℓ/√(ℓ² + 2λ²); E[δ²] = 43/12, the noise adds 0.01
    width = np.linspace(2, 10, 1001)
    expected = 43 / 12 * np.mean(10 / np.sqrt(100 + 2 * (2 / 199 / 0.01 * width) ** 2)) + 0.01
    assert np.mean([convolved_signals(seed)[0]["y"] ** 2 for seed in range(150)]) == pytest.approx(expected, rel=0.1)
    signals = frame.pivot(index="x", columns="unit", values="y").to_numpy()
    correlation = np.corrcoef(signals.T)[np.triu_indices(5, 1)]
    assert correlation.min() > 0.5  # one common curve
    assert signals.std(axis=0).max() / signals.std(axis=0).min() > 1.2  # amplitudes differ


@pytest.mark.parametrize("make", [sine, plane_wave, five_blocks, convolved_signals])
def test_synthetic_data_depend_on_the_seed_alone(make):
    assert make(1)[0].equals(make(1)[0])
    assert not make(1)[0].equals(make(2)[0])


def test_a_name_a_path_and_the_environment_reach_the_same_file(folder, monkeypatch):
    by_name = table("lab/salt", **{"data-dir": str(folder)})
    by_path = table(str(folder / "lab" / "salt.csv.gz"))
    monkeypatch.setenv("FEDGP_DATA", str(folder))
    by_environment = table("lab/salt")
    monkeypatch.chdir(folder)
    relative = table("lab/salt", **{"data-dir": "nowhere"})
    for other in (by_path, by_environment, relative):
        assert other.frame.equals(by_name.frame)
    assert by_name.features == ("a", "b")
    names = [entry.name for entry in catalogue(str(folder))]
    assert names == [*BUILTINS, "lab/salt"]
    entry = catalogue(str(folder))[-1]
    assert (entry.rows, entry.inputs, entry.splits, entry.source) == (12, 2, 2, "salt.csv.gz")


def test_a_process_reads_a_table_once_until_the_file_changes(folder):
    keys = {"data-dir": str(folder)}
    first = table("lab/salt", **keys)
    assert table("lab/salt", name="another run", **keys) is first
    frame = first.frame.assign(a=1.5).iloc[:12]
    frame.to_csv(folder / "lab" / "salt.csv.gz", index=False)
    assert table("lab/salt", **keys).frame["a"].eq(1.5).all()


def test_splits_divide_the_rows(folder):
    found = table("lab/salt", **{"data-dir": str(folder)})
    train, test = found.rows(1)
    assert test.tolist() == [0, 5, 11]
    assert sorted([*train, *test]) == list(range(12))
    assert [part.size for part in found.rows(-1)] == [12, 0]
    with pytest.raises(DataError, match=r"`split` = 2: salt\.csv\.gz has splits 0 to 1"):
        found.rows(2)
    with pytest.raises(DataError, match="diabetes has no standard splits"):
        table("diabetes").rows(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"n": 11, "test": [[1]]}, "made for 11 rows, and the table has 12"),
        ({"n": 12, "test": [[1, 1]]}, "split 0 names a row twice"),
        ({"n": 12, "test": [[1], [12]]}, "split 1 names"),
        ({"n": 12, "test": [[-1]]}, "split 0 names"),
        ({"n": 12, "test": [[]]}, "split 0 names"),
        ({"n": 12}, "not a list of splits"),
        ([], "not a list of splits"),
    ],
)
def test_malformed_splits_are_refused(folder, content, message):
    write_splits(folder, content)
    with pytest.raises(DataError, match=f"salt.splits.json.gz: .*{message}"):
        table("lab/salt", **{"data-dir": str(folder)})


def test_a_column_of_train_and_test_is_a_split(tmp_path):
    frame = pd.DataFrame({"a": range(6), "income": [1, 2, 4, 2, 1, 5], "split": ["train"] * 4 + ["test"] * 2})
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = table(str(tmp_path / "t.csv"))
    assert (found.features, found.target) == (("a",), "income")
    assert found.rows(0)[1].tolist() == [4, 5]


def test_columns_are_chosen_by_configuration(tmp_path):
    frame = pd.DataFrame({"a": range(6), "y": [1, 2, 4, 2, 1, 5], "b": range(6), "city": ["u", "v"] * 3})
    frame.to_csv(tmp_path / "t.csv", index=False)
    path = str(tmp_path / "t.csv")
    assert (table(path).features, table(path).target) == (("a", "b", "city"), "y")
    assert table(path, features=" b , a ", target="y").features == ("b", "a")
    assert table(path, features="-a").features == ("b", "city")
    assert table(path, target="b").features == ("a", "y", "city")
    natural = table(path, partitioner="natural", partition={"column": "city"})
    assert natural.features == ("a", "b")
    assert natural.column.tolist() == ["u", "v"] * 3
    frame.drop(columns="y").to_csv(tmp_path / "last.csv", index=False)
    last = table(str(tmp_path / "last.csv"), partitioner="natural", partition={"column": "city"})
    assert last.target == "b"  # the last column that is not the site's name
    frame.rename(columns={"b": "column 1"}).to_csv(tmp_path / "named.csv", index=False)  # a name of another place
    assert table(str(tmp_path / "named.csv")).features == ("a", "column 1", "city")
    with pytest.raises(DataError, match="`features` names the target `y`"):
        table(path, features="a,y")
    with pytest.raises(DataError, match=r"missing column `c`; the file has `a`, `y`, `b`, `city`"):
        table(path, features="a,c")
    with pytest.raises(DataError, match="missing column `ward`"):
        table(path, partitioner="dirichlet", partition={"column": "ward"})


def test_an_unknown_name_lists_what_there_is(folder, monkeypatch):
    with pytest.raises(DataError, match=r"'sline' is not known. Built-ins: diabetes, .*sine.*: lab/salt\."):
        table("sline", **{"data-dir": str(folder)})
    monkeypatch.delenv("FEDGP_DATA", raising=False)
    with pytest.raises(DataError, match="set `data-dir` or the environment variable FEDGP_DATA"):
        table("sline")


def test_openml_offline_is_a_clear_error(monkeypatch):
    def offline(**_keys):
        raise URLError("no route to host")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    with pytest.raises(DataError, match=r"'openml/house' could not be fetched from OpenML \(URLError\)"):
        table("openml/house")
