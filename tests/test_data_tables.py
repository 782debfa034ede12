"""Tables of sites: faults by file, column and row, and no cell; text, dates, missing cells; words before a run."""

import gzip
import itertools
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from faults import FaultyGrid, configured, csv_nodes, no_waiting, waves

from fedgp_flower import server_app
from fedgp_flower.agreement import SiteDescription, agree, overview_lines
from fedgp_flower.config import CoreConfig
from fedgp_flower.data.cells import codes_in, far_in, identifier_problems, repeated, suspicions, typed
from fedgp_flower.data.datasets import checked, load_table
from fedgp_flower.data.dates import dates_in, with_numbers
from fedgp_flower.data.sites import RawSite, load_all_sites, load_site
from fedgp_flower.data.standardisation import Preparation, describe
from fedgp_flower.data.tables import read_table, sites_of, table_stem
from fedgp_flower.errors import DataError
from fedgp_flower.run.api import load_run
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.check import check
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.terminal import show_result
from fedgp_flower.shared_messages import CellProducts, Described

SECRET = "7.31415"
"""The one cell a message could betray, in every faulty file below."""
HEADER = "age,job,dose,y"
GOOD = [f"{20 + i},{'abc'[i % 3]}x,{i * 0.5},{i * i}" for i in range(12)]


def lines(*changed: tuple[int, str], header: str = HEADER, rows: list[str] | None = None) -> str:
    """The good table with some data rows (from 1) replaced."""
    body = list(GOOD if rows is None else rows)
    for row, text in changed:
        body[row - 1] = text
    return "\n".join([header, *body]) + "\n"


def load(path: Path, **node: str) -> RawSite:
    return load_site(CoreConfig(), {"data-path": str(path), **node})


CASES = {
    "missing column": (lines(header="age,job,dose,z").replace("z\n", "y \n", 0), {"target": "y"}, ["`y`", "`dose`"]),
    "text in a numeric cell": (
        lines((3, f"22,ax,high{SECRET},4"), (7, "26,ax,low,4")),
        {},
        ["column `dose`", "text in a numeric cell in row 3 and 1 more row"],
    ),
    "mark of missing numbers": (
        lines((3, "22,ax,?,4"), (7, "26,ax,?,4")),
        {},
        ["in row 3 and 1 more row, the same text everywhere; if it says that a number is missing, leave"],
    ),
    "empty numeric cell": (lines((5, f"24,{SECRET},,16")), {}, ["column `dose`", "empty or NaN cell in row 5"]),
    "empty category": (lines((2, "21,,0.5,1")), {}, ["column `job`", "empty or NaN cell in row 2"]),
    "two columns at once": (lines((6, ",ax,-inf,25")), {}, ["`age`: empty or NaN cell in row 6", "`dose`: infinite"]),
    "short row": (lines((8, "27,bx")), {}, ["column `dose`", "column `y`", "in row 8"]),
    "long row": (lines((8, f"27,bx,1,2,{SECRET}")), {}, ["data row 8", "more cells"]),
    "all rows long": (lines(rows=[row + "," + SECRET for row in GOOD]), {}, ["more cells than the header"]),
    "text target": (
        lines(rows=[f"{i},a,{i},{SECRET}x" for i in range(4)]),
        {},
        ["target `y` holds text", "needs numbers"],
    ),
    "no header": ("\n".join(f"{i},{SECRET}" for i in range(5)), {}, ["all names of columns are numbers"]),
    "part of a header": (
        f"a,{SECRET},b,c\n1,2,3,4\n",
        {"target": "y"},
        ["missing column `y`", "is the first line a header"],
    ),
    "named twice": (lines(header="age,job,age,y"), {}, ["more than once: `age`"]),
    "index column": (lines(header=",job,dose,y"), {}, ["column 1 has no name", "`features`"]),
    "unknown separator": (lines().replace(",", "~"), {"target": "y"}, ["missing column `y`", "cells are separated by"]),
    "line above the header": (f"Export of {SECRET}\n{lines()}", {}, ["more cells than the header", "line above"]),
    "open quotation mark": (lines((3, f'22,"{SECRET},1,4')), {}, ["quotation mark is not closed"]),
    "total below the rows": (f"{lines()}Total,,{SECRET},1\n", {}, ["`age`: text in a numeric cell in row 13", "`job`"]),
    "huge number": (lines((6, "25,ax,1e300,25")), {}, ["`dose`: number beyond 1e+100 in row 6"]),
    "unit": (lines(rows=[f"{i},ax,{i}.5 mg,{i}" for i in range(9)]), {}, ["`dose`", "a unit", "'-dose'"]),
    "day or month": (
        lines(rows=[f"{i},ax,0{i}/02/2023,1" for i in range(1, 9)]),
        {"dates": "days"},
        ["in `dose` day and month could be swapped"],
    ),
    "nothing filled": (lines(rows=[f"{i},ax,,1" for i in range(9)]), {"missing": "impute"}, ["no cell of `dose`"]),
    "kinds at once": (
        lines(rows=[f"{i},{SECRET}{i}x,2023-01-{i},{i if i > 12 else ''}" for i in range(10, 19)]),
        {},
        ["`job` has 9 levels", "`features`", "`dose` holds dates", "`dates`", "`y`: empty or NaN cell in row 1 and 2"],
    ),
    "function of a number without one": (
        lines(header="age,job,exposure,y"),
        {"formula": "y ~ job + age + offset(log(exposure))"},
        ["offset(log(exposure)) is not finite in row 1; correct the cells, leave out the rows, or change the term"],
    ),
    "function of a number in a random term": (
        lines((5, f"24,bx,-{SECRET},16"), (8, f"27,bx,-{SECRET},16"), (2, "21,bx,,4")),
        {"formula": "y ~ C(job, Treatment('cx')) * log1p(age) + (1 + sqrt(dose) | job)", "missing": "drop"},
        ["`formula`: sqrt(dose) is not finite in row 5 and 1 more row"],
    ),
    "two targets": (
        lines(),
        {"target": "y,dose"},
        [
            *("missing column `y,dose`", "a run has one `target`, or two columns if `model.likelihood` is"),
            *("'time-to-event' or 'log-logistic' or 'log-normal' (time, event)", "'binomial' (successes, trials)"),
        ],
    ),
    "left out by a wrong name": (
        lines(),
        {"features": "-jobs"},
        ["leaves out `jobs` (did you mean `job` or `dose`?); it has `age`"],
    ),
    "misspelt columns": (
        lines(),
        {"features": "jobs,does", "target": "y"},
        ["missing column `jobs` (did you mean `job` or `dose`?), `does` (did you mean `dose`?); it has"],
    ),
    "misspelt target": (lines(header="age,job,dose,days"), {"target": "day"}, ["`day` (did you mean `days`?)"]),
    "another case": (lines(), {"target": "DOSE"}, ["`DOSE` (did you mean `dose`?)"]),
    "misspelt formula": (lines(), {"formula": "y ~ ages + job"}, ["`ages` (did you mean `age`?)"]),
    "header only": (HEADER + "\n", {}, ["no data rows"]),
    "empty file": ("", {}, ["the file is empty"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_faulty_file_is_refused_with_its_name_and_without_its_cells(case, tmp_path):
    text, keys, expected = CASES[case]
    path = tmp_path / "clinic.csv"
    path.write_text(text)
    config = CoreConfig.model_validate(keys)
    with pytest.raises(DataError) as caught:
        load_site(config, {"data-path": str(path)})
    message = str(caught.value)
    assert "clinic.csv" in message
    for part in expected:
        assert part in message
    assert SECRET not in message
    assert "high" not in message


@pytest.mark.parametrize("words", [("yes", "no"), ("dead", "alive")])
def test_an_event_in_words_is_answered_with_what_its_column_holds(words: tuple[str, str], tmp_path: Path) -> None:
    rows = "".join(f"{k},{k + 1},{words[k % 2]}\n" for k in range(20))
    (tmp_path / "fleet.csv").write_text(f"load,hours,failed\n{rows}")
    keys = {"target": "hours,failed", "model": {"likelihood": "time-to-event"}}
    with pytest.raises(DataError) as caught:
        load_site(CoreConfig.model_validate(keys), {"data-path": str(tmp_path / "fleet.csv")})
    expected = "column `failed`: text in a numeric cell in row 1 and 19 more rows. `failed` holds 1 where the event was"
    assert f"fleet.csv: {expected} seen and 0 where the time is censored" in str(caught.value)


@pytest.mark.parametrize("name", ["fleet.parquet", "fleet.csv"])
def test_an_event_may_be_a_truth_value_of_pandas(name: str, tmp_path: Path) -> None:
    rows = pd.DataFrame({"load": np.arange(20.0), "hours": np.arange(1.0, 21.0), "failed": [True, False] * 10})
    rows.to_csv(tmp_path / name, index=False) if name.endswith("csv") else rows.to_parquet(tmp_path / name)
    keys = {"target": "hours,failed", "model": {"likelihood": "time-to-event"}, "test-fraction": 0.0}
    site = load_site(CoreConfig.model_validate(keys), {"data-path": str(tmp_path / name)})
    assert site.train["failed"].tolist() == [1.0, 0.0] * 10


UNREADABLE = {
    "absent.csv": (None, "no such file"),
    "notes.txt": (b"a,y\n1,2\n", "unknown file type"),
    "torn.csv.gz": (gzip.compress(lines().encode())[:-20], "cannot be read"),
    "torn.parquet": (b"PAR1 and no more", "cannot be read"),
    "latin.csv": ("größe,y\n1,2\n".encode("latin-1"), "not UTF-8 text; save the file as CSV in UTF-8"),
    "excel.csv": (b"PK\x03\x04" + bytes(range(256)), "not UTF-8 text; save the file as CSV in UTF-8"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read_are_named(name, tmp_path):
    content, words = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(name)}: {words}"):
        load(tmp_path / name)


def test_faults_of_a_test_file_name_the_test_file(tmp_path):
    (tmp_path / "a.csv").write_text(lines())
    (tmp_path / "b.csv").write_text(lines((2, f"21,{SECRET},0.5x,1")))
    with pytest.raises(DataError, match=r"b\.csv: column `dose`: text in a numeric cell in row 2") as caught:
        load(tmp_path / "a.csv", **{"test-path": str(tmp_path / "b.csv")})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_cells_are_separated_by_what_cuts_the_header(separator, tmp_path):
    frame = pd.read_csv(pd.io.common.StringIO(lines())).rename(columns={"job": "job, or none"})
    frame.to_csv(tmp_path / "a.csv", index=False, sep=separator, decimal=",")
    frame.to_csv(tmp_path / "b.csv", index=False)
    found, usual = (load(tmp_path / name) for name in ("a.csv", "b.csv"))
    assert found.features == ("age", "job, or none", "dose")
    one, other = (pd.concat([own.train, own.test]).sort_values("age", ignore_index=True) for own in (found, usual))
    pd.testing.assert_frame_equal(one, other)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_the_three_formats_give_the_same_rows(suffix, tmp_path):
    frame = pd.read_csv(pd.io.common.StringIO(lines())).assign(dose=np.random.default_rng(0).normal(size=12))
    path = tmp_path / f"ward{suffix}"
    _ = frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(path, index=False)
    site = load(path)
    rows = pd.concat([site.train, site.test]).sort_values("age", ignore_index=True)
    assert site.site == site.label == table_stem(path) == "ward"
    assert not site.simulated
    assert site.features == ("age", "job", "dose")
    assert (rows["dose"].to_numpy() == frame["dose"].to_numpy()).all()  # to the last bit
    assert rows["job"].tolist() == frame["job"].tolist()
    assert len(site.test) == round(0.2 * 12)


def test_byte_order_mark_blanks_and_question_marks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf  \n\n x , job ,y\n1, ? ,2\n2,a,3\n\n3,a,5\n")
    frame = typed(read_table(path), ["x", "job", "y"], "a.csv")
    assert frame["job"].tolist() == ["?", "a", "a"]
    assert frame["x"].tolist() == [1.0, 2.0, 3.0]


def test_a_column_is_numeric_when_half_of_its_cells_are():
    raw = pd.DataFrame({"half": ["1", "2", "a", "b"], "fewer": ["1", "a", "b", "c"]})
    with pytest.raises(DataError, match="`half`: text in a numeric cell in row 3 and 1 more row"):
        typed(raw, ["half"], "f")
    assert typed(raw, ["fewer"], "f")["fewer"].tolist() == ["1", "a", "b", "c"]


def test_parquet_types(tmp_path):
    frame = pd.DataFrame(
        {
            "small": np.array([1, 2, 3], dtype=np.int8),
            "nullable": pd.array([1, None, 3], dtype="Int64"),
            "flag": [True, False, True],
            "level": pd.Categorical(["2", "1", "2"]),
            "day": pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03"]),
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    raw = read_table(tmp_path / "t.parquet")
    good = typed(raw, ["small", "flag", "level"], "t")
    assert good["small"].dtype == np.float64
    assert good["flag"].tolist() == ["True", "False", "True"]
    assert good["level"].tolist() == ["2", "1", "2"]
    with pytest.raises(DataError, match="`nullable`: empty or NaN cell in row 2; column `day`: dates"):
        typed(raw, ["nullable", "day"], "t")


def test_targets_of_each_likelihood():
    raw = pd.DataFrame({"y": [0.0, 1.0, 2.5, -1.0], "two": [0, 1, 1, 0], "n": [0, 3, 1, 7], "t": ["no", "yes"] * 2})
    raw["b"] = [True, False] * 2

    def target(name: str, likelihood: str) -> list:
        config = CoreConfig.model_validate({"model": {"likelihood": likelihood}})
        return checked(raw, [], name, config, "f")[name].tolist()

    assert target("two", "bernoulli") == ["0", "1", "1", "0"]
    assert target("t", "bernoulli") == ["no", "yes", "no", "yes"]
    assert target("n", "poisson") == [0, 3, 1, 7]
    assert target("y", "student-t") == [0.0, 1.0, 2.5, -1.0]
    with pytest.raises(DataError, match=r"`b` holds truth values; .* set `model.likelihood` to 'bernoulli'"):
        target("b", "gaussian")
    with pytest.raises(DataError, match="`y` has 4 levels"):
        target("y", "bernoulli")
    with pytest.raises(DataError, match="`y`: expected counts 0, 1, 2, …; another number in row 3 and 1 more row"):
        target("y", "poisson")


def test_held_out_rows_beside_a_table_are_no_site():
    paths = [Path("a/west.csv"), Path("a/west.test.csv"), Path("b/east.test.csv"), Path("b/north.csv")]
    kept, [said] = sites_of(paths)
    assert kept == [paths[0], paths[2], paths[3]]
    assert said == "west.test.csv: the held-out rows of west.csv, not a site"
    twice = [Path("a/west.csv"), Path("a/west.parquet")]
    assert sites_of(twice) == (twice, [])


def test_a_column_that_says_train_and_test_is_no_target(tmp_path):
    frame = pd.DataFrame({"x": np.arange(40.0) / 4, "y": np.arange(40.0) ** 2, "split": ["train"] * 30 + ["val"] * 10})
    frame.to_csv(tmp_path / "a.csv", index=False)
    site = load_site(CoreConfig(), {"data-path": str(tmp_path / "a.csv")})
    assert (site.features, site.target) == (("x",), "y")
    assert site.suspected() == ""


def test_rows_that_repeat_and_skewed_targets_are_said_and_no_cell_is() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draw.normal(size=60), "n": draw.integers(0, 3, 60), "days": draw.lognormal(1, 1, 60)})
    said = suspicions(pd.concat([frame, frame[:7]]), "days", {}, gaussian=True).splitlines()
    assert [line[:20] for line in said] == ["7 rows repeat anothe", "target `days` is abo"]
    once = suspicions(pd.concat([frame, frame[:1]]), "days", {}, gaussian=False)
    assert once == "1 row repeats another row in every column; if it is the same observation, leave it out"
    assert suspicions(frame.assign(days=frame["x"]), "days", {}, gaussian=True) == ""  # symmetric
    assert suspicions(frame, "days", {}, gaussian=False) == ""
    (timed,) = suspicions(frame.assign(died=frame["n"] % 2.0), "days", {}, gaussian=True).splitlines()
    assert timed.endswith(
        "if it is the time to an event that `died` records, set `target` to 'days,died' and `model.likelihood` to"
        " 'time-to-event'"
    )
    (several,) = suspicions(frame.assign(arm=frame["n"] // 2, died=frame["n"] % 2.0), "days", {}, True).splitlines()
    assert "that `arm` or `died` records, set `target` to 'days,COLUMN'" in several
    graded = frame.assign(days=np.arange(len(frame)) % 3.0)
    assert "if they name classes, set `model.likelihood`" in suspicions(graded, "days", {}, gaussian=True)
    assert "set `model.likelihood` to 'bernoulli'" in suspicions(frame.assign(days=frame["n"] % 2.0), "days", {}, True)
    assert suspicions(graded, "days", {}, gaussian=False) == ""
    numbered = frame.assign(id=draw.permutation(np.arange(1000.0, 1080))[:60], m=4.0 * np.arange(60))  # m has gaps
    assert suspicions(numbered, "days", {}, gaussian=False) == (
        "`id` numbers the rows; unless it is a time, leave it out (`features` = '-id')"
    )
    long = frame.assign(id=2.0**53 + 1e6 * draw.permutation(60))
    assert suspicions(long, "days", {}, gaussian=False).startswith("`id` numbers the rows")
    assert suspicions(numbered.rename(columns={"id": "days(id)"}), "days", {}, gaussian=False) == ""  # made of dates
    assert repeated(frame[["n"]]) == 0  # so few numbers repeat by chance


def test_a_folder_is_no_table_and_levels_are_counted_over_all_rows(tmp_path):
    with pytest.raises(DataError, match=r"is a folder, not a table; name the tables in it"):
        read_table(tmp_path)
    frame = pd.DataFrame({"id": [f"p{k}" for k in range(100)], "x": range(100), "y": range(100)})
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match="`id` has 100 levels in 100 rows"):
        load_site(CoreConfig(), {"data-path": str(tmp_path / "a.csv")})


@pytest.mark.parametrize(
    ("levels", "rows", "reason"),
    [
        (2, 3, ""),  # two levels are a class at the smallest site
        (3, 9, ""),
        (3, 8, "`word` has 3 levels in 8 rows, like an identifier"),
        (34, 100, "`word` has 34 levels in 100 rows, like an identifier; leave it out (`features` = '-word')"),
        (33, 100, ""),
        (51, 10_000, "`word` has 51 levels in 10000 rows; at most 50 are allowed: leave it out"),
        (50, 10_000, ""),
    ],
)
def test_which_columns_are_refused(levels: int, rows: int, reason: str) -> None:
    frame = pd.DataFrame({"word": [f"w{i % levels}" for i in range(rows)]})
    found = identifier_problems(frame, ["word"])
    assert len(found) == bool(reason)
    assert reason in ". ".join(found)


@pytest.mark.parametrize("form", ["%Y-%m", "%Y-%m-%d 24:00", "%d.%m.%Y 12:00 CET", "%d %m %Y"])
def test_dates_in_another_form_are_no_mere_identifier(form: str) -> None:
    days = pd.date_range("2020-01-31", periods=40, freq="ME").strftime(form)
    [problem] = identifier_problems(pd.DataFrame({"time": days.astype(str)}), ["time"])
    assert problem.endswith("if they are dates, write them as 2024-12-31, with a time as 2024-12-31 18:00+01:00")


def described(levels: range) -> SiteDescription:
    draw = np.random.default_rng(0)
    word = [f"w{levels[i % len(levels)]}" for i in range(120)]
    return describe(pd.DataFrame({"word": word, "y": draw.normal(size=120)}), ["word"], "y")


def test_the_server_refuses_a_union_of_levels_and_a_site_that_sends_too_many() -> None:
    apart = {str(k): described(range(40 * k, 40 * k + 40)) for k in range(2)}
    with pytest.raises(DataError, match="`word` has 80 levels over all sites; at most 50 are allowed"):
        agree(apart)
    found = agree({"a": described(range(40)), "b": described(range(60))})
    assert list(found.refused) == ["b"]
    assert "`word` has 60 levels; at most 50" in found.refused["b"]


DAYS = pd.date_range("2023-01-05", periods=200, freq="41h")
"""Days of the month up to 31, so that day and month cannot be exchanged."""


FORMS = ["%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%d-%m-%Y"]


@pytest.mark.parametrize("form", [*FORMS, "%m/%d/%Y %I:%M %p", "%-m/%-d/%Y"])
def test_dates_are_recognised(form: str) -> None:
    cells = pd.Series([f" {day.strftime(form)}" for day in DAYS])
    assert dates_in(cells).all()
    cells[:15], cells[15:20], cells[20:30] = "unknown", None, ""  # 15 of 185 filled cells
    assert (~dates_in(cells)).nonzero()[0].tolist() == list(range(30))
    cells[30:107] = "unknown"  # 92 of 185
    assert dates_in(cells) is not None
    cells[107] = "unknown"
    assert dates_in(cells) is None


def test_a_missing_date_is_told_once(tmp_path: Path) -> None:
    days = [f"2024-01-{day:02}" for day in range(1, 13)]
    days[3] = ""
    (tmp_path / "a.csv").write_text(lines(header="day,job,dose,y", rows=[f"{d},a,{i},{i}" for i, d in enumerate(days)]))
    with pytest.raises(DataError) as caught:
        load_site(CoreConfig(dates="days-and-season"), {"data-path": str(tmp_path / "a.csv")})
    assert str(caught.value).startswith("a.csv: column `day`: empty or NaN cell in row 4. Fill the cells")


@pytest.mark.parametrize("bad", ["2024-02-30", "unknown"])
def test_a_cell_among_dates_that_is_none_is_named_by_its_row(tmp_path: Path, bad: str) -> None:
    days = [*DAYS[:11].strftime("%Y-%m-%d"), bad]
    frame = pd.DataFrame({"day": days, "x": range(12), "y": range(12)})
    for missing in ("error", "impute"):
        [node] = csv_nodes(tmp_path, {"a": frame})
        with pytest.raises(DataError, match=r"^a\.csv: `day` holds no date in row 12; write dates as"):
            load_site(settings(missing, dates="days-and-season"), node)
    new = pd.DataFrame({"day": [DAYS[0].strftime("%d.%m.%Y"), "", bad, bad]})  # agreed to be dates, though most are not
    with pytest.raises(DataError, match=r"^new: `day` holds no date in row 3 and 1 more; write dates as"):
        with_numbers(new, ["days(day)", "sine(day)"], "new")


@pytest.mark.parametrize("day", [DAYS, DAYS.date, DAYS.tz_localize("UTC"), pd.array(DAYS.date, "date32[pyarrow]")])
def test_columns_that_hold_dates_as_such_are_recognised(day: object) -> None:
    assert dates_in(pd.Series(day)).all()


NONE = "20230105 20230106,2023 2024,3.10.12 3.11.1,12.05 13.05,2023-13-45 2023-99-99,31/31/2023 30/30/2023"
NONE += ",555-123-4567 555-321-7654,10:30 11:45,a b"


@pytest.mark.parametrize("cells", [[20230105, 20230106], ["", None], *(pair.split() for pair in NONE.split(","))])
def test_other_columns_are_not(cells: list[object]) -> None:
    assert dates_in(pd.Series(cells * 10)) is None


def test_rows_may_be_dealt_by_a_column_of_dates(tmp_path: Path) -> None:
    waves(90, 0).assign(admitted=["2023-01-01", "2023-02-01"] * 45).to_csv(tmp_path / "all.csv", index=False)
    keys = {"dataset": str(tmp_path / "all.csv"), "partitioner": "natural", "partition": {"column": "admitted"}}
    assert load_table(CoreConfig.model_validate({**keys, "target": "y"})).features == ("x1", "x2")


def test_many_inputs_and_a_model_no_better_than_the_mean_are_said_first(tmp_path: Path, capsys: Any) -> None:
    """Forty inputs for 96 training rows, and a target that none of them tells anything of."""
    draw = np.random.default_rng(0)
    columns = [*map("x{}".format, range(40)), "y"]
    frames = {f"{k}": pd.DataFrame(draw.normal(size=(60, 41)), columns=columns) for k in range(2)}
    folder = finished(tmp_path, frames, method="fsgp", baselines__linear=True)
    show_result(folder)
    many, mean = "40 encoded inputs are more than a third of the 96 training rows", " the mean of the target (R²"
    assert many in json.loads((folder / "metrics.json").read_text())["warnings"][0]
    assert many in (folder / "log.txt").read_text()
    terminal, page = capsys.readouterr().out, (folder / "report.html").read_text()
    assert terminal.startswith("Typical error of y: ")
    assert terminal.index(mean) < terminal.index(many)
    assert 0 < page.index(mean) < page.index(many)


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


@pytest.mark.parametrize("missing", ["drop", "impute", "indicator"])
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
    np.testing.assert_allclose(found, np.column_stack(list(expected.values())), rtol=0, atol=1e-8)


def related_patients(seed: int, gone: float = 0.2) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A table in which each column tells of the others, with and without its cells gone at random."""
    draw = np.random.default_rng(seed)
    age = draw.normal(60, 10, 80)
    pulse = 90 - 0.3 * age + draw.normal(size=80)
    whole = pd.DataFrame({"age": age, "pulse": pulse, "ward": np.where(age + draw.normal(0, 4, 80) > 60, "b", "a")})
    target = pd.DataFrame({"y": 0.1 * age + 0.1 * draw.normal(size=80)})
    return whole.mask(draw.random(whole.shape) < gone).join(target), whole.join(target)


def covariance_of(table: pd.DataFrame, sites: pd.DataFrame) -> np.ndarray:
    """The covariance of the standardised inputs of known cells, pair by pair, with a row of none for each input."""
    z = (table - sites.mean()) / sites.std(ddof=0)
    known, filled = z.notna().to_numpy(float), z.fillna(0.0).to_numpy()
    return (filled.T @ filled + 3 * np.eye(3)) / (known.T @ known + 3)


def test_a_missing_cell_has_its_mean_given_the_others_of_its_row(tmp_path: Path) -> None:
    frames = {f"site {seed}": related_patients(seed)[0] for seed in range(3)}
    folder = finished(tmp_path, frames, target="y", missing="impute", test_fraction=0.0)
    arrays = load_run(folder).saved.arrays
    numbers = pd.concat(frames.values()).drop(columns="y")
    numbers = numbers.assign(ward=(numbers["ward"] == "b").where(numbers["ward"].notna()).astype(float))
    found = covariance_of(numbers, numbers)
    assert np.linalg.eigvalsh(found).min() > 0.01
    np.testing.assert_allclose(arrays["input.covariance"], found, rtol=1e-8)
    mean, scale = arrays["input.mean"], arrays["input.scale"]
    gap, whole = related_patients(9)
    row, others, missing = whole.drop(columns="y")[:1], [1, 2], 0
    known = (np.array([row["pulse"].iloc[0], float(row["ward"].iloc[0] == "b")]) - mean[others]) / scale[others]
    filled = found[missing, others] @ np.linalg.solve(found[np.ix_(others, others)], known)
    posterior = load_run(folder).posterior
    imputed, by_hand = (posterior.predict(row.assign(age=[age])) for age in (np.nan, mean[0] + scale[0] * filled))
    pd.testing.assert_frame_equal(imputed, by_hand, rtol=1e-9)
    error = posterior.inputs(gap).numpy() - posterior.inputs(whole).numpy()
    centred = gap["age"].isna().to_numpy() * (whole["age"] - mean[0]) / scale[0]
    assert (error[:, 0] ** 2).sum() < 0.4 * (centred**2).sum()


def test_products_that_no_rows_have_are_refused() -> None:
    counts = np.full((2, 2), 9.0)
    products = np.array([[9.0, 5.0], [5.0, 4.0]])
    assert CellProducts(products, counts).refusal(Described(9)) is None
    for wrong in (CellProducts(products * [[1, 2], [2, 1]], counts), CellProducts(products, counts + 1)):
        assert "not those of 9 rows" in str(wrong.refusal(Described(9)))
    answers = {"a": CellProducts(products, counts), "b": CellProducts(1e6 * products, counts)}
    assert list(CellProducts.outliers(answers | {"c": answers["a"]}, dict.fromkeys("abc", 9.0))) == ["b"]


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
    frame.assign(clinic=frame["clinic"].mask(frame.index == 3)).to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(DataError, match=r"`clinic`: empty or NaN cell in row \d+. Fill the cells, or remove the rows$"):
        load_table(config)


def finished(folder: Path, frames: dict[str, pd.DataFrame], **keys: Any) -> Path:
    flat = configured(sites=len(frames), num_server_rounds=1, output_dir=str(folder), name="run", **keys)
    with no_waiting():
        return server_app.execute(FaultyGrid(flat, csv_nodes(folder, frames)), flat, lambda row, total: None)


def test_a_new_row_with_a_missing_cell_has_no_prediction_where_such_rows_are_dropped(tmp_path: Path) -> None:
    run_folder = finished(tmp_path, {str(k): patients(seed=k) for k in range(2)}, target="y", missing="drop")
    posterior, new = Predictor.of(read_run(run_folder)), patients(seed=9)
    found = posterior.predict(new)
    whole = new[["age", "weight", "ward"]].notna().all(axis=1)
    assert found["mean"].notna().tolist() == whole.tolist()
    np.testing.assert_array_equal(found["mean"][whole], posterior.predict(new[whole])["mean"])
    assert posterior.predict(new[~whole])["mean"].isna().all()
    np.testing.assert_allclose(posterior.mean(new), found["mean"])
    with pytest.raises(DataError, match="missing cells"):
        posterior.inputs(new)


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y %H:%M"])
def test_dates_become_days_and_season(tmp_path: Path, form: str) -> None:
    days = DAYS[:60]
    nodes = csv_nodes(tmp_path, {"a": pd.DataFrame({"day": days.strftime(form), "x": range(60), "y": range(60)})})
    site = load_site(settings("error", dates="days-and-season"), nodes[0])
    assert site.features == ("days(day)", "sine(day)", "cosine(day)", "x")
    written = pd.Series(days if "%H" in form else days.normalize())
    since = (written - pd.Timestamp("2000-01-01")) / pd.Timedelta(days=1)
    assert site.train["days(day)"].tolist() == since.tolist()
    angle = 2 * math.pi * (days[7].timetuple().tm_yday - 1) / 365.2425
    assert site.train["sine(day)"][7] == pytest.approx(math.sin(angle))
    assert site.train["cosine(day)"][7] == pytest.approx(math.cos(angle))
    assert load_site(settings("error", dates="days"), nodes[0]).features == ("days(day)", "x")


def test_times_of_day_and_offsets_from_utc_are_read() -> None:
    cells = ["2024-01-01T23:30-05:00", "2024-01-01 00:30:00+0200", "2024-01-02 3:00:36,5 pm", "2024-01-02"]
    cells += ["9999-12-31"]
    found = with_numbers(pd.DataFrame({"t": cells}), ["days(t)"], "f")["days(t)"]
    seconds = ((found - 8766) * 86400)[:4]
    assert seconds.tolist() == pytest.approx([28.5 * 3600, -1.5 * 3600, 39 * 3600 + 36.5, 24 * 3600], abs=1e-3)
    zoned = pd.DataFrame({"t": pd.to_datetime(cells[:1], utc=True).tz_convert("Asia/Tokyo")})
    assert with_numbers(zoned, ["days(t)"], "f")["days(t)"][0] == found[0]
    assert dates_in(pd.Series(["2024-01-01 25:61"])) is None


@pytest.mark.parametrize("missing", ["", "NA"])
def test_a_column_with_a_leading_zero_is_text(tmp_path: Path, missing: str) -> None:
    wards, path, new = ["01", "1", "10", missing] * 4, tmp_path / "a.csv", tmp_path / "new.csv"
    path.write_text("ward,hour,share,y\n" + "".join(f"{ward},{i},0.{i},{i}\n" for i, ward in enumerate(wards)))
    raw = read_table(path)
    frame = checked(raw, ["ward", "hour", "share"], "y", CoreConfig(missing="drop"), "a.csv")
    assert [frame[name].dtype == np.float64 for name in frame] == [False, True, True, True]
    assert sorted(frame["ward"].unique()) == ["01", "1", "10"]
    new.write_text("ward\n1\n10\n")
    for rows, read in ((path, ["01", "1", "10"]), (new, ["1", "10"])):
        assert typed(read_table(rows)[:3], ["ward"], "", {"ward": "categorical"})["ward"].tolist() == read
    assert typed(raw[:3], ["ward"], "", {"ward": "numeric"})["ward"].tolist() == [1, 1, 10]
    with pytest.raises(DataError, match=r"`ward` holds text, 3 levels, because a cell has a leading zero;"):
        checked(raw, ["y"], "ward", CoreConfig(missing="drop"), "a.csv")


def test_decimal_commas_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame({"dose": ["1,5", "2", "-0,25", "1.234,5"], "y": [1.0, 2, 3, 4]})
    assert typed(frame, ["dose"], "f")["dose"].tolist() == [1.5, 2.0, -0.25, 1234.5]
    frame = pd.DataFrame({"dose": ["1,500", "2,250", "3"]})
    with pytest.raises(DataError, match=r"column `dose`: comma that may separate thousands in row 1 and 1 more row"):
        typed(frame, ["dose"], "f")
    assert typed(pd.DataFrame({"dose": ["1,500", "2,25"]}), ["dose"], "f")["dose"].tolist() == [1.5, 2.25]
    assert typed(pd.DataFrame({"job": ["a,b", "c", "d,5"]}), ["job"], "f")["job"].tolist() == ["a,b", "c", "d,5"]


def test_a_number_absurdly_far_from_all_others_is_named_by_row_and_heavy_tails_are_not(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for _ in range(5):
        tails = {"cauchy": draw.standard_cauchy(10_000), "log": draw.lognormal(0, 3, 10_000)}
        assert far_in(pd.DataFrame(tails | {"rare": np.where(draw.random(10_000) < 0.001, 1e6, 0.0)})) == {}
    frame = pd.DataFrame({"x": draw.normal(size=40), "y": draw.normal(size=40)})
    frame.loc[[2, 7], "x"], frame.loc[30, "y"] = np.nan, 1e9
    [node] = csv_nodes(tmp_path, {"a": frame})
    dealt = settings("drop", dataset=str(tmp_path / "a.csv"))
    for site in (load_site(settings("drop"), node), load_all_sites(dealt, 1)[0]):
        assert "`y`: the number in row 31 is over 1,000 times as far" in site.suspected()


def test_days_written_as_numbers_are_named() -> None:
    frame = pd.DataFrame({"day": [float(day) for day in DAYS.strftime("%Y%m%d")], "y": DAYS.hour * 1.0})
    assert "`day` holds days written like 20240131" in suspicions(frame, "y", {}, gaussian=False)
    assert "written like" not in suspicions(frame.assign(day=frame["day"] + 0.5), "y", {}, gaussian=False)
    assert "written like" not in suspicions(frame.assign(day=frame["day"] + 1300), "y", {}, gaussian=False)


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


def test_tables_are_summed_up_as_a_run_would(tmp_path: Path) -> None:
    data, _, problems = check(hospitals(tmp_path), settings("impute"))
    assert problems == []
    counted = {key: data[key] for key in ("sites", "rows", "inputs", "dropped")}
    assert counted == {"sites": 3, "rows": 267, "inputs": 5, "dropped": 3}
    age, weight, ward = data["columns"]
    gone = [patients(seed=k).dropna(subset=["y"]).isna().sum() for k in range(3)]
    assert (age["missing"], ward["missing"]) == (sum(own["age"] for own in gone), sum(own["ward"] for own in gone))
    assert (age["differs"], weight["differs"]) == ([], ["grams"])
    assert (ward["kind"], ward["levels"], ward["inputs"]) == ("text", 3, 3)
    assert "target_differs" not in data
    ones = overview_lines({**data, "dropped": 1, "columns": [{**age, "missing": 1}]})
    assert [line.split("; ")[0] for line in ones] == [
        "target `y`: 267 training rows at 3 sites, 1 row left out for a missing cell",
        "`age`: 1 missing cell",
    ]
    [*_, told] = overview_lines({**data, "columns": [{**weight, "differs": [*"abcdefg"]}]})
    assert told.endswith("at a, b, c, d, e and 2 more")


def test_a_file_of_too_few_rows_is_named_with_what_to_do(tmp_path: Path) -> None:
    files = hospitals(tmp_path)
    patients(seed=1).head(8).drop(columns="ward").to_csv(files[1], index=False)
    [problem] = check(files, settings("impute"))[2]
    assert problem.startswith("south.csv: too few training rows")
    assert problem.endswith("leave the file out")


def test_a_site_with_other_units_of_the_target_is_named(tmp_path: Path, fedgp: Any) -> None:
    files = hospitals(tmp_path)
    patients(seed=1).assign(y=lambda own: 100 * (own["y"] + 20)).to_csv(files[1], index=False)
    data, _, problems = check(files, settings("impute"))
    assert (data["target_differs"], problems) == (["south"], [])
    out = " ".join(fedgp("check", *files, "missing=impute", "target=y")[1].split())
    assert "target `y`: mean far from that of the other sites at south; are its units the same everywhere?" in out


def test_a_site_with_other_levels_or_another_class_is_named(tmp_path: Path, fedgp: Any) -> None:
    files = hospitals(tmp_path)
    cause = np.where(np.arange(90) % 3, "virus", "fungus")
    for k, file in enumerate(files):
        own = patients(seed=k).drop(columns=["y", "weight"]).assign(cause=cause)
        own.loc[:9, "cause"] = ["virus", "Virus"][k == 2]
        own.assign(ward=own["ward"].str.upper() if k == 1 else own["ward"]).to_csv(file, index=False)
    keys = ("missing=impute", "target=cause", "model.likelihood=categorical")
    out = " ".join(fedgp("check", *files, *keys)[1].split())
    assert "missing cells; no level in common with the other sites at south" in out
    assert "target `cause`: only grams has `Virus`; is it spelt as elsewhere?" in out
    assert (out.count("no level in common"), out.count("only")) == (1, 1)


def test_a_target_that_is_the_same_in_every_row_of_a_site_is_told(tmp_path: Path) -> None:
    files = hospitals(tmp_path)
    patients(seed=1).dropna().assign(y=5.0).to_csv(files[1], index=False)
    _, said, _ = check(files, settings("impute"))
    assert [line for line in said if "same in every row" in line] == [
        "south.csv: target `y` is the same in every row; if that is a mistake, correct it"
    ]


def test_every_problem_is_told_at_once(tmp_path: Path, fedgp: Any) -> None:
    north, south, _ = hospitals(tmp_path)
    patients().assign(ward=[f"id {k}" for k in range(90)]).to_csv(tmp_path / "ids.csv", index=False)
    status, out, _ = fedgp("check", north, south, tmp_path / "ids.csv", "missing=impute")
    out = " ".join(out.split())
    assert (status, "`ward` has" in out) == (2, True)
    assert "like an identifier" in out
    assert "142 training rows at 2 sites, 2 rows left out for a missing cell; 5 inputs of 3 columns" in out
    out = " ".join(fedgp("check", north, south, "partitioner=kmeans")[1].split())
    assert "train with `missing` = 'drop', 'impute' or 'indicator'" in out
    assert "every file is a site, and `partitioner` = 'kmeans' deals the rows of one table" in out


def test_a_reference_level_that_no_site_has_is_told_with_the_levels(tmp_path: Path, fedgp: Any) -> None:
    files = hospitals(tmp_path)
    formula = "formula=y ~ age + C(ward, Treatment('{}'))"
    status, out, _ = fedgp("check", *files, formula.format("B"), "missing=drop")
    assert status == 2
    assert "Treatment('B') is no level of ward; its levels are 'a', 'b', 'c'" in " ".join(out.split())
    assert fedgp("check", *files, formula.format("b"), "missing=drop")[0] == 0


def test_a_run_says_it_before_training_and_in_its_report(tmp_path: Path, caplog: Any) -> None:
    frames = {str(k): waves(60, k).assign(x1=lambda own, k=k: own["x1"] + 50 * (k == 2)) for k in range(3)}
    with caplog.at_level(logging.INFO):
        folder = finished(tmp_path, frames)
    words = [own.message for own in caplog.records if own.name == "fedgp.data"]
    assert words[0] == "target `y`: 144 training rows at 3 sites; 2 inputs of 2 columns"
    assert words[1:] == ["`x1`: mean far from that of the other sites at 2"]
    page = (folder / "report.html").read_text()
    assert all(line.replace("`", "") in page for line in words)
    assert read_run(folder).metrics.data["rows"] == 144
    assert np.isfinite(read_run(folder).metrics.data["columns"][0]["mean"])
