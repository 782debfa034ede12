"""Exactly what a launch started is ended: no more, no less, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgp_flower.deploy.processes import (
    TOKEN,
    ProcessEntry,
    Processes,
    belonging,
    snapshot,
)
from fedgp_flower.errors import RunError

SLEEP = "import time; time.sleep(300)"
# A child in another session, which ignores SIGTERM and whose parent ends at once.
ORPHAN = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"],
                 start_new_session=True)
"""


def entry(parent: int, started: float = 0.0, marked: bool = False) -> ProcessEntry:
    return ProcessEntry(parent, started, marked)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's launch."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {TOKEN: "0" * 32})
    yield process
    process.kill()
    process.wait()


def wait_for(token: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while sum(e.marked for e in snapshot(token).values()) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_belonging_follows_children_and_remembers_who_lost_their_environment() -> None:
    table = {
        1: entry(0),
        10: entry(1, marked=True),
        11: entry(10),
        12: entry(11),
        20: entry(1, 5.0),
        21: entry(20),
        30: entry(1, 9.0),
    }
    seen = {20: entry(10, 5.0), 30: entry(10, 8.0)}  # 30 is another process by now
    assert belonging(table, {}).keys() == {10, 11, 12}
    assert belonging(table, seen).keys() == {10, 11, 12, 20, 21}


def test_ends_orphans_that_ignore_sigterm_and_nobody_else(tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
    with Processes({}, tmp_path, grace=1.0) as processes:
        processes.start("sleeper", [sys.executable, "-c", SLEEP], tmp_path)
        assert processes.call([sys.executable, "-c", ORPHAN], tmp_path, capture=False).returncode == 0
        wait_for(processes.token, 2)
    assert not any(e.marked for e in snapshot(processes.token).values())
    assert stranger.poll() is None


def test_environment_reaches_background_processes(tmp_path: Path) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ['COLOUR'], os.environ['SHAPE'])"]
    with Processes({"COLOUR": "red", "SHAPE": "round"}, tmp_path) as processes:
        assert processes.call(show, tmp_path).stdout == "red round\n"
        processes.start("show", show, tmp_path, {"SHAPE": "square"})
        while "square" not in processes.tail("show"):
            time.sleep(0.05)
    assert (tmp_path / "show.log").read_text() == "red square\n"


def test_a_background_process_that_ended_is_reported_with_its_log(tmp_path: Path) -> None:
    with Processes({}, tmp_path) as processes:
        processes.start("server", [sys.executable, "-c", "import sys; print('no such port'); sys.exit(3)"], tmp_path)
        wait_for(processes.token, 0)
        with pytest.raises(RunError, match=r"server ended with status 3.*\nno such port"):
            processes.require_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_and_shows_in_the_status(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
import signal, sys
from pathlib import Path
from fedgp_flower.deploy.processes import Processes, interruptible
signal.signal({int(number)}, signal.SIG_DFL)  # whoever runs the tests in the background may have told us to ignore it
with interruptible(), Processes({{}}, Path({str(tmp_path)!r})) as processes:
    processes.start("sleeper", [sys.executable, "-c", "{SLEEP}"], Path("/"))
    print(processes.token, flush=True)
    processes.call([sys.executable, "-c", "{SLEEP}"], Path("/"))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        token = launcher.stdout.readline().decode().strip()
        wait_for(token, 2)
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == 128 + number
    assert not any(e.marked for e in snapshot(token).values())
