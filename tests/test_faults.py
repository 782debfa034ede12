"""Sites that are broken, late, lying, gone, back or unlike the others: the run completes and names them."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import faults as kit
import numpy as np
import pytest
from faults import Fault, FaultyGrid, Recorder, blamed, configured, crashed, csv_nodes, each, lost, run, texts, waves
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from schedules import METHODS, keys_of, scaled

from fedgp_flower import client_app
from fedgp_flower.data.sites import load_site
from fedgp_flower.errors import RunError
from fedgp_flower.gp.sums import collapsed_bound, input_shape
from fedgp_flower.shared_messages import Described, Shape
from strategies.pooled_bound import noise_of
from strategies.server.network import MOST_NAMED

SITES = ("a", "b", "c")
SWAP = np.array([[9, -9, *[0] * 38]])
"""Added to a histogram, it leaves the number of rows as it is."""


def tables(broken=None):
    return {site: waves(60, seed) for seed, site in enumerate(SITES)} | dict(broken or {})


def figures(outcome):
    """What must not depend on a site that took no part."""
    rows = {row["site"]: row["rmse"] for row in outcome.metrics["per_site"]}
    means = {f"mean {m}": value for m, value in enumerate(outcome.posterior.arrays["inducing.mean"])}
    return {**outcome.metrics["test"], **rows, **means}


@pytest.fixture(scope="module")
def without_the_broken_site(tmp_path_factory):
    nodes = csv_nodes(tmp_path_factory.mktemp("good"), tables())
    return figures(run(FaultyGrid(configured(method="fsgp", sites=3, num_server_rounds=1), nodes)).outcome)


def with_text(frame):
    return frame.assign(x1=frame["x1"].astype(object).where(frame.index != 7, "secret"))


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (with_text, ("bad.csv", "`x1`", "text in a numeric cell in row 8")),
        (lambda frame: frame[:1], ("too few training rows", "`least-rows` = 10")),
    ],
    ids=["text", "one-row"],
)
def test_a_broken_file_is_named_and_the_others_are_as_without_it(tmp_path, breaks, words, without_the_broken_site):
    bad = waves(60, 9)
    nodes = csv_nodes(tmp_path, tables({"bad": breaks(bad)}))
    strategy = run(FaultyGrid(configured(method="fsgp", sites=4, num_server_rounds=1), nodes))
    [(site, [reason])] = blamed(strategy).items()
    assert site == "bad"
    assert all(word in reason for word in words), reason
    values = {f"{value:.6f}"[:6] for value in bad.select_dtypes("number").to_numpy().ravel() if abs(value) > 1e-3}
    assert not [value for value in (*values, "secret") if value in reason]
    assert strategy.outcome.metrics["sites"] == 3
    assert figures(strategy.outcome) == pytest.approx(without_the_broken_site, abs=1e-12, rel=1e-12)


def test_the_words_of_an_unforeseen_error_stay_at_the_site(caplog):
    def load(config, context):
        if context.node_config["partition-id"] == 1:
            raise ValueError("could not convert 'secret 123.4'")
        return load_site(config, context.node_config)

    with mock.patch.object(client_app.app, "load", load):
        strategy = run(FaultyGrid(configured(num_server_rounds=1), 3))
    [reason] = blamed(strategy)["1"]
    assert reason.startswith("unexpected ValueError in test_faults.py:")
    assert "secret" not in reason
    assert "secret 123.4" in caplog.text  # the traceback, in the site's own log


def times(**factors):
    """Named sums times a factor."""
    return kit.arrays(lambda own: own | {name: own[name] * factor for name, factor in factors.items()})


LIES = {
    "crash": (crashed, "MemoryError"),
    "bytes": (kit.arrays(lambda own: own | {"more": np.zeros(100_000)}), "has at most 65904 with D = 1, P = 2, M = 5"),
    "rows": (times(count=2.0), "the site described"),
    "no-targets": (times(target_squares=-1.0), "rows that the site described"),
    "huge": (times(gram=1e306, projection=1e306, prior_variance=0.0), "more than the prior variance"),
}


@pytest.mark.parametrize("lie", LIES)
def test_bad_sums_are_refused_and_the_posterior_is_that_of_the_honest_sites(lie):
    change, words = LIES[lie]
    grid = FaultyGrid(configured(method="fsgp", num_server_rounds=3), 3, Fault("1", change, ("query.statistics",)))
    strategy = run(grid)
    assert set(blamed(strategy)) == {"1"}
    assert all(words in reason for reason in blamed(strategy)["1"]), blamed(strategy)
    expected, found = kit.posterior_of(grid, strategy, ("0", "2")), strategy.scoring.predicted.request
    assert found.mean == pytest.approx(expected.mean.numpy(), rel=1e-9, abs=1e-12)
    assert found.covariance == pytest.approx(expected.covariance.numpy(), rel=1e-9, abs=1e-12)
    bound = collapsed_bound(kit.sums_of(grid, strategy, ("0", "2")), noise_of(kit.parameters(strategy)))
    assert strategy.details()["bound"] == pytest.approx(bound, rel=1e-9)
    assert [failure.round for failure in strategy.network.failures] == [3]  # the closing sums


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (kit.numbers(num_examples=10**6), "is 1000000 rows"),
        (each(lambda array: array * 1e3), "local steps move nothing by more than"),
        (lost, "no reply"),
    ],
)
def test_averaging_leaves_out_a_site_that_lies_and_weighs_the_others_by_their_rows(change, words):
    flat, recorder = configured(method="fsgp", num_server_rounds=4), Recorder()
    strategy = run(FaultyGrid(flat, 3, Fault("1", change, ("train",))), recorder)
    failures = [(failure.round, failure.site) for failure in strategy.network.failures]
    assert failures == [(1, "1"), (2, "1"), (3, "1")]  # then it is left out
    assert all(words in reason for reason in blamed(strategy)["1"])
    never = run(FaultyGrid(flat, 3, Fault("1", crashed, ("train",))))
    kit.alike(kit.parameters(strategy), kit.parameters(never))
    assert [row["failures"] for row in recorder.rows] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("phase", "change", "words"),
    [
        ("query.shape", each(lambda array: array * 2), "rows that the site described"),
        ("query.shape", kit.arrays(lambda own: own | {"histogram": own["histogram"] + SWAP}), "negative counts"),
        ("query.shape", times(products=-1.0), "rows that the site described"),
        ("query.shape", kit.arrays(lambda own: own | {"histogram": own["histogram"][:, 1:]}), "shape"),
        ("query.describe", texts(schema="{"), "schema is not JSON"),
        ("query.describe", texts(label=1.0), "lacks a schema or a label"),
        ("evaluate", kit.numbers(crps=None), "scores missing: crps"),
    ],
)
def test_a_lie_in_any_phase_is_named_and_the_run_completes(phase, change, words):
    with np.errstate(all="ignore"):
        strategy = run(FaultyGrid(configured(num_server_rounds=1), 3, Fault("1", change, (phase,))))
    [(site, reasons)] = blamed(strategy).items()
    assert site == "1"
    assert all(words in reason for reason in reasons), reasons
    evaluated = [row["site"] for row in strategy.outcome.metrics["per_site"]]
    dismissed = phase in {"evaluate", "query.describe"} or words.startswith(("rows that", "negative"))
    assert evaluated == (["0", "2"] if dismissed else ["0", "1", "2"])
    assert np.isfinite(strategy.outcome.metrics["test"]["nll"])


def test_a_mixed_model_has_the_scales_and_levels_agreed_without_a_site_that_lies(tmp_path):
    flat = configured(method="mixed-model", formula="y ~ x1 + (1 | site)", num_server_rounds=1)
    nodes = csv_nodes(tmp_path, {site: waves(60, seed) * (1 + 2 * seed) for seed, site in enumerate(SITES)})
    lying = run(FaultyGrid(flat, nodes, Fault("c", times(count=2.0), ("query.outline",))))
    never = run(FaultyGrid(flat, nodes[:2]))
    assert blamed(lying) == {"c": ["`count` is 96 rows; the site described 48"]}
    kit.alike(lying.current.whitening, never.current.whitening)
    kit.alike({"trials": lying.current.trials}, {"trials": never.current.trials})


def test_a_site_that_sends_sums_and_never_a_gradient_is_left_out_and_the_run_goes_on():
    """Sums and gradients must be of the same rows; usable sums do not forgive the gradients that never come."""
    fault = Fault("1", each(lambda array: array * np.inf), ("train.gradients",))
    grid = FaultyGrid(configured(num_server_rounds=5), 3, fault)
    with np.errstate(all="ignore"):
        strategy = run(grid)
    assert all("not finite" in reason for reason in blamed(strategy)["1"])
    assert [(failure.round, failure.site) for failure in strategy.network.failures] == [(1, "1"), (2, "1"), (3, "1")]
    assert strategy.current.sites == ("0", "2")
    assert strategy.current.rows == sum(strategy.preparation.rows[site] for site in "02")


def test_sites_that_fail_are_named_by_label_in_the_notes_and_the_log(tmp_path, caplog):
    nodes = csv_nodes(tmp_path, {site: waves(60, seed) for seed, site in enumerate(SITES)})
    nodes = [node | {"label": f"ward {node['site']}"} for node in nodes]
    strategy = run(FaultyGrid(configured(num_server_rounds=1), nodes, Fault("c", lost, ("query.trials",))))
    said = f"site ward c took no part: {strategy.network.failures[-1].reason}"
    assert said in strategy.outcome.metrics["warnings"]
    assert any("round 1: site ward c failed: no reply" in text for text in caplog.messages)
    network = strategy.network
    network.failures += [replace(network.failures[-1], site=f"s{number}") for number in range(9)]
    assert len(network.failed_sites()) == MOST_NAMED + 1
    assert network.failed_sites()[-1].startswith("5 more sites failed")


def test_a_site_that_drops_out_once_is_asked_again_and_nothing_changes():
    flat = configured(num_server_rounds=2)
    calm = run(FaultyGrid(flat, 3))
    phases = ("query.describe", "query.shape", "query.trials", "train.gradients", "evaluate")
    rough = run(FaultyGrid(flat, 3, *(Fault("1", lost, (phase,), times=1) for phase in phases)))
    assert len(rough.network.failures) == len(phases) - 1  # a site without a description has no name
    assert rough.outcome.metrics["test"] == calm.outcome.metrics["test"]
    timed = {"expected_seconds": 0.0}  # of a clock
    assert rough.details() | timed == calm.details() | timed


def test_averaging_lets_a_site_back_in_when_it_answers_an_evaluation():
    flat = configured(method="fsgp", num_server_rounds=6, evaluate_every=4, max_failures=2)
    grid = FaultyGrid(flat, 3, Fault("1", lost, ("train",), range(1, 5)))
    strategy = run(grid)
    trained = [visit.round for visit in grid.visits if (visit.site, visit.phase) == ("1", "train")]
    assert trained == [1, 2, 5, 6]
    assert [failure.round for failure in strategy.network.failures] == [1, 2]


@pytest.mark.parametrize("ghost", [False, True])
def test_a_site_that_restarts_goes_on_as_if_nothing_had_happened(ghost):
    flat = configured(method="fsgp", evaluate_every=1, num_server_rounds=3)
    grid, calm = FaultyGrid(flat, 3), FaultyGrid(flat, 3)
    strategy = run(grid, Recorder(at={2: lambda: grid.restart("1", ghost=ghost)}))
    assert strategy.outcome.metrics["test"] == run(calm).outcome.metrics["test"]
    assert strategy.network.failures == []
    assert len(grid.visits) > len(calm.visits)


def test_a_site_that_joins_late_is_greeted_and_takes_part(tmp_path):
    nodes = csv_nodes(tmp_path, tables())
    grid = FaultyGrid(configured(method="fsgp", features="x1", model__num_inducing=3), nodes[:2])
    strategy = run(grid, Recorder(at={2: lambda: grid.join(nodes[2])}))
    assert strategy.network.failures == []
    assert strategy.preparation.rows == dict.fromkeys(SITES, 48)
    assert [visit.round for visit in grid.visits if (visit.site, visit.phase) == ("c", "train")] == [3, 4]
    expected = kit.posterior_of(grid, strategy, SITES)
    assert strategy.scoring.predicted.request.mean == pytest.approx(expected.mean.numpy(), rel=1e-9, abs=1e-12)


def test_a_late_site_with_other_columns_is_refused_by_name(tmp_path):
    nodes = csv_nodes(tmp_path, tables({"c": waves(60, 3).rename(columns={"x2": "z"})}))
    grid = FaultyGrid(configured(num_server_rounds=2), nodes[:2])
    strategy = run(grid, Recorder(at={1: lambda: grid.join(nodes[2])}))
    assert blamed(strategy) == {"c": ["its columns are not those the other sites agreed on"]}
    assert strategy.network.sites() == ["a", "b"]


def test_the_server_waits_for_a_second_usable_site(tmp_path):
    """Two machines are there, one with a broken file, and the third is on its way: that is no reason to give up."""
    nodes = csv_nodes(tmp_path, tables({"b": waves(1, 1)}))
    grid = FaultyGrid(configured(num_server_rounds=1), nodes[:2])
    calls, whole = itertools.count(), grid.get_node_ids

    def late():
        if next(calls) == 3:
            grid.join(nodes[2])
        return whole()

    grid.get_node_ids = late
    assert run(grid).network.sites() == ["a", "c"]


@pytest.mark.parametrize(
    ("count", "faults", "words"),
    [
        (1, [], "No site failed; no other site was connected: connect more, or lower `min-sites`."),
        (2, [Fault("1", lost)], "node 2: no reply within 5 s"),
        (3, [Fault(site, crashed, rounds=range(2, 9)) for site in "12"], "MemoryError"),
        (2, [Fault("1", texts(schema="{"), ("query.describe",))], "schema is not JSON"),
    ],
)
def test_too_few_sites_end_the_run_with_the_reason(count, faults, words):
    flat = configured(method="fsgp", num_server_rounds=9)
    with pytest.raises(RunError, match="usable site") as caught:
        run(FaultyGrid(flat, count, *[Fault(f.site, f.change, f.phases, f.rounds) for f in faults]))
    assert words in str(caught.value)
    assert "`min-sites` = 2" in str(caught.value) or "wanted 2" in str(caught.value)


GATE = {"sgpr", "fsgp", "pvi", "fedmgp exact"}
TRAINING = ("train", "query.private", "query.trials")
"""Messages whose answers change the posterior; the last also visits sites in `pvi` from sums."""


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in GATE else pytest.mark.long) for m in METHODS])
def test_a_run_that_merged_no_answer_to_training_fails(method):
    def untrained(reply):
        return crashed(reply) if reply.metadata.message_type.startswith(TRAINING) else reply

    recorder, faults = Recorder(), [Fault(site, untrained) for site in "012"]
    with pytest.raises(RunError, match=r"(the run has no result|no site sent usable sums).*MemoryError"):
        run(FaultyGrid(keys_of(method, num_server_rounds=2, evaluate_every=1), 3, *faults), recorder)
    assert all("objective" not in row for row in recorder.rows)


def test_one_answer_in_one_round_is_a_result_also_after_a_resume():
    flat, recorder = configured(method="fgpr", evaluate_every=1, num_server_rounds=2), Recorder()
    run(FaultyGrid(flat, 2, Fault("0", crashed, ("train",)), Fault("1", crashed, ("train",), range(2, 9))), recorder)
    lone = [Fault(site, crashed, ("train",)) for site in "01"]
    again = run(FaultyGrid(flat | {"num-server-rounds": 3}, 2, *lone), snapshot=recorder.snapshots[-1])
    assert again.round == 3


def test_a_run_whose_last_rounds_changed_nothing_says_of_which_round_its_result_is():
    flat, recorder = configured(method="fgpr", num_server_rounds=3), Recorder()
    lost, alone = [Fault(site, crashed, ("train",), range(2, 9)) for site in "01"], Fault("0", crashed, ("train",))
    note = "every site failed from round 2 on: the result is that of round 1"
    ended = run(FaultyGrid(flat, 2, *lost), recorder)
    assert note in ended.outcome.metrics["warnings"]
    again = run(FaultyGrid(flat, 2, *lost), snapshot=recorder.snapshots[1])
    assert note in again.outcome.metrics["warnings"]
    assert "every site failed" not in str(run(FaultyGrid(flat, 2, alone)).outcome.metrics["warnings"])


FORMS = ("sgpr", "fsgp", "fgpr", "pvi", "pvi sums", "pvi-glm", "fedmgp exact", "sfvi")


def finished(folder, sites, keys, *faults):
    frames = {site: waves(60, seed) for seed, site in enumerate(("a", "b", "c")) if site in sites}
    nodes = csv_nodes(folder, frames)
    grid = FaultyGrid(configured(sites=len(sites), num_server_rounds=2, **keys), nodes, *faults)
    return run(grid), grid


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in {"fsgp", "pvi sums"} else pytest.mark.long) for m in FORMS]
)
def test_the_run_is_as_without_the_site_that_lied(method, tmp_path):
    keys = METHODS[method]
    without, _ = finished(tmp_path, ("a", "c"), keys)
    fault = Fault("b", kit.numbers(num_examples=10**9), ("query.describe",))
    strategy, grid = finished(tmp_path, ("a", "b", "c"), keys, fault)
    [(site, [reason])] = blamed(strategy).items()
    assert site == "b"
    assert "the site described" in reason
    assert set(strategy.preparation.rows) == set(strategy.network.sites()) == {"a", "c"}
    assert [visit.phase for visit in grid.visits if visit.site == "b" and visit.round > 0] == []
    kit.alike(strategy.preparation.arrays, without.preparation.arrays)
    assert strategy.outcome.metrics["test"] == without.outcome.metrics["test"]
    saved, expected = strategy.outcome.posterior, without.outcome.posterior
    assert saved is None or all(np.array_equal(saved.arrays[name], array) for name, array in expected.arrays.items())


@pytest.mark.parametrize("method", ["sgpr", "fgpr"])
def test_of_two_sites_one_cannot_say_that_its_rows_are_where_they_are_not(method, tmp_path):
    """Between the means of two sites that are a billion apart, all squares are those of the mirror image."""
    fault = Fault("b", lambda reply: scaled(reply, 1e9), ("query.describe",))
    with pytest.raises(RunError, match=r"1 usable.*outside the range of the 48 rows that the site described"):
        finished(tmp_path, ("a", "b"), METHODS[method], fault)


@given(hnp.arrays(np.float64, st.integers(2, 30), elements=st.floats(-50, 50, width=32)), st.integers(1, 5))
def test_rows_lie_where_a_true_description_says(x, least):
    """Also the outlier of a small site, and after small cells of the histogram were joined."""
    shape = Shape(*input_shape(x[:, None]), np.array(0.0)).coarse(least)
    reach = np.sqrt(len(x) - 1) * x.std()
    described = Described(len(x), np.array([x @ x]), 0.0, np.array([x.mean()]), np.array([reach]))
    assert shape.refusal(described) is None


POLICY = "least-cell = 0\nleast-rows = 2"
PVI = {"method": "pvi", "pvi__steps": 10, "num_server_rounds": 5}
MEMBERS = {
    "sgpr": {"method": "sgpr", "num_server_rounds": 3, "model__num_inducing": 40},
    "pvi adam": PVI | {"pvi__local_update": "adam", "num_server_rounds": 3},
    "sfvi": {"method": "sfvi", "num_server_rounds": 12},
    **{name: {"method": name} for name in ("fsgp", "fgpr", "hierarchical-gp", "fedmgp")},
}
"""The first site of a sequential method is the one with the constant target."""
CLASSES = {"svgp": {"method": "svgp"}, "pvi": PVI | {"pvi__local_update": "adam"}, "sfvi": {"method": "sfvi"}}


def landscape():
    sea = waves(40, 9)
    odd = {"atlantic": sea.assign(x1=sea["x1"] + 6, y=-1.0), "greenwich": waves(40, 5).assign(x2=0.25)}
    return odd | {"islet": waves(5, 7), "north": waves(40, 0), "south": waves(40, 1)}


def scores(folder, frames, **keys):
    usual = {"num_server_rounds": 4, "model__num_inducing": 12, "test_fraction": 0.25, "sites": len(frames)}
    end = run(FaultyGrid(configured(**(usual | keys)), csv_nodes(folder, frames, POLICY)))
    assert (blamed(end), set(end.preparation.rows)) == ({}, set(frames))
    return {row["site"]: row for row in end.outcome.metrics["per_site"]}


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in {"sgpr", "pvi adam", "fedmgp"} else pytest.mark.long) for m in MEMBERS]
)
def test_every_site_is_a_full_member(method, tmp_path):
    """Nobody fails, and the ordinary sites are not worse off by more than a share of what they know."""
    found = scores(tmp_path, landscape(), **MEMBERS[method])
    assert set(found) == set(landscape())
    assert all(math.isfinite(own["nll"]) for own in found.values())
    assert max(found["north"]["nll"], found["south"]["nll"]) < 1.1
    assert found["atlantic"]["nll"] < 1.5
    assert method != "sgpr" or found["atlantic"]["rmse"] < 0.25  # the posterior is right there


@pytest.mark.parametrize("method", ["svgp", pytest.param("pvi", marks=pytest.mark.long), "sfvi"])
def test_a_site_of_one_class_is_a_full_member(method, tmp_path):
    frames = landscape()
    for name, frame in frames.items():
        frame["y"] = np.where((frame["y"] > 0) | (name == "atlantic"), "yes", "no")
    found = scores(tmp_path, frames, model__likelihood="bernoulli", **CLASSES[method])
    assert all(own["nll"] < 1.0 for own in found.values())


def test_a_column_that_never_varies_is_said_and_ends_no_run(tmp_path, caplog):
    frames = {name: frame.assign(x3=3.0) for name, frame in landscape().items()}
    keys = MEMBERS["fsgp"] | {"num_server_rounds": 1}
    assert set(scores(tmp_path, frames, **keys)) == set(landscape())
    assert "columns that are constant at every site are ignored: x3" in caplog.messages
    caplog.clear()
    frames["islet"]["x3"] = 4.0
    assert set(scores(tmp_path, frames, **keys)) == set(landscape())
    assert not any("that are constant" in message for message in caplog.messages)
