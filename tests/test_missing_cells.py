"""Missing cells, dates and decimal commas: agreed from sums, equal to the pooled table, the same for new rows."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, blamed, configured, csv_nodes, no_waiting, run

from fedgp_flower import server_app
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.agreement import Agreement, SiteDescription, agree
from fedgp_flower.data.cells import codes_in, typed
from fedgp_flower.data.datasets import load_table
from fedgp_flower.data.dates import readings
from fedgp_flower.data.sites import RawSite, load_all_sites, load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.files import read_arrays
from fedgp_flower.run.check import check
from fedgp_flower.run.predict import Predictor, predict_file

MIXED = ["drop", "impute", "indicator"]


def patients(rows: int = 90, seed: int = 0) -> pd.DataFrame:
    """Two numbers and a column of text, each with missing cells, and a target that hangs on all of them."""
    draw = np.random.default_rng(seed)
    age, ward = draw.normal(60, 10, rows), draw.choice(["a", "b", "c"], rows)
    y = 0.1 * age + (ward == "b") + 0.1 * draw.normal(size=rows)
    frame = pd.DataFrame({"age": age, "weight": draw.normal(80, 9, rows), "ward": ward, "y": y})
    frame.loc[draw.choice(rows, 12, replace=False), "age"] = np.nan
    frame.loc[draw.choice(rows, 9, replace=False), "ward"] = None
    frame.loc[[4], "y"] = np.nan
    return frame


def settings(missing: str, **more: Any) -> CoreConfig:
    return CoreConfig.model_validate({"missing": missing, "test-fraction": 0.0, **more})


def real_sites(folder: Path, missing: str, cuts: list[int]) -> list[RawSite]:
    frames = {str(k): patients()[a:b] for k, (a, b) in enumerate(itertools.pairwise([0, *cuts, 90]))}
    return [load_site(settings(missing), node) for node in csv_nodes(folder, frames)]


def agreed(sites: list[RawSite], missing: str) -> Agreement:
    described = [site.describe() for site in sites]
    return agree(
        {str(k): SiteDescription(d.arrays, d.schema, d.num_examples) for k, d in enumerate(described)}, missing=missing
    )


def encoded(sites: list[RawSite], missing: str) -> tuple[np.ndarray, tuple[str, ...]]:
    agreement = agreed(sites, missing)
    preparation = Preparation.from_wire(agreement.arrays, agreement.schema)
    assert preparation.names == agreement.names
    return np.concatenate([site.encode(preparation).x for site in sites]), agreement.names


@pytest.mark.parametrize("missing", MIXED)
@pytest.mark.parametrize("cuts", [[], [30, 61]])
def test_inputs_are_those_of_the_whole_table(tmp_path: Path, missing: str, cuts: list[int]) -> None:
    found, names = encoded(real_sites(tmp_path, missing, cuts), missing)
    table = patients().dropna(subset=["y"] if missing != "drop" else None)
    columns = {"age": table["age"], "weight": table["weight"]}
    columns |= {f"ward={level}": (table["ward"] == level).where(table["ward"].notna()) for level in "abc"}
    expected = {}
    for name, column in columns.items():
        filled = column.astype(float)
        value = (filled - filled.mean()) / filled.std(ddof=0)
        expected[name] = value.fillna(0.0)
        if missing == "indicator" and name in {"age", "ward=c"}:
            gone = table[name.partition("=")[0]].isna().astype(float)
            expected[f"{name.partition('=')[0]} missing"] = (gone - gone.mean()) / gone.std(ddof=0)
    assert list(names) == list(expected)
    np.testing.assert_allclose(found, np.column_stack(list(expected.values())), rtol=1e-9, atol=1e-12)


def test_without_the_key_a_missing_cell_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"empty or NaN cell in row .* Fill the cells, or set `missing` to 'drop', 'imp"
    ):
        real_sites(tmp_path, "error", [])


def test_rows_left_out_of_a_table_keep_its_splits_and_groups(tmp_path: Path) -> None:
    frame = patients().assign(clinic=["n", "s", "w"] * 30, split=["train", "train", "test"] * 30)
    frame.to_csv(tmp_path / "all.csv", index=False)
    keys = {"dataset": str(tmp_path / "all.csv"), "target": "y", "partitioner": "natural", "split": 0}
    config = settings("drop", **keys, partition={"column": "clinic"})
    table, whole = load_table(config), frame[frame.notna().all(axis=1)]
    assert table.dropped == 90 - len(whole)
    train, test = table.rows(0)
    np.testing.assert_array_equal(table.frame["age"].iloc[test], whole["age"][whole["split"] == "test"])
    assert table.column.iloc[train].tolist() == whole["clinic"][whole["split"] == "train"].tolist()
    assert [site.dropped for site in load_all_sites(config, 2)] == [table.dropped, 0]


def test_a_column_without_a_filled_cell_is_refused(tmp_path: Path) -> None:
    nodes = csv_nodes(tmp_path, {"a": patients().assign(weight=np.nan)})
    with pytest.raises(DataError, match="no cell of `weight` is filled"):
        load_site(settings("impute"), nodes[0])
    with pytest.raises(DataError, match="every row has a missing cell"):
        load_site(settings("drop"), nodes[0])


def test_a_site_that_counts_more_missing_cells_than_rows_is_refused(tmp_path: Path) -> None:
    sites = real_sites(tmp_path, "impute", [30, 61])
    described = {str(k): site.describe() for k, site in enumerate(sites)}
    wrong = {**described["1"].arrays, "features.missing": np.array([400, 0])}
    parts = {k: SiteDescription(own.arrays, own.schema, own.num_examples) for k, own in described.items()}
    parts["1"] = SiteDescription(wrong, described["1"].schema, described["1"].num_examples)
    assert "counts more than the" in agree(parts, missing="impute").refused["1"]


# From a run to new rows.


def finished(folder: Path, frames: dict[str, pd.DataFrame], **keys: Any) -> Path:
    flat = configured(sites=len(frames), num_server_rounds=3, output_dir=str(folder), name="run", **keys)
    with no_waiting():
        return server_app.execute(FaultyGrid(flat, csv_nodes(folder, frames)), flat, lambda row, total: None)


def by_hand(folder: Path, frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd from the two files of the posterior alone, by what they say of themselves, with NumPy."""
    said, arrays = json.loads((folder / "posterior.json").read_text()), read_arrays(folder / "posterior.safetensors")
    inputs: dict[str, np.ndarray] = {}
    for column in said["schema"]["features"]:
        name = column["name"]
        part, _, rest = name.partition("(")
        cells = frame[name if name in frame else rest.removesuffix(")")]
        gone = cells.isna().to_numpy()
        if name not in frame:
            day = pd.to_datetime(cells)
            angle = 2 * np.pi * (day.dt.day_of_year - 1) / 365.2425
            numbers = {
                "days": (day - pd.Timestamp("2000-01-01")).dt.days,
                "sine": np.sin(angle),
                "cosine": np.cos(angle),
            }
            values = {name: numbers[part].to_numpy(float)}
        elif column["kind"] == "numeric":
            values = {name: cells.to_numpy(float)}
        else:
            shown = column["levels"][1:] if len(column["levels"]) == 2 else column["levels"]
            values = {f"{name}={level}": (cells == level).to_numpy(float) for level in shown}
        for (key, value), fill in zip(values.items(), column["missing"]["fill"], strict=True):
            inputs[key] = np.where(gone, fill, value)
        if column["missing"]["indicator"]:
            inputs[f"{name} missing"] = gone.astype(float)
    assert list(inputs) == said["inputs"]
    x = (np.column_stack(list(inputs.values())) - arrays["input.mean"]) / arrays["input.scale"]
    z, scales = arrays["inducing.locations"], arrays["kernel.lengthscale"]
    amplitude, noise = float(arrays["kernel.outputscale"]), float(arrays["likelihood.noise"][0])

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return amplitude * np.exp(-0.5 * np.square((a[:, None] - b) / scales).sum(axis=2))

    lower = np.linalg.cholesky(kernel(z, z) + said["model"]["jitter"] * amplitude * np.eye(len(z)))
    a = np.linalg.solve(lower, kernel(z, x))
    m, s = arrays["inducing.mean"], arrays["inducing.covariance"]
    variance = amplitude - np.square(a).sum(axis=0) + np.einsum("mn,mk,kn->n", a, s, a) + noise
    return a.T @ m * arrays["target.scale"] + arrays["target.mean"], np.sqrt(variance) * arrays["target.scale"]


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, missing cells and dates."""
    folder = tmp_path_factory.mktemp("hospital")
    frames = {}
    for k in range(2):
        frame, days = patients(seed=k), pd.date_range("2022-01-05", periods=90, freq="133h")
        frame.insert(0, "admitted", days.strftime("%Y-%m-%d"))
        frame["y"] += np.sin(2 * np.pi * days.day_of_year / 365)
        frames[str(k)] = frame
    return finished(folder, frames, target="y", missing="indicator", dates="days-and-season")


def test_numpy_alone_predicts_from_the_files_of_the_posterior(hospital: Path) -> None:
    new = pd.DataFrame({"admitted": ["2024-02-29", None, "2019-12-31"], "age": [50.0, 70.0, np.nan], "weight": 80.0})
    new["ward"] = ["a", None, "never seen"]
    mean, sd = by_hand(hospital, new)
    found = Predictor.of_run(hospital).predict(new)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(found["sd"], sd, rtol=1e-9)
    assert np.unique(found["mean"]).size == 3
    new.to_csv(hospital.parent / "new.csv", index=False)
    counted = predict_file({"": Predictor.of_run(hospital)}, hospital.parent / "new.csv", hospital.parent / "out.csv")
    assert counted == (3, 1)  # a level that no site had; a missing cell is none
    np.testing.assert_allclose(pd.read_csv(hospital.parent / "out.csv")["mean"], mean, rtol=1e-9)
    assert "standardis" in json.loads((hospital / "posterior.json").read_text())["encoding"]


def test_a_new_row_with_a_missing_cell_has_no_prediction_where_such_rows_are_dropped(tmp_path: Path) -> None:
    run_folder = finished(tmp_path, {str(k): patients(seed=k) for k in range(2)}, target="y", missing="drop")
    posterior, new = Predictor.of_run(run_folder), patients(seed=9)
    found = posterior.predict(new)
    whole = new[["age", "weight", "ward"]].notna().all(axis=1)
    assert found["mean"].notna().tolist() == whole.tolist()
    np.testing.assert_array_equal(found["mean"][whole], posterior.predict(new[whole])["mean"])
    assert posterior.predict(new[~whole])["mean"].isna().all()
    with pytest.raises(DataError, match="missing cells"):
        posterior.inputs(new)


# Dates as numbers.


def dated(form: str, rows: int = 60) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    days = pd.date_range("2023-01-05", periods=rows, freq="41h")
    return pd.DataFrame({"day": days.strftime(form), "x": draw.normal(size=rows), "y": draw.normal(size=rows)})


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y %H:%M"])
def test_dates_become_days_and_season(tmp_path: Path, form: str) -> None:
    nodes = csv_nodes(tmp_path, {"a": dated(form)})
    site = load_site(settings("error", dates="days-and-season"), nodes[0])
    assert site.features == ("days(day)", "sine(day)", "cosine(day)", "x")
    days = pd.date_range("2023-01-05", periods=60, freq="41h")
    since = [(day.date() - pd.Timestamp("2000-01-01").date()).days for day in days]
    assert site.train["days(day)"].tolist() == since
    angle = 2 * math.pi * (days[7].timetuple().tm_yday - 1) / 365.2425
    assert site.train["sine(day)"][7] == pytest.approx(math.sin(angle))
    assert site.train["cosine(day)"][7] == pytest.approx(math.cos(angle))
    assert load_site(settings("error", dates="days"), nodes[0]).features == ("days(day)", "x")


def test_days_and_months_that_could_be_exchanged_are_refused(tmp_path: Path) -> None:
    frame = dated("%d/%m/%Y").assign(day=[f"0{1 + k % 9}/0{1 + k // 9}/2023" for k in range(60)])
    [node] = csv_nodes(tmp_path, {"a": frame})
    with pytest.raises(DataError, match=r"a\.csv: in `day` day and month could be exchanged .* write dates as 2024-12"):
        load_site(settings("error", dates="days"), node)


def test_sites_may_write_dates_in_different_ways(tmp_path: Path) -> None:
    both = pd.concat([dated("%Y-%m-%d"), dated("%d.%m.%Y")], ignore_index=True)
    (days,) = readings(both["day"])
    assert days[: len(both) // 2].tolist() == days[len(both) // 2 :].tolist()
    nodes = csv_nodes(tmp_path, {"a": dated("%Y-%m-%d"), "b": dated("%d.%m.%Y")})
    strategy = run(FaultyGrid(configured(sites=2, num_server_rounds=1, dates="season"), nodes))
    assert blamed(strategy) == {}
    assert strategy.preparation.names == ("sine(day)", "cosine(day)", "x")


# Numbers as people write them.


def test_decimal_commas_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame({"dose": ["1,5", "2", "-0,25", "1.234,5"], "y": [1.0, 2, 3, 4]})
    assert typed(frame, ["dose"], "f")["dose"].tolist() == [1.5, 2.0, -0.25, 1234.5]
    frame = pd.DataFrame({"dose": ["1,500", "2,250", "3"]})
    with pytest.raises(DataError, match=r"column `dose`: comma that may stand for thousands in row 1 and 1 more row"):
        typed(frame, ["dose"], "f")
    assert typed(pd.DataFrame({"dose": ["1,500", "2,25"]}), ["dose"], "f")["dose"].tolist() == [1.5, 2.25]
    assert typed(pd.DataFrame({"job": ["a,b", "c", "d,5"]}), ["job"], "f")["job"].tolist() == ["a,b", "c", "d,5"]


def test_a_number_that_repeats_far_from_all_others_is_suspected_as_a_code() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"crp": draw.gamma(2, 20, 60), "age": draw.normal(60, 9, 60), "ward": ["a", "b"] * 30})
    frame = frame.assign(outlier=frame["age"], dose=frame["age"], yes=[0.0, 1.0] * 30)
    frame.loc[[3, 9, 20], "crp"] = -999.0
    frame.loc[[3, 7], "age"], frame.loc[[4, 8], "age"] = -9999.0, 9999.0
    frame.loc[5, "outlier"] = 1e6  # once: it may be true
    frame.loc[frame.index < 30, "dose"] = 0.0
    found = {name: list(np.flatnonzero(mask)) for name, mask in codes_in(frame).items()}
    assert found == {"crp": [3, 9, 20], "age": [3, 4, 7, 8]}


def test_a_suspected_code_is_told_before_training_and_never_itself(tmp_path: Path) -> None:
    frames = {"north": patients(seed=1), "south": patients(seed=2)}
    frames["north"].loc[[2, 5, 6], "weight"] = -987.0
    files = [Path(str(node["data-path"])) for node in csv_nodes(tmp_path, frames)]
    [said] = check(files, settings("impute")).suspected
    assert said.startswith("north: `weight` (3 cells)")
    assert "987" not in said
