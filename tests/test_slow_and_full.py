"""A site whose disk is full for a while, or that answers too late: the end is that of an undisturbed run."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultyGrid, Recorder, csv_nodes, fill, keyed, run, waves
from flwr.app import Message, RecordDict
from schedules import METHODS, keys_of, quietly
from test_killed import ASYNCHRONOUS, REPEAT, require_same

from fedgp_flower.privacy import audit

SOME = ("sgpr, masked", "pvi sums")
ALL = [pytest.param(own, marks=[] if own in SOME else pytest.mark.long) for own in METHODS]
NUMBERS = [own for own in ALL if "dataset" not in METHODS[str(own.values[0])] and own.values[0] != "sgpr-private"]
"""Noise of real sites is drawn anew in every run: tests/test_private_sums.py."""


def real_sites(folder: Path, disk: Path, method: str) -> list[dict[str, str]]:
    """Three sites with logs, states and keys; the second one has them on a disk of its own."""
    nodes = csv_nodes(folder, {site: waves(60, number) for number, site in enumerate("abc")})
    for node in nodes:
        node["state-dir"] = str((disk if node["site"] == "b" else folder) / node["site"])
    if "masked" in method:
        keyed(nodes, disk)
    return nodes


@pytest.mark.parametrize("method", NUMBERS)
def test_a_disk_that_is_full_for_a_while_loses_nothing(method: str, tmp_path: Path, disk: Path) -> None:
    """The site refuses with words, and where there is room again, it has what is on the disk, and nothing else."""
    flat: dict[str, Any] = keys_of(method, num_server_rounds=2, sites=3, features="x1") | REPEAT
    del flat["dataset"]
    calm = run(FaultyGrid(flat, real_sites(tmp_path, tmp_path, method)))
    said: list[str] = []

    def make_room(reply: Message) -> Message:
        error = reply.content.config_records["config"].get("error")
        if error:
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
    log = audit.read(disk / "b" / "audit.jsonl")
    assert log.problems == ()
    answers = sum(visit.site == "b" for visit in grid.visits) - len(said)
    assert len(log.lines) == answers


class LateGrid(FaultyGrid):
    """Each third answer of a site comes when nobody waits for it any more, among those to later questions."""

    def __init__(self, flat: Mapping[str, Any], sites: int) -> None:
        super().__init__(flat, sites)
        self.asked, self.came, self.late = 0, 0, list[Message]()

    def arrival(self, message: Message) -> Message | None:
        """The reply, unless it is late."""
        reply = super().arrival(message)
        visit = self.visits[-1]
        if reply is None or visit.site != "1" or visit.round < 1 or visit.phase == "evaluate":
            return reply
        self.asked += 1
        if self.asked % 3 != 1:
            return reply
        self.late.append(reply)
        return None

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Late replies come before those that are waited for."""
        waiting = list(message_ids)
        late = [reply for reply in self.late if reply.metadata.reply_to_message_id not in waiting]
        self.late = [reply for reply in self.late if reply not in late]
        self.came += len(late)
        return [*late, *super().pull_messages(waiting)]


@pytest.mark.parametrize("method", ALL)
def test_a_reply_that_comes_too_late_is_not_counted_twice(method: str) -> None:
    """The round is repeated; a total under masks is asked for again at once."""
    flat = keys_of(method, num_server_rounds=2, evaluate_every=2) | REPEAT
    grid = LateGrid(flat, 3)
    with quietly():
        calm, slow = run(FaultyGrid(flat, 3)), run(grid)
    assert grid.came > 0
    if method not in ASYNCHRONOUS:  # where what is late is waited for beside the others
        assert slow.network.failures
        require_same(slow, calm)
