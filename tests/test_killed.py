"""The server dies at a message, before or after a site has answered it, and the sites die with it: the end is the same.

Sites have a ``state-dir``; what they had in memory is gone. The gate tries a few messages of every method, `make
test-long` all of them.
"""

import copy

import numpy as np
import pytest
from faults import Fault, FaultyGrid, Killed, Recorder, crashed, csv_nodes, fill, keyed, lost, run, waves
from flwr.app import Message, RecordDict
from schedules import METHODS, drawn, keys_of, quietly

import strategies
from fedgp_flower.messages import encode
from fedgp_flower.privacy import audit
from fedgp_flower.run.registry import parse_config, strategy_class
from strategies.server import enrolment

REPEAT = {"round.incomplete": "repeat"}
ASYNCHRONOUS = ("pvi asynchronous", "pvi sums, asynchronous")
"""Their order of merges is that of arrival, which a kill changes."""


class DyingGrid(FaultyGrid):
    def __init__(self, method, folder, at=-1, answered=False, **more):
        super().__init__(keys(method) | more, 3 if "masked" in method else 2)
        self.keep_states(folder)
        self.at, self.answered = at, answered

    def arrival(self, message):
        if len(self.visits) == self.at and not self.answered:
            raise Killed
        reply = super().arrival(message)
        if len(self.visits) == self.at + 1 and self.answered:
            raise Killed
        return reply


class LosingGrid(DyingGrid):
    """A Grid whose site dies at message ``at``, before or after it has answered, and comes back with its disk alone."""

    def arrival(self, message):
        try:
            return super().arrival(message)
        except Killed:
            self.at = -1
            self.contexts[message.metadata.dst_node_id].state = RecordDict()
            return None


def keys(method, rounds=2):
    return keys_of(method, num_server_rounds=rounds, evaluate_every=2)


def resumed(method, folder, at, answered):
    recorder = Recorder()
    with pytest.raises(Killed):
        run(DyingGrid(method, folder, at, answered), recorder)
    snapshot = recorder.snapshots[-1] if recorder.snapshots else None
    return run(DyingGrid(method, folder), Recorder(), copy.deepcopy(snapshot))


def repeated(method, folder, at, answered):
    return run(LosingGrid(method, folder, at, answered, **REPEAT))


def require_same(found, expected):
    mine, others = encode(found.current), encode(expected.current)
    assert mine.keys() == others.keys()
    for name, array in others.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(mine[name], array, rtol=1e-10, atol=1e-10, err_msg=name)
    assert found.outcome.metrics["test"] == pytest.approx(expected.outcome.metrics["test"], rel=1e-10, nan_ok=True)
    assert found.outcome.metrics["sites"] == expected.outcome.metrics["sites"]


def sweep(method, folder, chosen, after=resumed):
    calm, draw = DyingGrid(method, folder / "calm"), np.random.default_rng([*method.encode()])
    expected, messages = run(calm), len(calm.visits)
    first = messages // 2 if chosen == 1 else 0  # one alone is after a checkpoint
    sides = [(at, answered) for at in range(first, messages) for answered in (False, True)]
    for side in draw.choice(len(sides), size=min(chosen, len(sides)), replace=False):
        found = after(method, folder / f"{side}", *sides[side])
        if method not in ASYNCHRONOUS:
            require_same(found, expected)


SOME = ("sgpr", "svgp", "pvi", "pvi sums", "pvi-bnn", "fedmgp", "fedmgp exact", "sfvi", "sfvi-avg", "hierarchical-gp")
SOME += ("sfvi after averages",)


@pytest.mark.parametrize("method", SOME)
def test_a_kill(method, tmp_path):
    sweep(method, tmp_path, 1)


@pytest.mark.long
@pytest.mark.parametrize("after", [resumed, repeated])
@pytest.mark.parametrize("method", METHODS)
def test_every_kill(method, after, tmp_path):
    sweep(method, tmp_path, 10**6, after)


class OutageGrid(FaultyGrid):
    """The way to a site is cut for ``seconds``: it is not listed, and what it is asked fails at once."""

    def __init__(self, flat, seconds):
        super().__init__(flat, 2)
        self.cut, self.seconds, self.over = self.node_of("1"), seconds, -1.0

    def away(self):
        return enrolment.time.monotonic() < self.over

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if node != self.cut or not self.away()]

    def arrival(self, message):
        reply = super().arrival(message)
        visit = self.visits[-1]
        if self.over < 0 and (visit.site, visit.round) == ("1", 2):
            self.over = enrolment.time.monotonic() + self.seconds
        return crashed(reply) if reply is not None and visit.site == "1" and self.away() else reply


def test_a_round_is_repeated_when_the_site_is_there_again():
    rough = run(OutageGrid(keys("fedmgp") | REPEAT, seconds=4.0))
    assert [failure.site for failure in rough.network.failures] == ["1"]
    require_same(rough, run(FaultyGrid(keys("fedmgp"), 2)))


def test_a_site_that_stays_away_ends_the_repetition():
    flat = keys("fgpr", rounds=3) | REPEAT
    strategy = run(FaultyGrid(flat, 3, Fault("1", lost, ("train",), range(2, 9))))
    assert [failure.round for failure in strategy.network.failures] == [2, 2, 2]  # then it is left out
    assert strategy.round == 3


FEW = ("sgpr, masked", "pvi sums")
ALL = [pytest.param(own, marks=[] if own in FEW else pytest.mark.long) for own in METHODS]
NUMBERS = [own for own in ALL if not {"dataset", "formula"} & METHODS[str(own.values[0])].keys()]
NUMBERS = [own for own in NUMBERS if own.values[0] != "sgpr-private"]
"""Noise of real sites is drawn anew in every run: tests/test_private_sums.py."""


def real_sites(folder, disk, method):
    """Three sites with logs, states and keys; the second one has them on a disk of its own."""
    nodes = csv_nodes(folder, {site: waves(60, number) for number, site in enumerate("abc")})
    for node in nodes:
        node["state-dir"] = str((disk if node["site"] == "b" else folder) / node["site"])
    if "masked" in method:
        keyed(nodes, disk)
    return nodes


@pytest.mark.parametrize("method", NUMBERS)
def test_a_disk_that_is_full_for_a_while_loses_nothing(method, tmp_path, disk):
    """The site refuses with words, and where there is room again, it has what is on the disk, and nothing else."""
    flat = keys_of(method, num_server_rounds=2, sites=3, features="x1") | REPEAT
    del flat["dataset"]
    calm = run(FaultyGrid(flat, real_sites(tmp_path, tmp_path, method)))
    said = []

    def make_room(reply):
        if error := reply.content.config_records["config"].get("error"):
            said.append(str(error))
            (disk / "filler").unlink(missing_ok=True)
            grid.contexts[grid.node_of("b")].state = RecordDict()
        return reply

    grid = FaultyGrid(flat, real_sites(tmp_path, disk, method), Fault("b", make_room))
    rough = run(grid, Recorder(at={1: lambda: fill(disk)}))
    assert len(said) == 1
    assert "No space left on device" in said[0]
    if method not in ASYNCHRONOUS:
        require_same(rough, calm)
    lines, problems, _ = audit.read(disk / "b" / "audit.jsonl")
    assert problems == []
    assert len(lines) == sum(visit.site == "b" for visit in grid.visits) - len(said)


class LateGrid(FaultyGrid):
    """Each third answer of a site comes when nobody waits for it any more, among those to later questions."""

    def __init__(self, flat, sites):
        super().__init__(flat, sites)
        self.asked, self.came, self.late = 0, 0, list[Message]()

    def arrival(self, message):
        reply = super().arrival(message)
        visit = self.visits[-1]
        if reply is None or visit.site != "1" or visit.round < 1 or visit.phase == "evaluate":
            return reply
        self.asked += 1
        if self.asked % 3 != 1:
            return reply
        self.late.append(reply)
        return None

    def pull_messages(self, message_ids):
        waiting = list(message_ids)
        late = [reply for reply in self.late if reply.metadata.reply_to_message_id not in waiting]
        self.late = [reply for reply in self.late if reply not in late]
        self.came += len(late)
        return [*late, *super().pull_messages(waiting)]


@pytest.mark.parametrize("method", ALL)
def test_a_reply_that_comes_too_late_is_not_counted_twice(method):
    """The round is repeated; a total under masks is asked for again at once."""
    flat = keys_of(method, num_server_rounds=2, evaluate_every=2) | REPEAT
    grid = LateGrid(flat, 3)
    with quietly():
        calm, slow = run(FaultyGrid(flat, 3)), run(grid)
    assert grid.came > 0
    if method not in ASYNCHRONOUS:  # where what is late is waited for beside the others
        assert slow.network.failures
        require_same(slow, calm)


REFERENCES = {"LocalOnly", "Pooled"}
"""Comparisons: sites answer one question, and what is fitted is fitted where its rows are."""
LATE = ("sfvi glmm", "sfvi vae", "sfvi-avg prodlda")
"""Forms that the first seeds do not reach: units with random effects, and networks that read latents off rows."""


def test_there_is_a_form_of_every_strategy():
    forms = {strategy_class(parse_config(keys_of(method))).__name__ for method in METHODS}
    assert forms == set(dir(strategies)) - REFERENCES


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(list(METHODS).index(form), marks=pytest.mark.long) for form in LATE)]
)
def test_a_schedule_of_faults(seed):
    """`python -m simulations.run faults` goes through five hundred."""
    drawn(seed)
