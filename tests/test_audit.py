"""The log of a site: what it holds, and that a change of it is named by line; what ``fedgp leaves`` shows of a run."""

import hashlib
import json
from pathlib import Path

import pytest
from faults import FaultyGrid, configured, csv_nodes, run, waves

from fedgp_flower import cli
from fedgp_flower.privacy import audit
from fedgp_flower.run import leaves


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The log of a site after a run of two rounds."""
    folder = tmp_path_factory.mktemp("audit")
    nodes = csv_nodes(folder, {site: waves(60, seed) for seed, site in enumerate("ab")}, "")
    nodes[0] |= {"state-dir": str(folder / "state"), "audit-copy": str(folder / "copy.jsonl")}
    run(FaultyGrid(configured(sites=2, num_server_rounds=2, sgpr__exchanges=4), nodes))
    return folder / "state" / "audit.jsonl"


@pytest.fixture
def log(written, tmp_path) -> Path:
    """A copy to change."""
    for suffix in ("", ".head"):
        (tmp_path / f"audit.jsonl{suffix}").write_bytes(written.with_name(f"audit.jsonl{suffix}").read_bytes())
    return tmp_path / "audit.jsonl"


def test_the_second_place_has_the_same_lines(written):
    assert (written.parents[1] / "copy.jsonl").read_bytes() == written.read_bytes()


def test_a_line_says_what_left(log):
    found = audit.read(log)
    assert found.problems == ()
    lines = {line["kind"]: line for line in found.lines}
    assert [line["line"] for line in found.lines] == list(range(1, len(found.lines) + 1))
    assert {"query.describe", "query.shape", "query.trials", "train.gradients", "evaluate"} <= lines.keys()
    statistics = lines["query.trials"]
    grams, counts = (statistics["arrays"][name] for name in ("grams", "counts"))
    [trials] = counts["shape"]
    assert grams["shape"] == [trials, 5 * 6 // 2]
    assert counts["norm"] == pytest.approx(48 * trials**0.5)  # 48 training rows at each trial
    assert not statistics["masked"]
    assert {rule["rule"] for rule in statistics["rules"]} >= {"methods", "least-rows", "parameters-per-row"}
    assert lines["evaluate"]["arrays"]["evaluation.pit"]["shape"] == [20]
    assert "evaluate" in {audit.cells(line)[4] for line in found.lines}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: [*lines[:2], lines[2].replace("false", "true"), *lines[3:]], "line 3: was edited"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3: is numbered 4 after 2"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2: is numbered 3 after 1"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2: is numbered 1 after 1"),
        (lambda lines: lines[:-1], "the end is gone or was written anew"),
        (lambda lines: [*lines[:-1], lines[-1][:40]], "cannot be read"),
        (lambda lines: [*lines[:-1], again(lines[-1], lines[0])], "does not follow the line before"),
    ],
    ids=["edited", "removed", "moved", "repeated", "cut", "cut within a line", "written anew"],
)
def test_a_changed_log_is_named_by_line(log, change, problem):
    log.write_text("\n".join(change(log.read_text().splitlines())) + "\n")
    assert any(problem in found for found in audit.read(log).problems)


def again(line: str, other: str) -> str:
    """A line with another hash that follows another one."""
    entry = json.loads(line) | {"before": json.loads(other)["hash"]}
    del entry["hash"]
    text = json.dumps(entry)
    return f'{text[:-1]}, "hash": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def test_a_log_that_was_cut_with_its_head_lacks_a_hash_that_was_seen(log, capsys, monkeypatch):
    head = audit.read(log).head
    assert audit.read(log, head[:8]).problems == ()
    lines = log.read_text().splitlines()[:-1]
    log.write_text("\n".join(lines) + "\n")
    log.with_name("audit.jsonl.head").unlink()
    assert audit.read(log).problems == ()
    assert "no line has the hash" in audit.read(log, head).problems[0]
    with pytest.raises(SystemExit) as status:
        cli.main(["audit", str(log), "--seen", head])
    assert status.value.code == 1
    assert "was changed: no line has the hash" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["audit", "audit-copy"])
def test_a_site_that_cannot_write_its_log_does_not_answer(tmp_path, key):
    nodes = csv_nodes(tmp_path, {site: waves(60, seed) for seed, site in enumerate("abc")}, "")
    nodes[2] |= {"audit": str(tmp_path / "log.jsonl"), key: str(tmp_path)}
    strategy = run(FaultyGrid(configured(method="fsgp", sites=3, num_server_rounds=1), nodes))
    assert {entry.reason for entry in strategy.network.failures if entry.site == "c"} == {
        "the audit log of this site cannot be written (Is a directory)"
    }


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
    assert "beside 2 sites" in text
    assert all(line["masked"] for line in log.lines if line["kind"] == "query.statistics")
    hidden = [entry["norm"] for line in log.lines for entry in line["arrays"].values() if line["masked"]]
    assert set(hidden) == {None}
