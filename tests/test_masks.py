"""Masks by themselves: exact arithmetic, uniform messages, what colluders see, and what a site refuses."""

import json
import threading
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedgp_flower.client_app import app
from fedgp_flower.clients.guard import Guard, _summand
from fedgp_flower.errors import ConfigError, NumericsError, ProtocolError
from fedgp_flower.gp.fitc import WeightedSums
from fedgp_flower.messages import encode, from_parts, to_parts
from fedgp_flower.methods.sgpr.messages import TrialSums
from fedgp_flower.privacy import masks, questions
from fedgp_flower.privacy.keys import Identity, Member, Trust, fingerprint
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.shared_messages import Nothing

SITES = ("a", "b", "c", "d", "e")


def exact(words):
    """Residues as integers in [−2^127, 2^127)."""
    whole = [int(low) | int(high) << 64 for low, high in words]
    return [entry - (1 << 128) if entry >> 127 else entry for entry in whole]


SCALE = Fraction(2) ** masks.FRACTION_BITS
IDENTITIES = {site: Identity.simulated(site) for site in SITES}


def members(run="run", sites=SITES):
    return tuple(Identity.simulated(site).member(run, site) for site in sites)


QUESTION = questions.MaskedQuestion("run", 1, 1, "query.statistics", "content", [["x", [4], "float64"]], members())


def sent(question, summands):
    """What the sites of a question send: None adds nothing."""
    found = {}
    for site, values in summands.items():
        size = question.layout[0][1][0]
        words = masks.nothing(size) if values is None else masks.counted(values, len(question.members))
        found[site] = question.masked(words, IDENTITIES[site], site)
    return found


def draws(size=4, sites=SITES, seed=0):
    rng = np.random.default_rng(seed)
    return {site: rng.standard_normal(size) * 10.0 ** rng.integers(-12, 12, size) for site in sites}


def rounded(value):
    """2^80 x, rounded to the nearest integer, ties to even."""
    return round(Fraction(value) * SCALE)


def test_a_total_is_the_exact_sum_of_the_rounded_summands():
    summands = draws()
    words = [masks.counted(values, len(SITES)) for values in summands.values()]
    for other in words[1:]:
        masks.add(words[0], other)
    expected = [sum(rounded(values[i]) for values in summands.values()) for i in range(4)]
    assert exact(words[0]) == [len(SITES), *expected]
    count, total = masks.total(sent(QUESTION, summands).values())
    assert count == len(SITES)
    assert list(total) == [float(integer / SCALE) for integer in expected]


def test_a_masked_answer_of_low_rank_is_the_one_that_leaves_without_a_mask():
    rows = np.random.default_rng(1).standard_normal((5, 12))
    one = WeightedSums(rows.T @ rows, np.ones(12), *(np.asarray(9.0),) * 3, np.asarray(5.0))
    answer = TrialSums.of([one])
    words, layout = _summand(replace(QUESTION, layout=None), lambda: answer)
    found = questions.unflat(masks.decode(words[1:]), layout)
    assert np.array_equal(found["grams"], encode(from_parts(TrialSums, *to_parts(answer)))["grams"])
    assert not np.array_equal(found["grams"], encode(answer)["grams"])  # the factor is rounded


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 2.0**-80, -(2.0**-80), 2.0**-81, 1.5 * 2.0**-80, -1.0, 2.0**-16, 1 / 3, -1e13]
)
def test_a_number_is_rounded_to_the_grid(value):
    words = masks.encode(np.array([value]), 3)
    assert exact(words) == [rounded(value)]
    assert masks.decode(words)[0] == float(rounded(value) / SCALE)


@pytest.mark.parametrize("sites", [3, -7, 200])
def test_totals_at_the_bound_do_not_overflow(sites):
    sign, sites = np.sign(sites), abs(sites)
    part = masks.encode(np.array([sign * masks.LARGEST_TOTAL / sites]), sites)
    whole = np.zeros_like(part)
    for _ in range(sites):
        masks.add(whole, part)
    assert exact(whole) == [sites * rounded(sign * masks.LARGEST_TOTAL / sites)]
    assert abs(exact(whole)[0]) < 2**127
    assert masks.decode(whole)[0] == float(exact(whole)[0] / SCALE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, masks.LARGEST_TOTAL])
def test_what_could_overflow_is_not_encoded(value):
    with pytest.raises(NumericsError, match="1 of 2 entries"):
        masks.encode(np.array([1.0, value]), 3)


def test_all_but_two_colluders_see_only_the_sum_of_the_two():
    """c, d and e take off every mask they share; a and b keep the one between them, which cancels in their sum."""
    summands = draws()
    messages = sent(QUESTION, summands)
    bare = {}
    for honest in ("a", "b"):
        secrets = QUESTION.secrets(IDENTITIES[honest], honest)
        shared, pair = ({site: secrets[site] for site in secrets if (site > "b") == with_them} for with_them in (1, 0))
        bare[honest] = masks.masked(messages[honest], shared, "z", bytes.fromhex(QUESTION.digest))
        words = masks.counted(summands[honest], len(SITES))
        assert np.array_equal(bare[honest], masks.masked(words, pair, honest, bytes.fromhex(QUESTION.digest)))
        assert not (bare[honest] == words).any()
    _, total = masks.total(bare.values())
    assert total == pytest.approx(summands["a"] + summands["b"], rel=1e-12)


@pytest.mark.parametrize(
    "shown",
    [
        replace(QUESTION, content="another question"),
        replace(QUESTION, content=questions.content_digest(questions.context_digest({"target.scale": [2.0]}, {}), {})),
        replace(QUESTION, number=2),
        replace(QUESTION, members=members(sites=("a", "b", "c", "d"))),
    ],
    ids=["question", "scale", "number", "roster"],
)
def test_what_one_site_alone_is_shown_destroys_the_total(shown):
    summands = draws()
    messages = sent(QUESTION, summands) | {"a": sent(shown, {"a": summands["a"]})["a"]}
    count, total = masks.total(messages.values())
    assert count > len(SITES)
    assert not np.allclose(total, sum(summands.values()), rtol=0.5)


ME = QUESTION.members[0]
TRUST = Trust({site: identity.public for site, identity in IDENTITIES.items()})


def asked(question=QUESTION, history=None, limits=(3, 2)):
    return questions.admitted(question, ME, TRUST, history or questions.History("run"), limits)


def test_a_site_answers_and_remembers():
    history = asked()
    assert (history.number, history.changes, history.digest) == (1, 0, QUESTION.digest)
    assert asked(history=history) == history
    assert asked(replace(QUESTION, number=2, round=1), history).changes == 0


def replaced(*others):
    """The roster with other lines in the place of those of their sites."""
    lines = {member.site: member for member in (*QUESTION.members, *others)}
    return replace(QUESTION, members=tuple(lines.values()))


REFUSED = {
    "too few": (replace(QUESTION, members=members(sites=("a", "b"))), "requires at least 3"),
    "a site twice": (replace(QUESTION, members=(*QUESTION.members, QUESTION.members[-1])), "twice"),
    "not sorted": (replace(QUESTION, members=QUESTION.members[::-1]), "not sorted"),
    "a substituted key": (replaced(Identity(bytes(32)).member("run", "b")), "site 'b' in the roster is not signed"),
    "a key of another run": (replaced(members("other")[1]), "site 'b' in the roster is not signed"),
    "its key replaced": (replaced(Member("a", members("other")[0].key, ME.signature)), "this site's key"),
    "a stranger": (replaced(Identity.simulated("z").member("run", "z")), "'z' of the roster is not in this site's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_roster_is_refused(case):
    question, reason = REFUSED[case]
    with pytest.raises(ProtocolError, match=reason):
        asked(question, limits=(1, 2))
    with pytest.raises(ProtocolError, match="requires at least 6"):
        asked(limits=(6, 2))


def shrunk(*sites, number=1):
    return replace(QUESTION, number=number, members=members(sites=sites))


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (replace(QUESTION, number=0), "is older than question 1"),
        (replace(QUESTION, number=2, round=0), "is older than question 1 of round 1"),
        (replace(QUESTION, content="other"), "question 1 differs from the question"),
        (replace(QUESTION, kind="train.gradients"), "question 1 differs from the question"),
    ],
    ids=["replay", "older round", "other content", "other kind"],
)
def test_a_question_is_refused_after_another(question, reason):
    with pytest.raises(ProtocolError, match=reason):
        asked(question, asked())


def test_within_a_question_the_roster_may_only_shrink_and_only_twice_in_a_run():
    first = asked(shrunk("a", "b", "c", "d"), asked())
    assert first.changes == 1
    for roster in (SITES, ("a", "b", "c", "e")):
        with pytest.raises(ProtocolError, match="does not shrink"):
            asked(shrunk(*roster), first)
    second = asked(shrunk("a", "b", "c"), first)
    assert second.changes == 2
    with pytest.raises(ProtocolError, match="3 times in this run; this site accepts 2"):
        asked(shrunk(*SITES, number=2), second)
    with pytest.raises(ProtocolError, match="accepts 1"):
        asked(shrunk("a", "b", "c"), first, limits=(3, 1))


def test_two_questions_at_once_are_answered_one_after_the_other(tmp_path):
    """Flower starts a process for each message, which has a Context alone."""
    InProcessGrid(app, {}, [])  # a message needs the identity of a task
    began, told = threading.Event(), {}
    node = {"partition-id": 0, "num-partitions": 5, "site": "a", "state-dir": str(tmp_path)}
    shared = ConfigRecord({"members": questions.written_members(members())})

    def slowly():
        began.set()
        time.sleep(0.1)
        raise NumericsError("nothing to add")

    def answer(*sites):
        asked = json.dumps({"sites": sites, "number": 1, "layout": QUESTION.layout})
        settings = ConfigRecord({"run": "run", "round": 1, "context": "1", "masked": asked})
        message = Message(RecordDict({"config": settings}), dst_node_id=1, message_type=QUESTION.kind)
        try:
            Guard(message, Context(1, 1, node, RecordDict({"context": shared}), {})).summand(Nothing(), "", slowly)
        except ProtocolError as error:
            told[sites] = str(error)

    first = threading.Thread(target=answer, args=("a", "b", "c"))
    first.start()
    began.wait()
    answer("a", "b", "d")
    first.join()
    assert list(told) == [("a", "b", "d")]
    assert "does not shrink" in told["a", "b", "d"]


def test_keys_and_trust_files_are_read_as_they_were_written(tmp_path):
    identity = Identity.new()
    identity.write(tmp_path / "a.key")
    assert Identity.read(tmp_path / "a.key") == identity
    assert (tmp_path / "a.key").stat().st_mode & 0o77 == 0
    with pytest.raises(ConfigError, match="never overwritten"):
        identity.write(tmp_path / "a.key")
    trust = Trust({}).with_site("a", identity.public).with_site("b", Identity.simulated("b").public)
    trust.write(tmp_path / "trust.toml")
    assert Trust.read(tmp_path / "trust.toml") == trust
    assert len(fingerprint(identity.public)) == 19


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no trust file"),
        ("[sites]\na = 'zz'", "64 hexadecimal"),
        (f"[sites]\na = '{'0' * 64}'\nb = '{'0' * 64}'", "the key of site 'a'"),
    ],
)
def test_a_trust_file_that_cannot_be_used_is_refused(tmp_path, text, reason):
    (tmp_path / "trust.toml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        Trust.read(tmp_path / "trust.toml")
    with pytest.raises(ConfigError, match="has another key already"):
        TRUST.with_site("a", "1" * 64)


def test_arrays_travel_as_one_vector():
    arrays = {"gram": np.arange(6.0), "count": np.array(3), "wide": np.ones((2, 0, 3)), "square": np.eye(2)}
    layout = questions.layout_of(arrays)
    back = questions.unflat(questions.flat(arrays, layout), layout)
    for name, values in arrays.items():
        assert (back[name].shape, back[name].dtype.kind) == (values.shape, values.dtype.kind)
        np.testing.assert_array_equal(back[name], values)
    with pytest.raises(ProtocolError, match="array `count`"):
        questions.flat({**arrays, "count": np.zeros(2)}, layout)
