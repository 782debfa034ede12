"""Data sets and their splits, rows dealt to sites by every partitioner, and files of real sites."""

import gzip
import json
import re
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest

from fedgp_flower.config import CoreConfig
from fedgp_flower.data.catalogue import BUILTINS, catalogue
from fedgp_flower.data.datasets import Table, load_table
from fedgp_flower.data.partitioning import Partition, partition_rows
from fedgp_flower.data.sites import RawSite, count_sites, load_all_sites, load_site, write_partition
from fedgp_flower.data.synthetic import convolved_signals, five_blocks, sine
from fedgp_flower.errors import ConfigError, DataError
from fedgp_flower.run.registry import parse_config


def config(**keys) -> CoreConfig:
    return CoreConfig.model_validate(keys)


def stacked(sites: list[RawSite], part: str) -> pd.DataFrame:
    return pd.concat([getattr(site, part) for site in sites])


def as_rows(frame: pd.DataFrame) -> list[tuple]:
    return sorted(frame.itertuples(index=False, name=None))


@pytest.mark.parametrize("partitioner", ["iid", "dirichlet", "sizes", "blocks"])
def test_sites_of_a_standard_split_share_out_exactly_its_rows(partitioner):
    keys = config(dataset="sine", split=0, partitioner=partitioner)
    sites = load_all_sites(keys, 7)
    table = load_table(keys)
    train, test = table.rows(0)
    assert as_rows(stacked(sites, "train")) == as_rows(table.frame.iloc[train])
    assert as_rows(stacked(sites, "test")) == as_rows(table.frame.iloc[test])
    shares = [len(site.test) for site in sites]
    assert max(shares) - min(shares) <= 1
    assert [(site.site, site.partitions, site.simulated) for site in sites] == [(str(k), 7, True) for k in range(7)]


@pytest.mark.parametrize(("share", "out"), [(0.2, 3), (0.0001, 1), (0.99, 12)])
def test_whole_sites_are_held_out_and_take_no_part(share, out):
    keys = config(dataset="fuel-economy", holdout="site", partitioner="natural", partition={"column": "maker"})
    keys = keys.model_copy(update={"test_fraction": share})
    assert count_sites(keys) == 14 - out
    assert count_sites(keys.model_copy(update={"partitioner": "iid"})) == 5
    sites, table = load_all_sites(keys, 14 - out), load_table(keys)
    gone = ~table.column.isin([site.label for site in sites])
    assert as_rows(stacked(sites, "test")) == as_rows(table.frame[gone])
    assert as_rows(stacked(sites, "train")) == as_rows(table.frame[~gone])
    assert sites[0].left_out.endswith(", ".join(sorted(table.column[gone].unique())))
    with pytest.raises(ValueError, match="natural groups of one table"):
        config(holdout="site")
    with pytest.raises(ConfigError, match="such as 'sgpr'"):
        parse_config({"method": "fgpr", "holdout": "site", "partitioner": "natural", "partition.column": "maker"})


def test_without_a_split_every_site_holds_out_its_own_rows():
    keys = config(dataset="diabetes", **{"test-fraction": 0.25})
    sites = load_all_sites(keys, 5)
    for site in sites:
        assert len(site.test) == round(0.25 * (len(site.train) + len(site.test)))
    everything = pd.concat([stacked(sites, "train"), stacked(sites, "test")])
    assert as_rows(everything) == as_rows(load_table(keys).frame)
    assert len(stacked(load_all_sites(config(dataset="diabetes", **{"test-fraction": 0.0}), 5), "test")) == 0


def test_a_node_gets_the_same_rows_on_every_visit_and_others_by_seed():
    node = {"partition-id": 2, "num-partitions": 5}
    one, two = (load_site(config(), node) for _ in range(2))
    assert one.train.equals(two.train)
    assert one.test.equals(two.test)
    load_site(config(), {"partition-id": 1, "num-partitions": 3})  # a worker serves nodes of other layouts in between
    assert load_site(config(), node).train.equals(one.train)
    assert not load_site(config(seed=1), node).train.equals(one.train)


def test_rows_of_groups_that_are_left_out_are_scored_nowhere_and_the_groups_are_named(tmp_path):
    town = ["a"] * 30 + ["b"] * 25 + ["c"] * 5 + ["d"]
    frame = pd.DataFrame({"x": np.arange(61.0), "town": town, "income": np.arange(61.0) ** 2})
    frame.assign(split=["test" if i % 5 == 0 else "train" for i in range(61)]).to_csv(tmp_path / "t.csv", index=False)
    keys = {"dataset": str(tmp_path / "t.csv"), "split": 0, "partitioner": "natural"}
    small = config(**keys, partition={"column": "town", "min-rows": 10})
    sites = load_all_sites(small, count_sites(small))
    assert [(len(site.train), site.features) for site in sites] == [(24, ("x",)), (20, ("x",))]
    assert [sorted(site.test["x"]) for site in sites] == [[5.0 * i for i in few] for few in (range(6), range(6, 11))]
    told, nothing = (site.left_out for site in sites)
    assert "1 with fewer training rows than `partition.min-rows`: c" in told
    assert "1 with no training rows: d" in told
    assert nothing == ""
    many = frame.assign(town=[f"town number {k // 2}" for k in range(36)] + ["a"] * 25)
    many.assign(split=["test", "train"] * 30 + ["train"]).to_csv(tmp_path / "t.csv", index=False)
    [told] = load_all_sites(small, 1)[0].left_out.splitlines()  # was a line with a comma at its end, and others
    assert len(told) < 300
    assert "18 with fewer training rows than `partition.min-rows`: town number 0, " in told
    assert re.search(r", town number \d+ and \d more$", told)
    frame.assign(split=["test" if i % 5 == 0 else "train" for i in range(61)]).to_csv(tmp_path / "t.csv", index=False)
    every = config(**keys, partition={"column": "town"})
    assert [site.label for site in load_all_sites(every, count_sites(every))] == ["a", "b", "c"]


def test_a_partition_written_to_files_is_what_the_simulation_sees(tmp_path):
    keys = config(dataset="five-blocks", split=0, partitioner="natural", partition={"column": "site"})
    paths = write_partition(keys, 5, tmp_path / "sites")
    assert [path.name for path in paths] == [f"site-0{k}.csv" for k in range(5)]
    tables = config(dataset=",".join(map(str, paths)))
    dealt, read = load_all_sites(keys, 5), load_all_sites(tables, count_sites(tables))
    for path, simulated, one in zip(paths, dealt, read, strict=True):
        node = {"data-path": str(path), "test-path": str(path.with_suffix(".test.csv")), "label": "ward"}
        real, found = load_site(config(), node), load_site(tables, {"data-path": str(path)})  # what lies beside it
        for other in (simulated, one, found):
            assert real.train.equals(other.train)
            assert real.test.equals(other.test)
        assert (real.site, real.label, real.partitions) == (path.stem, "ward", 0)
        assert (one.label, one.simulated, one.shared_table, found.simulated) == (path.stem, True, False, False)
    paths[4].with_suffix(".test.csv").unlink()
    assert len(load_all_sites(tables, 5)[4].test) == len(load_site(tables, {"data-path": str(paths[4])}).test) == 8
    for nodes in (4, 6):  # rows of the last would be lost, or there is no table
        with pytest.raises(DataError, match="`dataset` names 5 tables, a site each; run with 5 sites"):
            load_site(tables, {"partition-id": nodes - 1, "num-partitions": nodes})
    with pytest.raises(DataError, match=r"site-00\.csv exists already"):
        write_partition(keys, 5, tmp_path / "sites")


def test_each_sites_table_may_say_which_rows_are_held_out(tmp_path):
    """The column was read in a table that all sites share; otherwise the rows of `test` were trained on unsaid."""
    part = np.resize(["train", "test", "train", "validation"], 12)
    frame = pd.DataFrame({"x": np.arange(12.0), "y": np.arange(12.0), "split": part})
    frame.assign(y=frame["y"].where(frame["x"] != 1)).to_csv(tmp_path / "a.csv", index=False)
    frame.drop(columns="split").to_csv(tmp_path / "b.csv", index=False)
    keys = config(dataset=str(tmp_path / "a.csv"), target="y", split=0, missing="drop")
    for node in ({"data-path": str(tmp_path / "a.csv")}, {"partition-id": 0, "num-partitions": 1}):
        assert load_site(keys, node).test["x"].tolist() == [5.0, 9.0]
        assert len(load_site(keys, node).train) == 9
    with pytest.raises(DataError, match=r"`split` = 0: b\.csv has no standard splits"):
        load_site(keys, {"data-path": str(tmp_path / "b.csv")})


def test_groups_stay_together_and_the_future_is_held_out(tmp_path):
    """At a site with a table and in one that is dealt, by the same rule; the column is no input."""
    draw = np.random.default_rng(5)
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 40, 60), unit="D")  # in no order of time
    visits = {"patient": np.arange(60) % 12, "day": days.strftime("%Y-%m-%d"), "x": range(60), "y": range(60)}
    for name in "ab":
        pd.DataFrame(visits).to_csv(tmp_path / f"{name}.csv", index=False)
    both = f"{tmp_path / 'a.csv'},{tmp_path / 'b.csv'}"
    held_out = []
    for way in ("group:patient", "time:day"):
        keys = {"holdout": way, "test-fraction": 0.25, "features": "x,day,patient", "dates": "days"}
        real, other = (load_site(config(**keys), {"data-path": str(tmp_path / f"{name}.csv")}) for name in "ab")
        [dealt] = load_all_sites(config(dataset=str(tmp_path / "a.csv"), **keys), 1)
        for site in (dealt, *load_all_sites(config(dataset=both, **keys), 2)):
            assert site.test.equals(real.test)
        held_out.append((real.train, real.test))
        assert real.test.equals(other.test)  # a patient who goes to two sites is held out at both
        usual = load_site(config(**keys | {"features": ""}), {"data-path": str(tmp_path / "a.csv")})
        assert way.partition(":")[2] not in str(usual.features)
    (seen, new), (past, future) = held_out
    assert set(seen["patient"]) & set(new["patient"]) == set()
    assert new["patient"].nunique() == 3
    assert past["days(day)"].max() < future["days(day)"].min()
    assert 9 <= len(future) <= 15
    with pytest.raises(ValueError, match="needs `split` = -1"):
        config(holdout="time:day", split=0)
    with pytest.raises(DataError, match=r"a\.csv: missing column `ward`"):
        load_site(config(holdout="group:ward", features="x"), {"data-path": str(tmp_path / "a.csv")})


@pytest.mark.parametrize("form", ["%Y-%m-%d %H:%M", "%Y-%m-%d"])
def test_the_latest_hours_are_held_out_and_latest_rows_of_one_day_are_not(tmp_path, form):
    hours = pd.date_range("2024-03-30", periods=72, freq="h")
    frame = pd.DataFrame({"time": hours.strftime(form), "x": range(72), "y": range(72)})
    frame.sample(frac=1, random_state=0).to_csv(tmp_path / "a.csv", index=False)
    keys = {"holdout": "time:time", "dates": "days"}
    [dealt] = load_all_sites(config(dataset=str(tmp_path / "a.csv"), **keys), 1)
    for site in (dealt, load_site(config(**keys), {"data-path": str(tmp_path / "a.csv")})):
        assert sorted(site.test["x"]) == (list(range(58, 72)) if "%H" in form else [])
        assert ("holds out no row: too many have the same `time`" in site.suspected()) == ("%H" not in form)


def test_a_real_site_holds_out_rows_by_its_id(tmp_path):
    write_partition(config(**{"test-fraction": 0.0}), 1, tmp_path)
    node = {"data-path": str(tmp_path / "site-00.csv")}
    one, again, other = (load_site(config(), {**node, "site": name}) for name in ("a", "a", "b"))
    assert one.test.equals(again.test)
    assert not one.test.equals(other.test)
    assert as_rows(pd.concat([one.train, one.test])) == as_rows(pd.concat([other.train, other.test]))


def test_nodes_without_data_are_refused():
    with pytest.raises(DataError, match=r"`data-path` .* `partition-id` and `num-partitions`"):
        load_site(config(), {"state-dir": "here"})
    with pytest.raises(DataError, match="`partition-id` = 5 is not one of the 5"):
        load_site(config(), {"partition-id": 5, "num-partitions": 5})


N = 240


def rows() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    numbers = {"a": draw.normal(size=N), "b": 1e3 * draw.normal(size=N), "one": 1.0}
    return pd.DataFrame(numbers | {"job": draw.choice(["u", "v"], N)})


def by(partitioner: str, sites: int, by_column: pd.Series | None = None, seed: int = 0, **partition) -> Partition:
    inputs, keys = rows(), config(partitioner=partitioner, seed=seed, partition=partition)
    return partition_rows(inputs, inputs["a"] if by_column is None else by_column, sites, keys)


def sizes(found: Partition) -> list[int]:
    return [part.size for part in found.rows]


ALL = {name: {} for name in ("iid", "linear", "square", "exponential", "kmeans", "blocks")}
ALL |= {"dirichlet": {"alpha": 1.0, "min-rows": 5}, "sizes": {"ratio": 4.0}}


@pytest.mark.parametrize("name", ALL)
def test_every_row_is_dealt_once_and_the_seed_decides(name):
    found = by(name, 5, **ALL[name])
    assert np.array_equal(np.sort(np.concatenate(found.rows)), np.arange(N))
    assert all((np.diff(part) > 0).all() for part in found.rows)
    assert found.labels == ("0", "1", "2", "3", "4")
    again = by(name, 5, **ALL[name])
    assert all(np.array_equal(a, b) for a, b in zip(found.rows, again.rows, strict=True))
    other = by(name, 5, seed=1, **ALL[name])
    if name not in ("blocks", "kmeans"):  # these follow the inputs
        assert any(not np.array_equal(a, b) for a, b in zip(found.rows, other.rows, strict=True))


def test_sizes_are_what_the_names_say():
    assert sizes(by("iid", 7)) == [35, 35, 34, 34, 34, 34, 34]
    k = np.arange(1, 5)
    for name, weight in (("linear", k), ("square", k**2), ("exponential", np.exp(k))):
        assert np.abs(np.array(sizes(by(name, 4))) - N * weight / weight.sum()).max() < 4
    assert sizes(by("sizes", 3, ratio=3.0)) == [40, 80, 120]


def test_blocks_are_contiguous_along_the_first_principal_component():
    x = np.random.default_rng(0).permutation(N).astype(float)
    inputs = pd.DataFrame({"x": x, "twice": 2 * x})
    found = partition_rows(inputs, inputs["x"], 4, config(partitioner="blocks"))
    assert [sorted(x[part]) for part in found.rows] == np.arange(N, dtype=float).reshape(4, -1).tolist()


def test_kmeans_finds_clusters_in_standardised_units():
    group = np.repeat([0, 1, 2], 80)
    draw = np.random.default_rng(0)
    inputs = pd.DataFrame({"fine": group + 0.01 * draw.normal(size=N), "wide": 1e6 * draw.uniform(-0.01, 0.01, N)})
    inputs["wide"] += 1e6 * (group == 1)
    found = partition_rows(inputs, inputs["fine"], 3, config(partitioner="kmeans"))
    assert sorted(tuple(np.unique(group[part])) for part in found.rows) == [(0,), (1,), (2,)]


def test_dirichlet_with_small_alpha_skews_the_bins_of_a_numeric_column():
    column = rows()["a"]
    overall = column.std()
    even = by("dirichlet", 4, column, alpha=1000.0)
    skewed = by("dirichlet", 4, column, **{"alpha": 0.1, "min-rows": 2})
    assert max(sizes(even)) - min(sizes(even)) < 25
    means = [np.std([column.iloc[part].mean() for part in found.rows]) for found in (even, skewed)]
    assert means[0] < 0.1 * overall < 0.3 * overall < means[1]


def test_pathological_sites_see_few_classes():
    label = pd.Series(np.arange(N) % 6).astype(float)
    for sites in (6, 5, 12):
        found = by("pathological", sites, label)
        assert {label.iloc[part].nunique() for part in found.rows} == {2}
        assert sum(sizes(found)) == N


def test_natural_groups_are_the_sites_and_small_ones_are_left_out():
    ward = pd.Series(np.repeat([30.0, 4.0, 100.0, 7.0], [100, 60, 75, 5]))
    found = by("natural", 3, ward, **{"column": "ward", "min-rows": 10})
    assert found.left_out == ("7",)
    assert found.labels == ("4", "30", "100")
    assert [np.unique(ward.iloc[part]).tolist() for part in found.rows] == [[4.0], [30.0], [100.0]]
    town = ward.map({30.0: "Ely", 4.0: "Bath", 100.0: "Zell", 7.0: "Aix"})
    assert by("natural", 3, town, **{"column": "town", "min-rows": 10}).labels == ("Bath", "Ely", "Zell")
    assert by("natural", 4, town, column="town").labels == ("Aix", "Bath", "Ely", "Zell")
    for sites in (2, 4):
        with pytest.raises(DataError, match=r"`ward` has 3 groups with at least 10 rows .*; run with 3 sites"):
            by("natural", sites, ward, **{"column": "ward", "min-rows": 10})


def test_impossible_requests_are_refused_with_the_key_to_change():
    with pytest.raises(DataError, match="'iid' with 241 sites: there are 240 training rows"):
        by("iid", N + 1)
    with pytest.raises(DataError, match="'exponential' with 20 sites is not possible"):
        by("exponential", 20)
    with pytest.raises(DataError, match=r"raise `partition.alpha`, lower `partition.min-rows` \(now 50\)"):
        by("dirichlet", 5, **{"alpha": 0.05, "min-rows": 50})
    with pytest.raises(
        DataError, match="cannot assign every class to a site; the partition column has 10 classes: take 9 sites"
    ):
        by("pathological", 5)
    assert len(by("pathological", 9).rows) == 9
    few = pd.DataFrame({"x": [0.0, 0.0, 1.0, 1.0, 1.0]})
    with pytest.raises(DataError, match="'kmeans' with 3 sites leaves a site without rows"):
        partition_rows(few, few["x"], 3, config(partitioner="kmeans"))


def table(dataset: str, **keys) -> Table:
    return load_table(config(dataset=dataset, **keys))


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
    units = (part["y"] for seed in range(8) for _, part in convolved_signals(seed)[0].groupby("unit"))
    bends = np.concatenate([np.diff(y, 2) for y in units])
    assert np.std(bends) == pytest.approx(0.1 * np.sqrt(6), rel=0.06)
    # smoothing a GP of lengthscale ℓ by width λ leaves the variance ℓ/√(ℓ² + 2λ²); E[δ²] = 43/12, the noise adds 0.01
    width = np.linspace(2, 10, 1001)
    expected = 43 / 12 * np.mean(10 / np.sqrt(100 + 2 * (2 / 199 / 0.01 * width) ** 2)) + 0.01
    assert np.mean([convolved_signals(seed)[0]["y"] ** 2 for seed in range(150)]) == pytest.approx(expected, rel=0.1)
    signals = frame.pivot(index="x", columns="unit", values="y").to_numpy()
    correlation = np.corrcoef(signals.T)[np.triu_indices(5, 1)]
    assert correlation.min() > 0.5  # one common curve
    assert signals.std(axis=0).max() / signals.std(axis=0).min() > 1.2  # amplitudes differ


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
    assert [entry.name for entry in catalogue(str(folder))] == [*BUILTINS, "lab/salt"]
    entry = catalogue(str(folder))[-1]
    assert (entry.rows, entry.inputs, entry.splits, entry.source) == (12, 2, 2, "salt.csv.gz")


def test_a_process_reads_a_table_once_until_the_file_changes(folder):
    keys = {"data-dir": str(folder)}
    first = table("lab/salt", **keys)
    assert table("lab/salt", name="another run", **keys) is first
    first.frame.assign(a=1.5).iloc[:12].to_csv(folder / "lab" / "salt.csv.gz", index=False)
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
        ({"n": 11, "test": [[1]]}, "splits of 11 rows, but the table has 12"),
        ({"n": 12, "test": [[1, 1]]}, "split 0 is empty, repeats a row"),
        ({"n": 12, "test": [[1], [12]]}, "split 1 is empty, repeats"),
        ({"n": 12, "test": [[-1]]}, "split 0 is empty, repeats"),
        ({"n": 12, "test": [[]]}, "split 0 is empty, repeats"),
        ({"n": 12}, "not a list of splits"),
        ([], "not a list of splits"),
    ],
)
def test_malformed_splits_are_refused(folder, content, message):
    write_splits(folder, content)
    with pytest.raises(DataError, match=f"salt.splits.json.gz: .*{message}"):
        table("lab/salt", **{"data-dir": str(folder)})


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
    with pytest.raises(DataError, match=r"missing column `c`; it has `a`, `y`, `b`, `city`"):
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
