"""The command line as a user meets it: what is printed, what is written, and the exit status."""

import contextlib
import json
import re
import shutil

import pandas as pd
import pytest

from fedgp_flower import cli
from fedgp_flower.data.catalogue import BUILTINS
from fedgp_flower.run import predict, terminal
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.in_process import run_in_process
from fedgp_flower.run.registry import methods, parse_config
from fedgp_flower.run.user_config import parse_assignments

TINY = ["dataset=sine", "split=0", "model.num-inducing=6", "baselines.local-only=false", "baselines.pooled=false"]
TINY += ["evaluate-every=0"]


@pytest.fixture(scope="module", autouse=True)
def _no_data_folder():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDGP_DATA", raising=False)
        yield


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    words = [*TINY, f"output-dir={tmp_path_factory.mktemp('runs')}", "num-server-rounds=1"]
    return [run_in_process(parse_assignments([*words, f"method={m}", f"name={m}"]), 2) for m in ("fsgp", "fgpr")]


@pytest.fixture
def shared(both):
    return both[0]


@pytest.fixture
def broken(shared, tmp_path):
    (tmp_path / "broken").mkdir()
    shutil.copy(shared / "config.toml", tmp_path / "broken")
    return tmp_path / "broken"


def test_names_in_brackets_and_between_colons_are_printed_as_they_are(shared, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "quoted", lambda metrics: {"species[setosa]": "1", "dose:car:age": "2"})
    terminal.show_result(shared)
    terminal.show(terminal.table(["a[b]"], [["dose:car:age"]], title="species[setosa]"))
    out = capsys.readouterr().out
    assert [out.count(name) for name in ("species[setosa]", "dose:car:age", "a[b]")] == [2, 2, 1]


@pytest.mark.parametrize("width", [20, 80, 90, 95, 100])
def test_a_table_of_numbers_loses_nothing_in_a_narrow_terminal(width, monkeypatch, capsys):
    titles, cells = (
        ["column", "kind", "mean ± sd", "differs at"],
        ["c" * 60, "number", "-0.09955 ± 0.882", "north, south"],
    )
    monkeypatch.setenv("COLUMNS", str(width))
    terminal.show(terminal.table(titles, [cells], numbers=True))
    assert set(" ".join([*titles, *cells]).split()) <= set(capsys.readouterr().out.split())


def test_tables_are_a_site_each(fedgp, tmp_path):
    status, _, err = fedgp("partition", "sine", "--sites", 2, "--output-dir", tmp_path / "sites")
    assert status == 0, err
    files = [tmp_path / "sites" / f"site-0{k}.csv" for k in range(2)]
    status, _, err = fedgp("partition", "sine", "--sites", 2, "--output-dir", files[0])
    assert (status, "site-00.csv: File exists; choose another" in one_line(err)) == (1, True)
    run = ["run", *files, "--output-dir", tmp_path, *TINY[2:], "target=y", "num-server-rounds=1"]
    status, out, _ = fedgp(*run, "--name", "two")
    metrics = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert (status, metrics["method"], metrics["sites"], metrics["rounds"]) == (0, "sgpr", 2, 1)
    assert f"{metrics['test']['nll']:.4g}" in out
    assert str(tmp_path / "two" / "report.html") in out
    assert (tmp_path / "two" / "report.html").is_file()
    assert [row["label"] for row in metrics["per_site"]] == ["site-00", "site-01"]
    status, out, err = fedgp("run", files[0], "--sites", 3, "target=y", "--dry-run")
    assert "rows at 3 sites" in out, err
    status, _, err = fedgp(*run, files[0])
    assert (status, "more than one is named" in err) == (2, True)


def test_what_leaves_takes_the_words_of_check(fedgp, tmp_path):
    """A file and keys; both say which column is the target where no key does."""
    rows = "".join(f"{k % 7},{k % 5},{k}\n" for k in range(40))
    (tmp_path / "one.csv").write_text(f"a,b,outcome\n{rows}")
    code, out, err = fedgp("leaves", tmp_path / "one.csv", "model.num-inducing=4")
    assert code == 0, err
    assert "query.describe" in out
    code, out, _ = fedgp("check", tmp_path / "one.csv")
    assert (code, "target `outcome`: 32 training rows at 1 site;" in out) == (0, True)
    code, out, err = fedgp("check", f"dataset={tmp_path / 'one.csv'}", "target=gone")
    assert (code, "missing column `gone`" in out + err) == (2, True)
    natural = ("partitioner=natural", "partition.column=a", "partition.min-rows=2")
    for table in (f"dataset={tmp_path / 'one.csv'}", tmp_path / "one.csv"):
        code, out, _ = fedgp("check", table, *natural)
        assert (code, "training rows at 7 sites" in out) == (0, True)
    assert "fedgp-flower " in fedgp("--version")[1]
    (tmp_path / "site.toml").write_text("least-rows = 'ten'\n")
    code, _, err = fedgp("leaves", tmp_path / "one.csv", "--policy", tmp_path / "site.toml")
    assert (code, err) == (2, "error: site.toml: `least-rows` = 'ten': Input should be a valid integer\n")


def test_what_is_wrong_with_a_table_names_its_file_once(fedgp, tmp_path):
    (tmp_path / "one.csv").write_text("a,y\n1,2\n")
    (tmp_path / "ids.csv").write_text("a,y\n" + "".join(f"p{k},{k}\n" for k in range(90)))
    (tmp_path / "gone.csv").write_text("a,y\n" + "1,\n2,\n" * 20)
    (tmp_path / "good.csv").write_text("a,y\n" + "".join(f"{k},{k * k}\n" for k in range(30)))
    for name, missing, words in [
        ("one", "error", "too few training rows"),
        ("gone", "error", "column `y`: empty"),
        ("gone", "drop", "every row has a missing `y`"),
        ("ids", "error", "90 levels in 90 rows"),
    ]:
        keys = ["target=y", f"missing={missing}"]
        status, _, err = fedgp("run", tmp_path / f"{name}.csv", tmp_path / "good.csv", *keys)
        assert (status, one_line(err).count(f"{name}.csv: "), words in one_line(err)) == (2, 1, True)
    status, out, _ = fedgp("run", "--sites", 3, f"dataset={tmp_path / 'ids.csv'}", "--dry-run")
    assert (status, out.count("90 levels in 90 rows")) == (2, 1)


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(fedgp, tmp_path, monkeypatch):
    def stopped(row, total):
        if row["round"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("fedgp_flower.run.terminal.progress_bar", lambda: contextlib.nullcontext(stopped))
    words = ["--sites", 2, "--output-dir", tmp_path, "--name", "mine", "dataset=sine", "method=fsgp"]
    status, _, err = fedgp("run", *words, "num-server-rounds=3", "model.num-inducing=4", "evaluate-every=0")
    assert (status, "1 complete round kept in" in err, "`name=mine resume=true`" in err) == (130, True, True)


def test_words_overrule_the_file_and_options_overrule_both(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('method = "fgpr"\nname = "a"\n[model]\nkernel = "matern32"\nnoise = 0.3\n')
    completed = cli._run_config(["model.noise=0.2", "name=b"], file, {"name": "c"})
    expected = {"method": "fgpr", "name": "c", "model.kernel": "matern32", "model.noise": 0.2}
    assert {key: completed[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["model.kernal=rbf"], 2, "unknown configuration key `model.kernal`; did you mean `model.kernel`"),
        (["--config", "/nowhere/run.toml"], 2, "/nowhere/run.toml cannot be read"),
        (["dataset=sine", "target=z"], 2, "missing column `z`"),
        (["resume=true", "name=gone"], 1, "nothing to resume"),
        (["a.csv", "dataset=sine"], 2, "both `a.csv` and `dataset` name tables; remove one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_said_in_a_line(fedgp, tmp_path, monkeypatch, words, status, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = fedgp("run", *words)
    assert code == status
    assert message in one_line(err)
    assert one_line(err).count("error: ") == 1
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("metrics.json"))


def test_predictions_have_a_row_per_row(fedgp, shared, tmp_path):
    (tmp_path / "new.csv").write_text("note,x\na,0.5\nb,12\nc,40\n")
    code, out, _ = fedgp("predict", shared, "--input", tmp_path / "new.csv", "--output", tmp_path / "out.csv")
    assert (code, "3 rows predicted" in out) == (0, True)
    assert pd.read_csv(tmp_path / "out.csv")["note"].tolist() == ["a", "b", "c"]
    code, _, err = fedgp("predict", shared, "--input", tmp_path / "no.csv", "--output", tmp_path / "out.csv")
    assert (code, "no such file" in err) == (2, True)
    code, _, err = fedgp("predict", shared, "--input", tmp_path / "new.csv", "--output", tmp_path / "no" / "out.csv")
    assert (code, "cannot be written" in err) == (1, True)


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_rows_are_predicted(fedgp, tmp_path):
    table = pd.DataFrame({"x": [0.1, 0.9, 0.4, 0.7] * 10, "z": [1.0, 2.0, 3.0, 4.0, 5.0] * 8, "y": range(40)})
    table.to_csv(tmp_path / "two.csv", index=False)
    words = [*TINY, f"dataset={tmp_path / 'two.csv'}", "split=-1", f"output-dir={tmp_path}", "num-server-rounds=1"]
    run = run_in_process(parse_assignments([*words, "method=fsgp", "name=two"]), 2)
    words = ["--input", tmp_path / "two.csv", "--output", tmp_path / "out.csv", "--picture", tmp_path / "two.png"]
    code, _, err = fedgp("predict", run, *words)
    assert (code, "`--picture` needs one input and a target of numbers" in one_line(err)) == (1, True)
    assert not (tmp_path / "out.csv").exists()


def test_a_run_and_a_check_say_that_times_of_held_out_rows_are_no_input(fedgp, tmp_path):
    table = pd.DataFrame({"x": [0.1, 0.9, 0.4, 0.7] * 10, "y": range(40)})
    table["seen"] = pd.date_range("2024-01-03", periods=40).strftime("%Y-%m-%d")
    table.to_csv(tmp_path / "visits.csv", index=False)
    data = [f"dataset={tmp_path / 'visits.csv'}", "dates=days", "split=-1", "target=y", "holdout=time:seen"]
    words = [*TINY, *data, f"output-dir={tmp_path}", "num-server-rounds=1", "method=fsgp"]
    note = "`holdout` orders the rows by `seen`, so neither it nor a number of its dates is an input; to use it, name"
    run = read_run(run_in_process(parse_assignments([*words, "name=one"]), 2))
    assert [words.startswith(note) for words in run.metrics.warnings].count(True) == 1
    assert note in one_line(fedgp("check", *data)[1])
    run = read_run(run_in_process(parse_assignments([*words, "features=x,seen", "name=both"]), 2))
    assert not [words for words in run.metrics.warnings if "orders the rows" in words]


@pytest.mark.parametrize("features", ["x", "-day"])
def test_no_note_on_times_where_features_leave_them_out(features):
    assert not parse_config({"holdout": "time:day", "features": features}).excluded
    assert parse_config({"holdout": "time:day", "features": "-x"}).excluded


def test_a_site_that_joins_has_the_name_of_its_file(fedgp, shared, tmp_path, monkeypatch):
    names = []

    def joined(run, name, data):
        names.append(name)
        return predict.Predictor.of(read_run(run))

    monkeypatch.setattr(predict.Predictor, "joined", joined)
    monkeypatch.setattr(predict, "predict_file", lambda predictors, *others: (0, 0, 0))
    where = ["--input", tmp_path / "new.csv", "--output", tmp_path / "out.csv"]
    assert fedgp("join", shared, "--site-data", tmp_path / "ward.7.csv.gz", *where)[0] == 0
    assert names == ["ward.7"]


def test_a_report_is_written_again(fedgp, shared, broken):
    (shared / "report.html").unlink()
    code, out, _ = fedgp("report", shared)
    assert (code, one_line(out)) == (0, str(shared / "report.html"))
    assert (shared / "report.html").is_file()
    assert fedgp("report", broken)[0] == 1
    assert fedgp("report", broken / "nowhere")[0] == 2


def test_runs_stand_side_by_side(fedgp, both, broken):
    code, out, _ = fedgp("compare", *both)
    assert code == 0
    lines = {line.strip().split("  ")[0]: line for line in out.splitlines()}
    for run in both:
        figure = json.loads((run / "metrics.json").read_text())["test"]["rmse"]
        assert f"{figure:#.4g}" in lines["RMSE"]
    assert lines["method"].index("fsgp") < lines["method"].index("fgpr")
    assert fedgp("compare", both[0], broken)[0] == 1


def test_a_comparison_says_what_differs_and_draws_what_was_spent(fedgp, shared, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shared, other)
    metrics = json.loads((other / "metrics.json").read_text())
    metrics["training_target"]["sd"] *= 7
    metrics["data"]["columns"][0]["mean"] += 1
    (other / "metrics.json").write_text(json.dumps(metrics))
    predictions = (other / "predictions.csv").read_text().splitlines(keepends=True)
    (other / "predictions.csv").write_text("".join(predictions[:-1]))
    (other / "files.json").unlink()  # the hashes of what the run wrote
    code, out, _ = fedgp("compare", shared, other, "--figure", tmp_path / "cost.png")
    assert code == 0
    assert "careful: their training tables differ, by rows or units: sd of the target" in out
    assert "rows 1" not in out
    assert "careful: their held-out rows differ" in out
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    schema = json.loads((other / "posterior.json").read_text())
    schema["schema"]["target"]["name"] = "weight"
    (other / "posterior.json").write_text(json.dumps(schema))
    code, _, err = fedgp("compare", shared, other)
    assert (code, "cannot be compared: their targets differ: " in one_line(err), "`weight`" in err) == (1, True, True)


def test_a_file_that_cannot_be_written_is_said_in_a_line(fedgp, shared, tmp_path):
    key, trust, picture = tmp_path / "no" / "key", tmp_path / "no" / "trust.toml", tmp_path / "cost.xyz"
    for words in (
        ["site", "key", key],
        ["site", "trust", trust, "a", "ab" * 32],
        ["compare", shared, "--figure", picture],
    ):
        code, _, err = fedgp(*words)
        assert (code in {1, 2}, err.count("\n"), f"{tmp_path}/" in err) == (True, 1, True)


def test_a_trust_file_to_list_must_exist(fedgp, tmp_path):
    code, _, err = fedgp("site", "trust", tmp_path / "nothere.toml")
    assert (code, "nothere.toml cannot be read (No such file" in one_line(err)) == (2, True)


def test_methods_and_data_sets_are_listed_by_the_names_that_keys_take(fedgp, tmp_path):
    (tmp_path / "a-rather-long-name-of-a-table.csv").write_text('x;"u;v, in m";y\n1,5;2;3\n2;3;4\n')
    (tmp_path / "half.parquet").write_bytes(b"PAR1")
    out = fedgp("methods")[1]
    models = re.findall(r"sfvi\.model=\S+", out)
    assert len(models) == len(set(models)) > 0
    assert [name for name in methods() if f"│ {name} " not in out] == []
    out = fedgp("datasets", "--data-dir", tmp_path)[1]
    assert [name for name in (*BUILTINS, "a-rather-long-name-of-a-table") if f"│ {name} " not in out] == []
    assert re.search(r"a-rather-long-name-of-a-table │ 2 +│ 2 ", out)  # rows and inputs
    assert "half.parquet cannot" in out  # and hides no other table
