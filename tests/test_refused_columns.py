"""Columns of text or dates that must not become indicators are refused where they lie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import Fault, FaultyGrid, configured, csv_nodes, no_waiting, waves
from flwr.app import Message

from fedgp_flower import server_app
from fedgp_flower.agreement import SiteDescription, agree
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import identifier_problems
from fedgp_flower.data.datasets import load_table
from fedgp_flower.data.dates import dates_in
from fedgp_flower.data.standardisation import describe
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.run.terminal import show_result

SECRET = b"SSN-7"


def content(message: Message) -> bytes:
    """Everything a message carries."""
    if message.has_error():
        return str(message.error.reason).encode()
    records = message.content
    arrays = b"".join(array.data for record in records.array_records.values() for array in record.values())
    texts = [dict(record) for kind in (records.config_records, records.metric_records) for record in kind.values()]
    return arrays + str(texts).encode()


class RecordingGrid(FaultyGrid):
    """Keeps what every message and every reply carries."""

    def __init__(self, flat: Any, nodes: Any, *faults: Fault) -> None:
        super().__init__(flat, nodes, *faults)
        self.carried: list[bytes] = []

    def arrival(self, message: Message) -> Message | None:
        reply = super().arrival(message)
        self.carried += [content(m) for m in (message, reply) if m is not None]
        return reply


def readmitted(rows: int, seed: int, visits: int = 2) -> pd.DataFrame:
    """Rows of patients who came ``visits`` times each; most of their ids are at no other site."""
    return waves(rows, seed).assign(patient=[f"SSN-7{seed}{i // visits:03d}" for i in range(rows)])


def executed(flat: dict[str, Any], grid: RecordingGrid) -> None:
    with no_waiting():
        server_app.execute(grid, flat, lambda row, total: None)


def test_ids_that_repeat_are_refused_at_the_site_and_nothing_of_them_leaves(
    tmp_path: Path,
) -> None:
    nodes = csv_nodes(tmp_path, {f"{seed}": readmitted(60, seed) for seed in range(3)})
    flat = configured(sites=3, num_server_rounds=1, output_dir=str(tmp_path), target="y")
    refused, allowed = flat | {"name": "refused"}, flat | {"name": "left-out", "features": "-patient"}
    grids = [RecordingGrid(keys, nodes) for keys in (refused, allowed)]
    with pytest.raises(RunError, match=r"`patient` has \d+ levels in 48 rows, as an identifier has; leave it out"):
        executed(refused, grids[0])
    executed(allowed, grids[1])
    assert (tmp_path / "left-out" / "report.html").exists()
    written = [path for name in ("refused", "left-out") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert {"log.txt", "posterior.json", "report.html", "metrics.json"} <= {path.name for path in written}
    assert len(grids[1].carried) > 20
    assert not [text for grid in grids for text in grid.carried if SECRET in text]
    assert not [path.name for path in written if SECRET in path.read_bytes()]


def test_the_search_would_find_a_level_that_leaves(tmp_path: Path) -> None:
    """Five ids at each site are levels that a column may have."""
    nodes = csv_nodes(tmp_path, {f"{seed}": readmitted(60, seed, visits=12) for seed in range(2)})
    flat = configured(sites=2, num_server_rounds=1, output_dir=str(tmp_path), name="seen", target="y")
    grid = RecordingGrid(flat, nodes)
    executed(flat, grid)
    assert [text for text in grid.carried if SECRET in text]
    assert SECRET in (tmp_path / "seen" / "posterior.json").read_bytes()


def words(levels: int, rows: int) -> pd.DataFrame:
    return pd.DataFrame({"word": [f"w{i % levels}" for i in range(rows)]})


@pytest.mark.parametrize(
    ("levels", "rows", "most", "reason"),
    [
        (2, 3, 50, ""),  # two levels are a class at the smallest site
        (3, 9, 50, ""),
        (3, 8, 50, "`word` has 3 levels in 8 rows, as an identifier has"),
        (34, 100, 10**9, "`word` has 34 levels in 100 rows, as an identifier has; leave it out (`features` = '-word')"),
        (33, 100, 50, ""),
        (51, 10_000, 50, "`word` has 51 levels in 10000 rows; at most 50 are allowed: leave it out"),
        (51, 10_000, 51, ""),
    ],
)
def test_which_columns_are_refused(levels: int, rows: int, most: int, reason: str) -> None:
    frame = words(levels, rows)
    found = identifier_problems(frame, ["word"], most)
    assert len(found) == bool(reason)
    assert reason in ". ".join(found)


def test_a_simulated_data_set_is_refused_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "all.csv"
    words(60, 600).assign(x=range(600), y=range(600)).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"all\.csv: `word` has 60 levels in 600 rows; at most 50"):
        load_table(CoreConfig.model_validate({"dataset": str(path)}))
    monkeypatch.setattr(CoreConfig, "max_levels", 60)
    assert load_table(CoreConfig.model_validate({"dataset": str(path)})).features == ("word", "x")


def described(levels: range) -> SiteDescription:
    draw = np.random.default_rng(0)
    word = [f"w{levels[i % len(levels)]}" for i in range(120)]
    frame = pd.DataFrame({"word": word, "y": draw.normal(size=120)})
    return describe(frame, ["word"], "y")


def test_the_server_refuses_a_union_of_levels_and_a_site_that_sends_too_many() -> None:
    apart = {str(k): described(range(40 * k, 40 * k + 40)) for k in range(2)}
    with pytest.raises(DataError, match="`word` has 80 levels over all sites; at most 50 are allowed"):
        agree(apart)
    assert len(json.loads(agree(apart, max_levels=80).schema)["features"][0]["levels"]) == 80
    found = agree({"a": described(range(40)), "b": described(range(60))})
    assert list(found.refused) == ["b"]
    assert "`word` has 60 levels; at most 50" in found.refused["b"]


DAYS = pd.date_range("2023-01-05", periods=200, freq="41h")
"""Days of the month up to 31, so that day and month cannot be exchanged."""


@pytest.mark.parametrize(
    "form",
    [
        "%Y-%m-%d",
        "%Y-%m-%d %H:%M:%S",
        "%Y-%m-%dT%H:%M:%SZ",
        "%Y/%m/%d",
        "%d.%m.%Y",
        "%m/%d/%Y %I:%M %p",
        "%-m/%-d/%Y",
        "%d/%m/%Y",
        "%d-%m-%Y",
    ],
)
def test_dates_are_recognised(form: str) -> None:
    cells = pd.Series([f" {day.strftime(form)}" for day in DAYS])
    found = dates_in(cells)
    assert found is not None
    assert found.all()
    cells[:15], cells[15:20], cells[20:30] = "unknown", None, ""  # 15 of 185 filled cells
    found = dates_in(cells)
    assert found is not None
    assert (~found).nonzero()[0].tolist() == list(range(30))
    cells[30:36] = "unknown"  # 21 of 185
    assert dates_in(cells) is None


@pytest.mark.parametrize("day", [DAYS, DAYS.date, DAYS.tz_localize("UTC")], ids=["datetime", "object", "zone"])
def test_columns_that_hold_dates_as_such_are_recognised(day: object) -> None:
    assert dates_in(pd.Series(day)).all()


@pytest.mark.parametrize(
    "cells",
    [
        [20230105, 20230106],
        ["20230105", "20230106"],
        ["2023", "2024"],
        ["3.10.12", "3.11.1"],
        ["12.05", "13.05"],
        ["2023-13-45", "2023-99-99"],
        ["31/31/2023", "30/30/2023"],
        ["555-123-4567", "555-321-7654"],
        ["10:30", "11:45"],
        ["a", "b"],
        ["", None],
    ],
)
def test_other_columns_are_not(cells: list[object]) -> None:
    assert dates_in(pd.Series(cells * 10)) is None


def admitted(rows: int, seed: int) -> pd.DataFrame:
    days = pd.date_range("2023-01-05", periods=rows, freq="41h").strftime("%d.%m.%Y")
    return waves(rows, seed).assign(admitted=["unknown", *days[1:]])[["admitted", "x1", "x2", "y"]]


def test_rows_may_be_dealt_by_a_column_of_dates(tmp_path: Path) -> None:
    admitted(90, 0).assign(admitted=["2023-01-01", "2023-02-01"] * 45).to_csv(tmp_path / "all.csv", index=False)
    keys = {"dataset": str(tmp_path / "all.csv"), "partitioner": "natural", "partition": {"column": "admitted"}}
    assert load_table(CoreConfig.model_validate(keys)).features == ("x1", "x2")


def test_many_inputs_and_a_model_no_better_than_the_mean_are_said_first(tmp_path: Path, capsys: Any) -> None:
    """Forty inputs for 96 training rows, and a target that none of them tells anything of."""
    draw = np.random.default_rng(0)
    frames = {
        f"{k}": pd.DataFrame(draw.normal(size=(60, 41)), columns=[*map("x{}".format, range(40)), "y"]) for k in range(2)
    }
    flat = configured(sites=2, num_server_rounds=1, baselines__linear=True, output_dir=str(tmp_path), name="run")
    with no_waiting():
        folder = server_app.execute(FaultyGrid(flat, csv_nodes(tmp_path, frames)), flat, lambda row, total: None)
    show_result(folder)
    many, mean = "40 encoded inputs for 96 training rows are more than a third", " NLL than the mean of the target (R²"
    assert many in json.loads((folder / "metrics.json").read_text())["warnings"][0]
    assert many in (folder / "log.txt").read_text()
    terminal, page = capsys.readouterr().out, (folder / "report.html").read_text()
    assert mean in terminal.splitlines()[-1]
    assert many in terminal
    assert 0 < page.index(mean) < page.index(many)
