"""Columns of dates are recognised by what they look like, and refused with the remedy before they become indicators."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, configured, csv_nodes, no_waiting, waves

from fedgp_flower import server_app
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.datasets import load_table
from fedgp_flower.data.dates import dates_in
from fedgp_flower.run.terminal import show_result

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
