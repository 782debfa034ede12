"""What a site refuses, coarsens or warns of, by its policy; the log of what it sent, and changes of it by line."""

import hashlib
import json
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import schedules
from faults import FaultyGrid, blamed, configured, csv_nodes, run, waves
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from violations import METHODS, NO_STATISTICS, VIOLATIONS, refusal, require_others, violated

from fedgp_flower import client_app
from fedgp_flower.clients.guard import DESCRIBE, Guard, Outgoing
from fedgp_flower.clients.numpy_client import handlers
from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import ConfigError, DamagedError, PolicyError, ProtocolError, RunError
from fedgp_flower.messages import is_summand
from fedgp_flower.privacy import audit
from fedgp_flower.privacy import policy as policies
from fedgp_flower.privacy.disclosure import OTHER, is_identifier, kept_levels, merged_cells
from fedgp_flower.privacy.policy import FEW_ROWS, Decision, Policy, Rules
from fedgp_flower.privacy.questions import KEYS, WORDS
from fedgp_flower.records import numpy_arrays
from fedgp_flower.run import leaves
from fedgp_flower.run.in_process import NODE_OFFSET, InProcessGrid, run_in_process
from fedgp_flower.run.leaves import answers
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import BUILT_IN, client_class, parse_config
from fedgp_flower.scores import Scores
from fedgp_flower.shared_messages import ScoreSums, Shape


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long if name == "sfvi-avg" else ()) for name in METHODS],
)
def violations(request, tmp_path_factory):
    return request.param, *violated(request.param, tmp_path_factory.mktemp("sites"))


@pytest.mark.parametrize("site", VIOLATIONS)
def test_a_violation_is_refused_by_name_before_it_leaves_and_the_run_goes_on(violations, site):
    """The table of simulations/results/policy.md; 40 of its lines are of the default policy."""
    method, grid, strategy = violations
    assert refusal(method, site, grid, strategy) or (method, site) in NO_STATISTICS
    require_others(method, grid, strategy)


def test_every_sum_but_scores_says_how_many_parameters_it_holds():
    kinds = {answer for method in BUILT_IN for _, answer in answers(method) if answer is not None}
    sums = {answer for answer in kinds if is_summand(answer) and not issubclass(answer, ScoreSums)}
    assert {answer for answer in sums if not hasattr(answer, "num_parameters")} == set()


def test_too_many_parameters_are_a_warning_unless_the_policy_is_strict(tmp_path, caplog):
    nodes = csv_nodes(tmp_path, {site: waves(30, seed) for seed, site in enumerate("abc")}, "")
    nodes[0]["label"] = "ward"
    caplog.set_level("INFO", "fedgp")
    keys = {"method": "fsgp", "num_server_rounds": 1, "sites": 3, "sgpr__exchanges": 0}

    def warned(points, **more):
        flat = configured(model__num_inducing=points, **keys, **more)
        sites = [{**node, "partition-id": place} for place, node in enumerate(nodes)] if more else nodes
        return run(FaultyGrid(flat, sites)).outcome.metrics["warnings"]

    assert warned(3) == []
    [said] = [said for said in warned(9) if said.startswith(FEW_ROWS)]
    assert said.endswith("(from b, c, ward)")
    assert f"site ward: {FEW_ROWS}" in caplog.text
    assert warned(9, privacy__secure_aggregation=True) == []


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"method": "sgpr"}, "fewer `model.num-inducing`, or `privacy.secure-aggregation` = true, hide them"),
        ({"formula": "y ~ x + (1 | g)"}, "fewer terms in `formula`, or `privacy"),
        ({"method": "pvi-bnn"}, "fewer `bnn.hidden`, or `privacy"),
    ],
)
def test_the_warning_names_what_the_method_could_have_fewer_of(flat, words):
    found = Rules("query.trials")
    found.admit(parse_config(flat), "run", 0, "")
    found.answer(SimpleNamespace(num_parameters=lambda: 100), 9)
    assert found.warning.startswith(f"{FEW_ROWS}; {words}")


SECRETS = ("person-no-", "2021-03-", "11 March 2021", "kuru-kuru")


def hospital(seed, **columns):
    """120 rows of a hospital: two cases of a rare disease, and columns to add."""
    frame = waves(120, seed)
    disease = ["flu", "measles", "mumps", "flu"] * 30
    disease[5] = disease[50] = "kuru-kuru" if seed == 0 else "mumps"
    return frame[["x1", "x2"]].assign(disease=disease, **columns, y=frame["y"])


def left_behind(folder, grid):
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and "sites" not in path.parts]
    for record in (record for _, _, reply in grid.replies for record in reply.content.values()):
        files += [value.data if hasattr(value, "data") else repr(value).encode() for value in record.values()]
        files.append(" ".join(record).encode())
    return b"\n".join(files).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"patient": [f"person-no-{i % 40:02d}" for i in range(120)]},
        {"patient": [f"person-no-{min(i, 30)}" for i in range(120)]},
        {"admitted": [f"2021-03-{1 + i % 12:02d}" for i in range(120)]},
        {"admitted": ["11 March 2021", "12 April 2021"] * 60},
    ],
    ids=["a rare disease", "ids that repeat", "ids that mostly do not", "dates", "dates in words"],
)
def test_nothing_of_a_patient_leaves(columns, tmp_path, monkeypatch):
    nodes = csv_nodes(tmp_path, {str(seed): hospital(seed, **columns) for seed in range(2)}, "")
    for node in nodes:
        node["state-dir"] = str(tmp_path / "state" / node["site"])
    flat = configured(sites=2, num_server_rounds=2, min_sites=2, wait_seconds=0.2)
    flat |= {"output-dir": str(tmp_path / "results"), "name": "run", "target": "y", "method": "sfvi"}
    grid = FaultyGrid(flat, nodes)
    monkeypatch.setattr("fedgp_flower.run.in_process.InProcessGrid", lambda app, keys, entry: grid)
    if columns:
        with pytest.raises(Exception, match="usable site"):
            run_in_process(flat, nodes=nodes)
    else:
        run_in_process(flat, nodes=nodes)
        table = {"data": tmp_path / "0.csv", "state_dir": tmp_path / "state" / "0"}
        alone = Predictor.at_site(tmp_path / "results" / "run", "0", **table)  # whose rows are those of the run
        assert alone.predict(hospital(0)).notna().all(axis=None)
        schema = json.loads((tmp_path / "results" / "run" / "posterior.json").read_text())
        assert OTHER in json.dumps(schema)
        assert "measles" in left_behind(tmp_path / "results" / "run", grid)  # the search would find what leaves
    text = left_behind(tmp_path / "results" / "run", grid)
    assert len(text) > 100
    assert [secret for secret in SECRETS if secret in text] == []


def rules(policy, **more):
    return Rules("train", policy=policy, file="site.toml", **more)


def site_of(frame, shared_table=False, test=None):
    parts = frame, frame.iloc[:2] if test is None else test, tuple(frame.columns[:-1]), frame.columns[-1]
    return RawSite("a", "a", 3 * shared_table, *parts, shared_table=shared_table)


def test_rare_levels_become_other_in_rows_held_out_too():
    held_out = pd.DataFrame({"x1": [0.0] * 4, "x2": 0.0, "disease": ["kuru-kuru", "gout", "flu", "mumps"], "y": 0.0})
    raw, entry = site_of(hospital(0), test=held_out), rules(Policy())
    found = entry.site(raw)
    counts = found.train["disease"].value_counts()
    assert counts.to_dict() == {"flu": 60, "mumps": 29, OTHER: 31}  # kuru's two rows alone would be too few
    assert found.test["disease"].tolist() == [OTHER, OTHER, "flu", "mumps"]
    assert raw.train["disease"].eq("kuru-kuru").sum() == 2
    assert Decision("least-cell", 3, "merged", "2 levels of `disease`") in entry.decisions


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ({"a": 9, "b": 3}, {"a", "b"}),
        ({"a": 9, "b": 2}, set()),
        ({"a": 9, "b": 4, "c": 2}, {"a"}),
        ({"a": 9, "b": 4, "c": 2, "d": 1}, {"a", "b"}),
        ({"a": 9, OTHER: 4, "c": 1}, {"a"}),
        ({"a": 9, "b": 9, OTHER: 1}, {"b"}),
    ],
)
def test_levels_that_may_leave(counts, kept):
    assert kept_levels(pd.Series(counts), 3) == kept


def test_a_rare_class_of_the_target_and_identifiers_are_refused():
    frame = hospital(1).assign(y=["ill", "ill", *["well"] * 118])
    with pytest.raises(
        PolicyError,
        match=r"a class of `y` has too few rows; .*, or leave out this site: `least-cell` = 3 in site\.toml",
    ):
        rules(Policy()).site(site_of(frame))
    assert len(rules(Policy()).site(site_of(hospital(1))).test) == 0  # two held-out rows are too few to be scored
    assert is_identifier(pd.Series([3] * 40), 10)
    assert not is_identifier(pd.Series([1] * 9), 10)
    assert not is_identifier(pd.Series([10] * 20 + [1] * 19), 10)


@pytest.mark.parametrize(
    ("column", "keys"),
    [
        ("admitted", {"target": "y", "dates": "days"}),
        ("admitted", {"target": "y", "dates": "season"}),
        ("admitted", {"target": "y", "holdout": "time:admitted"}),
        ("ward", {"target": "y", "features": "x1", "holdout": "group:ward"}),
        ("ward", {"formula": "y ~ x1 + (1 | ward)"}),
        ("months", {"target": "y,months", "features": "x1", "model.likelihood": "poisson"}),
        ("died", {"target": "months,died", "features": "x1", "model.likelihood": "time-to-event"}),
        ("treated", {"target": "y,treated", "features": "x1", "model.likelihood": "binomial"}),
    ],
)
def test_a_hidden_column_is_used_for_nothing(column, keys, tmp_path):
    times = {"months": np.arange(1, 121), "died": [0, 1] * 60, "treated": 9, "y": np.arange(120) % 9}
    dates = pd.date_range("2021-01-01", periods=120).astype(str)
    frame = waves(120, 0).assign(ward=[f"w{i % 4}" for i in range(120)], admitted=dates, **times)
    frame.to_csv(tmp_path / "a.csv", index=False)
    (tmp_path / "p.toml").write_text(f'hidden-columns = ["{column}"]')
    node = {"data-path": str(tmp_path / "a.csv"), "policy": str(tmp_path / "p.toml")}
    [line] = leaves.try_out(keys, node, 1)[1]
    assert line["refused"] == f'column {column} may not be used: `hidden-columns` = ["{column}"] in p.toml of this site'
    assert not line["arrays"]


def test_rounds_of_a_day_are_counted_over_runs(tmp_path, monkeypatch):
    config, limited = parse_config({}), Policy(**{"rounds-per-day": 3})
    for run_id, number in (("r1", 0), ("r1", 0), ("r1", 2), ("r2", 1), ("r2", 1)):
        rules(limited).admit(config, run_id, number, str(tmp_path), "asked")
    for number, content in ((2, "asked"), (0, "asked"), (1, "another question of this kind")):
        with pytest.raises(PolicyError, match=r"no more rounds today: `rounds-per-day` = 3 in site\.toml"):
            rules(limited).admit(config, "r2", number, str(tmp_path), content)
    path = tmp_path / policies.ROUNDS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"day": "2020-01-01"}))
    rules(limited).admit(config, "r2", 1, str(tmp_path), "asked")
    for damaged in ("{", json.dumps({"day": datetime.now(UTC).date().isoformat()})):
        path.write_text(damaged)
        with pytest.raises(DamagedError, match=r"rounds\.json"):
            rules(limited).admit(config, "r2", 3, str(tmp_path), "asked")
    with pytest.raises(ConfigError, match="needs a `state-dir`"):
        rules(limited).admit(config, "r2", 3, "")


@pytest.mark.parametrize(
    ("cells", "joined"),
    [
        ([1, 0, 5, 2, 2, 0, 1], [0, 0, 6, 5, 0, 0, 0]),
        ([0, 4, 0, 3], [0, 4, 0, 3]),
        ([1, 0, 1], [2, 0, 0]),
        ([0, 0, 0], [0, 0, 0]),
        ([[1.0, 0.1, 0.0], [4.0, 2.0, 1.0]], [[0, 0, 0], [5.0, 2.1, 1.0]]),
    ],
)
def test_cells_are_joined_and_the_total_stays(cells, joined):
    np.testing.assert_allclose(merged_cells(np.array(cells), 3), joined)


def test_histograms_of_every_answer_are_coarse():
    entry = rules(Policy())
    shape = entry.answer(Shape(np.array([[1, 0, 5], [3, 3, 0]]), np.eye(2), np.zeros(())), 60)
    np.testing.assert_array_equal(shape.histogram, [[0, 0, 6], [3, 3, 0]])
    pit = np.zeros(20)
    pit[[0, 4, 9]] = [1, 3, 2]
    ranks = np.zeros((80, 2))
    ranks[[3, 4, 7]] = [[1, 1], [0, 1], [5, 0]]
    times = np.zeros((3, 10, 3))
    scores = entry.answer(ScoreSums(np.zeros(8), np.zeros(4), np.zeros(9), pit, np.zeros((10, 3)), ranks, times), 60)
    assert set(scores.pit) == {0, 6}
    np.testing.assert_array_equal(scores.ranks[[3, 4, 7]], [[1, 2], [0, 0], [5, 0]])
    found = entry.answer(Scores({"nll": 2.0}, {"evaluation.pit": pit, "evaluation.ranks": ranks}), 60)
    np.testing.assert_array_equal(found.arrays["evaluation.ranks"], scores.ranks)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("query.describe", ""),  # the phase that it names beside its type is nothing that a site reads
        ("query.moments", "`query.moments` is not answered: `kinds`"),
        ("train.moments", "`train.moments`"),
    ],
)
def test_a_question_under_another_name_does_not_slip_past_the_policy(kind, refused, tmp_path):
    """A message has one kind, its type: rules, masks, the audit log and the choice of the handler all read that."""
    [node] = csv_nodes(tmp_path, {"a": waves(60, 0)}, "")
    (tmp_path / "a.toml").write_text('kinds = ["query.describe"]')
    node |= {"policy": str(tmp_path / "a.toml"), "audit": str(tmp_path / "audit.jsonl")}
    grid = InProcessGrid(client_app.app, configured(sites=1), [node])
    reply = grid.answer(asking(kind, run="r", round=1, phase="query.moments", kind="query.moments"))
    said = reply.content.config_records["config"]
    if refused:
        assert refused in said["error"]
        assert "arrays" not in reply.content
    else:
        assert {"schema", "label"} <= set(said)
        assert "gram" not in numpy_arrays(reply.content.array_records["arrays"])
    [line], _, _ = audit.read(tmp_path / "audit.jsonl")
    assert line["kind"] == kind


@pytest.mark.parametrize("name", [*schedules.METHODS, "pooled", "local-only"])
def test_no_handler_answers_past_the_policy(name, tmp_path):
    """Every kind that a method answers: refused, written down, and no row is read."""
    (tmp_path / "a.toml").write_text('kinds = ["none"]')
    log = tmp_path / "audit.jsonl"
    node = {"site": "a", "data-path": "no file", "policy": str(tmp_path / "a.toml"), "audit": str(log)}
    config = configured(sites=1, **schedules.METHODS.get(name, {"method": name}))
    grid = InProcessGrid(client_app.app, config, [node])
    kinds = [KEYS, DESCRIBE, *handlers(client_class(parse_config(config)))]
    for kind in kinds:
        reply = grid.answer(asking(kind, run="r", round=0))
        assert "`kinds`" in reply.content.config_records["config"]["error"]
        assert reply.content.keys() == {"config"}
    lines, _, _ = audit.read(log)
    assert [line["kind"] for line in lines] == kinds
    assert all(line["rules"][-1]["rule"] == "kinds" and line["refused"] and not line["arrays"] for line in lines)


@pytest.mark.parametrize("settings", [{}, {"run": "r"}, {"run": "r", "round": -1}, {"run": "", "round": 0}])
def test_a_message_of_no_run_or_round_is_refused_and_written_down(settings, tmp_path):
    node = {"site": "a", "data-path": "no file", "audit": str(tmp_path / "audit.jsonl")}
    grid = InProcessGrid(client_app.app, configured(sites=1), [node])
    reply = grid.answer(asking("query.describe", **settings))
    assert "names no run, or no round" in reply.content.config_records["config"]["error"]
    [line], _, _ = audit.read(tmp_path / "audit.jsonl")
    assert "names no run" in line["refused"]


def asking(named, /, **settings):
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord(settings)})
    return Message(content, dst_node_id=NODE_OFFSET, message_type=named)


@pytest.mark.parametrize("settings", [{}, {"masked": "{}"}])
def test_what_a_handler_returns_leaves_as_the_guard_admitted_it(settings):
    """The guard looks at the answer itself: nothing is in the clear under masks, or before a message is admitted."""
    guard = Guard(asking("query.moments", run="r", round=0, **settings), Context(1, 1, {}, RecordDict(), {}))
    with pytest.raises(ProtocolError, match=r"`query\.moments` may not be answered in the clear"):
        guard.released(Outgoing({"gram": np.eye(2)}))
    if settings:
        guard.released(Outgoing({WORDS: np.zeros(3, np.uint64)}))


def test_shares_of_one_table_have_no_policy_unless_one_is_named():
    frame = hospital(0).iloc[:5]
    assert Rules("train").site(site_of(frame, shared_table=True)).train is frame
    real = Rules("train")
    with pytest.raises(PolicyError, match="in the default policy of this site; its owner may set another") as caught:
        real.site(site_of(frame))
    assert "5" not in str(caught.value)  # the words that leave hold no count of rows
    assert real.decisions[-1] == Decision("least-rows", 10, "refused", "5 rows")
    with pytest.raises(PolicyError, match=r"in site\.toml of this site$"):
        rules(Policy()).site(site_of(frame, shared_table=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("least-row = 3", r"site\.toml: unknown configuration key `least-row`; did you mean `least-rows`"),
        ("least-rows = -1", r"site\.toml: `least-rows` = -1: "),
        ("methods = 'fsgp'", "methods"),
        ("=", "is not valid TOML"),
        ("", "cannot be read"),
    ],
)
def test_a_policy_that_is_none_is_refused(tmp_path, text, words):
    if text:
        (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        policies.read(tmp_path / "site.toml")


def test_a_refusal_names_a_file_without_its_folder(tmp_path):
    nodes = csv_nodes(tmp_path, {site: waves(30, seed) for seed, site in enumerate("abc")})
    nodes[0]["policy"] = str(tmp_path / "gone.toml")
    failures = run(FaultyGrid(configured(num_server_rounds=1), nodes)).network.failures
    assert {failure.reason for failure in failures} == {"gone.toml cannot be read (No such file or directory)"}


def test_keys_that_a_site_does_not_read_are_free(tmp_path):
    entry = rules(Policy(keys=("model.num-inducing",)))
    entry.admit(parse_config({"name": "x", "dataset": "sine", "model.num-inducing": 7}), "r", 1, "")
    entry.admit(parse_config({"sites": 3, "baselines.pooled": False}), "r", 1, "")  # `fedgp deploy run` sets them
    with pytest.raises(PolicyError, match=r"`model\.noise`"):
        entry.admit(parse_config({"model.noise": 0.2}), "r", 1, "")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    nodes = csv_nodes(folder, {site: waves(60, seed) for seed, site in enumerate("ab")}, "")
    nodes[0] |= {"state-dir": str(folder / "state"), "audit-copy": str(folder / "copy.jsonl")}
    run(FaultyGrid(configured(sites=2, num_server_rounds=2, sgpr__exchanges=6), nodes))
    return folder / "state" / "audit.jsonl"


@pytest.fixture
def log(written, tmp_path):
    for suffix in ("", ".head"):
        (tmp_path / f"audit.jsonl{suffix}").write_bytes(written.with_name(f"audit.jsonl{suffix}").read_bytes())
    return tmp_path / "audit.jsonl"


def test_a_line_says_what_left_and_the_second_place_has_the_same_lines(written):
    assert (written.parents[1] / "copy.jsonl").read_bytes() == written.read_bytes()
    found, problems, _ = audit.read(written)
    assert problems == []
    lines = {line["kind"]: line for line in found}
    assert [line["line"] for line in found] == list(range(1, len(found) + 1))
    assert {"query.describe", "query.shape", "query.trials", "train.gradients", "evaluate"} <= lines.keys()
    statistics = lines["query.trials"]
    grams, counts = (statistics["arrays"][name] for name in ("grams", "counts"))
    [trials] = counts["shape"]
    assert grams["shape"] == [trials, 5 * 6 // 2]
    assert counts["norm"] == pytest.approx(48 * trials**0.5)  # 48 training rows at each trial
    assert not statistics["masked"]
    assert {rule["rule"] for rule in statistics["rules"]} >= {"methods", "least-rows", "parameters-per-row"}
    assert lines["evaluate"]["arrays"]["evaluation.pit"]["shape"] == [20]
    shown = {cells[4]: cells[7] for cells in map(audit.cells, found)}
    assert shown["evaluate"].startswith("evaluation.pit [20]; num-examples, loss, count, squared-error")
    assert shown["query.describe"].endswith("seconds, schema, label")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: [*lines[:2], lines[2].replace("false", "true"), *lines[3:]], "line 3: was edited"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3: is numbered 4 after 2"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2: is numbered 3 after 1"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2: is numbered 1 after 1"),
        (lambda lines: lines[:-1], "the last lines were removed or replaced"),
        (lambda lines: [*lines[:-1], lines[-1][:40]], "cannot be read"),
        (lambda lines: [*lines[:-1], again(lines[-1], lines[0])], "does not have the hash of the previous line"),
    ],
    ids=["edited", "removed", "moved", "repeated", "cut", "cut within a line", "written anew"],
)
def test_a_changed_log_is_named_by_line(log, change, problem):
    log.write_text("\n".join(change(log.read_text().splitlines())) + "\n")
    assert any(problem in found for found in audit.read(log)[1])


@pytest.mark.parametrize("content", ["", "ten lines", "x y"])
def test_a_changed_head_of_a_log_is_named(log, content, fedgp):
    log.with_name("audit.jsonl.head").write_text(content)
    status, _, err = fedgp("audit", log)
    assert (status, "audit.jsonl.head was changed: expected the number of the last line" in err) == (1, True)


def again(line, other):
    entry = json.loads(line) | {"before": json.loads(other)["hash"]}
    del entry["hash"]
    text = json.dumps(entry)
    return f'{text[:-1]}, "hash": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def test_a_log_that_was_cut_with_its_head_lacks_a_hash_that_was_seen(log, fedgp):
    _, _, head = audit.read(log)
    assert audit.read(log, head[:8])[1] == []
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")
    log.with_name("audit.jsonl.head").unlink()
    assert audit.read(log)[1][0].startswith("audit.jsonl.head is missing")
    assert "no line has the hash" in audit.read(log, head)[1][1]
    status, _, err = fedgp("audit", log, "--seen", head)
    assert (status, "no line has the hash" in err) == (1, True)


@pytest.mark.parametrize("removed", [1, 4, 99])
def test_a_log_that_was_cut_gets_no_further_line(log, removed):
    """Otherwise the next answer would hide what was cut. A line that a crash kept from ``.head`` is no cut."""
    lines = log.read_text().splitlines(keepends=True)
    asked = asking("query.describe", run="r", round=0)
    log.write_text("".join(lines[:-removed]))
    words = rf"cannot be written \(the log had {len(lines)} lines; the last lines were removed"
    with pytest.raises(RunError, match=words):
        audit.record(log, asked, Message(RecordDict({"config": ConfigRecord()}), reply_to=asked), [], masked=False)
    assert log.read_text() == "".join(lines[:-removed])
    before = json.loads(lines[-1])["before"]
    log.write_text("".join(lines))
    log.with_name("audit.jsonl.head").write_text(f"{len(lines) - 1} {before}\n")
    audit.record(log, asked, Message(RecordDict({"config": ConfigRecord()}), reply_to=asked), [], masked=False)
    assert audit.read(log)[1] == []


@pytest.mark.parametrize("key", ["audit", "audit-copy"])
def test_a_site_that_cannot_write_its_log_does_not_answer(tmp_path, key):
    nodes = csv_nodes(tmp_path, {site: waves(60, seed) for seed, site in enumerate("abc")}, "")
    nodes[2] |= {"audit": str(tmp_path / "log.jsonl"), key: str(tmp_path)}
    strategy = run(FaultyGrid(configured(method="fsgp", sites=3, num_server_rounds=1), nodes))
    assert set(blamed(strategy)["c"]) == {"the audit log of this site cannot be written (Is a directory)"}


def test_leaves_shows_every_message_with_sizes_and_rules(tmp_path):
    waves(60, 0).to_csv(tmp_path / "north.csv", index=False)
    (tmp_path / "site.toml").write_text('kinds = ["query.*", "train*"]\nparameters-per-row = 0.1')
    node = {"data-path": str(tmp_path / "north.csv"), "policy": str(tmp_path / "site.toml")}
    flat = {"method": "fsgp", "model.num-inducing": 5, "baselines.local-only": False, "target": "y"}
    text = "\n".join(leaves.try_out(flat, node, 1)[0])
    assert "ended: no site could score" in text
    assert "gram [15] A = W Wᵀ" in text
    assert "values.inducing.locations [5, 2]" in text
    assert "rules warned: parameters-per-row (5 parameters, 48 rows)" in text
    assert "evaluate: refused" in text
    assert 'refused: `evaluate` is not answered: `kinds` = ["query.*", "train*"] in site.toml' in text
    lines, log = leaves.try_out(flat | {"privacy.secure-aggregation": True}, node, 1)
    text = "\n".join(lines)
    assert "query.statistics: 1 × " in text
    assert "with 2 more sites" in text
    assert all(line["masked"] for line in log if line["kind"] == "query.statistics")
    hidden = [entry["norm"] for line in log for entry in line["arrays"].values() if line["masked"]]
    assert set(hidden) == {None}
