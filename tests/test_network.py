"""What is let in: names, shapes, types, finiteness, identity; what is counted, and how often."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from faults import Fault, FaultyGrid, configured, crashed, each, lost, no_waiting, numbers, texts
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from fedgp_flower.errors import ProtocolError
from fedgp_flower.shared_messages import ScoreSums
from strategies.server.network import Network, by_site, finite_arrays
from strategies.server.scoring import Scoring

DESCRIBE = "query.describe"


def met(count=3, **keys):
    grid = FaultyGrid(configured(), count)
    net = Network(grid, "run", 5.0, **keys)
    net.ask_new_nodes(DESCRIBE)
    return grid, net


def asked(net, *, retries=0):
    messages = [net.message(site, DESCRIBE, ArrayRecord(), {}) for site in net.sites()]
    with no_waiting():
        return list(by_site(net.exchange(messages, finite_arrays, retries=retries)))


def ask(net, *, retries=0):
    net.end_round()
    return asked(net, retries=retries)


def record(name, content):
    """A reply with another record in the place of one."""
    return lambda reply: reply.content.update({name: content}) or reply


def crashed_at_length(reply):
    broken = crashed(reply)
    broken.error.__dict__["_reason"] = "no\x1b[2J room" * 500_000
    return broken


TORN = ArrayRecord({"sums": Array("float64", (), "numpy.ndarray", b"\x93NUMPY but no more")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lost, "no reply within 5 s"),
        (crashed, "MemoryError: no room"),
        (each(lambda array: array * np.nan), "6 of 6 entries are not finite"),
        (texts(schema_version=1), "message schema 1, expected 3"),
        (texts(site="2"), "site '1' was asked"),
        (numbers(num_examples=None), "num-examples"),
        (numbers(num_examples=-4), "num-examples"),
        (numbers(num_examples=12.5), "num-examples"),
        (numbers(num_examples=[3, 4]), "num-examples"),
        (numbers(seconds=float("inf")), "not finite: seconds"),
        (record("arrays", TORN), "cannot be decoded"),
        (record("arrays", MetricRecord({"sums": 1.0})), "lacks the records"),
        (record("config", ConfigRecord({})), "lacks the records"),
        (texts(warnings="x" * 5_000_000), ""),
        (texts(error="x" * 5_000_000), ""),
        (texts(error="no\nround 9: site 2 failed: \x1b[2J"), ""),
        (texts(x=b"x" * 5_000), ""),
        (texts(error=""), ""),
        (numbers(**{f"n{number}": 1.0 for number in range(200_000)}), ""),
        (crashed_at_length, ""),
    ],
)
def test_a_bad_reply_is_its_sites_failure_in_few_printable_words_and_nobody_elses(change, words):
    grid, net = met()
    grid.faults = [Fault("1", change)]
    assert ask(net) == ["0", "2"]
    [failure] = net.failures
    assert (failure.site, failure.round) == ("1", 0)
    assert words in failure.reason
    assert len(failure.reason) <= 4096
    assert failure.reason.isprintable()
    assert net.traffic.communications == 2


def test_one_lost_reply_is_asked_for_again_and_fails_once():
    grid, net = met()
    grid.faults = [Fault("1", lost, times=1)]
    assert ask(net, retries=1) == ["0", "1", "2"]
    assert [failure.site for failure in net.failures] == ["1"]
    assert net.healthy() == ["0", "1", "2"]
    assert [visit.site for visit in grid.visits[3:]] == ["0", "1", "2", "1"]
    grid.faults = [Fault("1", lost)]
    ask(net, retries=3)
    assert (len(net.failures), net.streak["1"]) == (2, 1)  # once in an exchange, however often it is asked


@pytest.mark.parametrize("first", ["answer", "failure"])
def test_an_answer_in_a_round_with_a_failure_forgives_nothing(first):
    grid, net = met(max_failures=3)
    for expected in (1, 2, 3):
        net.end_round()
        grid.faults = [Fault("1", lost, times=1)] if first == "failure" else []
        asked(net)
        asked(net)
        if first == "answer":
            net.fail("1", "a lie")
        assert net.streak["1"] == expected
    assert net.healthy() == ["0", "2"]


def test_a_second_machine_of_a_site_is_refused_by_name_and_the_first_stays():
    grid, net = met(max_failures=1)
    first = net.nodes["1"]
    grid.join({"partition-id": 1, "num-partitions": 3})
    assert net.ask_new_nodes(DESCRIBE) == {}
    assert net.nodes["1"] == first
    assert [(f.site, "two machines" in f.reason) for f in net.failures] == [("1", True)]
    assert net.healthy() == ["0", "1", "2"]  # the mistake of the second machine is not held against the first


def test_bytes_are_those_that_crossed_the_wire_lost_ones_included():
    grid, net = met()
    grid.faults = [Fault("1", lost), Fault("2", numbers(num_examples=-1))]
    ask(net, retries=1)
    assert net.traffic.bytes_down == sum(visit.down for visit in grid.visits)
    assert net.traffic.bytes_up == sum(visit.up for visit in grid.visits)


SUMMED = ("squared-error", "absolute-error", "nll", "crps", "inside-50", "inside-90", "inside-95", "count")
SCORES = dict.fromkeys(SUMMED, 2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"crps": [1.0]}, "scores missing: crps"),
        ({"squared-error": -1.0}, "negative"),
        ({"inside-50": 3.0}, "more rows or pairs than there are"),
        ({"evaluation.pit": [1.0] * 19}, "expected 20 numbers"),
        ({"evaluation.reliability": 1.0}, "expected 30 numbers"),
        ({"brier": 1.0}, None),
        ({"nll": -5.0}, None),
    ],
)
def test_scores_that_cannot_be_are_refused(change, words):
    with contextlib.nullcontext() if words is None else pytest.raises(ProtocolError, match=words):
        ScoreSums.from_metrics(SCORES | change)


def test_scores_of_another_task_are_their_sites_failure():
    _, net = met()
    other = dict.fromkeys(("count", "correct", "nll", "brier"), 1.0)
    none = dict.fromkeys(SCORES, 0.0)
    scoring = Scoring(SimpleNamespace(network=net, preparation=SimpleNamespace(target_scale=1.0)))
    sums = map(ScoreSums.from_metrics, (SCORES, other, SCORES, none))
    found = scoring._figures({str(k): site for k, site in enumerate(sums)})
    assert [row["site"] for row in found["per_site"]] == ["0", "2"]
    assert [failure.site for failure in net.failures] == ["1"]


def test_a_site_that_has_not_approved_the_app_says_how_to():
    """Flower's own words name no remedy."""
    _, net = met()
    asked = net.message("1", DESCRIBE, ArrayRecord(), {})
    reply = Message(Error(0, "The FAB could not be verified."), reply_to=asked)
    assert "at the site: fedgp site approve" in net.refusal(reply, None, "1")


def test_sites_that_fail_for_the_same_reason_are_named_together_and_once():
    _, net = met()
    for site, reason in (("1", "no rows"), ("0", "a level"), ("1", "no rows"), ("2", "no rows")):
        net.fail(site, reason)
    assert net.latest_failures() == "Latest failures: 1, 2: no rows; 0: a level"
