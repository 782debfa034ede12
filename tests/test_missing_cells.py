"""Missing cells, dates and decimal commas as in the pooled table, and what is said of data before training."""

import itertools
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, configured, csv_nodes, no_waiting, waves

from fedgp_flower import server_app
from fedgp_flower.agreement import agree
from fedgp_flower.cli import main
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import codes_in, typed
from fedgp_flower.data.datasets import load_table
from fedgp_flower.data.sites import load_all_sites, load_site
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.check import check
from fedgp_flower.run.predict import Predictor

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


def encoded(folder: Path, missing: str, cuts: list[int]) -> tuple[np.ndarray, tuple[str, ...]]:
    frames = {str(k): patients()[a:b] for k, (a, b) in enumerate(itertools.pairwise([0, *cuts, 90]))}
    sites = [load_site(settings(missing), node) for node in csv_nodes(folder, frames)]
    agreement = agree({str(k): site.describe() for k, site in enumerate(sites)}, missing=missing)
    preparation = Preparation.from_wire(agreement.arrays, agreement.schema)
    assert preparation.names == agreement.names
    return np.concatenate([site.encode(preparation).x for site in sites]), agreement.names


@pytest.mark.parametrize("missing", MIXED)
@pytest.mark.parametrize("cuts", [[], [30, 61]])
def test_inputs_are_those_of_the_whole_table(tmp_path: Path, missing: str, cuts: list[int]) -> None:
    found, names = encoded(tmp_path, missing, cuts)
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


def finished(folder: Path, frames: dict[str, pd.DataFrame], **keys: Any) -> Path:
    flat = configured(sites=len(frames), num_server_rounds=1, output_dir=str(folder), name="run", **keys)
    with no_waiting():
        return server_app.execute(FaultyGrid(flat, csv_nodes(folder, frames)), flat, lambda row, total: None)


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


def test_decimal_commas_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame({"dose": ["1,5", "2", "-0,25", "1.234,5"], "y": [1.0, 2, 3, 4]})
    assert typed(frame, ["dose"], "f")["dose"].tolist() == [1.5, 2.0, -0.25, 1234.5]
    frame = pd.DataFrame({"dose": ["1,500", "2,250", "3"]})
    with pytest.raises(DataError, match=r"column `dose`: comma that may separate thousands in row 1 and 1 more row"):
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
    _, [said], _ = check(files, settings("impute"))
    assert said.startswith("north.csv: `weight` (3 cells)")
    assert "987" not in said


def hospitals(folder: Path) -> list[Path]:
    frames = {name: patients(seed=k) for k, name in enumerate(["north", "south", "grams"])}
    frames["grams"]["weight"] *= 1000
    csv_nodes(folder, frames)
    return [folder / f"{name}.csv" for name in frames]


IMPUTED = CoreConfig.model_validate({"missing": "impute", "test-fraction": 0.0})


def test_tables_are_summed_up_as_a_run_would(tmp_path: Path) -> None:
    data, _, problems = check(hospitals(tmp_path), IMPUTED)
    assert problems == []
    counted = {key: data[key] for key in ("sites", "rows", "inputs", "dropped")}
    assert counted == {"sites": 3, "rows": 267, "inputs": 5, "dropped": 3}
    age, weight, ward = data["columns"]
    gone = [patients(seed=k).dropna(subset=["y"]).isna().sum() for k in range(3)]
    assert (age["missing"], ward["missing"]) == (sum(own["age"] for own in gone), sum(own["ward"] for own in gone))
    assert (age["differs"], weight["differs"]) == ([], ["grams"])
    assert (ward["kind"], ward["levels"], ward["inputs"]) == ("text", 3, 3)


def test_every_problem_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    north, south, _ = hospitals(tmp_path)
    patients().assign(ward=[f"id {k}" for k in range(90)]).to_csv(tmp_path / "ids.csv", index=False)
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(north), str(south), str(tmp_path / "ids.csv"), "missing=impute"])
    assert stopped.value.code == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "`ward` has" in out
    assert "like an identifier" in out
    assert "142 training rows at 2 sites, 2 rows left out for a missing cell; 5 inputs of 3 columns" in out
    with pytest.raises(SystemExit):
        main(["check", str(north)])
    assert "set `missing` to" in capsys.readouterr().out


def test_a_run_says_it_before_training_and_in_its_report(tmp_path: Path, caplog: Any) -> None:
    frames = {str(k): waves(60, k).assign(x1=lambda own, k=k: own["x1"] + 50 * (k == 2)) for k in range(3)}
    with caplog.at_level(logging.INFO):
        folder = finished(tmp_path, frames)
    words = [
        "target `y`: 144 training rows at 3 sites; 2 inputs of 2 columns",
        "`x1`: mean far from that of the other sites at 2",
    ]
    assert [own.message for own in caplog.records if own.name == "fedgp.data"] == words
    page = (folder / "report.html").read_text()
    assert all(line.replace("`", "") in page for line in words)
    assert read_run(folder).metrics.data["rows"] == 144
    assert np.isfinite(read_run(folder).metrics.data["columns"][0]["mean"])
